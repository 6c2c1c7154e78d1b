"""The HTML of a report, a function of its contents alone. Every text in it is escaped."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .charts import draw_chart, draw_histogram, series_color
from .content import Report

if TYPE_CHECKING:
    from PIL.Image import Image

_FOLDER = Path(__file__).parent
_LARGEST = 160  # pixels of a side: twice the size on the page
_SMALL = 64  # pixels; not larger ones stay exact
_JPEG_QUALITY = 85
_TWO_AND_THREE = 5  # charts: two in the first row, three in the second


def render(report: Report) -> str:
    """Return the report as one HTML file, which needs no other file, no network and no script."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    evidence = report.evidence
    has_similarities = bool(len(evidence.positives) or len(evidence.negatives))
    changed = [setting for setting in report.settings if setting.value != setting.default]
    values: dict[str, Any] = {
        "report": report,
        "style": Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        "charts": [
            (chart, Markup(draw_chart(chart, small=place >= 2 and len(report.curves) == _TWO_AND_THREE)))
            for place, chart in enumerate(report.curves)
        ],
        "histogram": Markup(draw_histogram(evidence.positives, evidence.negatives)) if has_similarities else None,
        "changed": changed,
        "others": [setting for setting in report.settings if setting.value == setting.default],
    }
    helpers = {"series_color": series_color, "data_uri": data_uri, "is_coarse": is_coarse}
    return environment.get_template("page.html").render(**values, **helpers)


def data_uri(picture: Image) -> str:
    """Return a picture as a data URI, scaled to at most 160 pixels: PNG if it is small or transparent, else JPEG."""
    small = picture.copy()
    if small.mode not in ("L", "RGB", "RGBA"):
        small = small.convert("RGBA" if "transparency" in small.info or small.mode in ("PA", "LA") else "RGB")
    small.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    exact = small.mode == "RGBA" or max(small.size) <= _SMALL
    if exact:
        small.save(file, "PNG", optimize=True)
    else:
        small.save(file, "JPEG", quality=_JPEG_QUALITY)
    kind = "png" if exact else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def is_coarse(picture: Image) -> bool:
    """Return whether a picture has so few pixels that a browser should not smooth them."""
    return max(picture.size) <= _SMALL

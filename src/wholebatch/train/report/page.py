"""The HTML of a report, a function of its contents alone. Every text in it is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .charts import draw_chart, draw_histogram, series_color
from .content import Report
from .images import data_uri, is_coarse

_FOLDER = Path(__file__).parent
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

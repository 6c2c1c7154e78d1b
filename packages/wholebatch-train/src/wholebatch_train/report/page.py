"""The contents of a report, and its HTML: a function of these alone, in which every text is escaped.

Charts are inline SVG, drawn by matplotlib. Their colors are variables of the page's CSS, so they suit its mode.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor


class Item(NamedTuple):
    """A query or an answer."""

    text: str = ""
    picture: Image.Image | None = None


class Candidate(NamedTuple):
    """An answer that the model gave."""

    item: Item
    similarity: float | None
    """None: not known."""
    right: bool


class Query(NamedTuple):
    """A query with its best candidates, the best one first."""

    item: Item
    candidates: Sequence[Candidate]
    rank: int | None
    """Of the best right answer, 1 if it comes first. None: below the candidates."""
    answer: Candidate | None = None
    """The best right answer, if none is among the candidates."""


class Gallery(NamedTuple):
    """Queries side by side, under a title."""

    title: str
    note: str
    queries: Sequence[Query]
    has_answers: bool = True
    """Whether it is known which candidates are right."""


class Line(NamedTuple):
    """A curve over the steps; a value that is None is left out."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]


class Chart(NamedTuple):
    """Curves in one pair of axes."""

    title: str
    lines: Sequence[Line]
    """At most six."""
    limits: tuple[float | None, float | None] = (None, None)
    """Of the vertical axis; None: those of the values."""
    note: str = ""
    marks: Sequence[float] = ()
    """Steps to mark by a vertical line."""


class Table(NamedTuple):
    """Rows of text; the first column names them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Fact(NamedTuple):
    """A figure at the top of the report."""

    name: str
    value: str
    note: str = ""


class Setting(NamedTuple):
    """An option of the run."""

    name: str
    value: str
    default: str


class Evidence(NamedTuple):
    """The examples in a report and their similarities, as a task finds them."""

    galleries: Sequence[Gallery] = ()
    """Sheets of queries, such as examples drawn at random and the worst mistakes."""
    positives: Tensor = torch.empty(0)
    """(p,), similarities of what belongs together."""
    negatives: Tensor = torch.empty(0)
    """(n,), similarities of what does not."""
    note: str = ""
    """How the two were chosen."""


class Report(NamedTuple):
    """Everything that a page about a run, or about a search, shows; `page.render` makes the HTML from it alone."""

    title: str
    subtitle: str
    facts: Sequence[Fact] = ()
    """Figures at the top; the first is the headline."""
    table: Table | None = None
    """The figures of the test set, beside chance."""
    curves: Sequence[Chart] = ()
    evidence: Evidence = Evidence()
    plan: str = ""
    """A line about the planned cost of the loss; "": none."""
    audit: str = ""
    starts: Table | None = None
    settings: Sequence[Setting] = ()
    """All options; those that differ from the defaults are shown first."""
    versions: Sequence[tuple[str, str]] = ()


_FOLDER = Path(__file__).parent
_LARGEST = 160  # pixels of a side: twice the size on the page
_SMALL = 64  # pixels; not larger ones stay exact
_JPEG_QUALITY = 85
_TWO_AND_THREE = 5  # charts: two in the first row, three in the second
_WIDTH, _SMALL_WIDTH, _HEIGHT = 5.4, 3.7, 2.3  # inches of 72 units in the SVG
_POINTS = 400  # of a line; more are drawn as means, and a band from the smallest to the largest
_BINS = 60
_INK, _GRID, _MARK = "#00000a", "#00000b", "#00000c"  # become variables
_SERIES = tuple(f"#00001{digit}" for digit in range(6))
_VARIABLES = {_INK: "--muted", _GRID: "--grid", _MARK: "--faint"} | {
    color: f"--series-{number}" for number, color in enumerate(_SERIES)
}
_FONT_SIZE = 9.5


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


def data_uri(picture: Image.Image) -> str:
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


def is_coarse(picture: Image.Image) -> bool:
    """Return whether a picture has so few pixels that a browser should not smooth them."""
    return max(picture.size) <= _SMALL


def draw_chart(chart: Chart, *, small: bool = False) -> str:
    """Return the chart's axes and lines as an SVG element; a `small` one suits a third of the page's width."""
    figure, axes = _axes(_SMALL_WIDTH if small else _WIDTH)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=4 if small else 7)
    for mark in chart.marks:
        axes.axvline(mark, color=_MARK, linewidth=1, linestyle=(0, (3, 3)))
    last = 1.0
    for line, color in zip(chart.lines, _SERIES, strict=False):
        points = [(x, y) for x, y in zip(line.steps, line.values, strict=True) if y is not None]
        if not points:
            continue
        last = max(last, points[-1][0])
        steps, values = (torch.tensor(each, dtype=torch.float64) for each in zip(*points, strict=True))
        dotted = "o" if len(points) <= 30 else None
        if len(points) > _POINTS:
            steps, values, low, high = _bin_curve(steps, values)
            axes.fill_between(steps.tolist(), low.tolist(), high.tolist(), color=color, alpha=0.18, linewidth=0)
        axes.plot(steps.tolist(), values.tolist(), color=color, linewidth=1.5, marker=dotted, markersize=3.5)
    axes.set_xlim(0, last)
    axes.set_ylim(*chart.limits)
    return _svg(figure, chart.title)


def draw_histogram(positives: Tensor, negatives: Tensor) -> str:
    """Return a histogram of two sets of similarities, each scaled to its own number, as an SVG element."""
    figure, axes = _axes(1.3 * _WIDTH)
    both = torch.cat([positives, negatives]).double()
    both = both[both.isfinite()]
    low, high = (both.min().item(), both.max().item()) if len(both) else (-1.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64).tolist()
    for values, color in ((negatives, _SERIES[1]), (positives, _SERIES[0])):
        values = values[values.isfinite()].double()
        counts = torch.histc(values, _BINS, low, high) / max(1, len(values))
        axes.stairs(counts.tolist(), edges, color=color, fill=True, alpha=0.35, linewidth=0)
        axes.stairs(counts.tolist(), edges, color=color, linewidth=1.2)
    axes.set_xlim(low, high)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return _svg(figure, "similarities of what belongs together and of what does not")


def series_color(number: int) -> str:
    return f"var(--series-{number % len(_SERIES)})"


def _axes(width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, _HEIGHT))
    figure.patch.set_visible(False)
    left, bottom, rest = 0.6 / width, 0.32 / _HEIGHT, 0.12  # inches, wide enough for the labels of the ticks
    axes = figure.add_axes((left, bottom, 1 - left - rest / width, 1 - bottom - rest / _HEIGHT))
    axes.patch.set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.tick_params(length=0, labelcolor=_INK, labelsize=_FONT_SIZE, pad=5)
    axes.margins(y=0.08)
    axes.ticklabel_format(useOffset=False)
    return figure, axes


def _bin_curve(steps: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the last step, the mean, the smallest and the largest value of each of `_POINTS` parts."""
    parts = [
        part for part in zip(steps.tensor_split(_POINTS), values.tensor_split(_POINTS), strict=True) if len(part[0])
    ]
    return (
        torch.stack([part_steps[-1] for part_steps, _ in parts]),
        torch.stack([part.mean() for _, part in parts]),
        torch.stack([part.min() for _, part in parts]),
        torch.stack([part.max() for _, part in parts]),
    )


def _svg(figure: Any, label: str) -> str:
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # it would hold for the page
    text = re.sub(r' id="[a-z0-9.]+_\d+"', "", text)  # several charts would share these
    text = re.sub(r" font-family: [^;]*;", "", text)  # that of the page
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), text)  # but no number on an axis
    text = re.sub(r"\n *", "\n", text.replace("xlink:href", "href").replace("<g/>", ""))
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">{rest}'

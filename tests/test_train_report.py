"""The report of a run: one HTML file that shows every text as text, needs nothing else, and says what happened."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from glyph_files import write_pairs
from PIL import Image
from train_runs import options

from wholebatch.__main__ import main
from wholebatch.app.tensors import same_places
from wholebatch_train.data.pairs import Stated
from wholebatch_train.report.evidence import classes_evidence, search, search_evidence
from wholebatch_train.report.page import (
    Candidate,
    Chart,
    Evidence,
    Fact,
    Gallery,
    Item,
    Line,
    Query,
    Report,
    Setting,
    Table,
    data_uri,
    draw_chart,
    draw_histogram,
    render,
)

HOSTILE = "<script>alert('x')</script> & \"quoted\" <img src=x onerror=alert(1)> {{ 7 * 7 }} {% endfor %} $x_1$"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The elements, texts and attributes of a page; every element must be closed."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.attributes, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def report_with(text, picture=None):
    item = Item(text, picture)
    query = Query(item, [Candidate(item, 0.5, False), Candidate(Item(text), None, True)], 2)
    missed = Query(Item("", picture), [Candidate(item, 0.5, False)], 17, Candidate(item, 0.1, True))
    return Report(
        title=text,
        subtitle=text,
        facts=[Fact(text, text, text), Fact("steps", "12")],
        table=Table(text, ["", text], [[text, text], ["chance", "0.1"]]),
        curves=[Chart(text, [Line(text, [1, 2], [0.1, None]), Line("b", [1, 2], [1.0, 2.0])], note=text, marks=[1])],
        evidence=Evidence([Gallery(text, text, [query, missed])], torch.rand(9), torch.rand(30), text),
        plan=text,
        audit=text,
        starts=Table("", [text], [[text]]),
        settings=[Setting(text, text, "1"), Setting("steps", "300", "300")],
        versions=[(text, text)],
    )


def test_every_text_is_shown_as_text():
    html = render(report_with(HOSTILE, Image.new("RGB", (4, 4))))
    page = Page(html)
    assert "script" not in page.tags
    assert not {"x", "alert(1)"} & {value for _, value in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.texts.count(HOSTILE) >= 18, "in every place that takes a text"
    assert ("alt", HOSTILE) in page.attributes
    assert ("aria-label", HOSTILE) in page.attributes
    planted = Page(html.replace("&lt;script&gt;", "<script>", 1).replace("&lt;/script&gt;", "</script>", 1))
    assert "script" in planted.tags, "the check sees a text that is not escaped"


def test_the_page_needs_nothing_else():
    page = Page(render(report_with("cat", Image.new("RGB", (100, 80)))))
    assert not {"script", "link", "iframe", "object"} & {*page.tags}
    sources = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data")]
    assert sources
    assert all(value.startswith(("data:image/", "#")) for value in sources), sources
    assert not re.search(r"https?:|@import|url\((?!#)", render(report_with("cat")))
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes


def test_the_page_is_a_function_of_its_contents():
    torch.manual_seed(0)
    report = report_with("cat", Image.new("L", (8, 8), 77))
    assert render(report) == render(report)


def test_texts_alone_and_little_else_make_a_report():
    report = Report("a", "b", [], Table("c", [], []), settings=[Setting("steps", "1", "1")])
    assert "All options have their defaults" in render(report)
    pairs = ("questions", torch.eye(3), lambda row: Item(f"question {row}"))
    answers = ("answers", torch.eye(3)[[0, 2, 1]], lambda row: Item(f"answer {row}"))
    evidence = search_evidence(pairs, answers, one_to_one(3))
    html = render(Report("a", "b", [], Table("c", [], []), evidence=evidence))
    assert "Questions → answers" in html
    assert "img" not in Page(html).tags


def test_options_that_differ_come_first():
    html = render(report_with("seed"))
    assert html.index('class="default">1<') < html.index("1 options with their defaults") < html.rindex(">steps<")


# The evidence.
def axes(*angles):
    angles = torch.tensor(angles)
    return torch.stack([angles.cos(), angles.sin()], 1)


def one_to_one(count):
    return Stated((torch.arange(count), torch.arange(count)), same_places(count))


def test_a_search_by_hand():
    """Query 1 finds candidate 0 first; query 2 is opposite to its answer, which comes last."""
    queries, candidates, right = axes(0.0, 0.1, 3.0), axes(0.0, 0.3, 0.0), same_places(3)
    of = (lambda i: Item(f"q{i}"), lambda i: Item(f"c{i}"))
    first, second, third = search(queries, candidates, right, [0, 1, 2], *of)
    assert first.rank == 2, "candidate 2 is as similar, and ties count against the query"
    assert [each.item.text for each in second.candidates][-1] == "c1"
    assert [each.right for each in second.candidates] == [False, False, True]
    assert second.rank == 3
    assert second.candidates[2].similarity == pytest.approx(torch.tensor(0.2).cos().item())
    assert third.item.text == "q2"
    assert third.candidates[0].item.text == "c1", "cos(2.7) is the least negative"


def test_a_search_with_several_right_answers():
    """The best of a query's right answers counts; the other right ones are marked, and are no mistakes before it."""
    queries, candidates = axes(0.0, 3.0), axes(0.5, 0.1, 0.2, 3.1, 0.3, 0.4, 0.6)
    right = torch.tensor([[0, 0, 1], [0, 4, 6]])
    first, second = search(queries, candidates, right, [0, 1], lambda i: Item(f"q{i}"), lambda i: Item(f"c{i}"))
    assert [each.item.text for each in first.candidates] == ["c1", "c2", "c4", "c5", "c0"]
    assert [each.right for each in first.candidates] == [False, False, True, False, True]
    assert (first.rank, first.answer) == (3, None)
    assert (second.rank, second.answer) == (2, None)
    (far,) = search(queries, candidates, torch.tensor([[0, 0], [3, 6]]), [0], *[lambda i: Item(str(i))] * 2)
    assert (far.rank, far.answer.item.text, far.answer.right) == (6, "6", True)
    stated = Stated((torch.arange(2), torch.arange(7)), right)
    sides = (("x", each, lambda i: Item(str(i))) for each in (queries, candidates))
    evidence = search_evidence(*sides, stated, both_ways=False)
    assert torch.allclose(evidence.positives, torch.tensor([0.5, 0.3, 2.4]).cos())
    assert len(evidence.negatives) == 2 * 7 - 3


def test_the_sheet_and_the_worst_mistakes():
    """Row 7 of 40 is swapped with its opposite: its answer has the last rank, and leads the worst mistakes."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(40, 64), dim=1)
    y = torch.nn.functional.normalize(x + 0.2 * torch.randn(40, 64) / 8, dim=1)
    y[7] = -x[7]
    sides = (("images", x, lambda i: Item(f"x{i}")), ("texts", y, lambda i: Item(f"y{i}")))
    evidence = search_evidence(*sides, one_to_one(40))
    titles = [gallery.title for gallery in evidence.galleries]
    assert titles == ["Images → texts", "Worst mistakes, images → texts",
                      "Texts → images", "Worst mistakes, texts → images"]  # fmt: skip
    sheet, worst, *_ = evidence.galleries
    assert len(sheet.queries) == 12
    assert all(query.candidates[0].right == (query.rank == 1) for query in sheet.queries)
    assert [query.item.text for query in worst.queries] == ["x7"]
    assert (worst.queries[0].rank, worst.queries[0].answer.item.text) == (40, "y7")
    assert torch.equal(evidence.positives, (x * y).sum(1))
    assert len(evidence.negatives) == 40 * 39
    assert "all 1,560 pairs that do not" in evidence.note
    assert evidence.negatives.max() < evidence.positives.sort().values[1], "no pair of the diagonal is among them"


def test_pairs_of_many_rows_are_a_sample_without_the_diagonal():
    x = torch.eye(3000)[:, :3000]
    sides = (("a", x, lambda i: Item(str(i))), ("b", x, lambda i: Item(str(i))))
    evidence = search_evidence(*sides, one_to_one(3000))
    assert 150_000 < len(evidence.negatives) <= 448**2
    assert not evidence.negatives.any()


def test_mistakes_of_a_classifier():
    labels = torch.tensor([0, 0, 1, 1, 2])
    found = torch.tensor([[0, 1], [1, 0], [1, 2], [0, 2], [2, 1]])
    similarities = torch.tensor([[0.9, 0.1]] * 5)
    embeddings = torch.nn.functional.normalize(torch.randn(5, 8), dim=1)
    evidence = classes_evidence(
        embeddings, labels, found, similarities, [3, 1], lambda i: Item(f"image {i}"), lambda c: Item(f"class {c}")
    )
    sheet, surest, alike = evidence.galleries
    assert "comes first for 3 of all" in sheet.note
    assert [query.item.text for query in surest.queries] == ["image 3", "image 1"]
    assert surest.queries[0].rank is None, "class 1 is not among the two best of image 3"
    assert surest.queries[0].answer.item.text == "class 1"
    assert surest.queries[1].rank == 2
    assert [query.item.text for query in alike.queries] == ["class 0", "class 1"]
    assert [(each.item.text, each.similarity, each.right) for each in alike.queries[1].candidates] == [
        ("class 0", 0.5, False), ("class 1", 0.5, True),
    ]  # fmt: skip
    assert len(evidence.positives) == 2
    assert "missed" in render(Report("a", "b", [], Table("c", [], []), evidence=evidence))


# Charts and pictures.
def labels_of(svg):
    return re.findall(r">([^<>]+)</text>", svg)


def test_axes_have_the_numbers_of_small_values_and_no_offset():
    small = draw_chart(Chart("rate", [Line("rate", [1, 2, 3], [0.0, 0.0005, 0.001])]))
    assert "0.0002" in labels_of(small)
    shifted = labels_of(draw_chart(Chart("scale", [Line("scale", [1, 2], [14.2001, 14.2004])])))
    assert not any(label.startswith("+") for label in shifted)


def test_a_long_curve_is_drawn_by_parts():
    steps = list(range(1, 100_001))
    values = torch.rand(100_000).tolist()
    svg = draw_chart(Chart("loss", [Line("loss", steps, values)]))
    assert len(svg) < 60_000
    flat = re.search(r'<path d="([^"]*)"[^>]*stroke: var\(--series-0\); stroke-width: 1.5', svg)
    assert flat, "the mean is a line"
    assert "fill: var(--series-0)" in svg, "smallest to largest is a band"


@pytest.mark.parametrize(
    ("positives", "negatives"),
    [([], [0.1]), ([0.5], [0.5, 0.5]), ([float("nan"), 0.2], [float("inf"), 0.1]), ([float("nan")], [])],
)
def test_histograms_of_few_or_no_numbers(positives, negatives):
    assert draw_histogram(torch.tensor(positives), torch.tensor(negatives)).startswith("<svg viewBox=")


def opened(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


def test_pictures_in_the_page():
    small = opened(data_uri(Image.frombytes("L", (16, 16), bytes(range(256)))))
    assert small.mode == "L"
    assert small.tobytes() == bytes(range(256)), "every pixel is exact"
    large = opened(data_uri(Image.new("RGB", (200, 300), (200, 30, 90))))
    assert (large.format, large.size) == ("JPEG", (107, 160))
    assert max(abs(a - b) for a, b in zip(large.getpixel((50, 80)), (200, 30, 90), strict=True)) <= 4
    for mode in ("P", "1", "LA", "RGBA", "CMYK", "I;16", "F"):
        assert data_uri(Image.new(mode, (100, 100))).startswith("data:image/")


# Whole runs.
def test_the_report_of_a_search_has_its_figures(tmp_path):
    data = write_pairs(tmp_path, "pairs.jsonl")
    lines = data.read_text().splitlines()
    data.write_text("\n".join(line.replace("GREEK", "<b>GREEK</b>") for line in lines))
    run = tmp_path / "run"
    assert main(["train", *options(data, run, "--seed", "3", "--keep-best")]) == 0
    html = (run / "report.html").read_text()
    page, report = Page(html), json.loads((run / "report.json").read_text())
    assert "retrieve · pairs.jsonl" in page.texts
    assert f"{report['image_to_text']['recall@1']:.4f}" in page.texts
    assert f"{report['image_to_text']['chance']['recall@1']:.4f}" in page.texts
    assert any(text.startswith("plan: clip on 1 process") for text in page.texts)
    assert any(text.startswith("audit: on 1 process the gradient") for text in page.texts)
    assert "best validation" in page.texts
    assert any("<b>GREEK</b>" in text for text in page.texts)
    assert "b" in page.tags, "of the page itself"
    assert page.tags.count("article") == 48
    assert page.tags.count("svg") == 6
    assert html.index(">seed<") < html.index("options with their defaults") < html.index(">weight-decay<")
    assert "device of rank 0" in page.texts
    assert (run / "best.safetensors").exists()
    assert main(["train", "--resume", str(run), "--until-step", "14", "--device", "cpu"]) == 0
    later = Page((run / "report.html").read_text())
    assert any(text.startswith("audit: on 1 process the gradient") for text in later.texts), "that of the first start"
    assert "14" in later.texts
    assert "12" in page.texts, "steps as they were planned"
    assert "12 planned, extended after step 12 to 14" in later.texts, "in the configuration"
    assert "of 40 examples; 12 planned" in later.texts, "beside the number of steps"


def test_the_report_of_a_classifier_has_its_look_alikes(tmp_path):
    data = write_pairs(tmp_path, faces=("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold"))
    run = tmp_path / "run"
    assert main(["train", *options(data, run, "--task", "identify", "--no-audit")]) == 0
    page = Page((run / "report.html").read_text())
    for title in ("Images → classes", "Surest mistakes", "Look-alikes", "Similarities", "top-1 accuracy"):
        assert title in page.texts
    assert page.tags.count("article") == 36

"""Tables of audit, plan and bench are readable: words stay whole at any width, and in a file each row is one line."""

from functools import partial

import pytest
from rich.console import Console

import wholebatch as wb
from wholebatch._cli import display
from wholebatch.auditing.causes import GATHER_WITHOUT_GRADIENT
from wholebatch.auditing.command import print_report, print_summaries
from wholebatch.auditing.compare import Comparison
from wholebatch.auditing.report import Finding, Report, Row, Summary
from wholebatch.bench import run_gather, run_loss
from wholebatch.bench.gather import ALL_REDUCE, REDUCE_SCATTER, STRATEGIES
from wholebatch.bench.gather import Row as GatherRow
from wholebatch.bench.loss import Row as LossRow
from wholebatch.planning.check import Measured
from wholebatch.planning.command import print_measured, print_plan
from wholebatch.planning.shapes import Shapes


def audit():
    groups = ("image_encoder.layers.attention", "text_encoder.layers.attention", "logit_scale")
    rows = tuple(
        Row(counts, "parameters", group, Comparison(0.5, 0.999, 0.5, 1e-9), "wrong direction")
        for counts in ((12,), (6, 6), (2, 4, 6))
        for group in groups
    )
    finding = Finding(GATHER_WITHOUT_GRADIENT, (6, 6), groups, "losses 1.5 and 1.5, L = 1.5")
    print_report(Report("my_project:clip", rows, (finding,), ("a note",), {}, "float64", 1e-5, 1.0, {}))
    return ["text_encoder.layers.attention", "wrong", "direction", "0.999"]


def presets():
    summaries = [
        ("open_clip_torch 3.2.0", Summary("ClipLoss, --local-loss --gather-with-grad", "exact", "exact", "", True)),
        ("open_clip_torch 3.2.0", Summary("the same, --accum-freq 4", "exact", "x 4", "scale-times-steps", False)),
        ("lightly 1.5.23", Summary("DCLWLoss", "wrong direction, cosine from 0.99", "-", "local-statistics", False)),
    ]
    print_summaries(summaries)
    return ["DCLWLoss", "wrong", "direction,", "local-statistics"]


def plan():
    found = wb.plan(batch_size=65536, embedding_size=768, ranks=8, device="h200", encoder_bytes=40_000_000)
    print_plan(found)
    return ["gather", "kept,", "chunks", "twice", "chosen", str(found.chosen.largest_batch)]


def measured():
    shapes = Shapes("clip", 65536, 768, 2)
    print_measured([Measured(shapes, "ring", 1207959552, 10**9, 10**9, 0.5, seconds) for seconds in (0.4, 0.6)])
    return ["65536", "ring", "1207959552", "fastest"]


def bench_loss():
    sizes = (2, 1, 8192, 512, "float32", 2.0, "ring", "cpu", "auto")
    methods = ("wholebatch keep 2 bytes/entry ring", "pytorch-metric-learning NTXentLoss")
    run_loss.print_table([LossRow("clip", name, "package 1", *sizes, 1542.3, 1.0, 0.2, 38.5) for name in methods])
    return ["pytorch-metric-learning", "NTXentLoss", "1542"]


def bench_gather():
    sizes = (128, 512, 2048, 8192)
    methods = (*STRATEGIES, REDUCE_SCATTER, ALL_REDUCE)
    run_gather.print_table("gloo", [GatherRow(m, 2, d, 128, 1234.5, 5e6) for m in methods for d in sizes])
    return ["reduce_scatter", "1234.50", "(5.00)"]


TABLES = [audit, presets, plan, measured, bench_loss, bench_gather]


@pytest.mark.parametrize("width", [30, 60, 80, 120])
@pytest.mark.parametrize("table", TABLES)
def test_a_terminal_gets_whole_words_and_lines_that_fit(table, width, monkeypatch, capsys):
    narrow = partial(Console, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(display, "Console", narrow)
    words = table()
    printed = capsys.readouterr().out
    assert set(words) <= set(printed.split())
    rule = next((line for line in printed.splitlines() if line and set(line) == {"-"}), None)
    if rule is None:
        assert width < (120 if table is measured else 80), "a table, and no blocks, if there is room"
    else:
        assert len(rule) <= width


@pytest.mark.parametrize("table", TABLES)
def test_a_file_gets_one_line_per_row(table, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")  # the width does not apply to a file
    words = table()
    printed = capsys.readouterr().out
    assert any(set(words) <= set(line.split()) for line in printed.splitlines())

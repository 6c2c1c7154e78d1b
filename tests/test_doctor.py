"""`wholebatch doctor`: what it prints with and without kernels, for a fault, and for mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wholebatch import kernels
from wholebatch.doctor import cli, report
from wholebatch.kernels import choice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")
LOSSES = ("clip", "nt_xent", "sup_con", "siglip", "matryoshka", "partial_fc", "max_sim")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name, value in (("_made", {}), ("_warned", set()), ("_off", [])):
        monkeypatch.setattr(choice, name, value)


def run(*arguments, interpret="0"):
    command = [sys.executable, "-W", "error", "-m", "wholebatch", "doctor", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_without_kernels_it_says_what_they_need():
    done = run()
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    assert "kernel='triton'" in done.stdout
    assert "clip" not in done.stdout
    found = json.loads(run("--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["rows"] == []
    assert found["failed"] is False


def test_each_loss_is_checked_in_each_precision(capsys):
    pytest.importorskip("triton")
    assert cli.main(["--json", "--rows", "40", "--embedding-size", "16"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["loss"], row["dtype"]) for row in rows] == [
        (loss, dtype) for loss in LOSSES for dtype in ("bfloat16", "float16", "float32")
    ]
    unsupported = [(row["loss"], row["dtype"]) for row in rows if row["result"] != "kernels"]
    assert unsupported == [("matryoshka", "float16")]
    assert {name.removesuffix("_by_pointers") for row in rows for name in row["checked"]} == {
        "tile_sums", "tile_gradient", "tile_sigmoid", "nested_sums", "nested_gradient", "token_maxima",
        "token_sums", "query_gradient", "document_gradient",
    }  # fmt: skip


@pytest.mark.planted
def test_a_fault_is_in_the_report_and_in_the_exit_code(capsys, monkeypatch):
    pytest.importorskip("triton")
    run_kernel = kernels.launch.run

    def fail(kernel, *of, **more):
        if "sigmoid" in kernel.fn.__name__ if hasattr(kernel, "fn") else "sigmoid" in str(kernel):
            raise RuntimeError("ptxas fatal: no such architecture")
        run_kernel(kernel, *of, **more)

    monkeypatch.setattr(kernels.launch, "run", fail)
    two = {name: loss for name, loss in report._losses().items() if name in ("clip", "siglip")}
    monkeypatch.setattr(report, "_losses", lambda: two)
    assert cli.main(["--rows", "40", "--embedding-size", "16"]) == 1
    text = capsys.readouterr().out
    assert "siglip, bfloat16: siglip_loss: check of kernels: kernel='triton' failed its check on rank 0" in text
    assert "ptxas fatal: no such architecture" in text
    assert "clip, bfloat16: " not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1"], "--rows must be at least 2, got 1"),
        (["--embedding-size", "0"], "--embedding-size must be at least 4, got 0"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'; see wholebatch doctor --help"),
        (["--row", "9"], "there is no option --row; see wholebatch doctor --help; did you mean --rows?"),
        (["--device", "tpu"], "there is no option --device; see wholebatch doctor --help"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"wholebatch doctor: error: {message}\n"


def test_the_documentation_shows_its_first_lines():
    text = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    shown = text.split("$ wholebatch doctor\n")[1].split("...")[0].splitlines()
    printed = str(report.Report(report._versions(), {}, {}, "", ())).splitlines()
    assert all(any(line.split()[0] == other.split()[0] for other in printed) for line in shown)

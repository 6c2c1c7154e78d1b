"""The command for a GPU: a stage or a peer that fails or is late costs itself, and the figures that it checks."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import wholebatch as wb
from wholebatch.bench.peers import Peer
from wholebatch.planning.given import given
from wholebatch.testing import RankError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
STAGES = BENCHMARKS / "gpu_stages.py"
sys.path.append(str(BENCHMARKS))  # also in the processes of peers and ranks

import gpu_stages  # noqa: E402
from gpu import cases, peers, plan, report, two_ranks  # noqa: E402
from gpu.device import interprets  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stages are small on a CPU only")


def run(folder, *arguments):
    command = [sys.executable, str(STAGES), "--out", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def results(folder, stage):
    return json.loads((folder / f"{stage}.json").read_text())["results"]


def test_stages_without_a_gpu_pass_or_say_what_they_skip(tmp_path):
    names = ["about", "sanitizer", "floors", "correctness", "two_ranks", "late_interaction"]
    done = run(tmp_path, "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("about", "floors", "correctness", "two_ranks", "late_interaction"):
        assert f"| {name} | passed |" in done.stdout
    assert "| sanitizer | skipped: no GPU |" in done.stdout
    assert results(tmp_path, "about")[0]["torch"] == torch.__version__
    assert results(tmp_path, "floors")[0]["tflops_of_S"] > 0
    found = results(tmp_path, "two_ranks")
    assert {row["backend"] for row in found} == {"gloo"}
    assert {row["case"] for row in found} == {"collective", "loss", "PartialFC"}
    assert {tuple(row["rows"]) for row in found} == {(35, 35), (44, 26)}
    assert {row["operation"] for row in found if row["case"] == "collective"} >= {
        "all_gather", "reduce_scatter", "all_to_all",
    }  # fmt: skip
    assert {"collective", "loss", "several tiles", "PartialFC", "GradCache"} == {
        row["case"] for row in results(tmp_path, "correctness")
    }
    found = results(tmp_path, "late_interaction")
    ours = {f"kernel={kernel}, memory={memory}" for kernel in ("torch", "triton") for memory in ("auto", "flat")}
    methods = (
        {"dense", "kernel alone", *ours} if interprets() else {of for of in (*ours, "dense") if "triton" not in of}
    )
    assert {row["method"] for row in found} == methods
    assert all(row["seconds"] > 0 for row in found)
    assert all(row["error_of_loss"] < 1e-3 for row in found if row["method"] != "kernel alone")
    text = (tmp_path / "report.md").read_text()
    assert "times mean nothing" in text
    assert "tflops_of_S" in text


def test_predictions_stand_beside_measurements(monkeypatch):
    def given_rates(losses, ranks, *, dtype, device):  # a calibration takes long on a busy machine
        assert (losses, ranks, device) == (("clip",), 1, "cpu")
        return given("cpu", dtype)

    monkeypatch.setattr(plan, "rates_here", given_rates)
    rows = [*plan.plan()]
    assert len({row["memory"] for row in rows}) == len(rows) > 1
    for row in rows:
        assert (row["loss"], row["batch_size"], row["dtype"]) == ("clip", 512, "float32")
        assert row["error_of_seconds"] == row["predicted_seconds"] / row["seconds"] - 1
        assert row["predicted_bytes"] > 4 * 512**2  # a tile


def test_a_stage_that_hangs_costs_itself_and_what_it_checks(tmp_path):
    done = run(tmp_path, "--only", "precision", "losses", "sanitizer", "--limit", "0.01")
    assert done.returncode == 1
    assert "| precision | FAILED: longer than 0 s |" in done.stdout
    assert "| losses | skipped: precision did not pass |" in done.stdout
    assert "| sanitizer | FAILED" in done.stdout  # it was started all the same
    assert (tmp_path / "report.md").exists()


def test_stages_without_time_are_skipped(tmp_path):
    done = run(tmp_path, "--only", "about", "--total", "0")
    assert "| about | skipped: the 0 s of all stages are used up" in done.stdout


def test_a_stage_that_fails_keeps_its_rows(tmp_path, monkeypatch):
    def rows():
        yield {"size": 1, "seconds": 0.5}
        raise RuntimeError("illegal access")

    monkeypatch.setitem(gpu_stages.STAGES, "floors", gpu_stages.Stage(rows))
    with pytest.raises(RuntimeError, match="illegal access"):
        gpu_stages.run_stage("floors", tmp_path)
    assert results(tmp_path, "floors") == [{"size": 1, "seconds": 0.5}]
    record = json.loads((tmp_path / "floors.json").read_text())
    assert record["failed"] == "RuntimeError: illegal access"
    assert report.outcome(1, record, "a\nRuntimeError: illegal access\n") == "FAILED: 1; RuntimeError: illegal access"


def right(_comm, _scale):
    return lambda x, y, scale, _bias: wb.functional.clip_loss(x, y, scale)


def wrong(_comm, _scale):
    return lambda x, y, scale, _bias: 2 * wb.functional.clip_loss(x, y, scale)


def broken(_comm, _scale):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def missing(_comm, _scale):
    raise ImportError("this torch has no such loss")


def dying(_comm, _scale):
    os._exit(3)


def hanging(_comm, _scale):
    time.sleep(600)


def test_a_peer_that_fails_loses_no_figure_of_another():
    builds = (broken, dying, wrong, missing, right)
    theirs = [Peer("torch", build.__name__, build) for build in builds] + [Peer("no-such-library", "absent", right)]
    theirs += [Peer("torch", "on a GPU", right, on_cpu=False), Peer("torch", "of 256", right, multiple=256)]
    rows = [*peers.peers({"clip": theirs}, rows=32, size=16)]
    of = {row["library"]: row for row in rows}
    for name in ("wholebatch", "right"):  # the latter comes after all that fail
        figures = [row for row in rows if row["library"] == name]
        assert [row["features"] for row in figures] == ["float32", "bfloat16"]
        assert all(row["seconds"] > 0 and row["error_of_loss"] < 2e-2 and "error" not in row for row in figures)
    assert of["broken"]["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert of["dying"]["error"] == "died silently, exit code 3"
    assert of["wrong"]["error"].startswith("wrong value: ")
    assert of["missing"]["skipped"] == "this torch has no such loss"
    assert of["absent"]["skipped"] == "not installed"
    assert of["on a GPU"]["skipped"] == "needs a GPU"
    assert of["of 256"]["skipped"] == "needs an embedding size that 256 divides"
    assert not any("seconds" in row for row in rows if "error" in row or "skipped" in row)
    text = report.outcome(0, {"results": rows}, "")
    assert text == "passed; of 15 rows: 6 errors, 5 skipped"


def test_a_peer_that_hangs_is_ended():
    rows = [*peers.peers({"clip": [Peer("torch", "hanging", hanging)]}, rows=32, size=16, limit_s=3)]
    assert [row["error"] for row in rows if row["library"] == "hanging"] == ["timed out after 3 s"] * 2


def twice_the_gradient(counts, **options):
    part = cases.loss_part(counts, **options)
    return {**part, "x": 2 * part["x"]}


def no_result(counts, **options):
    raise RuntimeError("no result")


def test_a_case_with_a_wrong_gradient_is_an_error():
    case = cases.cases_of_losses(4, 3)[0]
    assert case.options["loss"] == "clip"
    planted = dataclasses.replace(case, part=twice_the_gradient)
    fine, found = two_ranks.group_of_cases([case, planted], "gloo", 60.0)
    assert "error" not in fine
    assert fine["error_of_gradient"] < 1e-12
    assert found["error"] == "error_of_gradient above 1e-12"
    (failed,) = two_ranks.group_of_cases([dataclasses.replace(case, part=no_result)], "gloo", 60.0)
    assert failed["error"] == "RuntimeError: no result"


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
            "skipped",
            "Duplicate",
        ),
        ("ncclSystemError: no socket", "error", "ncclSystemError: no socket; these cases ran over gloo"),
    ],
)
def test_the_report_says_why_two_ranks_on_a_card_are_not_on_nccl(monkeypatch, line, key, text):
    def refuse(*_args, **_options):
        raise RankError(
            f"2 of 2 ranks failed, rank 0 first\n--- rank 0 failed:\nTraceback\n{line}\n--- rank 1 failed:\nx"
        )

    monkeypatch.setattr(two_ranks, "run_ranks", refuse)
    refused = two_ranks.refusal_of_nccl(1.0)
    assert [*refused] == [key]
    assert text in refused[key]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--onl", "about"), "unrecognized arguments: --onl"),
        (("--only", "abuot"), "invalid choice: 'abuot'"),
        (("--only", "about", "--out", STAGES / "results"), "--out must be a folder that can be made"),
    ],
)
def test_mistakes_start_no_stage(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(STAGES), "--out", str(tmp_path), *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        gpu_stages.main()
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_every_stage_is_documented():
    text = (BENCHMARKS / "README.md").read_text()
    for name, stage in gpu_stages.STAGES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| {', '.join(f'`{check}`' for check in stage.after)} |".replace("|  |", "| |")), row

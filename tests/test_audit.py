"""The audit: right problems pass, each planted mistake is named, and mistakes of the user are reported clearly."""

import importlib
import json
import math
import multiprocessing.forkserver
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import audit_failures
import audit_mistakes
import audit_problems
import pytest
import torch

import wholebatch as wb
from wholebatch.__main__ import main
from wholebatch.auditing import presets
from wholebatch.auditing.report import markdown, summarize
from wholebatch.testing import assert_exact

MODULES = (audit_problems, audit_mistakes, audit_failures)
RIGHT = [name for name in vars(audit_problems) if name.startswith("right_")]
# The planted mistake, and the expected cause.
PLANTED = {
    "everything_times_w": "everything-times-w",
    "everything_times_w_sum": "everything-times-w",
    "cached_times_w": "everything-times-w",
    "everything_over_w": "everything-over-w",
    "gather_without_gradient": "gather-without-gradient",
    "key_side_missing": "key-side-missing",
    "key_side_missing_local": "key-side-missing",
    "key_side_missing_everywhere": "key-side-missing",
    "gather_averages": "gather-averages",
    "gather_averages_all": "gather-averages",
    "gather_times_w": "gather-times-w",
    "scale_times_w": "scale-times-w",
    "scale_over_w": "scale-over-w",
    "scale_times_steps": "scale-times-steps",
    "scale_times_steps_reference": "scale-times-steps",
    "everything_times_steps": "everything-times-steps",
    "not_gathered": "not-gathered",
    "labels_not_offset": "labels-not-offset",
    "rank_order_mixed": "rank-order-mixed",
    "rank_order_mixed_reversed": "rank-order-mixed",
    "views_interleaved": "rank-order-mixed",
    "micro_batches": "micro-batches",
    "micro_batches_reference": "micro-batches",
    "local_weights": "local-statistics",
    "local_statistics": "local-statistics",
    "loss_differs": "loss-differs",
    "loss_differs_from_the_reference": "loss-differs",
    "no_gradient": "no-gradient",
    "no_gradient_anywhere": "no-gradient",
    "batch_statistics": "batch-statistics",
    "mean_of_means": "mean-of-means",
    "rows_dropped": "rows-dropped",
    "rows_repeated": "rows-repeated",
    "dropout_not_replayed": "dropout-not-replayed",
    "last_chunk_only": "last-chunk-only",
    "last_chunk_only_overwritten": "last-chunk-only",
    "raises_on_ranks": "raises",
    "nan_on_a_rank": "raises",
    "sum_gather_without_gradient": "gather-without-gradient",
    "sum_key_side_missing": "key-side-missing",
    "sum_labels_not_offset": "labels-not-offset",
    "sum_not_gathered": "not-gathered",
    "ring_without_gradient": "gather-without-gradient",
    "detached_and_gather_without_gradient": "gather-without-gradient",
    "batch_statistics_and_noise": "batch-statistics",
    "thirteen_rows_mean_of_means": "mean-of-means",
    "not_reduced": "not-reduced",
    "not_reduced_nan": "not-reduced",
    "bypassed": "not-reduced",
    "uniform_scaling": "uniform-scaling",
    "scale_times_steps_in_float32": "scale-times-steps",
    "not_of_its_loss": "not-of-its-loss",
    "sharded_times_w": "everything-times-w",
    "declared_over_w": "everything-over-w",
    "declared_mean_of_means": "mean-of-means",
    "declared_not_gathered": "not-gathered",
    "declared_gathered_without_gradient": "gather-without-gradient",
    "declared_data_without_gradient": "no-gradient",
}


def problem(name):
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


@pytest.mark.parametrize("name", RIGHT)
def test_right_problems_pass(name):
    report = wb.audit(problem(name), (1, 2, 3, 4))
    assert report.exact, report
    assert not report.causes
    # Every group was compared, on every number of ranks.
    groups = {row.name for row in report.rows if row.kind == "parameters"}
    assert {"image", "text", "log_scale"} <= groups
    for size in (1, 2, 3, 4):
        assert {row.name for row in report.rows if len(row.counts) == size} >= groups


def test_ddp_leaves_a_head_alone():
    """Its centers, and the buffers that say which classes a rank has; with those of rank 0 the head raises."""
    report = wb.audit(audit_problems.head_in_ddp, (1, 2, 3))
    assert report.exact, report
    assert {row.name for row in report.rows if row.kind == "parameters" and len(row.counts) == 3} == {
        "backbone",
        "head",
    }


@pytest.mark.parametrize(("name", "cause"), PLANTED.items(), ids=PLANTED)
def test_each_planted_mistake_is_named(name, cause):
    report = wb.audit(problem(name))
    assert report.causes == (cause,), report
    assert not report.exact
    finding = next(finding for finding in report.findings if finding.cause.name == cause)
    assert finding.cause.fix
    assert finding.evidence


@pytest.mark.planted
def test_the_assertion_knows_declared_losses():
    """A declared loss with the sum's gradient under an engine that averages is found; as declared it is exact."""
    setting = "PairLoss, x and y, a learned scale"
    assert_exact(presets.settings("wholebatch")[setting], (2, 3))
    with pytest.raises(AssertionError, match=r"loss.values.scale +0.5"):
        assert_exact(audit_mistakes.declared_over_w_sync, (1, 2))


@pytest.mark.parametrize("name", ["values_differ", "detached", "detached_first_call", "unused"])
def test_notes_are_reported_and_do_not_fail_the_audit(name):
    report = wb.audit(problem(name))
    assert report.exact, report
    assert name.replace("_first_call", "").replace("_", "-") in [finding.cause.name for finding in report.findings]


@pytest.mark.parametrize("setting", presets.settings("wholebatch"))
def test_no_false_alarm_on_this_library(setting):
    report = wb.audit(presets.settings("wholebatch")[setting], (1, 2, 3, 4))
    assert report.exact, report
    uneven = {row.counts for row in report.rows if len(set(row.counts)) > 1}
    assert any(0 in counts for counts in uneven)
    assert any(0 not in counts for counts in uneven)
    assert all(row.comparison.error < 1e-9 for row in report.rows if len(row.counts) > 1)


def test_micro_batches_are_noted_on_one_process():
    """The gradient of micro-batches is right for their losses; the audit reports them in a note."""
    report = wb.audit(audit_mistakes.micro_batches, (1,))
    assert report.exact
    (finding,) = report.findings
    assert finding.cause.name == "micro-batches"
    assert "2 backward passes, and on one process the loss is" in finding.evidence


def test_the_rank_that_raises_is_named():
    (finding,) = wb.audit(audit_failures.raises_on_ranks, (2,)).findings
    assert finding.evidence.startswith("rank 1: KeyError: 'rank 1 has no such thing' (File")


def test_a_summary_says_nothing_of_gradients_that_several_ranks_do_not_have():
    summary = summarize(wb.audit(audit_failures.raises_on_ranks, (1, 2)))
    assert (summary.encoders, summary.scalars, summary.causes) == ("-", "-", "raises")


# Figures from algebra.
@pytest.mark.planted
def test_ratios_match_algebra():
    report = wb.audit(audit_mistakes.gather_without_gradient, (2, 4))
    for size in (2, 4):
        counts = (12 // size,) * size
        for group in ("image", "text", "images", "texts"):
            row = report.row(group, counts)
            assert math.isclose(row.comparison.ratio, 1 / size, rel_tol=1e-9)
            assert math.isclose(row.comparison.cosine, 1, rel_tol=1e-9)
            assert row.verdict == f"x {1 / size}"
        assert report.row("log_scale", counts).exact
    wrong = wb.audit(audit_mistakes.key_side_missing, (2,)).row("image", (6, 6))
    assert wrong.comparison.cosine < 0.99
    assert wrong.verdict == "wrong direction"


@pytest.mark.planted
def test_the_figures_of_a_wrong_recipe_match_those_computed_by_hand():
    """Compute key-side-missing by hand: each rank's local rows against constant features of others."""
    torch.manual_seed(0)
    planted = audit_mistakes.key_side_missing()
    model = planted.model.double()
    images, texts = (x.double() for x in planted.batch.values())
    true = torch.autograd.grad(audit_problems.clip(*model(images, texts)), list(model.image.parameters()))
    parts = [slice(0, 6), slice(6, 12)]
    losses = []
    for rows in parts:
        x, y, scale = model(images[rows], texts[rows])
        all_x, all_y, _ = (z.detach() for z in model(images, texts))
        labels = torch.arange(rows.start, rows.stop)
        ce = torch.nn.functional.cross_entropy
        losses.append((ce(scale * x @ all_y.T, labels) + ce(scale * y @ all_x.T, labels)) / 2)
    wrong = torch.autograd.grad(sum(losses) / 2, list(model.image.parameters()))
    g, t = (torch.cat([x.flatten() for x in of]) for of in (wrong, true))
    row = wb.audit(audit_mistakes.key_side_missing, (2,)).row("image", (6, 6))
    assert math.isclose(row.comparison.ratio, (g @ t / (t @ t)).item(), rel_tol=1e-9)
    assert math.isclose(row.comparison.error, ((g - t).norm() / t.norm()).item(), rel_tol=1e-9)


@pytest.mark.planted
@pytest.mark.parametrize("rank_count", [2, 3])
def test_recipes_have_their_known_causes(rank_count):
    found = {
        setting: summarize(wb.audit(of, (1, rank_count), name=setting))
        for setting, of in presets.settings("recipes").items()
    }
    nothing, whole, times_w, local, summed, averaged, ours = found.values()
    assert nothing.causes == "not-gathered"
    assert (whole.encoders, whole.scalars, whole.causes) == ("1/W", "exact", "gather-without-gradient")
    assert (times_w.encoders, times_w.scalars, times_w.causes) == ("exact", "x W", "scale-times-w")
    assert local.encoders.startswith("wrong direction")
    assert (local.scalars, local.causes) == ("exact", "key-side-missing")
    assert (averaged.encoders, averaged.scalars, averaged.causes) == ("1/W", "exact", "gather-averages")
    assert (summed.exact, ours.exact) == (True, True)
    assert (
        markdown([("recipes", times_w)]).splitlines()[-1]
        == "| the same, the loss times W | exact | x W | scale-times-w |"
    )


def test_a_model_that_needs_float32_is_audited_in_float32():
    report = wb.audit(audit_failures.only_float32)
    assert report.exact, report
    assert report.dtype == "float32"
    assert any("float32" in note for note in report.notes)
    # mistakes are found in float32, too
    assert wb.audit(audit_mistakes.gather_without_gradient, dtype=torch.float32).causes == ("gather-without-gradient",)
    assert wb.audit(audit_mistakes.scale_times_steps, dtype=torch.float32).causes == ("scale-times-steps",)


def test_output_of_the_problem_is_suppressed_with_a_note(capfd):
    report = wb.audit(audit_failures.prints, (1, 2))
    assert report.exact
    assert any("loading the data set" in note for note in report.notes)
    assert capfd.readouterr().out == ""


def test_rows_that_cannot_be_split_evenly_are_left_out():
    report = wb.audit(audit_failures.thirteen_rows)
    assert any("first 12 of 13 rows" in note for note in report.notes)
    assert {sum(row.counts) for row in report.rows} == {12}


MISTAKES = {
    "not_deterministic": "two runs of one process differ",
    "needs_cuda": "the factory asks for a GPU",
    "exits": r"left by exit\(3\)",
    "dies": "exit code 7",
    "half": "torch.bfloat16, whose rounding would hide",
    "two_things": r"must be a function .* returns wholebatch.Problem\(model, batch, loss\).* it returned a tuple of 2",
    "uneven_rows": r"must have the same rows, got \{'images': 4, 'texts': 5\}",
    "few_rows": "cannot be split evenly over 1, 2 and 3 ranks: give it a multiple of 6 rows",
    "raises": r"KeyError: 'no such thing' \(File .*audit_failures.py",
    "no_loss": "has no gradient; if it calls backward",
    "backward_in_the_loss": r"loss\(model, batch\) has called backward\(\) itself: give it as step=",
    "no_such_file": r"the factory raised FileNotFoundError: .*'no such file' \(File .*audit_failures.py.*, line",
    "drawn_everywhere": "draws random numbers, in evaluation mode, too",
    "no_rows": "must hold tensors, or lists, with a row for each example",
    "no_parameters": "no parameters that need a gradient",
    "both": "one of the two",
    "wrong_engine": "must be one of mean, sum, ddp, none, or a function that wraps the model; got 'fsdp'",
    "not_a_module": "must be a torch.nn.Module, got dict",
    "a_matrix": r"a tensor of one number; got shape \(12, 12\)",
    "not_finite": "the loss is nan",
    "no_gradient_at_all": "the norm of the whole gradient is 0.0",
    "learned_elsewhere": r"something learned, of shape \(\), that is not among the model's parameters",
    "learned_elsewhere_hidden": r"something learned, of shape \(\), that is not among the model's parameters",
    "random_elsewhere": "draws random numbers, in evaluation mode, too",
    "wrapped": "is wrapped by DistributedDataParallel: give the module itself",
    "step_not_finite": "the loss is nan",
    "same_model_twice": "each call of the factory must make its own model",
}


@pytest.mark.parametrize(("name", "message"), MISTAKES.items(), ids=MISTAKES)
def test_invalid_problems_are_reported(name, message):
    with pytest.raises(ValueError, match=message):
        wb.audit(problem(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.at_all:problem",), "there is no module 'nowhere.at_all' here"),
        (("audit_problems",), "as MODULE:FUNCTION"),
        (("audit_problems:missing",), "has no 'missing'; it defines .*right_local"),
        (("audit_problems:ROWS",), "must be a function .*; got int"),
        ((audit_problems.right_local(),), "is a Problem: give the function"),
        ((3,), "got int"),
        ((audit_problems.right_local, ()), "ranks must be numbers of ranks from 1 to 64"),
        ((audit_problems.right_local, (0,)), "ranks must be numbers of ranks from 1 to 64"),
        ((audit_problems.right_local, 2), "ranks must be numbers of ranks from 1 to 64"),
        (("audit_problems.py:right_local",), "there is no file 'audit_problems.py'"),
        (("./audit_problems.py:right_local",), "as in an import"),
    ],
)
def test_invalid_arguments_are_reported(arguments, message):
    with pytest.raises(ValueError, match=message):
        wb.audit(*arguments)
    with pytest.raises(ValueError, match="dtype must be"):
        wb.audit(audit_problems.right_local, dtype=torch.float16)
    with pytest.raises(ValueError, match="tolerance must be"):
        wb.audit(audit_problems.right_local, tolerance=2.0)


def test_a_module_that_cannot_be_imported_is_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)")
    (tmp_path / "needs.py").write_text("import surely_not_installed")
    (tmp_path / "broken.py").write_text("def f(:")
    for module, message in (
        ("leaves", "cannot be imported: SystemExit: 4"),
        ("needs", "cannot be imported: it needs 'surely_not_installed'"),
        ("broken", "cannot be imported: SyntaxError"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.audit(f"{module}:f")


def children_of_server():
    """Return the names of running processes that the server of `run_ranks` has started."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = rest.split()[:2]
        if int(parent) == server and state != "Z":
            found.append(name)
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc, as Linux has it")
def test_no_process_is_left_behind():
    report = wb.audit(audit_failures.hangs, (1, 2), timeout_s=5)
    assert report.causes == ("hangs",)
    (finding,) = report.findings
    places = finding.evidence.split("; ")
    assert [place[:10] for place in places] == ["rank 0 is ", "rank 1 is "]
    assert all("audit_failures.py" in place and place.endswith("in loss") for place in places)
    for name in ("dies", "raises_on_ranks", "exits"):
        try:
            wb.audit(problem(name), (1, 2))
        except ValueError:
            assert name != "raises_on_ranks"
    deadline = time.monotonic() + 10
    while children_of_server() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children_of_server()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc, as Linux has it")
def test_ranks_end_with_the_process_that_audits(tmp_path):
    """Kill the audit from outside, as continuous integration does after a time limit."""
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, time, torch, wholebatch as wb\n"
        "def problem():\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()\n"
        "    while True: time.sleep(0.05)\n"
    )
    process = subprocess.Popen([sys.executable, "-m", "wholebatch", "audit", "endless:problem"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("pid-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    (rank,) = (int(file.name.partition("-")[2]) for file in tmp_path.glob("pid-*"))
    process.kill()
    process.wait()
    while Path(f"/proc/{rank}/cmdline").exists() and Path(f"/proc/{rank}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the rank still runs"
        time.sleep(0.1)


def test_output_of_a_c_library_does_not_reach_json(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import audit_problems\n"
        "os.system('echo imported')\n"
        "def problem():\n"
        "    os.system('echo built')\n"
        "    return audit_problems.right_local()\n"
    )
    completed = subprocess.run(
        [sys.executable, "-m", "wholebatch", "audit", "loud:problem", "--ranks", "1", "2", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["exact"] is True


@pytest.mark.planted
def test_assert_exact_fails_with_the_report():
    assert_exact(audit_problems.right_local, (1, 2))
    with pytest.raises(AssertionError, match=r"scale-times-w: .*\n.*seen on 2 ranks .6 \+ 6., log_scale"):
        assert_exact(audit_mistakes.scale_times_w, (1, 2))


def test_a_factory_may_be_a_partial_or_a_lambda():
    assert wb.audit(partial(audit_problems.problem, wb.CLIPLoss(), rows=6), (1, 2)).exact
    assert wb.audit(lambda: audit_problems.problem(wb.CLIPLoss(), rows=6), (1, 2)).exact


# The command line.
def test_exit_codes_and_messages_of_the_command(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["audit", "audit_problems:right_local", "--ranks", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "every gradient is that of one process" in out
    assert "values-differ" in out
    assert main(["audit", "audit_mistakes:scale_times_w", "--ranks", "1", "2", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["causes"] == ["scale-times-w"]
    assert report["exact"] is False
    (row,) = (row for row in report["rows"] if row["name"] == "log_scale" and row["counts"] == [6, 6])
    assert math.isclose(row["ratio"], 2)
    assert main(["audit", "audit_failures:needs_cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("wholebatch audit: error: the factory asks for a GPU")
    assert len(captured.err.splitlines()) == 1
    for arguments, message in (
        ([], "name a problem"),
        (["audit_problems:right_local", "--preset", "recipes"], "one of the two"),
        (["--preset", "openclip"], "there is no preset 'openclip'; choose one of: recipes, open_clip"),
        (["--preset", "recipes", "--setting", "nothing like it"], "has 'nothing like it' in its name"),
        (["audit_problems:right_local", "--markdown"], "--markdown needs --preset"),
    ):
        assert main(["audit", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    completed = subprocess.run(
        [sys.executable, "-m", "wholebatch", "audit", "audit_problems:right_local"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2
    assert "run it without torchrun" in completed.stderr


def test_negatives_without_gradient_are_found_in_nvidias_losses():
    """NeMo Automodel detaches negatives of other ranks by default; Megatron-LM's factor W is right for encoders."""
    found = {name: wb.audit(problem, (1, 2)).causes for name, problem in presets.settings("nvidia").items()}
    wrong = {name: causes for name, causes in found.items() if causes}
    assert wrong == {"NeMo Automodel, do_distributed_inbatch_negative": ("key-side-missing",)}


def test_the_page_of_findings_is_made_from_the_figures(monkeypatch):
    """If this fails: python benchmarks/findings.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    findings = importlib.import_module("findings")
    assert findings.PAGE.read_text() == findings.page()


def test_every_documented_setting_has_its_source(monkeypatch):
    """A setting is documented only by a place in its library's documentation, which the page names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    findings = importlib.import_module("findings")
    rows = [row for row in json.loads(findings.RESULTS.read_text()) if row["preset"] in findings.LIBRARIES]
    documented = [row for row in findings.theirs(rows) if findings.kind_of(row) == findings.KINDS[1]]
    page = findings.page()
    assert {row["preset"] for row in documented} == {*findings.DOCUMENTED}
    for row in documented:
        place, says = findings.source(row)
        assert f"Documented ({place}): {says}." in page
        assert f"| {row['setting']}" in page
    every = [(preset, settings) for preset, places in findings.DOCUMENTED.items() for settings in places]
    for preset, settings in every:
        assert any(row["preset"] == preset and re.fullmatch(settings, row["setting"]) for row in documented)
    unnamed = {"preset": "open_clip", "setting": "a default", "exact": False, "causes": "not-gathered"}
    assert findings.kind_of(unnamed) == findings.KINDS[2]  # its cause does not make it documented


def test_presets_print_in_full_or_in_markdown(capsys):
    assert main(["audit", "--preset", "recipes", "--setting", "ED4CT", "--ranks", "1", "2"]) == 0
    assert "input images" in capsys.readouterr().out
    assert main(["audit", "--preset", "recipes", "--ranks", "2", "--setting", "times W", "--markdown"]) == 1
    assert "| the same, the loss times W | exact | x W | scale-times-w |" in capsys.readouterr().out

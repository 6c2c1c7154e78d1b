"""`make gpu` without a GPU: every line of its programs runs, and results that are wrong, late or missing say so."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional as F

import wholebatch as wb

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu import compiled, device, libraries, peers, profiled, sanitized, stages, steps, suite, truth  # noqa: E402
from gpu.libraries import Method  # noqa: E402

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes are small on a CPU only")
PROGRAMS = str(BENCHMARKS / "gpu") + os.sep
NEEDS_NEWER = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch has no linear_cross_entropy; its profiler and its Triton's interpreter warn",
)
REACHED = set[tuple[str, int]]()


@pytest.fixture(autouse=True)
def _lines_are_noted(monkeypatch):
    """Note the lines of the programs that run, and let processes that they start find their modules."""
    folders = [str(BENCHMARKS.parent / name) for name in ("src", "tests", "benchmarks")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))

    def trace(frame, _event, _argument):
        if not frame.f_code.co_filename.startswith(PROGRAMS):
            return None
        REACHED.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    yield
    sys.settrace(before)


@pytest.fixture
def one_size(monkeypatch):
    """Losses are measured at one size."""
    monkeypatch.setattr(peers, "shapes", lambda loss: [(3, 2, 5, 8)] if loss == "max_sim" else [(24, 16)])


def plenty():
    return 100.0


def right(x, y, scale, _bias):
    return wb.functional.clip_loss(x, y, scale)


def wrong_value(x, y, scale, _bias):
    return 1.1 * right(x, y, scale, None)


def wrong_gradient(x, y, scale, _bias):
    loss = right(x, y, scale, None)
    return loss + (right(x, y.detach(), scale, None) - loss).detach() + 0.1 * (loss - loss.detach())


def too_large(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB")


def failing(*_):
    raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")


def missing():
    raise ImportError("No module named 'ftfy'")


def method(call, **more):
    return Method("clip", call.__name__, partial(partial, call), **more)


PLANTED = [
    *map(method, (right, wrong_value, wrong_gradient, too_large, failing)),
    Method("clip", "missing", missing),
    Method("clip", "broken", failing),
    method(right, package="no-such-library"),
    method(right, on_cpu=False),
    method(right, multiple=24),
]


@pytest.mark.planted
def test_results_that_are_wrong_or_missing_say_so_and_lose_no_other(one_size):
    rows = [*peers.peers("planted", plenty, methods=PLANTED)]
    why = [row.get("error", row.get("skipped")) for row in rows]
    assert why == [
        "ImportError: No module named 'ftfy'",
        "RuntimeError: CUDA error: an illegal memory access",
        "not installed",
        "needs a GPU",
        "needs an embedding size that 24 divides",
        None,
        *["wrong: errors above 0.02 or 0.05"] * 2,
        "out of memory",
        "RuntimeError: CUDA error: an illegal memory access",
    ]
    assert ["seconds" in row for row in rows] == [reason is None for reason in why]
    assert rows[5]["error_of_gradient"] < 5e-3
    assert rows[6]["error_of_loss"] == pytest.approx(0.1, rel=1e-3)
    assert rows[7]["error_of_loss"] < 1e-3
    assert rows[7]["error_of_gradient"] > 0.05


def test_sizes_without_time_say_so(one_size):
    (row,) = peers.peers("planted", lambda: 0.0, methods=[method(right)])
    assert row["skipped"] == "no time left"


def replays(call):
    """Stand for a CUDA graph."""
    result = call()
    return lambda: None, result


def replays_something_else(call):
    return lambda: None, tuple(2 * z for z in call())


def reads(call):
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_cuda_graphs_come_last_and_are_checked(one_size, monkeypatch):
    monkeypatch.setattr(peers, "GPU", True)
    found = {}
    for capture in (replays, replays_something_else, reads):
        monkeypatch.setattr(peers, "captured", capture)
        ways = [method(right), method(wrong_value), method(right, captures=False), method(right)]
        found[capture] = [*peers.peers("planted", plenty, methods=ways)]
        assert [row["in_graph"] for row in found[capture]] == [False] * 4 + [True] * 3
    of_graphs = {capture: [row.get("error", row.get("skipped")) for row in rows[4:]] for capture, rows in found.items()}
    wrong, after = "wrong: errors above 0.02 or 0.05", "a CUDA graph could not be captured"
    assert found[replays][4]["seconds"] >= 0
    assert of_graphs[replays] == [None, wrong, after]
    assert of_graphs[replays_something_else] == [wrong, after, after]
    assert of_graphs[reads][0] == "RuntimeError: CUDA error: operation not permitted when stream is capturing"


@pytest.mark.parametrize("library", [name for name in libraries.libraries() if name not in ("wholebatch", "torch")])
def test_a_library_that_is_not_installed_is_a_row(library, monkeypatch):
    monkeypatch.setattr(libraries, "version", lambda package: None)
    rows = [*peers.peers(library, plenty)]
    assert rows
    assert {row["skipped"] for row in rows} <= {"not installed"}


@NEEDS_NEWER
def test_this_librarys_methods_and_dense_ones_are_right(one_size):
    rows = [*peers.peers("wholebatch", plenty), *peers.peers("torch", plenty)]
    assert not [row for row in rows if "seconds" not in row]
    assert {(row["loss"], row["method"]) for row in rows} >= {
        *((loss, label) for loss in ("clip", "siglip", "max_sim") for label in ("default", "triton", "torch")),
        *((loss, label) for loss in ("clip", "siglip") for label in ("deferred", "dense", "dense compiled")),
    }


def test_calls_with_deferred_checks_are_captured(monkeypatch):
    monkeypatch.setattr(wb.functional, "clip_loss", lambda x, y, scale, checks: checks)
    deferred = [of for of in libraries.our_methods() if of.captures]
    assert [(of.loss, of.label) for of in deferred] == [("clip", "deferred"), ("siglip", "deferred")]
    assert deferred[0].build()(None, None, None, None) == "deferred"


def their_siglip(x, y, log_temperature, bias, use_fp8=False, backend="auto"):
    return wb.reference.siglip_loss(x.float(), y.float(), log_temperature.exp(), bias)


def their_scores(queries, documents, q_mask=None, d_mask=None, *, normalize=False, backward=None):
    return torch.einsum("qtd,cud->qctu", queries, documents).amax(3).float().sum(2)


def test_libraries_for_gpus_only_are_called_as_they_document(one_size, monkeypatch):
    """Functions with their signatures stand for them."""
    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(fused_siglip_loss=their_siglip))
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", SimpleNamespace(maxsim=their_scores))
    monkeypatch.setattr(libraries, "version", lambda package: "1.0")
    monkeypatch.setattr(libraries, "GPU", True)
    for name in ("siglip-kernel", "late-interaction-kernels"):
        (row,) = peers.peers(name, plenty)
        assert row["error_of_gradient"] < 1e-2
        assert row["seconds"] > 0


@pytest.mark.parametrize("loss", ["clip", "siglip", "max_sim"])
@pytest.mark.parametrize("double", [10, 1000])
def test_exact_values_in_parts_are_those_of_the_reference(loss, double, monkeypatch):
    monkeypatch.setattr(truth, "_PART", 16)
    monkeypatch.setattr(truth, "_DOUBLE", double)
    monkeypatch.setattr(truth, "FEW", 10)
    shape = (40, 3, 4, 8) if loss == "max_sim" else (40, 8)
    x, y = (z.detach().double().requires_grad_() for z in peers.inputs(shape))
    scale, bias = torch.tensor(truth.SCALE), torch.tensor(truth.BIAS)
    value = {
        "clip": lambda: wb.reference.clip_loss(x, y, scale),
        "siglip": lambda: wb.reference.siglip_loss(x, y, scale, bias),
        "max_sim": lambda: wb.reference.max_sim_loss(x, y, logit_scale=1.0),
    }[loss]()
    found = truth.truth(loss, x, y)
    for got, true in zip(found, (value, *(z[:10] for z in torch.autograd.grad(value, (x, y)))), strict=True):
        torch.testing.assert_close(got.double(), true.detach(), rtol=1e-12 if double == 1000 else 1e-5, atol=1e-6)


def test_training_steps_with_right_losses_are_timed():
    planted = [method(right), method(wrong_value), method(right, package="no-such-library"), method(too_large)]
    rows = [*steps.steps(plenty, planted)]
    assert [row.get("error", row.get("skipped")) for row in rows] == [
        None, "AssertionError: wrong: an error above 0.02", "not installed", "out of memory",
    ]  # fmt: skip
    assert rows[0]["seconds"] > 0
    assert rows[0]["rounds"] == 2
    (row,) = steps.steps(lambda: 0.0, [method(right)])
    assert row["skipped"] == "no time left"
    assert {of.package for of in steps.clip_methods()} == {None, "open_clip_torch"}
    assert {of.label for of in steps.clip_methods()} >= {"dense", "default", "triton", "torch"}


@NEEDS_NEWER
def test_kernels_are_compiled_by_several_processes(monkeypatch):
    monkeypatch.setattr(compiled, "GPU", True)
    made = compiled.forms()
    assert {name for name, *_ in made} > {"clip", "siglip", "nt_xent", "partial_fc", "max_sim"}
    assert {("clip", "bfloat16", size) for size in (512, 768)} <= {*made}
    assert len({*made}) == len(made)
    monkeypatch.setattr(compiled, "GPU", False)
    (row,) = compiled.compiled()
    assert row["seconds"] > 0
    assert "error" not in row
    monkeypatch.setattr(compiled, "forms", lambda: [("no such loss", "float32", 24)])
    rows = compiled.compiled()
    assert next(rows)["error"] == "KeyError: 'no such loss'"
    with pytest.raises(AssertionError, match="1 of 1 forms failed"):
        next(rows)
    monkeypatch.setattr(compiled.kernels, "missing", lambda device: "needs Triton")
    with pytest.raises(device.SkippedError, match="kernel='triton' needs Triton"):
        next(compiled.compiled())


def test_the_sanitizers_step_passes_its_arguments(monkeypatch, capsys):
    sanitized.main()
    assert capsys.readouterr().out.count("seconds") == len(sanitized._LOSSES)
    monkeypatch.setattr(sanitized, "_LOSSES", ("no such loss",))
    with pytest.raises(SystemExit, match="1"):
        sanitized.main()


@pytest.mark.parametrize("code", [0, 9])
def test_the_sanitizers_exit_code_counts(code, monkeypatch, tmp_path):
    with pytest.raises(device.SkippedError, match="no GPU"):
        next(sanitized.sanitizer())
    monkeypatch.setattr(sanitized, "GPU", True)
    tool = tmp_path / "tool"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2 $4 $5" = "--error-exitcode 9 -m gpu.sanitized" ] && exit {code}\nexit 3\n')
    tool.chmod(0o755)
    monkeypatch.setattr(sanitized.shutil, "which", lambda name: str(tool))
    rows = sanitized.sanitizer()
    assert next(rows)["exit_code"] == code
    with pytest.raises(AssertionError if code else StopIteration):
        next(rows)


def test_tests_that_fail_are_named(tmp_path, monkeypatch):
    planted = tmp_path / "test_planted.py"
    planted.write_text(
        "import pytest\ndef test_fine(): pass\ndef test_not(): assert 1 == 2\n"
        "@pytest.mark.skip\ndef test_absent(): pass\n"
    )
    rows = suite.suite([str(planted)])
    failure = next(rows)
    assert failure["test"].endswith("test_planted::test_not")
    assert failure["error"].startswith("assert 1 == 2")
    assert {"passed": 1, "not_run": 1, "failed": 1}.items() <= next(rows).items()
    with pytest.raises(AssertionError, match="pytest ended with 1, 1 tests failed"):
        next(rows)
    monkeypatch.setattr(suite, "GPU", True)
    assert {"tests/test_one_card.py", "tests/test_kernels.py", "tests/test_host_sync.py"} < {*suite.files()}
    monkeypatch.setattr(suite, "GPU", False)
    assert [*map(os.path.exists, suite.files())] == [True]
    monkeypatch.setattr(suite, "version", lambda name: None)
    with pytest.raises(device.SkippedError, match="pytest is not installed"):
        next(suite.suite())


def test_a_profile_counts_calls_of_all_threads():
    def helper():
        return abs(-1)

    def call():
        helper(), helper()
        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()

    found = profiled.python_calls(call)
    assert sum(number for name, number in found.items() if name.endswith("helper")) == 3
    assert found["built-in abs"] == 3
    for event in ("call", "c_call", "return"):  # a hook is not traced, so it runs here once more
        profiled.note(found, sys._getframe(), event, max)
    assert found["built-in max"] == 1


@NEEDS_NEWER
def test_a_profile_is_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiled, "_LINES", 1000)
    small = ["--batch-size", "16", "--embedding-size", "8", "--out", str(tmp_path)]
    profiled.main([*small, "--loss", "siglip", "--method", "torch"])
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("gpu_profile_wholebatch_siglip_torch_16_cpu_")
    text = path.read_text()
    assert "kernels and copies: 0" in text
    assert "aten::" in text
    assert re.search(r"^ +1 +wholebatch\.\S+siglip_loss$", text, re.MULTILINE)
    assert str(path) in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        profiled.main([*small, "--method", "no such one"])
    assert "--method must be one of ['default', 'triton', 'torch'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="siglip-kernel: "):
        profiled.main([*small, "--loss", "siglip", "--library", "siglip-kernel"])
    assert len(profiled.table("many", [(str(n), 1, 1.0) for n in range(1100)])) == 3 + 1000 + 1


# The command.


def results(folder):
    (path,) = folder.glob("gpu_cpu_*.json")
    return json.loads(path.read_text())


def test_the_command_writes_one_file(tmp_path):
    command = [sys.executable, "-m", "gpu.stages", "--out", str(tmp_path), "--only", "peers memeff", "sanitizer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peers memeff: passed (1 rows, 0 errors, 1 skipped)" in done.stdout
    found = results(tmp_path)
    assert found["about"]["torch"] == torch.__version__
    assert "times mean nothing" in found["about"]["card"]
    assert found["stages"]["peers memeff"]["rows"][0]["skipped"] in ("not installed", "needs a GPU")
    assert found["stages"]["sanitizer"]["outcome"] == "skipped: no GPU"


def test_a_late_stage_costs_itself_alone(tmp_path, capsys):
    path = tmp_path / "gpu_cpu_.json"
    assert not stages.run_all(["sanitizer", "steps"], path, 100.0, limit_s=0.05)
    found = results(tmp_path)["stages"]
    assert [found[name]["outcome"] for name in ("sanitizer", "steps")] == ["FAILED: ended by the limit of 0 s"] * 2
    assert found["steps"]["log"] == []
    assert stages.run_all(["steps"], path, 0.0)
    assert results(tmp_path)["stages"]["steps"]["outcome"].startswith("skipped: the 0 s of all stages are used up")


def test_a_stage_that_fails_keeps_its_rows(tmp_path, monkeypatch):
    def rows(left):
        yield {"size": 1, "seconds": left()}
        raise RuntimeError("illegal access")

    monkeypatch.setitem(stages.STAGES, "steps", stages.Stage(rows, 60.0))
    with pytest.raises(RuntimeError, match="illegal access"):
        stages.run_stage("steps", tmp_path / "record", 20.0)
    row, outcome = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert 11 < row["seconds"] <= 12
    assert outcome == {"outcome": "FAILED: RuntimeError: illegal access"}


def test_arguments_of_the_command(tmp_path, capsys):
    stages.main(["--stage", "sanitizer", "--record", str(tmp_path / "record")])
    assert "skipped: no GPU" in (tmp_path / "record").read_text()
    with pytest.raises(SystemExit, match="False"):
        stages.main(["--only", "sanitizer", "--out", str(tmp_path / "results")])
    assert results(tmp_path / "results")["stages"]["sanitizer"]["outcome"] == "skipped: no GPU"
    for arguments, message in (
        (("--onl", "steps"), "unrecognized arguments: --onl"),
        (("--only", "setps"), "invalid choice: 'setps'"),
        (("--out", str(BENCHMARKS / "README.md" / "results")), "--out must be a folder that can be made"),
    ):
        with pytest.raises(SystemExit, match="2"):
            stages.main([*arguments])
        assert message in capsys.readouterr().err


def test_every_stage_is_documented():
    text = (BENCHMARKS / "README.md").read_text()
    for name, stage in stages.STAGES.items():
        assert inspect.isgenerator(stage.rows(plenty))
        shown = "peers LIBRARY" if name.startswith("peers ") else name
        assert f"| `{shown}` |" in text, name


# The device.


def test_times_and_memory_of_a_pretended_gpu(monkeypatch):
    """Time is that between two events, memory the rise of the peak, and a graph is captured after three calls."""
    monkeypatch.setattr(device, "GPU", True)
    cuda = MagicMock(**{
        "Event.return_value.elapsed_time.return_value": 250.0, "memory_allocated.return_value": 100,
        "max_memory_allocated.return_value": 130, "get_device_name.return_value": "NVIDIA H100 80GB HBM3",
    })  # fmt: skip
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda, __version__="2", version=SimpleNamespace(cuda="1")))
    calls = []

    def call():
        calls.append(cuda.graph.return_value.__enter__.called)
        return len(calls)

    assert device.median_seconds(call) == 0.25
    assert len(calls) == 2 + 5
    assert device.peak_bytes(call) == 30
    calls.clear()
    replay, result = device.captured(call)
    assert (calls, result) == ([False] * 3 + [True], 4)
    assert replay is cuda.CUDAGraph.return_value.replay
    facts = device.about()
    assert device.name_of({**facts, "commit": "abc"}) == "h100-80gb-hbm3_abc"


def test_times_of_a_cpu():
    assert 0.01 < device.median_seconds(lambda: time.sleep(0.011), 0.05) < 1
    assert device.peak_bytes(lambda: None) is None
    assert device._printed("no-such-program") is None
    assert device._printed("git", "no-such-command") is None
    assert device.message(ValueError()) == "ValueError: "
    assert device.name_of({"commit": "abc"}) == "cpu_abc"
    assert device.relative(F.one_hot(torch.tensor([0]), 2), torch.tensor([[2, 0]])) == 0.5


def lines_of(code):
    """Return the lines of the functions inside a code object."""
    for inner in (of for of in code.co_consts if isinstance(of, CodeType)):
        # Bodies of classes, and comprehensions outside functions, have run at the import.
        if inner.co_flags & inspect.CO_OPTIMIZED and (inner.co_name == "<lambda>" or inner.co_name[0] != "<"):
            yield from (line for *_, line in inner.co_lines() if line is not None)
        yield from lines_of(inner)


@NEEDS_NEWER
def test_every_line_of_the_programs_has_run(request):
    """It comes last, after all tests of this file."""
    mine = [name for name in globals() if name.startswith("test_")]
    run = {item.function.__name__ for item in request.session.items if item.path == request.path}
    if run != {*mine}:
        pytest.skip("not all tests of this file run")
    unreached = [
        f"{path.name}:{line}"
        for path in sorted(Path(PROGRAMS).glob("*.py"))
        for line in sorted({*lines_of(compile(path.read_text(), str(path), "exec"))})
        if (str(path), line) not in REACHED
    ]
    assert not unreached, unreached

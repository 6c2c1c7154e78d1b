"""Declared losses in the planner and in the benchmark: found by name, counted on a few rows, checked before timed."""

import json
import re
import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from declared import clip, sup_con
from live_bytes import peak_of
from torch.nn.functional import normalize, softplus

import wholebatch as wb
from wholebatch.__main__ import main
from wholebatch._base import live_bytes
from wholebatch.bench.gate import check
from wholebatch.bench.loss import Job, Methods
from wholebatch.bench.subjects import Configuration, Subject
from wholebatch.comm import LocalCommunicator
from wholebatch.planning.counted import work_of
from wholebatch.planning.declared import call_of, declared, find, leaves_of
from wholebatch.planning.given import given
from wholebatch.planning.shapes import Shapes
from wholebatch.planning.subject import make_step
from wholebatch.testing import run_ranks

HERE = "test_plan_declared"
CPU = torch.device("cpu")


def rows_and_columns(rows, embedding_size):
    return clip(), {"parameters": {"scale": torch.tensor(14.3, requires_grad=True)}}


def symmetric(rows, embedding_size):
    return sup_con(symmetric=True), {"x_data": {"label": torch.arange(rows) // 4}, "parameters": {"scale": 14.3}}


def not_affine(rows, embedding_size):
    def both(s, x, y, p):
        return softplus(p.scale * s) * torch.tanh(s) + s.exp()

    return wb.PairLoss({"all": wb.terms.Sum(both)}, lambda r, x, p: r.all, parameters={"scale": 2.0}), {"y": None}


def with_own(rows, embedding_size):
    own = torch.randn(rows, 3, embedding_size, requires_grad=True)
    loss_fn = wb.PairLoss(
        {"all": wb.terms.LogSumExp(over="both"), "own": wb.terms.Partner()}, lambda r, x, p: r.all - r.own
    )
    return loss_fn, {"candidates": own}


def several(rows, embedding_size):
    terms = {"all": wb.terms.LogSumExp(lambda s, x, y, p: s.a * s.b)}
    return wb.PairLoss(terms, lambda r, x, p: r.all, similarity={"a": "dot", "b": "cosine"}), {}


plain = wb.PairLoss({"all": wb.terms.LogSumExp(), "own": wb.terms.Partner()}, lambda r, x, p: r.all - r.own)
reads_data = wb.PairLoss({"all": wb.terms.LogSumExp(where=lambda x, y: x.label == y.label)}, lambda r, x, p: r.all)
MAKES = ("rows_and_columns", "symmetric", "not_affine", "with_own", "several")


def of(name):
    return f"{HERE}:{name}"


def shapes_of(name, rows, width, ranks=1):
    return Shapes(of(name), rows, width, ranks, declared=declared(of(name), torch.float32))


# Memory.


@pytest.mark.parametrize("name", MAKES)
def test_the_planned_memory_is_that_of_tensors(name):
    """One process, 1400 rows in tiles of 640, with gradients that exist already."""
    torch.set_num_threads(1)
    shapes = shapes_of(name, 1400, 96)
    step = make_step(LocalCommunicator(), shapes, "gather", "flat", CPU)
    step()
    assert work_of(shapes, "gather", "flat").loss == pytest.approx(peak_of(step), rel=0.07)


def measured_on_ranks(name, exchange):
    torch.set_num_threads(1)
    shapes = shapes_of(name, 2000, 96, 2)
    step = make_step(wb.comm.TorchCommunicator(), shapes, exchange, "flat", CPU)
    step()
    return peak_of(step, times=2), work_of(shapes, exchange, "flat").loss


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", ["rows_and_columns", "symmetric", "not_affine"])
def test_the_planned_memory_of_two_ranks(name, exchange):
    for measured, planned in run_ranks(measured_on_ranks, 2, name, exchange, timeout_s=120):
        assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.planted
def test_the_count_sees_a_tensor_more():
    """A score that holds two further tensors of the size of a tile has a larger count."""

    def more(rows, embedding_size):
        loss_fn, arguments = not_affine(rows, embedding_size)
        score = loss_fn.declaration.terms["all"].score
        terms = {"all": wb.terms.Sum(lambda s, x, y, p: score(s, x, y, p) * (s * 2).sigmoid().sin())}
        return wb.PairLoss(terms, lambda r, x, p: r.all, parameters={"scale": 2.0}), arguments

    shapes = [Shapes("it", 1400, 96, declared=declared(make, torch.float32)) for make in (not_affine, more)]
    less, more_work = (work_of(each, "gather", "flat") for each in shapes)
    assert more_work.loss > less.loss + 8 * 640**2
    assert more_work.moved > less.moved + 3 * 8 * 1400**2 / 2
    assert shapes[1].declared.tiles > shapes[0].declared.tiles


@pytest.mark.parametrize("name", ["rows_and_columns", "symmetric", "not_affine"])
@pytest.mark.parametrize("bytes_", [2**20, 2**22])
def test_memory_holds_all_tiles_of_a_step(name, bytes_):
    """`memory=` covers what autograd keeps of a tile; O(B) numbers come on top."""
    torch.set_num_threads(1)
    shapes = shapes_of(name, 800, 8)
    step = make_step(LocalCommunicator(), shapes, "gather", bytes_, CPU)
    step()
    held, linear = peak_of(step), 800 * (200 + 60 * 8)
    assert 0.5 * bytes_ < held <= 1.05 * bytes_ + linear


def test_less_memory_than_the_smallest_tiles_need_raises():
    loss_fn = wb.PairLoss({"all": wb.terms.LogSumExp(lambda s, x, y, p: s * s)}, lambda r, x, p: r.all, memory=8)
    with pytest.raises(ValueError, match=r"memory must be at least \d+ bytes for the smallest tiles of rank 0, got 8"):
        loss_fn(torch.randn(4, 2), torch.randn(4, 2))


def test_live_bytes_are_those_that_the_profiler_sees():
    x = torch.randn(300, 300, requires_grad=True)

    def step():
        (x @ x).exp().tanh().sum().backward()

    step()
    assert live_bytes.bytes_held(step) == pytest.approx(peak_of(step), rel=0.01)


def test_the_peak_is_that_of_a_step_whose_tensors_no_other_thread_frees():
    """The profiler misses what another thread frees; the least of several steps is right."""
    threads = [threading.Thread, None, threading.Thread]

    def step():
        box, thread = [torch.ones(10**6, dtype=torch.uint8)], threads.pop()
        if thread is None:
            box.clear()
        else:
            (of_gloo := thread(target=box.clear)).start()
            of_gloo.join()
        torch.ones(5 * 10**5, dtype=torch.uint8)

    assert peak_of(step, times=3) == pytest.approx(10**6, rel=0.01)


# Time and work.


def test_a_unit_forward_and_three_backward():
    assert work_of(shapes_of("rows_and_columns", 1280, 64), "gather", "flat").flops == 2 * 4 * 1280**2 * 64
    half = work_of(shapes_of("symmetric", 1280, 64), "gather", "flat").flops
    assert half == 2 * 4 * 3 * 640**2 * 64  # three tiles of four
    assert not work_of(shapes_of("symmetric", 1280, 64), "gather", 2**30).kept


def test_unmeasured_functions_count_by_the_bytes_that_they_move():
    found = wb.plan(batch_size=512, embedding_size=64, loss=not_affine)
    work = work_of(Shapes("not_affine", 512, 64, declared=declared(not_affine, torch.float32)), "gather", "flat")
    rates = given("cpu", torch.float32)
    assert work.moved > 2 * work_of(Shapes("clip", 512, 64), "gather", "flat").moved
    assert found.chosen.seconds > work.moved / rates.tiles["clip"]
    assert "time of the functions of not_affine by the bytes that they move, not measured" in str(found)
    measured = replace(rates, tiles={**rates.tiles, "not_affine": 1.0})
    again = wb.plan(batch_size=512, embedding_size=64, loss=not_affine, rates=measured)
    assert again.chosen.seconds > work.moved
    assert "not measured" not in str(again)


# Names.


def test_a_loss_is_planned_itself_or_by_a_function_or_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, wholebatch as wb\nfrom beside import LABEL\n"
        "def make(rows, embedding_size):\n"
        "    terms = {'all': wb.terms.LogSumExp(where=lambda x, y: x.label != y.label)}\n"
        "    labels = {LABEL: torch.arange(rows)}\n"
        "    return wb.PairLoss(terms, lambda r, x, p: r.all.relu()), {'y': None, 'x_data': labels}\n"
    )
    (tmp_path / "beside.py").write_text("LABEL = 'label'\n")
    for loss, name, towers in (
        (plain, "PairLoss", 2),
        (symmetric, "symmetric", 1),
        (of("plain"), of("plain"), 2),
        (f"{path}:make", f"{path}:make", 1),
    ):
        found = wb.plan(batch_size=600, embedding_size=64, ranks=2, loss=loss, encoder_bytes=(1000,) * towers)
        assert found.loss == name
        assert {option.exchange for option in found.options} == {"gather", "ring"}
        assert "wb.PairLoss(..." in str(found)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("no_such_module:make", "no module 'no_such_module' here; name a file as in no_such_module.py:make"),
        (of("nothing"), f"{HERE} has no 'nothing'"),
        (of("MAKES"), "must be a wb.PairLoss, or a function of (rows, embedding_size)"),
        (":make", "name a declared loss as FILE.py:NAME or MODULE:NAME"),
        (lambda rows, d: 3, "it returned 3"),
        (lambda rows, d: (plain, {"x": torch.eye(3)}), "must return arguments without x and y"),
        (reads_data, "cannot be called with random features alone"),
        (several, "at least 2; got 1"),
        (3, "loss must be one of clip, info_nce"),
    ],
)
def test_losses_that_cannot_be_planned_raise(loss, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wb.plan(batch_size=8, embedding_size=1 if loss is several else 8, loss=loss)


def test_encoders_are_as_many_as_towers():
    with pytest.raises(ValueError, match="one for each of the 1 encoder of symmetric; got 2"):
        wb.plan(batch_size=8, embedding_size=8, loss=symmetric, encoder_bytes=(1, 2))


def test_the_command_plans_and_measures(capsys, calibrations_are_short):
    arguments = ["plan", "--batch-size", "300", "--embedding-size", "32", "--loss", of("symmetric")]
    assert main([*arguments, "--ranks", "2"]) == 0
    assert "wb.PairLoss(...)" in capsys.readouterr().out
    assert main([*arguments, "--measure"]) == 0
    shown = capsys.readouterr().out
    assert "the loss on this machine" in shown
    assert "not measured" not in shown
    assert main([*arguments[:-1], "nowhere.py:make"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err


# The benchmark.


SMALL = ["--batch-size", "60", "--embedding-size", "8", "--steps", "2", "--no-peers"]


def test_a_declared_loss_is_timed_beside_its_reference_and_a_built_in_loss(tmp_path, capsys):
    file = tmp_path / "losses.json"
    options = ["--losses", of("rows_and_columns"), "--beside", "clip", "--ranks", "1", "2"]
    assert main(["bench", "loss", *SMALL, *options, "--results", str(file)]) == 0
    rows = json.loads(file.read_text())
    methods = [(row["ranks"], row["method"]) for row in rows]
    assert methods == [
        (1, "declared flat"),
        (1, "its reference, for values"),
        (1, "built in, clip"),
        (2, "declared flat auto"),
        (2, "built in, clip"),
    ]
    assert all(row["step_ms"] > 0 for row in rows)


@pytest.mark.planted
def test_wrong_declared_losses_are_not_timed():
    """A gradient that is wrong by a factor, and a loss of another formula than the one beside it."""
    comm, job = LocalCommunicator(), Job(of("rows_and_columns"), [Configuration()], 8, 16, 1, 1, {}, "clip")
    for name in MAKES:
        check(comm, Subject(of(name)), Configuration())
    Methods(comm, job, CPU)
    with pytest.raises(AssertionError, match="not close"):
        Methods(comm, replace(job, beside="info_nce"), CPU)
    right = wb.PairLoss.forward
    with (
        patch.object(wb.PairLoss, "forward", lambda *z, **o: (f := right(*z, **o)) + (f - f.detach())),
        pytest.raises(AssertionError, match="not close"),
    ):
        check(comm, Subject(of("rows_and_columns")), Configuration())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--losses", "lifted"], "--losses must be some of clip, info_nce"),
        (["--beside", "clip"], "--beside is timed with a declared loss: name one in --losses"),
        (["--losses", "nowhere.py:make"], "wholebatch bench: error: there is no file nowhere.py\n"),  # by no process
    ],
)
def test_wrong_options_are_refused(options, message, capsys):
    assert main(["bench", "loss", *options]) == 2
    assert message in capsys.readouterr().err


def test_leaves_are_those_of_features_data_parameters_and_modules():
    scale = wb.Scale(10.0)
    loss_fn, arguments = call_of(with_own, 4, 6)
    assert [tuple(x.shape) for x in leaves_of(loss_fn, {**arguments, "parameters": {"scale": scale}})] == [
        (4, 6),
        (4, 6),
        (4, 3, 6),
        (1,),
    ]
    assert find(of("plain")) is plain
    assert find(plain) is plain
    assert normalize(arguments["x"], dim=1).allclose(arguments["x"])

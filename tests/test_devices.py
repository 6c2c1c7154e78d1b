"""Tensors are on the device of the features, or on the host on purpose, whatever torch's default device is.

Every public entry point runs, forward and backward, in two stand-ins for a GPU, and has the results of the CPU:

    meta    features on the CPU, and "meta" as the default device: a tensor made without `device=` has no data
    card    features on the device of `card.py`, which refuses tensors of the CPU, however they were made

The card stays registered in a process, so even one rank has a process of its own.
"""

import traceback
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from card import register, to_card
from device_cases import cases

from wholebatch._launch.processes import run_processes


def place(name):
    """Return a function that moves arguments there, and the context in which the library computes."""
    if name == "meta":
        return lambda tree: tree, partial(torch.device, "meta")
    register()
    return to_card, nullcontext


def failures_of_rank(name, folder, planted=None):
    """Return what was wrong, by case."""
    found, (moved, context) = {}, place(name)
    every = planted or cases(dist.get_world_size(), dist.get_rank(), folder, on_card=name == "card")
    for case, run in every.items():
        expected = run(lambda tree: tree, nullcontext)
        try:
            compare(case, run(moved, context), expected, exactly=name == "meta")
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            at = [frame for frame in traceback.extract_tb(error.__traceback__) if "wholebatch" in frame.filename]
            found[case] = f"{type(error).__name__}: {str(error)[:300]}, at {at[-1:]}"
    return found


def compare(case, actual, expected, *, exactly):
    """Compare results: bits, or on the card, whose tiles have other sizes, to rounding."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 0.0 if exactly else 1e-4 if "float32" in case else 1e-9
        torch.testing.assert_close(actual[key].cpu(), value, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["meta", "card"])
def test_no_tensor_is_on_another_device(name, size, tmp_path):
    for found in run_processes(failures_of_rank, size, name, str(tmp_path), timeout_s=300):
        assert not found, "\n".join(f"{case}: {text}" for case, text in found.items())


def _planted(tensor_of):
    return lambda moved, context: _sum(moved(torch.ones(3, requires_grad=True)), context, tensor_of)


def _sum(x, context, tensor_of):
    with context():
        (x * tensor_of(x)).sum().backward()
    return {"gradient": x.grad}


PLANTED = {
    "right": _planted(lambda x: torch.arange(3.0, device=x.device)),
    "without a device": _planted(lambda x: torch.arange(3.0)),
    "on the CPU": _planted(lambda x: torch.arange(3.0, device="cpu")),
    "other numbers": _planted(lambda x: torch.arange(3.0, device=x.device) + (x.device.type == "card")),
    "for the host alone": _planted(lambda x: torch.tensor([1, 2]).tolist()[0]),
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta", {"without a device", "for the host alone"}),
        ("card", {"without a device", "on the CPU", "other numbers"}),
    ],
)
def test_planted_mistakes_are_found(name, found):
    assert run_processes(failures_of_planted, 1, name)[0].keys() == found


def failures_of_planted(name):
    return failures_of_rank(name, "", PLANTED)

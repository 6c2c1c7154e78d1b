"""Check a loss before it is timed: value and gradients of this library's, and the value of any other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from wholebatch.comm import Communicator
from wholebatch.planning.sizes import MAX_SIM
from wholebatch.planning.subject import Loss

from .subjects import DTYPES, Configuration, Subject

GATE_SIZE = 16  # embedding size
_ROWS = {"cpu": 1000, "cuda": 9000}  # of a rank, more than a tile
_ITEMS, _TOKENS = {"cpu": 250, "cuda": 1500}, (16, 6)  # likewise
_FEW_ROWS = 5  # with few rows, values of similar losses differ
_SHARED = ("scale", "bias", "parameters")  # the same on all ranks
_CPU = torch.device("cpu")


def check(
    comm: Communicator,
    subject: Subject,
    configuration: Configuration,
    device: torch.device = _CPU,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check loss and gradients against the dense float64 reference of all ranks' rows, on a batch of several tiles.

    Raises:
        AssertionError: if they are wrong.
    """
    rows = _ROWS[device.type]
    if subject.loss == MAX_SIM:
        rows, subject = ceil(_ITEMS[device.type] / comm.size), Subject(MAX_SIM, _TOKENS)
    dtype = DTYPES[configuration.dtype]
    case = subject.make(rows, embedding_size, dtype, device, comm.rank)
    options = subject.options(configuration, rows * comm.size, embedding_size, comm.size, device)
    whole = _gathered(comm, case.arguments)
    loss = case.ours(**case.arguments, options={**options, "group": comm, "sync": None})
    expected = case.reference(**whole)
    assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-5, msg=partial(_difference, "loss", dtype))
    pairs = [(x, y) for x, y in _pairs(case.arguments, whole) if x.requires_grad]
    row_leaf_ids = {id(x) for x, y in pairs if x is not y}
    pairs += [(x, x) for x in case.leaves if id(x) not in {id(known) for known, _ in pairs}]
    local, true = (
        torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        for value, leaves in zip((loss, expected), zip(*pairs, strict=True), strict=True)
    )
    # float32 rounds at 1e-7; a gradient in half precision, and a kept weight in bfloat16, at 4e-3
    close = 2e-2 if dtype.itemsize == 2 or configuration.keep else 1e-5
    for (x, _), got, grad in zip(pairs, local, true, strict=True):
        if id(x) in row_leaf_ids:
            grad = grad[len(got) * comm.rank : len(got) * (comm.rank + 1)]
        else:  # with sync=None each rank has its share
            got = comm.all_reduce(got.clone(), check=False)
        atol = close * grad.abs().max().item() + 1e-12
        assert_close(got.double(), grad.double(), rtol=0, atol=atol, msg=partial(_difference, "gradient", dtype))


def _difference(name: str, dtype: torch.dtype, message: str) -> str:
    """Return in one line how far a loss or gradient is from the reference."""
    hint = "; a loss that chooses pairs by a threshold chooses the reference's with --dtypes float64 --keep 0"
    return f"the {name} is not the dense reference's: {' '.join(message.split())}{hint * (dtype != torch.float64)}"


def check_value(
    comm: Communicator,
    subject: Subject,
    loss: Loss,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check that another loss of the same arguments has this value: the mean over ranks is the reference's.

    Raises:
        AssertionError: if it computes another loss.
    """
    subject = Subject(MAX_SIM, _TOKENS) if subject.loss == MAX_SIM else subject
    case = subject.make(_FEW_ROWS, embedding_size, dtype, device, comm.rank)
    value = comm.all_reduce(loss(**case.arguments).detach().double(), "avg", check=False)
    close = 1e-4 if dtype.itemsize >= 4 else 1e-2
    assert_close(value, case.reference(**_gathered(comm, case.arguments)).double(), rtol=close, atol=close)


def _gathered(comm: Communicator, value: Any, name: str = "") -> Any:
    """Return arguments with all ranks' rows, in float64, as leaves; those that all ranks share as they are."""
    if name in _SHARED or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _gathered(comm, x, key) for key, x in value.items()}
    gathered = comm.all_gather(value.detach(), check=False)
    return (gathered.double() if gathered.is_floating_point() else gathered).requires_grad_(value.requires_grad)


def _pairs(local: Any, whole: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of arguments beside those of all ranks."""
    if isinstance(local, Mapping):
        return [pair for key, value in local.items() for pair in _pairs(value, whole[key])]
    return [(local, whole)] if isinstance(local, Tensor) else []

"""Check a loss before it is timed: the library's value and gradients, and a peer's value, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.comm import Communicator
from wholebatch.planning.subject import BIAS, SCALE

from .peers import PairLoss
from .subjects import DTYPES, SUBJECTS, Configuration

GATE_SIZE = 16  # embedding size
_GATE_ROWS = {"cpu": 1000, "cuda": 9000}  # more than a tile
_PEER_ROWS = 5  # with few rows, values of similar losses differ
_CPU = torch.device("cpu")


def check(
    comm: Communicator,
    name: str,
    configuration: Configuration,
    device: torch.device = _CPU,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check loss and gradients against the dense float64 reference, on a small batch of several tiles.

    Raises:
        AssertionError: if they are wrong.
    """
    dtype, entry = DTYPES[configuration.dtype], SUBJECTS[name]
    each = _GATE_ROWS[device.type]
    local, rows = slice(each * comm.rank, each * (comm.rank + 1)), each * comm.size
    whole = [x.to(device, dtype) for x in _features(rows, embedding_size)]

    def run(functions: object, towers: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
        leaves = [z.clone().requires_grad_() for z in towers]
        scale, bias = (torch.tensor(value, dtype=torch.float64, device=device) for value in (SCALE, BIAS))
        learned = [scale.requires_grad_()] if entry.scale_argument == "logit_scale" else []
        loss = entry.call(functions, *leaves, scale=scale if learned else SCALE, bias=bias.requires_grad_(), **options)
        return loss.detach(), *torch.autograd.grad(loss, [*leaves, *learned])

    expected = run(wb.reference, [z.double() for z in whole])
    options = configuration.options(entry.rows_per_example**2 * each * rows, device)
    actual = run(wb.functional, [z[local] for z in whole], group=comm, sync="mean", **options)
    # float32 rounds at 1e-7; a gradient in half precision, and a kept weight in bfloat16, at 4e-3
    close = 2e-2 if dtype.itemsize == 2 or configuration.keep else 1e-5
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for position, (got, true) in enumerate(zip(actual[1:], expected[1:], strict=True)):
        of_rank = comm.size * true[local] if position < len(whole) else true
        torch.testing.assert_close(got.double(), of_rank, rtol=0, atol=close * of_rank.abs().max().item())


def check_peer(
    comm: Communicator,
    name: str,
    loss: PairLoss,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check that a peer computes the same loss: the mean over ranks is the reference's value.

    Raises:
        AssertionError: if it computes another loss.
    """
    x, y = (z.to(device, dtype) for z in _features(_PEER_ROWS * comm.size, embedding_size))
    scale, bias = (torch.tensor(value, device=device) for value in (SCALE, BIAS))
    local = slice(_PEER_ROWS * comm.rank, _PEER_ROWS * (comm.rank + 1))
    value = comm.all_reduce(loss(x[local], y[local], scale, bias).detach().double(), "avg", check=False)
    entry = SUBJECTS[name]
    same = scale if entry.scale_argument == "logit_scale" else SCALE
    expected = entry.call(wb.reference, x.double(), y.double(), scale=same, bias=bias)
    close = 1e-4 if dtype.itemsize >= 4 else 1e-2
    torch.testing.assert_close(value, expected, rtol=close, atol=close)


def _features(rows: int, embedding_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [normalize(torch.randn(rows, embedding_size, generator=generator), dim=1) for _ in range(2)]

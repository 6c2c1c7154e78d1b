"""Time three strategies that give all ranks' rows to a loss, over the embedding size.

    all-gather with backpropagation      every rank computes the loss; reduce-scatter reduces the gradient to the owner
    all-gather without                   every rank computes the loss; only the local rows carry a gradient
    gather to root with backpropagation  one rank computes the loss; scatter returns the gradient to the owner

The loss is SimCLR's (Chen et al. 2020, equation 1) on random backbone outputs, so that only the loss and its
communication are timed. The experiment is that of Krajsek, "Adjoint MPI for Non-Additive Separable Loss Functions".

Two implementations of the all-gather's adjoint are timed as well: a reduce-scatter, and an all-reduce of which each
rank keeps its slice. The gradients are the same; time and bytes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb
from wholebatch._measure import seconds_of
from wholebatch.comm import Communicator

STRATEGIES = {
    "gather": "all-gather with backpropagation",
    "replicate": "all-gather without backpropagation",
    "root": "gather to root with backpropagation",
}
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce + slice"
_TEMPERATURE = 0.1
_WARM_UP = 2
_LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Row:
    """One figure: a step's median time, on the slowest rank."""

    method: str  # a strategy, or an implementation of the adjoint
    ranks: int
    embedding_size: int
    rows_per_rank: int
    step_ms: float
    wire_bytes_per_rank: float | None  # on the loopback interface; None where none were seen


def simclr(z0: Tensor, z1: Tensor) -> Tensor:
    """Return NT-Xent: rows i of the two views are a positive pair, all other rows are negatives."""
    z = F.normalize(torch.cat([z0, z1]), dim=1)
    logits = (z @ z.T / _TEMPERATURE).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z) // 2))


def check(comm: Communicator) -> None:
    """Check that every strategy gives the gradient of one process.

    Raises:
        AssertionError: if one does not; then nothing is timed.
    """
    generator = torch.Generator().manual_seed(0)
    views = torch.randn(2, 3 * comm.size, 5, dtype=torch.float64, generator=generator)
    whole = views.clone().requires_grad_()
    expected = simclr(*whole)
    (gradient,) = torch.autograd.grad(expected, whole)
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)
    for strategy in STRATEGIES:
        local = views[:, rows].clone().requires_grad_()
        loss = wb.WholeBatch(simclr, group=comm, sync=None, strategy=strategy)(*local)  # type: ignore[arg-type]
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(local.grad, gradient[:, rows], rtol=1e-10, atol=1e-12)
    partial = torch.randn(2 * comm.size, 3, dtype=torch.float64)
    both = [adjoint(comm, partial) for adjoint in _adjoints(2).values()]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def measure(comm: Communicator, embedding_sizes: Sequence[int], rows: int, steps: int) -> list[Row]:
    """Time every strategy and both adjoints at every embedding size, with `rows` rows of each view on each rank."""
    check(comm)
    results = []
    for size in embedding_sizes:
        views = torch.randn(2, rows, size)
        for strategy in STRATEGIES:
            loss_fn = wb.WholeBatch(simclr, group=comm, strategy=strategy)  # type: ignore[arg-type]

            def step(loss_fn: torch.nn.Module = loss_fn, views: Tensor = views) -> None:
                loss_fn(*views.detach().requires_grad_()).backward()

            results.append(Row(strategy, comm.size, size, rows, *_timed(comm, step, steps)))
        partial = torch.randn(2 * rows * comm.size, size)
        for name, adjoint in _adjoints(2 * rows).items():

            def backward(adjoint: Callable[..., Tensor] = adjoint, partial: Tensor = partial) -> None:
                adjoint(comm, partial)

            results.append(Row(name, comm.size, size, rows, *_timed(comm, backward, steps)))
    return results


def _adjoints(rows: int) -> dict[str, Callable[[Communicator, Tensor], Tensor]]:
    """Return two implementations that reduce every rank's gradient of all rows to the local rows."""
    return {
        REDUCE_SCATTER: lambda comm, partial: comm.reduce_scatter(partial, counts=[rows] * comm.size, check=False),
        ALL_REDUCE: lambda comm, partial: comm.all_reduce(partial, check=False).split(rows)[comm.rank].clone(),
    }


def _timed(comm: Communicator, step: Callable[[], None], steps: int) -> tuple[float, float | None]:
    """Return the median of a step's time on the slowest rank, in ms, and the bytes that a rank sends in a step."""
    for _ in range(_WARM_UP):
        seconds_of(comm, step)
    before = _loopback_bytes()
    step_ms = 1e3 * median(seconds_of(comm, step) for _ in range(steps))
    on_wire = (_loopback_bytes() - before) / steps / comm.size
    payload_seen = on_wire > 10_000  # less is the timing's own
    return round(step_ms, 3), round(on_wire) if payload_seen else None


def _loopback_bytes() -> int:
    return int(_LOOPBACK.read_text()) if _LOOPBACK.exists() else 0

"""Rates of the machine at hand, measured on W ranks that are all busy.

    entry      a loss at d = 16, where products are least, less the products that it takes: flat, and with all kept
    products   of d = 16: of tiles by themselves; of larger d: CLIP's sweep, less the entries
    wire       an all-gather and a reduce-scatter of few bytes, and of many

Batches are smaller than those that one plans for: a calibration takes some seconds for each loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median

import torch

from .._meter import seconds_of
from .._precision import accumulation_dtype
from ..comm import Communicator, LocalCommunicator
from ..sweep import Memory
from .rates import Rates
from .subject import make_step
from .work import LossName, Shapes, work_of

_LEAST, _WIDTHS = 16, (64, 256, 1024)
_BATCH, _WIDE_BATCH = 3840, 1920  # six tiles of a CPU's in a row, where calls weigh little; of the largest width
_KEPT_BATCH = 2560  # of which all that is kept comes from a heap; `memory` is what the system takes beyond that
_CLASSES = 4
_REPEATS = 3
_SMALL, _LARGE = 2**12, 2**21  # numbers of a message


def threads_of_a_rank(ranks: int) -> int:
    """Of the cores that there are."""
    return max(1, (os.cpu_count() or 1) // ranks)


def calibrate(
    comm: Communicator,
    losses: Sequence[LossName],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # it is frozen
) -> Rates:
    """Measure. All ranks of `comm`, with the threads that they are going to have.

    Args:
        comm: the ranks.
        losses: whose entries are measured.
        dtype: of features.
        device: of features.
    """

    def took(step: Callable[[], object]) -> float:
        step()
        return median(seconds_of(comm, step, device) for _ in range(_REPEATS))

    alone = LocalCommunicator()

    def of_loss(loss: LossName, batch: int, dim: int, kept: int) -> tuple[float, Shapes, Memory]:
        classes = _CLASSES * batch if loss == "partial_fc" else 0
        batch = batch // 2 if loss in ("nt_xent", "partial_fc") else batch
        shapes = Shapes(loss, batch, dim, 1, dtype, device.type, classes=classes)
        memory: Memory = shapes.memory_for(kept) if kept else "flat"
        return took(make_step(alone, shapes, "gather", memory, device)), shapes, memory

    products = {_LEAST: _of_tiles(took, Shapes("clip", _BATCH, _LEAST, 1, dtype, device.type), device)}
    call = took(make_step(alone, Shapes("clip", 2, _LEAST, 1, dtype, device.type), "gather", "flat", device))
    fresh = torch.empty(0)

    def write() -> None:
        nonlocal fresh
        fresh = torch.empty(0)
        fresh = torch.ones(64 * _LARGE // 4, device=device)

    memory = 4 * (64 * _LARGE // 4) / took(write)
    del fresh

    entry: dict[str, dict[int, float]] = {}
    for loss in dict.fromkeys((*losses, "clip")):
        entry[loss] = {}
        for kept in (0, *Shapes(loss, 1, 1, 1, dtype, classes=1).kept_sizes()):
            seconds, shapes, setting = of_loss(loss, _KEPT_BATCH if kept else _BATCH, _LEAST, kept)
            work = work_of(shapes, "gather", setting)
            entry[loss][kept] = max(0.0, seconds - call - work.flops / products[_LEAST]) / work.entries
    for dim in _WIDTHS:
        seconds, shapes, _ = of_loss("clip", _WIDE_BATCH if dim == _WIDTHS[-1] else _BATCH, dim, 0)
        work = work_of(shapes, "gather", "flat")
        products[dim] = work.flops / max(1e-9, seconds - call - work.entries * entry["clip"][0])
    wire, message = _of_network(comm, took, device)
    return Rates(
        f"measured on {comm.size} rank{'s' if comm.size > 1 else ''}, {device}, torch {torch.__version__}",
        products,
        entry,
        call,
        memory,
        wire,
        message,
        encoders=products[_WIDTHS[-1]],
        side_of=device.type,
    )


def _of_tiles(took: Callable[[Callable[[], object]], float], shapes: Shapes, device: torch.device) -> float:
    """Flops per second of a tile's three products, as a sweep takes them."""
    side, dtype = shapes.side, accumulation_dtype(shapes.dtype)
    x, y = (torch.randn(side, shapes.dim, dtype=dtype, device=device) for _ in range(2))
    u, v = torch.zeros_like(x), torch.zeros_like(y)
    tile = torch.empty(side, side, dtype=dtype, device=device)
    often = max(1, round(2e8 / (8 * side**2 * shapes.dim)))

    def products() -> None:
        for _ in range(often):
            torch.mm(x, y.T, out=tile)
            torch.mm(x, y.T, out=tile)
            u.addmm_(tile, y)
            v.addmm_(tile.T, x)

    return often * 8 * side**2 * shapes.dim / took(products)


def _of_network(
    comm: Communicator, took: Callable[[Callable[[], object]], float], device: torch.device
) -> tuple[float, float]:
    """Bytes per second that a rank sends, and seconds of a small message."""
    if comm.size == 1:
        return float("inf"), 0.0
    seconds = []
    for numbers in (_SMALL, _LARGE):
        own = torch.ones(numbers, device=device)

        def there_and_back(own: torch.Tensor = own) -> None:
            comm.reduce_scatter(comm.all_gather(own, check=False), check=False)

        seconds.append(took(there_and_back) / 2)
    sent = 4 * (comm.size - 1)
    wire = sent * (_LARGE - _SMALL) / max(1e-9, seconds[1] - seconds[0])
    return wire, max(0.0, seconds[0] - sent * _SMALL / wire)

"""Rates of the machine at hand, measured on W ranks that are all busy.

    entry      a loss at d = 16, where products are least, less the products that it takes: flat, and with all kept
    products   of tiles by themselves; but for d = 16 by as much slower or faster as CLIP's sweep is, less its entries
    wire       an all-gather and a reduce-scatter of few bytes, and of many

Batches are smaller than those that one plans for: a calibration takes some seconds for each loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from .._checks import check_choice, check_floating_dtype, check_instance, check_sequence
from .._measure import seconds_of
from .._precision import accumulation_dtype
from ..comm import Communicator, LocalCommunicator
from ..sweep import Memory
from .rates import Rates, seconds_of_products
from .subject import make_step
from .work import LOSSES, LossName, Shapes, work_of

_LEAST, _WIDTHS = 16, (64, 256, 1024)
# Tiles in a row of S: so many that calls weigh little; of the largest width; and so few that a heap holds what is kept.
_TILES = {"cpu": (6, 3, 4), "cuda": (2, 1, 2)}
_CLASSES = 4
_REPEATS = 3
_LONG_ENOUGH = 1e9  # flops
_MOST_SHARED = 2.0  # times faster than by themselves no products are in a sweep, however busy the machine was meanwhile
_SMALL, _LARGE = 2**12, 2**21  # numbers of a message
_FRESH = 2**25  # numbers of memory that is written for the first time


def calibrate(
    comm: Communicator,
    losses: Sequence[LossName],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # it is frozen
) -> Rates:
    """Rates of this machine, each measured on all ranks at a time.

    Args:
        comm: the ranks, each of which calls this, with the threads that it is going to have (`torch.set_num_threads`).
        losses: whose entries are measured; CLIP's are in any case.
        dtype: of features.
        device: of features, this rank's.

    Returns:
        The same :class:`Rates` on all ranks: times are those of the slowest. Some seconds for each loss. Collective.

    Raises:
        ValueError: if an argument is not what it should be.
        CommunicationError: if the ranks fail to talk.
    """
    check_instance("comm", comm, Communicator, "a communicator, such as wholebatch.comm.LocalCommunicator()")
    for loss in check_sequence("losses", losses, "names of losses"):
        check_choice("losses", loss, LOSSES)
    check_floating_dtype("dtype", dtype)
    check_instance("device", device, torch.device, "a torch.device")
    if device.type not in _TILES:
        raise ValueError(f"device must be a CPU or a CUDA device, got {device}")

    def took(step: Callable[[], object]) -> float:
        step()
        return median(seconds_of(comm, step, device) for _ in range(_REPEATS))

    alone = LocalCommunicator()
    smallest = Shapes("clip", 2, _LEAST, 1, dtype, device.type)
    many, wide, few = (smallest.side * tiles for tiles in _TILES[device.type])

    def of_loss(loss: LossName, batch: int, dim: int, kept: int) -> tuple[float, Shapes, Memory]:
        classes = _CLASSES * batch if loss == "partial_fc" else 0
        batch = batch // 2 if loss in ("nt_xent", "partial_fc") else batch
        shapes = Shapes(loss, batch, dim, 1, dtype, device.type, classes=classes)
        memory: Memory = shapes.memory_for(kept) if kept else "flat"
        return took(make_step(alone, shapes, "gather", memory, device)), shapes, memory

    tiles = {d: _of_tiles(took, replace(smallest, dim=d), device) for d in (_LEAST, *_WIDTHS)}
    products, again = ({d: of[which] for d, of in tiles.items()} for which in (0, 1))
    call = took(make_step(alone, smallest, "gather", "flat", device))
    memory = 4 * _FRESH / took(lambda: torch.ones(_FRESH, device=device))

    entry: dict[str, dict[int, float]] = {}
    for loss in dict.fromkeys((*losses, "clip")):
        entry[loss] = {}
        for kept in (0, *Shapes(loss, 1, 1, 1, dtype, classes=1).kept_sizes()):
            seconds, shapes, setting = of_loss(loss, few if kept else many, _LEAST, kept)
            work = work_of(shapes, "gather", setting)
            of_products = seconds_of_products(work, products[_LEAST], again[_LEAST])
            entry[loss][kept] = max(0.0, seconds - call - of_products) / work.entries
    for dim in _WIDTHS:
        seconds, shapes, _ = of_loss("clip", wide if dim == _WIDTHS[-1] else many, dim, 0)
        work = work_of(shapes, "gather", "flat")
        by_themselves = seconds_of_products(work, products[dim], again[dim])
        in_sweep = max(by_themselves / _MOST_SHARED, seconds - call - work.entries * entry["clip"][0])
        share = by_themselves / in_sweep
        products[dim] *= share
        again[dim] *= share
    wire, message = _of_network(comm, took, device)
    return Rates(
        f"measured on {comm.size} rank{'s' if comm.size > 1 else ''}, {device}, {dtype}, torch {torch.__version__}",
        products,
        again,
        entry,
        call,
        memory,
        wire,
        message,
        encoders=_of_encoders(took, dtype, device),
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        ranks=comm.size if device.type == "cpu" else None,
    )


def _of_tiles(
    took: Callable[[Callable[[], object]], float], shapes: Shapes, device: torch.device
) -> tuple[float, float]:
    """Flops per second of a tile's three products, as a sweep takes them, and of the first of them."""
    side, dtype = shapes.side, accumulation_dtype(shapes.dtype)
    x, y = (torch.randn(side, shapes.dim, dtype=dtype, device=device) for _ in range(2))
    u, v = torch.zeros_like(x), torch.zeros_like(y)
    tile = torch.empty(side, side, dtype=dtype, device=device)
    of_one = 2 * side**2 * shapes.dim
    often = max(1, round(_LONG_ENOUGH / of_one))

    def all_three() -> None:
        for _ in range(often):
            torch.mm(x, y.T, out=tile)
            u.addmm_(tile, y)
            v.addmm_(tile.T, x)

    def the_first() -> None:
        for _ in range(often):
            torch.mm(x, y.T, out=tile)

    return 3 * often * of_one / took(all_three), often * of_one / took(the_first)


def _of_encoders(took: Callable[[Callable[[], object]], float], dtype: torch.dtype, device: torch.device) -> float:
    """Flops per second of a linear map, in the features' dtype: an encoder is made of little else."""
    width = _WIDTHS[-1]
    x, weight = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / took(lambda: torch.mm(x, weight))


def _of_network(
    comm: Communicator, took: Callable[[Callable[[], object]], float], device: torch.device
) -> tuple[float | None, float]:
    """Bytes per second that a rank sends, None if there is nobody to send to; and seconds of a small message."""
    if comm.size == 1:
        return None, 0.0
    seconds = []
    for numbers in (_SMALL, _LARGE):
        local = torch.ones(numbers, device=device)

        def there_and_back(local: torch.Tensor = local) -> None:
            comm.reduce_scatter(comm.all_gather(local, check=False), check=False)

        seconds.append(took(there_and_back) / 2)
    sent = 4 * (comm.size - 1)
    wire = sent * (_LARGE - _SMALL) / max(1e-9, seconds[1] - seconds[0])
    return wire, max(0.0, seconds[0] - sent * _SMALL / wire)

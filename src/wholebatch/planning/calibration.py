"""Measure the rates of this machine, on W ranks that are all busy.

    entry      a loss at d = 16, where products take least time, minus its products: flat, and with all entries kept
    products   of tiles alone; except at d = 16, corrected by the ratio to CLIP's sweep without its entries
    wire       an all-gather and a reduce-scatter of few bytes, and of many

Batches are smaller than those of a plan: a calibration takes some seconds for each loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from .._base.checks import check_choice, check_floating_dtype, check_instance, check_sequence
from .._base.precision import accumulation_dtype
from .._measure import seconds_of
from ..comm import Communicator, LocalCommunicator
from ..losses.catalog import CATALOG
from ..sweep import Memory
from .counted import work_of
from .declared import declared, is_declared
from .rates import Rates, seconds_of_products
from .shapes import Shapes, TokenShapes
from .sizes import LOSSES, MAX_SIM, PARTIAL_FC, TOKENS, LossName
from .subject import make_step

_SMALLEST, _SIZES = 16, (64, 256, 1024)  # embedding sizes
# Tiles in a row of S: enough that calls weigh little; for the largest d; and few enough that a heap holds kept entries.
_TILES = {"cpu": (6, 3, 4), "cuda": (2, 1, 2)}
_CLASSES = 4
_MORE_TOKENS = 2  # than rows, because products of tokens take less time than entries of S
_REPEATS = 3
_LONG_ENOUGH = 1e9  # flops
_MOST_SHARED = 2.0  # products are at most this much faster in a sweep than alone; more is noise of a busy machine
_SMALL, _LARGE = 2**12, 2**21  # numbers of a message
_FRESH = 2**25  # numbers of memory that is written for the first time


def calibrate(
    comm: Communicator,
    losses: Sequence[LossName],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # it is frozen
) -> Rates:
    """Measure the rates of this machine on all ranks at a time. Collective.

    Args:
        comm: the ranks, each of which calls this, with the threads of the planned run (`torch.set_num_threads`).
        losses: names of the losses whose entries are measured, as in `plan`; CLIP's are in any case.
        dtype: of features.
        device: of features, this rank's.

    Returns:
        The same :class:`Rates` on all ranks: times are the slowest rank's. It takes some seconds for each loss.

    Raises:
        ValueError: for an argument of another type or value.
        CommunicationError: if communication fails.
    """
    check_instance("comm", comm, Communicator, "a communicator, such as wholebatch.comm.LocalCommunicator()")
    for loss in check_sequence("losses", losses, "names of losses"):
        if not is_declared(loss):
            check_choice("losses", loss, LOSSES)
    check_floating_dtype("dtype", dtype)
    check_instance("device", device, torch.device, "a torch.device")
    if device.type not in _TILES:
        raise ValueError(f"device must be a CPU or a CUDA device, got {device}")

    def took(step: Callable[[], object]) -> float:
        step()
        return median(seconds_of(comm, step, device) for _ in range(_REPEATS))

    alone = LocalCommunicator()
    users = {loss: declared(loss, accumulation_dtype(dtype)) for loss in losses if is_declared(loss)}
    smallest = Shapes("clip", 2, _SMALLEST, 1, dtype, device.type)
    many, wide, few = (smallest.side * tiles for tiles in _TILES[device.type])

    def shapes_of(loss: LossName, rows: int, embedding_size: int) -> Shapes:
        if loss == MAX_SIM:
            t, u = TOKENS.values()
            items = round(_MORE_TOKENS * rows / (t * u) ** 0.5)
            return TokenShapes(loss, items, embedding_size, 1, dtype, device.type, query_tokens=t, document_tokens=u)
        classes = _CLASSES * rows if loss == PARTIAL_FC else 0
        each = 1 if loss in users else 2 if loss == PARTIAL_FC else CATALOG[loss].rows_per_example
        return Shapes(
            loss, rows // each, embedding_size, 1, dtype, device.type, classes=classes, declared=users.get(loss)
        )

    def time_loss(loss: LossName, rows: int, embedding_size: int, kept: int) -> tuple[float, Shapes, Memory]:
        shapes = shapes_of(loss, rows, embedding_size)
        memory: Memory = shapes.memory_for(kept) if kept else "flat"
        return took(make_step(alone, shapes, "gather", memory, device)), shapes, memory

    tiles = {d: _rates_of_tiles(took, replace(smallest, embedding_size=d), device) for d in (_SMALLEST, *_SIZES)}
    products, again = ({d: pair[which] for d, pair in tiles.items()} for which in (0, 1))
    call = took(make_step(alone, smallest, "gather", "flat", device))
    memory = 4 * _FRESH / took(lambda: torch.ones(_FRESH, device=device))

    entry: dict[str, dict[int, float]] = {}
    for loss in dict.fromkeys((*losses, "clip")):
        entry[loss] = {}
        for kept in (0, *shapes_of(loss, few, _SMALLEST).kept_sizes()):
            rows = few if kept and loss != MAX_SIM else many  # winners are few bytes
            seconds, shapes, setting = time_loss(loss, rows, _SMALLEST, kept)
            work = work_of(shapes, "gather", setting)
            of_products = seconds_of_products(work, products[_SMALLEST], again[_SMALLEST])
            entry[loss][kept] = max(0.0, seconds - call - of_products) / work.entries
    for d in _SIZES:
        seconds, shapes, _ = time_loss("clip", wide if d == _SIZES[-1] else many, d, 0)
        work = work_of(shapes, "gather", "flat")
        alone_s = seconds_of_products(work, products[d], again[d])
        in_sweep = max(alone_s / _MOST_SHARED, seconds - call - work.entries * entry["clip"][0])
        share = alone_s / in_sweep
        products[d] *= share
        again[d] *= share
    wire, message = _rates_of_network(comm, took, device)
    x = torch.randn(_SIZES[-1], _SIZES[-1], device=device).to(dtype)
    return Rates(
        f"measured on {comm.size} rank{'s' if comm.size > 1 else ''}, {device}, {dtype}, torch {torch.__version__}",
        products,
        again,
        entry,
        call,
        memory,
        wire,
        message,
        encoders=2 * len(x) ** 3 / took(lambda: torch.mm(x, x)),  # a linear map stands for an encoder
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        ranks=comm.size if device.type == "cpu" else None,
    )


def _rates_of_tiles(
    took: Callable[[Callable[[], object]], float], shapes: Shapes, device: torch.device
) -> tuple[float, float]:
    """Return the flops per second of a tile's three products, as a sweep computes them, and of the first of them."""
    side, dtype = shapes.side, accumulation_dtype(shapes.dtype)
    x, y = (torch.randn(side, shapes.embedding_size, dtype=dtype, device=device) for _ in range(2))
    u, v = torch.zeros_like(x), torch.zeros_like(y)
    tile = torch.empty(side, side, dtype=dtype, device=device)
    of_one = 2 * side**2 * shapes.embedding_size
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


def _rates_of_network(
    comm: Communicator, took: Callable[[Callable[[], object]], float], device: torch.device
) -> tuple[float | None, float]:
    """Return the bytes per second that a rank sends, None on one rank, and the seconds of a small message."""
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

"""Measure the rates of this machine, on W ranks that are all busy.

    tiles      a step of the loss at d = 16, where products take least time, minus its products, timed alone
    products   of a step of CLIP at each d, without the time of its tiles
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
from .counted import work_of
from .declared import declared, is_declared
from .rates import Rates, Work
from .shapes import Shapes, TokenShapes
from .sizes import LOSSES, MAX_SIM, PARTIAL_FC, TOKENS, LossName
from .subject import make_step

_SMALLEST, _SIZES = 16, (64, 256, 1024)  # embedding sizes
_TILES = {"cpu": (6, 3), "cuda": (2, 1)}  # in a row of S: enough that calls weigh little; for the largest d
_MORE_TOKENS = 2  # than rows, because products of tokens take less time than entries of S
_REPEATS = 3
_LONG_ENOUGH = 1e9  # flops
# of a step's time at least is that of its products, of its tiles, or of both; less is noise of a busy machine
_LEAST = 0.2
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
        losses: names of the losses whose tiles are measured, as in `plan`; CLIP's are in any case.
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

    smallest = Shapes("clip", 2, _SMALLEST, 1, dtype, device.type)
    many, wide = (smallest.side * tiles for tiles in _TILES[device.type])

    def time_loss(loss: LossName, rows: int, embedding_size: int) -> tuple[float, Work]:
        """Return the seconds of a step, without those of its calls, and its work."""
        form = embedding_size, 1, dtype, device.type
        if loss == MAX_SIM:
            t, u = TOKENS.values()
            items = round(_MORE_TOKENS * rows / (t * u) ** 0.5)
            shapes: Shapes = TokenShapes(loss, items, *form, query_tokens=t, document_tokens=u)
        elif loss == PARTIAL_FC:
            shapes = Shapes(loss, rows // 2, *form, classes=2 * rows)
        else:
            user = declared(loss, accumulation_dtype(dtype)) if is_declared(loss) else None
            shapes = Shapes(loss, rows, *form, declared=user)
            shapes = replace(shapes, batch_size=rows // shapes.form.rows_per_example)
        seconds = took(make_step(LocalCommunicator(), shapes, "gather", "flat", device))
        return max(_LEAST * seconds, seconds - call), work_of(shapes, "gather", "flat")

    call = took(make_step(LocalCommunicator(), smallest, "gather", "flat", device))
    alone = _rate_of_products(took, smallest, device)
    tiles = {}
    for loss in dict.fromkeys((*losses, "clip")):
        seconds, work = time_loss(loss, many, _SMALLEST)
        tiles[loss] = work.moved / max(_LEAST * seconds, seconds - work.flops / alone)
    products = {_SMALLEST: alone}
    for d in _SIZES:
        seconds, work = time_loss("clip", wide if d == _SIZES[-1] else many, d)
        products[d] = work.flops / max(_LEAST * seconds, seconds - work.moved / tiles["clip"])
    wire, message = _rates_of_network(comm, took, device)
    x = torch.randn(_SIZES[-1], _SIZES[-1], device=device).to(dtype)
    return Rates(
        f"measured on {comm.size} rank{'s' if comm.size > 1 else ''}, {device}, {dtype}, torch {torch.__version__}",
        products,
        tiles,
        call,
        4 * _FRESH / took(lambda: torch.ones(_FRESH, device=device)),
        wire,
        message,
        encoders=2 * len(x) ** 3 / took(lambda: torch.mm(x, x)),  # a linear map stands for an encoder
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        ranks=comm.size if device.type == "cpu" else None,
    )


def _rate_of_products(took: Callable[[Callable[[], object]], float], shapes: Shapes, device: torch.device) -> float:
    """Return the flops per second of a tile's products, S twice and both gradients, as a sweep computes them."""
    side, dtype = shapes.side, accumulation_dtype(shapes.dtype)
    x, y = (torch.randn(side, shapes.embedding_size, dtype=dtype, device=device) for _ in range(2))
    u, v = torch.zeros_like(x), torch.zeros_like(y)
    tile = torch.empty(side, side, dtype=dtype, device=device)
    product_flops = 2 * side**2 * shapes.embedding_size
    often = max(1, round(_LONG_ENOUGH / product_flops))

    def step() -> None:
        for _ in range(often):
            for _ in range(2):
                torch.mm(x, y.T, out=tile)
            u.addmm_(tile, y)
            v.addmm_(tile.T, x)

    return 4 * often * product_flops / took(step)


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

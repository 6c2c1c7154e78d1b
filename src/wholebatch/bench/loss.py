"""Time and memory of a loss, forward and backward: against the product that it cannot do without, and against peers.

    floor       one torch.mm of b rows with all B columns (of 8192 at most, and then in proportion), times the units of
                b B d multiply-adds that the loss takes (CLIP and InfoNCE 4, SigLIP 3, NT-Xent 2 of its 2b x 2B)
    transient   how far the peak of the process's memory rises above what is in use before the step, dX and dY included

Every way is checked before it is timed: the library's against the dense float64 twin, value and gradients; a peer's
value, so that the same loss is timed. Ways take turns, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._measure import rise_of_peak, seconds_of
from wholebatch._precision import accumulation_dtype
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.subject import BIAS, OF_PAIRS, SCALE
from wholebatch.sweep import default_side

from .peers import PEERS, PairLoss

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DTYPES = tuple(_DTYPES)
_GATE_ROWS, _GATE_DIM = {"cpu": 1000, "cuda": 9000}, 16  # more than a tile
_LONG = 512  # features from which on kernels work in other parts
_CPU = torch.device("cpu")
_PEER_ROWS = 5  # so few that losses that are alike differ in value
_FLOOR_ROWS = 8192


@dataclass(frozen=True)
class Subject:
    """A loss of this library, its twin, and its work in units of (rows) x (columns) x d multiply-adds."""

    call: Callable[..., Tensor]  # as in OF_PAIRS
    units: int
    tower_rows: int = 1  # rows of S for each pair of the batch


SUBJECTS = {
    "clip": Subject(OF_PAIRS["clip"], 4),
    "info_nce": Subject(OF_PAIRS["info_nce"], 4),
    "nt_xent": Subject(OF_PAIRS["nt_xent"], 2, tower_rows=2),
    "siglip": Subject(OF_PAIRS["siglip"], 3),
}


@dataclass(frozen=True)
class Way:
    """Settings with which the library computes a loss."""

    keep: float = 0.0  # bytes for each entry of S, beside the two tiles of a flat sweep
    exchange: str = "auto"
    dtype: str = "float32"
    kernel: str = "auto"

    def label(self, ranks: int) -> str:
        """The settings, in the order of their weight."""
        parts = [f"keep {self.keep:g} bytes/entry" if self.keep else "flat"]
        parts += [self.exchange] if ranks > 1 else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [self.kernel] if self.kernel != "auto" else []
        return " ".join(["wholebatch", *parts])

    def options(self, entries: int, device: torch.device) -> dict[str, object]:
        """The loss's arguments, for a rank that computes so many entries of S."""
        options = {"exchange": self.exchange, "kernel": self.kernel}
        if not self.keep:
            return {"memory": "flat", **options}
        tiles = 2 * _DTYPES[self.dtype].itemsize * default_side(device) ** 2
        tiles *= 2 if _DTYPES[self.dtype].itemsize == 2 else 1  # half precision is widened
        return {"memory": tiles + math.ceil(self.keep * entries), **options}


@dataclass(frozen=True)
class Row:
    """One figure: a step of one way, on the slowest rank."""

    loss: str
    what: str
    package: str  # whose loss it is, with its version
    ranks: int
    threads: int
    rows: int  # of each tower, on all ranks
    dim: int
    dtype: str
    keep: float  # bytes of exp(S) per entry
    exchange: str
    device: str  # "cpu", or the GPU's name
    kernel: str
    step_ms: float | None  # None: it did not run, `note` says why
    times_floor: float | None
    tflops: float | None  # of all ranks: 2 for each multiply-add that the loss takes here, whatever this way takes
    transient_mb: float | None  # None where it cannot be measured
    note: str = ""


def measure(
    comm: Communicator,
    name: str,
    ways: Sequence[Way],
    *,
    rows: int,
    dim: int,
    steps: int,
    threads: int,
    versions: dict[str, str],
    device: torch.device,
) -> list[Row]:
    """Every way of one loss and its peers, on all ranks of `comm`.

    Args:
        comm: the ranks, each of which runs this.
        name: of the loss, in SUBJECTS.
        ways: settings of this library's; the first is what others are compared to.
        rows: of each tower, over all ranks.
        dim: feature size.
        steps: that are timed of each way; figures are medians.
        threads: of each rank.
        versions: of the packages whose peers are to be measured.
        device: of this rank.

    Raises:
        AssertionError: if a way is not exact: then there is nothing to time.
    """
    torch.set_num_threads(threads)
    subject = SUBJECTS[name]
    local = Partition.even(rows, comm.size).counts[comm.rank]
    entries = subject.tower_rows**2 * local * rows
    generator = torch.Generator().manual_seed(comm.rank)
    towers = [normalize(torch.randn(local, dim, generator=generator), dim=1).to(device) for _ in range(2)]
    on = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)

    runs: list[tuple[Row, Callable[[], None]]] = []

    def row(what: str, package: str, way: Way, note: str = "") -> Row:
        settings = (comm.size, threads, rows, dim, way.dtype, way.keep, way.exchange, on, way.kernel)
        return Row(name, what, package, *settings, None, None, None, None, note)

    def add(what: str, package: str, way: Way, loss: PairLoss) -> None:
        leaves = [z.to(_DTYPES[way.dtype], copy=True).requires_grad_() for z in towers]
        leaves += [torch.tensor(value, device=device, requires_grad=True) for value in (SCALE, BIAS)]

        def step() -> None:
            loss(*leaves).backward()

        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)  # memory that is in use already is not the loss's
        runs.append((row(what, package, way), step))

    for way in ways:
        for width in {_GATE_DIM, _GATE_DIM if device.type == "cpu" else min(dim, _LONG)}:
            check(comm, name, way, device, width)
        options = way.options(entries, device)
        add(
            way.label(comm.size),
            f"wholebatch {wb.__version__}",
            way,
            lambda x, y, scale, bias, options=options: subject.call(  # type: ignore[misc]
                wb.functional, x, y, scale, bias, group=comm, **options
            ),
        )
    refused: list[Row] = []
    for peer in PEERS[name]:
        if peer.package not in versions or (comm.size > 1 and not peer.on_ranks):
            continue
        if device.type == "cpu" and not peer.on_cpu:
            continue
        label = peer.label if ways[0].dtype == "float32" else f"{peer.label} {ways[0].dtype}"
        package, of_peer = f"{peer.package} {versions[peer.package]}", Way(exchange="", dtype=ways[0].dtype, kernel="")
        try:
            loss = peer.build(comm, SCALE)
        except ImportError as error:  # installed, but not with all that it needs
            refused.append(row(label, package, of_peer, f"skipped: {error}"))
            continue
        if dim % peer.dim:
            refused.append(row(label, package, of_peer, f"skipped: d must be a multiple of {peer.dim}"))
            continue
        check_peer(comm, name, loss, device, _DTYPES[of_peer.dtype], max(peer.dim, _GATE_DIM))
        add(label, package, of_peer, loss)

    shape = [min(_FLOOR_ROWS, subject.tower_rows * n) for n in (local, rows)]
    floors = {way.dtype: _Floor.of(shape, dim, device, _DTYPES[way.dtype]) for way in ways}
    times: dict[int, list[float]] = {}
    peaks: dict[int, int | None] = {}
    running = dict(enumerate(runs))
    for index, (waiting, step) in enumerate(runs):
        try:
            step()  # libraries load, threads start
            peaks[index] = rise_of_peak(comm, step, device)
        except RuntimeError as error:  # a way that asks for more memory than there is, on every rank alike
            asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", str(error))
            if asked is None:
                raise
            at_once = asked[2] or f"{int(asked[1]) / 1e9:.1f} GB"
            refused.append(replace(waiting, note=f"did not run: asks for {at_once} at once"))
            del running[index]
    for _ in range(steps):
        for floor in floors.values():
            floor.times.append(1e3 * seconds_of(comm, floor.step, device))
        for index, (_, step) in running.items():
            times.setdefault(index, []).append(1e3 * seconds_of(comm, step, device))
    floor_ms = {
        dtype: subject.units * median(floor.times) * entries / math.prod(shape) for dtype, floor in floors.items()
    }
    flop = 2 * subject.units * (subject.tower_rows * rows) ** 2 * dim
    return [
        _with_figures(run, median(times[index]), floor_ms[run.dtype], flop, peaks[index])
        for index, (run, _) in running.items()
    ] + refused


@dataclass(frozen=True)
class _Floor:
    """A product in the precision in which tiles are computed: on a CPU, half precision is widened."""

    step: Callable[[], object]
    times: list[float]

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, device: torch.device, dtype: torch.dtype) -> _Floor:
        dtype = accumulation_dtype(dtype) if device.type == "cpu" else dtype
        left, right = (torch.randn(n, dim, device=device, dtype=dtype) for n in shape)
        return cls(partial(torch.mm, left, right.T, out=left.new_empty(*shape)), [])


def check(comm: Communicator, name: str, way: Way, device: torch.device = _CPU, dim: int = _GATE_DIM) -> None:
    """One way of the library against the dense float64 twin, on a small batch of several tiles: loss and gradients.

    Raises:
        AssertionError: if it is wrong.
    """
    dtype = _DTYPES[way.dtype]
    call: Callable[..., Tensor] = SUBJECTS[name].call
    of_rank = _GATE_ROWS[device.type]
    local, rows = slice(of_rank * comm.rank, of_rank * (comm.rank + 1)), of_rank * comm.size
    generator = torch.Generator().manual_seed(0)
    whole = [normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device, dtype) for _ in range(2)]

    def run(functions: object, towers: Sequence[Tensor], **options: object) -> tuple[Tensor, ...]:
        leaves = [z.clone().requires_grad_() for z in towers]
        scale, bias = (torch.tensor(value, dtype=torch.float64, device=device) for value in (SCALE, BIAS))
        scale.requires_grad_(), bias.requires_grad_()
        loss = call(functions, leaves[0], leaves[1], scale, bias, **options)
        wanted = leaves if name == "nt_xent" else [*leaves, scale]  # its temperature is a number here
        return loss.detach(), *torch.autograd.grad(loss, wanted)

    expected = run(wb.reference, [z.double() for z in whole])
    options = way.options(SUBJECTS[name].tower_rows ** 2 * of_rank * rows, device)
    actual = run(wb.functional, [z[local] for z in whole], group=comm, sync="mean", **options)
    # float32 rounds at 1e-7; a gradient in half precision, and a kept weight in bfloat16, at 4e-3
    close = 2e-2 if dtype.itemsize == 2 or way.keep else 1e-5
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for position, (got, true) in enumerate(zip(actual[1:], expected[1:], strict=True)):
        mine = comm.size * true[local] if position < len(whole) else true
        torch.testing.assert_close(got.double(), mine, rtol=0, atol=close * mine.abs().max().item())


def check_peer(
    comm: Communicator,
    name: str,
    loss: PairLoss,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    dim: int = _GATE_DIM,
) -> None:
    """A peer computes the same loss: its ranks' mean is the twin's value, so that both are timed at the same task.

    Raises:
        AssertionError: if it is another loss.
    """
    generator = torch.Generator().manual_seed(0)
    rows = _PEER_ROWS * comm.size
    whole = [normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device, dtype) for _ in range(2)]
    scale, bias = (torch.tensor(value, device=device) for value in (SCALE, BIAS))
    local = slice(_PEER_ROWS * comm.rank, _PEER_ROWS * (comm.rank + 1))
    x, y = whole
    value = comm.all_reduce(loss(x[local], y[local], scale, bias).detach().double(), "avg", check=False)
    expected = SUBJECTS[name].call(wb.reference, x.double(), y.double(), scale, bias)
    close = 1e-4 if dtype.itemsize >= 4 else 1e-2
    torch.testing.assert_close(value, expected, rtol=close, atol=close)


def _with_figures(row: Row, step_ms: float, floor_ms: float, flop: float, peak: int | None) -> Row:
    return replace(
        row,
        step_ms=round(step_ms, 3),
        times_floor=round(step_ms / floor_ms, 3),
        tflops=float(f"{flop / (step_ms * 1e9):.3g}"),
        transient_mb=None if peak is None else round(peak / 1e6, 2),
    )

"""Measure the methods of one loss: time, in turns with each other, and the rise of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch.nn.functional import normalize

from wholebatch import kernels
from wholebatch._base.precision import accumulation_dtype
from wholebatch._measure import rise_of_peak, seconds_of
from wholebatch.comm import Communicator
from wholebatch.planning.subject import BIAS, SCALE

from .peers import PairLoss
from .subjects import DTYPES, Configuration

_FLOOR_ROWS = 8192


@dataclass(frozen=True)
class Row:
    """One figure: a step of one method, on the slowest rank."""

    loss: str
    method: str
    package: str  # with its version
    ranks: int
    threads: int
    batch_size: int  # on all ranks
    embedding_size: int
    dtype: str
    keep: float  # bytes of exp(S) per entry
    exchange: str
    device: str  # "cpu", or the GPU's name
    kernel: str
    step_ms: float | None  # None if it did not run; `note` says why
    times_floor: float | None
    tflops: float | None  # of all ranks: 2 for each multiply-add that the flat loss takes
    transient_mb: float | None  # None where it cannot be measured
    note: str = ""
    choices: Sequence[str] = ()  # where kernel="auto" has chosen: kernels or PyTorch for each form of call, and why


@dataclass(frozen=True)
class Job:
    """The measurement of one loss.

    Args:
        name: of the loss, in `SUBJECTS`.
        configurations: of this library's loss; the others are compared with the first.
        batch_size: over all ranks.
        embedding_size: d.
        steps: that are timed of each method; figures are medians.
        threads: of each rank.
        versions: of the packages whose peers are measured.
        beside: for a declared loss, a loss of this library that takes turns with it.
        tokens: of a query, and of a document, in late interaction.
    """

    name: str
    configurations: Sequence[Configuration]
    batch_size: int
    embedding_size: int
    steps: int
    threads: int
    versions: Mapping[str, str]
    beside: str | None = None
    tokens: tuple[int, int] | None = None


class Measurement:
    """The methods of one loss, checked and timed in turns.

    Args:
        comm: the ranks.
        job: what to measure.
        device: of this rank.
        towers: the shapes of this rank's features, without d.
        shape: rows and columns of S, or of the products of tokens, on this rank.
        all_rows: rows of S on all ranks.
        work_units: multiply-adds of a step, in units of entries of S times d.
    """

    def __init__(
        self,
        comm: Communicator,
        job: Job,
        device: torch.device,
        *,
        towers: Sequence[tuple[int, ...]],
        shape: tuple[int, int],
        all_rows: int,
        work_units: int,
    ) -> None:
        self.comm, self.job, self.device = comm, job, device
        self.shape, self.all_rows, self.work_units = shape, all_rows, work_units
        self.entries = math.prod(shape)
        generator = torch.Generator().manual_seed(comm.rank)
        self.towers = [
            normalize(torch.randn(*of, job.embedding_size, generator=generator), dim=-1).to(device) for of in towers
        ]
        self.runs: list[tuple[Row, Callable[[], None]]] = []
        self.refused: list[Row] = []

    @property
    def name(self) -> str:
        """Return the name of the loss in tables."""
        return self.job.name

    def rows(self) -> list[Row]:
        """Check, time and return all methods; those that did not run come last."""
        self.add_methods()
        return self._timed()

    def add_methods(self) -> None:
        """Check each method and add it to the runs."""
        raise NotImplementedError

    def row(self, method: str, package: str, of: Configuration, note: str = "") -> Row:
        """Return the row of a method, without figures."""
        job, on = self.job, "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        settings = (self.comm.size, job.threads, job.batch_size, job.embedding_size, of.dtype, of.keep, of.exchange, on)
        return Row(self.name, method, package, *settings, of.kernel, None, None, None, None, note)

    def add(self, method: str, package: str, configuration: Configuration, loss: PairLoss) -> None:
        """Add a method to the runs, with features of its own as leaves."""
        leaves = [z.to(DTYPES[configuration.dtype], copy=True).requires_grad_() for z in self.towers]
        leaves += [torch.tensor(value, device=self.device, requires_grad=True) for value in (SCALE, BIAS)]

        def step() -> None:
            loss(*leaves).backward()

        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)  # this memory is in use already and does not count as the loss's
        self.runs.append((self.row(method, package, configuration), step))

    def _timed(self) -> list[Row]:
        comm, device, job = self.comm, self.device, self.job
        shape = [min(_FLOOR_ROWS, n) for n in self.shape]
        dtypes = dict.fromkeys(configuration.dtype for configuration in job.configurations)
        floors = {dtype: _Floor.of(shape, job.embedding_size, device, DTYPES[dtype]) for dtype in dtypes}
        times: dict[int, list[float]] = {}
        peaks: dict[int, int | None] = {}
        chosen: dict[int, list[str]] = {}
        running = dict(enumerate(self.runs))
        for index, (waiting, step) in enumerate(self.runs):
            try:
                step()  # libraries load, threads start
                chosen[index] = [*map(str, kernels.choices())] if waiting.kernel == "auto" else []
                peaks[index] = rise_of_peak(comm, step, device)
            except RuntimeError as error:  # it asks for more memory than there is, on every rank alike
                asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", str(error))
                if asked is None:
                    raise
                at_once = asked[2] or f"{int(asked[1]) / 1e9:.1f} GB"
                self.refused.append(replace(waiting, note=f"did not run: asks for {at_once} at once"))
                del running[index]
        for _ in range(job.steps):
            for floor in floors.values():
                floor.times.append(1e3 * seconds_of(comm, floor.step, device))
            for index, (_, step) in running.items():
                times.setdefault(index, []).append(1e3 * seconds_of(comm, step, device))
        units = self.work_units
        floor_ms = {
            dtype: units * median(floor.times) * self.entries / math.prod(shape) for dtype, floor in floors.items()
        }
        flop = 2 * units * self.all_rows * self.shape[1] * job.embedding_size
        return [
            replace(
                _with_figures(run, median(times[index]), floor_ms[run.dtype], flop, peaks[index]), choices=chosen[index]
            )
            for index, (run, _) in running.items()
        ] + self.refused


@dataclass(frozen=True)
class _Floor:
    """A product in the precision in which tiles are computed: on a CPU, half precision is widened."""

    step: Callable[[], object]
    times: list[float]

    @classmethod
    def of(cls, shape: Sequence[int], embedding_size: int, device: torch.device, dtype: torch.dtype) -> _Floor:
        dtype = accumulation_dtype(dtype) if device.type == "cpu" else dtype
        left, right = (torch.randn(n, embedding_size, device=device, dtype=dtype) for n in shape)
        return cls(partial(torch.mm, left, right.T, out=left.new_empty(*shape)), [])


def _with_figures(row: Row, step_ms: float, floor_ms: float, flop: float, peak: int | None) -> Row:
    return replace(
        row,
        step_ms=round(step_ms, 3),
        times_floor=round(step_ms / floor_ms, 3),
        tflops=float(f"{flop / (step_ms * 1e9):.3g}"),
        transient_mb=None if peak is None else round(peak / 1e6, 2),
    )

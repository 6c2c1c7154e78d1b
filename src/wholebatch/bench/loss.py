"""Time and memory of a loss, forward and backward, compared with the product that it needs at least and with peers.

    floor       one torch.mm of b rows with all B columns (of 8192 at most, and then in proportion), times the units of
                b B d multiply-adds that the loss takes (CLIP and InfoNCE 4, SigLIP 3, NT-Xent 2 of its 2b x 2B)
    transient   the rise of the process's peak memory above the memory in use before the step, dX and dY included

Every method is checked before it is timed (`gate`). Methods take turns, so that other load of the machine affects all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch import kernels
from wholebatch._measure import rise_of_peak, seconds_of
from wholebatch._precision import accumulation_dtype
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.declared import call_of, is_declared, leaves_of, with_options
from wholebatch.planning.subject import BIAS, SCALE

from .gate import GATE_SIZE, check, check_declared, check_peer
from .peers import PEERS, PairLoss, Peer
from .subjects import DTYPES, SUBJECTS, Configuration

_LONG = 512  # embedding size from which kernels work in other parts
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
    """

    name: str
    configurations: Sequence[Configuration]
    batch_size: int
    embedding_size: int
    steps: int
    threads: int
    versions: Mapping[str, str]
    beside: str | None = None


def measure(comm: Communicator, job: Job, device: torch.device) -> list[Row]:
    """Measure every configuration of one loss, and its peers. Collective.

    Raises:
        AssertionError: if a method computes a wrong loss or gradient; then nothing is timed.
    """
    torch.set_num_threads(job.threads)
    kind = _OfDeclared if is_declared(job.name) else _OfLibrary
    return kind(comm, job, device).rows()


class _Measurement:
    """The methods of one loss, checked and timed in turns.

    Args:
        comm: the ranks.
        job: what to measure.
        device: of this rank.
        rows_per_example: rows of S for each example.
        work_units: multiply-adds of a step, in units of entries of S times d.
    """

    def __init__(
        self, comm: Communicator, job: Job, device: torch.device, rows_per_example: int, work_units: int
    ) -> None:
        self.comm, self.job, self.device = comm, job, device
        self.rows_per_example, self.work_units = rows_per_example, work_units
        self.local = Partition.even(job.batch_size, comm.size).counts[comm.rank]
        self.entries = rows_per_example**2 * self.local * job.batch_size
        generator = torch.Generator().manual_seed(comm.rank)
        self.towers = [
            normalize(torch.randn(self.local, job.embedding_size, generator=generator), dim=1).to(device)
            for _ in range(2)
        ]
        self.runs: list[tuple[Row, Callable[[], None]]] = []
        self.refused: list[Row] = []

    def rows(self) -> list[Row]:
        """Check, time and return all methods; those that did not run come last."""
        self.add_methods()
        return self._timed()

    def add_methods(self) -> None:
        """Check each method and add it to the runs."""
        raise NotImplementedError

    def _row(self, method: str, package: str, of: Configuration, note: str = "") -> Row:
        job, on = self.job, "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        settings = (self.comm.size, job.threads, job.batch_size, job.embedding_size, of.dtype, of.keep, of.exchange, on)
        return Row(job.name, method, package, *settings, of.kernel, None, None, None, None, note)

    def _add(self, method: str, package: str, configuration: Configuration, loss: PairLoss) -> None:
        leaves = [z.to(DTYPES[configuration.dtype], copy=True).requires_grad_() for z in self.towers]
        leaves += [torch.tensor(value, device=self.device, requires_grad=True) for value in (SCALE, BIAS)]

        def step() -> None:
            loss(*leaves).backward()

        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)  # this memory is in use already and does not count as the loss's
        self.runs.append((self._row(method, package, configuration), step))

    def _timed(self) -> list[Row]:
        comm, device, job = self.comm, self.device, self.job
        shape = [min(_FLOOR_ROWS, self.rows_per_example * n) for n in (self.local, job.batch_size)]
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
        flop = 2 * units * (self.rows_per_example * job.batch_size) ** 2 * job.embedding_size
        return [
            replace(
                _with_figures(run, median(times[index]), floor_ms[run.dtype], flop, peaks[index]), choices=chosen[index]
            )
            for index, (run, _) in running.items()
        ] + self.refused


class _OfLibrary(_Measurement):
    """A loss of this library, and those of other libraries."""

    def __init__(self, comm: Communicator, job: Job, device: torch.device) -> None:
        self.entry = SUBJECTS[job.name]
        super().__init__(comm, job, device, self.entry.rows_per_example, self.entry.work_units)

    def add_methods(self) -> None:
        """Check each method and add it to the runs."""
        for configuration in self.job.configurations:
            self._add_configuration(configuration)
        for peer in PEERS.get(self.job.name, ()):
            suits_device = peer.on_cpu or self.device.type != "cpu"
            if peer.package in self.job.versions and suits_device and (self.comm.size == 1 or peer.on_ranks):
                self._add_peer(peer)

    def _add_configuration(self, configuration: Configuration) -> None:
        large = GATE_SIZE if self.device.type == "cpu" else min(self.job.embedding_size, _LONG)
        for size in {GATE_SIZE, large}:
            check(self.comm, self.job.name, configuration, self.device, size)
        options = configuration.options(self.entries, self.device)
        learned = self.entry.scale_argument == "logit_scale"

        def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            return self.entry.call(
                wb.functional, x, y, scale=scale if learned else SCALE, bias=bias, group=self.comm, **options
            )

        self._add(configuration.label(self.comm.size), f"wholebatch {wb.__version__}", configuration, loss)

    def _add_peer(self, peer: Peer) -> None:
        first = self.job.configurations[0].dtype
        label = peer.label if first == "float32" else f"{peer.label} {first}"
        package = f"{peer.package} {self.job.versions[peer.package]}"
        configuration = Configuration(exchange="", dtype=first, kernel="")
        try:
            loss = peer.build(self.comm, SCALE)
        except ImportError as error:  # the package is installed without something that it needs
            self.refused.append(self._row(label, package, configuration, f"skipped: {error}"))
            return
        if self.job.embedding_size % peer.multiple:
            note = f"skipped: the embedding size must be a multiple of {peer.multiple}"
            self.refused.append(self._row(label, package, configuration, note))
            return
        check_peer(self.comm, self.job.name, loss, self.device, DTYPES[first], max(peer.multiple, GATE_SIZE))
        self._add(label, package, configuration, loss)


class _OfDeclared(_Measurement):
    """A declared loss, its dense reference on one rank, and perhaps a loss of this library."""

    def __init__(self, comm: Communicator, job: Job, device: torch.device) -> None:
        loss_fn, _ = call_of(job.name, 1, job.embedding_size)
        super().__init__(comm, job, device, 1, 2 if loss_fn.declaration.symmetric else 4)

    def add_methods(self) -> None:
        """Check each method and add it to the runs."""
        job, package = self.job, f"wholebatch {wb.__version__}"
        for configuration in job.configurations:
            check_declared(self.comm, job.name, configuration, self.device, job.beside)
            method = configuration.label(self.comm.size).replace("wholebatch", "declared")
            self._add_declared(method, package, configuration, dense=False)
        first = job.configurations[0]
        if self.comm.size == 1:
            self._add_declared("its dense reference", package, replace(first, exchange=""), dense=True)
        if job.beside is not None:
            self._add_built_in(job.beside, package, first)

    def _add_declared(self, method: str, package: str, configuration: Configuration, *, dense: bool) -> None:
        job, dtype = self.job, DTYPES[configuration.dtype]
        torch.manual_seed(self.comm.rank)
        made, arguments = call_of(
            job.name, self.local, job.embedding_size, dtype=dtype, device=self.device, seed=self.comm.rank
        )
        loss_fn = with_options(made, group=self.comm, reduction="mean", **configuration.exchange_only)
        for leaf in leaves_of(made, arguments):
            leaf.grad = torch.ones_like(leaf)

        def step() -> None:
            (loss_fn.reference if dense else loss_fn)(**arguments).backward()

        self.runs.append((self._row(method, package, configuration), step))

    def _add_built_in(self, name: str, package: str, configuration: Configuration) -> None:
        entry, options = SUBJECTS[name], configuration.options(self.entries, self.device)
        learned = entry.scale_argument == "logit_scale"

        def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            of = scale if learned else SCALE
            return entry.call(wb.functional, x, y, scale=of, bias=bias, group=self.comm, **options)

        self._add(f"built in, {name}", package, configuration, loss)


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

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

import wholebatch as wb
from wholebatch import kernels
from wholebatch._base.precision import accumulation_dtype
from wholebatch._measure import rise_of_peak, seconds_of
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.declared import is_declared
from wholebatch.planning.sizes import MAX_SIM
from wholebatch.planning.subject import SCALE, Loss, Made, call_built_in

from .gate import GATE_SIZE, check, check_value
from .peers import PEERS
from .subjects import DTYPES, Configuration, Subject

_FLOOR_ROWS = 8192
_LONG = 512  # embedding size from which kernels work in other parts


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
    step_ms: float | None = None  # None if it did not run; `note` says why
    times_floor: float | None = None
    tflops: float | None = None  # of all ranks: 2 for each multiply-add that the flat loss takes
    transient_mb: float | None = None  # None where it cannot be measured
    note: str = ""
    choices: Sequence[str] = ()  # where kernel="auto" has chosen: kernels or PyTorch for each form of call, and why


@dataclass(frozen=True)
class Job:
    """The measurement of one loss."""

    name: str
    configurations: Sequence[Configuration]  # of this library's loss; the others are compared with the first
    batch_size: int  # over all ranks
    embedding_size: int
    steps: int  # that are timed of each method; figures are medians
    threads: int  # of each rank
    versions: Mapping[str, str]  # of the packages whose peers are measured
    beside: str | None = None  # for a declared loss, a loss of this library that takes turns with it
    tokens: tuple[int, int] = (1, 1)  # of a query, and of a document, in late interaction


def measure(comm: Communicator, job: Job, device: torch.device) -> list[Row]:
    """Measure every configuration of one loss, and its peers; those that did not run come last. Collective.

    Raises:
        AssertionError: if a method computes a wrong loss or gradient; then nothing is timed.
    """
    torch.set_num_threads(job.threads)
    return Methods(comm, job, device).timed()


def dense(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return the loss of late interaction from one tensor of all products of tokens, (b, b, t, u)."""
    logits = scale * torch.einsum("btd,cud->bctu", x, y).max(3).values.sum(2)
    return torch.nn.functional.cross_entropy(logits.float(), torch.arange(len(x), device=x.device))


class Methods:
    """The methods of one loss, each checked as it is added, and timed in turns."""

    def __init__(self, comm: Communicator, job: Job, device: torch.device) -> None:
        self._comm, self._job, self._device = comm, job, device
        self._runs: list[tuple[Row, Callable[[], None]]] = []
        self._refused: list[Row] = []
        tokens = job.tokens if job.name == MAX_SIM else (1, 1)
        self._subject = Subject(job.name, tokens)
        self._form = self._subject.form
        self._local, each = Partition.even(job.batch_size, comm.size).counts[comm.rank], self._form.rows_per_example
        self._shape = each * self._local * tokens[0], each * job.batch_size * tokens[1]
        for configuration in job.configurations:
            self._add_configuration(configuration)
        first = job.configurations[0]
        theirs = replace(first, keep=0.0, exchange="", kernel="")
        dtype_suffix = f" {first.dtype}" if first.dtype != "float32" else ""
        if is_declared(job.name):
            self._add_beside(first)
        elif job.name == MAX_SIM and comm.size == 1:
            method = f"dense: einsum, max, cross_entropy{dtype_suffix}"
            self._add_checked(method, f"torch {torch.__version__}", theirs, dense, GATE_SIZE)
        for peer in PEERS.get(job.name, ()):
            suits_device = peer.on_cpu or device.type != "cpu"
            if peer.package not in job.versions or not suits_device or (comm.size > 1 and not peer.on_ranks):
                continue
            method, package, note = f"{peer.label}{dtype_suffix}", f"{peer.package} {job.versions[peer.package]}", ""
            try:
                loss = peer.build(comm, SCALE)
            except ImportError as error:  # the package is installed without something that it needs
                note = f"skipped: {error}"
            if not note and job.embedding_size % peer.multiple:
                note = f"skipped: the embedding size must be a multiple of {peer.multiple}"
            if note:
                self._refused.append(replace(self._row(method, package, theirs), note=note))
            else:
                by_name = lambda x, y, scale, bias, loss=loss: loss(x, y, scale, bias)  # noqa: E731
                self._add_checked(method, package, theirs, by_name, max(peer.multiple, GATE_SIZE))

    def _add_configuration(self, configuration: Configuration) -> None:
        comm, job, device, subject = self._comm, self._job, self._device, self._subject
        large = GATE_SIZE if device.type == "cpu" else min(job.embedding_size, _LONG)
        for size in {GATE_SIZE, large}:
            check(comm, subject, configuration, device, size)
        self._add(subject.label(configuration, comm.size), configuration, subject)

    def _add_beside(self, first: Configuration) -> None:
        """Add the dense reference of a declared loss, on one rank, and a loss of this library of the same value."""
        comm, job = self._comm, self._job
        if comm.size == 1:
            self._add(
                "its reference, for values", replace(first, exchange=""), self._subject, lambda case: case.reference
            )
        if job.beside is not None:
            beside, group = job.beside, {"group": comm}

            def loss(x: Tensor, y: Tensor | None = None, **_others: object) -> Tensor:
                return call_built_in(beside, wb.functional, x=x, y=y, options=group)

            check_value(comm, self._subject, loss, self._device, torch.float64)
            self._add(f"built in, {beside}", first, Subject(beside))

    def _add_checked(self, method: str, package: str, configuration: Configuration, loss: Loss, size: int) -> None:
        """Add a loss of another library, or a formula."""
        check_value(self._comm, self._subject, loss, self._device, DTYPES[configuration.dtype], size)
        self._add(method, configuration, self._subject, lambda case: loss, package)

    def _add(
        self,
        method: str,
        configuration: Configuration,
        subject: Subject,
        choose: Callable[[Made], Loss] | None = None,
        package: str = f"wholebatch {wb.__version__}",
    ) -> None:
        """Add a method with inputs of its own; without `choose` it is this library's function."""
        comm, job = self._comm, self._job
        case = subject.make(self._local, job.embedding_size, DTYPES[configuration.dtype], self._device, comm.rank)
        options = subject.options(configuration, job.batch_size, job.embedding_size, comm.size, self._device)
        loss = partial(case.ours, options={**options, "group": comm}) if choose is None else choose(case)

        def step() -> None:
            loss(**case.arguments).backward()

        for leaf in case.leaves:
            leaf.grad = torch.ones_like(leaf)  # this memory is in use already and does not count as the loss's
        self._runs.append((self._row(method, package, configuration), step))

    def _row(self, method: str, package: str, conf: Configuration) -> Row:
        job, on = self._job, "cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device)
        sizes = self._comm.size, job.threads, job.batch_size, job.embedding_size
        return Row(self._subject.title, method, package, *sizes, conf.dtype, conf.keep, conf.exchange, on, conf.kernel)

    def timed(self) -> list[Row]:
        """Time and return all methods; those that did not run come last."""
        comm, device, job = self._comm, self._device, self._job
        shape = [min(_FLOOR_ROWS, n) for n in self._shape]
        floors = {c.dtype: _floor(shape, job.embedding_size, device, DTYPES[c.dtype]) for c in job.configurations}
        ready: list[tuple[Row, Callable[[], None], list[float]]] = []
        refused = list(self._refused)
        for row, step in self._runs:
            try:
                step()  # libraries load, threads start
                choices = [*map(str, kernels.choices())] if row.kernel == "auto" else []
                peak = rise_of_peak(comm, step, device)
            except RuntimeError as error:  # it asks for more memory than there is, on every rank alike
                asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", str(error))
                if asked is None:
                    raise
                at_once = asked[2] or f"{int(asked[1]) / 1e9:.1f} GB"
                refused.append(replace(row, note=f"did not run: asks for {at_once} at once"))
            else:
                transient = None if peak is None else round(peak / 1e6, 2)
                ready.append((replace(row, choices=choices, transient_mb=transient), step, []))
        times: dict[str, list[float]] = {dtype: [] for dtype in floors}
        for _ in range(job.steps):
            for dtype, floor in floors.items():
                times[dtype].append(1e3 * seconds_of(comm, floor, device))
            for _, step, step_times in ready:
                step_times.append(1e3 * seconds_of(comm, step, device))
        units, (rows, columns) = 2 if job.name == MAX_SIM else self._form.work_units, self._shape
        floor_count = units * rows * columns / math.prod(shape)
        flop = 2 * units * rows * job.batch_size / self._local * columns * job.embedding_size  # of all ranks
        return [
            replace(
                row,
                step_ms=round(ms := median(step_times), 3),
                times_floor=round(ms / (floor_count * median(times[row.dtype])), 3),
                tflops=float(f"{flop / (ms * 1e9):.3g}"),
            )
            for row, _, step_times in ready
        ] + refused


def _floor(shape: Sequence[int], embedding_size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a product in the precision in which tiles are computed: on a CPU, half precision is widened."""
    dtype = accumulation_dtype(dtype) if device.type == "cpu" else dtype
    left, right = (torch.randn(n, embedding_size, device=device, dtype=dtype) for n in shape)
    return partial(torch.mm, left, right.T, out=left.new_empty(*shape))

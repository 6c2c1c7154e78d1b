"""Time and memory of a loss, forward and backward, compared with the product that it needs at least and with peers.

    floor       one torch.mm of b rows with all B columns (of 8192 at most, and then in proportion), times the units of
                b B d multiply-adds that the loss takes (CLIP and InfoNCE 4, SigLIP 3, NT-Xent 2 of its 2b x 2B)
    transient   the rise of the process's peak memory above the memory in use before the step, dX and dY included

Every method is checked before it is timed (`gate`). Methods take turns, so that other load of the machine affects all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.declared import call_of, is_declared, leaves_of, with_options
from wholebatch.planning.sizes import MAX_SIM
from wholebatch.planning.subject import SCALE

from .gate import GATE_SIZE, check, check_declared, check_peer
from .late_interaction import OfTokens
from .measurement import Job, Measurement, Row
from .peers import PEERS, Peer
from .subjects import DTYPES, SUBJECTS, Configuration

_LONG = 512  # embedding size from which kernels work in other parts


def measure(comm: Communicator, job: Job, device: torch.device) -> list[Row]:
    """Measure every configuration of one loss, and its peers. Collective.

    Raises:
        AssertionError: if a method computes a wrong loss or gradient; then nothing is timed.
    """
    torch.set_num_threads(job.threads)
    kind = OfTokens if job.name == MAX_SIM else _OfDeclared if is_declared(job.name) else _OfLibrary
    return kind(comm, job, device).rows()


class _OfPairs(Measurement):
    """A loss of two feature matrices.

    Args:
        comm, job, device: as for every :class:`Measurement`.
        rows_per_example: rows of S for each example.
        work_units: likewise.
    """

    def __init__(
        self, comm: Communicator, job: Job, device: torch.device, rows_per_example: int, work_units: int
    ) -> None:
        self.local = Partition.even(job.batch_size, comm.size).counts[comm.rank]
        every = rows_per_example * job.batch_size
        super().__init__(
            comm,
            job,
            device,
            towers=[(self.local,)] * 2,
            shape=(rows_per_example * self.local, every),
            all_rows=every,
            work_units=work_units,
        )


class _OfLibrary(_OfPairs):
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

        self.add(configuration.label(self.comm.size), f"wholebatch {wb.__version__}", configuration, loss)

    def _add_peer(self, peer: Peer) -> None:
        first = self.job.configurations[0].dtype
        label = peer.label if first == "float32" else f"{peer.label} {first}"
        package = f"{peer.package} {self.job.versions[peer.package]}"
        configuration = Configuration(exchange="", dtype=first, kernel="")
        try:
            loss = peer.build(self.comm, SCALE)
        except ImportError as error:  # the package is installed without something that it needs
            self.refused.append(self.row(label, package, configuration, f"skipped: {error}"))
            return
        if self.job.embedding_size % peer.multiple:
            note = f"skipped: the embedding size must be a multiple of {peer.multiple}"
            self.refused.append(self.row(label, package, configuration, note))
            return
        check_peer(self.comm, self.job.name, loss, self.device, DTYPES[first], max(peer.multiple, GATE_SIZE))
        self.add(label, package, configuration, loss)


class _OfDeclared(_OfPairs):
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

        self.runs.append((self.row(method, package, configuration), step))

    def _add_built_in(self, name: str, package: str, configuration: Configuration) -> None:
        entry, options = SUBJECTS[name], configuration.options(self.entries, self.device)
        learned = entry.scale_argument == "logit_scale"

        def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            of = scale if learned else SCALE
            return entry.call(wb.functional, x, y, scale=of, bias=bias, group=self.comm, **options)

        self.add(f"built in, {name}", package, configuration, loss)

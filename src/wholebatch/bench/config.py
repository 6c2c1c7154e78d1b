"""The options of `wholebatch bench`. This module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from wholebatch._base.spelling import did_you_mean
from wholebatch._base.user_error import UserError, option, require
from wholebatch._cli.declared_names import EXCHANGE_NAMES, LABELED_LOSSES, SWEPT_LOSSES
from wholebatch._launch.launcher import LAUNCHED_SIZES, launcher_size
from wholebatch.planning.sizes import MAX_SIM, TOKENS

from . import records

LOSSES = tuple(name for name in SWEPT_LOSSES if name not in LABELED_LOSSES)
_NAMES = (*LOSSES, MAX_SIM)  # late interaction is timed on request
_SIZES, _SIZES_OF_TOKENS = (4096, 512), (256, 128)  # default batch and embedding size
if TYPE_CHECKING:
    ExchangeName = str
else:  # the command line lists them
    ExchangeName = Literal[EXCHANGE_NAMES]
GATHER_RUN = ("backend", "ranks", "rows_per_rank")
GATHER_FIELDS = (*GATHER_RUN, "method", "embedding_size", "step_ms")
LOSS_RUN = ("loss", "batch_size", "embedding_size", "ranks", "threads", "device", "method")
LOSS_FIELDS = (*LOSS_RUN, "package", "step_ms", "times_floor", "tflops", "transient_mb")
_MOST = 2**31  # of any count
_MOST_PROCESSES = 1024  # or threads, on a machine


@dataclass(frozen=True)
class GatherConfig:
    """Time three strategies that give all ranks' rows to a loss, over the embedding size.

    Starts its own processes, on gloo. Under mpiexec (with python -m mpi4py -m wholebatch bench gather) it uses MPI, and
    under torchrun gloo, on the ranks that the launcher has started.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks, one after the other; under a launcher, its number is used."""
    embedding_sizes: tuple[int, ...] = (128, 512, 2048, 8192)
    """Numbers of a row of the backbone's output."""
    rows_per_rank: int = 128
    """Rows of each view on each rank."""
    steps: int = 10
    """Timed steps, after two untimed ones; the figure is their median."""
    results: Path = Path("bench_gather.json")
    """File of results: those of an earlier run with the same backend, ranks and rows are replaced, others stay. A plot
    of all results is written to the same name with .png."""

    def check(self) -> None:
        """Raise UserError for mistakes that can be found without torch."""
        rows, steps = [self.rows_per_rank], [self.steps]
        _check_counts(ranks=self.ranks, embedding_sizes=self.embedding_sizes, rows_per_rank=rows, steps=steps)
        launcher_size()
        records.read(self.results, GATHER_FIELDS)  # before the run, not after


@dataclass(frozen=True)
class LossConfig:
    """Measure time and memory of the losses, compared with the torch.mm that they need at least, and with peers.

    Starts its own processes, on gloo or, with --device cuda, on NCCL. Each method is checked against the dense float64
    reference before it is timed.
    """

    losses: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"[{{{','.join(_NAMES)}}}|FILE.py:NAME ...]")] = LOSSES
    """The losses to time, by default all but max_sim, which is compared with its dense formula. A declared loss by the
    file and the name of a wb.PairLoss, or of a function of (rows, embedding_size) that returns one and the further
    arguments of its call; it is compared with its dense reference."""
    beside: Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(LOSSES)}}}")] = None
    """A loss of this library, of the same value as each declared loss, that takes turns with it."""
    batch_size: int | None = None
    """B, examples on all ranks together; by default 4096, for max_sim 256."""
    embedding_size: int | None = None
    """d, numbers of a feature; by default 512, for max_sim 128."""
    query_tokens: int | None = None
    """Tokens of a query of max_sim; by default 32."""
    document_tokens: int | None = None
    """Tokens of a document of max_sim; by default 180."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks, one after the other."""
    keep: tuple[float, ...] = (0.0, 2.0)
    """Bytes of memory for each entry of S, to keep exp(S) between forward and backward: 0 is memory="flat", 2 keeps all
    of it in bfloat16, 4 in float32. For max_sim, all numbers above 0 keep winners."""
    exchanges: tuple[ExchangeName, ...] = ("auto",)
    """Exchanges of rows between several ranks."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16", "float64"], ...] = ("float32",)
    """Precisions of the features; peers get the first one."""
    kernels: tuple[Literal["auto", "torch", "triton"], ...] = ("auto",)
    """Implementations of tiles."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute; several ranks take a GPU each, on NCCL."""
    threads: int | None = None
    """Threads of each rank; by default its share of the machine's cores."""
    steps: int = 5
    """Timed steps of each method, after an untimed one; figures are medians."""
    peers: bool = True
    """Whether to time the losses of other installed libraries as well."""
    results: Path = Path("bench_loss.json")
    """File of results: those of an earlier run with the same settings are replaced, others stay. A plot of all results
    is written to the same name with .png."""

    def check(self) -> None:
        """Raise UserError for mistakes that can be found without torch."""
        optional = ("batch_size", "embedding_size", "threads", "query_tokens", "document_tokens")
        counts = {name: [getattr(self, name)] for name in optional if getattr(self, name) is not None}
        _check_counts(ranks=self.ranks, steps=[self.steps], **counts)
        for batch_size in [self.sizes_of(name)[0] for name in self.losses]:
            if batch_size < max(self.ranks):
                raise UserError(
                    f"--batch-size must be at least the number of ranks, {max(self.ranks)}; got {batch_size}"
                )
        for keep in self.keep:
            if not 0 <= keep <= 16:
                raise UserError(f"--keep is in bytes for each entry of S, from 0 to 16; got {keep:g}")
        for name in ("losses", "keep", "exchanges", "dtypes", "kernels"):
            if not getattr(self, name):
                raise UserError(f"{option(name)} needs at least one value")
        for name in self.losses:
            if name not in _NAMES and ":" not in name:
                raise UserError(
                    f"--losses must be some of {', '.join(_NAMES)}, or declared losses such as my_losses.py:lifted; "
                    f"got {name!r}{did_you_mean(name, _NAMES)}"
                )
        if self.beside is not None and self.beside not in LOSSES:
            meant = did_you_mean(self.beside, LOSSES)
            raise UserError(f"--beside must be one of {', '.join(LOSSES)}; got {self.beside!r}{meant}")
        if self.beside is not None and not any(":" in name for name in self.losses):
            raise UserError("--beside is timed with a declared loss: name one in --losses, as in my_losses.py:lifted")
        tokens = [name for name in ("query_tokens", "document_tokens") if getattr(self, name) is not None]
        if tokens and MAX_SIM not in self.losses:
            raise UserError(f"{option(tokens[0])} is for late interaction: add --losses max_sim, or leave it out")
        if self.device == "cpu" and "triton" in self.kernels:
            raise UserError("--kernels triton needs --device cuda")
        if any(variable in os.environ for variable in LAUNCHED_SIZES):
            raise UserError("bench loss starts its own processes; run it without a launcher, with --ranks")
        records.read(self.results, LOSS_FIELDS)  # before the run, not after

    def sizes_of(self, name: str) -> tuple[int, int]:
        """Return the batch size and the embedding size of a loss."""
        batch_size, embedding_size = _SIZES_OF_TOKENS if name == MAX_SIM else _SIZES
        return self.batch_size or batch_size, self.embedding_size or embedding_size

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens of a query and of a document."""
        return self.query_tokens or TOKENS["query_tokens"], self.document_tokens or TOKENS["document_tokens"]


def _check_counts(**values: Sequence[int]) -> None:
    for name, numbers in values.items():
        most = _MOST_PROCESSES if name in ("ranks", "threads") else _MOST
        got = " ".join(map(str, numbers)) or "nothing"
        require(numbers and min(numbers) >= 1, name, "at least 1", got)
        require(max(numbers) <= most, name, f"at most {most}", got)

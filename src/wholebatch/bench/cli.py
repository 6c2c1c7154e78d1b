"""The command `wholebatch bench NAME`: options, ranks, and files of results."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
import tyro

import wholebatch as wb
from wholebatch._measure import threads_of_a_rank
from wholebatch._third_party import version
from wholebatch._user_error import UserError
from wholebatch.comm import Communicator
from wholebatch.comm.select import MPI_SIZES
from wholebatch.exchange import ExchangeName
from wholebatch.testing import RankError, run_ranks

from . import gather, gather_display, loss, loss_display, records
from .configuration import SUBJECTS, Configuration
from .peers import PEERS

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(SUBJECTS)]  # the command line lists them


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


@dataclass(frozen=True)
class LossConfig:
    """Measure time and memory of the losses, compared with the torch.mm that they need at least, and with peers.

    Starts its own processes, on gloo or, with --device cuda, on NCCL. Each method is checked against the dense float64
    reference before it is timed.
    """

    losses: tuple[LossName, ...] = tuple(SUBJECTS)
    """The losses to time."""
    batch_size: int = 4096
    """B, examples on all ranks together."""
    embedding_size: int = 512
    """d, numbers of a feature."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks, one after the other."""
    keep: tuple[float, ...] = (0.0, 2.0)
    """Bytes of memory for each entry of S, to keep exp(S) between forward and backward: 0 is memory="flat", 2 keeps all
    of it in bfloat16, 4 in float32."""
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


_BENCHMARKS = {"gather": GatherConfig, "loss": LossConfig}
_GATHER_RUN = ("backend", "ranks", "rows_per_rank")
_GATHER_FIELDS = (*_GATHER_RUN, "method", "embedding_size", "step_ms")
_LOSS_RUN = ("loss", "batch_size", "embedding_size", "ranks", "threads", "device", "method")
_LOSS_FIELDS = (*_LOSS_RUN, "package", "step_ms", "times_floor", "tflops", "transient_mb")


def main(argv: Sequence[str], *, prog: str) -> None:
    """Run a benchmark.

    Raises:
        UserError: for a mistake in the options.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {prog} {{{','.join(_BENCHMARKS)}}} [OPTIONS]\n")
        for name, config in _BENCHMARKS.items():
            print(f"  {name:8}{(config.__doc__ or '').splitlines()[0]}")
        raise SystemExit(0 if argv else 2)
    if argv[0] not in _BENCHMARKS:
        raise UserError(f"there is no benchmark {argv[0]!r}; choose one of: {', '.join(_BENCHMARKS)}")
    options, name = list(argv[1:]), f"{prog} {argv[0]}"
    if argv[0] == "gather":
        _gather(tyro.cli(GatherConfig, args=options, prog=name))
    else:
        run_loss(tyro.cli(LossConfig, args=options, prog=name))


def _check_positive(**values: Sequence[int]) -> None:
    for name, numbers in values.items():
        if not numbers or min(numbers) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be at least 1, got {' '.join(map(str, numbers)) or 'nothing'}"
            )


def run_loss(config: LossConfig) -> None:
    """Measure losses, print a table, and write results and plot.

    Raises:
        UserError: for a mistake in the options, and if a method is wrong.
    """
    sizes = {"batch_size": [config.batch_size], "embedding_size": [config.embedding_size]}
    _check_positive(**sizes, ranks=config.ranks, steps=[config.steps])
    threads = threads_of_a_rank(max(config.ranks)) if config.threads is None else config.threads
    _check_positive(threads=[threads])
    if config.batch_size < max(config.ranks):
        raise UserError(
            f"--batch-size must be at least the number of ranks, {max(config.ranks)}; got {config.batch_size}"
        )
    for keep in config.keep:
        if not 0 <= keep <= 16:
            raise UserError(f"--keep is in bytes for each entry of S, from 0 to 16; got {keep:g}")
    if not config.keep or not config.exchanges or not config.dtypes or not config.losses or not config.kernels:
        raise UserError("--losses, --keep, --exchanges, --dtypes and --kernels need at least one value each")
    gpus = torch.cuda.device_count()
    if config.device == "cuda" and gpus < max(config.ranks):
        raise UserError(f"--device cuda needs a GPU for each of {max(config.ranks)} ranks, and there are {gpus}")
    if config.device == "cpu" and "triton" in config.kernels:
        raise UserError("--kernels triton needs --device cuda")
    if "WORLD_SIZE" in os.environ or any(variable in os.environ for variable in MPI_SIZES):
        raise UserError("bench loss starts its own processes; run it without a launcher, with --ranks")
    records.read(config.results, _LOSS_FIELDS)  # before the run, not after
    peers = [peer for name in config.losses for peer in PEERS.get(name, ()) if config.peers]
    packages = sorted({peer.package for peer in peers if peer.on_cpu or config.device == "cuda"})
    versions = {package: found for package in packages if (found := version(package)) is not None}
    for package in packages:
        if package not in versions:
            print(f"{package} is not installed: skipped")
    for ranks in dict.fromkeys(config.ranks):
        rows = [
            row for name in dict.fromkeys(config.losses) for row in _measured(config, name, ranks, threads, versions)
        ]
        loss_display.print_table(rows)
        everything = records.keep(config.results, [asdict(row) for row in rows], _LOSS_RUN)
    loss_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")


def _measured(config: LossConfig, name: str, ranks: int, threads: int, versions: dict[str, str]) -> list[loss.Row]:
    """Measure one loss on new processes, so that none uses memory that another has left."""
    sweep = SUBJECTS[name].sweep
    keeps = (0.0,) if sweep is not None and sweep.one_pass else config.keep  # with one pass there is nothing to keep
    exchanges = config.exchanges if ranks > 1 else config.exchanges[:1]
    configurations = [
        Configuration(keep, exchange, dtype, kernel)
        for dtype, exchange, kernel, keep in product(config.dtypes, exchanges, config.kernels, keeps)
    ]
    job = loss.Job(
        name, list(dict.fromkeys(configurations)), config.batch_size, config.embedding_size, config.steps, threads,
        versions,
    )  # fmt: skip
    try:
        if ranks > 1:
            backend = "nccl" if config.device == "cuda" else "gloo"
            return run_ranks(_loss_on_ranks, ranks, job, config.device, backend=backend, timeout_s=7200)[0]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_loss_alone, job, config.device).result()
    except (RankError, AssertionError, BrokenProcessPool) as error:
        reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise UserError(f"{name} on {ranks} ranks failed, and nothing was timed: {reason}") from error


def _loss_on_ranks(job: loss.Job, device: str) -> list[loss.Row]:
    return _loss_of(wb.comm.TorchCommunicator(), job, device)


def _loss_alone(job: loss.Job, device: str) -> list[loss.Row]:
    return _loss_of(wb.comm.LocalCommunicator(), job, device)


def _limit_memory(processes: int) -> None:
    """Make an allocation of more memory than there is an error; otherwise the machine would kill the process later."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (physical // processes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _loss_of(comm: Communicator, job: loss.Job, device: str) -> list[loss.Row]:
    if device == "cuda":
        torch.cuda.set_device(comm.rank)
        return loss.measure(comm, job, torch.device("cuda", comm.rank))
    _limit_memory(comm.size)
    return loss.measure(comm, job, torch.device(device))


def _gather(config: GatherConfig) -> None:
    _check_positive(
        ranks=config.ranks,
        embedding_sizes=config.embedding_sizes,
        rows_per_rank=[config.rows_per_rank],
        steps=[config.steps],
    )
    records.read(config.results, _GATHER_FIELDS)  # before the run, not after
    if any(variable in os.environ for variable in MPI_SIZES):
        try:
            comm = wb.comm.MPICommunicator()
        except ImportError as error:
            raise UserError(str(error)) from error
        from mpi4py import MPI

        torch.set_num_threads(1)
        implementation = (
            MPI.Get_library_version().split("\n")[0].split(",")[0].replace("MPICH Version:", "MPICH").split()
        )
        _run_here(config, comm, " ".join(implementation).replace(" v", " "))
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        _run_here(config, wb.comm.TorchCommunicator(), "gloo")
        dist.destroy_process_group()
    else:
        for ranks in config.ranks:
            try:
                rows = run_ranks(_on_gloo, ranks, config, timeout_s=3600)[0]
            except RankError as error:
                raise UserError(f"a rank failed: {str(error).splitlines()[0]} (memory?)") from error
            _finish(config, "gloo", rows)


def _on_gloo(config: GatherConfig) -> list[gather.Row]:
    torch.set_num_threads(1)
    return gather.measure(wb.comm.TorchCommunicator(), config.embedding_sizes, config.rows_per_rank, config.steps)


def _run_here(config: GatherConfig, comm: Communicator, backend: str) -> None:
    rows = gather.measure(comm, config.embedding_sizes, config.rows_per_rank, config.steps)
    if comm.rank == 0:
        _finish(config, backend, rows)


def _finish(config: GatherConfig, backend: str, rows: list[gather.Row]) -> None:
    gather_display.print_table(backend, rows)
    named = [{"backend": backend, **asdict(row)} for row in rows]
    everything = records.keep(config.results, named, _GATHER_RUN)
    gather_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these results")

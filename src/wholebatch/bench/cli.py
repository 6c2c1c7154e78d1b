"""`wholebatch bench NAME`: options, ranks, and what to do with the figures."""

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
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro

import wholebatch as wb
from wholebatch._measure import threads_of_a_rank
from wholebatch._third_party import version
from wholebatch._user_error import UserError
from wholebatch.comm import Communicator
from wholebatch.comm.select import MPI_SIZES
from wholebatch.testing import RankError, run_ranks

from . import gather, gather_display, loss, loss_display, records
from .peers import PEERS


@dataclass(frozen=True)
class GatherConfig:
    """Three ways to bring all rows to a loss, timed over the embedding dimension.

    Starts its own processes, on gloo. Under mpiexec (with python -m mpi4py -m wholebatch bench gather) it uses MPI, and
    under torchrun gloo, on the ranks that the launcher has started.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    """Rank counts, one after the other; a launcher decides by itself."""
    dims: tuple[int, ...] = (128, 512, 2048, 8192)
    """Embedding dimensions of the backbone's output."""
    rows: int = 128
    """Rows of each view on each rank."""
    steps: int = 10
    """Steps that are timed, after two that are not; the figure is their median."""
    results: Path = Path("bench_gather.json")
    """Where figures are kept: those of an earlier run with the same backend, ranks and rows are replaced, others stay.
    The picture of all of them lies beside it, as .png."""


@dataclass(frozen=True)
class LossConfig:
    """Time and memory of the losses, against the torch.mm that they cannot do without, and against installed peers.

    Starts its own processes, on gloo or, with --device cuda, on NCCL. Each way is checked against the dense float64
    twin before it is timed.
    """

    losses: tuple[Literal["clip", "info_nce", "nt_xent", "siglip"], ...] = ("clip", "info_nce", "nt_xent", "siglip")
    """Which of them."""
    rows: int = 4096
    """Rows of each tower, B, over all ranks."""
    dim: int = 512
    """Feature size, d."""
    ranks: tuple[int, ...] = (1,)
    """Rank counts, one after the other."""
    keep: tuple[float, ...] = (0.0, 2.0)
    """Bytes of memory for each entry of S, to keep exp(S) between forward and backward: 0 is memory="flat", 2 keeps all
    of it in bfloat16, 4 as it is in float32."""
    exchanges: tuple[Literal["auto", "gather", "ring"], ...] = ("auto",)
    """How the traveling tower travels, on several ranks."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16", "float64"], ...] = ("float32",)
    """Of the features; peers get the first."""
    kernels: tuple[Literal["auto", "torch", "triton"], ...] = ("auto",)
    """Who computes tiles."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where; several ranks take a GPU each, on NCCL."""
    threads: int | None = None
    """Of each rank; by default the machine's cores, divided."""
    steps: int = 5
    """Steps that are timed of each way, after one that is not; figures are medians."""
    peers: bool = True
    """Whether to time the losses of other libraries as well, as far as they are installed."""
    results: Path = Path("bench_loss.json")
    """Where figures are kept: an earlier run's are replaced where all settings are the same, others stay. The picture
    of all of them lies beside it, as .png."""


_BENCHMARKS = {"gather": GatherConfig, "loss": LossConfig}
_GATHER_RUN = ("backend", "ranks", "rows_per_rank")
_GATHER_FIELDS = (*_GATHER_RUN, "what", "dim", "step_ms")
_LOSS_RUN = ("loss", "rows", "dim", "ranks", "threads", "device", "what")
_LOSS_FIELDS = (*_LOSS_RUN, "package", "step_ms", "times_floor", "tflops", "transient_mb")


def main(argv: Sequence[str], *, prog: str) -> None:
    """Run a benchmark.

    Raises:
        UserError: for a mistake of the user's.
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
            raise UserError(f"--{name} must be at least 1, got {' '.join(map(str, numbers)) or 'nothing'}")


def run_loss(config: LossConfig) -> None:
    """Measure, print and keep.

    Raises:
        UserError: for a mistake of the user's, and if a way is not exact.
    """
    _check_positive(rows=[config.rows], dim=[config.dim], ranks=config.ranks, steps=[config.steps])
    threads = threads_of_a_rank(max(config.ranks)) if config.threads is None else config.threads
    _check_positive(threads=[threads])
    if config.rows < max(config.ranks):
        raise UserError(f"--rows must be at least the number of ranks, {max(config.ranks)}; got {config.rows}")
    for keep in config.keep:
        if not 0 <= keep <= 16:
            raise UserError(f"--keep is in bytes for each entry of S, from 0 to 16; got {keep:g}")
    if not config.keep or not config.exchanges or not config.dtypes or not config.losses or not config.kernels:
        raise UserError("--losses, --keep, --exchanges, --dtypes and --kernels need at least one value each")
    gpus = torch.cuda.device_count()
    if config.device == "cuda" and gpus < max(config.ranks):
        raise UserError(f"--device cuda needs a GPU for each rank, {max(config.ranks)}; torch sees {gpus}")
    if config.device == "cpu" and "triton" in config.kernels:
        raise UserError("--kernels triton needs --device cuda")
    if "WORLD_SIZE" in os.environ or any(variable in os.environ for variable in MPI_SIZES):
        raise UserError("bench loss starts its own processes; run it without a launcher, with --ranks")
    records.read(config.results, _LOSS_FIELDS)  # before the run, not after
    peers = [peer for name in config.losses for peer in PEERS[name] if config.peers]
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
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these figures")


def _measured(config: LossConfig, name: str, ranks: int, threads: int, versions: dict[str, str]) -> list[loss.Row]:
    """One loss on fresh processes, so that no loss finds memory that another has left."""
    keeps = (0.0,) if name == "siglip" else config.keep  # which has nothing to keep
    exchanges = config.exchanges if ranks > 1 else config.exchanges[:1]
    ways = [
        loss.Way(keep, exchange, dtype, kernel)
        for dtype, exchange, kernel, keep in product(config.dtypes, exchanges, config.kernels, keeps)
    ]
    arguments = (config, name, list(dict.fromkeys(ways)), threads, versions)
    try:
        if ranks > 1:
            backend = "nccl" if config.device == "cuda" else "gloo"
            return run_ranks(_loss_on_ranks, ranks, *arguments, backend=backend, timeout_s=7200)[0]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_loss_alone, *arguments).result()
    except (RankError, AssertionError, BrokenProcessPool) as error:
        reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise UserError(f"{name} on {ranks} ranks failed, nothing was timed: {reason}") from error


def _loss_on_ranks(*arguments: Any) -> list[loss.Row]:
    return _loss_of(wb.comm.TorchCommunicator(), *arguments)


def _loss_alone(*arguments: Any) -> list[loss.Row]:
    return _loss_of(wb.comm.LocalCommunicator(), *arguments)


def _limit_memory(processes: int) -> None:
    """A loss that asks for more memory than there is, is refused, where the machine would kill the process later."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (physical // processes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _loss_of(
    comm: Communicator,
    config: LossConfig,
    name: str,
    ways: Sequence[loss.Way],
    threads: int,
    versions: dict[str, str],
) -> list[loss.Row]:
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", comm.rank)
        torch.cuda.set_device(device)
    else:
        _limit_memory(comm.size)
    return loss.measure(
        comm,
        name,
        ways,
        rows=config.rows,
        dim=config.dim,
        steps=config.steps,
        threads=threads,
        versions=versions,
        device=device,
    )


def _gather(config: GatherConfig) -> None:
    _check_positive(ranks=config.ranks, dims=config.dims, rows=[config.rows], steps=[config.steps])
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
    return gather.measure(wb.comm.TorchCommunicator(), config.dims, config.rows, config.steps)


def _run_here(config: GatherConfig, comm: Communicator, backend: str) -> None:
    rows = gather.measure(comm, config.dims, config.rows, config.steps)
    if comm.rank == 0:
        _finish(config, backend, rows)


def _finish(config: GatherConfig, backend: str, rows: list[gather.Row]) -> None:
    gather_display.print_table(backend, rows)
    named = [{"backend": backend, **asdict(row)} for row in rows]
    everything = records.keep(config.results, named, _GATHER_RUN)
    gather_display.plot(config.results.with_suffix(".png"), everything)
    print(f"{config.results} and {config.results.with_suffix('.png')} hold these figures")

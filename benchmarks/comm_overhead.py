"""The cost of an all_gather and its adjoint through the library, against the raw calls of c10d or mpi4py.

Usage: python benchmarks/comm_overhead.py gloo
       mpiexec -n 2 .venv-mpich/bin/python -m mpi4py benchmarks/comm_overhead.py mpi

64 MB are gathered from 2 ranks (float32, 32 MB each), and 64 MB of gradient return; then the same with 64 kB. Raw and
library calls alternate within one run, and both allocate their outputs; the ratio is that of the medians. First, both
must give the same numbers.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import wholebatch as wb
from wholebatch.comm import Communicator, MPICommunicator, TorchCommunicator, _c10d
from wholebatch.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "comm_overhead.jsonl"
GATHERED_BYTES, COLUMNS, REPEATS = (64 * 2**20, 64 * 2**10), 64, 25


def raw_c10d(comm: Communicator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function with the calls that c10d's documentation recommends."""

    def both(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        full = x.new_empty(gradient.shape)
        _c10d.all_gather_single(full, x)
        local = x.new_empty(x.shape)
        _c10d.reduce_scatter_single(local, gradient)
        return full, local

    return both


def raw_c10d_as_we_do(comm: Communicator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function with the calls of the library on gloo: a broadcast from each rank, an all-to-all and a sum."""

    def both(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        full = x.new_empty(gradient.shape)
        parts = full.chunk(comm.size)
        parts[comm.rank].copy_(x)
        works = [dist.broadcast(part, group_src=root, async_op=True) for root, part in enumerate(parts)]
        for work in works:
            work.wait()
        received = x.new_empty(gradient.shape)
        dist.all_to_all_single(received, gradient)
        return full, received.unflatten(0, (comm.size, len(x))).sum(0)

    return both


def raw_mpi4py(comm: Communicator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function with mpi4py's blocking calls on the tensors' memory."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def buffer(x: Tensor) -> list[object]:
        return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.FLOAT]

    def both(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        full, local = x.new_empty(gradient.shape), x.new_empty(x.shape)
        world.Allgather(buffer(x), [MPI.buffer.fromaddress(full.data_ptr(), full.nbytes), x.numel(), MPI.FLOAT])
        world.Reduce_scatter(buffer(gradient), buffer(local), [x.numel()] * comm.size, op=MPI.SUM)
        return full, local

    return both


def library(comm: Communicator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function that runs the library's forward and backward through autograd."""

    def both(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        full = comm.all_gather(x)
        full.backward(gradient)
        assert x.grad is not None
        return full, x.grad

    return both


def measure(
    comm: Communicator, gathered_bytes: int, raws: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]
) -> dict[str, float]:
    """Return the milliseconds of each method, medians over alternating repeats."""
    rows = gathered_bytes // 4 // COLUMNS // comm.size
    x = torch.randn(rows, COLUMNS)
    gradient = torch.randn(rows * comm.size, COLUMNS)
    methods = {**raws, "library, checking": library(comm)}
    unchecked = comm.split(0)
    assert unchecked is not None
    unchecked.check = False
    counts = [rows] * comm.size
    quiet = library(unchecked)
    unchecked_gather = unchecked.all_gather
    unchecked.all_gather = lambda t: unchecked_gather(t, counts=counts)  # type: ignore[method-assign]
    methods["library, no checking"] = quiet
    expected = next(iter(methods.values()))(x, gradient)
    for name, method in methods.items():
        for ours, theirs in zip(method(x, gradient), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), name
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(REPEATS):
        for name, method in methods.items():
            comm.all_reduce(torch.zeros(1))
            start = time.perf_counter()
            method(x, gradient)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(median(values), 2) for name, values in times.items()}


def on_gloo() -> dict[int, dict[str, float]]:
    """Run one rank on gloo."""
    comm = TorchCommunicator()
    raws = {"raw c10d": raw_c10d(comm), "raw c10d, same algorithm": raw_c10d_as_we_do(comm)}
    return {size: measure(comm, size, raws) for size in GATHERED_BYTES}


def report(backend: str, gathered_bytes: int, times: dict[str, float]) -> None:
    """Print the ratios and save the JSON."""
    print(f"{backend}, {gathered_bytes / 2**20:g} MB")
    for name, value in times.items():
        ratios = ", ".join(
            f"{value / times[raw]:.3f} x {raw}" for raw in times if raw.startswith("raw") and raw != name
        )
        print(f"{name:28} {value:8.2f} ms   {ratios}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    row = {
        "backend": backend, "ranks": 2, "gathered_bytes": gathered_bytes, "ms": times, "torch": torch.__version__,
        "wholebatch": wb.__version__, "machine": f"{platform.machine()}, 2 cores", "commit": commit,
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure one backend."""
    if sys.argv[1] == "gloo":
        for size, times in run_ranks(on_gloo, 2, timeout_s=300)[0].items():
            report("gloo", size, times)
        return
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm = MPICommunicator()
    for size in GATHERED_BYTES:
        times = measure(comm, size, {"raw mpi4py": raw_mpi4py(comm)})
        if comm.rank == 0:
            report(MPI.Get_library_version().split(",")[0].split("\n")[0].strip(), size, times)


if __name__ == "__main__":
    main()

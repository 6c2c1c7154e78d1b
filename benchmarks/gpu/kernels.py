"""Kernels: their check, their tests, a sanitizer, and the speed of blocks of several sizes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch import kernels

from .device import DEVICE, GPU, Row, SkippedError, first_line, has, seconds, unit_rows

ROOT = Path(__file__).resolve().parents[2]
_SCALE = 14.3


def self_check() -> Iterator[Row]:
    """Yield the check of every kernel, its time, and the choice of kernel="auto", as `wholebatch doctor` does."""
    from wholebatch.doctor.report import examine

    report = examine(DEVICE, *((4096, 512) if GPU else (64, 32)))
    print(report)
    if report.kernels:
        raise SkippedError(report.kernels)
    yield from ({name: value for name, value in asdict(row).items() if value} for row in report.rows)
    if report.failed:
        raise AssertionError("a kernel failed its check")


def tests_of_kernels() -> Iterator[Row]:
    """Run the tests of kernels and of waits on the device."""
    if not GPU:
        raise SkippedError("no GPU: `make test` runs these in Triton's interpreter")
    if not has("pytest"):
        raise SkippedError("pytest is not installed")
    names = ("kernels", "kernel_check", "host_sync", "max_sim_tiles")
    files = [f"tests/test_{name}.py" for name in names]
    _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files])
    yield {"tests": files}


def sanitizer() -> Iterator[Row]:
    """Run a small step of losses of all kernels under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer")
    if not GPU or tool is None:
        raise SkippedError("no GPU" if not GPU else "compute-sanitizer is not installed")
    _run([tool, "--error-exitcode", "9", sys.executable, str(ROOT / "benchmarks" / "gpu_stages.py"), "--step"])
    yield {"tool": tool}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}")


def step_of_kernels() -> None:
    """Make one step of four losses in kernels, at ragged sizes."""
    x, y = (unit_rows(300, 136, torch.bfloat16).requires_grad_() for _ in range(2))
    wb.functional.clip_loss(x, y, 20.0, kernel="triton").backward()
    wb.functional.siglip_loss(x, y, 20.0, -5.0, kernel="triton").backward()
    wb.functional.matryoshka_loss(x, y, 20.0, dims=(32, 136), kernel="triton").backward()
    offsets = torch.tensor([0, 1, 40, 170, 300])
    wb.functional.max_sim_loss(
        x, y, logit_scale=2.0, query_offsets=offsets, document_offsets=offsets.clone(), kernel="triton"
    ).backward()
    torch.cuda.synchronize()


def blocks() -> Iterator[Row]:
    """Yield the speed of the two softmax kernels alone, by the block of a program: `kernels.Blocks`."""
    if (why := kernels.missing(DEVICE)) is not None:
        raise SkippedError(f"kernel='triton' {why}")
    if GPU:
        tried = product(((128, 128), (128, 256), (256, 128), (64, 256)), (64,), (4, 8), (3, 4))
        for (dim, rows), (shape, depth, warps, stages) in product(product((512, 1024), (8192,)), tuple(tried)):
            for parts in (1, 2):
                yield from _speed_of(dim, rows, kernels.Blocks(*shape, depth, 8, warps, stages, parts))
    else:
        yield from _speed_of(32, 64, kernels.Blocks(32, 64, 32, 2, 4, 1))


def _speed_of(dim: int, rows: int, sizes: kernels.Blocks) -> Iterator[Row]:
    """Yield the speed of sums and of dS with one block, each compared with plain PyTorch first."""
    torch.manual_seed(0)
    x, y = (unit_rows(rows, dim, torch.bfloat16) for _ in range(2))
    named = torch.arange(rows, dtype=torch.int32, device=DEVICE)[None]
    numbers = kernels.numbers_of(_SCALE, 0.0, DEVICE)
    tile = kernels.TileInputs(x, y, numbers, kernels.Entries(named), kernels.Entries(), 0, 0)
    ones, gradient = torch.ones(rows, device=DEVICE), torch.empty(rows, rows, device=DEVICE, dtype=x.dtype)
    steps: dict[str, Callable[[], object]] = {
        "tile_sums": partial(kernels.tile_sums, tile, rows={"sum"}, cols={"sum"}),
        "tile_gradient": partial(kernels.tile_gradient, tile, gradient, rows={"sum": ones}, cols={"sum": ones}),
    }
    for name, step in steps.items():
        row: Row = {"kernel": name, "rows": rows, "dim": dim, "blocks": repr(sizes)}
        with kernels.using(sizes):
            try:
                _compare(name, step(), gradient, tile)
                row["tflops"] = 2 * rows * rows * dim / seconds(step) / 1e12
            except Exception as error:  # too much shared memory, or wrong results: this block has no figure
                row["error"] = first_line(error)
        yield row


def _compare(name: str, found: object, gradient: Tensor, tile: kernels.TileInputs) -> None:
    """Compare sums, or dS, of the first rows with plain PyTorch's."""
    s = _SCALE * tile.x[:256].float() @ tile.y.float().T
    local = torch.eye(len(s), len(tile.y), device=s.device)
    if name == "tile_sums":
        assert isinstance(found, tuple)
        torch.testing.assert_close(found[0]["sum"][:256].float(), (s.exp() * (1 - local)).sum(1), rtol=1e-3, atol=0)
    else:
        torch.testing.assert_close(gradient[:256].float(), 2 * s.exp() * (1 - local), rtol=1e-2, atol=1e-5)

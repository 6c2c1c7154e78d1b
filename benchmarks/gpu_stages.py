"""All checks and figures of one GPU, stage by stage, on a bare machine with torch alone: `make gpu`.

    PYTHONPATH=src python benchmarks/gpu_stages.py --out FOLDER [--only STAGE ...]

Each stage is a process of its own with a time limit, so that a failure, a hang or an illegal access costs that stage
alone. Correctness comes first; a stage of figures is skipped if the stage that checks them failed. FOLDER gets
STAGE.json and STAGE.log of each stage, and report.md. Without a GPU all stages run on the CPU at small sizes, to check
this program; they say so, and their times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "src")]

from precision_losses import LOSSES, value_and_gradients  # noqa: E402

import wholebatch as wb  # noqa: E402  # the source beside this file

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LIMIT_S = 480
Found = list[dict[str, Any]]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class SkippedError(Exception):
    """A stage cannot run here; the message says what is missing."""


def unit_rows(rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return F.normalize(torch.randn(rows, size, device=DEVICE), dim=1).to(dtype)


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the median time of a call; on a GPU between events, after two calls that warm up."""
    times = []
    for number in range(repeats + 2):
        if GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end) / 1000
        else:
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
        if number >= 2:
            times.append(taken)
    return median(times)


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Return the rise of the allocator's peak during a call; None on a CPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def about() -> Found:
    """Versions, card and commit."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found["triton"] = version("triton") if _has("triton") else None
    if GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "card": properties.name,
            "capability": torch.cuda.get_device_capability(),
            "sms": properties.multi_processor_count,
        }
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found["driver"] = driver.stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return [found | {"commit": commit.stdout.strip()}]


def precision() -> Found:
    """The error of each loss in each precision, against float64 on the same device; raises if one is large."""
    found, allowed = (
        [],
        {"auto": 1e-4, "float32": 1e-4, "bfloat16x3": 3e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 0.1},
    )
    for name, (ours, truth, _) in LOSSES.items():
        if name == "PartialFC":
            continue  # its second operand is on the host
        for scale in (10.0, 50.0):
            torch.manual_seed(0)
            x = unit_rows(384, 96)
            y = F.normalize(0.4 * x + 0.6 * unit_rows(384, 96), dim=1)
            value, grad = value_and_gradients(truth, x.double(), y.double(), scale)
            for mode, bound in allowed.items():
                got, of = value_and_gradients(ours, x, y, scale, precision=mode)
                error = ((of - grad).norm() / grad.norm()).item()
                found.append({"loss": name, "scale": scale, "precision": mode, "error_of_gradient": error})
                found[-1]["error_of_loss"] = ((got - value).abs() / value.abs()).item()
                if not error <= bound:
                    raise AssertionError(f"{found[-1]}: more than {bound}")
    return found


def _pytest(*arguments: str) -> Found:
    if not _has("pytest"):
        raise SkippedError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=HERE.parent, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}")
    return [{"tests": list(arguments)}]


def self_check() -> Found:
    """The check of every kernel against float64, its time, and the choice of kernel="auto": `wholebatch doctor`."""
    from wholebatch.doctor import examine

    report = examine(DEVICE, *((4096, 512) if GPU else (256, 64)))
    print(report)
    if report.failed:
        raise AssertionError("a kernel failed its check")
    return [asdict(row) for row in report.rows] or [{"kernels": report.kernels}]


def tests_of_kernels() -> Found:
    """The tests of kernels and of waits, on the device."""
    if not GPU:
        raise SkippedError("no GPU: `make test` runs these in Triton's interpreter")
    return _pytest("tests/test_kernels.py", "tests/test_kernel_check.py", "tests/test_host_sync.py")


def sanitizer() -> Found:
    """A small step of CLIP, Matryoshka and SigLIP in kernels under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer")
    if not GPU or tool is None:
        raise SkippedError("no GPU" if not GPU else "compute-sanitizer is not installed")
    command = [tool, "--error-exitcode", "9", sys.executable, __file__, "--step"]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise AssertionError(f"compute-sanitizer ended with {done.returncode}")
    return [{"tool": tool}]


def step_of_kernels() -> None:
    """Make one step of three losses in kernels, at ragged sizes."""
    x, y = (unit_rows(300, 136, torch.bfloat16).requires_grad_() for _ in range(2))
    kernel = "triton" if GPU else "torch"
    wb.functional.clip_loss(x, y, 20.0, kernel=kernel).backward()
    wb.functional.siglip_loss(x, y, 20.0, -5.0, kernel=kernel).backward()
    wb.functional.matryoshka_loss(x, y, 20.0, dims=(32, 136), kernel=kernel).backward()
    if GPU:
        torch.cuda.synchronize()


def nccl() -> Found:
    """One rank on NCCL: a collective, its adjoint, and a loss that equals the one without a group."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    dist.init_process_group("nccl" if GPU else "gloo", rank=0, world_size=1)
    try:
        comm = wb.comm.TorchCommunicator()
        x, y = (unit_rows(64, 32).requires_grad_() for _ in range(2))
        gathered = comm.all_gather(x)
        gathered.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x)), "the adjoint of all_gather"
        inside = wb.functional.clip_loss(x, y, 20.0)
    finally:
        dist.destroy_process_group()
    alone = wb.functional.clip_loss(x, y, 20.0)
    assert torch.allclose(inside, alone), (inside, alone)
    return [{"backend": "nccl" if GPU else "gloo", "loss": inside.item()}]


def floors() -> Found:
    """Products of bfloat16 with sums in float32, as a sweep makes them: the ceiling of a loss."""
    found = []
    for m, k, n in ((4096, 512, 4096), (4096, 512, 32768), (8192, 512, 8192)) if GPU else ((256, 64, 256),):
        x, y = unit_rows(m, k, torch.bfloat16), unit_rows(n, k, torch.bfloat16)
        tile = torch.empty(m, n, device=DEVICE)
        products = wb.sweep.Products("bfloat16")
        taken = seconds(partial(products.scaled, 20.0, (x,), (y.T,), tile))
        grad, u = tile.bfloat16(), torch.zeros(m, k, device=DEVICE)
        back = seconds(partial(products.multiply, (grad,), (y,), u, add=True))
        flops = 2 * m * k * n
        found.append({"m": m, "k": k, "n": n, "tflops_of_S": flops / taken / 1e12, "tflops_of_dX": flops / back / 1e12})
    return found


def _autocast_clip(x: Tensor, y: Tensor) -> Tensor:
    """Plain PyTorch's CLIP under autocast, as open_clip computes it."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        logits, labels = 20.0 * x @ y.T, torch.arange(len(x), device=DEVICE)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _steps(x: Tensor, y: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each mode of CLIP's loss, with a call that computes it."""
    for mode in ("float32", "tf32", "bfloat16x3", "bfloat16"):
        yield mode, lambda mode=mode: wb.functional.clip_loss(x, y, 20.0, precision=mode)

    def under_autocast() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return wb.functional.clip_loss(x, y, 20.0)

    yield "auto under autocast", under_autocast
    if GPU and _has("triton"):
        yield "triton, bfloat16", lambda: wb.functional.clip_loss(x, y, 20.0, precision="bfloat16", kernel="triton")
    yield "plain PyTorch under autocast", lambda: _autocast_clip(x, y)


def _step(loss: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None
    loss().backward()


def losses() -> Found:
    """CLIP's loss, forward and backward, in each mode beside plain PyTorch under autocast."""
    found: Found = []
    for rows in (8192, 32768) if GPU else (256,):
        x, y = (unit_rows(rows, 512 if GPU else 64).requires_grad_() for _ in range(2))
        for mode, loss in _steps(x, y):
            step = partial(_step, loss, (x, y))
            try:
                taken, peak = seconds(step), peak_bytes(step)
            except RuntimeError as error:  # a mode that fails, or needs too much memory, costs its own figure alone
                found.append({"batch_size": rows, "mode": mode, "error": str(error).splitlines()[0]})
                continue
            found.append({"batch_size": rows, "mode": mode, "seconds": taken, "peak_bytes": peak})
    return found


def rectangle() -> Found:
    """The loss of one of eight ranks: its queries against the keys of all."""
    rows, others, size = (4096, 28672, 512) if GPU else (64, 448, 32)
    found = []
    x, y, negatives = (unit_rows(n, size, torch.bfloat16).requires_grad_() for n in (rows, rows, others))
    for kernel in ("torch", "triton") if GPU and _has("triton") else ("torch",):

        def step(kernel: str = kernel) -> None:
            x.grad = y.grad = negatives.grad = None
            loss = wb.functional.info_nce_loss(x, y, negatives=negatives, logit_scale=20.0, kernel=kernel)  # type: ignore[arg-type]
            loss.backward()

        found.append({"rows": rows, "columns": rows + others, "kernel": kernel, "seconds": seconds(step)})
        start = time.perf_counter()
        step()
        found[-1]["host_seconds"] = time.perf_counter() - start
    return found


def partial_fc() -> Found:
    """PartialFC over many classes, forward and backward, in each precision."""
    rows, classes, size = (8192, 1_250_000, 512) if GPU else (64, 2000, 32)
    x = unit_rows(rows, size).requires_grad_()
    labels = torch.randint(classes, (rows,), device=DEVICE)
    found = []
    for mode in ("bfloat16", "tf32", "float32"):
        head = wb.PartialFC(size, classes, sample_rate=0.1, device=DEVICE, precision=mode)

        def step(head: wb.PartialFC = head) -> None:
            head.weight.grad = x.grad = None
            head(x, labels).backward()

        found.append(
            {"classes": classes, "precision": mode, "seconds": seconds(step, 3), "peak_bytes": peak_bytes(step)}
        )
        del head
    return found


def million() -> Found:
    """CLIP over a million rows, flat."""
    rows = 2**20 if GPU else 1024
    x, y = (unit_rows(rows, 512 if GPU else 32, torch.bfloat16).requires_grad_() for _ in range(2))

    def step() -> None:
        x.grad = y.grad = None
        kernel = "triton" if GPU and _has("triton") else "torch"
        wb.functional.clip_loss(x, y, 20.0, memory="flat", kernel=kernel).backward()  # type: ignore[arg-type]

    return [{"rows": rows, "seconds": seconds(step, 1), "peak_bytes": peak_bytes(step)}]


def gradient_caching() -> Found:
    """A step of gradient caching beside the step without, in time and memory."""
    rows, width, chunk = (8192, 2048, 512) if GPU else (64, 32, 16)
    tower = torch.nn.Sequential(*[torch.nn.Linear(width, width, device=DEVICE) for _ in range(6)])
    x, y = (torch.randn(rows, width, device=DEVICE) for _ in range(2))
    loss = wb.CLIPLoss()
    cached = wb.GradCache([tower, tower], chunk, lambda a, b: loss(F.normalize(a, dim=1), F.normalize(b, dim=1), 20.0))

    def plain() -> None:
        tower.zero_grad()
        loss(F.normalize(tower(x), dim=1), F.normalize(tower(y), dim=1), 20.0).backward()

    def in_chunks() -> None:
        tower.zero_grad()
        cached(x, y)

    return [
        {"step": name, "seconds": seconds(call, 5), "peak_bytes": peak_bytes(call)}
        for name, call in (("plain", plain), ("cached", in_chunks))
    ]


STAGES: dict[str, tuple[Callable[[], Found], tuple[str, ...]]] = {  # each with the checks that must have passed
    "about": (about, ()),
    "precision": (precision, ()),
    "self_check": (self_check, ()),
    "tests_of_kernels": (tests_of_kernels, ()),
    "sanitizer": (sanitizer, ()),
    "nccl": (nccl, ()),
    "floors": (floors, ("precision",)),
    "losses": (losses, ("precision",)),
    "rectangle": (rectangle, ("precision",)),
    "partial_fc": (partial_fc, ("precision",)),
    "million": (million, ("precision",)),
    "gradient_caching": (gradient_caching, ("precision",)),
}


def run_stage(name: str, folder: Path) -> None:
    """Run one stage in this process, and write its JSON."""
    start, outcome = time.perf_counter(), {"stage": name, "device": str(DEVICE)}
    try:
        record = outcome | {"results": STAGES[name][0]()}
    except SkippedError as reason:
        record = outcome | {"skipped": str(reason)}
    record["wall_seconds"] = time.perf_counter() - start
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def run_all(names: list[str], folder: Path, limit_s: float) -> bool:
    """Run stages in processes of their own, and return whether none failed; write a report."""
    folder.mkdir(parents=True, exist_ok=True)
    passed, lines = set[str](), ["# One GPU, stage by stage", "", "| stage | outcome | seconds |", "|---|---|---|"]
    failed = False
    for name in names:
        record, missing = (
            folder / f"{name}.json",
            [check for check in STAGES[name][1] if check not in passed and check in names],
        )
        record.unlink(missing_ok=True)
        start = time.perf_counter()
        if missing:
            outcome = f"skipped: {', '.join(missing)} did not pass"
        else:
            with (folder / f"{name}.log").open("w") as log:
                command = [sys.executable, __file__, "--out", str(folder), "--stage", name]
                try:
                    code: int | str = subprocess.run(
                        command, stdout=log, stderr=log, timeout=limit_s, check=False
                    ).returncode
                except subprocess.TimeoutExpired:
                    code = f"longer than {limit_s:.0f} s"
            found = json.loads(record.read_text()) if record.exists() else {}
            outcome = (
                f"skipped: {found['skipped']}" if "skipped" in found else "passed" if code == 0 else f"FAILED: {code}"
            )
        passed |= {name} if outcome == "passed" else set()
        failed = failed or outcome.startswith("FAILED")
        lines.append(f"| {name} | {outcome} | {time.perf_counter() - start:.1f} |")
        print(lines[-1], flush=True)
    if not GPU:
        lines.append("\nThere was no GPU: sizes were small, on the CPU, and times mean nothing.")
    for name in names:
        if (folder / f"{name}.json").exists():
            lines += ["", f"## {name}", "", "```json", (folder / f"{name}.json").read_text().rstrip(), "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    return not failed


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[*STAGES], default=[*STAGES], help="stages to run")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a stage, at most")
    parser.add_argument("--stage", choices=[*STAGES], help=argparse.SUPPRESS)
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        step_of_kernels()
    elif given.stage:
        run_stage(given.stage, given.out)
    else:
        sys.exit(not run_all(given.only, given.out, given.limit))


if __name__ == "__main__":
    main()

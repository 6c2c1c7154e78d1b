"""Time and memory of this library on the device: products, losses, PartialFC, gradient caching."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb
from wholebatch import kernels

from .device import DEVICE, GPU, Row, first_line, forget, peak_bytes, seconds, under_autocast, unit_rows

_IN_KERNELS = GPU and kernels.missing(DEVICE) is None
KERNELS = ("torch", "triton") if _IN_KERNELS else ("torch",)
_BEST: Any = KERNELS[-1]


def measured(step: Callable[[], object], repeats: int = 7, *, work: float | None = None) -> Row:
    """Return the time and memory of a step, and with its operations the speed; or why there is none.

    A step that fails, or that needs more memory than there is, costs its own figure alone.
    """
    try:
        taken, peak = seconds(step, repeats), peak_bytes(step)
    except (RuntimeError, ValueError) as error:
        return {"error": first_line(error)}
    speed = {} if work is None else {"tflops": work / taken / 1e12}
    return {"seconds": taken, **speed, "peak_bytes": peak}


def backward_of(loss: Callable[..., Tensor], *leaves: Tensor, also: tuple[Tensor, ...] = ()) -> Callable[[], None]:
    """Return forward and backward of a loss of leaves; `also` get gradients, too."""

    def step() -> None:
        forget(*leaves, *also)
        loss(*leaves).backward()

    return step


def floors() -> Iterator[Row]:
    """Yield the speed of products of bfloat16 with sums in float32, as a sweep makes them: the ceiling of a loss."""
    for m, k, n in ((4096, 512, 4096), (4096, 512, 32768), (8192, 512, 8192)) if GPU else ((256, 64, 256),):
        x, y = unit_rows(m, k, torch.bfloat16), unit_rows(n, k, torch.bfloat16)
        tile = torch.empty(m, n, device=DEVICE)
        products = wb.sweep.Products("bfloat16")
        taken = seconds(partial(products.scaled, 20.0, (x,), (y.T,), tile))
        grad, u = tile.bfloat16(), torch.zeros(m, k, device=DEVICE)
        back = seconds(partial(products.multiply, (grad,), (y,), u, add=True))
        flops = 2 * m * k * n
        yield {"m": m, "k": k, "n": n, "tflops_of_S": flops / taken / 1e12, "tflops_of_dX": flops / back / 1e12}


def _plain_clip(x: Tensor, y: Tensor) -> Tensor:
    """Plain PyTorch's CLIP, as open_clip computes it."""
    logits, labels = 20.0 * x @ y.T, torch.arange(len(x), device=DEVICE)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _modes(ours: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield each mode of a loss, and the loss in that mode."""
    for mode in ("float32", "tf32", "bfloat16x3", "bfloat16"):
        yield mode, partial(ours, precision=mode)
    yield "auto under autocast", under_autocast(ours)
    for kernel, memory in product(KERNELS, ("auto", "flat")):
        yield (
            f"bfloat16, kernel={kernel}, memory={memory}",
            partial(ours, precision="bfloat16", kernel=kernel, memory=memory),
        )


def losses() -> Iterator[Row]:
    """Yield CLIP's, SigLIP's and NT-Xent's time in each mode, and plain PyTorch's CLIP under autocast."""
    wf = wb.functional
    ours: dict[str, Callable[..., Tensor]] = {
        "clip": lambda x, y, **more: wf.clip_loss(x, y, 20.0, **more),
        "siglip": lambda x, y, **more: wf.siglip_loss(x, y, 20.0, -5.0, **more),
        "nt_xent": lambda x, y, **more: wf.nt_xent_loss(x, y, temperature=0.05, **more),
    }
    sizes = ((8192, 512), (32768, 512), (32768, 1024)) if GPU else ((256, 64),)
    for (rows, size), (name, loss) in product(sizes, ours.items()):
        x, y = (unit_rows(rows, size).requires_grad_() for _ in range(2))
        modes = dict(_modes(loss))
        if name == "clip":
            modes["auto under autocast, even=True"] = under_autocast(partial(loss, even=True))
            modes["plain PyTorch under autocast"] = under_autocast(_plain_clip)
        for mode, call in modes.items():
            row: Row = {"loss": name, "batch_size": rows, "embedding_size": size, "mode": mode}
            yield row | measured(backward_of(call, x, y))


def rectangle() -> Iterator[Row]:
    """Yield the time of one of eight ranks: its queries against the keys of all."""
    rows, others, size = (4096, 28672, 512) if GPU else (64, 448, 32)
    x, y, negatives = (unit_rows(n, size, torch.bfloat16).requires_grad_() for n in (rows, rows, others))
    for kernel in KERNELS:

        def loss(x: Tensor, y: Tensor, negatives: Tensor, kernel: Any = kernel) -> Tensor:
            return wb.functional.info_nce_loss(x, y, negatives=negatives, logit_scale=20.0, kernel=kernel)

        step = backward_of(loss, x, y, negatives)
        row: Row = {"rows": rows, "columns": rows + others, "kernel": kernel} | measured(step)
        if "error" not in row:
            start = time.perf_counter()
            step()
            row["host_seconds"] = time.perf_counter() - start  # without waiting for the device
        yield row


def partial_fc() -> Iterator[Row]:
    """Yield the time of PartialFC over many classes, all and a sample, by precision and kernel."""
    rows, classes, size = (8192, 1_250_000, 512) if GPU else (64, 2000, 32)
    x = unit_rows(rows, size).requires_grad_()
    labels = torch.randint(classes, (rows,), device=DEVICE)
    for rate, mode, kernel in product((0.1, 1.0), ("bfloat16", "tf32", "float32"), KERNELS):
        if mode != "bfloat16" and (kernel == "triton" or rate == 1.0):
            continue
        settings: Row = {"sample_rate": rate, "precision": mode, "kernel": kernel}
        head = wb.PartialFC(size, classes, device=DEVICE, **settings)
        step = backward_of(partial(head, labels=labels), x, also=(head.weight,))
        yield {"rows": rows, "classes": classes, **settings} | measured(step, 3, work=8 * rows * rate * classes * size)
        del head, step


def million() -> Iterator[Row]:
    """Yield the time of CLIP over a million rows, flat."""
    rows = 2**20 if GPU else 1024
    x, y = (unit_rows(rows, 512 if GPU else 32, torch.bfloat16).requires_grad_() for _ in range(2))
    loss = partial(wb.functional.clip_loss, logit_scale=20.0, memory="flat", kernel=_BEST)
    yield {"rows": rows, "kernel": _BEST} | measured(backward_of(loss, x, y), 1, work=8 * rows**2 * x.shape[1])


def gradient_caching() -> Iterator[Row]:
    """Yield a step of gradient caching beside the step without, in time and memory."""
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

    for name, call in (("plain", plain), ("cached", in_chunks)):
        yield {"step": name, "rows": rows, "width": width} | measured(call, 5)

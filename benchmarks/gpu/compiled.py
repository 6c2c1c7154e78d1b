"""Compile and check the kernels of losses in several processes, so that the stages after this one find them cached."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from kernel_losses import losses
from torch.nn import functional as F

import wholebatch as wb
from wholebatch import kernels

from .device import DEVICE, GPU, Row, SkippedError, message

_PEERS = ("clip", "siglip")  # their losses are timed at other sizes, too
_WORKERS = os.cpu_count() or 1
Form = tuple[str, str, int]  # the loss, the dtype and the number of features


def forms() -> list[Form]:
    """Return the forms to compile: every loss that kernels compute, and those of other stages."""
    if not GPU:
        return [("siglip", "float32", 24)]
    made = losses(*[torch.zeros(1, 1)] * 2, torch.zeros(1))[0]
    found: list[Form] = [(name, "bfloat16", 768 if name in _PEERS else 512) for name in made]
    return [*found, *((name, dtype, 512) for name in _PEERS for dtype in ("bfloat16", "float32")),
            ("max_sim", "bfloat16", 128)]  # fmt: skip


def compile_form(form: Form, rows: int) -> Row:
    """Make a step of a loss in kernels, which compiles and checks them at their first use."""
    name, dtype, size = form
    start = time.perf_counter()
    row: Row = {"loss": name, "dtype": dtype, "size": size}
    try:
        torch.manual_seed(0)
        x, y = (
            F.normalize(torch.randn(rows, size, device=DEVICE), dim=1).to(getattr(torch, dtype)).requires_grad_()
            for _ in range(2)
        )
        loss = losses(x, y, torch.randint(0, 30, (rows,), device=DEVICE))[0][name]
        loss(wb.functional, {"kernel": "triton"}).backward()
    except Exception as error:  # also of Triton's compiler; the row says so, and others go on
        row["error"] = message(error)
    return row | {"seconds": time.perf_counter() - start}


def compiled() -> Iterator[Row]:
    """Yield the time of each form, or how it failed; raise if one failed."""
    if (why := kernels.missing(DEVICE)) is not None:
        raise SkippedError(f"kernel='triton' {why}")
    tasks = forms()
    failed = 0
    with ProcessPoolExecutor(min(_WORKERS, len(tasks)), multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(partial(compile_form, rows=1024 if GPU else 40), tasks):
            failed += "error" in row
            yield row
    if failed:
        raise AssertionError(f"{failed} of {len(tasks)} forms failed")

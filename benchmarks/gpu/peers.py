"""Time, memory and errors of a library's losses, forward and backward, by batch size: all in one process.

Before each time, value and gradients are compared with exact ones; a method with other results is not timed. CUDA
graphs come last, because one that fails to be captured may leave the process unable to capture another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch._base.third_party import version
from wholebatch.bench.peers import PairLoss

from .device import DEVICE, GPU, Row, captured, median_seconds, message, peak_bytes, relative
from .libraries import Method, libraries
from .truth import BIAS, FEW, SCALE, Truth, truth

_BATCHES = tuple(2**k for k in range(10, 17)) if GPU else (64,)
_SIZES = (512, 768) if GPU else (32,)
_TEXTS = tuple((n, 32, 180, 128) for n in (256, 512, 1024)) if GPU else ((6, 4, 9, 16),)
_MOST_TEXTS = 256  # for which the reference fits into memory; more are checked with so many
_CLOSE, _CLOSE_GRADIENT = 2e-2, 5e-2  # relative errors of products and gradients in bfloat16
_WORK = {"clip": 8, "siglip": 6}  # operations of a step, in units of rows^2 * size
Shape = tuple[int, ...]  # rows and embedding size; or queries, tokens of a query, tokens of a document, embedding size
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


def shapes(loss: str) -> list[Shape]:
    """Return the shapes at which a loss is measured."""
    return list(_TEXTS) if loss == "max_sim" else [(rows, size) for size, rows in product(_SIZES, _BATCHES)]


@lru_cache(maxsize=2)
def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return random features of length 1 in bfloat16, in pairs that are similar, as after a part of a training."""
    torch.manual_seed(0)
    rows, *tokens, size = shape
    of_x, of_y = ((rows, count, size) for count in tokens) if tokens else ((rows, size), (rows, size))
    x, y = (F.normalize(torch.randn(of, device=DEVICE), dim=-1) for of in (of_x, of_y))
    y = y if tokens else F.normalize(0.4 * x + 0.6 * y, dim=-1)
    return x.bfloat16().requires_grad_(), y.bfloat16().requires_grad_()


@lru_cache(maxsize=2)
def exact(loss: str, shape: Shape) -> Truth:
    """Return the exact value and gradients."""
    return truth(loss, *inputs(shape))


def step_of(loss: PairLoss, shape: Shape) -> Step:
    """Return a function that computes a loss and its gradients."""
    x, y = inputs(shape)
    scale, bias = torch.tensor(SCALE, device=DEVICE), torch.tensor(BIAS, device=DEVICE)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        value = loss(x, y, scale, bias)
        of_x, of_y = torch.autograd.grad(value, (x, y))
        return value.detach(), of_x, of_y

    return step


def errors(result: Sequence[Tensor], true: Truth) -> Row:
    """Return the relative errors of a value and of gradients; "error" if one is too large."""
    value, *gradients = (relative(z[:FEW] if z.dim() else z, of) for z, of in zip(result, true, strict=True))
    row: Row = {"error_of_loss": value, "error_of_gradient": max(gradients)}
    right = value <= _CLOSE and all(of <= _CLOSE_GRADIENT for of in gradients)
    return row if right else row | {"error": f"wrong: errors above {_CLOSE:g} or {_CLOSE_GRADIENT:g}"}


def measured(method: Method, loss: PairLoss, shape: Shape, *, in_graph: bool) -> Row:
    """Return the errors of a method, and if they are small its time and memory; or why there is none."""
    try:
        step = step_of(loss, shape)
        checked = (min(shape[0], _MOST_TEXTS), *shape[1:]) if method.loss == "max_sim" else shape
        row = errors(step_of(loss, checked)(), exact(method.loss, checked))
        if in_graph and "error" not in row:
            replay, result = captured(step)
            replay()
            row = errors(result, exact(method.loss, shape))
            call: Callable[[], object] = replay
        else:
            call = step
        if "error" in row:
            return row
        row["seconds"] = median_seconds(call)
        row |= {} if in_graph else {"peak_bytes": peak_bytes(step)}
        if method.loss in _WORK:
            row["tflops"] = _WORK[method.loss] * shape[0] ** 2 * shape[1] / row["seconds"] / 1e12
        return row
    except Exception as error:  # another library's code raises whatever it likes; the row says so
        return {"error": message(error)}
    finally:
        if GPU:
            torch.cuda.empty_cache()


def peers(library: str, left: Callable[[], float], *, methods: Sequence[Method] | None = None) -> Iterator[Row]:
    """Yield the figures of a library's losses at all sizes, and those in CUDA graphs after them.

    Args:
        library: its name in `libraries`.
        left: returns the seconds that are left; without any, rows say so.
        methods: other methods than the library's.
    """
    built: dict[Method, PairLoss] = {}
    for method in libraries()[library] if methods is None else methods:
        row: Row = {"library": library, "loss": method.loss, "method": method.label}
        row |= {} if method.package is None else {"version": version(method.package)}
        if (why := method.missing(min(_SIZES))) is not None:
            yield row | {"skipped": why}
            continue
        try:
            built[method] = method.build()
        except Exception as error:  # also of its import; a library that it needs may not be installed
            yield row | {"skipped" if isinstance(error, ImportError) else "error": message(error)}
    for in_graph in (False, True) if GPU else (False,):
        failed = False
        for loss in ("clip", "siglip", "max_sim"):
            for shape in shapes(loss):
                for method in (of for of in built if of.loss == loss and (of.captures or not in_graph)):
                    row = {"library": library, "loss": loss, "method": method.label, "in_graph": in_graph}
                    row["shape"] = shape
                    if failed:
                        yield row | {"skipped": "a CUDA graph could not be captured"}
                    elif left() <= 0:
                        yield row | {"skipped": "no time left"}
                    else:
                        row |= measured(method, built[method], shape, in_graph=in_graph)
                        failed = in_graph and row.get("error", "out of memory") != "out of memory"
                        yield row

"""The options that every loss gives its caller: their types, their defaults, and their description.

One is no argument: the wish for statistics of the batch. It is a context variable, so it passes through any layers in
between, such as a :class:`wholebatch.GradCache` or a trainer's wrapper, and the loss itself always returns a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from .._base.checks import check_choice, check_memory
from ..comm import Group
from ..exchange import EXCHANGES, ExchangeName
from ..kernels import KERNELS, Kernel
from ..sweep import PRECISIONS, Memory, Precision
from ..sync import Sync, check_sync

Checking = Literal["entry", "deferred"]
CHECKING = ("entry", "deferred")
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
_reports: ContextVar[list[Any] | None] = ContextVar("_reports", default=None)


class LossOptions(TypedDict, total=False):
    """Keywords that every loss takes.

    Attributes:
        group: ranks that share the batch: a `torch.distributed.ProcessGroup`, a one-dimensional `DeviceMesh`, a
            `wholebatch.comm` communicator, or None for the default group (this process alone if there is none).
        sync: what the engine does with gradients after the backward pass. "mean", the default (DDP, FSDP, DeepSpeed):
            after its averaging every parameter of the encoder, and a learned scale, holds dL/d(parameter); features
            that are leaves hold W * dL/dX_r, scale and bias the full gradient on every rank. "sum" and None: features
            hold dL/dX_r, and scale this rank's share.
        checks: of the values of tensors. "entry", the default: read by the host before anything is computed; a mistake
            raises now, on all ranks. "deferred": the first call reads, and a later one like it does not: a mistake is
            NaN with gradients 0, and raises on all ranks at the next call. It can be captured in a CUDA graph:
            docs/performance.md. A loss that has to read values in each call refuses it.
    """

    group: Group
    sync: Sync
    checks: Checking


class SweepOptions(LossOptions, total=False):
    """Keywords of a loss that sweeps over the similarities S: those of :class:`LossOptions`, and these.

    Attributes:
        exchange: how rows of the other ranks travel: "gather" (all of them on every rank, memory O(B d)), "ring" (from
            rank to rank, memory O(b d)), or "auto", the default, which chooses "gather" while it takes at most 1 GiB.
        memory: for the tiles of S. "flat": S is computed twice and never stored; an int: this many bytes per rank hold
            exp(S), or part of it, between forward and backward, so that it is computed once; "auto", the default:
            "flat" except for small batches, whose S may be a few matrices in float64. Half precision is used for some
            of it, at a cost: see `wholebatch.sweep.memory`. Where nothing is kept, a number of bytes can only make
            tiles smaller.
    """

    exchange: ExchangeName
    memory: Memory


class ProductOptions(SweepOptions, total=False):
    """Keywords of a loss whose sweep multiplies rows: those of :class:`SweepOptions`, and one more.

    Attributes:
        precision: of the products of features, and of dS with features. "auto", the default: on CUDA half precision for
            features in half precision or under autocast, with sums in float32, and TF32 where the program allows it;
            else float32. "float32", "tf32", "bfloat16", "float16", "bfloat16x3": that one, see docs/precision.md.
            Float64 features are multiplied in float64.
    """

    precision: Precision


class KernelOptions(ProductOptions, total=False):
    """Keywords of a loss that kernels can compute: those of :class:`ProductOptions`, and one more.

    Attributes:
        kernel: "torch": tiles are computed by plain PyTorch, in float32 (float64 for float64). "triton": by kernels
            that never store S, on CUDA, with `pip install triton`; features are multiplied in the
            precision that they have and summed in float32, and dS is rounded to their dtype. Unsupported cases fall
            back to PyTorch silently: docs/kernels.md has the table. The first call of a form checks its kernels
            against float64, and raises on all ranks if they are wrong on one. "auto", the default: "torch", or on CUDA
            the faster of both, if kernels pass this check on all ranks.
    """

    kernel: Kernel


class BatchOptions(TypedDict, total=False):
    """Keywords of losses with other libraries' arguments: some of :class:`ProductOptions`."""

    group: Group
    exchange: ExchangeName
    memory: Memory
    precision: Precision


@dataclass(eq=False)
class Options:
    """The options of one call; a loss without one of them leaves its default."""

    group: Group = None
    sync: Sync = "mean"
    exchange: ExchangeName = "auto"
    memory: Memory = "auto"
    reduction: Reduction = "mean"
    kernel: Kernel = "auto"
    precision: Precision = "auto"
    checks: Checking = "entry"

    @property
    def deferred(self) -> bool:
        """Whether checks are deferred; also of options that nobody has checked."""
        return isinstance(self.checks, str) and self.checks == "deferred"

    def check(self) -> None:
        """Raise ValueError unless each option exists; `group` is checked when the loss is called."""
        check_sync(self.sync)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_memory(self.memory)
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("checks", self.checks, CHECKING)


def defaults_of(keywords: type) -> dict[str, Any]:
    """Return the default of each option that a TypedDict names, in the order of :class:`Options`."""
    return {field.name: field.default for field in fields(Options) if field.name in keywords.__annotations__}


def with_named_options(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with the keywords of its `**options`, an unpacked TypedDict, by name."""
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()]
    last = parameters[-1] if parameters else None
    if last is None or last.kind is not last.VAR_KEYWORD or not str(last.annotation).startswith("Unpack["):
        return signature
    keywords = inspect.unwrap(function).__globals__[str(last.annotation)[len("Unpack[") : -1]]
    return naming(signature, defaults_of(keywords), keywords.__annotations__)


def naming(
    signature: inspect.Signature, defaults: Mapping[str, Any], types: Mapping[str, Any] = MappingProxyType({})
) -> inspect.Signature:
    """Return a signature with keywords that have these defaults and types in place of its last parameter."""
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types.get(name, inspect.Parameter.empty)
        )
        for name, default in defaults.items()
    ]
    return signature.replace(parameters=[*[*signature.parameters.values()][:-1], *keywords])


@contextmanager
def collecting(reports: list[Any] | None) -> Iterator[None]:
    """Append the statistics of each loss that is computed inside; None: it is computed for another reason."""
    token = _reports.set(reports)
    try:
        yield
    finally:
        _reports.reset(token)


def statistics_requested() -> bool:
    """Return whether the loss that is being computed was called through `with_statistics`."""
    return _reports.get() is not None


def report(statistics: object) -> None:
    """Hand the statistics of a loss to the caller that has requested them."""
    reports = _reports.get()
    assert reports is not None
    reports.append(statistics)

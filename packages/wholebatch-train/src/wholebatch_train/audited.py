"""The audit before training, which is cheap: the run's ranks and precision, and the first examples of the first batch.

Each rank compares its final gradient with that of the dense reference implementation, which it computes alone.

How far rounding can move a gradient is measured by gradients of features that are moved by about as much:

    t = sum_i J_i^T g_i(f_1, ..., f_n)      J_i: derivatives of example i's features f_i by the weights; g_i = dL/df_i

A right computation of t in floating point, of unit rounding u, is one of features with errors of some u |f_i|, and of
terms with relative errors of some u (it is backward stable). If the errors of examples are independent, that of t is

    E = | sum_i s_i J_i^T (g_i(f_1 + e |f_1| r_1, ...) - g_i(f_1, ...)) | + e | sum_i s_i J_i^T g_i(f_1, ...) |

with normal random numbers s_i, random unit vectors r_i, and e some u. It is at most sqrt(n) E if they are equal, as
those of equal examples can be. Where terms do not cancel, E is e |t| times the condition of the loss. Where they do, as
where all texts have equal features, |t| is about as large as its own error, and an error relative to |t| says nothing.
Because of the factors s_i, the terms of E do not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.app import UserError
from wholebatch.app.tensors import CATALOG

from .config import TrainConfig
from .data.load import Data
from .data.randomness import seeded
from .ranks.all_ranks import on_all_ranks
from .tasks.make import make_task
from .tasks.task import Task

_EXAMPLES = 64
_WRONG = 0.02  # relative error, above rounding in float32 or TF32, and below the smallest known mistake
MOVED = {"fp32": 2**-17, "tf32": 2**-11}
"""e: 128 u in float32, whose sums have many terms; u in TF32, in which products are rounded, and sums are not."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of the audit before training.

    Args:
        examples: number of examples compared.
        ranks: W, the number of ranks.
        error: |gradient - reference| / |reference|, over all parameters.
        is_rounding: whether the reference is so small that this error is no larger than rounding can be.
    """

    examples: int
    ranks: int
    error: float
    is_rounding: bool = False

    def __str__(self) -> str:
        on = f"{self.ranks} process{'es' if self.ranks > 1 else ''}"
        if self.is_rounding:
            return (
                f"audit: on {on} the gradient of {self.examples} examples is that of the dense loss on one up to "
                f"rounding; that one is so small that its rounding is {self.error:.0e} of it: are many inputs equal to "
                "the encoder, such as texts of words that its tokenizer does not know?"
            )
        return (
            f"audit: on {on} the gradient of {self.examples} examples is that of the dense loss on one, relative error "
            f"{self.error:.0e}"
        )


def audit_start(config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int) -> Outcome:
    """Compare this rank's final gradient with that of the dense loss on one process. All ranks.

    Of sharded weights no device may have room for the whole: rank 0 alone compares, on its CPU.

    Raises:
        UserError: on all ranks, if they differ on one.
    """
    has_moments = config.loss in CATALOG and CATALOG[config.loss].moments
    examples = config.batch_size if has_moments else max(size, min(_EXAMPLES, config.batch_size))
    precision = "fp32" if config.precision in ("bf16", "fp16") else config.precision  # whose rounding is no mistake
    smaller = replace(
        config,
        workers=0,
        precision=precision,
        batch_size=examples,
        chunk_size=min(config.chunk_size, max(1, examples // size // 2)),
    )
    grads = _gradients(make_task(smaller, data, device, rank=rank, size=size))
    is_sharded = config.fsdp and size > 1
    whole = replace(smaller, chunk_size=0, precision="fp32" if is_sharded else precision)

    def compare() -> Outcome:
        if is_sharded and rank:
            return Outcome(examples, size, 0.0)
        where = torch.device("cpu") if is_sharded else device
        expected = _gradients(make_task(whole, data, where, rank=0, size=1, dense=True))
        error = _relative_error(grads, expected)
        if error < _WRONG:
            return Outcome(examples, size, error)
        if _distance(grads, expected) <= _rounding(whole, data, where):
            return Outcome(examples, size, error, is_rounding=True)
        raise UserError(
            f"the gradient of {examples} examples on {size} processes is not that of the dense loss on one: "
            f"relative error {error:.2g}. Nothing was trained; --no-audit trains without this check"
        )

    _, outcomes = on_all_ranks("audit", compare, asdict, patient=True)
    return Outcome(**outcomes[0 if is_sharded else rank])


def _gradients(task: Task) -> dict[str, Tensor]:
    task.add_gradients(0)
    return task.gradients()


def _relative_error(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    if grads.keys() != expected.keys():
        raise UserError(f"audit: parameters without a gradient: {', '.join(sorted(expected.keys() ^ grads.keys()))}")
    error, norm = _distance(grads, expected), _norm(expected)
    return error / norm if norm else math.inf if error else error


def _rounding(config: TrainConfig, data: Data, device: torch.device) -> float:
    """Return sqrt(n) E, which the rounding of the dense loss's gradient does not exceed."""
    grads, moved = [], MOVED[config.precision]
    for by in (0.0, moved):
        task = make_task(replace(config, compile=False), data, device, rank=0, size=1, dense=True)
        task.module.register_forward_hook(moved_and_multiplied(by))
        grads.append(_gradients(task))
    return math.sqrt(config.batch_size) * (_distance(*grads) + moved * _norm(grads[0]))


def _distance(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return _norm({name: grads[name].to(x) - x for name, x in expected.items()})


def _norm(grads: Mapping[str, Tensor]) -> float:
    return torch.stack([x.double().square().sum().cpu() for x in grads.values()]).sum().sqrt().item()


def moved_and_multiplied(by: float) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook for encoders that return features (n, d), or a tuple of these, of scalars and of None.

    It moves the features by so much, e, and multiplies their gradients by random numbers: g_i becomes s_i g_i.
    """

    def move(output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_move(x, by, i) if isinstance(x, Tensor) and x.dim() else x for i, x in enumerate(output))
        return _move(output, by, 0)

    return lambda _module, _inputs, output: move(output)


def _move(features: Tensor, by: float, index: int) -> Tensor:
    generator = seeded("rounding", index)
    directions = F.normalize(torch.randn(features.shape, generator=generator), dim=-1).to(features)
    factors = torch.randn(len(features), 1, generator=generator).to(features)
    constant = features.detach()
    return constant + by * constant.norm(dim=-1, keepdim=True) * directions + factors * (features - constant)

"""The losses of each library, as functions of two towers, a scale and a bias.

A loss is built in the process that measures it, so that a library that is not installed costs a message alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb
from wholebatch._base.third_party import version
from wholebatch.bench.peers import PEERS, PairLoss

from .device import DEVICE, GPU
from .truth import BIAS, SCALE


@dataclass(frozen=True)
class Method:
    """A way of a library to compute a loss.

    Args:
        loss: "clip", "siglip" or "max_sim".
        label: its name.
        build: makes the loss.
        package: its name for pip; None: this library.
        on_cpu: whether it runs without a GPU.
        multiple: a number that must divide the embedding size.
        captures: whether to try it in a CUDA graph.
    """

    loss: str
    label: str
    build: Callable[[], PairLoss]
    package: str | None = None
    on_cpu: bool = True
    multiple: int = 1
    captures: bool = True

    def missing(self, size: int) -> str | None:
        """Return why it cannot run here with this embedding size; None if it can."""
        if self.package is not None and version(self.package) is None:
            return "not installed"
        if not (GPU or self.on_cpu):
            return "needs a GPU"
        return f"needs an embedding size that {self.multiple} divides" if size % self.multiple else None


def dense_clip(x: Tensor, y: Tensor, scale: Tensor, _bias: Tensor) -> Tensor:
    """Return CLIP's loss as it is commonly written for one process: two products, two cross-entropies."""
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(scale * x @ y.T, labels) + F.cross_entropy(scale * y @ x.T, labels)) / 2


def dense_siglip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return SigLIP's loss from one matrix of logits."""
    signs = 2 * torch.eye(len(x), dtype=x.dtype, device=x.device) - 1
    return -F.logsigmoid(signs * (scale * x @ y.T + bias)).sum() / len(x)


_DENSE: dict[str, PairLoss] = {"clip": dense_clip, "siglip": dense_siglip}
_OURS: dict[str, Callable[..., Tensor]] = {
    "clip": lambda x, y, scale, _bias, **more: wb.functional.clip_loss(x, y, scale, **more),
    "siglip": wb.functional.siglip_loss,
    "max_sim": lambda x, y, _scale, _bias, **more: wb.functional.max_sim_loss(x, y, logit_scale=1.0, **more),
}


def our_methods() -> list[Method]:
    """Return this library's methods: with its defaults, by each kernel, and with deferred checks where it has them."""
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "triton": {"kernel": "triton"},
        "torch": {"kernel": "torch"},
        "deferred": {"checks": "deferred"},
    }
    return [
        Method(loss, label, partial(partial, call, **options), captures=label == "deferred")
        for loss, call in _OURS.items()
        for label, options in settings.items()
        if (loss, label) != ("max_sim", "deferred")  # late interaction reads how many tokens each item has
    ]


def _siglip_kernel() -> PairLoss:
    from siglip_kernel import fused_siglip_loss

    scale, bias = torch.tensor(math.log(SCALE), device=DEVICE), torch.tensor(BIAS, device=DEVICE)
    return lambda x, y, _scale, _bias: fused_siglip_loss(x, y, scale, bias)


def _late_interaction_kernels() -> PairLoss:
    from late_interaction_kernels import maxsim

    return lambda x, y, _scale, _bias: F.cross_entropy(maxsim(x, y), torch.arange(len(x), device=x.device))


def libraries() -> dict[str, list[Method]]:
    """Return the methods of each library, this one first."""
    of_texts, of_pairs = "late-interaction-kernels", "siglip-kernel"
    compiled = partial(torch.compile, backend="inductor" if GPU else "aot_eager")  # C++ for a CPU takes a minute
    found: dict[str, list[Method]] = {
        "wholebatch": our_methods(),
        "torch": [
            *(Method(loss, "dense", partial(partial, call)) for loss, call in _DENSE.items()),
            *(Method(loss, "dense compiled", partial(compiled, call)) for loss, call in _DENSE.items()),
        ],
        of_pairs: [Method("siglip", of_pairs, _siglip_kernel, of_pairs, on_cpu=False)],
        of_texts: [Method("max_sim", of_texts, _late_interaction_kernels, of_texts, on_cpu=False)],
    }
    for loss in ("clip", "siglip"):
        for peer in PEERS[loss]:
            build = partial(peer.build, wb.comm.LocalCommunicator(), SCALE)
            method = Method(loss, peer.label, build, peer.package, peer.on_cpu, peer.multiple)
            found.setdefault(peer.package, []).append(method)
    return found

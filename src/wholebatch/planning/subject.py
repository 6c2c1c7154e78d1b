"""A step of a loss with random features, to be timed: what `work` describes, and a call to paste says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import functional
from ..comm import Communicator
from ..heads import CosFace, PartialFC
from ..partition import Partition
from ..sweep import Memory
from .work import Shapes

SCALE, BIAS = 14.3, -10.0
_PER_CLASS = 4  # examples of a class, of sup_con

# Of `wholebatch.functional` or its twin `wholebatch.reference`, two towers, scale and bias.
OF_PAIRS: dict[str, Callable[..., Tensor]] = {
    "clip": lambda f, x, y, scale, _bias, **options: f.clip_loss(x, y, scale, **options),
    "info_nce": lambda f, x, y, scale, _bias, **options: f.info_nce_loss(x, y, logit_scale=scale, **options),
    "nt_xent": lambda f, x, y, _scale, _bias, **options: f.nt_xent_loss(x, y, temperature=1 / SCALE, **options),
    "siglip": lambda f, x, y, scale, bias, **options: f.siglip_loss(x, y, scale, bias, **options),
}


def make_step(
    comm: Communicator, shapes: Shapes, exchange: str, memory: Memory, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of this rank's rows, whose gradients have their memory already, as in a second step.

    Args:
        comm: the ranks, as many as `shapes` says.
        shapes: of the step.
        exchange: as for the loss.
        memory: as for the loss.
        device: of the features.
    """
    rows = Partition.even(shapes.batch, comm.size).counts[comm.rank]
    generator = torch.Generator().manual_seed(comm.rank)
    features = [
        normalize(torch.randn(rows, shapes.dim, generator=generator), dim=1).to(device, shapes.dtype).requires_grad_()
        for _ in range(shapes.towers)
    ]
    for x in features:
        x.grad = torch.ones_like(x)
    options: dict[str, Any] = {"group": comm, "memory": memory}
    if shapes.loss == "partial_fc":
        return _classify(shapes, features[0], options, generator)
    options["exchange"] = exchange
    scale, bias = (torch.tensor(of, device=device, requires_grad=True) for of in (SCALE, BIAS))

    def step() -> None:
        if shapes.loss == "sup_con":
            labels = torch.arange(rows, device=device) // _PER_CLASS
            functional.sup_con_loss(features[0], labels, temperature=1 / SCALE, **options).backward()
        else:
            OF_PAIRS[shapes.loss](functional, *features, scale, bias, **options).backward()

    return step


def _classify(shapes: Shapes, x: Tensor, options: dict[str, Any], generator: torch.Generator) -> Callable[[], None]:
    head = PartialFC(
        shapes.dim, shapes.classes, margin=CosFace(16.0, 0.1), sample_rate=shapes.sample_rate, device=x.device,
        dtype=shapes.dtype, **options,
    )  # fmt: skip
    labels = torch.randint(shapes.classes, (len(x),), generator=generator).to(x.device)
    dense = shapes.sample_rate == 1
    if dense:
        head.weight.grad = torch.ones_like(head.weight)

    def step() -> None:
        if not dense:
            head.weight.grad = None  # a sample's has other rows each time
        head(x, labels).backward()

    return step

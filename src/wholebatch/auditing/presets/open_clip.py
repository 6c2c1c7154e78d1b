"""open_clip: its model and training loop, with accumulation; its losses, and those of this library in their place."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholebatch as wb

from ..._base.third_party import declare_torchvision_operators
from ...integrations import open_clip as ours
from ..problem import Problem

declare_torchvision_operators()
import open_clip  # noqa: E402
from open_clip.loss import ClipLoss, SigLipLoss  # noqa: E402
from open_clip_train.train import train_one_epoch  # noqa: E402

_ROWS, _WORDS, _LENGTH, _PIXELS = 24, 32, 5, 8


class _Data:
    """A rank's batch in parts for accumulation, in the form that open_clip's loop takes."""

    def __init__(self, images: Tensor, texts: Tensor, parts: int) -> None:
        self._parts = [*zip(images.chunk(parts), texts.chunk(parts), strict=True)]
        self.num_batches, self.num_samples = parts, len(images)

    @property
    def dataloader(self) -> _Data:
        """Return the iterable of parts."""
        return self

    def set_epoch(self, _epoch: int) -> None:
        """Do nothing: there is one epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._parts)


def _train_step(loss: nn.Module, steps: int, model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """open_clip's `train_one_epoch` on one batch, with an optimizer that leaves the parameters alone."""
    values: list[float] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        terms = loss(*args, **kwargs)
        values.append(sum(x.item() for x in terms.values()))
        return terms

    args = SimpleNamespace(
        device="cpu",
        precision="fp32",
        distill=False,
        accum_freq=steps,
        skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None,
        log_every_n_steps=1,
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        batch_size=len(batch["images"]) // steps,
        wandb=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = {"train": _Data(batch["images"], batch["texts"], steps)}
    logging.disable(logging.INFO)
    try:
        train_one_epoch(model, data, recorded, 0, optimizer, None, None, None, args)
    finally:
        logging.disable(logging.NOTSET)
    return values[-1]


def _model(*, bias: bool) -> nn.Module:
    return open_clip.CLIP(
        8,
        {"layers": 1, "width": 8, "head_width": 4, "patch_size": 4, "image_size": _PIXELS},
        {"context_length": _LENGTH, "vocab_size": _WORDS, "width": 8, "heads": 2, "layers": 1},
        init_logit_scale=math.log(10.0),
        init_logit_bias=-2.0 if bias else None,
        output_dict=True,
    )


def _problem(
    build: Callable[..., nn.Module], reference: Callable[..., Tensor], steps: int = 1, *, bias: bool = False
) -> Problem:
    loss = build(rank=dist.get_rank(), world_size=dist.get_world_size())
    batch = {
        "images": torch.randn(_ROWS, 3, _PIXELS, _PIXELS),
        "texts": torch.randint(1, _WORDS, (_ROWS, _LENGTH)),
    }

    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return reference(*model(*batch.values()).values())

    step = partial(_train_step, loss, steps)
    return Problem(_model(bias=bias), batch, step=step, reference=reference_loss, engine="ddp")


def _clip(steps: int = 1, loss: type[nn.Module] = ClipLoss, **flags: bool) -> Problem:
    def build(**ranks: int) -> nn.Module:
        loss_fn: nn.Module = loss(**ranks, **flags)
        return ours.InMicroSteps(loss_fn, steps) if steps > 1 and loss is ours.ClipLoss else loss_fn

    return _problem(build, wb.reference.clip_loss, steps)


def _siglip(loss: type[nn.Module] = SigLipLoss, **flags: str) -> Problem:
    return _problem(partial(loss, **flags), wb.reference.siglip_loss, bias=True)


_EXACT: dict[str, Any] = {"local_loss": True, "gather_with_grad": True}
SETTINGS: dict[str, Callable[[], Problem]] = {
    "ClipLoss, default flags": _clip,
    "ClipLoss, --local-loss": partial(_clip, local_loss=True),
    "ClipLoss, --gather-with-grad": partial(_clip, gather_with_grad=True),
    "ClipLoss, --local-loss --gather-with-grad": partial(_clip, **_EXACT),
    "the same, --accum-freq 2": partial(_clip, 2, **_EXACT),
    "the same, --accum-freq 4": partial(_clip, 4, **_EXACT),
    **{f"SigLipLoss, {name}": partial(_siglip, dist_impl=name) for name in ("bidir", "shift", "reduce", "gather")},
    "ClipLoss of wholebatch.integrations": partial(_clip, 1, ours.ClipLoss),
    "ClipLoss of wholebatch.integrations, --accum-freq 4": partial(_clip, 4, ours.ClipLoss),
    "SigLipLoss of wholebatch.integrations": partial(_siglip, ours.SigLipLoss),
}

"""open_clip's losses over the whole batch: its class names, constructors and calls, this library's losses inside.

    loss_fn = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
    losses = loss_fn(image_features, text_features, logit_scale, output_dict=True)

In open_clip, `local_loss`, `gather_with_grad`, `cache_labels`, `dist_impl` and `chunk_size` choose how a loss is
computed, and some choices change its gradient. Here they are accepted and change nothing: every rank returns the loss
of the global batch, and after the averaging of DDP or FSDP every parameter has its exact gradient. A loss finds the
process group by itself. `rank` and `world_size` are compared with it, unless both have their defaults.

This module does not import open_clip.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

import wholebatch as wb

from ...comm import Group
from ...contract import BatchOptions
from .._options import with_options

_DIST_IMPLS = (None, "bidir", "shift", "reduce", "gather")

Losses = Tensor | dict[str, Tensor]
LossPair = tuple[Tensor, Tensor] | dict[str, Tensor]


class _LossOfFeatures(nn.Module):
    """A loss of the features of all ranks, with open_clip's arguments, of which only some are used."""

    def __init__(self, rank: int, world_size: int, use_horovod: bool, group: Group) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError(
                "use_horovod must be False, got True: there is no exchange over Horovod; start the processes with "
                "torchrun and call torch.distributed.init_process_group()"
            )
        self.rank, self.world_size, self.group = rank, world_size, group

    def _check_ranks(self) -> None:
        """Raise ValueError on all ranks if one was given a rank and a world size that are not those of the group."""
        if (self.rank, self.world_size) == (0, 1):
            return
        comm = wb.comm.select_communicator(self.group)
        if (self.rank, self.world_size) != (comm.rank, comm.size):
            comm.handshake(lambda: self._refuse_ranks(comm), caller=f"{type(self).__name__}.forward")

    def _refuse_ranks(self, comm: wb.comm.Communicator) -> NoReturn:
        raise ValueError(
            f"rank and world_size must be those of the process group, {comm.rank} and {comm.size}, got {self.rank} "
            f"and {self.world_size}; leave them out, or call torch.distributed.init_process_group() first"
        )


class ClipLoss(_LossOfFeatures):
    """open_clip's `ClipLoss`, by :class:`wholebatch.CLIPLoss`.

    Features must be normalized, as those of open_clip's models are.

    Args:
        local_loss, gather_with_grad, cache_labels: accepted, and without effect.
        rank, world_size: those of the process group, or left out.
        use_horovod: must be False.
        options: group, exchange, memory, precision, as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: for `use_horovod=True`; in a call, if `rank` and `world_size` are not those of the group.
    """

    @with_options()
    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Unpack[BatchOptions],
    ) -> None:
        super().__init__(rank, world_size, use_horovod, options["group"])
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self._make_losses(options)

    def _make_losses(self, options: BatchOptions) -> None:
        self.contrastive = wb.CLIPLoss(**options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Losses:
        """Return the loss of the global batch, or `{"contrastive_loss": loss}`."""
        self._check_ranks()
        loss = self.contrastive(image_features, text_features, logit_scale, logit_bias=logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(_LossOfFeatures):
    """open_clip's `SigLipLoss`, by :class:`wholebatch.SigLIPLoss`.

    Args:
        cache_labels, dist_impl, chunk_size: accepted, and without effect: no method stores S or its labels.
        rank, world_size: those of the process group, or left out.
        options: group, exchange, memory, precision, as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: for a `dist_impl` that open_clip does not have; in a call, if `rank` and `world_size` are not those
            of the group.
    """

    @with_options()
    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        **options: Unpack[BatchOptions],
    ) -> None:
        super().__init__(rank, world_size, False, options["group"])
        if dist_impl not in _DIST_IMPLS:
            raise ValueError(f"dist_impl must be one of {_DIST_IMPLS}, got {dist_impl!r}; it has no effect here")
        self.cache_labels, self.dist_impl, self.chunk_size = cache_labels, dist_impl, chunk_size
        self.contrastive = wb.SigLIPLoss(**options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        output_dict: bool = False,
    ) -> Losses:
        """Return the loss of the global batch, or `{"contrastive_loss": loss}`."""
        self._check_ranks()
        bias = 0.0 if logit_bias is None else logit_bias
        loss = self.contrastive(image_features, text_features, logit_scale, bias)
        return {"contrastive_loss": loss} if output_dict else loss


class CoCaLoss(ClipLoss):
    """open_clip's `CoCaLoss`: CLIP's loss, and the cross-entropy of captions, a mean over the tokens of all ranks.

    open_clip takes the mean over each rank's tokens. With captions of different lengths, the mean of these means is not
    the loss of one process.

    Args:
        caption_loss_weight, clip_loss_weight: factors of the two losses.
        pad_id: tokens that do not count.
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, options: as in :class:`ClipLoss`.
    """

    @with_options()
    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Unpack[BatchOptions],
    ) -> None:
        theirs = (local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod)
        super().__init__(*theirs, **options)
        self.caption_loss_weight, self.clip_loss_weight, self.pad_id = caption_loss_weight, clip_loss_weight, pad_id

    def forward(  # type: ignore[override]  # open_clip's has other arguments than its base class's, too
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor,
        output_dict: bool = False,
    ) -> LossPair:
        """Return both weighted losses of the global batch: a pair, or a dictionary with names as open_clip's."""
        self._check_ranks()
        clip_loss = torch.zeros((), device=logits.device)
        if self.clip_loss_weight:
            clip_loss = self.clip_loss_weight * self.contrastive(image_features, text_features, logit_scale)
        caption_loss = self.caption_loss_weight * self._mean_over_tokens(logits, labels)
        if output_dict:
            return {"contrastive_loss": clip_loss, "caption_loss": caption_loss}
        return clip_loss, caption_loss

    def _mean_over_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over all ranks' tokens; each rank's gradient is W times its share, for the averaging."""
        of_rank = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.pad_id, reduction="sum")
        tokens = (labels != self.pad_id).sum().to(of_rank)
        total = wb.comm.select_communicator(self.group).all_reduce(torch.stack([of_rank, tokens]))
        return total[0] / total[1]


class DistillClipLoss(ClipLoss):
    """open_clip's `DistillClipLoss`: CLIP's loss, and :class:`wholebatch.DistillationLoss` from a teacher's features.

    Args:
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, options: as in :class:`ClipLoss`.
    """

    def _make_losses(self, options: BatchOptions) -> None:
        super()._make_losses(options)
        self.distillation = wb.DistillationLoss(**options)

    def forward(  # type: ignore[override]  # open_clip's has other arguments than its base class's, too
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor,
        output_dict: bool = False,
    ) -> LossPair:
        """Return both losses of the global batch: a pair, or a dictionary with names as open_clip's."""
        self._check_ranks()
        contrastive_loss = self.contrastive(image_features, text_features, logit_scale)
        distill_loss = self.distillation(
            image_features, text_features, logit_scale, dist_image_features, dist_text_features, dist_logit_scale
        )
        if output_dict:
            return {"contrastive_loss": contrastive_loss, "distill_loss": distill_loss}
        return contrastive_loss, distill_loss

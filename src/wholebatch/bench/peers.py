"""Losses of other libraries, for comparison; those that are not installed are skipped, and the report says so.

A peer is built for the losses that it has, as its documentation tells a user of several ranks to build it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch._peers import declare_torchvision_operators
from wholebatch.comm import Communicator

PairLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # two towers, scale, bias


@dataclass(frozen=True)
class Peer:
    """One loss of one library."""

    package: str  # as pip calls it
    label: str
    build: Callable[[Communicator, float], PairLoss]  # from the ranks and the value of the scale
    on_ranks: bool = True  # whether it is made for several


def _open_clip(comm: Communicator, _scale: float) -> PairLoss:
    declare_torchvision_operators()
    from open_clip.loss import ClipLoss

    loss = ClipLoss(local_loss=comm.size > 1, gather_with_grad=comm.size > 1, rank=comm.rank, world_size=comm.size)
    return lambda x, y, scale, _bias: loss(x, y, scale)


def _open_clip_siglip(comm: Communicator, _scale: float) -> PairLoss:
    declare_torchvision_operators()
    from open_clip.loss import SigLipLoss

    return SigLipLoss(rank=comm.rank, world_size=comm.size)


def _lightly(comm: Communicator, scale: float) -> PairLoss:
    declare_torchvision_operators()
    from lightly.loss import NTXentLoss

    loss = NTXentLoss(temperature=1 / scale, gather_distributed=comm.size > 1)
    return lambda x, y, _scale, _bias: loss(x, y)


def _metric_learning(_comm: Communicator, scale: float) -> PairLoss:
    from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss

    loss = SelfSupervisedLoss(NTXentLoss(temperature=1 / scale))
    return lambda x, y, _scale, _bias: loss(x, y)


def _sentence_transformers(_comm: Communicator, scale: float) -> PairLoss:
    declare_torchvision_operators()
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=scale)
    return lambda x, y, _scale, _bias: loss.compute_loss_from_embeddings([x, y], None)


PEERS: dict[str, tuple[Peer, ...]] = {
    "clip": (Peer("open_clip_torch", "open_clip ClipLoss", _open_clip),),
    "info_nce": (
        Peer(
            "sentence-transformers",
            "sentence-transformers MNRL",
            _sentence_transformers,
            on_ranks=False,
        ),
    ),
    "nt_xent": (
        Peer("lightly", "lightly NTXentLoss", _lightly),
        Peer("pytorch-metric-learning", "pytorch-metric-learning NTXentLoss", _metric_learning, on_ranks=False),
    ),
    "siglip": (Peer("open_clip_torch", "open_clip SigLipLoss", _open_clip_siglip),),
}

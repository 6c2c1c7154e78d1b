"""Losses of other libraries, for comparison; libraries that are not installed are skipped with a message.

Each is built as its documentation shows for several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.comm import Communicator

PairLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # two towers, scale, bias


@dataclass(frozen=True)
class Peer:
    """One loss of one library."""

    package: str  # its name for pip
    label: str
    build: Callable[[Communicator, float], PairLoss]  # from the ranks and the value of the scale
    on_ranks: bool = True  # whether it supports several ranks
    on_cpu: bool = True  # whether it runs without a GPU
    multiple: int = 1  # the embedding size must be a multiple of it


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


def _symmetric_loss(linear: Callable[[Tensor, Tensor, Tensor], Tensor]) -> PairLoss:
    """Return CLIP's loss, built from a linear cross-entropy: one tower's rows are the other's classes."""

    def loss(x: Tensor, y: Tensor, scale: Tensor, _bias: Tensor) -> Tensor:
        local = torch.arange(len(x), device=x.device)
        return (linear((scale * x).to(x.dtype), y, local) + linear((scale * y).to(y.dtype), x, local)) / 2

    return loss


def _torch_linear(_comm: Communicator, _scale: float) -> PairLoss:
    linear = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if linear is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    return _symmetric_loss(linear)


def _cut_cross_entropy(_comm: Communicator, _scale: float) -> PairLoss:
    from cut_cross_entropy import linear_cross_entropy

    # Its filter would leave small probabilities, most of a contrastive loss's, out of the gradient.
    return _symmetric_loss(lambda x, y, local: linear_cross_entropy(x, y, local, filter_eps=None))


def _liger(_comm: Communicator, _scale: float) -> PairLoss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _symmetric_loss(liger_fused_linear_cross_entropy)


def _inf_cl(_comm: Communicator, _scale: float) -> PairLoss:
    from inf_cl import cal_flash_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor, _bias: Tensor) -> Tensor:
        return (cal_flash_loss(x, y, scale=scale).mean() + cal_flash_loss(y, x, scale=scale).mean()) / 2

    return loss


def _memeff(_comm: Communicator, scale: float) -> PairLoss:
    from memeff import MemoryEfficientCLIPLoss

    loss = MemoryEfficientCLIPLoss(temperature=1 / scale, normalized_inputs=True, stable=False)
    return lambda x, y, _scale, _bias: loss(x, y)


PEERS: dict[str, tuple[Peer, ...]] = {
    "clip": (
        Peer("open_clip_torch", "open_clip ClipLoss", _open_clip),
        Peer("torch", "torch linear_cross_entropy, twice", _torch_linear, on_ranks=False),
        Peer("cut-cross-entropy", "cut-cross-entropy exact, twice", _cut_cross_entropy, on_ranks=False, on_cpu=False),
        Peer("liger-kernel", "Liger linear cross-entropy, twice", _liger, on_ranks=False, on_cpu=False),
        Peer("inf-cl", "Inf-CL flash loss, twice", _inf_cl, on_ranks=False, on_cpu=False, multiple=256),
        Peer("memeff", "memeff CLIP loss", _memeff, on_ranks=False, on_cpu=False),
    ),
    "info_nce": (Peer("sentence-transformers", "sentence-transformers MNRL", _sentence_transformers, on_ranks=False),),
    "nt_xent": (
        Peer("lightly", "lightly NTXentLoss", _lightly),
        Peer("pytorch-metric-learning", "pytorch-metric-learning NTXentLoss", _metric_learning, on_ranks=False),
    ),
    "siglip": (Peer("open_clip_torch", "open_clip SigLipLoss", _open_clip_siglip),),
}

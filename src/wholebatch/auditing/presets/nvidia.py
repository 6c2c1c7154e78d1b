"""NeMo Automodel's bi-encoder and Megatron-LM's retriever: their losses, written out from source, since they need GPUs.

NeMo Automodel  a query's positive comes first among its n passages. With `do_distributed_inbatch_negative` each rank
                scores its queries against the passages of all ranks, without gradient for those of other ranks, unless
                `detach_distributed_inbatch_negatives` is False (recipes/retrieval/train_bi_encoder.py, commit 36044ad)
Megatron-LM     each rank computes the loss of all queries and passages, which are gathered without gradient but the
                local ones, and multiplies it by the number of ranks (pretrain_ict.py at commit d920c0d; later ones have
                no such script)

Neither has a learned temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import wholebatch as wb

from ..problem import Problem
from .encoders import IN, ROWS, mlp, problem
from .recipes import Gather, local_put_back, summed

_PASSAGES, _TEMPERATURE = 2, 0.2  # of a query: its positive and one more
_Loss = Callable[[Tensor, Tensor], Tensor]  # of (b, d) and (n b, d)


class _BiEncoder(nn.Module):
    """Encoders of queries and of passages, with features of norm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.passages = mlp(), mlp()

    def forward(self, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (b, IN), (b, n, IN) -> (b, OUT), (b n, OUT)."""
        x, y = self.queries(queries), self.passages(passages).flatten(0, 1)
        return normalize(x, dim=-1), normalize(y, dim=-1)


def _own_passages(queries: Tensor, passages: Tensor) -> Tensor:
    scores = torch.einsum("bd,bnd->bn", queries, passages.unflatten(0, (len(queries), _PASSAGES)))
    return cross_entropy(scores / _TEMPERATURE, torch.zeros(len(queries), dtype=torch.int64))


def _in_batch(gather: Gather, queries: Tensor, passages: Tensor) -> Tensor:
    places = dist.get_rank() * len(queries) + torch.arange(len(queries))
    return cross_entropy(queries @ gather(passages).T / _TEMPERATURE, places * _PASSAGES)


def _global_times_w(queries: Tensor, passages: Tensor) -> Tensor:
    scores = local_put_back(queries) @ local_put_back(passages).T / _TEMPERATURE
    return dist.get_world_size() * cross_entropy(scores, torch.arange(len(scores)) * _PASSAGES)


def _ours(queries: Tensor, passages: Tensor) -> Any:
    positives, others = passages.unflatten(0, (len(queries), _PASSAGES)).unbind(1)
    return wb.InfoNCELoss()(queries, positives, logit_scale=1 / _TEMPERATURE, negatives=others)


def _problem(loss: _Loss, *, in_batch: bool = True, ours: bool = False) -> Problem:
    def reference_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        queries, passages = model(**batch)
        if not in_batch:
            return _own_passages(queries, passages)
        return cross_entropy(queries @ passages.T / _TEMPERATURE, torch.arange(len(queries)) * _PASSAGES)

    batch = {"queries": torch.randn(ROWS, IN), "passages": torch.randn(ROWS, _PASSAGES, IN)}
    return problem(_BiEncoder(), loss, batch, reference=reference_loss, uneven=ours, empty=ours)


SETTINGS: dict[str, Callable[[], Problem]] = {
    "NeMo Automodel, default: the passages of a query alone": partial(_problem, _own_passages, in_batch=False),
    "NeMo Automodel, do_distributed_inbatch_negative": partial(_problem, partial(_in_batch, local_put_back)),
    "the same, detach_distributed_inbatch_negatives=False": partial(_problem, partial(_in_batch, summed)),
    "Megatron-LM, pretrain_ict.py": partial(_problem, _global_times_w),
    "wholebatch.InfoNCELoss in their place": partial(_problem, _ours, ours=True),
}

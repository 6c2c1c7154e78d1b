"""A teacher's scores of each query's own documents: the student learns their softmax, or their differences.

With student scores s_k = q . d_k of a query's documents k, and a teacher's scores t_k:

    listwise      KL = sum_k p_k (log p_k - log softmax(s / T)_k) T^2,    p = softmax(t / T')
                     = T^2 [(logsumexp s/T - sum_k p_k s_k/T) - (logsumexp t/T' - sum_k p_k t_k/T')]
    margin MSE    mean_k (s_+ - s_k - (t_+ - t_k))^2 over the negatives k of a query and its positive +

A query's documents are nobody else's, so nothing but sums is sent, and the mean is over the queries of all ranks.

Source: Lin et al., 2020, arXiv:2010.11386; Hofstaetter et al., 2020, arXiv:2010.02666. The square of the temperature
and the mean over queries are those of sentence-transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.settings import check_divisor
from ..contract import entry
from ..pair_loss import PairLoss
from ..pair_loss.similarity import Similarity
from ..terms import Count, LogSumExp, Mean
from ._module import Recipe


def _check(temperature: float, teacher_temperature: float | None) -> None:
    check_divisor("temperature", temperature)
    if teacher_temperature is not None:
        check_divisor("teacher_temperature", teacher_temperature)


class ListwiseDistillationLoss(Recipe, check=_check):
    """The divergence of the softmax of a student's scores from that of a teacher's, over each query's documents.

    Args:
        temperature: of the student's scores.
        teacher_temperature: of the teacher's; None: the same.
        similarity: "dot" or "cosine".

    >>> import torch, wholebatch as wb
    >>> wb.recipes.ListwiseDistillationLoss()(torch.eye(1), torch.ones(1, 2, 1), torch.tensor([[0.0, 1.0]]))
    tensor(0.1109)
    """

    temperature: float = 1.0
    teacher_temperature: float | None = None
    similarity: Similarity = "dot"

    def _pair_loss(self, **options: Any) -> PairLoss:
        return PairLoss(
            {
                "student": LogSumExp(_student, over="own"),
                "student_mean": Mean(_student, log_weight=_teacher, over="own"),
                "teacher": LogSumExp(_teacher, over="own"),
                "teacher_mean": Mean(_teacher, log_weight=_teacher, over="own"),
                "documents": Count(over="own"),
            },
            _divergence,
            similarity=self.similarity,
            **options,
        )

    @entry
    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        teacher_scores: Tensor,
        *,
        document_offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            queries: (b_r, d).
            documents: (b_r, h, d), of each query; or (n_r, d) with `document_offsets`.
            teacher_scores: (b_r, h), or (n_r,).
            document_offsets: (b_r + 1,) integers: query i has the documents from its offset up to the next. A query
                without documents does not count.
            weights: (b_r,), one for each query, >= 0.
        """
        teacher = self.temperature if self.teacher_temperature is None else self.teacher_temperature
        return self._compute(
            {"queries": queries},
            candidates=documents,
            candidate_data={"teacher": teacher_scores},
            candidate_offsets=document_offsets,
            numbers={"temperature": self.temperature, "teacher_temperature": teacher},
            weights=weights,
        )


def _student(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    score: Tensor = s / p.temperature
    return score


def _teacher(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    score: Tensor = y.teacher / p.teacher_temperature
    return score


def _divergence(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = r.documents > 0
    divergence = (r.student - r.student_mean) - (r.teacher - r.teacher_mean)
    return torch.where(some, divergence, 0.0) * p.temperature**2, some.to(divergence.dtype)


class MarginMSELoss(Recipe):
    """The squared difference of a student's margins from a teacher's, the mean over each query's negatives of all.

    Args:
        similarity: "dot" or "cosine".

    >>> import torch, wholebatch as wb
    >>> query, margins = torch.eye(1), torch.tensor([[0.5]])
    >>> wb.recipes.MarginMSELoss()(query, query, torch.zeros(1, 1, 1), margins)
    tensor(0.2500)
    """

    similarity: Similarity = "dot"

    def _pair_loss(self, **options: Any) -> PairLoss:
        return PairLoss(
            {"error": Mean(_squared_error, over="own"), "negatives": Count(over="own")},
            _error_of_each_negative,
            similarity=self.similarity,
            **options,
        )

    @entry
    def forward(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor,
        teacher_margins: Tensor,
        *,
        negative_offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            queries: (b_r, d).
            positives: (b_r, d).
            negatives: (b_r, h, d), of each query; or (n_r, d) with `negative_offsets`.
            teacher_margins: t_+ - t_k of the teacher, (b_r, h), or (n_r,).
            negative_offsets: (b_r + 1,) integers: query i has the negatives from its offset up to the next.
            weights: (b_r,), one for each query, >= 0; a query weighs its own times the number of its negatives.
        """
        return self._compute(
            {"queries": queries, "positives": positives},
            candidates=negatives,
            candidate_data={"margin": teacher_margins},
            candidate_offsets=negative_offsets,
            weights=weights,
        )


def _squared_error(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    error: Tensor = (x.partner - s - y.margin).square()
    return error


def _error_of_each_negative(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    return r.error, r.negatives

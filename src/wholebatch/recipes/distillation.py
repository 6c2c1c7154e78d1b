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
from ..pair_loss import PairLoss
from ..pair_loss.similarity import Similarity
from ..terms import Count, LogSumExp, Mean


def listwise_distillation(
    *,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    similarity: Similarity = "dot",
    **options: Any,  # of PairLoss
) -> PairLoss:
    """Return the divergence of the softmax of a student's scores from that of a teacher's, over each query's documents.

    Args:
        temperature: of the student's scores.
        teacher_temperature: of the teacher's; None: the same.
        similarity: "dot" or "cosine".
        **options: group, sync, reduction of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (queries, candidates=documents, candidate_data={"teacher": scores}), documents (b, h, d) and scores
        (b, h); or (n, d) and (n,) with `candidate_offsets`. A query without documents does not count.

    Raises:
        ValueError: for a temperature that is not positive.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.recipes.listwise_distillation()
    >>> loss_fn(torch.eye(1), candidates=torch.ones(1, 2, 1), candidate_data={"teacher": torch.tensor([[0.0, 1.0]])})
    tensor(0.1109)
    """
    student = check_divisor("temperature", temperature)
    teacher = teacher_temperature if teacher_temperature is not None else student
    teacher = check_divisor("teacher_temperature", teacher)
    return PairLoss(
        {
            "student": LogSumExp(_student, over="own"),
            "student_mean": Mean(_student, log_weight=_teacher, over="own"),
            "teacher": LogSumExp(_teacher, over="own"),
            "teacher_mean": Mean(_teacher, log_weight=_teacher, over="own"),
            "documents": Count(over="own"),
        },
        _divergence,
        similarity=similarity,
        parameters={"student_temperature": student, "teacher_temperature": teacher},
        **options,
    )


def _student(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    score: Tensor = s / p.student_temperature
    return score


def _teacher(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    score: Tensor = y.teacher / p.teacher_temperature
    return score


def _divergence(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = r.documents > 0
    divergence = (r.student - r.student_mean) - (r.teacher - r.teacher_mean)
    return torch.where(some, divergence, 0.0) * p.student_temperature**2, some.to(divergence.dtype)


def margin_mse(*, similarity: Similarity = "dot", **options: Any) -> PairLoss:  # of PairLoss
    """Return the squared difference of a student's margins from a teacher's, over each query's negatives.

    Args:
        similarity: "dot" or "cosine".
        **options: group, sync, reduction of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (queries, positives, candidates=negatives, candidate_data={"margin": margins}): negatives (b, h, d),
        and margins t_+ - t_k of the teacher, (b, h); or (n, d) and (n,) with `candidate_offsets`. The mean is over all
        negatives.

    >>> import torch, wholebatch as wb
    >>> x, margins = torch.eye(1), torch.tensor([[0.5]])
    >>> wb.recipes.margin_mse()(x, x, candidates=torch.zeros(1, 1, 1), candidate_data={"margin": margins})
    tensor(0.2500)
    """
    return PairLoss(
        {"error": Mean(_squared_error, over="own"), "negatives": Count(over="own")},
        _error_of_each_negative,
        similarity=similarity,
        **options,
    )


def _squared_error(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    error: Tensor = (x.partner - s - y.margin).square()
    return error


def _error_of_each_negative(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    return r.error, r.negatives

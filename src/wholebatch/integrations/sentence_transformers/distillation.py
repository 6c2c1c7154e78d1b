"""A teacher's scores of each query's own documents, by :mod:`wholebatch.recipes`: the mean over the rows of all ranks.

Each row is compared with its own columns alone. With as many rows on each process their losses are exact as well; ours
also are with uneven batches, such as the last one of a data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import wholebatch as wb

from ..._base.precision import accumulation_dtype
from ..._base.settings import check_divisor
from ...contract import prepared
from ...pair_loss.similarity import Similarity
from .embedding import BatchLoss, SimilarityFunction, name_of_similarity, pairwise_dot_score


class _ScoredColumns(BatchLoss, options=("group",)):
    """A loss of queries and their columns, with a teacher's numbers for these as labels."""

    fewest_columns: ClassVar[int] = 3
    _shared: ClassVar[int]  # the columns before those that are compared with each other

    similarity_fct: SimilarityFunction = pairwise_dot_score

    def prepare(self) -> None:
        super().prepare()
        names = ("pairwise_cos_sim", "pairwise_dot_score")
        fix = "; for another function use WholeBatchLoss(model, their loss)"
        self.similarity = name_of_similarity(self.similarity_fct, names, fix)
        self.kind: Similarity = "cosine" if self.similarity == names[0] else "dot"

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the loss of all processes' embeddings, (b, d) for each column, and labels as the class names them."""

        def prepare() -> tuple[Tensor, Tensor]:
            shapes = [tuple(x.shape) for x in embeddings]
            if len(shapes) < self.fewest_columns or len(set(shapes)) > 1 or len(shapes[0]) != 2:
                raise ValueError(
                    f"embeddings must be {self.fewest_columns} or more columns of one shape, (rows, embedding size), "
                    f"got {shapes}"
                )
            own = torch.stack([*embeddings[self._shared :]], 1)
            return own, self._numbers(labels, own)

        own, numbers = prepared(type(self).__name__, self.group, prepare)
        loss: Any = self.loss
        return loss(*embeddings[: self._shared], own, numbers)

    def _numbers(self, labels: object, own: Tensor) -> Tensor:
        """Return a number for each of a query's own columns, (b, n); `own` is (b, n, d)."""
        raise NotImplementedError

    def _labels(self, labels: object, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Tensor:
        """Return labels of one of these shapes, in at least float32, or raise ValueError."""
        if not isinstance(labels, Tensor) or tuple(labels.shape) not in shapes or labels.is_complex():
            got = f"{tuple(labels.shape)}, {labels.dtype}" if isinstance(labels, Tensor) else labels
            raise ValueError(f"labels must be a teacher's numbers of shape {' or '.join(map(str, shapes))}, got {got}")
        return labels.detach().to(like.device, accumulation_dtype(like.dtype))


class DistillKLDivLoss(_ScoredColumns):
    """Their `DistillKLDivLoss`, by :class:`wholebatch.recipes.ListwiseDistillationLoss`.

    Labels are a teacher's scores of all columns but the first, (b, n).

    Args:
        similarity_fct: pairwise_dot_score or pairwise_cos_sim of sentence_transformers.util.
        temperature, student_temperature, teacher_temperature: as theirs.
        group: processes that share the batch. Default: all.
    """

    _shared = 1

    temperature: float = 1.0
    student_temperature: float | None = None
    teacher_temperature: float | None = None

    def prepare(self) -> None:
        super().prepare()
        if self.student_temperature is None:
            self.student_temperature = self.temperature
        if self.teacher_temperature is None:
            self.teacher_temperature = self.temperature
        for name in ("temperature", "student_temperature", "teacher_temperature"):
            check_divisor(name, getattr(self, name))
        self.loss = wb.recipes.ListwiseDistillationLoss(
            temperature=self.student_temperature,
            teacher_temperature=self.teacher_temperature,
            similarity=self.kind,
            group=self.group,
        )

    def _numbers(self, labels: object, own: Tensor) -> Tensor:
        return self._labels(labels, [(own.shape[0], own.shape[1])], own)


class MarginMSELoss(_ScoredColumns):
    """Their `MarginMSELoss`, by :class:`wholebatch.recipes.MarginMSELoss`, of queries, positives and negatives.

    Labels are margins, (b,) or (b, negatives), or scores of all columns but the first.

    Args:
        similarity_fct: pairwise_dot_score or pairwise_cos_sim of sentence_transformers.util.
        group: processes that share the batch. Default: all.
    """

    _shared = 2

    def prepare(self) -> None:
        super().prepare()
        self.loss = wb.recipes.MarginMSELoss(similarity=self.kind, group=self.group)

    def _numbers(self, labels: object, own: Tensor) -> Tensor:
        b, n = own.shape[:2]
        scores = self._labels(labels, [(b, n), (b, n + 1), *([(b,)] if n == 1 else [])], own)
        return scores[:, :1] - scores[:, 1:] if tuple(scores.shape) == (b, n + 1) else scores.reshape(b, n)

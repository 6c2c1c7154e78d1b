"""A teacher's scores of each query's own documents, by :mod:`wholebatch.recipes`: the mean over the rows of all ranks.

Each row is compared with its own columns alone. With as many rows on each process their losses are exact as well; ours
also are with uneven batches, such as the last one of a data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb

from ...comm import Group
from ...contract import prepared
from .arguments import checked_positive
from .citations import MARGIN_MSE, TIGHTLY_COUPLED
from .embedding import BatchLoss
from .theirs import SimilarityFunction, is_cosine_of_pairs, pairwise_dot_score


class _ScoredColumns(BatchLoss):
    """A loss of queries and their columns, with a teacher's numbers for these as labels."""

    fewest_columns = 3
    loss: wb.PairLoss

    def __init__(self, model: Any, similarity_fct: SimilarityFunction, group: Group) -> None:  # their model
        super().__init__()
        self.model, self.similarity_fct, self.group = model, similarity_fct, group
        self.similarity = "cosine" if is_cosine_of_pairs(similarity_fct) else "dot"

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return the loss of embeddings, (b, d) for each column, and a teacher's numbers, of all processes."""
        return self.compare(embeddings, labels)

    def get_config_dict(self) -> dict[str, Any]:  # values of any type
        """Return the arguments, for the model card."""
        return {"similarity_fct": f"pairwise_{'cos_sim' if self.similarity == 'cosine' else 'dot_score'}"}

    def _labels(self, labels: object, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return labels of one of these shapes.

        Raises:
            ValueError: if they have another one.
        """
        if not isinstance(labels, Tensor) or tuple(labels.shape) not in shapes:
            got = tuple(labels.shape) if isinstance(labels, Tensor) else labels
            raise ValueError(f"labels must be a teacher's numbers of shape {' or '.join(map(str, shapes))}, got {got}")
        return labels.detach()


class DistillKLDivLoss(_ScoredColumns):
    """Their `DistillKLDivLoss`, by :func:`wholebatch.recipes.listwise_distillation`.

    Args:
        model: the model that the trainer trains.
        similarity_fct: pairwise_dot_score or pairwise_cos_sim of sentence_transformers.util.
        temperature, student_temperature, teacher_temperature: as theirs.
        group: processes that share the batch. Default: all.

    Raises:
        ValueError: for a temperature that is not positive, and another similarity.
    """

    def __init__(
        self,
        model: Any,  # their model
        similarity_fct: SimilarityFunction = pairwise_dot_score,
        temperature: float = 1.0,
        student_temperature: float | None = None,
        teacher_temperature: float | None = None,
        *,
        group: Group = None,
    ) -> None:
        super().__init__(model, similarity_fct, group)
        self.temperature = checked_positive("temperature", temperature)
        of_student = temperature if student_temperature is None else student_temperature
        of_teacher = temperature if teacher_temperature is None else teacher_temperature
        self.student_temperature = checked_positive("student_temperature", of_student)
        self.teacher_temperature = checked_positive("teacher_temperature", of_teacher)
        self.loss = wb.recipes.listwise_distillation(
            temperature=self.student_temperature,
            teacher_temperature=self.teacher_temperature,
            similarity=self.similarity,
            group=group,
        )

    def compare(self, embeddings: Sequence[Tensor], beside: Any) -> Tensor:  # labels
        """See `compute_loss_from_embeddings`; labels are the teacher's scores of all columns, (b, columns)."""
        queries, *documents = embeddings
        shape = (len(queries), len(documents))
        scores = prepared(type(self).__name__, self.group, lambda: self._labels(beside, [shape]))
        loss: Tensor = self.loss(queries, own=torch.stack(documents, 1), own_data={"teacher": scores.to(queries)})
        return loss

    def get_config_dict(self) -> dict[str, Any]:  # values of any type
        """Return the arguments, for the model card."""
        names = ("temperature", "student_temperature", "teacher_temperature")
        found = super().get_config_dict() | {"temperature": self.temperature}
        return found | {name: of for name in names[1:] if (of := getattr(self, name)) != self.temperature}

    @property
    def citation(self) -> str:
        """A BibTeX entry, for the model card."""
        return TIGHTLY_COUPLED


class MarginMSELoss(_ScoredColumns):
    """Their `MarginMSELoss`, by :func:`wholebatch.recipes.margin_mse`.

    Args:
        model: the model that the trainer trains.
        similarity_fct: pairwise_dot_score or pairwise_cos_sim of sentence_transformers.util.
        group: processes that share the batch. Default: all.

    Raises:
        ValueError: for another similarity.
    """

    def __init__(
        self,
        model: Any,  # their model
        similarity_fct: SimilarityFunction = pairwise_dot_score,
        *,
        group: Group = None,
    ) -> None:
        super().__init__(model, similarity_fct, group)
        self.loss = wb.recipes.margin_mse(similarity=self.similarity, group=group)

    def compare(self, embeddings: Sequence[Tensor], beside: Any) -> Tensor:  # labels
        """See `compute_loss_from_embeddings`; labels are margins, (b,) or (b, negatives), or scores of all columns."""
        queries, positives, *negatives = embeddings
        b, n = len(queries), len(negatives)
        shapes = [(b, n), (b, n + 1), *([(b,)] if n == 1 else [])]
        labels = prepared(type(self).__name__, self.group, lambda: self._labels(beside, shapes))
        margins = labels[:, :1] - labels[:, 1:] if tuple(labels.shape) == (b, n + 1) else labels.reshape(b, n)
        own = torch.stack(negatives, 1)
        loss: Tensor = self.loss(queries, positives, own=own, own_data={"margin": margins.to(queries)})
        return loss

    @property
    def citation(self) -> str:
        """A BibTeX entry, for the model card."""
        return MARGIN_MSE

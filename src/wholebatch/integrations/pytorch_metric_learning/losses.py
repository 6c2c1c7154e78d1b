"""Four of their losses in tiles, with their names, arguments and calls: no matrix of all pairs is stored.

The tiles compute their defaults: cosines, their default reducer, labels. With another distance or reducer, an embedding
regularizer, mined tuples or reference embeddings, the loss is their class on the rows of all processes, exact as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

import wholebatch as wb

from ...contract import BatchOptions
from .._options import with_options
from .._passages import refuse
from .whole_batch import checked_indices, is_theirs, on_device, on_whole_batch, their_class, warn_of_local_labels

__all__ = ["BatchLoss", "CircleLoss", "MultiSimilarityLoss", "NTXentLoss", "SupConLoss"]


class Settings(BatchOptions, total=False):
    """The arguments of all their losses, and the options of this library."""

    distance: Any
    reducer: Any
    embedding_regularizer: Any
    embedding_reg_weight: float
    collect_stats: bool | None


_with_settings = with_options(
    distance=None, reducer=None, embedding_regularizer=None, embedding_reg_weight=1, collect_stats=None
)


class BatchLoss(nn.Module):
    """A loss of the rows of all processes: in tiles where these compute what theirs does, else by their class.

    Args:
        own: the arguments that only this loss has.
        settings: the others, as the package describes them.
    """

    distance: Any  # theirs
    reducer: Any  # theirs
    _in_tiles: str  # the name of the function in wholebatch.functional
    _reducer = "MeanReducer"

    def __init__(self, own: dict[str, Any], settings: Settings) -> None:  # of any type
        super().__init__()
        theirs = Settings.__annotations__.keys() - BatchOptions.__annotations__.keys()
        given: dict[str, Any] = {name: value for name, value in settings.items() if name in theirs}
        if given.pop("collect_stats"):
            raise ValueError(
                "collect_stats must be False, got True: statistics of a matrix of all pairs are not computed; pass "
                f"their {type(self).__name__}(collect_stats=True) to DistributedLossWrapper"
            )
        for name, value in (own | given).items():
            setattr(self, name, value)
        self._own, self._given = tuple(own), tuple(given)
        self.options: Any = {name: value for name, value in settings.items() if name not in theirs}
        self.group = self.options["group"]
        self._called = False

    @property
    def settings(self) -> dict[str, Any]:  # of any type
        """The arguments that only this loss has."""
        return {name: getattr(self, name) for name in self._own}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            embeddings: (b_r, d), this process's rows; b_r may differ between processes and may be 0.
            labels: (b_r,) integers.
            indices_tuple: from :class:`DistributedMinerWrapper`.
            ref_emb: (n_r, d), rows that positives and negatives come from, this process's; None: `embeddings`.
            ref_labels: (n_r,), their labels.

        Raises:
            ValueError: on every process, whichever made the mistake.
        """
        if not self._called:
            warn_of_local_labels(labels, self.group, type(self).__name__)
            self._called = True
        return self.of_batch(embeddings, labels, indices_tuple, ref_emb, ref_labels)

    def of_batch(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch, whatever the labels look like."""
        labels = self._checked_labels(labels, embeddings)
        if indices_tuple is None and ref_emb is None and self._in_tiles_by_arguments():
            if labels is not None and self._in_tiles_by_labels(labels):
                in_tiles = getattr(wb.functional, self._in_tiles)
                found: Tensor = in_tiles(embeddings, labels, **self.settings, **self.options)
                return found
            if labels is None:
                self._refuse_missing_labels()
        rows = {"embeddings": embeddings, "labels": labels, "ref_emb": ref_emb}
        rows["ref_labels"] = on_device(ref_labels, embeddings)
        indices = checked_indices(indices_tuple, self.group, type(self).__name__)
        return on_whole_batch(self.theirs(), self.group, rows, indices)

    def theirs(self) -> nn.Module:
        """Return their loss with the same arguments.

        Raises:
            FrameworkError: if pytorch-metric-learning is missing or too old.
        """
        given = {name: value for name in self._given if (value := getattr(self, name)) is not None}
        found: nn.Module = their_class("losses", type(self).__name__)(**self.settings, **given)
        return found

    def _in_tiles_by_arguments(self) -> bool:
        """Return whether the tiles compute the distance and the reduction that were asked for."""
        cosine = self.distance is None or (
            is_theirs(self.distance, "CosineSimilarity") and (self.distance.p, self.distance.power) == (2, 1)
        )
        mean = self.reducer is None or (
            is_theirs(self.reducer, self._reducer)
            and (getattr(self.reducer, "low", None) or 0) == 0  # their AvgNonZeroReducer takes `high`
            and getattr(self.reducer, "high", None) is None
        )
        return cosine and mean and self.embedding_regularizer is None

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        """Return whether the tiles compute their loss of these labels, the same on all processes. May be collective."""
        return True

    def _refuse_missing_labels(self) -> None:
        refuse(
            "labels must be given, one integer for each row of embeddings, got None; pass labels=",
            type(self).__name__,
            self.group,
        )

    def _checked_labels(self, labels: Tensor | None, embeddings: Tensor) -> Tensor | None:
        if labels is not None and not isinstance(labels, Tensor):
            refuse(
                f"labels must be a tensor of integers, got {type(labels).__name__}; pass torch.tensor(labels)",
                type(self).__name__,
                self.group,
            )
        return on_device(labels, embeddings)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items() if not isinstance(value, Tensor))


class NTXentLoss(BatchLoss):
    """pytorch-metric-learning's `NTXentLoss`, the mean over all positive pairs of the whole batch.

    L_ap = -log( exp S_ap / (exp S_ap + sum_{n in N(a)} exp S_an) ),    S = cosines / temperature

    Where no label occurs more than twice in the batch of all processes, this is
    :func:`wholebatch.functional.sup_con_loss`, in tiles. With more positives of a row their class computes it.

    Args:
        temperature: divides the cosines.
        settings: those of all losses of :mod:`wholebatch.integrations.pytorch_metric_learning`, which describes them;
            group, exchange, memory, precision, as in :func:`wholebatch.functional.sup_con_loss`.

    Raises:
        ValueError: for `collect_stats=True`.
        FrameworkError: in a call that needs their class, if pytorch-metric-learning is missing or too old.
    """

    _in_tiles = "sup_con_loss"

    @_with_settings
    def __init__(self, temperature: Tensor | float = 0.07, **settings: Unpack[Settings]) -> None:
        super().__init__({"temperature": temperature}, settings)

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        comm = wb.comm.select_communicator(self.group)
        caller = f"{type(self).__name__}'s labels"
        facts = comm.handshake(lambda: _checked_labels(labels), caller=caller, must_match=("dtype",))
        everyone = comm.all_gather(labels, counts=[of_rank["rows"] for of_rank in facts], check=False)
        counts = everyone.unique(return_counts=True)[1]
        return not len(counts) or int(counts.max()) <= 2  # pairs of views


class SupConLoss(BatchLoss):
    """pytorch-metric-learning's `SupConLoss`, the mean over the rows of the whole batch that have a positive.

    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    S = cosines / temperature

    In tiles, by :func:`wholebatch.functional.sup_con_loss`. As theirs, it is 0 if all rows have one label.

    Args:
        temperature: divides the cosines.
        settings: those of all losses of :mod:`wholebatch.integrations.pytorch_metric_learning`, which describes them;
            group, exchange, memory, precision, as in :func:`wholebatch.functional.sup_con_loss`.

    Raises:
        ValueError: for `collect_stats=True`.
        FrameworkError: in a call that needs their class, if pytorch-metric-learning is missing or too old.
    """

    _in_tiles = "sup_con_loss"
    _reducer = "AvgNonZeroReducer"

    @_with_settings
    def __init__(self, temperature: Tensor | float = 0.1, **settings: Unpack[Settings]) -> None:
        super().__init__({"temperature": temperature}, settings)

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        comm = wb.comm.select_communicator(self.group)
        facts = comm.handshake(lambda: _checked_labels(labels), caller=f"{type(self).__name__}'s labels")
        ends = {of_rank[name] for of_rank in facts if of_rank["rows"] for name in ("smallest", "largest")}
        return len(ends) > 1  # two labels at least: rows have negatives


class MultiSimilarityLoss(BatchLoss):
    """pytorch-metric-learning's `MultiSimilarityLoss`, the mean over the rows of the whole batch.

    L_i = log(1 + sum_{p in P(i)} exp(-alpha (c_ip - base))) / alpha
        + log(1 + sum_{n in N(i)} exp(  beta (c_in - base))) / beta,    c: cosines

    In tiles, by :func:`wholebatch.functional.multi_similarity_loss`.

    Args:
        alpha, beta, base: of the formula.
        settings: those of all losses of :mod:`wholebatch.integrations.pytorch_metric_learning`, which describes them;
            group, exchange, memory, precision, as in :func:`wholebatch.functional.multi_similarity_loss`.

    Raises:
        ValueError: for `collect_stats=True`.
        FrameworkError: in a call that needs their class, if pytorch-metric-learning is missing or too old.
    """

    _in_tiles = "multi_similarity_loss"

    @_with_settings
    def __init__(self, alpha: float = 2, beta: float = 50, base: float = 0.5, **settings: Unpack[Settings]) -> None:
        super().__init__({"alpha": alpha, "beta": beta, "base": base}, settings)


class CircleLoss(BatchLoss):
    """pytorch-metric-learning's `CircleLoss`, the mean over the rows of the whole batch with both kinds of pairs.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip)),    c: cosines
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m)

    In tiles, by :func:`wholebatch.functional.circle_loss`.

    Args:
        m, gamma: of the formula.
        settings: those of all losses of :mod:`wholebatch.integrations.pytorch_metric_learning`, which describes them;
            group, exchange, memory, precision, as in :func:`wholebatch.functional.circle_loss`.

    Raises:
        ValueError: for `collect_stats=True`.
        FrameworkError: in a call that needs their class, if pytorch-metric-learning is missing or too old.
    """

    _in_tiles = "circle_loss"
    _reducer = "AvgNonZeroReducer"

    @_with_settings
    def __init__(self, m: float = 0.4, gamma: float = 80, **settings: Unpack[Settings]) -> None:
        super().__init__({"m": m, "gamma": gamma}, settings)


def _checked_labels(labels: Tensor) -> dict[str, Any]:
    """Return facts about this process's labels.

    Raises:
        ValueError: for labels that are not one integer for each row.
    """
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers of shape (rows,), got {labels.dtype} of shape {tuple(labels.shape)}")
    ends = torch.aminmax(labels) if len(labels) else (None, None)
    smallest, largest = (None if x is None else int(x) for x in ends)
    return {"rows": len(labels), "dtype": str(labels.dtype), "smallest": smallest, "largest": largest}

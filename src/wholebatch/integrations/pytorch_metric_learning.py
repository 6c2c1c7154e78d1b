"""Losses and wrappers with the names and arguments of pytorch-metric-learning's, over the whole batch.

    from wholebatch.integrations.pytorch_metric_learning import DistributedLossWrapper

    loss_func = DistributedLossWrapper(TripletMarginLoss())

Their losses, distances, reducers, miners and trainers stay. The wrapper makes any of their losses exact on several
processes; each process computes all of it. Four losses are computed in tiles instead, without a matrix of all pairs.
They take, by keyword, distance, reducer, embedding_regularizer and embedding_reg_weight, which are theirs. The tiles
compute their defaults: cosines, their default reducer, labels. With another distance or reducer, an embedding
regularizer, mined tuples or reference embeddings, the loss is their class on the rows of all processes, exact as well;
pytorch-metric-learning is imported in the first call that needs it. `collect_stats` must not be True. group, exchange,
memory and precision are options of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import wholebatch as wb

from .._base.warnings import warn
from ..contract import prepared
from ._framework import METRIC_LEARNING
from ._options import AdaptedLoss

__all__ = [
    "CircleLoss",
    "DistributedLossWrapper",
    "DistributedMinerWrapper",
    "MinedIndices",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SelfSupervisedLoss",
    "SupConLoss",
]

_FEWEST = 4  # rows that make labels 0, 1, 2, ... suspicious


def _their_class(module: str, name: str) -> Any:
    """Return `pytorch_metric_learning.<module>.<name>`, or raise FrameworkError if it is missing or too old."""
    return METRIC_LEARNING.find(f"pytorch_metric_learning.{module}", name)


def _is_theirs(value: object, name: str) -> bool:
    """Return whether a value is an instance of exactly that class of theirs, without an import of it."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "pytorch_metric_learning"


class MinedIndices(tuple[Tensor, ...]):
    """Triplets (a, p, n) or pairs (a1, p, a2, n) of rows of the whole batch, rank 0's first; equal on all processes.

    A tuple of theirs has positions of rows of one process. Both have the same form, so this type tells them apart.
    """


class _OnAllRows(AdaptedLoss):
    """A module that may call a loss of theirs with the rows of all processes."""

    called = False

    def on_all_rows(
        self,
        loss: Callable[..., Any],  # their losses have no types
        embeddings: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        **others: Tensor | None,
    ) -> Tensor:
        """Return a loss of theirs, called with the rows of all processes by name, those without a value left out.

        If "ref_labels" is the object "labels", so it is for the loss.
        """
        others = {name: x if name == "ref_emb" else _move(x, embeddings) for name, x in others.items()}
        rows = {"embeddings": embeddings} | {name: x for name, x in others.items() if x is not None}
        self._check_indices(indices_tuple)
        shared = "labels" in rows and rows.get("ref_labels") is rows["labels"]  # to them a row is then its reference
        if shared:
            del rows["ref_labels"]
        options = {} if indices_tuple is None else {"indices_tuple": indices_tuple}

        def whole_loss(*full: Tensor) -> Tensor:
            named = dict(zip(rows, full, strict=True))
            if shared:
                named["ref_labels"] = named["labels"]
            return loss(**named, **options)

        return wb.WholeBatch(whole_loss, group=self.group)(*rows.values())

    def _check_indices(self, indices_tuple: tuple[Tensor, ...] | None) -> None:
        """Raise ValueError on every process for indices of one process's rows, or that differ."""

        def state() -> dict[str, list[int]]:
            if not isinstance(indices_tuple, MinedIndices):
                raise ValueError(
                    f"indices_tuple must come from DistributedMinerWrapper of {__name__} on several processes, got a "
                    f"{type(indices_tuple).__name__}; wrap the miner: alone it gives positions of one process"
                )
            return {"lengths of indices_tuple": [len(x) for x in indices_tuple]}

        comm = wb.comm.select_communicator(self.group)
        if indices_tuple is not None and comm.size > 1:
            comm.handshake(state, caller=type(self).__name__, must_match=("lengths of indices_tuple",))

    def warn_of_local_labels(self, labels: Tensor | None) -> None:
        """Warn in the first call on a rank but the first if its labels are 0, 1, 2, ..., once or twice.

        Equal labels on two ranks are one class. Their SelfSupervisedLoss makes such labels on each process.
        """
        first, self.called = not self.called, True
        rank = wb.comm.select_communicator(self.group).rank
        if not first or rank == 0 or not isinstance(labels, Tensor) or labels.dim() != 1 or len(labels) < _FEWEST:
            return
        numbers = torch.arange(len(labels), device=labels.device)
        if any(torch.equal(labels, numbers % n) for n in (len(labels), len(labels) // 2)):
            warn(
                f"{type(self).__name__}: the labels of rank {rank} are 0, 1, 2, ..., as if each process counted its "
                "local rows; rows of equal labels are one class on all processes. For views without labels use "
                "SelfSupervisedLoss of wholebatch.integrations.pytorch_metric_learning, not pytorch-metric-learning's"
            )


def _move(labels: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """Return labels on the device of the embeddings, as their losses take them from any device."""
    return labels.to(embeddings.device) if isinstance(labels, Tensor) else labels


class BatchLoss(_OnAllRows, positional=""):
    """A loss of the rows of all processes: in tiles where these compute what theirs does, else by their class.

    The arguments of all their losses, by keyword, are as the module describes them. Those of a subclass come first.
    """

    distance: Any = None  # theirs
    reducer: Any = None  # theirs
    embedding_regularizer: Any = None  # theirs
    embedding_reg_weight: float = 1
    collect_stats: bool | None = None
    _in_tiles: ClassVar[str]  # the name of the function in wholebatch.functional
    _reducer: ClassVar[str] = "MeanReducer"

    def prepare(self) -> None:
        METRIC_LEARNING.check()
        if self.collect_stats:
            raise ValueError(
                "collect_stats must be False, got True: statistics of a matrix of all pairs are not computed; pass "
                f"their {type(self).__name__}(collect_stats=True) to DistributedLossWrapper"
            )

    @property
    def settings(self) -> dict[str, Any]:  # of any type
        """The arguments that only this loss has."""
        return {name: getattr(self, name) for name in self._declared if name not in BatchLoss._declared}

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
        self.warn_of_local_labels(labels)
        in_tiles = indices_tuple is None and ref_emb is None and self._in_tiles_by_arguments()

        def checked_labels() -> Tensor | None:
            if labels is None and in_tiles:
                raise ValueError("labels must be given, one integer for each row of embeddings, got None; pass labels=")
            if labels is not None and not isinstance(labels, Tensor):
                raise ValueError(
                    f"labels must be a tensor of integers, got {type(labels).__name__}; pass torch.tensor(labels)"
                )
            return _move(labels, embeddings)

        moved = prepared(type(self).__name__, self.group, checked_labels)
        if in_tiles and moved is not None and self._in_tiles_by_labels(moved):
            return getattr(wb.functional, self._in_tiles)(embeddings, moved, **self.settings, **self.options)
        rows = {"labels": moved, "ref_emb": ref_emb, "ref_labels": ref_labels}
        return self.on_all_rows(self.theirs(), embeddings, indices_tuple, **rows)

    def theirs(self) -> nn.Module:
        """Return their loss with the same arguments."""
        shared = [name for name in BatchLoss._declared if name != "collect_stats"]
        arguments = {name: value for name in shared if (value := getattr(self, name)) is not None}
        return _their_class("losses", type(self).__name__)(**self.settings, **arguments)

    def _in_tiles_by_arguments(self) -> bool:
        """Return whether the tiles compute the distance and the reduction that were asked for."""
        cosine = self.distance is None or (
            _is_theirs(self.distance, "CosineSimilarity") and (self.distance.p, self.distance.power) == (2, 1)
        )
        mean = self.reducer is None or (
            _is_theirs(self.reducer, self._reducer)
            and (getattr(self.reducer, "low", None) or 0) == 0  # their AvgNonZeroReducer takes `high`
            and getattr(self.reducer, "high", None) is None
        )
        return cosine and mean and self.embedding_regularizer is None

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        """Return whether the tiles compute their loss of these labels, the same on all processes. May be collective."""
        return True

    def _facts(self, labels: Tensor, must_match: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the number, the dtype and the ends of each process's labels; raise ValueError for other labels."""

        def state() -> dict[str, Any]:
            if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
                shape = tuple(labels.shape)
                raise ValueError(f"labels must be integers of shape (rows,), got {labels.dtype} of shape {shape}")
            ends = torch.aminmax(labels) if len(labels) else (None, None)
            smallest, largest = (None if x is None else int(x) for x in ends)
            return {"rows": len(labels), "dtype": str(labels.dtype), "smallest": smallest, "largest": largest}

        comm, caller = wb.comm.select_communicator(self.group), f"{type(self).__name__}'s labels"
        return [*comm.handshake(state, caller=caller, must_match=must_match)]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items() if not isinstance(value, Tensor))


class NTXentLoss(BatchLoss, positional="temperature"):
    """pytorch-metric-learning's `NTXentLoss`, the mean over all positive pairs of the whole batch.

    L_ap = -log( exp S_ap / (exp S_ap + sum_{n in N(a)} exp S_an) ),    S = cosines / temperature

    Where no label occurs more than twice in the batch of all processes, this is
    :func:`wholebatch.functional.sup_con_loss`, in tiles. With more positives of a row their class computes it.
    """

    temperature: Tensor | float = 0.07
    _in_tiles = "sup_con_loss"

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        row_counts = [facts["rows"] for facts in self._facts(labels, ("dtype",))]
        everyone = wb.comm.select_communicator(self.group).all_gather(labels, counts=row_counts, check=False)
        counts = everyone.unique(return_counts=True)[1]
        return not len(counts) or int(counts.max()) <= 2  # pairs of views


class SupConLoss(BatchLoss, positional="temperature"):
    """pytorch-metric-learning's `SupConLoss`, the mean over the rows of the whole batch that have a positive.

    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    S = cosines / temperature

    In tiles, by :func:`wholebatch.functional.sup_con_loss`. As theirs, it is 0 if all rows have one label.
    """

    temperature: Tensor | float = 0.1
    _in_tiles = "sup_con_loss"
    _reducer = "AvgNonZeroReducer"

    def _in_tiles_by_labels(self, labels: Tensor) -> bool:
        everyone = [facts for facts in self._facts(labels) if facts["rows"]]
        ends = {facts[name] for facts in everyone for name in ("smallest", "largest")}
        return len(ends) > 1  # two labels at least: rows have negatives


class MultiSimilarityLoss(BatchLoss, positional="alpha beta base"):
    """pytorch-metric-learning's `MultiSimilarityLoss`, the mean over the rows of the whole batch.

    L_i = log(1 + sum_{p in P(i)} exp(-alpha (c_ip - base))) / alpha
        + log(1 + sum_{n in N(i)} exp(  beta (c_in - base))) / beta,    c: cosines

    In tiles, by :func:`wholebatch.functional.multi_similarity_loss`.
    """

    alpha: float = 2
    beta: float = 50
    base: float = 0.5
    _in_tiles = "multi_similarity_loss"


class CircleLoss(BatchLoss, positional="m gamma"):
    """pytorch-metric-learning's `CircleLoss`, the mean over the rows of the whole batch with both kinds of pairs.

    L_i = log(1 + sum_{n in N(i)} exp f(c_in)  sum_{p in P(i)} exp g(c_ip)),    c: cosines
    f(c) = gamma [c + m]_+ (c - m),    g(c) = -gamma [1 + m - c]_+ (c - 1 + m)

    In tiles, by :func:`wholebatch.functional.circle_loss`.
    """

    m: float = 0.4
    gamma: float = 80
    _in_tiles = "circle_loss"
    _reducer = "AvgNonZeroReducer"


class DistributedMinerWrapper(AdaptedLoss, options=("group",)):
    """pytorch-metric-learning's `DistributedMinerWrapper`: a miner on the rows of all processes.

    Rank 0 runs the miner, and all processes get its tuples. Pass them to a loss of this module.

    Args:
        miner: one of their tuple miners.
        efficient: accepted, and without effect.
        group: processes that share the batch. Default: all.
    """

    miner: nn.Module
    efficient: bool = False

    def prepare(self) -> None:
        if not isinstance(self.miner, _their_class("miners", "BaseMiner")):
            raise TypeError(f"miner must be a miner of pytorch-metric-learning, got {type(self.miner).__name__}")

    @torch.no_grad()
    def forward(
        self, emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> MinedIndices:
        """Return the tuples of the whole batch, for this process's rows; raise ValueError everywhere if the miner does.

        Shapes: emb (b_r, d), labels (b_r,), ref_emb (n_r, d), ref_labels (n_r,); b_r may differ between processes.
        """
        comm = wb.comm.select_communicator(self.group)
        local = [emb, _move(labels, emb), ref_emb, _move(ref_labels, emb)]
        tensors = [None if x is None else comm.gather(x, check=True) for x in local]
        if local[3] is local[1]:
            tensors[3] = tensors[1]  # to their miners a row is then its reference
        mined: list[Tensor] = []

        def state() -> dict[str, Any]:
            if comm.rank == 0:
                mined.extend(x.long() for x in self.miner(*tensors))
            return {"lengths": [len(x) for x in mined]}

        lengths = comm.handshake(state, caller="DistributedMinerWrapper")[0]["lengths"]
        flat = torch.cat(mined) if mined else emb.new_empty(sum(lengths), dtype=torch.int64)
        return MinedIndices(comm.broadcast(flat, check=False).split(lengths))


class DistributedLossWrapper(_OnAllRows, options=("group",)):
    """pytorch-metric-learning's `DistributedLossWrapper`: one of their losses, on the rows of all processes.

    L = loss(embeddings of all ranks, labels of all ranks, ...)

    All processes return this L. After the averaging of DDP every parameter has its gradient: the model's, and those
    of the loss itself (proxies, centers), which all processes hold in full.

    Args:
        loss: one of their losses, a CrossBatchMemory, a MultipleLosses, or a loss of this module, which is called as it
            is.
        efficient: accepted, and without effect: theirs changes the gradient.
        group: processes that share the batch. Default: all.
    """

    loss: nn.Module
    efficient: bool = False

    def prepare(self) -> None:
        loss = self.loss
        if not isinstance(loss, BatchLoss):
            kinds = ("BaseMetricLossFunction", "CrossBatchMemory", "MultipleLosses")
            if not isinstance(loss, tuple(_their_class("losses", name) for name in kinds)):
                name = type(loss).__name__
                hint = "leave the wrapper out" if "Wrapper" in name else "for another loss use wholebatch.WholeBatch"
                if name == "SelfSupervisedLoss":
                    hint = f"use SelfSupervisedLoss of {__name__}, which needs no wrapper"
                raise TypeError(f"loss must be one of pytorch-metric-learning's losses, got {name}; {hint}")

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch, for this process's rows, as in :meth:`NTXentLoss.forward`.

        `labels` may be None if the loss takes none; `enqueue_mask`, (b_r,) booleans, is for a CrossBatchMemory. If the
        loss raises on any process, ValueError is raised on all.
        """
        if isinstance(self.loss, BatchLoss):
            return self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.warn_of_local_labels(labels)
        rows = {"labels": labels, "ref_emb": ref_emb, "ref_labels": ref_labels, "enqueue_mask": enqueue_mask}
        return self.on_all_rows(self.loss, embeddings, indices_tuple, **rows)


class SelfSupervisedLoss(_OnAllRows, options=("group",)):
    """pytorch-metric-learning's `SelfSupervisedLoss`: a loss of two views of each example, on the whole batch.

    Their module numbers the examples of each process from 0, so that examples of two processes look like one class.
    Here all examples of the batch have numbers of their own.

    Args:
        loss: a loss of this module, or one of theirs that their SelfSupervisedLoss takes; also in a
            :class:`DistributedLossWrapper`, which is not needed.
        symmetric: whether rows of both views are anchors, each against the other rows of both; else rows of the first
            view are compared with those of the second.
        group: processes that share the batch; None: those of the loss, and None beside a loss of this module.
    """

    loss: nn.Module
    symmetric: bool = True

    def prepare(self) -> None:
        if isinstance(self.loss, DistributedLossWrapper):
            self.group, self.loss = self.loss.group if self.group is None else self.group, self.loss.loss
        if not isinstance(self.loss, BatchLoss):
            _their_class("losses", "SelfSupervisedLoss")(self.loss, self.symmetric)  # checks the kind of loss
        elif self.group not in (None, self.loss.group):
            raise ValueError("group must be None with a loss of this module, which has a group; leave it out here")
        else:
            self.group = self.loss.group

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the loss of all rows; row i of `ref_emb`, (b_r, d), is another view of row i of `embeddings`."""
        comm = wb.comm.select_communicator(self.group)

        def state() -> dict[str, int]:
            if len(embeddings) != len(ref_emb):
                raise ValueError(
                    f"ref_emb must have a row for each of the {len(embeddings)} rows of embeddings, got {len(ref_emb)}"
                )
            return {"rows": len(embeddings)}

        counts = [facts["rows"] for facts in comm.handshake(state, caller="SelfSupervisedLoss")]
        if isinstance(self.loss, BatchLoss) and self.symmetric:
            first = sum(counts[: comm.rank])
            numbers = torch.arange(first, first + len(embeddings), device=embeddings.device).repeat(2)
            self.loss.called = True  # these labels are those of the whole batch
            return self.loss(torch.cat([embeddings, ref_emb]), numbers)
        loss = self.loss.theirs() if isinstance(self.loss, BatchLoss) else self.loss
        theirs = _their_class("losses", "SelfSupervisedLoss")(loss, self.symmetric)
        return self.on_all_rows(theirs, embeddings, ref_emb=ref_emb)

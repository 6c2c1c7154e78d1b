"""Labeled examples, each against all others: those of the same class are positives, the others negatives.

    Z = rows of all ranks,    S = scale Z Z^T without its diagonal

S is symmetric: the tiles above its diagonal suffice, and the work is half of a full sweep's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_ignore_index, is_dense
from .._base.normalize import UNIT
from ..contract import LEFT_OUT, Checks, Facts, Inputs, Options, agree, prepared, reduce_losses
from ..nodes import Bounds, Layout, Operands, RowStatistics, Towers, row_statistics
from ..nodes.cross_entropy import how_many_equal
from ..pair_loss.builtin_terms import Tower, reductions
from ..pair_loss.reductions import Term
from ..partition import Diagonal
from ..sweep import Diagonals, EqualIds, Over, Pairs, Selection

LISTED = "entries with equal labels are listed for each tile"  # why a loss reads values in each call


def agree_labeled(
    caller: str,
    options: Options,
    rows: tuple[Tensor, Tensor, Tensor | None, int | None],
    checks: Checks,
    *,
    scalars: Mapping[str, Tensor | float] = MappingProxyType({}),
) -> Labeled:
    """Return the labeled rows of a call that is valid on all ranks. Collective: a handshake.

    Args:
        caller: the loss, for messages.
        options: the options of the call.
        rows: features, labels, and weights or None: (b, d) and (b,), or (b, v, d) and (b,) for v views of each example;
            and a label whose rows are left out, or None.
        checks: the further checks of the loss.
        scalars: the scalars of the loss, which must be positive.
    """
    features, labels, weights, ignored = rows

    def kept_rows() -> Tensor | None:
        """Return which rows stay; None if all do, or if the checks below refuse a tensor."""
        if ignored is None:
            return None
        check_ignore_index(ignored)
        tensors = [x for x in (features, labels, weights) if x is not None]
        if not all(map(is_dense, tensors)) or any(x.shape[:1] != labels.shape for x in tensors):
            return None
        return labels.to(torch.int64) != ignored  # torch takes -1 for 255 in uint8

    kept = prepared(caller, options.group, kept_rows)
    if kept is not None:
        features, labels = features[kept.to(features.device)], labels[kept]
        weights = None if weights is None else weights[kept.to(weights.device)]
    with_views = is_dense(features) and features.dim() == 3
    shape = features.shape[:-1] if with_views else None

    def check_views() -> Mapping[str, Any]:
        if shape is not None:
            examples, views = tuple(shape[:1]), tuple(shape)
            for name, x, allowed in (("labels", labels, (examples,)), ("weights", weights, (examples, views))):
                if is_dense(x) and tuple(x.shape) not in allowed:
                    raise ValueError(
                        f"{name} must have shape {' or '.join(map(str, allowed))} for features of shape "
                        f"{tuple(features.shape)}, (examples, views, embedding size); got {tuple(x.shape)}"
                    )
        left_out = 0 if kept is None else int((~kept).sum())
        return {**checks.check(), "ignore_index": ignored, LEFT_OUT: left_out}

    flat = (features, labels, weights)
    if shape is not None:
        flat = (features.flatten(0, 1), _flatten_views(labels, shape), _flatten_views(weights, shape))
    facts = agree(
        caller,
        options,
        Inputs(
            features={"features": flat[0]},
            scalars=scalars,
            ids={"labels": (flat[1], "features")},
            labels="labels",
            weights=(flat[2], "features"),
            required=("labels",),
            normalized=True,
            positive=tuple(scalars),
        ),
        replace(
            checks,
            check=check_views,
            must_match=(*checks.must_match, "ignore_index"),
            settings=None
            if checks.settings is None or ignored is not None
            else (*checks.settings, shape, *(x.shape if is_dense(x) else None for x in (labels, weights))),
        ),
    )
    return Labeled(facts, shape, kept)


def same_class(x: Any, y: Any) -> Tensor:  # fields
    """Return the mask of positives: other rows with the same label."""
    mask: Tensor = (x.label == y.label) & (x.index != y.index)
    return mask


def _flatten_views(x: Any, shape: Sequence[int]) -> Any:
    """Return (b,) or (b, v) as (b v,), and other shapes as they are: the check refuses them."""
    if not is_dense(x) or x.dim() not in (1, 2):
        return x
    return x.repeat_interleave(shape[1]) if x.dim() == 1 else x.flatten()


class Labeled:
    """The labeled rows of one call, and their positive pairs. Labels of all ranks, if needed: 1 all-gather."""

    def __init__(self, facts: Facts, views: torch.Size | None = None, kept: Tensor | None = None) -> None:
        self.facts, self.rows, self._views = facts, facts.rows["features"], views
        self._kept = kept
        self.local_labels = facts.vectors["labels"][0].to(facts.device, torch.int64)

    @cached_property
    def labels(self) -> Tensor:
        """The labels of all ranks' rows, (B,). Collective."""
        return self.facts.all_ids("labels")

    @property
    def pairs(self) -> Pairs:
        """The positives, and the rows themselves, which are left out. Collective."""
        local = self.rows.rows(self.facts.rank)
        itself = Diagonals(Diagonal(0, local.start, local.stop - local.start))
        return Pairs(EqualIds(self.local_labels, self.labels, but=itself), itself)

    def widened(self) -> Labeled:
        """Return these rows for several uses of features with gradients that are rounded once: `Facts.widened`."""
        self.facts = self.facts.widened()
        return self

    def reduce(self, losses: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the loss: a scalar, or with reduction "none" the losses in the shape of the rows, (b,) or (b, v)."""
        loss = reduce_losses(self.facts, losses, count, counted)
        loss = loss if self._views is None or not loss.dim() else loss.view(self._views)
        if self._kept is None or not loss.dim():
            return loss
        return loss.new_zeros(len(self._kept), *loss.shape[1:]).index_put((self._kept,), loss)  # 0 for rows left out

    @cached_property
    def _same_label_counts(self) -> Tensor:
        """The number of rows of all ranks with the label of each row of all ranks, (B,)."""
        return how_many_equal(self.labels, self.labels)

    @cached_property
    def positives(self) -> Tensor:
        """The number of positives of each of this rank's rows, (b,)."""
        return self._same_label_counts[self.rows.rows(self.facts.rank)] - 1

    @property
    def negatives(self) -> Tensor:
        """The number of negatives of each of this rank's rows, (b,)."""
        return self.rows.total - 1 - self.positives

    @property
    def anchors(self) -> Tensor:
        """The number of rows of all ranks that have a positive, shape ()."""
        return (self._same_label_counts > 1).sum()

    @property
    def anchors_with_negatives(self) -> Tensor:
        """The number of rows of all ranks that have a positive and a negative, shape ()."""
        same = self._same_label_counts
        return ((same > 1) & (same < self.rows.total)).sum()

    def statistics(self, scale: tuple[float, Any], over: Over, fields: tuple[str, ...]) -> RowStatistics:
        """Return the statistics of this rank's normalized rows."""
        side, _ = row_statistics(
            self.facts,
            scale,
            Operands(
                [self.facts.inputs["features"]],
                Towers(stays=(0,), normalize=True),
                Layout(self.rows, self.rows, symmetric=True),
            ),
            Selection(self.pairs, over),
            Bounds(UNIT**2),
            rows=fields,
        )
        assert side is not None
        return side

    def reductions(
        self,
        name: str,
        terms: Mapping[str, Term],
        parameters: Mapping[str, float],
        data: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Return terms of this rank's rows, which read cosines, `label` and further data: (b,) each, by name.

        Args:
            name: under which calls of one form keep what is found of the terms.
            terms: by name.
            parameters: numbers by name.
            data: numbers of rows by name, (b,) each.
        """
        tower = Tower(self.facts.inputs["features"], None, {"label": self.local_labels, **data})
        towers = {"features": tower}
        return reductions(self.facts, "cosine", terms, towers, parameters, towers, name)["features"]

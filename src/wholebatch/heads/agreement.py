"""Validate the batch and the centers of its classes across ranks, before a softmax over classes.

One handshake validates both. If the classes are a sample that depends on the labels of all ranks, the centers are known
only after the first handshake, and a second one validates them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._base.checks import (
    check_alike,
    check_count,
    check_dense,
    check_ids,
    has_feature_dtype,
    is_dense,
    on_host,
)
from ..comm import Group
from ..comm.handshake import different_facts
from ..contract import Checks, Facts, Inputs, Options, agree, form_of_tensor, norm_of
from ..partition import Partition
from .classes import PART, check_ascending, check_parts, label_numbers, out_of_order, part_checksum
from .logits import (
    SETTINGS,
    Logits,
    check_different,
    check_directions,
    check_labels,
    check_several,
    ends_of,
    flat,
    repeated,
)
from .margins.interface import TransformsNegatives
from .rows import norms_of, rows_of_each
from .sample import Classes, Sample, check_offset_values

_LABELS_EACH = "labels of an example"
_DRAWN = "sample_rate, unbiased, seed and training"
_STEP = "step"
_LONGEST_ROW = norm_of("embeddings")
_OF_CENTERS = (
    "whether there are class_ids",
    "whether the centers need a gradient",
    "sub-centers of a class",
    "whether there is a bias",
)


@dataclass(frozen=True)
class Batch:
    """The local rows: embeddings (b_r, d), labels (b_r,) or (b_r, k), and weights (b_r,) or None."""

    embeddings: Tensor
    labels: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Agreed:
    """The result of the handshakes."""

    facts: Facts  # of the call; its features are "embeddings"
    labels: Tensor  # of all ranks, (B, k)
    sample: Sample
    partition: Partition  # the number of classes of each rank
    index: Tensor | None  # (K_r K,), the rows of the matrix of `sample.centers` that are the local centers; None: all
    lengths: Tensor  # the norms of the local embeddings, (b_r, 1)
    norms: Tensor  # of the local centers, (K_r K, 1)
    longest: float  # the largest norm of a center on any rank
    largest_offset: float  # upper bound of the absolute values of the local offsets
    needs_grad: bool  # whether a backward pass may follow: some rank's embeddings, centers or offsets need a gradient


def agree_on_classes(caller: str, batch: Batch, classes: Classes, logits: Logits, options: Options) -> Agreed:
    """Return the facts on which the ranks agree. Collective: 1 handshake, 2 for a sample; 1 all-gather of labels."""
    embeddings, labels = batch.embeddings, batch.labels
    if has_feature_dtype(embeddings):
        embeddings = embeddings.to(classes.dtype)
    centers = None if classes.needs_labels else _Centers(classes, logits, None, options.group)
    lengths = torch.empty(0)  # of the embeddings; `read_back` computes them
    several = is_dense(labels) and labels.dim() == 2 and labels.shape[1] > 0

    def check() -> dict[str, Any]:
        batch_facts = _check_batch(labels, logits, classes.num_classes)
        drawn = {_DRAWN: [*classes.settings]}
        return {**batch_facts, **drawn, **(centers.check(embeddings) if centers is not None else {})}

    def read_back() -> dict[str, Tensor | float]:
        nonlocal lengths
        label_values = label_numbers(labels, logits.ignore_index)
        if labels.dim() == 2:
            label_values["repeated"] = repeated(labels, logits.ignore_index)
        lengths = norms_of(embeddings, in_kernels=checks.in_kernels and logits.unit_embeddings)
        row_ends = dict(zip(("shortest", _LONGEST_ROW), ends_of(lengths), strict=True))
        center_values = {} if centers is None else centers.read_back(in_kernels=checks.in_kernels)
        return {**label_values, _STEP: classes.step, **row_ends, **center_values}

    def derive(values: Mapping[str, float]) -> dict[str, Any]:
        check_different(values.get("repeated", 0.0))
        check_directions("embeddings", embeddings, values["shortest"], values[_LONGEST_ROW])
        center_facts = {} if centers is None else centers.check_values(values)
        ends = int(values["smallest"]), int(values["largest"])
        counted = int(values["that count"])
        label_facts = {"labels": ends if counted else None, IGNORED: int(values["labels"]) - counted}
        return {**label_facts, _STEP: int(values[_STEP]), **center_facts}

    checks = Checks(
        check,
        read_back,
        derive,
        must_match=(*SETTINGS, "num_classes", _LABELS_EACH, _DRAWN, *(() if centers is None else _OF_CENTERS)),
        settings=_settings(labels, classes, logits),
        reads="the smallest and the largest label, and the norms of the centers, are",
    )
    facts = agree(
        caller,
        options,
        Inputs(
            features={"embeddings": embeddings},
            ids={"labels": (labels[:, 0] if several else labels, "embeddings")},
            weights=(batch.weights, "embeddings"),
            required=("labels",),
            measured=("embeddings",),
        ),
        checks,
    )
    if (mistake := different_facts(caller, facts.by_rank, (_STEP,))) is not None:
        raise mistake
    if classes.num_classes is not None:
        check_labels(facts, classes.num_classes)
    columns = labels.to(facts.device, torch.int64).reshape(len(labels), labels.shape[1] if several else 1)
    all_labels = facts.all_gather(columns, facts.rows["embeddings"])
    by_rank = facts.by_rank
    if centers is None:
        centers = drawn = _Centers(classes, logits, all_labels, options.group)
        by_rank = facts.comm.handshake(
            lambda: drawn.facts(facts.inputs["embeddings"].to(facts.given_dtype), in_kernels=checks.in_kernels),
            caller=caller,
            must_match=_OF_CENTERS,
        )
    check_parts(caller, by_rank)
    partition = Partition(tuple(rank_facts[_COUNT] for rank_facts in by_rank))
    if centers.sample.ids is None:
        _check_total(facts, partition, classes.num_classes)
    longest = max(rank_facts[_LONGEST] for rank_facts in by_rank)
    needs_grad = facts.differentiable or (torch.is_grad_enabled() and any(by_rank.column(_NEEDS_GRAD)))
    return Agreed(
        facts, all_labels, centers.sample, partition, centers.index, lengths, centers.norms, longest,
        centers.largest_offset, needs_grad,
    )  # fmt: skip


IGNORED = "ignored labels"  # the fact with their number on a rank
_COUNT = "centers"  # the fact with the number of classes of a rank
_NEEDS_GRAD = "whether centers or offsets need a gradient"
_LONGEST = "largest norm of centers"  # the fact with that number of a rank


class _Centers:
    """The checks of the local centers, for the first three steps of a handshake (see `contract.agree`)."""

    norms: Tensor
    largest_offset: float

    def __init__(self, classes: Classes, logits: Logits, labels: Tensor | None, group: Group) -> None:
        self._classes, self._logits, self._labels, self._group = classes, logits, labels, group

    @cached_property
    def sample(self) -> Sample:
        """The local part of the classes."""
        return self._classes.sample(self._labels)

    @cached_property
    def _flat(self) -> tuple[Tensor, int]:
        return flat(self.sample.centers)

    @cached_property
    def index(self) -> Tensor | None:
        """The rows of the matrix of centers that are the sample; None: all."""
        return None if self.sample.rows is None else rows_of_each(self.sample.rows, self._flat[1])

    def facts(self, embeddings: Tensor, *, in_kernels: bool) -> dict[str, Any]:
        """Return the facts about the centers, for a handshake that concerns nothing else."""
        return {**self.check(embeddings), **self.check_values(on_host(self.read_back(in_kernels=in_kernels)))}

    def check(self, embeddings: Tensor) -> dict[str, Any]:
        """Check shapes and dtypes of the sample, and return the facts about it."""
        sample, (matrix, best_of) = self.sample, self._flat
        self._logits.check_sub_centers(best_of)
        check_alike("embeddings", embeddings, "centers", matrix, rows=False)
        if sample.ids is not None:
            check_ids("class_ids", sample.ids, "centers", sample.count)
        _check_offset_shapes(sample)
        each = (sample.ids is not None, sample.centers.requires_grad, best_of, sample.bias is not None)
        learned = any(x is not None and x.requires_grad for x in (sample.centers, sample.bias, sample.log_weights))
        return {_COUNT: sample.count, _NEEDS_GRAD: learned, **dict(zip(_OF_CENTERS, each, strict=True))}

    def read_back(self, *, in_kernels: bool) -> dict[str, Tensor | float]:
        """Return the numbers, still on the device, that `check_values` needs."""
        sample = self.sample
        # Norms by which nothing is divided bound logits: their bits must not depend on who computes them.
        self.norms = norms_of(self._flat[0], self.index, in_kernels=in_kernels and self._logits.unit_centers)
        numbers: dict[str, Tensor | float] = {PART: part_checksum(sample.centers, self._group)}
        numbers |= dict(zip(("shortest center", "longest center"), ends_of(self.norms), strict=True))
        numbers |= sample.largest_offsets()
        if sample.ids is not None:
            numbers["out of order"] = out_of_order(sample.ids)
        return numbers

    def check_values(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Check the numbers of `read_back`, now on the host, and return the facts about them."""
        sample = self.sample
        check_directions("centers", self._flat[0], values["shortest center"], values["longest center"])
        check_ascending(values.get("out of order", 0.0))
        self.largest_offset = check_offset_values(sample, values, smoothed=self._logits.label_smoothing > 0)
        return {_LONGEST: values["longest center"], PART: values[PART]}


def _settings(labels: Tensor, classes: Classes, logits: Logits) -> tuple[Hashable, ...] | None:
    """Return all that checks depend on beside the form of the embeddings; None: it cannot be compared."""
    try:
        logit_settings = logits.form()
    except Exception:  # of a margin; raised again, on all ranks, by the checks
        return None
    tensors = labels, *(() if classes.needs_labels else classes.tensors)  # a sample has checks of its own
    return *logit_settings, classes.num_classes, *classes.settings, *map(form_of_tensor, tensors)


def _check_batch(labels: Tensor, logits: Logits, num_classes: int | None) -> dict[str, Any]:
    logits.check()
    if num_classes is not None:
        check_count("num_classes", num_classes, "classes of all ranks")
    several = check_several(labels, num_classes)
    if several > 1 and (logits.label_smoothing or isinstance(logits.margin, TransformsNegatives)):
        cause = "label_smoothing" if logits.label_smoothing else type(logits.margin).__name__
        raise ValueError(f"labels must be one for each example with {cause}, got {several}; pass shape (rows,)")
    return {**logits.facts(), "num_classes": num_classes, _LABELS_EACH: several}


def _check_offset_shapes(sample: Sample) -> None:
    """Raise ValueError unless bias and log_weights fit the centers, and autograd can use all three."""
    offsets = {"log_weights": sample.log_weights, "bias": sample.bias}
    for name, x in offsets.items():
        if isinstance(x, Tensor):
            check_dense(name, x)
        if x is not None and (not isinstance(x, Tensor) or x.shape != (sample.count,)):
            raise ValueError(
                f"{name} must have shape ({sample.count},), one for each of the classes, got "
                f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
            )
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {x.dtype}")
    for name, x in {**offsets, "class_ids": sample.ids}.items():
        if x is not None and x.device != sample.centers.device:
            raise ValueError(f"{name} must be on the centers' device, {sample.centers.device}, got {x.device}")
    tensors = (sample.centers, *offsets.values())
    if torch.is_grad_enabled() and any(x is not None and x.is_inference() for x in tensors):
        raise ValueError(
            "centers, bias and log_weights must not be made under torch.inference_mode() where gradients are "
            "enabled; pass x.clone()"
        )


def _check_total(facts: Facts, partition: Partition, num_classes: int | None) -> None:
    """Raise ValueError unless the centers of all ranks are all classes, and the labels are ids of these."""
    if num_classes is None:
        check_labels(facts, partition.total)
    elif partition.total != num_classes:
        raise ValueError(
            f"{facts.caller}: the centers of all ranks must number num_classes={num_classes}, got {partition.total}, "
            f"by rank {partition.counts}"
        )

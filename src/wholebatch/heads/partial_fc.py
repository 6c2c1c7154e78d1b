"""PartialFC: a classifier whose classes are spread over the ranks, and of which a step may take a sample.

    rank r has the classes [offset_r, offset_r + C_r) of C, the remainder going to the first ranks
    a step's classes: those of its labels, and each other one with probability `sample_rate`

Which others is a function of seed, step and class (see `sampling`): the same for any number of ranks. So are the
centers at the start. The gradient of a sample is sparse: `SparseSGD` and `SparseAdamW` touch its rows, and no others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import (
    allocated,
    check_count,
    check_flag,
    check_floating_dtype,
    check_fraction,
    check_integer,
    checked_device,
)
from .._precision import accumulation_dtype
from .._sharded import mark_sharded
from ..comm import Group, select_communicator
from ..contract import Options, Reduction, bind_on_all_ranks, entry
from ..kernels import Kernel
from ..partition import Partition
from ..sweep import Memory
from ..sync import Sync
from .class_softmax import class_softmax
from .classes import NOT_HERE, rows_within
from .entry import Batch
from .logits import OF_HEAD, Logits, Normalize
from .margins import ArcFace, Margin
from .rows import overlap, take_rows
from .sample import Classes, Sample
from .sampling import bernoulli, mix
from .top_classes import TopClasses, top_classes

_BLOCK = 1024  # classes whose centers are drawn together


class PartialFC(nn.Module):
    r"""Softmax over millions of classes with a margin, their centers spread over the ranks, the logits never stored.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    `weight`, (C_r, d), holds this rank's centers. The module must not be wrapped by an engine (DDP, FSDP): its gradient
    is this rank's own, and already dL/dW. It is made on every rank, after `init_process_group`. With samples it does
    not go under activation checkpointing, where the second forward pass would draw another one.

    Two habits of training frameworks are wrong here. Clipping by `torch.nn.utils.clip_grad_norm_` (Lightning's
    `gradient_clip_val`, the Trainer's `max_grad_norm`) scales each rank by another norm, and backbones drift apart
    without a message: use :func:`wholebatch.heads.clip_grad_norm_`. A `state_dict()` saved by rank 0 alone has rank 0's
    classes alone: use :func:`wholebatch.heads.save_head`. Loaded elsewhere, such a state_dict is refused, when it is
    loaded or at the next use.

    Args:
        embedding_size: d.
        num_classes: C, on all ranks together; at least one for each rank.
        margin: phi and s.
        sub_centers: K of each class, of which the one nearest to an embedding counts: for noisy labels. `weight` is
            then (C_r, K, d).
        bias: whether there is one, (C_r,), 0 at the start.
        margin_grad, normalize: as in :func:`wholebatch.functional.partial_fc_loss`.
        sample_rate: of the classes without a label in the batch, the probability with which each is in a step of
            training; 1: all. In evaluation all are there. With samples the gradient of `weight` is a sparse tensor,
            for `SparseSGD` or `SparseAdamW`.
        unbiased: sampled negatives weigh 1 / sample_rate, so that their sum is that of all classes on average.
        exclude_above, label_smoothing, ignore_index, reduction, group, sync, memory, kernel: as there.
        seed: of the centers at the start and of all samples; the same on all ranks.
        device, dtype: of the centers.

    Raises:
        ValueError: if an argument is not what it should be.

    Source: An et al., 2022, arXiv:2203.15565.

    >>> import torch, wholebatch as wb
    >>> head = wb.PartialFC(8, 1000, margin=wb.CosFace(16.0, 0.2), sample_rate=0.1)
    >>> head(torch.randn(4, 8), torch.tensor([3, 999, 0, 3])).backward()
    >>> head.weight.grad.layout, 50 < head.weight.grad._nnz() < 150
    (torch.sparse_coo, True)
    """

    seed: Tensor
    step: Tensor
    first_class: Tensor

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
        sub_centers: int = 1,
        bias: bool = False,
        margin_grad: str = "exact",
        normalize: Normalize = "both",
        sample_rate: float = 1.0,
        unbiased: bool = False,
        exclude_above: float | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        group: Group = None,
        sync: Sync = "mean",
        memory: Memory = "auto",
        kernel: Kernel = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("embedding_size", embedding_size, "numbers of an embedding")
        check_count("num_classes", num_classes, "classes of all ranks")
        check_count("sub_centers", sub_centers, "sub-centers of a class")
        self.logits = Logits(margin, margin_grad, normalize, exclude_above, label_smoothing, ignore_index)
        self.logits.check()
        self.logits.check_sub_centers(sub_centers)
        check_fraction("sample_rate", sample_rate)
        check_flag("bias", bias)
        check_flag("unbiased", unbiased)
        if unbiased and (not sample_rate or label_smoothing):
            raise ValueError("unbiased needs a sample_rate above 0, and no label_smoothing")
        check_integer("seed", seed, least=-(2**63), most=2**63 - 1)
        if dtype is not None:
            check_floating_dtype("dtype", dtype)
        if device is not None:
            device = checked_device("device", device)
        self.options = Options(group, sync, memory=memory, reduction=reduction, kernel=kernel)
        self.options.check()
        comm = select_communicator(group)
        if num_classes < comm.size:
            raise ValueError(f"there must be a class for each of the {comm.size} ranks, got num_classes={num_classes}")
        self.embedding_size, self.num_classes = embedding_size, num_classes
        self.margin, self.sub_centers = margin, sub_centers
        self.sample_rate, self.unbiased = float(sample_rate), unbiased
        self.local_classes = Partition.even(num_classes, comm.size).rows(comm.rank)
        held = self.local_classes.stop - self.local_classes.start
        shape = (held, embedding_size) if sub_centers == 1 else (held, sub_centers, embedding_size)
        self.weight = nn.Parameter(allocated("num_classes and embedding_size", shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(held, device=device, dtype=dtype)) if bias else None
        self._made_with = [self.weight]  # in a list, where no module sees it
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("step", torch.tensor(0))  # samples drawn so far, in training
        self.register_buffer("first_class", torch.tensor(self.local_classes.start))  # whose centers these are
        self.register_state_dict_post_hook(_tell_classes)
        self.register_load_state_dict_pre_hook(_check_classes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the centers, each from the seed and its class: on any number of ranks the same."""
        first = self.local_classes.start - self.local_classes.start % _BLOCK
        for start in range(first, self.local_classes.stop, _BLOCK):
            generator = torch.Generator().manual_seed(mix(mix(int(self.seed)) + start // _BLOCK))
            block = torch.randn(_BLOCK, *self.weight.shape[1:], generator=generator)
            shared = overlap(start, _BLOCK, self.local_classes.start, len(self.weight))
            assert shared is not None
            self.weight[shared[1]] = 0.01 * block[shared[0]]
        if self.bias is not None:
            self.bias.zero_()

    @entry
    def forward(self, embeddings: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """(b_r, d), (b_r,) -> L, the same on all ranks; see :func:`wholebatch.functional.partial_fc_loss`."""
        drawn = self.training and self.sample_rate < 1
        settings = [self.sample_rate, self.unbiased, int(self.seed), int(self.step), self.training]
        classes = Classes(self._sample, self.weight.dtype, self.num_classes, drawn, settings)
        loss = class_softmax("PartialFC", Batch(embeddings, labels, weights), classes, self.logits, self.options)
        if drawn:
            self.step += 1
        return loss

    def _sample(self, labels: Tensor | None) -> Sample:
        """Return this rank's classes of a step: all of them, or a sample that has the classes of the labels."""
        self.check_own()
        mark_sharded(self.weight, self.bias)  # here, for a copy of the module has no marks
        if labels is None:
            return Sample(self.weight, bias=self.bias, complete=True)
        ids = torch.arange(self.local_classes.start, self.local_classes.stop, device=self.weight.device)
        drawn = bernoulli(self.sample_rate, ids, seed=int(self.seed), step=int(self.step))
        at = rows_within(labels, self.local_classes)
        positive = torch.zeros_like(drawn)
        positive[at[at != NOT_HERE]] = True
        (index,) = (drawn | positive).nonzero(as_tuple=True)
        log_weights = None
        if self.unbiased:
            dtype = accumulation_dtype(self.weight.dtype)  # two numbers alone would make float32 of it
            log_weights = torch.full(index.shape, -math.log(self.sample_rate), dtype=dtype, device=index.device)
            log_weights.masked_fill_(positive[index], 0.0)
        bias = None if self.bias is None else take_rows(self.bias, index)
        return Sample(take_rows(self.weight, index), ids[index], bias, log_weights, complete=True)

    def check_own(self) -> None:
        """The centers are those of this rank's classes, and no engine's.

        Raises:
            ValueError: if an engine has taken them, another rank's have been loaded, or ranks have come since.
        """
        comm = select_communicator(self.options.group)
        if Partition.even(self.num_classes, comm.size).rows(comm.rank) != self.local_classes:
            raise ValueError(
                f"the head has classes {self.local_classes.start} to {self.local_classes.stop}, which are not those of "
                f"rank {comm.rank} of {comm.size}: make it after torch.distributed.init_process_group, on each rank"
            )
        if comm.size > 1 and self.weight is not self._made_with[0]:
            raise ValueError(
                "head.weight is not the parameter that the head was made with: PartialFC must stay outside of FSDP, "
                "which shards it once more (other values go in by head.weight.data.copy_ or load_state_dict)"
            )
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)  # where its forward pass is under way
        if active is not None and any(
            p is self.weight and name not in active.parameters_to_ignore for name, p in active.module.named_parameters()
        ):
            raise ValueError(
                "DistributedDataParallel has wrapped the head: it overwrites the centers with rank 0's and averages "
                "gradients of different classes. Wrap the backbone alone, and make the head anew"
            )
        if int(self.first_class) != self.local_classes.start:
            raise ValueError(
                "the head holds another rank's centers: has DistributedDataParallel wrapped it, or was another rank's "
                "state_dict loaded? Wrap the backbone alone, and make the head anew; wholebatch.heads.load_head loads "
                "on any number of ranks"
            )

    def facts(self) -> dict[str, Any]:
        """Return what the parts of all ranks have in common, by the names `OF_HEAD`, if this is this rank's part.

        Raises:
            ValueError: if it is not; see `check_own`.
        """
        self.check_own()
        return {
            **self.logits.facts(),
            "num_classes": self.num_classes,
            "embedding_size": self.embedding_size,
            "sub_centers": self.sub_centers,
            "bias": self.bias is not None,
            "seed": int(self.seed),
        }

    @entry
    def top_classes(self, embeddings: Tensor, k: int = 1) -> TopClasses:
        """The k classes of all ranks that each of this rank's rows is most like: (b_r, d) -> 2 of (b_r, k).

        The logits are without a margin. They are never stored. Collective: 1 handshake, 1 all-gather of the embeddings,
        2 all-to-alls of k B numbers.

        Raises:
            ValueError: on every rank, for what is no embedding, for k above the number of classes, and if k or the
                head's settings differ between ranks.

        >>> import torch, wholebatch as wb
        >>> head = wb.PartialFC(8, 1000)
        >>> head.top_classes(head.weight[[7, 999]], k=1).class_ids.tolist()
        [[7], [999]]
        """
        comm = select_communicator(self.options.group)
        return top_classes(
            embeddings, k, self.weight, self.bias, self.logits, self.local_classes.start, comm, self.facts
        )

    @bind_on_all_ranks
    def full_weight(self, root: int = 0) -> Tensor | None:
        """All centers, (C, d) or (C, K, d), on rank `root`; None on the others.

        Collective: 1 handshake, 1 gather.

        Raises:
            ValueError: on every rank, if `root` is no rank, or `root` or the head's settings differ between ranks.
        """
        return self._full("full_weight", self.weight, root)

    @bind_on_all_ranks
    def full_bias(self, root: int = 0) -> Tensor | None:
        """All biases, (C,), on rank `root`; None on the others, and where there are none.

        Collective: 1 handshake, and 1 gather where there are biases.

        Raises:
            ValueError: as `full_weight`.
        """
        return self._full("full_bias", self.bias, root)

    @torch.no_grad()
    def _full(self, name: str, of_classes: Tensor | None, root: int) -> Tensor | None:
        comm = select_communicator(self.options.group)

        def state() -> dict[str, Any]:
            of_head = self.facts()
            check_integer("root", root, least=0, most=comm.size - 1, of="a rank")
            return {**of_head, "root": root}

        comm.handshake(state, caller=f"PartialFC.{name}", must_match=(*OF_HEAD, "root"))
        if of_classes is None:
            return None
        counts = Partition.even(self.num_classes, comm.size).counts
        whole = comm.gather(of_classes.detach(), root, counts=counts)
        return whole if comm.rank == root else None

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_size}, {self.num_classes}, margin={self.margin}, sample_rate={self.sample_rate}, "
            f"sub_centers={self.sub_centers}, bias={self.bias is not None}, normalize={self.logits.normalize!r}, "
            f"classes {self.local_classes.start} to {self.local_classes.stop} here"
        )


def _tell_classes(head: Any, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
    """Record the classes in a state_dict's metadata, beside its tensors; torch.save keeps them."""
    metadata["classes"] = [head.local_classes.start, head.local_classes.stop, head.num_classes]


def _check_classes(head: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_others: Any) -> None:
    """Refuse a state_dict of other classes, before anything of it is loaded.

    One with as many classes, of another rank, is loaded, and refused at the next use: on all ranks, not on this one.

    Raises:
        ValueError: it has another number of classes than this rank, or is of a head with another number of them.
    """
    weight, local = state.get(prefix + "weight"), head.local_classes
    if not isinstance(weight, Tensor) or not weight.dim():
        return
    first, stop, count = metadata.get("classes", (None, None, head.num_classes))
    if len(weight) == local.stop - local.start and count == head.num_classes:
        return
    what = f"{len(weight)} classes" if first is None else f"classes {first} to {stop} of {count}"
    raise ValueError(
        f"a state_dict holds one rank's part of a head; the one for {prefix + 'weight'!r} has {what}, and this rank "
        f"has classes {local.start} to {local.stop} of {head.num_classes}. wholebatch.heads.save_head and load_head "
        "write and read all parts, on any number of ranks"
    )

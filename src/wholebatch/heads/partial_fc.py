"""PartialFC: a classifier whose classes are sharded over the ranks; a training step may use a sample of them.

    rank r holds the classes [offset_r, offset_r + C_r) of C; the first ranks hold the remainder
    the classes of a step: those of its labels, and each other one with probability `sample_rate`

The sample depends on seed, step and class alone (see `sampling`), and the initial centers on seed and class. Both are
the same for any number of ranks. The gradient of a sample is sparse: `SparseSGD`, `SparseAdamW` update only its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._base.checks import (
    allocated,
    check_count,
    check_flag,
    check_floating_dtype,
    check_fraction,
    check_integer,
    checked_device,
)
from .._base.precision import accumulation_dtype
from .._base.sharded import mark_sharded
from ..comm import Group, LocalCommunicator, select_communicator
from ..comm.binding import CallError, bound
from ..comm.modules import built
from ..contract import Checking, Options, Reduction, bind_on_all_ranks, entry
from ..kernels import Kernel
from ..partition import Partition
from ..sweep import Memory, Precision
from ..sync import Sync
from .agreement import Batch
from .class_softmax import class_softmax
from .classes import NOT_HERE, PART, check_enough_classes, check_parts, part_checksum, rows_within
from .local_part import check_classes, record_classes, wrapped_by_ddp, wrapped_by_deepspeed
from .logits import OF_HEAD, SIZES, Logits, Normalize
from .margins import ArcFace
from .margins.interface import Margin
from .rows import overlap, take_rows
from .sample import Classes, Sample
from .sampling import drawn_classes, mix
from .top_classes import TopClasses, top_classes

_BLOCK = 1024  # the number of consecutive classes whose centers are drawn from one generator
_THREADED = 64  # blocks from which on several threads draw them
_COUNTERS = ("seed", "step", "first_class")  # buffers of one integer, which the host reads in each step

_Head = TypeVar("_Head", bound="PartialFC")


def _name_the_call(error: CallError, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Raise the error of a constructor with more positional arguments than it has, with the calls that are meant."""
    if len(args) > 3:  # self, and two sizes
        raise CallError(
            f"PartialFC takes two positional arguments, embedding_size and num_classes, got {len(args) - 1}; pass the "
            "others by keyword: PartialFC(embedding_size, num_classes, margin=wb.ArcFace(64.0, 0.5), sample_rate=0.1). "
            "The arguments of insightface's PartialFC_V2 (margin_loss, embedding_size, num_classes, sample_rate, fp16) "
            f"are those of wholebatch.integrations.insightface.PartialFC_V2. {error}"
        )


class PartialFC(nn.Module):
    r"""Softmax over millions of classes with a margin; centers are sharded over the ranks, logits are never stored.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    Shapes: embeddings (b_r, d), labels (b_r,) or (b_r, k) -> L, (), or (b_r,) with reduction "none".
    `weight`, (C_r, d), holds the local centers.

    Ranks: each rank passes its local embeddings and labels, and gets the same L. Create the head on every rank, after
    `init_process_group`, and keep it outside DDP and FSDP: it raises if wrapped. The scalar being differentiated is L
    of the global batch over all classes. `weight.grad` is dL/dW of the local classes, complete, whatever `sync` says;
    the embeddings' gradient carries the factor of `sync`.

    Collectives (none on one process): forward 1 handshake, 1 all-gather of labels, 1 of embeddings, 1 all-to-all of
    2 B numbers, 1 all-reduce of a number; backward 1 handshake, the same all-to-all and 1 reduce-scatter of the
    embeddings' gradient. A sample costs 1 handshake more in forward. :func:`wholebatch.functional.partial_fc_loss`
    lists those of further settings.

    Work: 4 units of B C_r d multiply-adds per rank, 3 where exp(S) is kept; C_r is the size of the local sample.
    Memory: O(C_r d) for the centers, two tiles, and on several ranks O(B d) for all embeddings and their gradient. A
    sample's centers are read tile by tile, and only their gradient has their size. A center must not change between the
    forward and the backward pass.

    Three habits of training code are wrong here. `torch.nn.utils.clip_grad_norm_` (Lightning's `gradient_clip_val`, the
    Trainer's `max_grad_norm`) scales each rank by another norm, and backbones drift apart silently: use
    :func:`wholebatch.heads.clip_grad_norm_`. A `state_dict()` saved by rank 0 alone holds only rank 0's classes: use
    :func:`wholebatch.heads.save_head`. Such a state_dict raises on other ranks, when it is loaded or at the next use.
    Activation checkpointing runs forward twice and would draw a second sample: keep a head with samples outside of it.

    Args:
        embedding_size: d.
        num_classes: C, on all ranks together; at least one for each rank.
        margin: phi and s. `head.margin` is this object: a margin with state, such as :class:`wholebatch.AdaFace`, is
            updated in place, belongs to one head, and is part of its state_dict.
        sub_centers: K, the centers of each class; the one nearest to an embedding counts: for noisy labels. `weight` is
            then (C_r, K, d).
        bias: whether to learn a bias, (C_r,), initially 0.
        margin_grad, normalize: as in :func:`wholebatch.functional.partial_fc_loss`.
        sample_rate: the probability with which a class without a label in the batch takes part in a training step;
            1: all do. In evaluation all take part. With samples the gradient of `weight` is a sparse tensor, for
            `SparseSGD` or `SparseAdamW`.
        unbiased: whether sampled negatives weigh 1 / sample_rate, so that their sum is on average that of all classes.
        exclude_above, label_smoothing, ignore_index, reduction, group, sync, memory, kernel, precision, checks: as
            for that function.
        seed: of the initial centers and of all samples; the same on all ranks.
        device, dtype: of the centers.

    Raises:
        ValueError: if an argument is invalid.

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

    @partial(bound, refuse=_name_the_call)
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
        precision: Precision = "auto",
        checks: Checking = "entry",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._number = next(built)
        check_count("embedding_size", embedding_size, "numbers of an embedding")
        check_count("num_classes", num_classes, "classes of all ranks")
        check_count("sub_centers", sub_centers, "sub-centers of a class")
        self._logits = Logits(margin, margin_grad, normalize, exclude_above, label_smoothing, ignore_index)
        self._logits.check()
        self._logits.check_sub_centers(sub_centers)
        check_fraction("sample_rate", sample_rate)
        check_flag("bias", bias)
        check_flag("unbiased", unbiased)
        if unbiased and (not sample_rate or label_smoothing):
            raise ValueError(
                f"unbiased needs a sample_rate above 0 and label_smoothing=0, got sample_rate={sample_rate} and "
                f"label_smoothing={label_smoothing}; change these or pass unbiased=False"
            )
        check_integer("seed", seed, minimum=-(2**63), maximum=2**63 - 1)
        if dtype is not None:
            check_floating_dtype("dtype", dtype)
        if device is not None:
            device = checked_device("device", device)
        self.options = Options(group, sync, "auto", memory, reduction, kernel, precision, checks)
        self.options.check()
        # Without a process group, the head is made with all classes; `check_local` refuses it where there are others.
        early = group is None and not (dist.is_available() and dist.is_initialized())
        comm = LocalCommunicator() if early else select_communicator(group)
        check_enough_classes(num_classes, comm.size)
        self.embedding_size, self.num_classes = embedding_size, num_classes
        self.margin, self.sub_centers = margin, sub_centers
        self.sample_rate, self.unbiased = float(sample_rate), unbiased
        self.local_classes = Partition.even(num_classes, comm.size).rows(comm.rank)
        num_local = self.local_classes.stop - self.local_classes.start
        shape = (num_local, embedding_size) if sub_centers == 1 else (num_local, sub_centers, embedding_size)
        self.weight = nn.Parameter(allocated("num_classes and embedding_size", shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(num_local, device=device, dtype=dtype)) if bias else None
        self._original_weight = [self.weight]  # in a list, so that the module does not register it
        # step: samples drawn so far, in training; first_class: of the local centers, to detect those of another rank
        for name, value in zip(_COUNTERS, (seed, 0, self.local_classes.start), strict=True):
            self.register_buffer(name, torch.tensor(value, device="cpu"))
        self.register_state_dict_post_hook(record_classes)
        self.register_load_state_dict_pre_hook(check_classes)
        self.reset_parameters()

    @property
    def logits(self) -> Logits:
        """The settings of logits, with the margin that `margin` is now."""
        return replace(self._logits, margin=self.margin)

    def _apply(self: _Head, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Head:
        """Move and cast the head, except that counters stay on the CPU, and buffers of the margin keep their dtype.

        The host reads the counters, and would wait for a GPU. A running average in bfloat16 would stop moving: the part
        of a new value that is added is less than half a unit in the last place.
        """
        counters = {name: self._buffers[name] for name in _COUNTERS}
        margin_modules = self.margin.modules() if isinstance(self.margin, nn.Module) else ()
        before = [(module, name, x) for module in margin_modules for name, x in module._buffers.items()]
        super()._apply(fn, recurse)
        self._buffers.update(counters)
        for module, name, x in before:
            moved = module._buffers[name]
            if x is not None and moved is not None and moved.dtype != x.dtype:
                module._buffers[name] = x.to(moved.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each center from the seed and its class: the same on any number of ranks."""
        first = self.local_classes.start - self.local_classes.start % _BLOCK
        weight, key = self.weight.detach(), mix(int(self.seed))

        def fill(start: int) -> None:
            generator = torch.Generator().manual_seed(mix(key + start // _BLOCK))
            block = torch.randn(_BLOCK, *weight.shape[1:], generator=generator).mul_(0.01)
            shared = overlap(start, _BLOCK, self.local_classes.start, len(weight))
            assert shared is not None
            weight[shared[1]] = block[shared[0]]

        starts = range(first, self.local_classes.stop, _BLOCK)
        if len(starts) < _THREADED or type(weight) is not Tensor or weight.device.type != "cpu":
            for start in starts:
                fill(start)
        else:  # a generator draws with one thread, whatever torch's number of threads is
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                for _ in threads.map(fill, starts):
                    pass  # an error in a thread is raised here
        if self.bias is not None:
            self.bias.zero_()

    @entry
    def forward(self, embeddings: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Return L, (b_r, d), (b_r,) -> (); see :func:`wholebatch.functional.partial_fc_loss`."""
        drawn = self.gradients_are_sparse
        settings = self.sample_rate, self.unbiased, int(self.seed), self.training
        tensors, step = (self.weight, self.bias), float(self.step)
        classes = Classes(self._sample, self.weight.dtype, self.num_classes, drawn, settings, tensors, step)
        loss = class_softmax("PartialFC", Batch(embeddings, labels, weights), classes, self.logits, self.options)
        if drawn:
            self.step += 1
        return loss

    @property
    def gradients_are_sparse(self) -> bool:
        """Whether a step draws classes, so that gradients have the drawn rows alone."""
        return self.training and self.sample_rate < 1

    def _sample(self, labels: Tensor | None) -> Sample:
        """Return the local classes of a step: all of them without labels, else a sample with the labels' classes."""
        self.check_local()
        mark_sharded(self.weight, self.bias)  # here, because a copy of the module has no marks
        if labels is None:
            return Sample(self.weight, bias=self.bias)
        seed, step = int(self.seed), int(self.step)
        drawn = drawn_classes(self.sample_rate, self.local_classes, seed=seed, step=step, device=self.weight.device)
        rows = rows_within(labels, self.local_classes)
        positive = torch.zeros_like(drawn)
        positive[rows[rows != NOT_HERE]] = True
        (index,) = (drawn | positive).nonzero(as_tuple=True)
        log_weights = None
        if self.unbiased:
            dtype = accumulation_dtype(self.weight.dtype)  # torch.full alone would give float32
            log_weights = torch.full(index.shape, -math.log(self.sample_rate), dtype=dtype, device=index.device)
            log_weights.masked_fill_(positive[index], 0.0)
        bias = None if self.bias is None else take_rows(self.bias, index)
        return Sample(self.weight, index + self.local_classes.start, bias, log_weights, rows=index)

    def check_local(self) -> None:
        """Raise ValueError unless the head holds the centers of the local classes.

        Raises:
            ValueError: if an engine has wrapped the head, a state_dict of another rank was loaded, or the number of
                ranks has changed.
        """
        comm = select_communicator(self.options.group)
        if Partition.even(self.num_classes, comm.size).rows(comm.rank) != self.local_classes:
            raise ValueError(
                f"the head holds classes {self.local_classes.start} to {self.local_classes.stop}, which are not those "
                f"of rank {comm.rank} of {comm.size}: make it after torch.distributed.init_process_group, on each "
                "rank; in Lightning or Fabric, pass strategy=wholebatch.integrations.lightning.ddp_strategy() or "
                "fabric_ddp_strategy()"
            )
        if comm.size > 1 and self.weight is not self._original_weight[0]:
            raise ValueError(
                "head.weight must be the parameter that the head was created with, got another one: PartialFC must "
                "stay outside of FSDP, which shards it again; set values by head.weight.data.copy_ or load_state_dict"
            )
        if wrapped_by_ddp(self.weight):
            raise ValueError(
                "DistributedDataParallel has wrapped the head: it overwrites the centers with rank 0's and averages "
                "gradients of different classes. Wrap the backbone alone, and create the head again; in Lightning or "
                "Fabric, pass strategy=wholebatch.integrations.lightning.ddp_strategy() or fabric_ddp_strategy()"
            )
        if comm.size > 1 and wrapped_by_deepspeed(self.weight):
            raise ValueError(
                "PartialFC must stay outside of DeepSpeed's engine, which has overwritten the centers with rank 0's, "
                "and averages gradients of different classes. Initialize DeepSpeed with the backbone alone, and create "
                "the head again"
            )
        if int(self.first_class) != self.local_classes.start:
            raise ValueError(
                "the head holds another rank's centers: DistributedDataParallel has wrapped it, or another rank's "
                "state_dict was loaded. Wrap the backbone alone and create the head again; "
                "wholebatch.heads.load_head loads on any number of ranks. In Lightning or Fabric, pass "
                "strategy=wholebatch.integrations.lightning.ddp_strategy() or fabric_ddp_strategy()"
            )

    def facts(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks, by the names `OF_HEAD`, and what `check_parts` needs.

        Raises:
            ValueError: if the head does not hold the centers of the local classes; see `check_local`.
        """
        self.check_local()
        return {**self.logits.facts(), **self.size_facts(), PART: float(part_checksum(self.weight, self.options.group))}

    def size_facts(self) -> dict[str, object]:
        """Return the settings of the centers, by the names `SIZES`."""
        sizes = (self.num_classes, self.embedding_size, self.sub_centers, self.bias is not None, int(self.seed))
        return dict(zip(SIZES, sizes, strict=True))

    @entry
    def top_classes(self, embeddings: Tensor, k: int = 1) -> TopClasses:
        """Return the k largest logits of each local row over all classes, and these classes: (b_r, d) -> 2 of (b_r, k).

        The logits have no margin, and are never stored. Collective: 1 handshake, 1 all-gather of the embeddings,
        2 all-to-alls of k B numbers.

        Raises:
            ValueError: on every rank, for invalid embeddings, for k above the number of classes, and if k or the head's
                settings differ between ranks.

        >>> import torch, wholebatch as wb
        >>> head = wb.PartialFC(8, 1000)
        >>> head.top_classes(head.weight[[7, 999]], k=1).class_ids.tolist()
        [[7], [999]]
        """
        comm = select_communicator(self.options.group)
        first = self.local_classes.start
        return top_classes(embeddings, k, self.weight, self.bias, first, self.logits, comm, self.facts)

    @bind_on_all_ranks
    def full_weight(self, root: int = 0) -> Tensor | None:
        """Return all centers, (C, d) or (C, K, d), on rank `root`; None on the others.

        Collective: 1 handshake, 1 gather.

        Raises:
            ValueError: on every rank, if `root` is not a rank, or `root` or the head's settings differ between ranks.
        """
        return self._gather_rows("full_weight", self.weight, root)

    @bind_on_all_ranks
    def full_bias(self, root: int = 0) -> Tensor | None:
        """Return all biases, (C,), on rank `root`; None on the others, and for a head without bias.

        Collective: 1 handshake, and 1 gather where there are biases.

        Raises:
            ValueError: as `full_weight`.
        """
        return self._gather_rows("full_bias", self.bias, root)

    @torch.no_grad()
    def _gather_rows(self, name: str, local: Tensor | None, root: int) -> Tensor | None:
        comm = select_communicator(self.options.group)

        def state() -> dict[str, Any]:
            head_facts = self.facts()
            check_integer("root", root, minimum=0, maximum=comm.size - 1, detail="a rank")
            return {**head_facts, "root": root}

        check_parts(name, comm.handshake(state, caller=f"PartialFC.{name}", must_match=(*OF_HEAD, "root")))
        if local is None:
            return None
        counts = Partition.even(self.num_classes, comm.size).counts
        whole = comm.gather(local.detach(), root, counts=counts)
        return whole if comm.rank == root else None

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_size}, {self.num_classes}, margin={self.margin}, sample_rate={self.sample_rate}, "
            f"sub_centers={self.sub_centers}, bias={self.bias is not None}, normalize={self.logits.normalize!r}, "
            f"classes {self.local_classes.start} to {self.local_classes.stop} here"
        )

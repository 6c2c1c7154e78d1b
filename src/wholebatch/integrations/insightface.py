"""insightface's PartialFC_V2 by its name and arguments, for its own train_v2.py: centers sharded over the ranks.

    from wholebatch.integrations.insightface import PartialFC_V2      instead of: from partial_fc_v2 import PartialFC_V2

Their script, optimizers, margins and checkpoints stay. The margins of their losses.py are recognized by class names and
attributes:

    CombinedMarginLoss   phi = cos(theta + m2) if m1 = 1 and m3 = 0; phi = cos theta - m3 if m3 > 0
    ArcFace, CosFace     the same with `margin` and `m`

Their cos(theta + m2) rises again beyond pi. An edited class under one of these names would train differently, so each
is called once with a few cosines, and its logits and their slopes are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._base.checks import check_choice, check_count, check_flag, check_fraction, check_integer
from .._base.settings import shown
from ..comm import Group, select_communicator
from ..contract import bind_on_all_ranks, prepared
from ..heads.logits import GRADIENTS
from ..heads.margins import CombinedMargin
from ..heads.margins.interface import Margin, Targets
from ..heads.partial_fc import PartialFC
from ..heads.sample import Sample
from ..kernels import Kernel
from ..sweep import Memory, Precision

__all__ = ["PartialFC_V2"]

_ATTRIBUTES = {
    "CombinedMarginLoss": ("s", "m1", "m2", "m3", "interclass_filtering_threshold"),
    "ArcFace": ("s", "margin"),
    "CosFace": ("s", "m"),
}
_CLOSE = 1e-6  # of the scale: they may compute in float32


@dataclass(frozen=True)
class FilteredMargin(CombinedMargin):
    """A combined margin whose negatives have logit 0, and no gradient, where their cosine is above a threshold."""

    threshold: float = 1.0

    def of_negatives(self, angles: Tensor) -> Filter:
        return Filter(self.s * self.threshold)


@dataclass(frozen=True)
class Filter:
    """The transform of the negatives' logits that replaces those above a limit by 0."""

    limit: float

    def transform_(self, logits: Tensor, cols: slice) -> Tensor:
        return logits.masked_fill_(logits > self.limit, 0.0)

    def slope_(self, logits: Tensor, cols: slice) -> Tensor:
        return logits.le_(self.limit)

    def bound(self, largest: float) -> float:
        return largest


def _is_own(margin_loss: object) -> bool:
    """Return whether this is a margin of this library: it has a scale `s` and is called with one argument."""
    if not callable(margin_loss) or isinstance(margin_loss, type) or not hasattr(margin_loss, "s"):
        return False
    call = margin_loss.forward if isinstance(margin_loss, nn.Module) else margin_loss
    try:
        inspect.signature(call).bind(None)
    except TypeError:
        return False
    return True


def _numbers_of(margin_loss: object) -> dict[str, Any]:
    """Return the numbers of one of their margins by the names of its attributes; raise ValueError for another."""
    names = _ATTRIBUTES.get(type(margin_loss).__name__, ())
    if not names or isinstance(margin_loss, type) or not all(hasattr(margin_loss, name) for name in names):
        raise ValueError(
            "margin_loss must be a CombinedMarginLoss, ArcFace or CosFace of insightface's losses.py, or a margin of "
            f"this library such as wholebatch.ArcFace(64.0, 0.5), got {shown(margin_loss)}; write it as a "
            "wholebatch.heads.Margin: an object with a scale s that is called with the angles"
        )
    return {name: getattr(margin_loss, name) for name in names}


def margin_of(margin_loss: object) -> Margin:
    """Return the margin of this library that computes the logits of one of theirs; raise ValueError for another."""
    name, numbers = type(margin_loss).__name__, _numbers_of(margin_loss)
    s, threshold = numbers["s"], numbers.get("interclass_filtering_threshold", 0)
    m2, m3 = _margins(numbers)
    margin = CombinedMargin(s, 1.0, m2, m3, "none")
    if threshold > 0:
        margin = FilteredMargin(s, 1.0, m2, m3, "none", float(threshold))
    if not _computes_logits(margin_loss, margin, threshold):
        raise ValueError(
            f"margin_loss must compute the logits of insightface's {name}, got a class of that name with other logits "
            "or gradients; write it as a wholebatch.heads.Margin: an object with a scale s that is called with the "
            "angles"
        )
    return margin


def _margins(numbers: Mapping[str, Any]) -> tuple[float, float]:
    """Return m2 and m3 of the formula that their class computes."""
    if "m1" not in numbers:
        return numbers.get("margin", 0.0), numbers.get("m", 0.0)
    m1, m2, m3 = (numbers[name] for name in ("m1", "m2", "m3"))
    if m1 == 1.0 and m3 == 0.0:
        return m2, 0.0
    got = f"CombinedMarginLoss with m1={m1}, m2={m2}, m3={m3}"
    if m3 > 0 and (m1 != 1.0 or m2 != 0.0):
        raise ValueError(
            f"margin_loss must have m1=1 and m2=0 where m3 > 0, got a {got}: insightface's class ignores m1 and m2 "
            f"there; pass CombinedMarginLoss(s, 1.0, 0.0, {m3}) to train as it does, or wholebatch.CombinedMargin(s, "
            "m1, m2, m3) for all three"
        )
    if not m3 > 0:
        raise ValueError(
            f"margin_loss must have m1=1 and m3=0, or m3 > 0, got a {got}: insightface's class has no logits for it; "
            "pass wholebatch.CombinedMargin(s, m1, m2, m3)"
        )
    return 0.0, m3


def _computes_logits(margin_loss: Any, margin: CombinedMargin, threshold: float) -> bool:
    """Return whether their margin computes these logits, with a slope s wherever a logit depends on its cosine."""
    cosines = torch.linspace(-0.95, 0.93, 18, dtype=torch.float64, device="cpu").view(6, 3)
    labels = torch.tensor([0, 1, 2, 0, 1, -1], device="cpu")
    target = torch.arange(3, device="cpu") == labels[:, None]
    dropped = (cosines > threshold) & ~target if threshold > 0 else torch.zeros_like(target)
    phi = margin(Targets(cosines.acos(), torch.ones_like(cosines)))
    expected = margin.s * torch.where(target, phi, cosines.masked_fill(dropped, 0.0))
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            leaf = cosines.clone().requires_grad_()
            logits = margin_loss(leaf.clamp(-1, 1), labels[:, None].clone())  # theirs writes into what it gets
            (slope,) = torch.autograd.grad(logits.sum(), leaf)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    same = (logits.detach() - expected).abs().max() <= _CLOSE * margin.s
    return bool(same and (slope - margin.s * (~dropped).double()).abs().max() <= _CLOSE * margin.s)


class PartialFC_V2(PartialFC):
    r"""PartialFC_V2 with insightface's arguments: softmax over classes sharded over the ranks, in tiles.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    Its gradients are those of one process with all rows and all classes, for any number of rows on each rank, if
    DistributedDataParallel averages those of the backbone. `weight` holds the local centers, its gradient is complete,
    and `state_dict` has the one key "weight", as theirs. Everything else is as in :class:`wholebatch.PartialFC`.

    Shapes: local_embeddings (b_r, d), local_labels (b_r,) or (b_r, 1) -> L, (), the same on all ranks.

    Args:
        margin_loss: their CombinedMarginLoss, ArcFace or CosFace, whose numbers may change between steps; or a margin
            of this library. An interclass_filtering_threshold above 0 is heeded, in plain PyTorch instead of kernels.
        embedding_size: d.
        num_classes: C, on all ranks together.
        sample_rate: the probability with which a class without a label in the batch takes part in a training step. They
            draw a fixed number of classes on each rank. In evaluation all classes take part.
        fp16: whether embeddings and centers are rounded to float16 before they are multiplied.
        margin_grad: "straight_through": d phi / d c is replaced by 1, as in their code; or "exact". None:
            "straight_through" for their margins, "exact" for those of this library.
        sparse_grad: whether a sample's gradient is a sparse tensor, for :class:`wholebatch.SparseSGD` or
            :class:`wholebatch.SparseAdamW`, which leave the other centers alone. False: it is dense, for any optimizer.
        ignore_index: the label of rows that do not count. Other labels that are no class raise. Theirs pushes such rows
            away from all classes.
        seed: of the initial centers and of samples; None: `torch.initial_seed()` of rank 0.
        group, memory, kernel, precision: as for :class:`wholebatch.PartialFC`.

    Collectives: those of :class:`wholebatch.PartialFC`, and one handshake in the constructor.

    Raises:
        ValueError: on every rank, if an argument is invalid or differs between ranks, and for a margin_loss that is
            none of theirs or computes other numbers.

    Source: An et al., 2022, arXiv:2203.15565; insightface's recognition/arcface_torch/partial_fc_v2.py.

    >>> import torch, wholebatch as wb
    >>> from wholebatch.integrations.insightface import PartialFC_V2
    >>> module_partial_fc = PartialFC_V2(wb.ArcFace(16.0, 0.2), 8, 1000, 0.1)
    >>> module_partial_fc(torch.randn(4, 8), torch.tensor([3, 999, 0, 3])).backward()
    >>> module_partial_fc.weight.grad.layout, list(module_partial_fc.state_dict())
    (torch.strided, ['weight'])
    """

    def __init__(
        self,
        margin_loss: Callable[..., Tensor],
        embedding_size: int,
        num_classes: int,
        sample_rate: float = 1.0,
        fp16: bool = False,
        *,
        margin_grad: str | None = None,
        sparse_grad: bool = False,
        ignore_index: int = -100,
        seed: int | None = None,
        group: Group = None,
        memory: Memory = "auto",
        kernel: Kernel = "auto",
        precision: Precision = "auto",
    ) -> None:
        margins: list[Margin] = []

        def state() -> dict[str, Any]:
            own = _is_own(margin_loss)
            margins.append(margin_loss if own else margin_of(margin_loss))  # type: ignore[arg-type]  # it has a scale
            check_count("embedding_size", embedding_size, "numbers of an embedding")
            check_count("num_classes", num_classes, "classes of all ranks")
            check_fraction("sample_rate", sample_rate)
            check_flag("sparse_grad", sparse_grad)
            if check_flag("fp16", fp16) and precision != "auto":
                raise ValueError(f"fp16 must be False with precision={precision!r}, got True; pass one of the two")
            if margin_grad is not None:
                check_choice("margin_grad", margin_grad, GRADIENTS)
            if seed is not None:
                check_integer("seed", seed, minimum=-(2**63), maximum=2**63 - 1)
            numbers = (embedding_size, num_classes, float(sample_rate), seed)
            return dict(zip(same, numbers, strict=True)) | {"initial seed": torch.initial_seed() % 2**63}

        same = ("embedding_size", "num_classes", "sample_rate", "seed")
        by_rank = select_communicator(group).handshake(state, caller="PartialFC_V2", must_match=same)
        own = margins[0] is margin_loss
        super().__init__(
            embedding_size,
            num_classes,
            margin=margins[0],
            margin_grad=margin_grad or ("exact" if own else "straight_through"),
            sample_rate=sample_rate,
            ignore_index=ignore_index,
            group=group,
            memory=memory,
            kernel=kernel,
            precision="float16" if fp16 else precision,
            seed=by_rank[0]["initial seed"] if seed is None else seed,
        )
        self.fp16, self.sparse_grad = fp16, sparse_grad
        self.margin_softmax = None if own else margin_loss
        self._numbers = None if own else _numbers_of(margin_loss)
        for name in ("seed", "step", "first_class"):  # not among the keys of their state_dict
            self.register_buffer(name, self.get_buffer(name), persistent=False)
        self.register_state_dict_post_hook(_record_draws)
        self.register_load_state_dict_pre_hook(_restore_draws)

    @property
    def num_local(self) -> int:
        """The number of classes of this rank."""
        return self.local_classes.stop - self.local_classes.start

    @property
    def class_start(self) -> int:
        """The first class of this rank."""
        return self.local_classes.start

    @bind_on_all_ranks
    def forward(self, local_embeddings: Tensor, local_labels: Tensor) -> Tensor:  # type: ignore[override]  # as theirs
        """Return L, (b_r, d), (b_r,) or (b_r, 1) -> (); labels may have any dtype, and are rounded as by `long()`."""
        prepared("PartialFC", self.options.group, self._read_margin)
        if isinstance(local_labels, Tensor):
            local_labels = local_labels.long()
            if local_labels.dim() == 2 and local_labels.shape[1] == 1:
                local_labels = local_labels[:, 0]
        return super().forward(local_embeddings, local_labels)

    def _read_margin(self) -> None:
        """Take the numbers of their margin again if they have changed; raise ValueError if they are invalid."""
        if self.margin_softmax is not None and (numbers := _numbers_of(self.margin_softmax)) != self._numbers:
            self.margin, self._numbers = margin_of(self.margin_softmax), numbers

    def _sample(self, labels: Tensor | None) -> Sample:
        """Return the local classes of a step, whose gradient is dense unless a sparse one was asked for."""
        sample = super()._sample(labels)
        if sample.rows is None or self.sparse_grad:
            return sample
        return replace(sample, centers=_DenseGradient.apply(sample.centers))


class _DenseGradient(torch.autograd.Function):
    """The identity, whose gradient is made dense."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to_dense() if grad.is_sparse else grad


def _record_draws(head: PartialFC_V2, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
    """Record seed and step in a state_dict's metadata, so that samples continue; there is no key for them in theirs."""
    metadata["seed"], metadata["step"] = int(head.seed), int(head.step)


def _restore_draws(head: PartialFC_V2, state: Any, prefix: str, metadata: dict[str, Any], *_others: Any) -> None:
    """Continue the samples, and note whose classes were loaded: those of another rank raise at the next use."""
    for name in ("seed", "step"):
        if type(metadata.get(name)) is int:
            head.get_buffer(name).fill_(metadata[name])
    first, stop, count = metadata.get("classes", (0, 0, 0))
    if stop - first < count:  # one rank's part
        head.first_class.fill_(first)

"""From the columns of a batch to their embeddings, all rows at once or in chunks; the names of theirs that this needs.

In chunks the graph of the embeddings runs the model again in the trainer's backward pass. A wrapper of
sentence-transformers that computes gradients within the forward pass gets leaves instead, and `connected` hands these
gradients on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb

from ..._base.settings import check_count, check_positive_number
from ...contract import BatchOptions
from .._accumulation import divide_once
from .._framework import SENTENCE_TRANSFORMERS
from .._options import AdaptedLoss, check_no_progress_bar
from .checkpoints import keep_parameters

Features = Mapping[str, Any]  # their tensors, and numbers such as the length of a prompt
SimilarityFunction = Callable[[Tensor, Tensor], Tensor]
ChunkSize = int | wb.gradcache.TokenBudget
TokenSimilarity = Callable[..., Tensor]  # (queries, documents, *, queries_mask, documents_mask)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosines of all pairs of rows; it stands for the function of the same name in sentence-transformers."""
    return normalize(a, dim=-1) @ normalize(b, dim=-1).T


def pairwise_dot_score(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of paired rows; it stands for the function of the same name in sentence-transformers."""
    return torch.linalg.vecdot(a, b)


def name_of_similarity(
    similarity_fct: TokenSimilarity, names: tuple[str, str], fix: str, module: str = "sentence_transformers.util"
) -> str:
    """Return the name of a function of their module, or raise ValueError unless it is one of two; `fix` ends the error.

    Their module is imported for functions other than those above.
    """
    for ours in (cos_sim, pairwise_dot_score):
        if similarity_fct is ours and ours.__name__ in names:
            return ours.__name__
    for name in names:
        if similarity_fct is SENTENCE_TRANSFORMERS.find(module, name):
            return name
    raise ValueError(
        f"similarity_fct must be {' or '.join(names)} of {module}, got "
        f"{getattr(similarity_fct, '__name__', similarity_fct)!r}{fix}"
    )


def loss_function(module: str, name: str) -> Any:
    """Return a function of their losses, such as those that join columns of documents in one forward pass."""
    return SENTENCE_TRANSFORMERS.find(f"sentence_transformers.base.losses.{module}", name)


def embed_columns(model: Any, columns: Sequence[Features], chunk_size: ChunkSize | None = None) -> list[Tensor]:
    """Return the embeddings of each column; in chunks the model runs again in the backward pass."""
    if chunk_size is None:
        return loss_function("merged_forward", "embed_columns")(model, columns)
    get_rep_fn = itemgetter("sentence_embedding")
    return [wb.gradcache.encode(model, [features], chunk_size, get_rep_fn=get_rep_fn) for features in columns]


def has_static_embedding(model: Any) -> bool:
    """Return whether the model's first module is a table of tokens, whose input has no rows."""
    return bool(loss_function("gradcache", "has_static_embedding_input")(model))


def columns_of(sentence_features: Iterable[Features], fewest: int = 2) -> list[Features]:
    """Return the columns of a batch, or raise ValueError if there are fewer."""
    columns = list(sentence_features)
    if len(columns) < fewest:
        raise ValueError(
            f"the batch must have at least two columns of inputs, anchors and positives, got {len(columns)}; further "
            "columns are negatives"
        )
    return columns


def chunk_size_of(loss: str, model: Any, rows: int | None, tokens: int | None) -> ChunkSize:
    """Return the size of chunks; raise ValueError for a wrong one, and for a model that takes no part of a batch."""
    if rows is not None or tokens is None:
        check_count("mini_batch_size", rows, "rows that the model takes at once")
    if tokens is not None:
        check_count("mini_batch_num_tokens", tokens, "tokens that the model takes at once")
    if has_static_embedding(model):
        raise ValueError(
            "model must take parts of a batch, got one whose first module is a StaticEmbedding, without rows in its "
            f"input; use {loss.removeprefix('Cached')}: such a model keeps hardly any activations"
        )
    size: Any = rows if tokens is None else wb.gradcache.TokenBudget(tokens)
    return size


class Described:
    """A loss that their model cards describe as their class of the same name; its attributes have their names."""

    their_losses: ClassVar[str] = "sentence_transformers.sentence_transformer.losses"
    similarity: str  # of some losses: the name of similarity_fct
    scale: float | wb.Scale  # of some losses

    @property
    def citation(self) -> str:
        """The BibTeX entry of their class, for the model card."""
        return next(x.citation for x in self._theirs() if hasattr(x, "citation")).fget(self)

    def get_config_dict(self) -> dict[str, Any]:  # values of any type
        """Return the arguments, for the model card."""
        config = self._theirs()[0].get_config_dict(self)
        if "similarity_fct" in config:
            config["similarity_fct"] = self.similarity
        if "scale" in config:
            config["scale"] = self.scale_number()
        return config

    def scale_number(self) -> float:
        """Return the present value of the scale."""
        return float(self.scale().detach()) if isinstance(self.scale, wb.Scale) else float(self.scale)

    def _theirs(self) -> list[Any]:
        """Return their classes of the same name: of this object's class, and of its base classes."""
        losses = SENTENCE_TRANSFORMERS.load(self.their_losses)
        names = [x.__name__ for x in type(self).__mro__ if x.__module__.startswith(str(__package__))]
        return [getattr(losses, name) for name in names if hasattr(losses, name)]


class BatchLoss(Described, AdaptedLoss):
    """A loss of the columns of a batch: embed them, then compare them.

    Subclasses set `chunk_size` in cached forms. They compute the loss in `compute_loss_from_embeddings`, which their
    library calls as well, or in `compare`, if it needs more than embeddings and labels.
    """

    compute_loss_from_embeddings: ClassVar[Callable[..., Tensor]]
    fewest_columns: ClassVar[int] = 2

    model: Any  # their model, which the trainer replaces by the wrapped one

    def prepare(self) -> None:
        SENTENCE_TRANSFORMERS.check()
        divide_once()
        self.chunk_size: ChunkSize | None = None

    @property
    def options_of_call(self) -> BatchOptions:
        """Return the options of a call; raise ValueError for a trained scale that the processes would train apart."""
        apart = not getattr(self, "gather_across_devices", True) and wb.comm.select_communicator(None).size > 1
        if apart and isinstance(getattr(self, "scale", None), wb.Scale):
            raise ValueError(
                "scale must be a number with gather_across_devices=False on several processes, got a wb.Scale: it "
                "belongs to the loss, which no engine synchronizes, so each process would train another one; leave "
                "gather_across_devices at True"
            )
        return self.options

    def scale_value(self) -> Tensor | float:
        """Return the present value of the scale, with a graph if it is trained."""
        return self.scale() if isinstance(self.scale, wb.Scale) else self.scale

    @property
    def uses_gradient_cache(self) -> bool:
        """Whether the model runs again in the backward pass: their MatryoshkaLoss asks for it."""
        return self.chunk_size is not None

    def embed(self, columns: Sequence[Features]) -> list[Tensor]:
        """Return the embeddings of each column, with a graph."""
        return embed_columns(self.model, columns, self.chunk_size)

    def beside(self, columns: Sequence[Features], labels: Tensor | None) -> Any:  # what a subclass compares with
        """Return the argument of `compare` that needs no gradient; by default the labels."""
        return labels

    def compare(self, embeddings: Sequence[Tensor], beside: Any) -> Tensor:  # whatever `beside` returns
        """Return the loss of the whole batch for this process's embeddings, (b, d) for each column."""
        return self.compute_loss_from_embeddings(embeddings, beside)

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch, the same on all processes."""
        columns = columns_of(sentence_features, self.fewest_columns)
        beside = self.beside(columns, labels)
        embeddings = self.embed(columns)
        if "calculate_loss" in vars(self):  # their MatryoshkaLoss has put its own in its place
            return connected(self.calculate_loss, embeddings, beside)
        return self.compare(embeddings, beside)

    def calculate_loss(
        self,
        reps: Sequence[Sequence[Tensor]],
        beside: Any = None,  # what a subclass compares with
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """Return the loss of embeddings in chunks, as their MatryoshkaLoss calls it.

        Args:
            reps: the chunks of each column.
            beside: the other argument of `compare`.
            with_backward: go backward here, and return the value alone.

        Raises:
            ValueError: if the loss has parameters, which would get a gradient before the trainer scales it.
        """
        loss = self.compare([torch.cat([*chunks]) for chunks in reps], beside)
        if not with_backward:
            return loss
        children = [child for name, child in self.named_children() if name not in ("model", "guide")]
        if any(x.requires_grad for child in children for x in child.parameters()):
            raise ValueError(
                "sentence-transformers' MatryoshkaLoss goes backward inside of a cached loss, before the trainer has "
                "scaled it, so scale must be a number there; for a wb.Scale use MatryoshkaLoss of "
                "wholebatch.integrations.sentence_transformers"
            )
        loss.backward()
        return loss.detach()


class CachedBatchLoss(BatchLoss):
    """A loss of columns that are embedded in chunks: the first base class, the loss being the second."""

    mini_batch_size: int | None = 32
    mini_batch_num_tokens: int | None = None
    show_progress_bar: bool = False

    def prepare(self) -> None:
        super().prepare()
        check_no_progress_bar(self.show_progress_bar)
        rows, tokens = self.mini_batch_size, self.mini_batch_num_tokens
        self.chunk_size = chunk_size_of(type(self).__name__, self.model, rows, tokens)


def check_scale(scale: object) -> None:
    """Raise ValueError unless this is a positive number or a `wb.Scale`, which is then kept in checkpoints."""
    if isinstance(scale, wb.Scale):
        keep_parameters()
    else:
        check_positive_number("scale", scale, "to train it pass wb.Scale(20.0)", or_=", or a wb.Scale to train it")


def connected(calculate_loss: Callable[..., Tensor], embeddings: Sequence[Tensor], beside: Any) -> Tensor:
    """Return the loss that a wrapper computes with its own backward passes, with the embeddings' graph."""
    if not torch.is_grad_enabled():
        return calculate_loss([[x] for x in embeddings], beside)
    leaves = [x.detach().requires_grad_() for x in embeddings]
    loss = calculate_loss([[x] for x in leaves], beside, with_backward=True)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return _Connected.apply(loss.detach(), gradients, *embeddings)


class _Connected(torch.autograd.Function):
    """A value whose gradients by the embeddings are known: dL/dx = g dL/dL, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *embeddings: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(grads[0] * x for x in ctx.gradients))

"""Build the step that is timed: a loss of random features, which is counted on few rows, timed, and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import functional, reference
from ..comm import Communicator
from ..heads import CosFace, PartialFC
from ..losses.catalog import CATALOG
from ..partition import Partition
from ..sweep import Memory
from .declared import DeclaredLoss, call_of, leaves_of, with_options
from .shapes import Shapes, TokenShapes

SCALE, BIAS = 14.3, -10.0
_PER_CLASS = 4  # examples of a class, for losses with labels
Loss = Callable[..., Tensor]  # of a call's arguments, by their names


class Made(NamedTuple):
    """A loss and its random inputs on one rank."""

    arguments: Mapping[str, Any]  # of a call; features and numbers of the loss are leaves with a gradient
    leaves: list[Tensor]  # those of the arguments, and the parameters of a declared loss
    ours: Loss  # this library's function, which takes options as well
    reference: Loss  # the dense one


def make_declared(source: DeclaredLoss, rows: int, embedding_size: int, **where: Any) -> Made:
    """Return a declared loss and its inputs; `where` has dtype, device and seed, as `call_of` takes them."""
    loss_fn, arguments = call_of(source, rows, embedding_size, **where)

    def ours(*, options: Mapping[str, Any], **arguments: Any) -> Tensor:
        return with_options(loss_fn, reduction="mean", **options)(**arguments)

    return Made(arguments, leaves_of(loss_fn, arguments), ours, loss_fn.reference)


def make_built_in(
    loss: str, rows: int, embedding_size: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Made:
    """Return a loss of the catalog and its inputs."""
    generator = torch.Generator().manual_seed(seed)
    features = (_features(rows, embedding_size, generator) for _ in range(CATALOG[loss].inputs))
    arguments = {name: x.to(device, dtype).requires_grad_() for name, x in zip("xy", features, strict=False)}
    for name, number in (("scale", SCALE), ("bias", BIAS)):
        arguments[name] = torch.tensor(number, device=device, requires_grad=True)
    leaves = [*arguments.values()]
    if CATALOG[loss].kind == "labeled":
        arguments["labels"] = torch.arange(rows, device=device) // _PER_CLASS
    return Made(arguments, leaves, partial(call_built_in, loss, functional), partial(call_built_in, loss, reference))


def call_built_in(
    loss: str,
    functions: ModuleType,  # wholebatch.functional or wholebatch.reference
    *,
    x: Tensor,
    y: Tensor | None = None,
    scale: Tensor | float = SCALE,
    bias: Tensor | float = BIAS,
    labels: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the value of a loss of the catalog; a temperature is not learned."""
    entry = CATALOG[loss]
    factor = scale if entry.scale_argument == "logit_scale" else SCALE
    return entry.call(functions, x, y, scale=factor, bias=bias, labels=labels, **(options or {}))


def make_step(
    comm: Communicator, shapes: Shapes, exchange: str, memory: Memory, device: torch.device
) -> Callable[[], None]:
    """Return forward and backward of this rank's rows; gradients have their memory already, as in a second step."""
    rows, width = Partition.even(shapes.batch_size, comm.size).counts[comm.rank], shapes.embedding_size
    where: dict[str, Any] = {"dtype": shapes.dtype, "device": device, "seed": comm.rank}
    if shapes.has_classes:
        return _classify(comm, shapes, rows, memory, device)
    if shapes.declared is not None:
        made = make_declared(shapes.declared.source, rows, width, **where)
    elif isinstance(shapes, TokenShapes):
        made = _make_tokens(shapes, comm.rank, device)
    else:
        made = make_built_in(shapes.loss, rows, width, **where)
    options = {"group": comm, "exchange": exchange, "memory": memory}
    for leaf in made.leaves:
        leaf.grad = torch.ones_like(leaf)
    return lambda: made.ours(**made.arguments, options=options).backward()


def _features(rows: int, embedding_size: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(rows, embedding_size, generator=generator), dim=1)


def _make_tokens(shapes: TokenShapes, rank: int, device: torch.device) -> Made:
    """Return late interaction of queries and documents of nearly equal lengths, without padding."""
    generator = torch.Generator().manual_seed(rank)
    arguments: dict[str, Any] = {"documents_per_query": shapes.documents_per_query}
    for side, plural, items, each in (
        ("query", "queries", shapes.items[0], shapes.query_tokens),
        ("document", "documents", shapes.items[1], shapes.document_tokens),
    ):
        lengths = Partition.even(ceil(each * items.counts[rank]), items.counts[rank])
        tokens = _features(lengths.total, shapes.embedding_size, generator)
        arguments[plural] = tokens.to(device, shapes.dtype).requires_grad_()
        arguments[f"{side}_offsets"] = torch.tensor([*lengths.offsets, lengths.total], device=device)
    arguments["logit_scale"] = torch.tensor(SCALE, device=device, requires_grad=True)
    leaves = [arguments[name] for name in ("queries", "documents", "logit_scale")]

    def ours(*, options: Mapping[str, Any], **arguments: Any) -> Tensor:
        return functional.max_sim_loss(**arguments, **options)

    return Made(arguments, leaves, ours, reference.max_sim_loss)


def _classify(
    comm: Communicator, shapes: Shapes, rows: int, memory: Memory, device: torch.device
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = _features(rows, shapes.embedding_size, generator).to(device, shapes.dtype).requires_grad_()
    head = PartialFC(
        shapes.embedding_size, shapes.classes, margin=CosFace(16.0, 0.1), sample_rate=shapes.sample_rate,
        device=device, dtype=shapes.dtype, group=comm, memory=memory,
    )  # fmt: skip
    dense = shapes.sample_rate == 1
    if shapes.sample is None:
        labels = torch.randint(shapes.classes, (rows,), generator=generator).to(device)
    else:
        torch.nn.init.ones_(head.weight)  # all centers are equal, as the ranks of a counted step are
        labels = torch.arange(rows, device=device) * shapes.sample // rows
    x.grad = torch.ones_like(x)
    if dense:
        head.weight.grad = torch.ones_like(head.weight)

    def step() -> None:
        if not dense:
            head.weight.grad = None  # each sample's gradient has other rows
        head(x, labels).backward()

    return step

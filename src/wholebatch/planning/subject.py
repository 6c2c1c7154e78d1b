"""Build the step that is timed: a loss of random features, as `work` counts it and a pasted call runs it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import functional
from ..comm import Communicator
from ..heads import CosFace, PartialFC
from ..losses.catalog import Declaration
from ..partition import Partition
from ..sweep import Memory
from .declared import call_of, leaves_of, with_options
from .late_interaction import TokenShapes
from .shapes import Shapes

SCALE, BIAS = 14.3, -10.0
_PER_CLASS = 4  # examples of a class, for losses with labels


def scale_of(entry: Declaration, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | float:
    """Return the scale of a benchmark: a learned logit scale, or a fixed temperature's inverse."""
    if entry.scale_argument != "logit_scale":
        return SCALE
    return torch.tensor(SCALE, device=device, dtype=dtype, requires_grad=True)


def make_step(
    comm: Communicator, shapes: Shapes, exchange: str, memory: Memory, device: torch.device
) -> Callable[[], None]:
    """Return forward and backward of this rank's rows; gradients have their memory already, as in a second step.

    Args:
        comm: the ranks, as many as `shapes` says.
        shapes: of the step.
        exchange: as for the loss.
        memory: as for the loss.
        device: of the features.
    """
    rows = Partition.even(shapes.batch_size, comm.size).counts[comm.rank]
    if shapes.declared is not None:
        return _step_of_declared(comm, shapes, exchange, memory, device)
    if isinstance(shapes, TokenShapes):
        return _step_of_tokens(comm, shapes, exchange, memory, device)
    generator = torch.Generator().manual_seed(comm.rank)
    features = [
        normalize(torch.randn(rows, shapes.embedding_size, generator=generator), dim=1)
        .to(device, shapes.dtype)
        .requires_grad_()
        for _ in range(shapes.towers)
    ]
    for x in features:
        x.grad = torch.ones_like(x)
    options: dict[str, Any] = {"group": comm, "memory": memory}
    entry = shapes.entry
    if entry is None:
        return _classify(shapes, features[0], options, generator)
    options |= {"exchange": exchange, "scale": scale_of(entry, device)}
    options["bias"] = torch.tensor(BIAS, device=device, requires_grad=True)
    if entry.kind == "labeled":
        options["labels"] = torch.arange(rows, device=device) // _PER_CLASS

    def step() -> None:
        entry.call(functional, *features, **options).backward()

    return step


def _step_of_declared(
    comm: Communicator, shapes: Shapes, exchange: str, memory: Memory, device: torch.device
) -> Callable[[], None]:
    rows = Partition.even(shapes.batch_size, comm.size).counts[comm.rank]
    made, arguments = call_of(
        shapes.loss, rows, shapes.embedding_size, dtype=shapes.dtype, device=device, seed=comm.rank
    )
    loss_fn = with_options(made, group=comm, exchange=exchange, memory=memory, reduction="mean")
    for leaf in leaves_of(loss_fn, arguments):
        leaf.grad = torch.ones_like(leaf)

    def step() -> None:
        loss_fn(**arguments).backward()

    return step


def _step_of_tokens(
    comm: Communicator, shapes: TokenShapes, exchange: str, memory: Memory, device: torch.device
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(comm.rank)
    arguments: dict[str, Any] = {"documents_per_query": shapes.documents_per_query}
    for name, items, each in (
        ("query", shapes.queries, shapes.query_tokens),
        ("document", shapes.documents, shapes.document_tokens),
    ):
        lengths = Partition.even(ceil(each * items.counts[comm.rank]), items.counts[comm.rank])
        tokens = torch.randn(lengths.total, shapes.embedding_size, generator=generator)
        leaf = normalize(tokens, dim=1).to(device, shapes.dtype).requires_grad_()
        leaf.grad = torch.ones_like(leaf)
        arguments["queries" if name == "query" else "documents"] = leaf
        arguments[f"{name}_offsets"] = torch.tensor([*lengths.offsets, lengths.total], device=device)
    arguments |= {"logit_scale": torch.tensor(SCALE, device=device, requires_grad=True), "group": comm}
    arguments |= {"exchange": exchange, "memory": memory}

    def step() -> None:
        functional.max_sim_loss(**arguments).backward()

    return step


def _classify(shapes: Shapes, x: Tensor, options: dict[str, Any], generator: torch.Generator) -> Callable[[], None]:
    head = PartialFC(
        shapes.embedding_size, shapes.classes, margin=CosFace(16.0, 0.1), sample_rate=shapes.sample_rate,
        device=x.device, dtype=shapes.dtype, **options,
    )  # fmt: skip
    labels = torch.randint(shapes.classes, (len(x),), generator=generator).to(x.device)
    dense = shapes.sample_rate == 1
    if dense:
        head.weight.grad = torch.ones_like(head.weight)

    def step() -> None:
        if not dense:
            head.weight.grad = None  # each sample's gradient has other rows
        head(x, labels).backward()

    return step

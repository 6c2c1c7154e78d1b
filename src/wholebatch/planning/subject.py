"""Build the step that is timed: a loss of random features, which is counted on few rows, timed, and measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import functional
from ..comm import Communicator
from ..heads import CosFace, PartialFC
from ..partition import Partition
from ..sweep import Memory
from .declared import call_of, leaves_of, with_options
from .shapes import Shapes, TokenShapes

SCALE, BIAS = 14.3, -10.0
_PER_CLASS = 4  # examples of a class, for losses with labels


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
    rows, d = Partition.even(shapes.batch_size, comm.size).counts[comm.rank], shapes.embedding_size
    generator = torch.Generator().manual_seed(comm.rank)
    options: dict[str, Any] = {"group": comm, "exchange": exchange, "memory": memory}

    def features(count: int) -> Tensor:
        x = normalize(torch.randn(count, d, generator=generator), dim=1)
        return x.to(device, shapes.dtype).requires_grad_()

    if shapes.declared is not None:
        declared, arguments = call_of(
            shapes.declared.source, rows, d, dtype=shapes.dtype, device=device, seed=comm.rank
        )
        loss_fn: Callable[..., Tensor] = with_options(declared, **options, reduction="mean")
        leaves = leaves_of(declared, arguments)
    elif isinstance(shapes, TokenShapes):
        arguments = {"documents_per_query": shapes.documents_per_query, **options}
        for name, side, items, each in (
            ("queries", "query", shapes.items[0], shapes.query_tokens),
            ("documents", "document", shapes.items[1], shapes.document_tokens),
        ):
            lengths = Partition.even(ceil(each * items.counts[comm.rank]), items.counts[comm.rank])
            arguments[name] = features(lengths.total)
            arguments[f"{side}_offsets"] = torch.tensor([*lengths.offsets, lengths.total], device=device)
        leaves = [arguments["queries"], arguments["documents"]]
        arguments["logit_scale"] = torch.tensor(SCALE, device=device, requires_grad=True)
        loss_fn = functional.max_sim_loss
    elif shapes.entry is None:
        return _classify(comm, shapes, features(rows), memory, generator)
    else:
        leaves = [features(rows) for _ in range(shapes.towers)]
        scale = torch.tensor(SCALE, device=device, requires_grad=True)
        arguments = {"scale": scale if shapes.entry.scale_argument == "logit_scale" else SCALE, **options}
        arguments["bias"] = torch.tensor(BIAS, device=device, requires_grad=True)
        if shapes.entry.kind == "labeled":
            arguments["labels"] = torch.arange(rows, device=device) // _PER_CLASS
        loss_fn = partial(shapes.entry.call, functional, *leaves)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    return lambda: loss_fn(**arguments).backward()


def _classify(
    comm: Communicator, shapes: Shapes, x: Tensor, memory: Memory, generator: torch.Generator
) -> Callable[[], None]:
    head = PartialFC(
        shapes.embedding_size, shapes.classes, margin=CosFace(16.0, 0.1), sample_rate=shapes.sample_rate,
        device=x.device, dtype=shapes.dtype, group=comm, memory=memory,
    )  # fmt: skip
    dense = shapes.sample_rate == 1
    if shapes.sample is None:
        labels = torch.randint(shapes.classes, (len(x),), generator=generator).to(x.device)
    else:
        torch.nn.init.ones_(head.weight)  # all centers are equal, as the ranks of a counted step are
        labels = torch.arange(len(x), device=x.device) * shapes.sample // len(x)
    x.grad = torch.ones_like(x)
    if dense:
        head.weight.grad = torch.ones_like(head.weight)

    def step() -> None:
        if not dense:
            head.weight.grad = None  # each sample's gradient has other rows
        head(x, labels).backward()

    return step

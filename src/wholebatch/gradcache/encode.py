"""Representations in the memory of a chunk, for a loss and a backward pass of the caller's.

    r = encode(model, x, 32)        L = any function of r        L.backward()

This is activation checkpointing along the batch: the same gradient, one synchronization, and any number of encoders and
roles in one loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..comm import Group
from ..contract import bind_on_all_ranks
from .grad_cache import ChunkSize, GradCache, first_passes, no_loss
from .kept_graphs import KeepGraphs
from .observe import modules_of
from .same_parameters import History
from .step_loss import with_second_passes

_HISTORIES: weakref.WeakKeyDictionary[nn.Module, History] = weakref.WeakKeyDictionary()  # by a model's first module


@bind_on_all_ranks
def encode(
    model: Callable[..., object],
    model_input: Any,  # whatever the model takes
    chunk_size: ChunkSize,
    *,
    split_input_fn: Callable[[Any, int], Sequence[object]] | None = None,  # takes whatever the model takes
    get_rep_fn: Callable[[Any], object] | None = None,  # takes whatever the model returns
    keep_graphs: KeepGraphs = 0,
    memory_budget: int | None = None,
    group: Group = None,
    unchecked: Iterable[Tensor] = (),
) -> Any:  # a tensor, or the model's tuple of tensors
    r"""Return the representations of a batch that is encoded chunk by chunk, with a graph.

    r = model(x),    dL/dtheta = sum_c (dr_c/dtheta)^T dL/dr_c    over the chunks c, for any L(r)

    The model runs over the chunks without a graph. The backward pass of any loss of r, whoever calls it, runs the model
    again, chunk by chunk, and adds the gradients of its parameters, times whatever gradient comes in. All of this is as
    in :class:`wholebatch.GradCache`, for one model. A loss may use several such r, of one model or of many, beside
    tensors that were not cached; an engine such as DDP synchronizes once in a backward pass.

    Under `torch.no_grad()`, and if the model is frozen, r has no graph, and the model runs once.

    Args:
        model: a module, or a function that calls some.
        model_input: a tensor, a list (the model's arguments), a mapping (its keywords), or (list, mapping). Its rows
            may differ between ranks and may be 0.
        chunk_size: rows of a chunk, or a TokenBudget.
        split_input_fn: as in :class:`wholebatch.GradCache`.
        get_rep_fn: as there.
        keep_graphs: as there.
        memory_budget: as there.
        group: as there.
        unchecked: as there.

    Returns:
        The representations of all rows of this rank, in the form of the model's output: a tensor, or a tuple of such.

    Collective on several ranks: two handshakes, and two in the backward pass, three inside an engine's forward pass.

    Memory: one chunk's graph, the kept graphs, and the representations.

    Raises:
        ValueError: on every rank, whichever rank made the mistake, as in :class:`wholebatch.GradCache`; in the backward
            pass, if it is the second one, if parameters have changed since the forward pass, or if it is
            `torch.autograd.grad`. Gradients of the model are then as they were; parameters of the loss may have theirs.
        RuntimeError: in the backward pass, if the second forward pass differs from the first. Other ranks raise a
            ValueError.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import torch, wholebatch as wb
    >>> encoder, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    >>> r = wb.gradcache.encode(encoder, x, 2)
    >>> r.shape
    torch.Size([8, 2])
    >>> (3 * r.square().sum()).backward()
    >>> encoder.weight.grad.shape
    torch.Size([2, 3])
    """

    def cache() -> GradCache:
        options: dict[str, Any] = {"keep_graphs": keep_graphs, "memory_budget": memory_budget, "unchecked": unchecked}
        return GradCache([model], chunk_size, no_loss, split_input_fn, get_rep_fn, group=group, **options)

    first = next(iter(modules_of(model)), None)
    step = first_passes(
        "gradcache.encode",
        cache,
        [model_input],
        group=group,
        history=History() if first is None else _HISTORIES.setdefault(first, History()),
        deferred=True,
    )
    return step.formed(with_second_passes(step))[0]

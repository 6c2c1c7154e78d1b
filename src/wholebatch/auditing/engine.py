"""A stand-in for the training engine: equal parameters before the step, reduced gradients after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .problem import Problem, modules, parameters


def broadcast_start(problem: Problem, sharded: Sequence[str]) -> None:
    """Give all ranks rank 0's parameters and buffers, except those that are sharded. Collective."""
    if dist.get_world_size() == 1:
        return
    kept = {id(p) for name, p in parameters(problem).items() if name in sharded}
    heads = {name.rpartition(".")[0] for name in sharded}
    for module in modules(problem):
        for p in module.parameters():
            if id(p) not in kept:
                _broadcast(p.data)
        for name, buffer in module.named_buffers():
            if name.rpartition(".")[0] not in heads:
                _broadcast(buffer.data)


def _broadcast(x: Tensor) -> None:
    """Send rank 0's tensor as bytes, because gloo does not send every dtype. Collective."""
    if x.numel():
        sent = x.detach().clone().reshape(-1).view(torch.uint8)
        dist.broadcast(sent, 0)
        x.copy_(sent.view(x.dtype).view(x.shape))


def dense(grads: Mapping[str, Tensor | None], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each parameter's gradient as a dense tensor, 0 where there is none."""
    dense_grads = {}
    for name, p in trained.items():
        grad = grads.get(name)
        dense_grads[name] = torch.zeros_like(p) if grad is None else (grad.to_dense() if grad.is_sparse else grad)
    return dense_grads


def reduce_gradients(engine: str, gradients: Mapping[str, Tensor], sharded: Sequence[str]) -> dict[str, Tensor]:
    """Return the ranks' gradients as the engine reduces them; all rows of sharded parameters. Collective."""
    reduced, size = {}, dist.get_world_size()
    for name, x in gradients.items():
        if name in sharded:
            reduced[name] = _concatenate(x)
        elif engine in ("none", "ddp"):
            reduced[name] = x.detach()
        else:
            summed = x.detach().clone()
            dist.all_reduce(summed)
            reduced[name] = summed / size if engine == "mean" else summed
    return reduced


def differ_from_rank_0(gradients: Mapping[str, Tensor]) -> bool:
    """Return whether this rank's gradients differ from rank 0's. Collective."""
    differ = False
    for x in gradients.values():
        of_rank_0 = x.detach().clone()
        dist.broadcast(of_rank_0, 0)
        differ = differ or not torch.allclose(x, of_rank_0, rtol=1e-9, atol=0)
    return differ


def _concatenate(x: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)

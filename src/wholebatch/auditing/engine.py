"""A stand-in for the training engine: equal parameters before the step, wrapped models, reduced gradients after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..comm import TorchCommunicator
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


def wrap(problem: Problem, sharded: Sequence[str]) -> nn.Module:
    """Return the model as the engine wraps it."""
    model: nn.Module = problem.model
    if not problem.wraps:
        return model
    heads = {name.rpartition(".")[0] for name in sharded}
    buffers = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in heads]
    ignored = [*(name.removeprefix("loss.") for name in sharded), *buffers]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return problem.engine(model) if callable(problem.engine) else DistributedDataParallel(model)


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
        rank_0_grad = x.detach().clone()
        dist.broadcast(rank_0_grad, 0)
        differ = differ or not torch.allclose(x, rank_0_grad, rtol=1e-9, atol=0)
    return differ


def _concatenate(x: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


def make_runnable(model: nn.Module) -> None:
    """Replace each SyncBatchNorm of the model by one for the CPU, which DistributedDataParallel accepts."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _SyncBatchNorm  # type: ignore[assignment]  # has the same state


class _SyncBatchNorm(_BatchNorm):
    """(x - mean) / sqrt(variance + eps) over all ranks' rows and all dimensions but the channel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each channel of (b_r, channels, ...)."""
        if not self.training and self.running_mean is not None and self.running_var is not None:
            mean, variance = self.running_mean, self.running_var
        else:
            # Each rank's loss counts, and the engine averages later: take the adjoint of the sum of the ranks' losses.
            comm = TorchCommunicator(loss="sum")
            others = [dim for dim in range(x.dim()) if dim != 1]
            count = comm.all_reduce(torch.tensor(float(x.numel() // x.shape[1]), dtype=x.dtype, device=x.device))
            mean = comm.all_reduce(x.sum(others)) / count
            variance = comm.all_reduce((x - _expand(mean, x)).square().sum(others)) / count
        normalized = (x - _expand(mean, x)) / (_expand(variance, x) + self.eps).sqrt()
        return normalized if self.weight is None else normalized * _expand(self.weight, x) + _expand(self.bias, x)


def _expand(channel_values: Tensor, x: Tensor) -> Tensor:
    return channel_values.view(1, -1, *[1] * (x.dim() - 2))

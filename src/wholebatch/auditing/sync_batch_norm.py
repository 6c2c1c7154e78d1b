"""torch's SyncBatchNorm runs on GPUs alone; here is what it computes, for CPU processes, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm import TorchCommunicator


def make_runnable(model: nn.Module) -> None:
    """Give each SyncBatchNorm of the model a forward pass for the CPU."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            object.__setattr__(module, "forward", _Forward(module))


class _Forward:
    """(x - mean) / sqrt(variance + eps) over the rows, and what else is not a channel, of all ranks."""

    def __init__(self, module: nn.SyncBatchNorm) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        if not module.training and module.running_mean is not None and module.running_var is not None:
            mean, variance = module.running_mean, module.running_var
        else:
            # The engine averages, and each rank's loss counts: the adjoint is that of the sum of the ranks' losses.
            comm = TorchCommunicator(loss="sum")
            others = [dim for dim in range(x.dim()) if dim != 1]
            count = comm.all_reduce(torch.tensor(float(x.numel() // x.shape[1]), dtype=x.dtype))
            mean = comm.all_reduce(x.sum(others)) / count
            variance = comm.all_reduce((x - _along(mean, x)).square().sum(others)) / count
        made = (x - _along(mean, x)) / (_along(variance, x) + module.eps).sqrt()
        return made if module.weight is None else made * _along(module.weight, x) + _along(module.bias, x)


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))

"""SyncBatchNorm for CPU processes, with its gradient; torch's own runs on GPUs only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm import TorchCommunicator


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


def _expand(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))

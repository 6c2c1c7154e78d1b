"""lightly's losses over the whole batch: its class names, constructors and calls, this library's losses inside.

    loss_fn = NTXentLoss(temperature=0.1)
    loss = loss_fn(out0, out1)

One default is another: `gather_distributed=True`, so that each row is compared with the rows of all processes. Then all
processes return the loss of the global batch, and after the averaging of DDP every parameter has its exact gradient.
With `gather_distributed=False` the rows of each process are compared among themselves, as in lightly by default. The
options group, exchange, memory and precision are those of this library; `group` does not go with
`gather_distributed=False`. Each forward takes this process's rows, (b_r, d), of both views; b_r may differ between
processes, and may be 0 for losses that compare rows.

This module does not import lightly. Any other loss of lightly that compares rows is exact on several processes in
:class:`wholebatch.WholeBatch`, such as `wb.WholeBatch(lightly.loss.KoLeoLoss())`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from ..comm import Group
from ._options import AdaptedLoss

__all__ = ["BarlowTwinsLoss", "DCLLoss", "DCLWLoss", "NTXentLoss", "VICRegLoss"]

_SMALLEST = 1e-8  # lightly refuses a temperature below


class NTXentLoss(AdaptedLoss):
    """lightly's `NTXentLoss`: SimCLR's loss, or MoCo's with a memory bank.

    Without a bank, :class:`wholebatch.NTXentLoss`. With one, :func:`wholebatch.functional.moco_loss` of the normalized
    rows: each row of `out0` has its row of `out1` as positive and the bank as negatives. Then `out1` of all processes
    enters the bank, if `out0` requires a gradient.

    Args:
        temperature: divides the cosines; positive.
        memory_bank_size: (rows, embedding size) of the bank, or 0: none. The bank starts with random rows, rank 0's on
            all processes, and is no part of the state dict, as there.
    """

    temperature: float = 0.5
    memory_bank_size: int | Sequence[int] = 0
    gather_distributed: bool = True

    def prepare(self) -> None:
        _check_temperature("temperature", self.temperature)
        size = _bank_size(self.memory_bank_size)
        self.memory_bank = None if size is None else _MemoryBank(*size, self.group)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the loss of the whole batch."""
        if self.memory_bank is None:
            return wb.functional.nt_xent_loss(out0, out1, temperature=self.temperature, **self.options)
        queries, keys = normalize(out0, dim=1), normalize(out1, dim=1)
        negatives = self.memory_bank.rows().to(queries.dtype)
        options: Any = {name: option for name, option in self.options.items() if name != "exchange"}
        loss = wb.functional.moco_loss(queries, keys, negatives, logit_scale=1 / self.temperature, **options)
        if out0.requires_grad:
            self.memory_bank.enqueue(keys.detach())
        return loss


class _MemoryBank(nn.Module):
    """Rows of earlier batches, the same on all processes that share them, replaced in lightly's order."""

    bank: Tensor
    bank_ptr: Tensor

    def __init__(self, size: int, embedding_size: int, group: Group) -> None:
        super().__init__()
        self.group, self._shared = group, False
        self.register_buffer("bank", normalize(torch.randn(size, embedding_size), dim=-1), persistent=False)
        self.register_buffer("bank_ptr", torch.zeros(1, dtype=torch.int64), persistent=False)

    def rows(self) -> Tensor:
        """Return the bank. Collective at the first call: rank 0's random rows go to all processes."""
        if not self._shared:
            self.bank = wb.comm.select_communicator(self.group).broadcast(self.bank, check=True)
            self._shared = True
        return self.bank

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Write the keys of all processes over the oldest rows; those that do not fit before the end are dropped."""
        keys = wb.comm.select_communicator(self.group).all_gather(keys, check=True)
        first, size = int(self.bank_ptr), len(self.bank)
        last = min(first + len(keys), size)
        bank = self.bank.clone()  # the backward pass needs the bank as it was
        bank[first:last] = keys[: last - first].to(bank)
        self.bank, self.bank_ptr = bank, torch.full_like(self.bank_ptr, last if last < size else 0)


def _bank_size(size: Any) -> tuple[int, int] | None:
    """Return the rows and the embedding size of a bank, or None for none; raise ValueError for another form."""
    if size in (0, (0,), [0]):
        return None
    numbers = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else ()
    if len(numbers) != 2 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(
            f"memory_bank_size must be (rows, embedding size), or 0 for no bank, got {size!r}; a number alone does not "
            "tell the embedding size"
        )
    return None if numbers[0] == 0 else (numbers[0], numbers[1])


class DCLLoss(AdaptedLoss):
    """lightly's `DCLLoss`, by :class:`wholebatch.DCLLoss`.

    Args:
        temperature: divides the cosines; positive.
        weight_fn: must be None.
    """

    temperature: float = 0.1
    weight_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    gather_distributed: bool = True

    def prepare(self) -> None:
        _check_temperature("temperature", self.temperature)
        if self.weight_fn is not None:
            raise ValueError(
                f"weight_fn must be None, got {getattr(self.weight_fn, '__name__', self.weight_fn)!r}: similarities "
                "are computed in tiles; for negative_mises_fisher_weights use DCLWLoss(sigma=...), for another one "
                "wholebatch.WholeBatch(lightly.loss.DCLLoss(weight_fn=...))"
            )

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the loss of the whole batch."""
        return wb.functional.dcl_loss(out0, out1, temperature=self.temperature, **self.options)


class DCLWLoss(DCLLoss, positional="temperature sigma gather_distributed", fixed={"weight_fn": None}):
    """lightly's `DCLWLoss`: positives are weighted by a softmax of their similarity over the whole batch.

    Args:
        temperature: divides the cosines; positive.
        sigma: divides them in the weights; positive.
    """

    sigma: float = 0.5

    def prepare(self) -> None:
        super().prepare()
        _check_temperature("sigma", self.sigma)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the loss of the whole batch."""
        return wb.functional.dcl_loss(out0, out1, temperature=self.temperature, sigma=self.sigma, **self.options)


class _LossOfFeatures(AdaptedLoss, options=("group",)):
    """A loss that compares features; `prepare` makes this library's."""

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        """Return the loss of the whole batch."""
        loss: Any = self.loss
        return loss(z_a, z_b)


class BarlowTwinsLoss(_LossOfFeatures):
    """lightly's `BarlowTwinsLoss`, by :class:`wholebatch.BarlowTwinsLoss`.

    Features are standardized over the rows of all processes. lightly standardizes those of each process alone.

    Args:
        lambda_param: weight of the redundancy term.
    """

    lambda_param: float = 5e-3
    gather_distributed: bool = True

    def prepare(self) -> None:
        self.loss = wb.BarlowTwinsLoss(redundancy=self.lambda_param, group=self.group)


class VICRegLoss(_LossOfFeatures):
    """lightly's `VICRegLoss`, by :class:`wholebatch.VICRegLoss`.

    Args:
        lambda_param, mu_param, nu_param: weights of invariance, variance and covariance.
        eps: added to variances.
    """

    lambda_param: float = 25.0
    mu_param: float = 25.0
    nu_param: float = 1.0
    gather_distributed: bool = True
    eps: float = 0.0001

    def prepare(self) -> None:
        self.loss = wb.VICRegLoss(
            invariance=self.lambda_param,
            variance=self.mu_param,
            covariance=self.nu_param,
            epsilon=self.eps,
            group=self.group,
        )


def _check_temperature(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value < math.inf:
        raise ValueError(f"{name} must be a positive number, at least {_SMALLEST}, got {value!r}")

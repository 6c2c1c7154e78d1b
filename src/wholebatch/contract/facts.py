"""The facts that every rank knows about all ranks once their arguments are valid."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._base.normalize import LONGEST
from .._base.precision import accumulation_dtype, wide_dtype
from ..comm import Communicator
from ..comm.inside import all_gather
from ..kernels import RowNumbers
from ..partition import Partition
from ..sweep import Products
from .deferred import LONGEST_HALF, SHORT, Assumption, Deferred, Values
from .forms import Agreement
from .options import Options

_T = TypeVar("_T")


@dataclass(eq=False, kw_only=True)
class Facts(Agreement, Values):
    """The result of the handshake at the entry of a loss: agreement and numbers of the ranks, and what this call adds.

    Where the host has not read the numbers of a call, which is `deferred` then, they are bounds.
    """

    caller: str  # the loss, for messages
    call: int  # the number of this call, the same on all ranks
    options: Options  # the caller's
    comm: Communicator
    rank: int  # of this process in it
    statistics: bool  # whether the caller has requested statistics of the batch
    # inputs: scalars, features and weights for the autograd nodes. An input that requires a gradient on any rank
    # requires one on this rank, too; the factor of `sync` is applied to it
    inputs: dict[str, Any]
    vectors: dict[str, tuple[Tensor, str]]  # ids, each with the name of the features that they number
    features_dtype: torch.dtype  # dtype of the features in `inputs`
    device: torch.device  # of the features
    row_numbers: RowNumbers | None = None  # the numbers of each row of two features, if kernels have computed them
    deferred: Deferred | None = None  # the call, if the host has not read its numbers
    assumption: Assumption | None = None  # of later calls, if this one has read its numbers

    @property
    def differentiable(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and True in self.needs_grad

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss that the caller gets."""
        return accumulation_dtype(self.given_dtype)

    def factor(self, number: float, x: Any) -> Any:
        """Return a scalar as a factor without gradient: on the host, or where the host has a bound, on the device."""
        return x.detach().reshape(()) if self.deferred is not None and isinstance(x, Tensor) else number

    def factor_of(self, name: str) -> Any:
        """Return one of the scalars, by its name, as such a factor."""
        return self.factor(self.scalars[name], self.inputs[name])

    def in_range(self, *norms: float) -> Facts:
        """Return facts with features in float64 if products of the longest rows would overflow in float32.

        Rows that overflow in float16 are not rounded to it, unless the caller has named that precision. `norms` are the
        largest ones of other rows in the products, over all ranks.

        Raises:
            ValueError: for precision="float16" and rows that it cannot represent.
        """
        longest = max(*self.norms.values(), *norms, 0.0)
        if longest > LONGEST[self.dtype]:
            wide = wide_dtype(self.device)
            if self.dtype == wide:
                return self
            return self.with_(features_dtype=wide, products=Products(), dtype=wide).widened()
        if self.products.half != torch.float16 or longest <= LONGEST_HALF or self.given_dtype == torch.float16:
            return self
        if self.products.named:
            raise ValueError(
                f"{self.caller}: precision='float16' needs rows of a norm up to {LONGEST_HALF:g}, got {longest:.6g}; "
                "normalize the features, or pass precision='bfloat16'"
            )
        return self.with_(products=Products())

    def in_units(self) -> Facts:
        """Return the same facts for a node that scales dS by a unit: under bfloat16 it may then be in float16."""
        if self.products.half != torch.bfloat16:
            return self
        norms = self.norms.values()
        if min(norms) < SHORT or max(norms) > LONGEST_HALF:
            return self
        return self.with_(products=self.products.in_units)

    def with_(self, **changes: Any) -> Facts:
        """Return the same facts but for some fields."""
        facts = object.__new__(Facts)
        facts.__dict__.update(self.__dict__, **changes)
        return facts

    def once(self, name: Hashable, make: Callable[[], _T]) -> _T:
        """Return what `make` returned at the first call of this form; it depends on nothing else."""
        if name not in self.plans:
            self.plans[name] = make()
        plan: _T = self.plans[name]
        return plan

    def widened(self) -> Facts:
        """Return the same facts with features in the dtype of sums.

        If features are used several times, their gradients are then added first and rounded once.
        """
        return self.with_(inputs={n: x.to(self.dtype) if n in self.rows else x for n, x in self.inputs.items()})

    def of_ranks(self, name: str) -> list[Any]:
        """Return one fact of every rank, rank 0's first."""
        return self.by_rank.column(name)

    def all_ids(self, name: str) -> Tensor:
        """Return the ids of all ranks' rows, (B,). Collective: one all-gather of integers."""
        ids, side = self.vectors[name]
        return self.all_gather(ids.to(self.device, torch.int64), self.rows[side])

    @torch.no_grad()
    def all_gather(self, numbers: Tensor, rows: Partition) -> Tensor:
        """Return all ranks' numbers, without gradient: (n_r, ...) -> (n, ...). Collective: one all-gather."""
        if self.comm.size == 1:
            return numbers.detach()
        return all_gather(self.comm, numbers, rows.counts)

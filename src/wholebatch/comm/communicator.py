"""The one protocol that every loss, strategy and exchange speaks.

A collective is a linear map from the inputs of all ranks to the outputs of all ranks, so it has an adjoint A*,
defined by  sum_r <(A x)_r, y_r> = sum_r <x_r, (A* y)_r>  for all x and y. That is the adjoint of the **sum of
the ranks' losses**: `backward()` is called on every rank, each on its own scalar L_r, and every leaf receives
the derivative of sum_r L_r. Where all ranks hold one replicated loss L, that sum is W L; whoever calls these
operations decides what to do with the factor W (`wholebatch.sync` is where the losses do).

    operation        placement            adjoint          placement
    ---------------  -------------------  ---------------  -------------------
    all_gather       sharded -> copies    reduce_scatter   partial -> sharded
    reduce_scatter   partial -> sharded   all_gather       sharded -> copies
    all_reduce(sum)  partial -> copies    all_reduce(sum)  partial -> copies
    broadcast(root)  root -> copies       reduce(root)     partial -> root
    reduce(root)     partial -> root      broadcast(root)  root -> copies

    sharded: each rank holds its own rows      partial: the true value is the sum over ranks
    copies:  each rank holds the same tensor   root:    rank `root` holds it; what others pass counts as zero

A transport implements the `_`-methods: contiguous tensors without gradient in, new tensors out, no autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..partition import Partition
from . import operations
from .handshake import row_counts, same_request


class Communicator(ABC):
    """An ordered set of ranks that call the same operations in the same order."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this process in the communicator, 0 <= rank < size."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks, W."""

    def all_gather(self, x: Tensor, *, counts: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' rows, rank 0 first, on every rank; adjoint: :meth:`reduce_scatter`.

        sharded -> copies.

        Args:
            x: (n_r, ...) on rank r; n_r may differ between ranks and may be 0, the rest may not.
            counts: (n_0, ..., n_{W-1}) where the caller knows them, and knows that dtype and trailing shape agree;
                otherwise a handshake finds out.

        Returns:
            (sum_r n_r, ...).

        Raises:
            ValueError: without `counts`, on every rank, if x has no dimension 0, or dtype or trailing shape differ
                between ranks; with `counts`, on this rank, if they contradict x.
        """
        counts = row_counts(self, x) if counts is None else _checked(counts, self, x, own_rows=True)
        return operations.AllGather.apply(x, self, tuple(counts))

    def reduce_scatter(self, x: Tensor, *, counts: Sequence[int] | None = None, check: bool = True) -> Tensor:
        """Add the ranks' tensors and hand each rank its own rows of the sum; adjoint: :meth:`all_gather`.

        partial -> sharded. Parts are added in the order of the ranks; float16 and bfloat16 in float32.

        Args:
            x: (sum_r n_r, ...), the same shape on every rank.
            counts: (n_0, ..., n_{W-1}), the rows that each rank receives; by default as evenly as possible, the
                remainder going to the first ranks.
            check: whether a handshake first makes sure that all ranks ask for the same; without it, each rank looks
                at its own arguments only.

        Returns:
            (n_r, ...) on rank r.

        Raises:
            ValueError: on every rank, if shape, dtype or `counts` differ between ranks, if `counts` does not have one
                entry per rank, or does not add up to x's rows.
        """
        asked = Partition.even(len(x) if x.dim() else 0, self.size).counts if counts is None else tuple(counts)
        same_request(
            self, x, "reduce_scatter", lambda: {"counts": _checked(asked, self, x, own_rows=False)}, check=check
        )
        return operations.ReduceScatter.apply(x, self, asked)

    def all_reduce(self, x: Tensor, op: str = "sum", *, check: bool = True) -> Tensor:
        """Reduce the ranks' tensors elementwise, the result on every rank; adjoint of the sum: itself.

        partial -> copies. float16 and bfloat16 are summed in float32.

        Args:
            x: the same shape and dtype on every rank.
            op: "sum", which is differentiable, or "max", which is not.
            check: whether a handshake first makes sure that all ranks ask for the same; without it, each rank looks
                at its own arguments only.

        Raises:
            ValueError: on every rank, if shape, dtype or `op` differ between ranks, if `op` is unknown, or is "max"
                while x requires a gradient.
        """
        same_request(self, x, "all_reduce", lambda: {"op": _checked_op(op, x)}, check=check)
        if op == "sum":
            return operations.AllReduce.apply(x, self)
        return self._all_reduce(x.detach().contiguous(), op)

    def broadcast(self, x: Tensor, *, root: int = 0, check: bool = True) -> Tensor:
        """Give every rank the tensor of rank `root`; adjoint: :meth:`reduce`.

        root -> copies. On the other ranks x tells shape and dtype, and its gradient is zero.

        Raises:
            ValueError: on every rank, if shape, dtype or `root` differ between ranks, or `root` is not a rank of this
                communicator. Without `check`, each rank looks at its own arguments only.
        """
        same_request(self, x, "broadcast", lambda: {"root": self._checked_root(root)}, check=check)
        return operations.Broadcast.apply(x, self, root)

    def reduce(self, x: Tensor, *, root: int = 0, check: bool = True) -> Tensor:
        """Add the ranks' tensors, the sum on rank `root` and zeros elsewhere; adjoint: :meth:`broadcast`.

        partial -> root. float16 and bfloat16 are summed in float32.

        Raises:
            ValueError: on every rank, if shape, dtype or `root` differ between ranks, or `root` is not a rank of this
                communicator. Without `check`, each rank looks at its own arguments only.
        """
        same_request(self, x, "reduce", lambda: {"root": self._checked_root(root)}, check=check)
        return operations.Reduce.apply(x, self, root)

    def _checked_root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank of this communicator, 0 to {self.size - 1}; got {root}")
        return root

    @abstractmethod
    def _all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, root: int) -> Tensor: ...

    @abstractmethod
    def _reduce(self, x: Tensor, root: int) -> Tensor: ...


def _checked(counts: Sequence[int], comm: Communicator, x: Tensor, *, own_rows: bool) -> Sequence[int]:
    """Counts have one entry per rank and agree with x: with its own rows, or with all of them."""
    if len(counts) != comm.size:
        raise ValueError(f"counts must have one entry per rank, {comm.size}; got {list(counts)}")
    expected = counts[comm.rank] if own_rows else sum(counts)
    if x.dim() == 0 or len(x) != expected:
        raise ValueError(f"counts {list(counts)} ask for {expected} rows, x has shape {tuple(x.shape)}")
    return counts


def _checked_op(op: str, x: Tensor) -> str:
    if op not in ("sum", "max"):
        raise ValueError(f"op must be 'sum' or 'max', got {op!r}")
    if op == "max" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("op='max' has no gradient here, but x requires one; pass x.detach()")
    return op

"""Fetch rows of other ranks by their index in the global batch, differentiably, with O(b d) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.autograd import once_differentiable
from ..comm import Communicator
from ..partition import Partition


def fetch_rows(comm: Communicator, x: Tensor, rows: Partition, index: Tensor) -> Tensor:
    """Return X[index], where X is the concatenation of all ranks' rows; the gradient is reduced to their owners.

    Returns:
        (k, d). Collective: 1 all-gather of W numbers, 2 all-to-alls; 1 in backward; none on one process.
    """
    return _FetchRows.apply(comm, rows, index, x)


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, rows: Partition, index: Tensor, x: Tensor) -> Tensor:
        ctx.comm, ctx.counts = comm, None
        if comm.size == 1:
            ctx.save_for_backward(x, None, index)
            return x.index_select(0, index)
        order = index.argsort(stable=True)
        ends = torch.tensor(rows.offsets[1:], dtype=torch.int64, device=index.device)
        owners = torch.bucketize(index[order], ends, right=True)
        requests = torch.bincount(owners, minlength=comm.size)
        table = comm.all_gather(requests[None], counts=(1,) * comm.size, check=False)
        from_me, to_me = table[:, comm.rank].tolist(), requests.tolist()
        requested = comm.all_to_all(index[order], send_counts=to_me, receive_counts=from_me, check=False)
        local = requested - rows.offsets[comm.rank]
        fetched = comm.all_to_all(x[local], send_counts=from_me, receive_counts=to_me, check=False)
        ctx.counts = from_me, to_me
        ctx.save_for_backward(x, order, local)
        return torch.empty_like(fetched).index_copy_(0, order, fetched)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        x, order, local = ctx.saved_tensors
        if ctx.counts is not None:
            from_me, to_me = ctx.counts
            grad = ctx.comm.all_to_all(grad[order].contiguous(), send_counts=to_me, receive_counts=from_me, check=False)
        return None, None, None, torch.zeros_like(x).index_add_(0, local, grad)

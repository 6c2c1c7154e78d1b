"""Wrong arguments raise before data moves: on all ranks, or on this rank if they concern no other."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch

import wholebatch as wb

from .registry import case, refused


@case
def mistakes_on_all_ranks(comm):
    """A mistake on one rank raises on every rank, and the communicator works afterward."""
    rank, size = comm.rank, comm.size
    wrong = rank == size - 1
    x, square = torch.randn(rank + 1, 2), torch.randn(4, 2)
    half = 4 // 2
    mistakes = [
        (
            lambda: comm.broadcast(square, size),
            f"root must be a rank of this communicator, 0 to {size - 1}; got {size}",
        ),
        (lambda: comm.gather(square, -1 if wrong else 0), "root must be a rank"),
        (lambda: comm.scatter(square, size), "root must be a rank"),
        (lambda: comm.reduce(square, 1), "op must be one of 'sum', 'avg', 'max', 'min', 'prod'; got 1"),
        (lambda: comm.all_reduce(square, "median" if wrong else "sum"), "op must be one of .* got 'median'"),
        (lambda: comm.iall_reduce(square, "max"), "op must be one of 'sum', 'avg'; got 'max'"),
        (lambda: comm.all_reduce(torch.ones(2).long(), "avg"), "would not be an integer"),
        (lambda: comm.all_reduce(torch.ones(2).bool()), "booleans have no sums"),
        (lambda: comm.all_reduce(torch.ones(2) * 1j, "max"), "not offered for complex"),
        (lambda: comm.all_gather(torch.tensor(1.0) if wrong else x), "x must have at least one dimension"),
        (lambda: comm.all_gather(x, dim=2), "dim must be from -2 to 1"),
        (lambda: comm.all_gather([1.0] if wrong else x), "x must be a tensor, got list"),
        (lambda: comm.all_gather(x.to("meta") if wrong else x), "dense tensor with data"),
        (
            lambda: comm.all_gather(x, counts=[1] * (size + 1)),
            f"one entry per rank, {size}, integers, none neg",
        ),
        (lambda: comm.reduce_scatter(square, counts=[-1] * size), "none negative"),
        (lambda: comm.reduce_scatter(square, counts=[9] + [0] * (size - 1)), "ask for 9 rows, x has shape"),
        (lambda: comm.all_to_all(square, send_counts=[5] + [0] * (size - 1)), "send_counts .* ask for 5 rows"),
        (lambda: comm.all_to_all(square, receive_counts=[7] * size), "receive_counts .* but the ranks send it"),
        (lambda: comm.scatter(None, 0), "must pass the tensor to scatter, got None"),
        (lambda: comm.scatter(square, 0, counts=[3] * size), "ask for .* rows"),
        (lambda: comm.scatter(None, 0, counts=[4] * size, check=False), "without checking, every rank passes a tensor"),
        (lambda: comm.split("left"), "color must be an integer .* or None; got 'left'"),
        (
            lambda: wb.WholeBatch(lambda z: z.sum(), group=comm, strategy="root", root=size)(square),
            "root must be a rank",
        ),
    ]
    if size > 1:
        mistakes += [
            (
                lambda: comm.all_gather(torch.zeros(2, 3 if wrong else 2)),
                r"trailing shape must be the same.*rank 0: \[2\]",
            ),
            (lambda: comm.all_gather(x.double() if wrong else x), "dtype must be the same.*rank 0: torch.float32"),
            (
                lambda: comm.reduce_scatter(square, counts=[4, *[0] * (size - 1)] if wrong else None),
                "counts must be the",
            ),
            (lambda: comm.all_reduce(square.T if wrong else square), r"shape must be the same.*rank 0: \[4, 2\]"),
            (lambda: comm.all_reduce(square, "avg" if wrong else "sum"), "op must be the same"),
            (lambda: comm.all_gather(torch.ones(2, 2), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.gather(torch.ones(2, 2), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.all_to_all(torch.ones(8, 8), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.scatter(torch.ones(8, 8), dim=int(wrong)), "dim must be those of the root, rank 0: 0"),
            (lambda: comm.broadcast(square, int(wrong)), "root must be the same on all ranks"),
            (lambda: comm.scatter(square if rank == 0 else square.double(), 0), "dtype must be those of the root"),
            (
                lambda: comm.scatter(square if rank == 0 else square[:, :1], 0),
                "other dimensions must be those of the root",
            ),
            (
                lambda: comm.reduce(square) if wrong else comm.broadcast(square),
                r"the same calls in the same order, got rank 0: broadcast #\d+ of float32\(4, 2\); .*reduce #\d+ of",
            ),
            (
                lambda: wb.CLIPLoss(group=comm)(square, square, 1.0) if wrong else comm.all_gather(square),
                "the same calls",
            ),
        ]
    assert half == 2
    for position, (call, message) in enumerate(mistakes):
        with refused(message):
            call()
        assert comm.all_reduce(torch.tensor(1)).item() == size, f"still in step after mistake {position}"
    with torch.set_grad_enabled(wrong), refused("is_grad_enabled" if size > 1 else "grad"):
        comm.all_reduce(square.requires_grad_())
        raise ValueError("grad: nothing to disagree about")


@case
def mistakes_on_this_rank(comm):
    """Handles, messages and settings are not collective, so only the rank with the mistake raises."""
    x = torch.randn(3)
    others = LocalOther()
    for call, message in (
        (lambda: comm.send(x, comm.size), "dest must be a rank of this communicator"),
        (lambda: comm.recv(x, -1), "source must be a rank"),
        (lambda: comm.isend(x, 0, tag=-1), "tag must be an integer from 0 to"),
        (lambda: comm.isend(x, 0, tag=2**40), "tag must be an integer from 0 to"),
        (lambda: comm.isend(None, comm.rank), "x must be a tensor, got NoneType"),
        (lambda: comm.wait(3), "handle must be one that this communicator returned, got 3"),
        (lambda: others.comm.wait(others.handle), "handle must be one that this communicator returned"),
        (lambda: wb.comm.LocalCommunicator(loss="mean"), "loss must be one of 'sum', 'replicated'; got 'mean'"),
    ):
        with refused(message):
            call()
    handle = comm.iall_reduce(x)
    handle.wait()
    with refused("iall_reduce .* has been waited for already"):
        comm.wait(handle)
    handle = comm.iall_reduce(y := x.clone())
    y.add_(1)
    with refused("modified in place before", RuntimeError):
        handle.wait()
    with patch.dict(os.environ, WHOLEBATCH_CHECK="yes"), refused("WHOLEBATCH_CHECK must be 0 or 1, got 'yes'"):
        wb.comm.LocalCommunicator()


class LocalOther:
    """A handle of another communicator."""

    def __init__(self):
        self.comm = wb.comm.LocalCommunicator()
        self.handle = wb.comm.LocalCommunicator().iall_reduce(torch.ones(1))
        self.handle.wait()

"""The cases by name, and their helpers: ranks' counts, settings, sums that no communicator under test computes."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch

warnings.filterwarnings("error")
CASES = {}


def case(fn):
    """Register a function of a communicator under its name."""
    CASES[fn.__name__] = fn
    return fn


def run_case(name, comm):
    torch.manual_seed(100 + comm.rank)
    CASES[name](comm)


def splits(size):
    """Return splits that are even, uneven, and with empty parts."""
    return [[2] * size, [(3 * r + 1) % 4 for r in range(size)]]


def with_settings(comm, **settings):
    """Return a communicator of the same ranks with other settings."""
    other = comm.split(0)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


def summed(comm, *values):
    """Sum numbers over ranks by the transport alone."""
    return comm.transport.all_reduce(torch.stack([torch.as_tensor(v).double() for v in values]), "sum")()


def same_on_all(comm, shape, dtype, seed=7):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def receives_first(comm, x):
    """Whether this is the one of two ranks that receives first if each sends x to the other, without tags."""
    return comm.size == 2 and comm.rank == 1 and not comm.transport.keeps_tags(x)


def around(comm, x, like):
    """Send x to the next rank and receive a tensor like `like` from the one before; return the handle and the tensor.

    Without tags, messages of two ranks take place one after the other, so one of the two receives first.
    """
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if receives_first(comm, x):
        y = comm.recv(like, left)
        return comm.isend(x, right), y
    handle = comm.isend(x, right)
    return handle, comm.recv(like, left)


@contextmanager
def refused(message, kind=ValueError):
    with pytest.raises(kind, match=message) as caught:
        yield caught


def drop(handles):
    """Drop the last references."""
    handles.clear()
    gc.collect()

"""The collectives of a step on many ranks with device backends, counted on torch's fake process group.

Every rank is taken to hold the same rows as this one; nothing is sent.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from strict_transport import StrictBackends

import wholebatch as wb
from wholebatch._launch.processes import run_processes
from wholebatch.comm import _c10d, torch_distributed

ROWS, CHUNK = 4, 4  # a chunk of the gather for each rank, where there are chunks


class Done:
    """A handle of c10d, of an operation that has ended."""

    def wait(self):
        return True


class Counted:
    """The functions of `torch.distributed` and `comm._c10d` that move tensors; each call is counted."""

    def __init__(self, module, seen):
        self._module, self._seen = module, seen

    def __getattr__(self, name):
        return getattr(self._module, name)

    def broadcast(self, x, **_):
        self._seen["broadcast"] += 1
        return Done()

    def reduce(self, x, **_):
        self._seen["reduce"] += 1
        return Done()

    def all_reduce(self, x, **_):
        self._seen["all_reduce"] += 1
        return Done()

    def all_gather_single(self, out, x, **_):
        self._seen["all_gather"] += 1
        out.view(-1, *x.shape).copy_(x)
        return Done()

    def reduce_scatter_single(self, out, x, **_):
        self._seen["reduce_scatter"] += 1
        out.copy_(x[: len(out)])
        return Done()

    def all_to_all_single(self, out, x, *_, **__):
        self._seen["all_to_all"] += 1
        out.zero_()
        return Done()


def step(name, size):
    """Return the collectives of the forward pass and of the backward pass."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    seen = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_distributed, "dist", Counted(dist, seen))
        patch.setattr(torch_distributed, "_c10d", Counted(_c10d, seen))
        patch.setattr(torch_distributed, "Backends", StrictBackends)
        patch.setattr("wholebatch.nodes.route.columns_of_a_chunk", lambda *_: CHUNK)
        x, y = (torch.eye(ROWS, 8).roll(turn, 1).requires_grad_() for turn in range(2))
        wb.comm.TorchCommunicator().handshake(dict, caller="before")  # a group's first one compares versions as well
        seen.clear()
        options = {"exchange": "gather"}
        if name == "siglip":
            loss = wb.functional.siglip_loss(x, y, 10.0, -10.0, **options)
        elif name == "clip":
            loss = wb.functional.clip_loss(x, y, 10.0, **options)
        else:
            loss = wb.functional.nt_xent_loss(x, y, **options)
        forward = dict(seen)
        seen.clear()
        loss.backward()
        return forward, dict(seen)


# Forward: the statements, Y, the columns' sums, the loss. Backward: one comparison, the columns' weights, dY.
MANY = {
    "clip": ({"all_gather": 2, "all_reduce": 2}, {"all_gather": 2, "reduce_scatter": 1}),
    "nt_xent": ({"all_gather": 2, "all_reduce": 2}, {"all_gather": 2, "reduce_scatter": 1}),
    "siglip": ({"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}, {"all_gather": 1}),
}
# On up to 8 ranks Y arrives, and dY leaves, in chunks beside the tiles.
EIGHT = {
    "clip": ({"all_gather": 1, "broadcast": 8, "all_reduce": 2}, {"all_gather": 2, "reduce": 8}),
    "nt_xent": ({"all_gather": 1, "broadcast": 8, "all_reduce": 2}, {"all_gather": 2, "reduce_scatter": 1}),
    "siglip": ({"all_gather": 1, "broadcast": 8, "reduce": 8, "all_reduce": 1}, {"all_gather": 1}),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize(("size", "expected"), [(8, EIGHT), (9, MANY), (1024, MANY)], ids=["8", "9", "1024"])
def test_collectives_do_not_grow_with_the_ranks(name, size, expected):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    assert run_processes(step, 1, name, size) == [expected[name]]

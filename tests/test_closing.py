"""Closing communicators over process groups: the groups that end, and the errors on other ranks.

`comm_cases.closing` has the requirements on every communicator.
"""

import gc
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.comm import CommunicationError, TorchCommunicator
from wholebatch.testing import run_ranks

PROC = Path("/proc/self")


def of_the_caller_body():
    group = dist.new_group()
    with TorchCommunicator(group) as comm:
        part = comm.split(0)
        ended = part.transport.group
        part.close()
    with pytest.raises(ValueError, match="has been closed"):
        comm.all_reduce(torch.tensor(1))
    total = torch.tensor(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    with pytest.raises((KeyError, ValueError)):  # torch has forgotten it
        dist.get_process_group_ranks(ended)
    return True


def test_closing_does_not_end_the_callers_group():
    assert run_ranks(of_the_caller_body, 2) == [True, True]


def error_on_one_rank_body():
    comm = TorchCommunicator()
    part = comm.split(0)

    def work():
        with part:
            part.all_reduce(torch.ones(1))
            if comm.rank == 1:
                raise KeyError("planted")
            part.all_reduce(torch.ones(1))

    with pytest.raises(KeyError if comm.rank == 1 else CommunicationError):
        work()
    with pytest.raises(ValueError, match="has been closed"):
        part.all_reduce(torch.ones(1))
    return comm.all_reduce(torch.tensor(1)).item()


def test_an_error_inside_a_part_raises_on_all_ranks():
    """The rank that raises does not wait; the others raise because it left; the whole communicator still works."""
    assert run_ranks(error_on_one_rank_body, 3) == [3, 3, 3]


def error_under_way_body():
    """The operation that has started on rank 0 ends only when rank 1 makes it, too."""
    comm = TorchCommunicator(check=False)
    part = comm.split(0)
    if comm.rank == 0:
        handle = part.iall_reduce(torch.ones(1))
        with pytest.raises(KeyError), part:
            raise KeyError("planted")
        with pytest.raises(ValueError, match="has been closed"):
            part.all_reduce(torch.ones(1))
        assert handle.under_way
        comm.all_reduce(torch.ones(1))
        assert handle.wait().item() == 2, "the operation had started, and its input was kept"
    else:
        comm.all_reduce(torch.ones(1))
        part.iall_reduce(torch.ones(1)).wait()
    return True


def test_an_error_before_a_handle_is_finished_keeps_its_input():
    assert run_ranks(error_under_way_body, 2) == [True, True]


def late_body():
    part = TorchCommunicator().split(0)
    dist.barrier()  # the rank that is first must not destroy the store before the others have their part
    dist.destroy_process_group()
    part.close()
    with pytest.raises(ValueError, match="has been closed"):
        part.all_reduce(torch.ones(1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


def test_a_part_can_be_closed_after_all_groups_have_ended():
    assert run_ranks(late_body, 2) == [True, True]


def elsewhere_body():
    """Use a part where torch's table of group names is missing, as in another release."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholebatch.comm._c10d._NAMING", "no_such_name")
        with TorchCommunicator().split(0) as part:
            return part.all_reduce(torch.tensor(1)).item()


def test_a_torch_without_the_table_of_group_names_works():
    """`parts_of_ranks_with_different_pasts` fails where the table matters."""
    assert run_ranks(elsewhere_body, 2) == [2, 2]


def held():
    """Return the descriptors and threads of this process."""
    return len(os.listdir(PROC / "fd")), len(os.listdir(PROC / "task"))


def use(part):
    """Run a loss, and leave a graph that waits for its backward pass."""
    x = torch.ones(3, 2, requires_grad=True)
    wb.functional.clip_loss(x, x, 1.0, group=part).backward()
    return wb.functional.clip_loss(x, x, 1.0, group=part)


def unclosed_body():
    comm = TorchCommunicator()
    with comm.split(0) as part:  # connections that last are made, code is loaded
        use(part).backward()
    comm.all_reduce(torch.tensor(1))
    before = held()
    for _ in range(3):
        part = comm.split(0)
        loss, during = use(part), held()
        assert all(more > some for more, some in zip(during, before, strict=True)), "there is something to free"
        del part
        gc.collect()
        assert held() == during, "the graph goes through it"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
            child = os.fork()  # it has none of the group's threads, and must not wait for them
        if not child:
            del loss
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()
        del loss
        gc.collect()
        assert held() == before
        assert comm.all_reduce(torch.tensor(1)).item() == comm.size
    part = comm.split(0)
    dist.destroy_process_group()
    del part
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


@pytest.mark.skipif(not PROC.is_dir(), reason="counts descriptors and threads as Linux shows them")
def test_a_part_that_nobody_closed_gives_back_what_it_holds():
    assert run_ranks(unclosed_body, 2, timeout_s=60) == [True, True]


def slow_rank_body():
    comm, store = TorchCommunicator(), dist.distributed_c10d._get_default_store()
    if comm.rank == 1:
        fast = dist.new_group

        def slow(*args, **options):
            group = fast(*args, **options)
            time.sleep(0.5)  # still connecting, as other ranks see it
            store.set("connected", "")
            return group

        dist.new_group = slow
    comm.split(0)
    return store.check(["connected"])


def test_no_rank_leaves_a_split_before_all_are_connected():
    """A part that its first rank drops at once ended the group to which the others were connecting."""
    assert run_ranks(slow_rank_body, 3) == [True] * 3

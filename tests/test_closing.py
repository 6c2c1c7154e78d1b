"""Closing communicators over process groups: the groups that end, and the errors on other ranks.

`comm_cases.closing` has the requirements on every communicator.
"""

import pytest
import torch
import torch.distributed as dist

from wholebatch.comm import CommunicationError, TorchCommunicator
from wholebatch.testing import run_ranks


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

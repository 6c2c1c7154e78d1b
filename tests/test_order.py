"""`Communicator.backward` orders the backward pass: without it, the same graphs hang or give wrong gradients."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from comm_cases.order import branching

from wholebatch.comm import CommunicationError, TorchCommunicator
from wholebatch.testing import RankTimeoutError, run_ranks

TIMEOUT = timedelta(seconds=2)


def branching_body(ordered, check):
    comm = TorchCommunicator(check=check)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = branching(comm, x)
    if ordered:
        comm.backward(loss)
    elif loss is not None:
        loss.backward()


@pytest.mark.planted
@pytest.mark.parametrize("size", [2, 3, 5])
def test_branching_graphs_without_the_order_hang(size):
    run_ranks(branching_body, size, True, False)
    with pytest.raises(RankTimeoutError, match="did not finish"):
        run_ranks(branching_body, size, False, False, timeout_s=3)


@pytest.mark.planted
def test_branching_graphs_without_the_order_are_an_error_with_checking():
    with pytest.raises(Exception, match=r"the same calls in the same order.*adjoint of"):
        run_ranks(branching_body, 2, False, True, timeout_s=5)


def sender_with_another_loss():
    """Rank 0 uses a plain backward pass, which does not reach the message; the plain pass of rank 1 raises."""
    comm = TorchCommunicator()
    if comm.rank == 0:
        x = torch.ones(2, requires_grad=True)
        comm.send(x, 1)
        x.sum().backward()
    else:
        y = comm.recv(torch.empty(2), 0)
        with pytest.raises(RuntimeError, match="cannot take part in the backward pass of messages"):
            y.sum().backward()


def test_messages_need_the_ordered_pass_at_both_ends():
    run_ranks(sender_with_another_loss, 2)


def unreached_body(check):
    """If rank 0 does not call, the others' timeout names their operation and the fix."""
    comm = TorchCommunicator(dist.new_group(timeout=TIMEOUT), check=check)
    if comm.rank == 0:
        dist.barrier()
        return ""
    with pytest.raises(CommunicationError) as caught:
        comm.all_reduce(torch.ones(2))
    dist.barrier()
    return str(caught.value)


def test_a_timeout_names_the_operation_and_a_fix():
    _, message = run_ranks(unreached_body, 2, False)
    assert message.startswith("rank 1 of 2, in all_reduce #1, float32(2): ")
    assert "check=True in the communicator or the environment variable WHOLEBATCH_CHECK=1" in message
    _, message = run_ranks(unreached_body, 2, True)
    assert message.startswith("rank 1 of 2, in all_reduce #1 of float32(2): ")
    assert "one did not call at all" in message


def two_threads_body():
    """Calls of two threads have no common order."""
    from concurrent.futures import ThreadPoolExecutor

    comm = TorchCommunicator()
    x = torch.ones(1, requires_grad=True)
    comm.all_reduce(x)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="give each thread a separate communicator"):
        pool.submit(comm.all_reduce, x).result()


def test_calls_from_two_threads_raise():
    run_ranks(two_threads_body, 2)


def checkpointed_body():
    """Recomputation repeats the operation on all ranks, and leaves no state."""
    from torch.utils.checkpoint import checkpoint

    comm = TorchCommunicator()
    x = torch.arange(3.0, requires_grad=True)
    loss = checkpoint(lambda t: comm.all_reduce(t.sin()).cos().sum(), x, use_reentrant=False)
    comm.backward(loss)
    expected = torch.arange(3.0, requires_grad=True)
    ((comm.size * expected.sin()).cos().sum() * comm.size).backward()
    assert torch.allclose(x.grad, expected.grad / comm.size * 1.0)
    assert not comm._order.waiting()


def test_activation_checkpointing_keeps_the_order():
    run_ranks(checkpointed_body, 2)


def freed_group_body():
    group = dist.new_group()
    comm = TorchCommunicator(group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="has been destroyed; make a new communicator"):
        comm.all_reduce(torch.ones(1))


def test_a_destroyed_group_raises():
    run_ranks(freed_group_body, 2)

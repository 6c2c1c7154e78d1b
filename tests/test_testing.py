"""The harness itself: results come back, failures and hangs do not pass, warnings are errors on every rank."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from wholebatch.testing import RankError, RankTimeoutError, run_ranks


def sum_of_ranks(factor):
    total = torch.tensor([float(dist.get_rank() * factor)], requires_grad=True)
    gathered = total.detach().clone()
    dist.all_reduce(gathered)
    return {"rank": dist.get_rank(), "sum": gathered, "own": total}


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("planted mistake")
    dist.barrier()


def hang_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)


def leave_early_on_rank_1():
    if dist.get_rank() == 1:
        raise SystemExit(3)


def warn():
    warnings.warn("a deprecation that should not pass unseen", FutureWarning, stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_ranks_result_in_order(world_size):
    results = run_ranks(sum_of_ranks, world_size, 2)
    assert [result["rank"] for result in results] == list(range(world_size))
    assert all(result["sum"].item() == 2 * sum(range(world_size)) for result in results)
    assert not any(result["own"].requires_grad for result in results)
    assert not dist.is_initialized()


def test_a_failing_rank_fails_the_call_with_every_traceback():
    with pytest.raises(RankError, match="planted mistake") as caught:
        run_ranks(fail_on_rank_1, 3)
    assert "fail_on_rank_1" in str(caught.value)
    assert all(f"rank {rank}" in str(caught.value) for rank in range(3))


def test_a_hanging_rank_times_out_and_says_where():
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match="timed out after 2 s") as caught:
        run_ranks(hang_on_rank_0, 2, timeout_s=2)
    assert time.monotonic() - start < 30
    assert "in hang_on_rank_0" in str(caught.value)
    assert "barrier" in str(caught.value)


def test_a_rank_that_dies_or_leaves_is_a_failure():
    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(die_on_rank_1, 2)
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(leave_early_on_rank_1, 2)


def test_a_failure_on_one_process_is_its_own_exception():
    with pytest.raises(FutureWarning):
        run_ranks(warn, 1)
    assert not dist.is_initialized()


def test_warnings_are_errors_on_every_rank():
    with pytest.raises(RankError, match="FutureWarning: a deprecation"):
        run_ranks(warn, 2)


def test_local_functions_travel():
    assert run_ranks(lambda x: x + dist.get_rank(), 2, 10) == [10, 11]


def test_mistakes_in_the_call():
    with pytest.raises(ValueError, match="world_size must be an integer from 1 to 1024, ranks on this machine; got 0"):
        run_ranks(sum_of_ranks, 0, 2)
    with pytest.raises(ValueError, match="picklable"):
        run_ranks(sum_of_ranks, 2, (i for i in range(3)))

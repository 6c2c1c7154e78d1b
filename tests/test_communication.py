"""Every case of `comm_cases` on gloo and in one process; `test_mpi` runs them on MPI."""

from functools import cache

import pytest
import torch.distributed as dist
from comm_cases import CASES, FOUR, run_case

from wholebatch.comm import LocalCommunicator, TorchCommunicator
from wholebatch.testing import RankError, run_ranks


def on_gloo(names):
    for name in names:
        run_case(name, TorchCommunicator(dist.new_group()))


SIZES = {name: (1, 2, 3, 4) if name in FOUR else (1, 2, 3) for name in CASES}


@cache
def failure_of_all(size):
    """Return the error of one launch for all cases, each in a group of its own."""
    try:
        run_ranks(on_gloo, size, [name for name, sizes in SIZES.items() if size in sizes], timeout_s=200)
    except RankError as error:
        return error


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_on_gloo(name, size):
    if failure_of_all(size):  # then each case has a launch of its own
        run_ranks(on_gloo, size, [name], timeout_s=40)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_on_gloo_one_after_the_other(size):
    assert failure_of_all(size) is None


@pytest.mark.parametrize("name", CASES)
def test_in_one_process(name):
    assert not dist.is_initialized()
    run_case(name, LocalCommunicator())


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        TorchCommunicator()

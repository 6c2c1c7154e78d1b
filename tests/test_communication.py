"""Every case of `comm_cases` on gloo and in one process; `test_mpi` runs them on MPI."""

import pytest
import torch.distributed as dist
from comm_cases import CASES, FOUR, run_case

from wholebatch.comm import LocalCommunicator, TorchCommunicator
from wholebatch.testing import run_ranks


def on_gloo(name):
    run_case(name, TorchCommunicator())


SIZES = {name: (1, 2, 3, 4) if name in FOUR else (1, 2, 3) for name in CASES}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_on_gloo(name, size):
    run_ranks(on_gloo, size, name, timeout_s=40)


@pytest.mark.parametrize("name", CASES)
def test_in_one_process(name):
    assert not dist.is_initialized()
    run_case(name, LocalCommunicator())


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        TorchCommunicator()

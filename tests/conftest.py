"""Every test starts from the same seed. Without a GPU, kernels run in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

collect_ignore = ["mpi_cases.py", "over_mpi.py"]  # they run under mpiexec, where mpi4py is


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

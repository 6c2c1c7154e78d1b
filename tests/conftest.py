"""Every test starts from the same seed."""

import pytest
import torch

collect_ignore = ["mpi_cases.py", "over_mpi.py"]  # they run under mpiexec, where mpi4py is


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

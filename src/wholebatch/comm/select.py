"""The communicator for the argument `group=`."""

from __future__ import annotations

import os
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._launch.launcher import LAUNCHED_SIZES, launched_processes
from .communicator import Communicator
from .local import LocalCommunicator
from .mpi import MPICommunicator
from .torch_distributed import TorchCommunicator

Group = Communicator | dist.ProcessGroup | DeviceMesh | None


def check_group(group: object) -> None:
    """Raise ValueError unless `select_communicator` may later make a communicator of `group`."""
    known = group is None or isinstance(group, Communicator | dist.ProcessGroup | DeviceMesh)
    from_mpi4py = type(group).__module__.partition(".")[0] == "mpi4py"
    if not known and group is not dist.GroupMember.NON_GROUP_MEMBER and not from_mpi4py:
        raise ValueError(
            "group must be a wholebatch communicator, a torch.distributed.ProcessGroup, a one-dimensional "
            f"DeviceMesh, a communicator of mpi4py or None; got {type(group).__name__}"
        )


def select_communicator(group: object) -> Communicator:
    """Return the communicator that `group` stands for.

    A communicator is itself; a process group or a one-dimensional mesh is a `TorchCommunicator`, mpi4py's communicator
    an `MPICommunicator`; None is the default process group at the time of the call, or this process alone where
    torch.distributed is not initialized.

    Raises:
        ValueError: if `group` is something else, a closed communicator, a group that this rank is not in, or None
            under a launcher of several processes without an initialized process group, or where WORLD_SIZE is no
            number of processes.
    """
    if isinstance(group, Communicator):
        group.transport.check_not_closed()
        return group
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return TorchCommunicator()
        return alone()
    if isinstance(group, dist.ProcessGroup | DeviceMesh) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return TorchCommunicator(group)
    check_group(group)
    return MPICommunicator(group)


@cache
def alone() -> LocalCommunicator:
    """Return the communicator of losses in a process that no launcher has started with others, always the same."""
    for variable in LAUNCHED_SIZES:
        if launched_processes(variable) > 1:
            raise ValueError(
                f"a launcher has started {os.environ[variable]} processes ({variable}), but torch.distributed is "
                "not initialized: each would take its local rows for the whole batch. Call "
                "torch.distributed.init_process_group(), or pass group=wholebatch.comm.MPICommunicator() under "
                "mpiexec, or group=wholebatch.comm.LocalCommunicator()"
            )
    return LocalCommunicator()

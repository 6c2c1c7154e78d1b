"""From what a user passes as `group=` to a communicator."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .communicator import Communicator
from .local import LocalCommunicator
from .torch_distributed import TorchCommunicator

Group = Communicator | dist.ProcessGroup | DeviceMesh | None


def select_communicator(group: object) -> Communicator:
    """The communicator that `group` stands for.

    A communicator is itself; a process group or a one-dimensional mesh is a `TorchCommunicator`; None is the default
    process group at the time of the call, or this process alone where torch.distributed is not initialised.

    Raises:
        ValueError: if `group` is something else, a group that this rank is not in, or None under a launcher of several
            processes without an initialised process group.
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return TorchCommunicator()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"a launcher has started {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), but torch.distributed is "
                "not initialised: each would take its own rows for the whole batch. Call "
                "torch.distributed.init_process_group(), or pass group=wholebatch.comm.LocalCommunicator()"
            )
        return LocalCommunicator()
    if isinstance(group, dist.ProcessGroup | DeviceMesh) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return TorchCommunicator(group)
    raise ValueError(
        "group must be a wholebatch communicator, a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh or "
        f"None; got {type(group).__name__}"
    )

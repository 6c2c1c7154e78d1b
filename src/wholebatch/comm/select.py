"""From what a user passes as `group=` to a communicator."""

from __future__ import annotations

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
        ValueError: if `group` is something else, or a group that this rank is not in.
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        return TorchCommunicator() if dist.is_available() and dist.is_initialized() else LocalCommunicator()
    if isinstance(group, dist.ProcessGroup | DeviceMesh) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return TorchCommunicator(group)
    raise ValueError(
        "group must be a wholebatch communicator, a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh or "
        f"None; got {type(group).__name__}"
    )

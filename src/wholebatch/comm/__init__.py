"""Collectives, messages, and their adjoints. This layer knows nothing of losses.

`communicator` states the operations; `maps` has the table of linear maps and their adjoints, and `nonlinear` the rest;
`nodes` makes them differentiable and `order` keeps the backward pass in the order of the calls. A `transport` moves the
bytes: `torch_distributed`, `mpi` or `local`. `handshake` and `messages` make all ranks agree or all raise.
"""

from .communicator import Communicator
from .handle import Handle
from .handshake import handshake
from .local import LocalCommunicator
from .mpi import MPICommunicator
from .select import Group, select_communicator
from .torch_distributed import TorchCommunicator
from .transport import CommunicationError

__all__ = [
    "CommunicationError",
    "Communicator",
    "Group",
    "Handle",
    "LocalCommunicator",
    "MPICommunicator",
    "TorchCommunicator",
    "handshake",
    "select_communicator",
]

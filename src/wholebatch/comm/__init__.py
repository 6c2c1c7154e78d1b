"""Collectives and their adjoints. This layer knows nothing of losses.

`communicator` states the operations and the table of adjoints, `operations` holds the autograd nodes, one file
per transport (`torch_distributed`, `local`) moves the bytes, and `handshake` makes all ranks agree or all raise.
"""

from .communicator import Communicator
from .handshake import handshake
from .local import LocalCommunicator
from .select import Group, select_communicator
from .torch_distributed import TorchCommunicator

__all__ = [
    "Communicator",
    "Group",
    "LocalCommunicator",
    "TorchCommunicator",
    "handshake",
    "select_communicator",
]

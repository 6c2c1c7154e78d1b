"""Collectives, messages, and their adjoints. This layer knows nothing of losses.

communicator   the operations
handle         a nonblocking operation, to be waited for
select         the communicator that `group=` means

entry          enter a call; row_entry: with rows; message_entry: one end of a message
arguments      checks of one rank's arguments; binding: of a call's signature
handshake      all ranks agree, or all raise; statement: its bytes
messages       both ends of a message agree, or both raise

maps           the table of linear maps and their adjoints; point_to_point: send and receive
nonlinear      maximum, minimum and product
autograd       maps in autograd's graph
order          the backward pass in the order of the calls; call: one of them
compiled       under torch.compile

transport      the interface that moves bytes; wire: the dtypes that it moves
               torch_distributed, mpi (mpi_transport) and local implement it
"""

from .communicator import Communicator
from .handle import Handle
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
    "select_communicator",
]

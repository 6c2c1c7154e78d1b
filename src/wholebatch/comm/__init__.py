"""Collectives, messages, and their adjoints. This layer knows nothing of losses.

communicator        the operations
handle              the result of a nonblocking operation, which must be waited for
select              the communicator for the argument `group=`

entry               checks a call before it starts; message_entry for messages, whose ends agree
arguments           checks of one rank's arguments; binding checks them against the signature
handshake           all ranks agree, or all raise; records has what each rank sends, and the facts of all

maps                the table of linear maps and their adjoints; point_to_point has send and receive
nonlinear           maximum, minimum and product
autograd            maps in autograd's graph
order               a call, and the backward pass in the order of the calls
compiled            collectives under torch.compile

transport           the interface that moves bytes; wire has the dtypes that it moves
torch_distributed   the transport and the communicator over a process group; mpi over MPI; local in one process
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

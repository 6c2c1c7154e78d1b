"""What is positive, what is excluded, which directions count; one loss per file."""

from .clip import CLIPLoss
from .info_nce import InfoNCELoss
from .nt_xent import NTXentLoss
from .siglip import SigLIPLoss
from .whole_batch import WholeBatch

__all__ = ["CLIPLoss", "InfoNCELoss", "NTXentLoss", "SigLIPLoss", "WholeBatch"]

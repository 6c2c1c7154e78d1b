"""The parts of `wholebatch.app` that need torch: tensor files, memory and threads, the losses, a search's figures."""

from .._base.graph import leaves_of
from .._base.precision import accumulation_dtype
from .._base.search import DEPTH as SEARCH_DEPTH
from .._base.search import KS as SEARCH_KS
from .._base.search import are_right, first_ranks, same_places, search_figures
from .._base.tensor_file import TensorFile, is_save_id, new_save_id, write_tensors
from .._measure import free_memory
from ..kernels import choices as kernel_choices
from ..losses.catalog import CATALOG
from ..planning.sizes import LOSSES

__all__ = [
    "CATALOG",
    "LOSSES",
    "SEARCH_DEPTH",
    "SEARCH_KS",
    "TensorFile",
    "accumulation_dtype",
    "are_right",
    "first_ranks",
    "free_memory",
    "is_save_id",
    "kernel_choices",
    "leaves_of",
    "new_save_id",
    "same_places",
    "search_figures",
    "write_tensors",
]

"""The parts of `wholebatch.app` that need torch: files of tensors, memory and threads, and the catalog of losses."""

from .._base.graph import leaves_of
from .._base.precision import accumulation_dtype
from .._base.tensor_file import TensorFile, is_save_id, new_save_id, write_tensors
from .._measure import free_memory, threads_of_a_rank
from ..kernels import choices as kernel_choices
from ..losses.catalog import CATALOG
from ..planning.sizes import LOSSES

__all__ = [
    "CATALOG",
    "LOSSES",
    "TensorFile",
    "accumulation_dtype",
    "free_memory",
    "is_save_id",
    "kernel_choices",
    "leaves_of",
    "new_save_id",
    "threads_of_a_rank",
    "write_tensors",
]

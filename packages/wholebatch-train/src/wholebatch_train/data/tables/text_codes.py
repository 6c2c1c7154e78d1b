"""The texts of a column as numbers of its distinct texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .table import need_pyarrow


def text_codes(column: Any) -> tuple[Any, Tensor]:
    """Return the distinct texts in the order of their first rows, and the place of each row's text among them.

    Args:
        column: an Arrow column of texts or of bytes, of one type.

    Returns:
        An Arrow array, and int64 (n,); -1 for null.
    """
    pa = need_pyarrow()
    column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    codes = column.dictionary_encode()  # chunks share one dictionary
    distinct = codes.chunk(0).dictionary if codes.num_chunks else pa.array([], column.type)
    parts = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype("int64") for chunk in codes.chunks]
    return distinct, torch.cat([torch.empty(0, dtype=torch.int64), *(torch.from_numpy(part) for part in parts)])

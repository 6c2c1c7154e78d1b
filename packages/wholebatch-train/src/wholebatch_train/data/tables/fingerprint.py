"""A hash of the data that a run is trained on, equal on ranks, and in starts of a run, that see the same data."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from .text_codes import text_codes


def digest_of(*parts: str | Tensor | Any) -> str:
    """Return a hash of these parts, in order: words, tensors, and Arrow arrays of texts.

    Texts count by their letters alone, not by the way in which a file or its reader has arranged them.
    """
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            hasher.update(f"{len(part)} {part}".encode())
        elif isinstance(part, Tensor):
            hasher.update(f"{part.dtype} {tuple(part.shape)}".encode())
            hasher.update(part.contiguous().numpy().data if part.numel() else b"")
        else:
            _update(hasher, part)
    return hasher.hexdigest()


def _update(hasher: Any, texts: Any) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    distinct, codes = text_codes(texts)
    lengths = pc.binary_length(distinct).cast(pa.int64()).to_numpy(zero_copy_only=False)
    hasher.update(f"{len(codes)} {len(distinct)}".encode())
    hasher.update(lengths.tobytes())
    _, ends, letters = distinct.buffers()
    if letters is not None:
        is_large = pa.types.is_large_string(distinct.type) or pa.types.is_large_binary(distinct.type)
        ends = np.frombuffer(ends, np.int64 if is_large else np.int32)
        first = int(ends[distinct.offset])
        hasher.update(letters.slice(first, int(lengths.sum())))
    hasher.update(codes.numpy().tobytes())

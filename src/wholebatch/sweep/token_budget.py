"""The memory of a sweep over tokens: how large its tiles and its buffer of products are, and which winners it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt

import torch

from .memory import Budget, Memory

TOKENS_OF_A_PART = 1024  # of queries: with more of them, a part has too few documents
_WINNERS_FOR_EACH_PRODUCT = 2  # entries of a tile's winners, for each entry of its buffer of products
_AT_ONCE, _AT_ONCE_ON_A_GPU = 2**15, 2**20  # winners of which gradients are computed at a time; fewer sort slower


@dataclass(frozen=True)
class TokenBudget(Budget):
    """The memory that a sweep over tokens may allocate; `kept` counts bytes of winners and of S."""

    products: int  # entries of the buffer of products


def pads(device: torch.device) -> bool:
    """Return whether documents of several lengths are padded: many small operations are slow to start on a GPU."""
    return device.type != "cpu"


def at_once(
    tokens: int, documents: int, longest: int, width: int, products: int, device: torch.device
) -> tuple[int, int]:
    """Return how many of a tile's query tokens, and of its documents, have their gradients computed at a time.

    Their gradients have no more numbers than the buffer of products. Their winners are as many as sort fast, and few
    beside a tile; parts are of nearly equal size.

    >>> at_once(5120, 160, 180, 128, 640**2, torch.device("cpu"))
    (2560, 16)
    """
    winners = min(_AT_ONCE_ON_A_GPU if pads(device) else _AT_ONCE, products)
    document_count = min(products // (longest * width), winners // min(max(1, tokens), TOKENS_OF_A_PART))
    document_count = _even_size(documents, max(1, document_count))
    token_count = ceil(tokens / max(1, tokens * document_count // winners))
    return _even_size(tokens, max(1, min(token_count, products // width))), document_count


def _even_size(total: int, most: int) -> int:
    """Return the size of parts of at most `most` that are nearly equal."""
    return ceil(total / ceil(total / most)) if total else 1


def integer_for(longest: int) -> torch.dtype:
    """Return the smallest integer dtype for the place of a token in a document.

    >>> integer_for(256), integer_for(257)
    (torch.uint8, torch.int16)
    """
    return torch.uint8 if longest <= 2**8 else torch.int16 if longest <= 2**15 else torch.int32


def fit_tokens(memory: Memory, *, longest: tuple[int, int], side: int, dtype: torch.dtype, kept: int) -> TokenBudget:
    """Return the budget of one rank.

    Args:
        memory: "auto", "flat", or bytes.
        longest: the most tokens of a query, and of a document.
        side: of a tile whose rows and columns are single vectors; its square is the buffer of products.
        dtype: of products.
        kept: bytes of all winners and entries of S.

    >>> fit_tokens("flat", longest=(32, 180), side=640, dtype=torch.float32, kept=10**9)
    TokenBudget(side=160, kept=0, kept_dtype=torch.uint8, products=409600)
    """
    query, document = max(1, longest[0]), max(1, longest[1])
    products, flat = side * side, bytes_of_flat(longest, side, dtype)
    spare = 0
    if memory == "auto":
        spare = kept if kept <= products * dtype.itemsize else 0
    elif isinstance(memory, int) and memory >= flat:
        spare = min(kept, memory - flat)
    elif isinstance(memory, int):
        products = max(document, products * memory // flat)
    tile_side = max(1, min(side, isqrt(_WINNERS_FOR_EACH_PRODUCT * products // query)))
    return TokenBudget(tile_side, spare, torch.uint8, max(products, document))


def bytes_of_flat(longest: tuple[int, int], side: int, dtype: torch.dtype) -> int:
    """Return the bytes of a buffer of products, of a tile's winners, and of two tiles of S."""
    winners = _WINNERS_FOR_EACH_PRODUCT * side * side
    tiles = 2 * winners // max(1, longest[0])
    return (max(side * side, longest[1]) + tiles) * dtype.itemsize + winners * integer_for(longest[1]).itemsize


def smallest_token_budget(longest_document: int, dtype: torch.dtype) -> int:
    """Return the least bytes: the products of one query token and the longest document, and as much for all else."""
    return 2 * max(1, longest_document) * dtype.itemsize


def bytes_of_winners(tokens: int, documents: int, queries: int, longest: int, dtype: torch.dtype) -> int:
    """Return the bytes of all winners of these query tokens and documents, and of their entries of S."""
    return documents * (tokens * integer_for(longest).itemsize + queries * dtype.itemsize + 16)

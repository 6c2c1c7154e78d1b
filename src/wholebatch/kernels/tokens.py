"""The launcher of late interaction's kernel: from tokens to the best match of each query token in each document."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import launch
from .launch import TileInputs, laid_out, layout


@dataclass(frozen=True)
class TokenTile:
    """Tokens of queries, and of documents."""

    # features: tokens of queries, (R, d), and of documents, (C, d); of its other fields only the precision is read
    features: TileInputs
    # starts: (documents + 1,), int32, contiguous: document j has the tokens from starts[j] up to starts[j + 1], >= 1
    starts: Tensor
    longest: int  # about the most tokens of a document, which decides the size of a block


def token_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> None:
    """Write the largest product of each query token with the tokens of each document.

    Args:
        tile: the tokens.
        out: (R, documents), float32, contiguous.
        winners: (R, documents), contiguous, of an integer dtype, for the place in its document of the first token with
            this product; None: nobody asks.
    """
    from .tiles import tokens

    features, documents = tile.features, len(tile.starts) - 1
    plan = layout("token_maxima", features, document=tile.longest)
    x, y = laid_out(features.x), laid_out(features.y)
    launch.run(  # a program for each block of query tokens and each document
        tokens.token_maxima, -(-len(x) // plan.blocks.rows) * documents, x, y, out, winners, tile.starts,
        len(x), documents, x.shape[1] // plan.aligned, x.stride(0) // plan.aligned, y.stride(0) // plan.aligned,
        SHORT=x.shape[1] <= plan.blocks.depth, **plan.constants,
    )  # fmt: skip

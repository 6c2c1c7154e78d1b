"""The launchers of late interaction: from tokens to best matches and their sums, and from dS to gradients of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import launch
from .launch import ONE_PASS, Layout, TileInputs, laid_out, layout

_DOCUMENTS = 128  # whose sums a program computes


@dataclass(frozen=True)
class TokenTile:
    """Tokens of queries, and of documents."""

    # features: tokens of queries, (R, d), and of documents, (C, d); of its other fields only the precision is read
    features: TileInputs
    # starts: (documents + 1,), int64, contiguous: document j has the tokens from starts[j] up to starts[j + 1], >= 1
    starts: Tensor
    longest: int  # the most tokens of a document


@dataclass(frozen=True)
class TokenWeights:
    """The weights of the tokens that have won."""

    winners: Tensor  # (R, documents), as `token_maxima` writes them
    owners: Tensor  # (R,), the query of each query token, integers
    grad: Tensor  # (queries, documents), float32, dS


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


def token_sums(tile: TokenTile, out: Tensor, best: Tensor, starts: Tensor, first_row: int) -> None:
    """Add the maxima of each query's tokens to S.

    Args:
        tile: the tokens.
        out: (queries, documents), float32 or float64.
        best: (R, documents), float32, contiguous: the maxima of some query tokens.
        starts: (queries + 1,), int64, where the tokens of queries start.
        first_row: the number of tokens before those of `best`.
    """
    from .tiles import tokens

    queries, documents = out.shape
    launch.run(
        tokens.token_sums, queries * -(-documents // _DOCUMENTS), best, starts, out,
        first_row, len(best), documents, *out.stride(), BN=_DOCUMENTS, **ONE_PASS,
    )  # fmt: skip


def query_gradient(tile: TokenTile, out: Tensor, weights: TokenWeights) -> None:
    """Add the gradients of query tokens to `out`, (R, d): each one's winners, times dS. Sums are in float32."""
    from .tiles import tokens

    plan, y = layout("query_gradient", tile.features, document=tile.longest), laid_out(tile.features.y)
    blocks, aligned, (rows, dim) = plan.blocks, plan.aligned, out.shape
    launch.run(  # a program for each block of query tokens and some features
        tokens.query_gradient, -(-rows // blocks.rows) * -(-dim // blocks.depth),
        y, weights.winners, tile.starts, weights.owners, weights.grad, out,
        rows, len(tile.starts) - 1, dim // aligned, y.stride(0) // aligned, *weights.grad.stride(), out.stride(0),
        **_named(plan, "BM", "BK", "ALIGNED"),
    )  # fmt: skip


def document_gradient(tile: TokenTile, out: Tensor, weights: TokenWeights) -> None:
    """Add the gradients of document tokens to `out`, (C, d): query tokens that each has won, times dS; in float32."""
    from .tiles import tokens

    plan, x = layout("document_gradient", tile.features, document=tile.longest), laid_out(tile.features.x)
    blocks, aligned, (rows, dim), documents = plan.blocks, plan.aligned, x.shape, len(tile.starts) - 1
    blocks_of_document, halves = -(-tile.longest // blocks.cols), x.dtype != torch.float32
    constants = _named(plan, "BM", "BN", "BK", "ALIGNED", "PRECISION", "WIDEN")
    if x.dtype == torch.float16 and not launch.interpreted():
        constants |= {"PRECISION": "tf32", "WIDEN": True}  # which represents numbers of float16 and of bfloat16
    launch.run(  # a program for each block of a document's tokens and some features
        tokens.document_gradient, documents * blocks_of_document * -(-dim // blocks.depth),
        x, weights.winners, tile.starts, weights.owners, weights.grad, out,
        rows, documents, blocks_of_document, dim // aligned, x.stride(0) // aligned, *weights.grad.stride(),
        out.stride(0), HALVES=halves, **constants,
    )  # fmt: skip


def _named(plan: Layout, *names: str) -> dict[str, Any]:
    """Return some constants of a layout, and those of the compiler."""
    return {name: plan.constants[name] for name in (*names, "num_warps", "num_stages", "enable_fp_fusion")}

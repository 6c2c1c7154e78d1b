"""The kernel of late interaction: the largest product of each query token over each document's tokens.

    best_tj = max_u q_t . d_u,  winner_tj = the first u that has it        u: the tokens of document j

A program takes some query tokens and one document, whose tokens it goes through; no product is stored. Tokens beyond
the last one repeat it, so that no mask is needed: they change no maximum, and of equal tokens the first one wins.

SHORT: all features of the query tokens fit into one step. They are loaded once, and only documents stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import place_of, similarities


@triton.jit(do_not_specialize=["num_rows", "num_documents"])
def token_maxima(
    x, y, best, winners, starts,
    num_rows, num_documents, dim, stride_x, stride_y,
    SHORT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the maxima, (rows, documents), and with `winners` the places of the tokens that have them."""
    block_row, document = place_of(tl.program_id(0), tl.cdiv(num_rows, BM), num_documents, GROUP)
    rows = block_row * BM + tl.arange(0, BM)
    valid = rows < num_rows
    first, stop = tl.load(starts + document), tl.load(starts + document + 1)
    if SHORT:
        features = tl.arange(0, BK)[None, :]
        known = features < dim * ALIGNED
        of_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * (stride_x * ALIGNED)
        a = tl.load(of_rows + features, mask=known, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    winner = tl.zeros((BM,), tl.int32)
    for start in range(first, stop, BN):
        tokens = start + tl.arange(0, BN)
        if SHORT:
            of_tokens = y + tl.minimum(tokens, stop - 1).to(tl.int64)[:, None] * (stride_y * ALIGNED)
            b = tl.load(of_tokens + features, mask=known, other=0.0)
            if WIDEN:
                b = b.to(tl.float32)
            products = tl.dot(a, tl.trans(b), input_precision=PRECISION)
        else:
            products = similarities(
                x, y, block_row * BM, start, num_rows, stop, dim, stride_x, stride_y,
                BM, BN, False, ALIGNED, BK, PRECISION, WIDEN,
            )  # fmt: skip
        of_block = tl.max(products, 1)
        if winners is not None:
            among = tl.where(products == of_block[:, None], tokens[None, :], stop)
            winner = tl.where(of_block > largest, tl.min(among, 1) - first, winner)
        largest = tl.maximum(largest, of_block)
    offsets = rows.to(tl.int64) * num_documents + document
    tl.store(best + offsets, largest, mask=valid)
    if winners is not None:
        last = stop - first - 1  # of whose copies one could have won only if equal products differed
        tl.store(winners + offsets, tl.minimum(winner, last).to(winners.dtype.element_ty), mask=valid)

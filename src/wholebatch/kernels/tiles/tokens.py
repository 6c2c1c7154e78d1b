"""The kernels of late interaction: the largest product of each query token over each document's tokens, and gradients.

    best_tj = max_u q_t . d_u,  winner_tj = the first u that has it        u: the tokens of document j
    S_ij = sum_t best_tj        dQ_t = sum_j dS_ij d_w        dD_u = sum_tj dS_ij q_t where u has won    t: of query i

A program of `token_maxima` takes some query tokens and one document, whose tokens it goes through; no product is
stored. Tokens beyond the last one repeat it, so that no mask is needed: they change no maximum, and of equal tokens the
first one wins. SHORT: all features of the query tokens fit into one step. They are loaded once, and only documents
stream.

Each number of a gradient has one program, which adds its terms in their order: a call gives the same bits each time.
`query_gradient` loads the winners of some query tokens. `document_gradient` goes through all query tokens, and
multiplies them by a matrix that holds their weights where a token of its block has won. This matrix is the second
factor of the product, because the first one may come from registers, which some versions of ptxas compile wrongly.
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
    first, stop = tl.load(starts + document).to(tl.int32), tl.load(starts + document + 1).to(tl.int32)
    if SHORT:
        features = tl.arange(0, BK)[None, :]
        known = features < dim * ALIGNED
        query_pointers = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * (stride_x * ALIGNED)
        a = tl.load(query_pointers + features, mask=known, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    winner = tl.zeros((BM,), tl.int32)
    for start in range(first, stop, BN):
        tokens = start + tl.arange(0, BN)
        if SHORT:
            token_pointers = y + tl.minimum(tokens, stop - 1).to(tl.int64)[:, None] * (stride_y * ALIGNED)
            b = tl.load(token_pointers + features, mask=known, other=0.0)
            if WIDEN:
                b = b.to(tl.float32)
            products = tl.dot(a, tl.trans(b), input_precision=PRECISION)
        else:
            products = similarities(
                x, y, block_row * BM, start, num_rows, stop, dim, stride_x, stride_y,
                BM, BN, False, ALIGNED, BK, PRECISION, WIDEN,
            )  # fmt: skip
        block_maxima = tl.max(products, 1)
        if winners is not None:
            among = tl.where(products == block_maxima[:, None], tokens[None, :], stop)
            winner = tl.where(block_maxima > largest, tl.min(among, 1) - first, winner)
        largest = tl.maximum(largest, block_maxima)
    offsets = rows.to(tl.int64) * num_documents + document
    tl.store(best + offsets, largest, mask=valid)
    if winners is not None:
        last = stop - first - 1  # of whose copies one could have won only if equal products differed
        tl.store(winners + offsets, tl.minimum(winner, last).to(winners.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_documents"])
def token_sums(
    best, starts, out, first_row, num_rows, num_documents, stride_query, stride_document, BN: tl.constexpr,
):  # fmt: skip
    """Add the maxima of each query's tokens, among those from `first_row` on, to S."""
    query, block = tl.program_id(0) // tl.cdiv(num_documents, BN), tl.program_id(0) % tl.cdiv(num_documents, BN)
    documents = block * BN + tl.arange(0, BN)
    valid = documents < num_documents
    first = tl.maximum(tl.load(starts + query).to(tl.int32) - first_row, 0)
    stop = tl.minimum(tl.load(starts + query + 1).to(tl.int32) - first_row, num_rows)
    place = out + query.to(tl.int64) * stride_query + documents.to(tl.int64) * stride_document
    total = tl.load(place, mask=valid, other=0.0)
    maxima = best + first.to(tl.int64) * num_documents + documents
    for _ in range(first, stop):
        total += tl.load(maxima, mask=valid, other=0.0)
        maxima += num_documents
    tl.store(place, total, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_documents"])
def query_gradient(
    y, winners, starts, owners, grad, out,
    num_rows, num_documents, dim, stride_y, stride_query, stride_document, stride_out,
    BM: tl.constexpr, BK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of query tokens to `out`, (rows, features)."""
    parts = tl.cdiv(dim * ALIGNED, BK)
    rows = tl.program_id(0) // parts * BM + tl.arange(0, BM)
    features = tl.program_id(0) % parts * BK + tl.arange(0, BK)
    valid = rows < num_rows
    known = valid[:, None] & (features < dim * ALIGNED)[None, :]
    weights = grad + tl.load(owners + rows, mask=valid, other=0)[:, None].to(tl.int64) * stride_query
    places = winners + rows.to(tl.int64)[:, None] * num_documents
    into = out + rows.to(tl.int64)[:, None] * stride_out + features[None, :]
    total = tl.load(into, mask=known, other=0.0).to(tl.float32)
    for document in range(num_documents):
        winner = tl.load(places + document, mask=valid[:, None], other=0).to(tl.int64) + tl.load(starts + document)
        weight = tl.load(weights + document * stride_document, mask=valid[:, None], other=0.0)
        token = tl.load(y + winner * (stride_y * ALIGNED) + features[None, :], mask=known, other=0.0)
        total += weight * token.to(tl.float32)
    tl.store(into, total, mask=known)


@triton.jit(do_not_specialize=["num_rows", "num_documents", "blocks"])
def document_gradient(
    x, winners, starts, owners, grad, out,
    num_rows, num_documents, blocks, dim, stride_x, stride_query, stride_document, stride_out,
    HALVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of document tokens to `out`, (tokens, features), by blocks of a document's tokens.

    HALVES: weights are multiplied as two numbers of bfloat16, which hold 16 bits; WIDEN: converted to float32.
    """
    parts = tl.cdiv(dim * ALIGNED, BK)
    features = tl.program_id(0) % parts * BK + tl.arange(0, BK)
    block, document = tl.program_id(0) // parts % blocks, tl.program_id(0) // parts // blocks
    start, stop = tl.load(starts + document), tl.load(starts + document + 1)
    places = block * BN + tl.arange(0, BN)
    if start + block * BN < stop:
        known = features < dim * ALIGNED
        total = tl.zeros((BK, BN), tl.float32)
        for row in range(0, num_rows, BM):
            rows = row + tl.arange(0, BM)
            valid = rows < num_rows
            token = x + rows.to(tl.int64)[None, :] * (stride_x * ALIGNED) + features[:, None]
            tokens = tl.load(token, mask=known[:, None] & valid[None, :], other=0.0)
            winner = tl.load(winners + rows.to(tl.int64) * num_documents + document, mask=valid, other=0).to(tl.int32)
            owner = tl.load(owners + rows, mask=valid, other=0).to(tl.int64)
            weight = tl.load(grad + owner * stride_query + document * stride_document, mask=valid, other=0.0)
            chosen = tl.where(winner[:, None] == places[None, :], weight[:, None], 0.0)
            if WIDEN:
                tokens = tokens.to(tl.float32)
            if HALVES:
                high = chosen.to(tl.bfloat16)
                low = (chosen - high.to(tl.float32)).to(tl.bfloat16)
                total = tl.dot(tokens, high.to(tokens.dtype), total, input_precision=PRECISION)
                total = tl.dot(tokens, low.to(tokens.dtype), total, input_precision=PRECISION)
            else:
                total = tl.dot(tokens, chosen, total, input_precision=PRECISION)
        into = out + (start + places).to(tl.int64)[None, :] * stride_out + features[:, None]
        mask = known[:, None] & (start + places < stop)[None, :]
        tl.store(into, tl.load(into, mask=mask, other=0.0).to(tl.float32) + total, mask=mask)

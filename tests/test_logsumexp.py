"""The running pair equals torch.logsumexp however the numbers are cut up, and stays finite where exp would not."""

import math

import torch
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.logsumexp import LogSumExp


def absorb_in_pieces(logits, widths):
    pairs = LogSumExp.empty(len(logits), dtype=logits.dtype, device=logits.device)
    for piece in logits.split(widths, dim=1):
        pairs.absorb(piece, dim=1, at=slice(0, len(logits)), scratch=torch.empty_like(piece))
    return pairs


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.sampled_from([1.0, 30.0, 1e4]), st.integers(0, 99))
def test_any_cut_gives_the_whole(widths, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, sum(widths), dtype=torch.float64, generator=generator)
    assert_same(absorb_in_pieces(logits, widths).value(), logits.logsumexp(1), relative=1e-14, what="logsumexp")


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 99))
def test_two_ranks_merge_by_a_maximum_and_a_sum(left, right, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 50 * torch.randn(4, left + right, dtype=torch.float64, generator=generator)
    a, b = absorb_in_pieces(logits[:, :left], [left]), absorb_in_pieces(logits[:, left:], [right] if right else [])
    shift = torch.maximum(a.shift, b.shift)
    a.rescale_(shift)
    b.rescale_(shift)
    merged = LogSumExp(shift, a.sum + b.sum)
    assert_same(merged.value(), logits.logsumexp(1), relative=1e-14, what="merged")


def test_large_logits_neither_overflow_nor_vanish():
    logits = torch.tensor([[1e4, 1e4 - 1], [-1e4, -1e4 - 1]])
    assert logits.exp().sum(1).tolist() == [math.inf, 0.0], "the plain sum fails on these"
    assert_same(absorb_in_pieces(logits, [1, 1]).value(), logits.double().logsumexp(1), relative=1e-7)


def test_nothing_absorbed_is_minus_infinity():
    pairs = LogSumExp.empty(2, dtype=torch.float32, device=torch.device("cpu"))
    pairs.rescale_(torch.tensor([float("-inf"), 3.0]))
    assert pairs.value().tolist() == [-math.inf, -math.inf]

"""One shift for all rows if the underflow check passes, else each row's maximum: never an overflow, never log(0)."""

import math

import pytest
import torch
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.logsumexp import cannot_underflow, count_underflowed, log_sum_exp, passes_underflow_check, shared_shift


@given(st.floats(0, 1e6, exclude_max=True), st.integers(1, 2**21), st.sampled_from([torch.float32, torch.float64]))
def test_no_sum_overflows(bound, terms, dtype):
    shift = shared_shift(bound, terms, dtype)
    largest_sum = bound - shift + math.log(terms)
    assert largest_sum < math.log(torch.finfo(dtype).max)
    assert shift == int(shift), "a whole number leaves the large logits exact"


@given(st.sampled_from([1.0, 14.3, 60.0, 100.0, 200.0]), st.floats(-1, 1), st.integers(0, 99))
def test_sums_that_pass_the_underflow_check_are_exact(scale, center, seed):
    """For logits anywhere within the bound, the check either refuses, or passes and the result is right."""
    generator = torch.Generator().manual_seed(seed)
    cosines = (center + 0.2 * torch.randn(5, 40, dtype=torch.float64, generator=generator)).clamp(-1, 1)
    logits = (scale * cosines).float()
    shift = shared_shift(scale, 40, torch.float32)
    sums = (logits - shift).exp().sum(1)
    passed = [not count_underflowed(sums[row : row + 1], 40, torch.float32) for row in range(5)]
    known = cannot_underflow(scale, shift, torch.float32)
    for row, true in enumerate(logits.double().logsumexp(1)):
        if passed[row] or known:
            # A difference of a logit and the shift, up to 128 where its exponential counts, is rounded to 2**-18.
            assert_same(log_sum_exp(shift, sums.double())[row], true, relative=1e-6, absolute=2.0**-18)
        if passes_underflow_check(logits[row, 7].item(), shift, 40, torch.float32):
            assert passed[row], "a bound that is known in advance also holds for the sum"
    if center >= -0.3 and scale <= 100:
        assert all(passed), "cases of ordinary training need no fallback"


def test_the_underflow_check_refuses_sums_that_an_obvious_shift_loses():
    """With the largest possible logit as the shift, rows near cosine 0 underflow to log(0) at scale 100."""
    logits = 100 * torch.tensor([[0.01, 0.02, -0.01]])
    naive = (logits - 100.0).exp().sum(1)
    assert count_underflowed(naive, 3, torch.float32) == 1
    assert (log_sum_exp(100.0, naive) - logits.logsumexp(1)).abs().item() > 1e-6
    shift = shared_shift(100.0, 3, torch.float32)
    ours = (logits - shift).exp().sum(1)
    assert count_underflowed(ours, 3, torch.float32) == 0
    assert_same(log_sum_exp(shift, ours), logits.logsumexp(1), relative=1e-6)


@given(st.floats(0, 100), st.integers(1, 2**21))
def test_the_known_bound_leaves_room_for_weights(bound, terms):
    """Gradients have weights 1 / sum, times a scaler's factor: these must be finite in float32."""
    shift = shared_shift(bound, terms, torch.float32)
    if cannot_underflow(bound, shift, torch.float32):
        assert 2.0**20 / math.exp(-bound - shift) < torch.finfo(torch.float32).max


def test_nan_does_not_pass_the_underflow_check():
    assert count_underflowed(torch.tensor([1.0, math.nan]), 2, torch.float32) == 1


@pytest.mark.parametrize("bound", [1e7, math.inf, math.nan])
def test_without_a_bound_there_is_no_shared_shift(bound):
    assert shared_shift(bound, 3, torch.float32) is None


def test_rows_with_a_shift_each():
    logits = torch.tensor([[1e4, 1e4 - 1], [-1e4, -1e4 - 1]])
    assert logits.exp().sum(1).tolist() == [math.inf, 0.0], "the plain sum fails on these"
    shift = logits.amax(1)
    sums = (logits - shift[:, None]).exp().sum(1)
    assert_same(log_sum_exp(shift, sums), logits.double().logsumexp(1), relative=1e-7)

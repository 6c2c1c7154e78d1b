"""Results do not depend on the order and split of rows over ranks, tile size, budget or exchange."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loss_cases import LOSSES, gradients, rows_of, whole_batch

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.nodes import route
from wholebatch.testing import run_ranks

# Every rank draws the same examples from the same seed, and no rank searches for a smaller example alone.
together = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
some_rows = st.integers(0, 6)


def assert_alike(case, counts, order, reference_features, options, side):
    """Raise unless another order and split of rows gives the same loss, and the same gradient of each row."""
    whole = [z[order] if len(z) == len(order) else z for z in reference_features]
    local = {"group": wb.comm.LocalCommunicator(), "sync": "sum", "memory": "flat"}
    scale = torch.tensor(9.0, dtype=torch.float64)
    expected = gradients(case, wb.functional, reference_features, scale, **local)
    rows = rows_of(case, counts, dist.get_rank())
    local = [z[at] for z, at in zip(whole, rows, strict=True)]
    with patch.object(route, "default_side", lambda _device: side):
        actual = gradients(case, wb.functional, local, scale, sync="sum", **options)
    assert_same(actual[0], expected[0], relative=1e-12)
    for position, at in enumerate(rows, start=1):
        moved = expected[position][order] if len(expected[position]) == len(order) else expected[position]
        size = moved.abs().max().item() if moved.numel() else 0.0
        assert_same(actual[position], moved[at], relative=0, absolute=1e-11 * size, what=str((counts, options)))


def body(name):
    case = LOSSES[name]

    @together
    @given(
        counts=st.tuples(some_rows, some_rows, some_rows).filter(any),
        exchange=st.sampled_from(USED_EXCHANGES),
        side=st.integers(1, 9),
        kept=st.integers(0, 200),
        randomness=st.randoms(use_true_random=False),
    )
    def check(counts, exchange, side, kept, randomness):
        order = list(range(sum(counts)))
        randomness.shuffle(order)
        features = whole_batch(case, counts, seed=randomness.randrange(1000))
        options = {"exchange": exchange, "memory": 2 * side * side * 8 + 8 * kept}
        assert_alike(case, counts, torch.tensor(order), features, options, side)

    check()
    return True


@pytest.mark.parametrize("name", ["clip", "info_nce, few negatives", "nt_xent", "siglip"])
def test_results_do_not_depend_on_splits_tiles_budget_or_exchange(name):
    assert all(run_ranks(body, 3, name, timeout_s=120))

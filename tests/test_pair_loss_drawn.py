"""Declarations drawn from a grammar equal autograd on the dense matrix, on one, two and three ranks."""

import os

import pytest
import torch.distributed as dist
from pair_grammar import drawn
from pair_losses import cut, gradients, part
from test_pair_loss import distance

import wholebatch as wb
from wholebatch.testing import run_ranks

COUNT = 300 if os.environ.get("WHOLEBATCH_TEST_PAIRS") == "all" else 60
OPTIONS = ({"exchange": "gather"}, {"exchange": "ring"}, {"memory": 512}, {"exchange": "ring", "sync": "sum"})
SPLITS = {1: [(6,), (1,)], 2: [(3, 4), (0, 1), (7, 0)], 3: [(2, 0, 4), (1, 1, 1), (0, 0, 1)]}


def cases(world):
    return [(seed, SPLITS[world][seed % len(SPLITS[world])], OPTIONS[seed % len(OPTIONS)]) for seed in range(COUNT)]


def of_rank(world):
    found = []
    for seed, counts, options in cases(world):
        declaration, batch = drawn(seed, sum(counts))
        at = cut(counts, dist.get_rank())
        try:
            found.append(gradients(wb.PairLoss(**declaration, **options), part(batch, at, at)))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {counts}") from error
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drawn_declarations_equal_the_dense_matrix(world):
    found = run_ranks(of_rank, world, world, timeout_s=300)
    wrong = []
    for at, (seed, counts, options) in enumerate(cases(world)):
        declaration, batch = drawn(seed, sum(counts))
        expected = gradients(wb.PairLoss(**declaration).reference, batch)
        error = distance([of[at] for of in found], batch, expected, counts, options.get("sync", "mean"))
        if not error < 1e-10:
            wrong.append((seed, counts, options, error))
    assert not wrong

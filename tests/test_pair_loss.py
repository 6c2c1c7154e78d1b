"""wb.PairLoss: declared losses have the value and the gradients of one dense matrix, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from pair_losses import DECLARATIONS, batch_for, cut, gradients, leaves, part

from wholebatch.testing import run_ranks

SPLITS = [(7,), (4, 3), (0, 5, 2), (1, 3, 0, 3)]


def of_rank(jobs):
    """Return loss and gradients of this rank's part of each batch."""
    found = []
    for name, counts, seed, options in jobs:
        batch = batch_for(name, sum(counts), sum(counts), seed)
        at = cut(counts, dist.get_rank())
        found.append(gradients(DECLARATIONS[name](**options), part(batch, at, at)))
    return found


def distance(found, batch, expected, counts, sync):
    """Return the largest difference of value and gradients, relative to the largest gradient of each."""
    value, grads = expected
    most = max((abs(of_rank[0] - value).item() / max(1, abs(value).item()) for of_rank in found), default=0)
    for name in leaves(batch):
        shared = name.startswith("parameters")
        parts = [of_rank[1][name] for of_rank in found]
        if shared:
            got = parts[0] if sync == "mean" else sum(parts)
        else:
            got = torch.cat(parts) / (len(counts) if sync == "mean" else 1)
        most = max(most, ((got - grads[name]).abs().max() / grads[name].abs().max().clamp(min=1e-3)).item())
    return most


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_ranks_have_the_gradients_of_one_dense_matrix(counts):
    options = [{"exchange": "gather"}, {"exchange": "ring"}, {"exchange": "ring", "sync": "sum"}, {"memory": 128}]
    jobs = [(name, counts, seed, option) for name in DECLARATIONS for seed, option in enumerate(options)]
    found = run_ranks(of_rank, len(counts), jobs)
    for at, (name, _, seed, option) in enumerate(jobs):
        batch = batch_for(name, sum(counts), sum(counts), seed)
        loss_fn = DECLARATIONS[name](**option)
        expected = gradients(loss_fn.reference, batch)
        error = distance([of[at] for of in found], batch, expected, counts, option.get("sync", "mean"))
        assert error < 1e-10, (name, option, error)


SYMMETRIC = ["multi_similarity", "hard_triplet", "sup_con"]


@pytest.mark.parametrize("counts", [*SPLITS, (3, 3, 3, 3)], ids=str)
def test_half_of_a_symmetric_matrix_suffices(counts):
    options = [{"exchange": "gather"}, {"exchange": "ring"}, {"memory": 128}]
    jobs = [(name, counts, seed, {"symmetric": True, **option}) for name in SYMMETRIC for seed, option in enumerate(options)]
    found = run_ranks(of_rank, len(counts), jobs)
    for at, (name, _, seed, option) in enumerate(jobs):
        batch = batch_for(name, sum(counts), sum(counts), seed)
        expected = gradients(DECLARATIONS[name]().reference, batch)
        assert distance([of[at] for of in found], batch, expected, counts, "mean") < 1e-10, (name, option)

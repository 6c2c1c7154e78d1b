"""The library's losses, declared: equal to the built-in ones in value and in every gradient, on any number of ranks."""

import inspect

import declared
import pytest
import torch
import torch.distributed as dist

from wholebatch.testing import run_ranks

OPTIONS = [
    {"exchange": "gather"},
    {"exchange": "ring"},
    {"exchange": "ring", "sync": "sum"},
    {"exchange": "gather", "sync": None},
]
KEYS, FEATURES = ("v", "w", "n", "scale", "bias"), 3


def both_of_rank(counts):
    """Return values and gradients of the declared and the given loss, for each name and option."""
    found = []
    for name in declared.NAMES:
        for options in OPTIONS:
            results = []
            for which in (0, 1):
                data = declared.data_of(counts, dist.get_rank())
                loss = declared.declared_and_given(name, data, options)[which]
                loss.backward()
                leaves = [data[key] for key in KEYS]
                results.append((loss.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]))
            found.append(results)
    return found


@pytest.mark.parametrize("counts", [(7,), (4, 3), (0, 5, 2), (1, 3, 0, 3)], ids=str)
def test_declared_losses_are_the_built_in_ones(counts):
    cases = [(name, options) for name in declared.NAMES for options in OPTIONS]
    by_rank = run_ranks(both_of_rank, len(counts), counts, timeout_s=120)
    for (name, options), *of_ranks in zip(cases, *by_rank, strict=True):
        for (value, grads), (expected, wanted) in of_ranks:
            assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12), (name, options, value, expected)
            for grad, want in zip(grads[:FEATURES], wanted[:FEATURES], strict=True):
                assert torch.allclose(grad, want, rtol=1e-10, atol=1e-10), (name, options)
        # The share of a scalar's gradient that a rank holds is its own affair: all together have the gradient.
        for at in range(FEATURES, len(of_ranks[0][0][1])):
            grad, want = (sum(of_rank[which][1][at] for of_rank in of_ranks) for which in (0, 1))
            assert torch.allclose(grad, want, rtol=1e-10, atol=1e-10), (name, options)


@pytest.mark.parametrize("name", declared.NAMES)
def test_a_declaration_has_at_most_twelve_lines(name):
    lines = inspect.getsource(getattr(declared, name)).splitlines()[1:]
    assert len([line for line in lines if line.strip() and '"""' not in line]) <= 12

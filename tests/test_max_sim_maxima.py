"""Maxima of token scores and their first places, found as integers, against `torch.max`."""

import pytest
import torch

from wholebatch.sweep.maxima import finite, maxima

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
SHAPES = {
    "one length": [(3, 17)],
    "runs": [(2, 5), (1, 40), (4, 3)],
    "single tokens": [(6, 1)],
    "long": [(1, 3000), (2, 2)],
}


def expected(scores, shapes):
    best, places, first = [], [], 0
    for count, length in shapes:
        for _ in range(count):
            found = scores[:, first : first + length].max(1)
            best.append(found.values)
            places.append(found.indices)
            first += length
    return torch.stack(best, 1), torch.stack(places, 1)


def scores_of(kind, shapes, dtype):
    made = torch.Generator().manual_seed(len(kind))
    columns = sum(count * length for count, length in shapes)
    x = torch.randn(50, columns, generator=made, dtype=dtype)
    return {
        "random": x,
        "negative": -x.abs() - 1,
        "ties": (2 * x).round(),  # with 0.0 and -0.0
        "equal": torch.full_like(x, -3),
        "tiny": x * torch.finfo(dtype).tiny / 64,  # denormal: their differences are, too
        "huge": x * torch.finfo(dtype).max / 100,
        "zeros of both signs": torch.where(x > 0, 0.0, -0.0).to(dtype),
    }[kind]


@FLOATS
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["random", "negative", "ties", "equal", "tiny", "huge", "zeros of both signs"])
@pytest.mark.parametrize("integers", [True, False])
def test_maxima_and_their_first_places_are_those_of_torch(kind, shapes, dtype, integers):
    scores = scores_of(kind, shapes, dtype)
    best, places = expected(scores, shapes)
    alone, nowhere = maxima(scores.clone(), shapes, places=False, integers=integers)
    found, where = maxima(scores.clone(), shapes, places=True, integers=integers)
    assert nowhere is None
    assert torch.equal(alone, best)
    assert torch.equal(found, best)
    assert torch.equal(where.long(), places)


@pytest.mark.planted
def test_comparing_bits_alone_would_take_the_least_of_negative_scores():
    scores = torch.tensor([[-1.0, -2.0]])
    assert scores.view(torch.int32).amax() == scores.view(torch.int32)[0, 1]
    assert maxima(scores, [(1, 2)], places=False, integers=True)[0] == -1


def test_no_tokens_of_queries():
    best, places = maxima(torch.ones(0, 4), [(4, 1)], places=True, integers=True)
    assert best.shape == places.shape == (0, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_numbers_whose_products_may_not_be_finite_are_found(value):
    x, y = torch.randn(5, 4), torch.randn(7, 4)
    assert finite((x,), (y,))
    assert finite((x[:0],), (y,))
    x[2, 1] = value
    assert not finite((x,), (1e9 * y,))
    assert not finite((1e9 * y,), (x, x))

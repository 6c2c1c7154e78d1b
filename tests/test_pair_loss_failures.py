"""A function of a declared loss that raises on one rank, for its data alone: all ranks raise, and none waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.testing import run_ranks

FAR = 25  # rows before the one whose mark is refused: the check at the first use does not see it
PLACES = ("score", "mask", "row_loss", "column_loss", "partner", "maximum", "backward")


class RefusedError(Exception):
    """An error of a user's function."""


def refuse(marks, value):
    if (marks < 0).any():
        raise RefusedError("bad mark")
    return value


def loss_of(place, exchange, reduction):
    """Return a loss, one of whose functions refuses rows with a negative mark."""

    def score(s, x, y, p):
        s = s * s
        refused = place == "score" or (place == "backward" and torch.is_grad_enabled())
        return refuse(x.mark, s) if refused else s

    def mask(x, y):
        candidates = x.mark != -y.mark
        return refuse(x.mark, candidates) if place == "mask" else candidates

    def of_partner(s, x, y, p):
        return refuse(x.mark, 2 * s) if place == "partner" else 2 * s

    def of_maximum(s, x, y, p):
        return refuse(x.mark, s) if place == "maximum" else s

    def row_loss(r, x, p):
        losses = r.all - r.own + r.most
        return refuse(x.mark, losses) if place == "row_loss" else (losses, 1 + x.mark.abs())

    def column_loss(r, y, p):
        return refuse(y.mark, r.all) if place == "column_loss" else r.all

    terms = {
        "all": wb.terms.LogSumExp(score, where=mask),
        "own": wb.terms.Partner(of_partner),
        "most": wb.terms.Max(of_maximum),
    }
    return wb.PairLoss(terms, row_loss, column_loss=column_loss, exchange=exchange, reduction=reduction)


def body(place, exchange, reduction):
    """Return what each call raises: one with a bad mark on the last rank, one without, one in inference."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loss_fn, raised = loss_of(place, exchange, reduction), []
    for bad, grad in ((False, True), (True, True), (False, True), (True, False), (False, False)):
        torch.manual_seed(rank)
        rows = 2 * FAR + 3 * rank
        x, y = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=grad) for _ in range(2))
        mark = torch.ones(rows, dtype=torch.float64)
        if bad and rank == size - 1:
            mark[FAR] = -1.0
        try:
            loss = loss_fn(x, y, x_data={"mark": mark}, y_data={"mark": mark}).sum()
            if grad:
                loss.backward()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
            if place == "backward" or not grad:
                return raised  # this rank does not enter the call in which the others raise
        else:
            raised.append("")
            assert loss.isfinite()
    return raised


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_raise(place, exchange, size):
    """In the same step if the forward pass raises and a backward pass follows; else the others at their next call."""
    *others, last = run_ranks(body, size, place, exchange, "mean", timeout_s=40)
    assert "bad mark" in last[1]
    if place == "backward":
        assert len(last) == 2
        assert all(of[:2] == ["", ""] and "bad mark" in of[2] for of in others), others
        return
    assert last[0] == last[2] == ""
    assert "bad mark" in last[3]
    assert all(of[0] == of[2] == of[3] == "" and "bad mark" in of[1] and "bad mark" in of[4] for of in others), others


def test_without_a_mean():
    *others, last = run_ranks(body, 2, "score", "gather", "none", timeout_s=40)
    assert all("bad mark" in of[1] for of in (*others, last))


SHRINKING = {
    "score": {"t": wb.terms.Sum(lambda s, x, y, p: s if len(s) < 10 else s.sum(1, keepdim=True))},
    "mask": {"t": wb.terms.Sum(None, lambda x, y, s: s > 0 if len(s) < 10 else s[:1] > 0)},
    "log_weight": {"t": wb.terms.Mean(log_weight=lambda s, x, y, p: s if len(s) < 10 else s[0])},
    "partner": {"t": wb.terms.Partner(lambda s, x, y, p: s if len(s) < 10 else s[:1])},
    "maximum": {"t": wb.terms.Max(lambda s, x, y, p: s if s.shape[1] > 1 else s[:1])},
}


@pytest.mark.parametrize("what", SHRINKING)
def test_one_number_for_a_row_of_a_large_tile_alone_is_refused(what):
    """torch would spread it over the tile silently."""
    loss_fn, x = wb.PairLoss(SHRINKING[what], lambda r, x, p: r.t), torch.randn(24, 4)
    message = "must return one value for each entry of every tile"
    with pytest.raises(ValueError, match=message):
        loss_fn(x)
    if what != "maximum":  # of which the reference has no list of winners
        with pytest.raises(ValueError, match=message):
            loss_fn.reference(x)


def test_numbers_of_rows_may_be_spread_over_tiles():
    b, x = torch.rand(24, dtype=torch.float64), torch.randn(24, 4, dtype=torch.float64)
    loss_fn = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: x.b * y.b, lambda x, y: x.b > 0)}, lambda r, x, p: r.t)
    assert torch.allclose(loss_fn(x, x_data={"b": b}), b.sum() ** 2 / 24)
    of_rows = wb.PairLoss({"t": wb.terms.Sum(lambda s, x, y, p: x.b)}, lambda r, x, p: r.t)
    assert torch.allclose(of_rows(x, x_data={"b": b}), b.sum())


def weighted_body(weight, side):
    """Return the error of a loss with a weight on the last rank, or its value."""

    def weighted(r, x, p):
        return r.t, torch.where(x.index == 5, weight, 1.0)

    functions = {"row_loss": weighted} if side == "row_loss" else {"row_loss": None, "column_loss": weighted}
    x = torch.arange(12, dtype=torch.float64).view(6, 2)[3 * dist.get_rank() :][:3].requires_grad_()
    loss_fn = wb.PairLoss({"t": wb.terms.Sum()}, **functions)
    try:
        loss = loss_fn(x)
        loss.backward()
    except ValueError as error:
        return str(error)
    return loss.detach()


@pytest.mark.parametrize("side", ["row_loss", "column_loss"])
def test_weights_of_a_row_loss_are_not_negative(side):
    for weight, message in ((-1.0, "must not be negative, got -1.0"), (float("nan"), "must be finite, got nan")):
        for found in run_ranks(weighted_body, 2, weight, side, timeout_s=40):
            assert f"the weights that {side} returns {message}" in found
    x = torch.arange(12, dtype=torch.float64).view(6, 2)
    for found in run_ranks(weighted_body, 2, 0.0, side, timeout_s=40):
        assert torch.allclose(found, (x @ x.T).sum(1)[:5].mean())

"""Statistics of a loss are those of the whole batch, and need no further sweep."""

import math
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import LOSSES, RECIPES, rows_of, whole_batch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch import with_statistics
from wholebatch.losses.catalog import CATALOG
from wholebatch.partition import Partition
from wholebatch.sweep import Driver
from wholebatch.testing import run_ranks


def dense_statistics(similarities, positive, negative, scale):
    """Return the statistics by definition: rows of similarities, with masks."""
    largest = similarities.masked_fill(~negative, -math.inf).amax(1)
    mean_positive = (similarities * positive).sum(1) / positive.sum(1)
    p = (scale * similarities).masked_fill(~negative, -math.inf).softmax(1)
    return [
        (mean_positive > largest).double().mean(),
        mean_positive.mean(),
        largest.mean(),
        (1 / p.square().sum(1)).mean(),
        torch.tensor(1 / scale, dtype=torch.float64),
    ]


def statistics_body(counts):
    case = LOSSES["clip, ids, weights"]
    x, y, *_ = whole_batch(case, counts)
    rows, scale = Partition(counts).rows(dist.get_rank()), 5.0
    diagonal = torch.eye(len(x), dtype=torch.bool)
    z = F.normalize(torch.cat([x, y]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    other = itself.roll(len(x), 0)
    h = F.normalize(
        torch.randn(len(x), 2, x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(5)), dim=-1
    )
    with_hard = torch.cat([x @ y.T, torch.einsum("bd,bhd->bh", x, h)], 1)
    labels = torch.arange(len(x)) // 2 % 2
    classmates = (labels[:, None] == labels) & ~diagonal
    hard = torch.ones(len(x), 2, dtype=torch.bool)
    cases = {
        "clip": (
            with_statistics(wb.functional.clip_loss)(x[rows], y[rows], scale),
            [
                torch.stack(pair).mean()
                for pair in zip(
                    *(dense_statistics(s, diagonal, ~diagonal, scale) for s in (x @ y.T, y @ x.T)), strict=True
                )
            ],
        ),
        "info_nce": (
            with_statistics(wb.functional.info_nce_loss)(x[rows], y[rows], logit_scale=scale, hard_negatives=h[rows]),
            dense_statistics(with_hard, torch.cat([diagonal, ~hard], 1), torch.cat([~diagonal, hard], 1), scale),
        ),
        "nt_xent": (
            with_statistics(wb.functional.nt_xent_loss)(x[rows], y[rows], temperature=1 / scale),
            dense_statistics(z @ z.T, other, ~other & ~itself, scale),
        ),
        "dcl": (
            with_statistics(wb.functional.dcl_loss)(x[rows], y[rows], temperature=1 / scale, sigma=0.5),
            dense_statistics(z @ z.T, other, ~other & ~itself, scale),
        ),
        "moco": (
            with_statistics(wb.functional.moco_loss)(x[rows], y[rows], h[:, 0], logit_scale=scale),
            dense_statistics(
                torch.cat([(x * y).sum(1, keepdim=True), x @ h[:, 0].T], 1),
                torch.arange(len(x) + 1).expand(len(x), -1) == 0,
                torch.arange(len(x) + 1).expand(len(x), -1) > 0,
                scale,
            ),
        ),
        "info_nce, key_to_query": (
            with_statistics(wb.functional.info_nce_loss)(
                x[rows], y[rows], logit_scale=scale, directions="key_to_query"
            ),
            dense_statistics(y @ x.T, diagonal, ~diagonal, scale),
        ),
        "sup_con": (
            with_statistics(wb.functional.sup_con_loss)(x[rows], labels[rows], temperature=1 / scale),
            dense_statistics(x @ x.T, classmates, ~classmates & ~diagonal, scale),
        ),
    }
    for name, ((loss, found), expected) in cases.items():
        assert loss.isfinite()
        numbers = [getattr(found, field) for field in found._fields]
        assert not any(number.requires_grad for number in numbers)
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [number.item() for number in numbers])
        assert everywhere == [everywhere[0]] * len(everywhere), name
        for field, got, true in zip(found._fields, numbers, expected, strict=True):
            assert_same(got, true, relative=1e-10, what=f"{name} {field}")


@pytest.mark.parametrize("counts", [(7,), (5, 2), (4, 0, 5)], ids=str)
def test_statistics_are_those_of_the_whole_batch(counts):
    run_ranks(statistics_body, len(counts), counts, timeout_s=60)


def recipes_body(counts):
    """Return the value of each recipe over pairs, without and with statistics, and the means of its terms."""
    found, scale = {}, torch.tensor(5.0, dtype=torch.float64)
    for name, case in RECIPES.items():
        rows = rows_of(case, counts, dist.get_rank())
        local = [z[at] for z, at in zip(whole_batch(case, counts), rows, strict=True)]
        if case.choices:
            value, statistics = with_statistics(case.call)(wb.functional, *local, scale, None)
            found[name] = case.call(wb.functional, *local, scale, None), value, statistics.rows
    return found


def test_recipes_have_statistics_of_their_terms():
    of_ranks = run_ranks(recipes_body, 3, (4, 0, 5), timeout_s=60)
    for name, (without, value, means) in of_ranks[0].items():
        assert torch.equal(value, without), name
        assert all(mean.isfinite() for mean in means.values()), name
        assert means, name
        assert all(found[name][2] == means for found in of_ranks), name


@pytest.mark.parametrize("name", ["clip", "info_nce", "nt_xent"])
def test_statistics_take_no_further_sweep(name):
    """The number of computed tiles of S is the same, and the loss and its gradient have the same bits."""
    case, tiles = LOSSES[name], []
    x, y = whole_batch(case, (20,))
    x.requires_grad_()
    computed, logits = [], Driver.logits

    def counted(driver, tile, *features):
        tiles.append(tile)
        return logits(driver, tile, *features)

    with patch.object(Driver, "logits", counted):
        for statistics in (False, True):
            tiles.clear()
            call = partial(case.call, wb.functional, x, y, torch.tensor(5.0), None, memory=512)
            loss = with_statistics(call)().loss if statistics else call()
            computed.append((loss.detach(), torch.autograd.grad(loss, x)[0], len(tiles)))
    (loss, gradient, before), (same_loss, same_gradient, after) = computed
    assert before == after > 10
    assert torch.equal(loss, same_loss)
    assert torch.equal(gradient, same_gradient)


@pytest.mark.parametrize("scale", [50.0, 100.0])
def test_effective_negatives_in_float32(scale):
    generator = torch.Generator().manual_seed(2)
    base = F.normalize(torch.randn(8, 6, dtype=torch.float64, generator=generator), dim=1)
    x = F.normalize(base.repeat(4, 1) + 0.1 * torch.randn(32, 6, dtype=torch.float64, generator=generator), dim=1)
    for call in (
        lambda x: wb.functional.clip_loss(x, x, scale),
        lambda x: wb.functional.sup_con_loss(x, torch.arange(32) // 2, temperature=1 / scale),
    ):
        narrowed, wide = (with_statistics(call)(z).statistics.effective_negatives for z in (x.float(), x))
        assert wide > 1
        assert_same(narrowed, wide, relative=1e-3)


def test_statistics_are_in_the_units_of_similarities():
    x, y = whole_batch(LOSSES["clip"], (9,))
    h = F.normalize(torch.randn(9, 2, 6, dtype=torch.float64), dim=-1)
    options = {"logit_scale": 5.0, "hard_negatives": h}
    info_nce = with_statistics(wb.functional.info_nce_loss)
    (_, plain), (_, harder) = (info_nce(x, y, hardness=a, **options) for a in (0.0, 7.0))
    for name in ("accuracy", "positive_similarity", "hardest_negative_similarity"):
        assert_same(getattr(harder, name), getattr(plain, name), relative=1e-12, what=name)


def statistics_on_one_rank(call):
    """Return the error of each rank if rank 1 alone asks for statistics."""
    x = torch.eye(3)
    loss = partial(getattr(wb.functional, f"{call}_loss"), x, x, 1.0, *[-1.0] * (call == "siglip"))
    loss()  # what later calls of the form look up
    with pytest.raises(ValueError, match="_loss: ") as refused:
        (with_statistics(loss) if torch.distributed.get_rank() else loss)()
    return str(refused.value)


@pytest.mark.parametrize("call", ["clip", "siglip"])
def test_statistics_on_one_rank_raise_on_all_whether_or_not_the_loss_has_them(call):
    expected = f"{call}_loss: statistics must be the same on all ranks, got rank 0: False; rank 1: True"
    assert run_ranks(statistics_on_one_rank, 2, call, timeout_s=120) == [expected] * 2


def test_a_refusal_names_the_losses_that_have_statistics():
    torch.manual_seed(0)
    (x, y), labels = F.normalize(torch.randn(2, 8, 4), dim=-1), torch.arange(8) // 2

    def refusal(loss):
        try:
            with_statistics(loss)()
        except ValueError as error:
            return re.fullmatch(r"with_statistics needs .* \((.*)\), got 0; .*", str(error))[1].split(", ")
        return None

    named = refusal(x.sum)
    assert {"moco_loss", "max_sim_loss", "PairLoss"} <= {*named}  # which have no standard call
    for name, loss in CATALOG.items():
        second = None if loss.kind == "labeled" else y
        refused = refusal(partial(loss.call, wb.functional, x, second, scale=2.0, bias=0.0, labels=labels))
        assert (f"{name}_loss" in named) == (refused is None), name

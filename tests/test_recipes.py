"""wb.recipes: each has the value and the gradients of a formula that was written down without it.

`test_losses` compares their calls with their references, on any split of rows over ranks, like those of all losses.
"""

import pickle

import pytest
import torch
import torch.distributed as dist
from loss_cases import BIAS, RECIPES, gradients, whole_batch
from recipes_reference import FORMULAS, WRONG
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch import recipes
from wholebatch.testing import RankError, run_ranks

SCALE = torch.tensor(3.0, dtype=torch.float64)


def by_formula(name, inputs):
    """Return the value and the gradients of a recipe's formula, like `gradients`."""
    case, leaves, scale = RECIPES[name], [z.clone() for z in inputs], SCALE.clone().requires_grad_()
    differentiated = [leaves[position].requires_grad_() for position in case.differentiable]
    loss = FORMULAS[name](*leaves, scale)
    return [loss.detach(), *torch.autograd.grad(loss, differentiated + [scale] * case.has_scale)]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_reference_is_its_formula(name):
    inputs = whole_batch(RECIPES[name], (8,))
    found, wanted = gradients(RECIPES[name], wb.reference, inputs, SCALE), by_formula(name, inputs)
    for actual, expected in zip(found, wanted, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)
        assert expected.abs().max() > 1e-4  # else it would show nothing


def test_every_recipe_has_a_formula():
    assert {name.removesuffix(", weights") for name in RECIPES} == {*FORMULAS}


@pytest.mark.planted
@pytest.mark.parametrize("name", WRONG)
def test_a_plausible_mistake_is_another_loss(name):
    inputs = whole_batch(RECIPES[name], (8,))
    assert abs(WRONG[name](*inputs, SCALE) - FORMULAS[name](*inputs, SCALE)) > 1e-3


def test_a_small_loss_keeps_its_digits():
    """In float32, of rows that are far from all negatives; the difference of two logits would lose them."""
    x = normalize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    tasks, loss_fn = torch.zeros(16, dtype=torch.int64), recipes.SameTaskInfoNCELoss(logit_scale=20.0)
    expected = loss_fn.reference(x.double(), x.double(), tasks)
    assert 0 < expected < 1e-4
    loss = loss_fn(x, x, tasks)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    difference = ((20 * x @ x.T).logsumexp(1) - (20 * x * x).sum(1)).mean()
    assert difference.item() != pytest.approx(expected.item(), rel=1e-4)


def test_documents_may_differ_in_number():
    """Query i has the documents from one offset to the next; one without any does not count."""
    generator = torch.Generator().manual_seed(1)
    x, documents = torch.randn(4, 6, generator=generator), torch.randn(5, 6, generator=generator)
    scores, offsets = torch.randn(5, generator=generator), torch.tensor([0, 2, 2, 3, 5])
    each = [slice(0, 2), slice(2, 3), slice(3, 5)]
    listwise = recipes.ListwiseDistillationLoss()
    alone = [listwise(x[[i]], documents[None, at], scores[None, at]) for i, at in zip((0, 2, 3), each, strict=True)]
    together = listwise(x, documents, scores, document_offsets=offsets)
    assert torch.isclose(together, torch.stack(alone).mean())
    mse = recipes.MarginMSELoss()
    sums = [
        (at.stop - at.start) * mse(x[[i]], x[[i]], documents[None, at], scores[None, at])
        for i, at in zip((0, 2, 3), each, strict=True)
    ]
    assert torch.isclose(mse(x, x, documents, scores, negative_offsets=offsets), sum(sums) / 5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_pickled(name, monkeypatch):
    case, copied = RECIPES[name], []
    inputs = [*whole_batch(case, (6,)), SCALE, BIAS]
    expected = case.call(wb.functional, *inputs, sync="sum")

    def copy_of(cls, **settings):
        copied.append(pickle.loads(pickle.dumps(getattr(recipes, cls)(**settings))))
        return copied[-1]

    monkeypatch.setattr("loss_cases.module_of", copy_of)
    assert torch.equal(case.call(wb.functional, *inputs, sync="sum"), expected)
    assert copied


def test_settings_count_as_they_are_in_a_call():
    x, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) // 2
    loss_fn = recipes.SemiHardTripletLoss()
    loss_fn.margin, loss_fn.reduction = 7.0, "none"
    expected = recipes.SemiHardTripletLoss(margin=7.0, reduction="none")
    for value, wanted in ((loss_fn, expected), (loss_fn.reference, expected.reference)):
        assert torch.equal(value(x, x + 1, labels), wanted(x, x + 1, labels))


def test_a_temperature_may_be_learned():
    """It belongs to the module, and is kept once."""
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    loss_fn = recipes.CrossBatchSupConLoss(temperature=temperature)
    queue = wb.KeyQueue(4, 3, data={"labels": torch.int64, "examples": torch.int64})
    loss_fn(torch.randn(6, 3), torch.arange(6) // 3, torch.arange(6), queue).backward()
    assert {*loss_fn.state_dict()} == {"temperature"}
    assert temperature.grad.abs() > 1e-3


# Towers


def test_towers_without_missing_data_are_clip_of_each_pair():
    case = RECIPES["towers"]
    features = dict(zip(("image", "text", "audio"), whole_batch(case, (6,)), strict=True))
    loss_fn = recipes.TowersLoss(towers=[*features], logit_scale=3.0)
    a, b, c = features.values()
    pairs = [wb.functional.clip_loss(x, y, 3.0) for x, y in ((a, b), (a, c), (b, c))]
    assert torch.isclose(loss_fn(features), torch.stack(pairs).mean(), rtol=1e-12)


def test_a_missing_row_may_hold_anything():
    features = {"image": torch.eye(3), "text": torch.eye(3)}
    has = {"text": torch.tensor([True, False, True])}
    loss_fn = recipes.TowersLoss(towers=["image", "text"], missing=True, logit_scale=1.0)
    expected = loss_fn(features, has=has)
    features["text"] = torch.where(has["text"][:, None], features["text"], torch.nan).requires_grad_()
    loss = loss_fn(features, has=has)
    loss.backward()
    assert torch.equal(loss, expected)
    assert (features["text"].grad[1] == 0).all()


def wrong_towers(rank_with_the_mistake):
    features = {name: torch.eye(3) for name in ("image", "text")}
    if dist.get_rank() == rank_with_the_mistake:
        features["audio"] = features.pop("text")
    recipes.TowersLoss(towers=["image", "text"], logit_scale=1.0)(features)


def test_a_wrong_tower_raises_on_all_ranks():
    with pytest.raises(RankError, match="features must be a mapping with the names"):
        run_ranks(wrong_towers, 2, 1)


def test_towers_whose_names_run_together():
    x = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))
    losses = [
        recipes.TowersLoss(towers=names, logit_scale=1.0)(dict(zip(names, x, strict=True)))
        for names in (["a", "b_c", "a_b", "c"], ["q", "w", "e", "r"])
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("towers", [["image"], ["image", "image"], "image text", ["image", "2nd"], [1, 2]])
def test_names_of_towers(towers):
    with pytest.raises(ValueError, match="towers must be two or more different names"):
        recipes.TowersLoss(towers=towers)


def test_a_call_without_missing_data_takes_none():
    features = {name: torch.eye(3) for name in ("image", "text")}
    with pytest.raises(ValueError, match=r"needs TowersLoss\(missing=True\)"):
        recipes.TowersLoss(towers=["image", "text"], logit_scale=1.0)(features, has={"image": torch.ones(3) > 0})
    with pytest.raises(ValueError, match="must be a boolean vector of 3 examples"):
        recipes.TowersLoss(towers=["image", "text"], missing=True, logit_scale=1.0)(
            features, has={"image": torch.ones(3)}
        )


# Mistakes


@pytest.mark.parametrize(
    ("directions", "message"),
    [
        (torch.ones(2, 3), r"directions must have shape \(m, 4\), as many columns as features"),
        (torch.ones(4), r"directions must have shape \(rows, embedding size\)"),
        (torch.ones(0, 4), r"directions must have shape \(m, 4\)"),
        (None, "directions must be a tensor"),
    ],
)
def test_directions_that_sigreg_refuses(directions, message):
    with pytest.raises(ValueError, match=message):
        recipes.SIGRegLoss()(torch.ones(3, 4), directions)


def test_checks_of_directions_can_be_deferred():
    loss_fn, x = recipes.SIGRegLoss(checks="deferred"), torch.eye(3)
    assert loss_fn(x, x).item() == pytest.approx(loss_fn.reference(x, x).item())
    assert loss_fn(x, x * torch.nan).isnan()
    with pytest.raises(ValueError, match="in an earlier call with checks='deferred', the norm of directions"):
        loss_fn(x, x)


def other_directions():
    recipes.SIGRegLoss()(torch.ones(3, 4), torch.ones(2, 4) + dist.get_rank())


def test_directions_are_the_same_on_all_ranks():
    with pytest.raises(RankError, match="directions"):
        run_ranks(other_directions, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.ListwiseDistillationLoss(temperature=0), "temperature must be positive"),
        (lambda: recipes.ListwiseDistillationLoss(teacher_temperature=-1), "teacher_temperature must be positive"),
        (lambda: recipes.ListwiseDistillationLoss(similarity="l2"), "similarity must be"),
        (lambda: recipes.SemiHardTripletLoss(margin=-1), "margin must not be negative"),
        (lambda: recipes.CrossBatchSupConLoss(temperature=0.0), "temperature must be positive"),
        (lambda: recipes.SIGRegLoss(knots=1), "knots must be an integer"),
        (
            lambda: recipes.CrossBatchSupConLoss()(torch.eye(2), torch.arange(2), torch.arange(2), torch.eye(2)),
            "queue must be a wb.KeyQueue",
        ),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()

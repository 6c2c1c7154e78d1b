"""wb.recipes: each has the value and the gradients of a formula that was written down without it, on any ranks."""

import pickle

import pytest
import recipes_reference as plain
import torch
import torch.distributed as dist
from pair_losses import call, cut, gradients, leaves, part
from recipes_reference import RECIPES, batch_for
from test_pair_loss import distance

import wholebatch as wb
from wholebatch import recipes
from wholebatch.testing import RankError, run_ranks

SPLITS = [(8,), (5, 3), (0, 6, 2), (2, 3, 0, 3)]
OPTIONS = [{"exchange": "gather"}, {"exchange": "ring", "sync": "sum"}, {"memory": 128}]


def of_rank(jobs):
    found = []
    for name, counts, seed, options in jobs:
        at = cut(counts, dist.get_rank())
        batch = part(batch_for(name, sum(counts), seed), at, at)
        found.append(gradients(RECIPES[name][0](**options), batch))
    return found


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_a_recipe_is_its_formula(counts):
    jobs = [(name, counts, seed, options) for name in RECIPES for seed, options in enumerate(OPTIONS)]
    found = run_ranks(of_rank, len(counts), jobs)
    for at, (name, _, seed, options) in enumerate(jobs):
        batch = batch_for(name, sum(counts), seed)
        expected = gradients(RECIPES[name][1], batch)
        error = distance([of[at] for of in found], batch, expected, counts, options.get("sync", "mean"))
        assert error < 1e-10, (name, options, error)
        assert all(grad.abs().max() > 1e-4 for grad in expected[1].values()), name  # else it would show nothing


@pytest.mark.parametrize("name", RECIPES)
def test_its_own_dense_matrix_agrees(name):
    batch = batch_for(name, 6, 4)
    value, grads = gradients(RECIPES[name][0]().reference, batch)
    expected, wanted = gradients(RECIPES[name][1], batch)
    assert torch.isclose(value, expected, rtol=1e-12)
    for of in leaves(batch):
        assert torch.allclose(grads[of], wanted[of], rtol=1e-10, atol=1e-12)


@pytest.mark.planted
@pytest.mark.parametrize("name", RECIPES)
def test_the_mean_of_the_ranks_own_losses_is_another(name):
    """A trainer that compares each rank's rows with each other alone computes it."""
    counts = (5, 3)
    batch = batch_for(name, 8, 0)
    whole = call(RECIPES[name][1], batch)
    alone = [call(RECIPES[name][1], part(batch, at, at)) for at in (cut(counts, 0), cut(counts, 1))]
    assert abs(torch.stack(alone).mean() - whole) > 1e-3


WRONG = {
    "same_task": lambda x, y, **_: plain.info_nce(x, y, lambda i, j: True),
    "distinct_document": lambda x, y, **_: plain.info_nce(x, y, lambda i, j: True),
    "near_duplicate": lambda x, y, **_: plain.info_nce(x["pairs"], y["pairs"], lambda i, j: True),
    "mined": lambda x, y, **_: plain.info_nce(x, y, lambda i, j: True),
    "guided": lambda x, y, **of: plain.guided(x, y, margin=0.1, relative=True, **of),
    "listwise": lambda x, y, **of: plain.listwise(x, y, **of) / 4,
    "uniformity": lambda x, y, **_: torch.cdist(x, x).square().mul(-0.5).exp().mean(),  # with each row itself
}


@pytest.mark.planted
@pytest.mark.parametrize("name", WRONG)
def test_a_plausible_mistake_is_another_loss(name):
    batch = batch_for(name, 8, 0)
    assert abs(call(WRONG[name], batch) - call(RECIPES[name][0](), batch)) > 1e-3


def test_a_small_loss_keeps_its_digits():
    """In float32, of rows that are far from all negatives; the difference of two logits would lose them."""
    x = torch.nn.functional.normalize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    task = {"task": torch.zeros(16, dtype=torch.int64)}
    loss_fn = recipes.same_task_info_nce(scale=20.0)
    expected = loss_fn.reference(x.double(), x.double(), x_data=task, y_data=task)
    assert 0 < expected < 1e-4
    loss = loss_fn(x, x, x_data=task, y_data=task)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    difference = ((20 * x @ x.T).logsumexp(1) - (20 * x * x).sum(1)).mean()
    assert difference.item() != pytest.approx(expected.item(), rel=1e-4)


def test_recipes_can_be_pickled():
    for name, (recipe, _, _) in RECIPES.items():
        batch = batch_for(name, 5, 0)
        copy = pickle.loads(pickle.dumps(recipe()))
        assert torch.equal(call(copy, batch), call(recipe(), batch))


# Towers


def towers_batch(count, seed):
    made = torch.Generator().manual_seed(seed)
    names = ("image", "text", "audio")
    features = {name: plain.rows(made, count, 5) for name in names}
    has = {name: torch.rand(count, generator=made) < 0.7 for name in names}
    has["image"][:2] = has["text"][:2] = True  # some pair exists
    return features, has


def towers_of_rank(counts, options):
    features, has = towers_batch(sum(counts), 3)
    at = cut(counts, dist.get_rank())
    features = {name: x.detach()[at].clone().requires_grad_() for name, x in features.items()}
    has = {name: x[at] for name, x in has.items()}
    for name, x in features.items():
        x.data[~has[name]] = float("nan")  # a missing row may hold anything
    loss = recipes.TowersLoss([*features], missing=True, scale=plain.SCALE, **options)(features, has=has)
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in features.items()}


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_towers_with_missing_data(counts):
    features, has = towers_batch(sum(counts), 3)
    loss = plain.towers(features, has)
    loss.backward()
    for options in ({}, {"exchange": "ring"}):
        found = run_ranks(towers_of_rank, len(counts), counts, options)
        for value, _ in found:
            assert torch.isclose(value, loss.detach(), rtol=1e-12)
        for name, x in features.items():
            grad = torch.cat([grads[name] for _, grads in found]) / len(counts)
            assert torch.allclose(grad, x.grad, rtol=1e-10, atol=1e-12)
            assert (grad[~has[name]] == 0).all()


def test_towers_without_missing_data_are_clip_of_each_pair():
    features, _ = towers_batch(6, 1)
    loss_fn = recipes.TowersLoss([*features], scale=plain.SCALE)
    a, b, c = features.values()
    pairs = [wb.functional.clip_loss(x, y, plain.SCALE) for x, y in ((a, b), (a, c), (b, c))]
    assert torch.isclose(loss_fn(features), torch.stack(pairs).mean(), rtol=1e-12)
    assert torch.isclose(loss_fn.reference(features), torch.stack(pairs).mean(), rtol=1e-12)


def wrong_towers(rank_with_the_mistake):
    features = {name: torch.eye(3) for name in ("image", "text")}
    if dist.get_rank() == rank_with_the_mistake:
        features["audio"] = features.pop("text")
    recipes.TowersLoss(["image", "text"])(features)


def test_a_wrong_tower_raises_on_all_ranks():
    with pytest.raises(RankError, match="features must be a mapping with the names"):
        run_ranks(wrong_towers, 2, 1)


def test_towers_whose_names_run_together():
    made = torch.Generator().manual_seed(0)
    x = [torch.randn(6, 4, generator=made) for _ in range(4)]
    losses = [
        recipes.TowersLoss(names, scale=1.0)(dict(zip(names, x, strict=True)))
        for names in (["a", "b_c", "a_b", "c"], ["q", "w", "e", "r"])
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("towers", [["image"], ["image", "image"], "image text", ["image", "2nd"], [1, 2]])
def test_names_of_towers(towers):
    with pytest.raises(ValueError, match="towers must be two or more different names"):
        recipes.TowersLoss(towers)


def test_a_call_without_missing_data_takes_none():
    features = {name: torch.eye(3) for name in ("image", "text")}
    with pytest.raises(ValueError, match=r"needs TowersLoss\(missing=True\)"):
        recipes.TowersLoss(["image", "text"])(features, has={"image": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="must be a boolean vector of 3 examples"):
        recipes.TowersLoss(["image", "text"], missing=True)(features, has={"image": torch.ones(3)})


# Memory


def memory_steps(counts, capacity):
    """Return this rank's loss and gradient in the third step with a memory, and its columns."""
    rank, memory = dist.get_rank(), recipes.RowMemory(capacity)
    loss_fn = recipes.memory_sup_con(temperature=0.5)
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        count, at = sum(counts), cut(counts, rank)
        every, labels = plain.rows(made, count, 6, grad=False), plain.integers(made, count, 3)
        x = every[at].clone().requires_grad_()
        data = {"label": labels[at], "example": torch.arange(step * count, (step + 1) * count)[at]}
        columns, of_columns = memory.columns(x, data)
        loss = loss_fn(x, columns, x_data=data, y_data=of_columns)
        loss.backward()
        memory.append(x, data)
    return loss.detach(), x.grad, data, columns.detach()[len(x) :], {k: v[len(x) :] for k, v in of_columns.items()}


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_a_memory_of_earlier_batches(counts):
    found = run_ranks(memory_steps, len(counts), counts, 4)
    made = torch.Generator().manual_seed(2)
    x = plain.rows(made, sum(counts), 6)
    data = {name: torch.cat([of[2][name] for of in found]) for name in ("label", "example")}
    old = {name: torch.cat([of[4][name] for of in found]) for name in ("label", "example")}
    assert len(old["label"]) == sum(min(4, 2 * count) for count in counts)
    y = torch.cat([x, *(of[3] for of in found)])
    loss = plain.memory(x, y, x_data=data, y_data={name: torch.cat([data[name], old[name]]) for name in data})
    loss.backward()
    assert all(torch.isclose(of[0], loss.detach(), rtol=1e-12) for of in found)
    assert torch.allclose(torch.cat([of[1] for of in found]) / len(counts), x.grad, rtol=1e-10, atol=1e-12)
    without = plain.memory(x, x, x_data=data, y_data=data)
    assert abs(without - loss) > 1e-3


def test_a_memory_holds_the_last_rows():
    memory = recipes.RowMemory(3)
    assert len(memory) == 0
    memory.append(torch.arange(5.0)[:, None], {"label": torch.arange(5)})
    columns, data = memory.columns(torch.full((1, 1), 9.0), {"label": torch.tensor([9])})
    assert columns[:, 0].tolist() == [9, 2, 3, 4]
    assert data["label"].tolist() == [9, 2, 3, 4]
    assert len(memory) == 3


@pytest.mark.parametrize(
    ("features", "data", "message"),
    [
        (torch.ones(2, 3), {"label": torch.ones(2)}, "must have 1 columns like the rows before"),
        (torch.ones(2), {"label": torch.ones(2)}, "features must be a floating-point matrix"),
        (torch.ones(2, 1), {"labels": torch.ones(2)}, r"must have the names \['label'\]"),
        (torch.ones(2, 1), {"label": torch.ones(3)}, "a number for each of 2 rows"),
        (torch.ones(2, 1), {"label": torch.ones(2, dtype=torch.int64)}, "must be torch.float32 like earlier rows"),
        (torch.ones(2, 1), None, r"must have the names \['label'\]"),
    ],
)
def test_what_a_memory_refuses(features, data, message):
    memory = recipes.RowMemory(3)
    memory.append(torch.ones(2, 1), {"label": torch.ones(2)})
    with pytest.raises(ValueError, match=message):
        memory.append(features, data)
    assert len(memory) == 2


# Statistics


def statistics_of_rank(counts, sync):
    made = torch.Generator().manual_seed(5)
    rows, directions = plain.rows(made, sum(counts), 4, grad=False), plain.rows(made, 3, 4)
    x = rows[cut(counts, dist.get_rank())].clone().requires_grad_()
    found = []
    for loss in (recipes.flops_loss(x, sync=sync), recipes.sigreg_loss(x, directions, sync=sync)):
        x.grad = directions.grad = None
        loss.backward()
        found.append((loss.detach(), x.grad, directions.grad))
    return found


@pytest.mark.parametrize("counts", SPLITS, ids=str)
@pytest.mark.parametrize("sync", ["mean", "sum"])
def test_statistics_of_all_ranks(counts, sync):
    made = torch.Generator().manual_seed(5)
    x, directions = plain.rows(made, sum(counts), 4), plain.rows(made, 3, 4)
    found = run_ranks(statistics_of_rank, len(counts), counts, sync)
    factor = len(counts) if sync == "mean" else 1
    for at, loss in enumerate((plain.flops(x), plain.sigreg(x, directions))):
        x.grad = directions.grad = None
        loss.backward()
        assert all(torch.isclose(of[at][0], loss.detach(), rtol=1e-12) for of in found)
        assert torch.allclose(torch.cat([of[at][1] for of in found]) / factor, x.grad, rtol=1e-10, atol=1e-12)
        if at == 1:
            shared = [of[at][2] for of in found]
            grad = shared[0] if sync == "mean" else sum(shared)
            assert torch.allclose(grad, directions.grad, rtol=1e-10, atol=1e-12)
            halves = [plain.sigreg(x[:4], directions), plain.sigreg(x[4:], directions)]
            assert abs(torch.stack(halves).mean() - loss) > 1e-3  # the mean over ranks is another loss


@pytest.mark.parametrize(
    ("directions", "options", "message"),
    [
        (torch.ones(2, 3), {}, r"directions must be a floating-point matrix \(m, 4\)"),
        (torch.ones(4), {}, "directions must be a floating-point matrix"),
        (None, {}, "directions must be a floating-point matrix"),
        (torch.ones(2, 4), {"knots": 1}, "knots must be an integer"),
    ],
)
def test_what_sigreg_refuses(directions, options, message):
    with pytest.raises(ValueError, match=message):
        recipes.sigreg_loss(torch.ones(3, 4), directions, **options)


def other_directions():
    recipes.sigreg_loss(torch.ones(3, 4), torch.ones(2, 4) + dist.get_rank())


def test_directions_are_the_same_on_all_ranks():
    with pytest.raises(RankError, match="directions"):
        run_ranks(other_directions, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.near_duplicate_info_nce(threshold=float("nan")), "threshold must be finite"),
        (lambda: recipes.guided_info_nce(margin="0.1"), "margin must be a number"),
        (lambda: recipes.guided_info_nce(strategy="both"), "strategy must be"),
        (lambda: recipes.listwise_distillation(temperature=0), "temperature must be positive"),
        (lambda: recipes.listwise_distillation(teacher_temperature=-1), "teacher_temperature must be positive"),
        (lambda: recipes.semi_hard_triplet(margin=-1), "margin must not be negative"),
        (lambda: recipes.uniformity(t=0), "t must be positive"),
        (lambda: recipes.memory_sup_con(temperature=0.0), "temperature must be positive"),
        (lambda: recipes.RowMemory(0), "rows must be an integer"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()

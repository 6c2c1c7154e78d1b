"""The formulas of the recipes, written down row by row, and batches for them. Nothing here comes from a declaration."""

import torch
from pair_losses import Batch
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, mse_loss, normalize

from wholebatch import recipes

SCALE = 3.0


def info_nce(x, y, negative, scale=SCALE, candidates=None, is_negative=None):
    """Return the mean cross-entropy of each row's partner among it and its negatives, by a loop over rows."""
    losses = []
    for i in range(len(x)):
        keys = [y[i], *(y[j] for j in range(len(y)) if j != i and negative(i, j))]
        if candidates is not None:
            keys += [candidates[i, k] for k in range(candidates.shape[1]) if is_negative is None or is_negative(i, k)]
        logits = torch.stack([scale * (x[i] * key).sum() for key in keys])
        losses.append(cross_entropy(logits[None], torch.tensor([0])))
    return torch.stack(losses).mean()


def same_task(x, y, *, x_data, y_data, **_):
    return info_nce(x, y, lambda i, j: bool(x_data["task"][i] == y_data["task"][j]))


def distinct_document(x, y, *, x_data, y_data, **_):
    return info_nce(x, y, lambda i, j: bool(x_data["document"][i] != y_data["document"][j]))


def near_duplicate(x, y, **_):
    def far(i, j):
        return cosine_similarity(x["keys"][i], y["keys"][j], dim=0).item() <= 0.6

    return info_nce(x["pairs"], y["pairs"], far)


def mined(x, y, *, candidates, **_):
    return info_nce(x, y, lambda i, j: True, candidates=candidates)


def guided(x, y, *, candidates, margin, relative, **_):
    def allowed(i, guide):
        pair = cosine_similarity(x["guide"][i], y["guide"][i], dim=0)
        beyond = pair - (pair.abs() * margin if relative else margin)
        return bool(cosine_similarity(x["guide"][i], guide, dim=0) <= beyond)

    q, k = normalize(x["features"], dim=1), normalize(y["features"], dim=1)
    mined = normalize(candidates["features"], dim=2)
    return info_nce(
        q,
        k,
        lambda i, j: allowed(i, y["guide"][j]),
        candidates=mined,
        is_negative=lambda i, n: allowed(i, candidates["guide"][i, n]),
    )


def listwise(x, y, *, candidates, candidate_data, **_):
    student = torch.stack([candidates[i] @ x[i] for i in range(len(x))]) / 2
    teacher = (candidate_data["teacher"] / 3).softmax(1)
    return 4 * kl_div(student.log_softmax(1), teacher, reduction="batchmean")


def margins(x, y, *, candidates, candidate_data, **_):
    positive = (x * y).sum(1)
    return mse_loss(positive[:, None] - torch.einsum("bd,bhd->bh", x, candidates), candidate_data["margin"])


def soft_labels(x, y, **_):
    logits = SCALE * x["features"] @ y["features"].T
    shared = x["labels"] @ y["labels"].T
    losses = []
    for of, target in ((logits, shared), (logits.T, shared.T)):
        some = target.sum(1) > 0
        losses.append(cross_entropy(of[some], target[some] / target[some].sum(1, keepdim=True)))
    return (losses[0] + losses[1]) / 2


def semi_hard(x, y, *, x_data, y_data, **_):
    losses = []
    for i in range(len(x)):
        positive = (x[i] - y[i]).square().sum()
        distances = [(x[i] - y[j]).square().sum() for j in range(len(y)) if x_data["label"][i] != y_data["label"][j]]
        if distances:
            beyond = [one for one in distances if one > positive]
            losses.append(torch.relu(positive - (min(beyond) if beyond else max(distances)) + 4.0))
    return torch.stack(losses).mean()


def uniformity(x, y, **_):
    return torch.pdist(x).square().mul(-0.5).exp().mean()


def memory(x, y, *, x_data, y_data, **_):
    x, y = normalize(x, dim=1), normalize(y, dim=1)
    losses = []
    for i in range(len(x)):
        others = [j for j in range(len(y)) if x_data["example"][i] != y_data["example"][j]]
        logits = torch.stack([x[i] @ y[j] / 0.5 for j in others])
        positives = [at for at, j in enumerate(others) if x_data["label"][i] == y_data["label"][j]]
        if positives:
            losses.append(torch.stack([cross_entropy(logits[None], torch.tensor([at])) for at in positives]).mean())
    return torch.stack(losses).mean()


def towers(features, has):
    """Return the mean over rows, and over columns, of each existing pair of towers; `has`: booleans by name."""
    names, sides = list(features), []
    for swap in (False, True):
        losses = []
        for at, first in enumerate(names):
            for second in names[at + 1 :]:
                a, b = (second, first) if swap else (first, second)
                both = [i for i in range(len(has[a])) if has[a][i] and has[b][i]]
                there = [j for j in range(len(has[b])) if has[b][j]]
                for i in both:
                    logits = SCALE * features[b][there] @ features[a][i]
                    losses.append(cross_entropy(logits[None], torch.tensor([there.index(i)])))
        sides.append((torch.stack(losses), swap))
    # Each example counts by the number of its pairs, so the mean over examples is the mean over pairs.
    return sum(losses.mean() for losses, _ in sides) / 2


def flops(activations):
    return sum((activations[:, k].abs().mean() ** 2 for k in range(activations.shape[1])), torch.zeros(()))


def sigreg(features, directions, knots=17):
    """Return the statistic by complex numbers and torch's trapezoid rule, for one direction after the other."""
    t = torch.linspace(0, 3, knots, dtype=features.dtype)
    found = []
    for u in directions:
        projections = features @ (u / u.norm())
        characteristic = torch.exp(1j * projections[:, None] * t).mean(0)
        integrand = (characteristic - torch.exp(-t.square() / 2)).abs().square() * torch.exp(-t.square() / 2)
        found.append(2 * len(features) * torch.trapezoid(integrand, t))
    return torch.stack(found).mean()


# Batches: B rows of six features, with everything that the recipe reads.


def rows(made, *shape, grad=True):
    return torch.randn(*shape, generator=made, dtype=torch.float64).div(2).requires_grad_(grad)


def integers(made, count, most):
    return torch.randint(0, most, (count,), generator=made)


def pairs(made, count, **data):
    return Batch(rows(made, count, 6), rows(made, count, 6), **data)


def with_data(name, most):
    def make(made, count):
        number = integers(made, count, most)
        return pairs(made, count, x_data={name: number}, y_data={name: number})

    return make


def with_key_features(made, count):
    # Leaves of the batch are its tensors; keys appear under two names, once with a gradient.
    keys = rows(made, count, 6)
    frozen = keys.detach()
    return Batch({"pairs": rows(made, count, 6), "keys": frozen}, {"pairs": keys, "keys": frozen})


def with_own(made, count):
    return pairs(made, count, candidates=rows(made, count, 3, 6))


def with_guides(made, count):
    guides = [rows(made, *shape, grad=False) for shape in ((count, 4), (count, 4), (count, 3, 4))]
    x, y, candidates = rows(made, count, 6), rows(made, count, 6), rows(made, count, 3, 6)
    return Batch(*({"features": of, "guide": g} for of, g in zip((x, y), guides, strict=False)),
                 candidates={"features": candidates, "guide": guides[2]})  # fmt: skip


def with_teacher(made, count):
    teacher = rows(made, count, 3, grad=False)
    return Batch(rows(made, count, 6), candidates=rows(made, count, 3, 6), candidate_data={"teacher": teacher})


def with_margins(made, count):
    return pairs(
        made, count, candidates=rows(made, count, 3, 6), candidate_data={"margin": rows(made, count, 3, grad=False)}
    )


def with_tags(made, count):
    tags = [torch.randint(0, 2, (count, 3), generator=made).double() for _ in range(2)]
    x, y = rows(made, count, 6), rows(made, count, 6)
    return Batch(*({"features": of, "labels": tag} for of, tag in zip((x, y), tags, strict=True)))


def one_tower(made, count):
    return Batch(rows(made, count, 6))


GUIDED = {"margin": 0.1, "scale": SCALE, "mined": True}

# name: (recipe, reference, batch)
RECIPES = {
    "same_task": (lambda **o: recipes.same_task_info_nce(scale=SCALE, **o), same_task, with_data("task", 3)),
    "distinct_document": (
        lambda **o: recipes.distinct_document_info_nce(scale=SCALE, **o),
        distinct_document,
        with_data("document", 3),
    ),
    "near_duplicate": (
        lambda **o: recipes.near_duplicate_info_nce(threshold=0.6, scale=SCALE, **o),
        near_duplicate,
        with_key_features,
    ),
    "mined": (lambda **o: recipes.mined_info_nce(scale=SCALE, **o), mined, with_own),
    "guided": (
        lambda **o: recipes.guided_info_nce(**GUIDED, **o),
        lambda x, y, **of: guided(x, y, margin=0.1, relative=False, **of),
        with_guides,
    ),
    "guided, relative": (
        lambda **o: recipes.guided_info_nce(strategy="relative", **{**GUIDED, "margin": -0.5}, **o),
        lambda x, y, **of: guided(x, y, margin=-0.5, relative=True, **of),
        with_guides,
    ),
    "listwise": (
        lambda **o: recipes.listwise_distillation(temperature=2.0, teacher_temperature=3.0, **o),
        listwise,
        with_teacher,
    ),
    "margin_mse": (recipes.margin_mse, margins, with_margins),
    "soft_labels": (lambda **o: recipes.soft_label_info_nce(scale=SCALE, **o), soft_labels, with_tags),
    "semi_hard": (lambda **o: recipes.semi_hard_triplet(margin=4.0, **o), semi_hard, with_data("label", 3)),
    "uniformity": (lambda **o: recipes.uniformity(t=0.5, **o), uniformity, one_tower),
}


def batch_for(name, count, seed):
    return RECIPES[name][2](torch.Generator().manual_seed(100 * seed + count), count)

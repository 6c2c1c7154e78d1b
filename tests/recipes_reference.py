"""The formulas of the recipes, written down row by row: nothing here comes from a declaration.

Each takes the arguments of a row of `loss_cases.RECIPES`, which holds its settings.
"""

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, mse_loss


def same_task(x, y, tasks, scale):
    """Return the mean cross-entropy of each row's key among it and its negatives, by a loop over rows."""
    losses = []
    for i in range(len(x)):
        keys = [y[i], *(y[j] for j in range(len(y)) if j != i and tasks[i] == tasks[j])]
        logits = torch.stack([scale * (x[i] * key).sum() for key in keys])
        losses.append(cross_entropy(logits[None], torch.tensor([0])))
    return torch.stack(losses).mean()


def soft_labels(x, y, x_labels, y_labels, scale):
    logits, shared, losses = scale * x @ y.T, x_labels @ y_labels.T, []
    for rows, target in ((logits, shared), (logits.T, shared.T)):
        some = target.sum(1) > 0
        losses.append(cross_entropy(rows[some], target[some] / target[some].sum(1, keepdim=True)))
    return (losses[0] + losses[1]) / 2


def semi_hard(x, y, labels, _scale):
    losses = []
    for i in range(len(x)):
        positive = (x[i] - y[i]).square().sum()
        distances = [(x[i] - y[j]).square().sum() for j in range(len(y)) if labels[i] != labels[j]]
        if distances:
            beyond = [distance for distance in distances if distance > positive]
            losses.append(torch.relu(positive - (min(beyond) if beyond else max(distances)) + 4.0))
    return torch.stack(losses).mean()


def listwise(x, documents, scores, _scale):
    student = torch.stack([documents[i] @ x[i] for i in range(len(x))]) / 2
    return 4 * kl_div(student.log_softmax(1), (scores / 0.5).softmax(1), reduction="batchmean")


def margins(x, y, negatives, teacher, _scale):
    positive = (x * y).sum(1)
    return mse_loss(positive[:, None] - torch.einsum("bd,bhd->bh", x, negatives), teacher)


def cross_batch(x, labels, examples, keys, _scale):
    """Compare with the batch and the keys, whose labels and examples are those of `loss_cases.queue_of`."""
    numbers, losses = torch.arange(len(keys)), []
    y_labels, y_examples = torch.cat([labels, numbers % 3]), torch.cat([examples, numbers + 4])
    y = torch.cat([x, keys])
    for i in range(len(x)):
        others = [j for j in range(len(y)) if examples[i] != y_examples[j]]
        logits = torch.stack([cosine_similarity(x[i], y[j], dim=0) / 0.5 for j in others])
        positives = [place for place, j in enumerate(others) if labels[i] == y_labels[j]]
        if positives:
            losses.append(torch.stack([cross_entropy(logits[None], torch.tensor([p])) for p in positives]).mean())
    return torch.stack(losses).mean()


def towers(image, text, audio, *has_and_scale):
    """Return the mean over rows, and over columns, of each existing pair of towers."""
    *has, scale = has_and_scale
    features, everywhere = {"image": image, "text": text, "audio": audio}, torch.ones(len(image), dtype=torch.bool)
    masks = dict.fromkeys(features, everywhere) | dict(zip(("image", "audio"), has, strict=False))
    names, sides = list(features), []
    for swap in (False, True):
        losses = []
        for place, first in enumerate(names):
            for second in names[place + 1 :]:
                a, b = (second, first) if swap else (first, second)
                both = [i for i in range(len(image)) if masks[a][i] and masks[b][i]]
                there = [j for j in range(len(image)) if masks[b][j]]
                for i in both:
                    logits = scale * features[b][there] @ features[a][i]
                    losses.append(cross_entropy(logits[None], torch.tensor([there.index(i)])))
        sides.append(torch.stack(losses))
    # Each example counts by the number of its pairs, so the mean over examples is the mean over pairs.
    return sum(losses.mean() for losses in sides) / 2


def flops(activations, _scale):
    return sum((activations[:, k].abs().mean() ** 2 for k in range(activations.shape[1])), torch.zeros(()))


def sigreg(features, directions, _scale, knots=17):
    """Return the statistic by complex numbers and torch's trapezoid rule, for one direction after the other."""
    t = torch.linspace(0, 3, knots, dtype=features.dtype)
    distances = []
    for u in directions:
        projections = features @ (u / u.norm())
        characteristic = torch.exp(1j * projections[:, None] * t).mean(0)
        integrand = (characteristic - torch.exp(-t.square() / 2)).abs().square() * torch.exp(-t.square() / 2)
        distances.append(2 * len(features) * torch.trapezoid(integrand, t))
    return torch.stack(distances).mean()


FORMULAS = {
    "same task": same_task,
    "soft labels": soft_labels,
    "semi-hard triplets": semi_hard,
    "listwise distillation": listwise,
    "margin MSE": margins,
    "cross-batch memory": cross_batch,
    "towers": towers,
    "towers, some missing": towers,
    "FLOPS": flops,
    "SIGReg": sigreg,
}
# Plausible mistakes: a mask that is forgotten, a missing square of the temperature, and rows that meet themselves.
WRONG = {
    "same task": lambda x, y, _tasks, scale: cross_entropy(scale * x @ y.T, torch.arange(len(x))),
    "listwise distillation": lambda *arguments: listwise(*arguments) / 4,
    "cross-batch memory": lambda x, labels, examples, keys, scale: cross_batch(x, labels, examples + 99, keys, scale),
    "towers, some missing": lambda x, y, z, *more: towers(x, y, z, more[-1]),
}

"""The dense, single-process, differentiable twin of every loss: what the library's exactness is measured against.

Each twin takes the whole batch, stores the whole similarity matrix, and is short enough to be checked by eye
against its paper. Tests, docs and doubting users all call the same ones. Arguments mean what they mean in
`wholebatch.functional`; `ids` and `weights` have one entry for each row of the whole batch.

Shapes are checked, and nothing else is: values and options that `wholebatch.functional` refuses are taken as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._normalize import EPS, normalize_rows, row_norms

__all__ = [
    "barlow_twins_loss",
    "circle_loss",
    "clip_loss",
    "dcl_loss",
    "debiased_loss",
    "distillation_loss",
    "global_contrastive_loss",
    "info_nce_loss",
    "matryoshka_loss",
    "moco_loss",
    "multi_similarity_loss",
    "nt_xent_loss",
    "partial_fc_loss",
    "siglip_loss",
    "smooth_ap_loss",
    "sup_con_loss",
    "triplet_loss",
    "vicreg_loss",
    "w_mse_loss",
]


_NO_ID = torch.iinfo(torch.int64).min


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    ids: Tensor | None = None,
    equal_ids: str = "positive",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Symmetric cross-entropy between images and texts (Radford et al., 2021, arXiv:2103.00020, figure 3).

    S = logit_scale * X Y^T + logit_bias,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2

    With ids, the targets are all pairs of equal ids (Yang et al., 2022, arXiv:2204.03610, equation 3).

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(clip_loss(x, x, 10.0).item(), 9)
    9.0796e-05
    """
    _check("clip_loss", {"image_features": image_features, "text_features": text_features}, ids, weights)
    logits = logit_scale * image_features @ text_features.T
    if logit_bias is not None:
        logits = logits + logit_bias
    positive, excluded = _pairs(len(logits), ids, equal_ids, logits.device)
    rows = _cross_entropy(logits, positive, excluded, label_smoothing)
    cols = _cross_entropy(logits.T, positive, excluded, label_smoothing)
    return _reduce((rows + cols) / 2, weights, reduction)


def info_nce_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    negatives: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    hard_negative_ids: Tensor | None = None,
    equal_ids: str = "excluded",
    directions: Sequence[str] = ("query_to_key",),
    partition: str = "joint",
    margin: float = 0.0,
    hardness: float = 0.0,
    exclude_above: float | None = None,
    exclude_relative: bool = False,
    query_guides: Tensor | None = None,
    key_guides: Tensor | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each query's key among all keys and negatives (van den Oord et al., 2018, arXiv:1807.03748, equation 4).

    S = logit_scale * Q [K; N]^T,    L = CE(S, i)

    >>> q = torch.eye(3, dtype=torch.float64)
    >>> round(info_nce_loss(q, q, logit_scale=10.0, negatives=-q).item(), 9)
    0.000181585
    """
    _check(
        "info_nce_loss", {"queries": queries, "keys": keys, "negatives": negatives}, query_ids, weights, paired=False
    )
    if len(keys) < len(queries):
        raise ValueError(f"info_nce_loss: keys must have as many rows as queries, {len(queries)}, got {len(keys)}")
    n, local = len(queries), torch.arange(len(queries), device=queries.device)
    every = keys if negatives is None else torch.cat([keys, negatives])
    q_ids, k_ids = _retrieval_ids(n, len(keys), len(every), query_ids, key_ids, negative_ids, queries.device)
    guides = (queries, every) if query_guides is None or key_guides is None else (query_guides, key_guides)
    matched = (guides[0] * guides[1][:n]).sum(1, keepdim=True).detach()
    towers = {
        "query_to_key": (queries, every, q_ids, k_ids, guides[0], guides[1]),
        "key_to_query": (keys[:n], queries, k_ids[:n], q_ids, guides[1][:n], guides[0]),
        "query_to_query": (queries, queries, q_ids, q_ids, guides[0], guides[0]),
        "key_to_key": (keys[:n], every, k_ids[:n], k_ids, guides[1][:n], guides[1]),
    }
    blocks: list[Any] = []
    for name in directions:
        x, y, x_ids, y_ids, x_guide, y_guide = towers[name]
        similarities = x @ y.T
        diagonal = torch.zeros_like(similarities, dtype=torch.bool)
        diagonal[local, local] = True
        equal = (x_ids[:, None] == y_ids) & (x_ids[:, None] != _NO_ID) & ~diagonal
        positive, excluded = (diagonal, equal) if equal_ids == "excluded" else (diagonal | equal, equal & ~equal)
        if name in ("query_to_query", "key_to_key"):  # itself gives its place to the pair, or to nobody
            similarities = torch.where(diagonal, (queries * keys[:n]).sum(1, keepdim=True), similarities)
            if partition == "joint":
                positive, excluded = positive & ~diagonal, excluded | diagonal
        if exclude_above is not None:
            largest = matched + exclude_above * (matched.abs() if exclude_relative else 1)
            excluded = excluded | ((x_guide @ y_guide.T > largest) & ~positive)
        logits = logit_scale * (similarities - margin * positive.to(similarities))
        if name == "query_to_key":
            logits = logits + hardness * (similarities * ~positive).detach()
            if hard_negatives is not None:
                extra = torch.einsum("bd,bhd->bh", queries, hard_negatives)
                beyond = torch.zeros_like(extra, dtype=torch.bool)
                if exclude_above is not None and query_guides is None:
                    beyond = extra > largest
                if hard_negative_ids is not None:
                    beyond = beyond | (hard_negative_ids == q_ids[:, None])
                logits = torch.cat([logits, logit_scale * extra + hardness * extra.detach()], 1)
                positive, excluded = torch.cat([positive, 0 * beyond > 0], 1), torch.cat([excluded, beyond], 1)
        blocks.append((logits, positive, excluded))
    if partition == "joint":
        blocks = [tuple(torch.cat(parts, 1) for parts in zip(*blocks, strict=True))]
    losses = [_cross_entropy(logits, positive, excluded, label_smoothing) for logits, positive, excluded in blocks]
    return _reduce(torch.stack(losses).mean(0), weights, reduction)


def nt_xent_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each row's other view among all other rows (Chen et al., 2020, arXiv:2002.05709, equation 1).

    S = Z Z^T / temperature without its diagonal,    Z = normalize_rows([Z0; Z1]),    L = CE(S, other view)

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(nt_xent_loss(z, z, temperature=0.5).item(), 9)
    0.432652903
    """
    logits, positive, excluded = _two_views(z0, z1, temperature, ids)
    losses = _cross_entropy(logits, positive, excluded)
    return _reduce(losses.unflatten(0, (2, -1)).mean(0), weights, reduction)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    equal_ids: str = "positive",
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Binary cross-entropy of every pair (Zhai et al., 2023, arXiv:2303.15343, algorithm 1).

    S = logit_scale * X Y^T + logit_bias,    L = -sum_ij log sigmoid(z_ij S_ij) / B,    z_ij = 1 if i = j, else -1

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(siglip_loss(x, x, 10.0, -5.0).item(), 9)
    0.020146045
    """
    _check("siglip_loss", {"image_features": image_features, "text_features": text_features}, ids, weights)
    logits = logit_scale * image_features @ text_features.T + logit_bias
    positive, excluded = _pairs(len(logits), ids, equal_ids, logits.device)
    losses = -F.logsigmoid((2.0 * positive - 1) * logits)
    return _reduce(losses.masked_fill(excluded, 0).sum(1), weights, reduction)


def sup_con_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each row's class among all other rows (Khosla et al., 2020, arXiv:2004.11362, equation 2).

    S = Z Z^T / temperature,    L_i = logsumexp_{j != i} S_ij - mean_{p in P(i)} S_ip,    mean over rows with positives

    >>> round(sup_con_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1]), temperature=0.5).item(), 9)
    0.693147181
    """
    cosines, positive, itself = _labeled(features, labels)
    return _reduce(_cross_entropy(cosines / temperature, positive, itself), weights, reduction, positive.any(1))


def dcl_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    sigma: float | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each row's negatives less its other view (Yeh et al., 2021, arXiv:2110.06848, equation 6).

    L_i = logsumexp over negatives of S_ij - w_i S_{i p(i)},    w_i = 2 - B softmax_i(cos_i / sigma) or 1

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(dcl_loss(z, z, temperature=0.5).item(), 9)
    -0.613705639
    """
    logits, positive, excluded = _two_views(z0, z1, temperature, ids)
    negatives = logits.masked_fill(excluded | positive, -torch.inf)
    weight = torch.ones(len(z0), dtype=logits.dtype, device=z0.device)
    if sigma is not None:
        cosines = (_normalized(z0) * _normalized(z1)).sum(1)
        weight = 2 - len(z0) * (cosines / sigma).softmax(0).detach()
    losses = negatives.logsumexp(1) - weight.repeat(2) * logits[positive]
    losses = torch.where((~(excluded | positive)).any(1), losses, 0.0)
    return _reduce(losses.unflatten(0, (2, -1)).mean(0), weights, reduction)


def debiased_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 0.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negatives corrected for false ones, weighed by hardness (Robinson et al., 2021, arXiv:2010.04592, equation 4).

    G = max((n sum e^{(1 + beta) S} / sum e^{beta S} - tau n e^T) / (1 - tau), n e^{-1/t}),    L = -log(e^T / (e^T + G))

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(debiased_loss(z, z, temperature=0.5, tau_plus=0.1, beta=1.0).item(), 9)
    0.145869949
    """
    logits, positive, itself = _two_views(z0, z1, temperature, None)
    negative, count = ~(positive | itself), 2 * len(z0) - 2
    if not count:
        return _reduce(0 * logits.diagonal()[: len(z0)], weights, reduction)
    similar, local = logits[negative].view(-1, count).exp(), logits[positive].exp()
    weighed = similar.sum(1) if not beta else count * similar.pow(1 + beta).sum(1) / similar.pow(beta).sum(1)
    least = count * torch.exp(-1 / torch.as_tensor(temperature, dtype=z0.dtype))
    corrected = torch.maximum((weighed - tau_plus * count * local) / (1 - tau_plus), least)
    return _reduce(-torch.log(local / (local + corrected)).unflatten(0, (2, -1)).mean(0), weights, reduction)


def multi_similarity_loss(
    features: Tensor,
    labels: Tensor,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Soft maxima over far positives and near negatives (Wang et al., 2019, arXiv:1904.06627, equations 9 and 10).

    L_i = log(1 + sum_p exp(-alpha (c_ip - base))) / alpha + log(1 + sum_n exp(beta (c_in - base))) / beta

    >>> round(multi_similarity_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    0.437753896
    """
    cosines, positive, itself = _labeled(features, labels)
    negative = ~positive & ~itself
    if epsilon is not None:
        nearest = cosines.masked_fill(~negative, -torch.inf).amax(1, keepdim=True).detach()
        farthest = cosines.masked_fill(~positive, torch.inf).amin(1, keepdim=True).detach()
        positive, negative = positive & (cosines < nearest + epsilon), negative & (cosines > farthest - epsilon)
    of_positives = (torch.exp(-alpha * (cosines - base)) * positive).sum(1)
    of_negatives = (torch.exp(beta * (cosines - base)) * negative).sum(1)
    return _reduce(of_positives.log1p() / alpha + of_negatives.log1p() / beta, weights, reduction)


def circle_loss(
    features: Tensor,
    labels: Tensor,
    *,
    m: float = 0.4,
    gamma: float = 80.0,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Pairs weighed by their distance from the optimum (Sun et al., 2020, arXiv:2002.10857, equations 6 to 8).

    L_i = softplus(logsumexp_n gamma [c + m]_+ (c - m) + logsumexp_p -gamma [1 + m - c]_+ (c - 1 + m))

    >>> round(circle_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    54.4
    """
    cosines, positive, itself = _labeled(features, labels)
    negative = ~positive & ~itself
    fixed = cosines.detach()
    of_negatives = gamma * (fixed + m).clamp(min=0) * (cosines - m)
    of_positives = -gamma * (1 + m - fixed).clamp(min=0) * (cosines - 1 + m)
    both = positive.any(1) & negative.any(1)
    exponents = [
        of.masked_fill(~among, -torch.inf)[both].logsumexp(1)
        for of, among in ((of_negatives, negative), (of_positives, positive))
    ]
    losses = torch.zeros(len(cosines), dtype=cosines.dtype, device=cosines.device)
    losses = losses.index_put((both.nonzero()[:, 0],), F.softplus(exponents[0] + exponents[1], threshold=40))
    return _reduce(losses, weights, reduction, both)


def triplet_loss(
    features: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    smooth: bool = False,
    distance: str = "euclidean",
    normalize: bool = True,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each row's farthest positive and nearest negative (Hermans et al., 2017, arXiv:1703.07737, equation 5).

    L_i = max(0, max_p D_ip - min_n D_in + margin), or its softplus; mean over rows that have both

    >>> round(triplet_loss(torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 1])).item(), 9)
    0.2
    """
    cosines, positive, itself = _labeled(features, labels)
    z = features.flatten(0, -2)
    z = _normalized(z) if normalize or distance == "cosine" else z
    differences = torch.linalg.vector_norm((z[:, None] - z).masked_fill(itself[..., None], 1), dim=2)
    away = {"euclidean": differences, "squared": differences.square(), "cosine": 1 - cosines}[distance]
    negative = ~positive & ~itself
    both = positive.any(1) & negative.any(1)
    far = away.masked_fill(~positive, -torch.inf).amax(1).masked_fill(~both, 0)
    near = away.masked_fill(~negative, torch.inf).amin(1).masked_fill(~both, 0)
    losses = F.softplus(far - near + margin, threshold=40) if smooth else F.relu(far - near + margin)
    return _reduce(losses.masked_fill(~both, 0), weights, reduction, both)


def moco_loss(
    queries: Tensor,
    keys: Tensor,
    queue: Tensor,
    *,
    logit_scale: Tensor | float,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Each query's key among that and a queue (He et al., 2020, arXiv:1911.05722, equation 1).

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(moco_loss(x, x, -x, logit_scale=10.0).item(), 9)
    9.0798e-05
    """
    _check("moco_loss", {"queries": queries, "keys": keys}, weights)
    _check("moco_loss", {"queries": queries, "queue": queue}, paired=False)
    logits = logit_scale * torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1)
    local = torch.zeros_like(logits, dtype=torch.bool)
    local[:, 0] = True
    return _reduce(_cross_entropy(logits, local, local & ~local), weights, reduction)


def global_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    image_log_averages: Tensor,
    text_log_averages: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    gamma: float = 0.9,
    epsilon: float = 1e-14,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over negatives followed across batches (Yuan et al., 2022, arXiv:2202.12387, algorithm 1).

    u <- (1 - gamma) u + gamma g,    L = t/2 mean [ log(e + u) + log(e + v) ] with dL = t/2 mean [ dg / (e + u) + ... ]

    >>> x, new = torch.eye(3, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    >>> round(global_contrastive_loss(x, x, new, new, temperature=0.5)[0].item(), 9)
    -1.0
    """
    _check(
        "global_contrastive_loss",
        {"image_features": image_features, "text_features": text_features},
        image_log_averages,
        text_log_averages,
        weights,
    )
    similarities, n = image_features @ text_features.T, len(image_features)
    other = ~torch.eye(n, dtype=torch.bool, device=similarities.device)
    if n == 1:
        return 0 * _reduce(similarities[0] / temperature, weights, reduction), image_log_averages, text_log_averages
    losses, after = [], []
    for rows, before in ((similarities, image_log_averages), (similarities.T, text_log_averages)):
        g = (((rows - rows.diagonal()[:, None]) / temperature).exp() * other).sum(1) / (n - 1)
        u = torch.where(before.isneginf(), g, (1 - gamma) * before.exp() + gamma * g).detach()
        losses.append(temperature * ((epsilon + u).log() + (g - g.detach()) / (epsilon + u)))
        after.append(u.log())
    return _reduce((losses[0] + losses[1]) / 2, weights, reduction), after[0], after[1]


def barlow_twins_loss(z0: Tensor, z1: Tensor, *, redundancy: float = 5e-3, epsilon: float = 1e-5) -> Tensor:
    """Correlations of two views against the identity (Zbontar et al., 2021, arXiv:2103.03230, equations 1 and 2).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(barlow_twins_loss(z, z).item(), 9)
    0.007499331
    """
    _check("barlow_twins_loss", {"z0": z0, "z1": z1})
    n0, n1 = ((z - z.mean(0)) / (z.var(0, correction=0) + epsilon).sqrt() for z in (z0, z1))
    c = n0.T @ n1 / len(z0)
    return (1 - c.diagonal()).square().sum() + redundancy * (c.square().sum() - c.diagonal().square().sum())


def vicreg_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    epsilon: float = 1e-4,
) -> Tensor:
    """Distance, variance and covariance of two views (Bardes et al., 2022, arXiv:2105.04906, equations 1 to 6).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(vicreg_loss(z, 2 * z).item(), 9)
    14.559816962
    """
    _check("vicreg_loss", {"z0": z0, "z1": z1})
    loss = invariance * F.mse_loss(z0, z1)
    for z in (z0, z1):
        cov = torch.atleast_2d(z.T.cov())
        loss = loss + variance / 2 * F.relu(1 - (cov.diagonal() + epsilon).sqrt()).mean()
        loss = loss + covariance * (cov.square().sum() - cov.diagonal().square().sum()) / z.shape[1]
    return loss


def w_mse_loss(z0: Tensor, z1: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """Distance of whitened views (Ermolov et al., 2021, arXiv:2007.06346, equations 1, 4 and 5).

    >>> z = torch.eye(3, dtype=torch.float64)
    >>> round(w_mse_loss(z, z, epsilon=0.5).item(), 9)
    0.0
    """
    _check("w_mse_loss", {"z0": z0, "z1": z1})
    whitened = []
    for z in (z0, z1):
        cov = (1 - epsilon) * z.T.cov() + epsilon * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        whitened.append(_normalized((z - z.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(cov)).T))
    return (whitened[0] - whitened[1]).square().sum(1).mean()


def smooth_ap_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Average precision with sigmoids for ranks (Brown et al., 2020, arXiv:2007.12163, equations 5 and 6).

    L_i = 1 - mean_p (1 + sum over other positives of s(c_iq - c_ip)) / (1 + sum over others of s(c_ij - c_ip))

    >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]], dtype=torch.float64)
    >>> round(smooth_ap_loss(z, torch.tensor([0, 1, 0]), temperature=0.1).item(), 9)
    0.480785833
    """
    cosines, positive, itself = _labeled(features, labels)
    larger = ((cosines[:, None, :] - cosines[:, :, None]) / temperature).sigmoid()  # of i, for p, by j
    larger = larger * ~itself[None] * ~itself[:, None]
    precision = (1 + (larger * positive[:, None]).sum(2)) / (1 + larger.sum(2))
    losses = 1 - (precision * positive).sum(1) / positive.sum(1).clamp(min=1)
    return _reduce(losses.masked_fill(~positive.any(1), 0), weights, reduction, positive.any(1))


def distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    teacher_logit_scale: Tensor | float,
    *,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """A teacher's softmax for targets (Wu et al., 2023, arXiv:2309.12314, equation 7).

    L = (CE(S, softmax(T)) + CE(S^T, softmax(T^T))) / 2

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(distillation_loss(x, x, 10.0, x, x, 2.0).item(), 9)
    2.130230374
    """
    _check(
        "distillation_loss",
        {"image_features": image_features, "text_features": text_features},
        teacher_image_features,
        weights,
    )
    teacher_features = {
        "teacher_image_features": teacher_image_features,
        "teacher_text_features": teacher_text_features,
    }
    _check("distillation_loss", teacher_features)
    student = logit_scale * image_features @ text_features.T
    teacher = (teacher_logit_scale * teacher_image_features @ teacher_text_features.T).detach()
    rows, cols = (-(t.softmax(1) * s.log_softmax(1)).sum(1) for s, t in ((student, teacher), (student.T, teacher.T)))
    return _reduce((rows + cols) / 2, weights, reduction)


def matryoshka_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    symmetric: bool = True,
    normalize: bool = True,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """CLIP's loss, or InfoNCE's, of leading parts of features (Kusupati et al., 2022, arXiv:2205.13147, equation 1).

    L = sum_l w_l CE(scale n(Q[:, :m_l]) n(K[:, :m_l])^T)

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> round(matryoshka_loss(x, x, logit_scale=10.0, dims=(1, 3)).item(), 9)
    0.732529253
    """
    _check("matryoshka_loss", {"queries": queries, "keys": keys}, ids, weights)
    loss: Tensor | float = 0.0
    for m, weight in zip(dims, dim_weights or [1.0] * len(dims), strict=True):
        x, y = (_normalized(z[:, :m]) if normalize else z[:, :m] for z in (queries, keys))
        if symmetric:
            part = clip_loss(x, y, logit_scale, ids=ids, equal_ids="excluded", weights=weights, reduction=reduction)
        else:
            part = info_nce_loss(x, y, logit_scale=logit_scale, key_ids=ids, weights=weights, reduction=reduction)
        loss = loss + weight * part
    assert isinstance(loss, Tensor)
    return loss


# What several of them are made of.


def _check(caller: str, matrices: Mapping[str, Tensor | None], *vectors: Tensor | None, paired: bool = True) -> None:
    """Matrices have one width, and as many rows if paired; ids and weights have one entry for each row of the first.

    Raises:
        TypeError: something else than a tensor.
        ValueError: another shape.
    """
    given = {name: x for name, x in matrices.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{caller}: {name} must be a tensor of shape (rows, feature size), got {type(x).__name__}")
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(f"{caller}: {name} must be floating-point, (rows, feature size), got {x.dtype}, {x.shape}")
    first_name, first = next(iter(given.items()))
    for name, x in given.items():
        if x.shape[1] != first.shape[1] or (paired and len(x) != len(first)):
            what = "shape" if paired else "feature size"
            raise ValueError(f"{caller}: {name} must have {first_name}'s {what}, got {x.shape} and {first.shape}")
    for vector in vectors:
        if vector is not None and (not isinstance(vector, Tensor) or vector.shape[:1] != first.shape[:1]):
            got = vector.shape if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"{caller}: ids and weights must have one entry for each of {len(first)} rows, got {got}")


def _cross_entropy(
    logits: Tensor,
    positive: Tensor,
    excluded: Tensor,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Of each row: logsumexp over all that is not excluded, less the mean positive; 0 for a row without positives.

    Logits are taken relative to the largest: the derivative of a logsumexp of 1e16 would be exp(S - logsumexp) with a
    logsumexp that has lost its logarithm.
    """
    candidates = (~excluded).sum(1)
    largest = logits.detach().masked_fill(excluded, -torch.inf).amax(1, keepdim=True)
    logits = logits - torch.where(candidates[:, None] > 0, largest, 0.0)
    logsumexp = logits.masked_fill(excluded, -torch.inf).logsumexp(1)
    count = positive.sum(1)
    mean = logits.masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    loss = logsumexp - (1 - label_smoothing) * mean
    if label_smoothing:
        loss = loss - label_smoothing * logits.masked_fill(excluded, 0).sum(1) / candidates.clamp(min=1)
    return torch.where((candidates > 0) & (count > 0), loss, 0.0)


def _pairs(n: int, ids: Tensor | None, equal_ids: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which entries are positive, which excluded."""
    diagonal = torch.eye(n, dtype=torch.bool, device=device)
    equal = diagonal if ids is None else ids[:, None] == ids
    return (equal, equal & ~equal) if equal_ids == "positive" else (diagonal, equal & ~diagonal)


def _normalized(x: Tensor, eps: float = EPS) -> Tensor:
    """Rows as by `torch.nn.functional.normalize`, also where squares of their entries overflow."""
    return normalize_rows(x, eps).to(x.dtype)


def _two_views(
    z0: Tensor, z1: Tensor, temperature: Tensor | float, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of normalized rows, each one's other view, and the rows that are neither that nor negatives."""
    _check("a loss of two views", {"z0": z0, "z1": z1}, ids)
    z = _normalized(torch.cat([z0, z1]))
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    other = itself.roll(len(z0), 0)
    excluded = itself if ids is None else (ids.repeat(2)[:, None] == ids.repeat(2)) & ~other
    return z @ z.T / temperature, other, excluded


def _labeled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines of all rows, those of the same label (of all views, if there are several), and the diagonal."""
    if isinstance(features, Tensor) and features.dim() == 3:
        features, labels = features.flatten(0, 1), labels.repeat_interleave(features.shape[1])
    _check("a loss of labeled rows", {"features": features}, labels)
    z = _normalized(features)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return z @ z.T, (labels[:, None] == labels) & ~itself, itself


def _retrieval_ids(
    n: int,
    keys: int,
    every: int,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    negative_ids: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Of queries, and of keys and negatives; _NO_ID where nothing is equal."""
    q_ids, k_ids = (torch.full((rows,), _NO_ID, device=device) for rows in (n, every))
    if key_ids is not None:
        k_ids[:keys] = key_ids
        q_ids[:] = key_ids[:n]
    if query_ids is not None:
        q_ids[:] = query_ids
        if key_ids is None:
            k_ids[:n] = query_ids
    if negative_ids is not None:
        k_ids[keys:] = negative_ids
    return q_ids, k_ids


def _reduce(losses: Tensor, weights: Tensor | None, reduction: str, counted: Tensor | None = None) -> Tensor:
    """Of losses and weights (B,); the mean is that of the rows that count."""
    if weights is None:
        weights = torch.ones_like(losses)
    if weights.numel() < len(losses):  # of examples with several views
        weights = weights.repeat_interleave(len(losses) // len(weights))
    weights = weights.flatten()
    if counted is not None:
        weights = weights * counted
    losses = weights * losses
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" or not weights.any() else weights.sum())


def partial_fc_loss(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    margin: Any,
    margin_grad: str = "exact",
    normalize: str = "both",
    bias: Tensor | None = None,
    class_ids: Tensor | None = None,
    log_weights: Tensor | None = None,
    exclude_above: float | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Softmax over classes with a margin (An et al., 2020, arXiv:2010.05222), all logits in memory.

    L_i = -log softmax_j(s c_ij, with s phi(c_iy) for the own class),    c: cosines of embeddings and centers

    Of (C, K, d) centers the nearest of each K counts. Logits are times the norms of what is not normalized, and a bias
    is added.

    >>> from wholebatch import CosFace
    >>> x = torch.eye(3, 4)
    >>> round(partial_fc_loss(x, torch.arange(3), x, margin=CosFace(4.0, 0.5)).item(), 4)
    0.2395
    """
    from .heads.margins import Targets

    _check(
        "partial_fc_loss", {"embeddings": embeddings, "centers": centers.flatten(0, -2)}, labels, weights, paired=False
    )
    labels = labels.view(len(labels), -1)
    counted = labels != ignore_index
    ids = torch.arange(len(centers), device=labels.device) if class_ids is None else class_ids
    local = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    centers = centers.view(len(centers), -1, centers.shape[-1])
    of_unit_embeddings, of_unit_centers = (normalize in ("both", side) for side in ("embeddings", "centers"))
    units = _normalized(embeddings, EPS if of_unit_embeddings else 0.0)
    directions = _normalized(centers, EPS if of_unit_centers else 0.0)
    of_sub_centers = [_angles(units[:, None], directions[of]) for of in local.unbind(1)]
    angles = torch.stack([angles.min(1).values for angles in of_sub_centers], 1)
    norms, lengths = row_norms(embeddings).to(units), row_norms(centers)[:, 0, 0].to(units)
    targets = Targets(angles, norms)
    phi = margin(targets)
    if margin_grad == "straight_through":
        phi = angles.cos() + (phi - angles.cos()).detach()
    cosines = (units @ directions.flatten(0, 1).T).unflatten(1, directions.shape[:2]).max(2).values
    if hasattr(margin, "of_negatives"):
        hard = cosines > (angles + margin.m).cos()
        cosines = torch.where(hard, cosines * (margin.t + cosines), cosines)
    n = torch.ones_like(norms) if of_unit_embeddings else norms
    m = torch.ones_like(lengths) if of_unit_centers else lengths
    b = torch.zeros_like(lengths) if bias is None else bias
    logits = margin.s * cosines * n * m + b + (0 if log_weights is None else log_weights)
    own_logits = margin.s * phi * n * m[local] + b[local]
    if exclude_above is not None:
        logits = logits.masked_fill(cosines > exclude_above, float("-inf"))
    positive = (counted[:, :, None] & (local[:, :, None] == torch.arange(len(ids), device=local.device))).any(1)
    negatives = logits.masked_fill(positive, float("-inf"))
    losses = []
    for of, own_logit in zip(local.unbind(1), own_logits.unbind(1), strict=True):
        of_label = negatives.scatter(1, of[:, None], own_logit[:, None].to(negatives))
        log_p, counts = of_label.log_softmax(1), of_label > float("-inf")
        mean = torch.where(counts, log_p, 0.0).sum(1) / counts.sum(1)
        losses.append(-(1 - label_smoothing) * log_p.gather(1, of[:, None])[:, 0] - label_smoothing * mean)
    per_label = torch.stack(losses, 1)
    if hasattr(margin, "regularizer"):
        per_label = per_label + margin.regularizer(targets)
    per_row = torch.where(counted, per_label, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    some = counted.any(1)
    if reduction == "none":
        return _reduce(per_row, weights, reduction)
    return _reduce(per_row[some], weights if weights is None else weights[some], reduction)


def _angles(x: Tensor, w: Tensor) -> Tensor:
    """acos(x . w) of normalized rows (Kahan, 2006, How futile are mindless assessments of roundoff, section 12).

    At 0 and pi it is flat. Rows that were shorter than 1e-12 lack something to norm 1.
    """
    eps = torch.finfo(x.dtype).eps
    lacking = sum(torch.where(1 - z.square().sum(-1) > 16 * eps, 1 - z.square().sum(-1), 0.0) for z in (x, w))
    squares = [z.square().sum(-1) + lacking for z in (x - w, x + w)]
    apart, together = (torch.where(s <= (16 * eps) ** 2, 0.0, s.clamp(min=(16 * eps) ** 2).sqrt()) for s in squares)
    return 2 * torch.atan2(apart, together)

"""The library's losses, each declared in at most twelve lines, with calls of both for a batch of two views."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus

import wholebatch as wb

SCALE, EPSILON = 4.0, 0.1


def other(x, y):
    return x.index != y.index


def same(x, y):
    return (x.label == y.label) & (x.index != y.index)


def different(x, y):
    return x.label != y.label


def scaled(s, x, y, p):
    return p.scale * s


def all_minus_own(r, x, p):
    return r.all - r.own


# declarations


def clip(**options):
    return wb.PairLoss(
        {
            "rows": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - x.partner)),
            "cols": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - y.partner)),
        },
        lambda r, x, p: r.rows / 2,
        column_loss=lambda r, y, p: r.cols / 2,
        **options,
    )


def info_nce(**options):
    """Keys, and further negatives of all queries in the same tower, without a partner."""
    return wb.PairLoss({"all": wb.terms.LogSumExp(scaled), "own": wb.terms.Partner(scaled)}, all_minus_own, **options)


def info_nce_with_hard_negatives(**options):
    return wb.PairLoss(
        {"all": wb.terms.LogSumExp(scaled, over="both"), "own": wb.terms.Partner(scaled)}, all_minus_own, **options
    )


def info_nce_in_four_directions(**options):
    def loss(r, x, p):
        return torch.stack([torch.logaddexp(r.qk, r.own), r.kq, r.qq, r.kk]).logsumexp(0) - r.own

    terms = {
        "qk": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s.qk),
        "own": wb.terms.Partner(lambda s, x, y, p: p.scale * s.qk),
    }
    terms["kq"] = wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s.kq, where=other)
    terms["qq"] = wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s.qq, where=other)
    terms["kk"] = wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s.kk, where=other)
    return wb.PairLoss(terms, loss, similarity=dict.fromkeys(("qk", "kq", "qq", "kk"), "dot"), **options)


def nt_xent(**options):
    return wb.PairLoss(
        {"all": wb.terms.LogSumExp(scaled, where=other), "own": wb.terms.Sum(scaled, where=same)},
        all_minus_own,
        similarity="cosine",
        **options,
    )


def sup_con(**options):
    return wb.PairLoss(
        {
            "all": wb.terms.LogSumExp(scaled, where=other),
            "own": wb.terms.Mean(scaled, where=same),
            "n": wb.terms.Count(where=same),
        },
        lambda r, x, p: (torch.where(r.n > 0, r.all - r.own, 0.0), (r.n > 0).double()),
        similarity="cosine",
        **options,
    )


def siglip(**options):
    return wb.PairLoss(
        {
            "all": wb.terms.Sum(lambda s, x, y, p: softplus(p.scale * s + p.bias)),
            "own": wb.terms.Partner(lambda s, x, y, p: p.scale * s + p.bias),
        },
        all_minus_own,
        **options,
    )


def dcl(**options):
    return wb.PairLoss(
        {"negatives": wb.terms.LogSumExp(scaled, where=different), "own": wb.terms.Sum(scaled, where=same)},
        lambda r, x, p: torch.where(r.negatives.isneginf(), 0.0, r.negatives - r.own),
        similarity="cosine",
        **options,
    )


def debiased(tau_plus=0.1, beta=0.5, **options):
    def loss(r, x, p):
        weighted = (r.up - r.down).exp()  # the mean of exp((1 + beta) S) under exp(beta S)
        corrected = r.n * (weighted - tau_plus * r.own.exp()) / (1 - tau_plus)
        corrected = torch.maximum(corrected, r.n * math.exp(-SCALE))
        return (1 + corrected * (-r.own).exp()).log()

    up, down = (lambda s, x, y, p: (1 + beta) * p.scale * s), (lambda s, x, y, p: beta * p.scale * s)
    terms = {"up": wb.terms.LogSumExp(up, where=different), "down": wb.terms.LogSumExp(down, where=different)}
    terms |= {"own": wb.terms.Sum(scaled, where=same), "n": wb.terms.Count(where=different)}
    return wb.PairLoss(terms, loss, similarity="cosine", **options)


def multi_similarity(**options):
    far, near = (lambda s, x, y, p: -2 * (s - 0.5)), (lambda s, x, y, p: 50 * (s - 0.5))
    mined_far, mined_near = (
        lambda x, y, s: same(x, y) & (s < x.near + EPSILON),
        lambda x, y, s: different(x, y) & (s > x.far - EPSILON),
    )
    terms = {"far": wb.terms.LogSumExp(far, mined_far), "near": wb.terms.LogSumExp(near, mined_near)}
    return wb.PairLoss(
        terms, lambda r, x, p: softplus(r.far) / 2 + softplus(r.near) / 50, similarity="cosine", **options
    )


def hardest(term, where, **options):
    return wb.PairLoss({"s": term(where=where)}, lambda r, x, p: r.s, similarity="cosine", reduction="none", **options)


def circle(m=0.4, gamma=8.0, **options):
    def near(s, x, y, p):
        return gamma * (s.detach() + m).clamp(min=0) * (s - m)

    def far(s, x, y, p):
        return -gamma * (1 + m - s.detach()).clamp(min=0) * (s - 1 + m)

    def loss(r, x, p):
        return softplus(r.near + r.far), (r.near + r.far).isfinite().double()

    terms = {"near": wb.terms.LogSumExp(near, where=different), "far": wb.terms.LogSumExp(far, where=same)}
    return wb.PairLoss(terms, loss, similarity="cosine", **options)


def hard_triplet(margin=0.2, **options):
    def loss(r, x, p):
        complete = r.far.isfinite() & r.near.isfinite()
        far, near = (torch.where(complete, -s, 1.0).sqrt() for s in (r.far, r.near))
        return torch.relu(far - near + margin), complete.double()

    terms = {"far": wb.terms.Min(where=same), "near": wb.terms.Max(where=different)}
    return wb.PairLoss(terms, loss, similarity="neg_squared_distance", **options)


def guided(margin=0.05, **options):
    """GIST: what the guide finds more similar than the pair, within a margin, is no negative."""

    def candidate(x, y, s):
        return (s.guide <= x.partner.guide + margin) | (x.index == y.index)

    def score(s, x, y, p):
        return p.scale * s.student

    terms = {"all": wb.terms.LogSumExp(score, candidate), "own": wb.terms.Partner(score)}
    return wb.PairLoss(terms, all_minus_own, similarity={"student": "dot", "guide": "dot"}, **options)


# calls: the declared loss, and the loss of the library, of the same tensors; v and w are two views, n further rows


def declared_and_given(name, data, options):
    v, w, n, label, scale = (data[key] for key in ("v", "w", "n", "label", "scale"))
    both = torch.cat([v, w])
    of_both = {"label": label["example"].repeat(2)}
    if name == "clip":
        return clip(**options)(v, w, parameters={"scale": scale}), wb.functional.clip_loss(v, w, scale, **options)
    if name == "info_nce":
        none = torch.full((len(n),), -1)
        pairs = label["example"]
        loss = info_nce(**options)(
            v,
            torch.cat([w, n]),
            x_data={"pair": pairs},
            y_data={"pair": torch.cat([pairs, none])},
            parameters={"scale": scale},
        )
        return loss, wb.functional.info_nce_loss(v, w, logit_scale=scale, negatives=n, **options)
    if name == "info_nce_with_hard_negatives":
        own = torch.stack([w.flip(1), v.flip(1)], 1)
        loss = info_nce_with_hard_negatives(**options)(v, w, candidates=own, parameters={"scale": scale})
        return loss, wb.functional.info_nce_loss(v, w, logit_scale=scale, hard_negatives=own, **options)
    if name == "info_nce_in_four_directions":
        x, y = {"qk": v, "kq": w, "qq": v, "kk": w}, {"qk": w, "kq": v, "qq": v, "kk": w}
        directions = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
        loss = info_nce_in_four_directions(**options)(x, y, parameters={"scale": scale})
        return loss, wb.functional.info_nce_loss(v, w, logit_scale=scale, directions=directions, **options)
    if name == "siglip":
        bias = data["bias"]
        loss = siglip(**options)(v, w, parameters={"scale": scale, "bias": bias})
        return loss, wb.functional.siglip_loss(v, w, scale, bias, **options)
    if name == "guided":
        guides = (v.flip(1).detach(), w.flip(1).detach())
        loss = guided(**options)(
            {"student": v, "guide": guides[0]}, {"student": w, "guide": guides[1]}, parameters={"scale": scale}
        )
        return loss, wb.functional.info_nce_loss(
            v, w, logit_scale=scale, exclude_above=0.05, query_guides=guides[0], key_guides=guides[1], **options
        )
    if name in ("nt_xent", "dcl", "debiased"):
        loss = {"nt_xent": nt_xent, "dcl": dcl, "debiased": debiased}[name](**options)
        settings = {"tau_plus": 0.1, "beta": 0.5} if name == "debiased" else {}
        given = getattr(wb.functional, f"{name}_loss")(v, w, temperature=1 / SCALE, **settings, **options)
        return loss(both, x_data=of_both, parameters={"scale": SCALE}), given
    classes = {"label": label["class"]}
    if name == "sup_con":
        given = wb.functional.sup_con_loss(v, classes["label"], temperature=1 / SCALE, **options)
        return sup_con(**options)(v, x_data=classes, parameters={"scale": SCALE}), given
    if name == "multi_similarity":
        mined = {
            "near": hardest(wb.terms.Max, different, **options)(v, x_data=classes).detach(),
            "far": hardest(wb.terms.Min, same, **options)(v, x_data=classes).detach(),
        }
        loss = multi_similarity(**options)(v, x_data={**classes, **mined})
        return loss, wb.functional.multi_similarity_loss(v, classes["label"], epsilon=EPSILON, **options)
    if name == "circle":
        given = wb.functional.circle_loss(v, classes["label"], m=0.4, gamma=8.0, **options)
        return circle(**options)(v, x_data=classes), given
    assert name == "hard_triplet"
    given = wb.functional.triplet_loss(v, classes["label"], normalize=False, **options)
    return hard_triplet(**options)(v, x_data=classes), given


NAMES = (
    "clip",
    "info_nce",
    "info_nce_with_hard_negatives",
    "info_nce_in_four_directions",
    "nt_xent",
    "sup_con",
    "siglip",
    "dcl",
    "debiased",
    "multi_similarity",
    "circle",
    "hard_triplet",
    "guided",
)


def data_of(counts, rank, seed=0):
    """Return a rank's rows of two views, further rows, labels and scalars, all leaves."""
    made = torch.Generator().manual_seed(seed)
    total, at = sum(counts), slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def rows(count, where):
        return torch.randn(count, 6, generator=made, dtype=torch.float64)[where].clone().requires_grad_()

    v, w, n = rows(total, at), rows(total, at), rows(len(counts) * 2, slice(2 * rank, 2 * rank + 2))
    label = {"example": torch.arange(total)[at], "class": torch.randint(0, 3, (total,), generator=made)[at]}
    one = {
        name: torch.tensor([value], dtype=torch.float64, requires_grad=True)
        for name, value in (("scale", 2.0), ("bias", -3.0))
    }
    return {"v": v, "w": w, "n": n, "label": label, **one}

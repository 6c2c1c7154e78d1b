"""Every loss that kernels compute, in every form that starts them differently: the cases of the kernels' tests."""

from __future__ import annotations

import torch

import wholebatch as wb

# The checks of kernels, for tests whose kernels do nothing.
REHEARSE, CANARIES = "wholebatch.nodes.kernel_check._rehearse", "wholebatch.contract.canaries.Canaries.check"
PASSED = {"passed": "all of them", "failed": "", "milliseconds": 0.0, "in PyTorch": 0.0, "cached": False}


def losses(x, y, ids, scale=14.3):
    """Return by name functions of a module of losses and its options; return also the scale that some of them learn."""
    scale = torch.tensor(scale, dtype=torch.float64, device=x.device, requires_grad=True)
    labels = torch.arange(len(x), device=x.device) % 4
    several = torch.stack([ids, torch.where(ids % 2 == 0, (ids + 1) % 30, -100)], dim=1)
    averages = [torch.full((len(x),), 3.0, dtype=torch.float64, device=x.device)] * 2
    learned = torch.tensor(-4.0, dtype=torch.float64, device=x.device, requires_grad=True)
    bias = torch.linspace(-1, 1, len(y), device=x.device)
    texts, fewer = ({"logit_scale": scale, **offsets(n, len(y), x.device)} for n in (len(x), len(x) - len(x) // 4))
    wide = (64, 512) if x.shape[1] > 512 else (8, 24)
    arcface, cosface = wb.ArcFace(16.0, 0.5), wb.CosFace(16.0)
    return {
        "clip": lambda f, more: f.clip_loss(x, y, scale, **more),
        "clip, ids": lambda f, more: f.clip_loss(x, y, scale, ids=ids, **more),
        "clip, ids excluded": lambda f, more: f.clip_loss(x, y, scale, ids=ids, equal_ids="excluded", **more),
        "clip, label smoothing": lambda f, more: f.clip_loss(x, y, scale, label_smoothing=0.1, **more),
        "info_nce": lambda f, more: f.info_nce_loss(x, y, logit_scale=scale, **more),
        "info_nce, both directions": lambda f, more: f.info_nce_loss(
            x, y, logit_scale=scale, directions=("query_to_key", "key_to_query"), partition="per_direction", **more
        ),
        "info_nce, ids": lambda f, more: f.info_nce_loss(
            x, y, logit_scale=scale, query_ids=ids, key_ids=ids, equal_ids="positive", **more
        ),
        "nt_xent": lambda f, more: f.nt_xent_loss(2 * x, y / 4, temperature=0.1, **more),
        "nt_xent, ids": lambda f, more: f.nt_xent_loss(x, y, temperature=0.1, ids=ids, **more),
        "dcl": lambda f, more: f.dcl_loss(x / 2, 4 * y, temperature=0.1, **more),
        "sup_con": lambda f, more: f.sup_con_loss(4 * x, labels, temperature=0.1, **more),
        "siglip": lambda f, more: f.siglip_loss(x, y, scale, -4.0, **more),
        "siglip, learned bias": lambda f, more: f.siglip_loss(x, y, scale, learned, **more),
        "siglip, ids": lambda f, more: f.siglip_loss(x, y, scale, -4.0, ids=ids, **more),
        "siglip, ids excluded": lambda f, more: f.siglip_loss(x, y, scale, -4.0, ids=ids, equal_ids="excluded", **more),
        "debiased": lambda f, more: f.debiased_loss(x, y, temperature=0.1, tau_plus=0.1, **more),
        "matryoshka": lambda f, more: f.matryoshka_loss(x, y, logit_scale=scale, dims=(8, 16, 24), **more),
        "matryoshka, ids": lambda f, more: f.matryoshka_loss(
            2 * x, y, logit_scale=scale, dims=(7, 13), ids=ids, symmetric=False, **more
        ),
        "matryoshka, wide parts": lambda f, more: f.matryoshka_loss(x, y, logit_scale=scale, dims=wide, **more),
        "matryoshka, as they are": lambda f, more: f.matryoshka_loss(
            x, y, logit_scale=scale, dims=(20,), normalize=False, **more
        ),
        "global_contrastive": lambda f, more: f.global_contrastive_loss(x, y, *averages, temperature=0.1, **more)[0],
        "moco": lambda f, more: f.moco_loss(x, y, y.detach().flip(0)[:30].roll(1, 1), logit_scale=scale, **more),
        "partial_fc": lambda f, more: f.partial_fc_loss(x, ids, 3 * y, margin=arcface, **more),
        "partial_fc, several labels": lambda f, more: f.partial_fc_loss(x, several, 3 * y, margin=arcface, **more),
        "partial_fc, bias": lambda f, more: f.partial_fc_loss(2 * x, ids, 3 * y, margin=cosface, bias=bias, **more),
        "partial_fc, learned bias": lambda f, more: f.partial_fc_loss(
            2 * x, ids, 3 * y, margin=cosface, bias=bias.clone().requires_grad_(), **more
        ),
        "partial_fc, label smoothing": lambda f, more: f.partial_fc_loss(
            2 * x, ids, 3 * y, margin=cosface, label_smoothing=0.1, **more
        ),
        "partial_fc, not normalized": lambda f, more: f.partial_fc_loss(
            x, ids, 3 * y, margin=wb.CosFace(2.0), normalize="none", **more
        ),
        "max_sim": lambda f, more: f.max_sim_loss(x, y, **texts, **more),
        "max_sim, documents stay": lambda f, more: f.max_sim_loss(
            x[: len(x) - len(x) // 4], y, **fewer, directions=("document_to_query",), **more
        ),
    }, scale


def offsets(queries, documents, device):
    """Return the offsets of texts with so many tokens: one long document, others of 1, 2, ...; as many queries."""
    lengths = [max(1, 7 * documents // 10)]
    while (left := documents - sum(lengths)) > 0:
        lengths.append(min(left, len(lengths)))
    of_queries = [queries * at // len(lengths) for at in range(len(lengths) + 1)]
    return {
        "query_offsets": torch.tensor(of_queries, device=device),
        "document_offsets": torch.tensor([0, *lengths], device=device).cumsum(0),
    }


def learns_its_scale(name):
    """Return whether the loss depends on the scale that `losses` returns."""
    return name.split(",")[0] in ("clip", "info_nce", "siglip", "moco", "matryoshka", "max_sim")

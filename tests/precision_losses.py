"""The losses whose errors are measured in each precision of products, with their references and plain formulas."""

import functools

import torch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch import functional as wf
from wholebatch import reference


def features(kind, rows=384, d=96):
    """Return two towers of unit rows: unrelated ones, or pairs as after half of a training or all of it."""
    x, noise = (F.normalize(torch.randn(rows, d, dtype=torch.float64), dim=1) for _ in range(2))
    of_pair = {"random": 0.0, "half trained": 0.3, "trained": 0.45}[kind]
    return x.float(), F.normalize(of_pair * x + (1 - of_pair) * noise, dim=1).float()


LABELS = torch.arange(384) // 3


def labels_of(x):
    """Return the labels of both views, on the device of the first."""
    return LABELS.repeat(2).to(x.device)


CENTERS = F.normalize(torch.randn(700, 96, generator=torch.Generator().manual_seed(1)), dim=1)


def autocast(loss):
    """Return a plain loss under autocast: its products are rounded to bfloat16, features and results."""

    @functools.wraps(loss)
    def call(*args):
        with torch.autocast(args[0].device.type, torch.bfloat16):
            return loss(*args)

    return call


def numbered(x):
    """Return the number of each row."""
    return torch.arange(len(x), device=x.device)


def cross_entropies(logits):
    labels = numbered(logits)
    return (F.cross_entropy(logits.float(), labels) + F.cross_entropy(logits.float().T, labels)) / 2


@autocast
def plain_clip(x, y, scale):
    return cross_entropies(scale * x @ y.T)


@autocast
def plain_info_nce(x, y, scale):
    return F.cross_entropy((scale * x @ y.T).float(), numbered(x))


@autocast
def plain_nt_xent(x, y, scale):
    z = F.normalize(torch.cat([x, y]), dim=1)
    logits = (z @ z.T * scale).float().fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, numbered(z).roll(len(x)))


@autocast
def plain_siglip(x, y, scale):
    logits = (scale * x @ y.T).float() - 5
    return -F.logsigmoid(logits * (2 * torch.eye(len(x), device=x.device) - 1)).sum() / len(x)


@autocast
def plain_sup_con(x, y, scale):
    z, labels = F.normalize(torch.cat([x, y]), dim=1), labels_of(x)
    logits = (z @ z.T * scale).float().fill_diagonal_(-torch.inf)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    chosen = torch.where(same, logits.log_softmax(1), 0.0)
    return -(chosen.sum(1) / same.sum(1)).mean()


@autocast
def plain_partial_fc(x, y, scale):
    logits = scale * F.normalize(x, dim=1) @ F.normalize(torch.cat([y, CENTERS.to(y)]), dim=1).T
    return F.cross_entropy(logits.float(), numbered(x))


@autocast
def plain_classes(x, y, scale):
    return F.cross_entropy((scale * x @ torch.cat([y, CENTERS.bfloat16().to(y)]).T).float(), numbered(x))


def partial_fc(loss, centers=CENTERS, **options):
    """Return a classifier's loss, without a margin; the first centers are the second tower, which learns."""

    def call(x, y, scale, **more):
        margin = wb.ArcFace(s=scale, m=0.0)
        return loss(x, numbered(x), torch.cat([y, centers.to(y)]), margin=margin, **options, **more)

    return call


LOSSES = {  # ours, the reference, plain PyTorch under autocast
    "CLIP": (wf.clip_loss, reference.clip_loss, plain_clip),
    "InfoNCE": (
        lambda x, y, scale, **more: wf.info_nce_loss(x, y, logit_scale=scale, **more),
        lambda x, y, scale: reference.info_nce_loss(x, y, logit_scale=scale),
        plain_info_nce,
    ),
    "NT-Xent": (
        lambda x, y, scale, **more: wf.nt_xent_loss(x, y, temperature=1 / scale, **more),
        lambda x, y, scale: reference.nt_xent_loss(x, y, temperature=1 / scale),
        plain_nt_xent,
    ),
    "SigLIP": (
        lambda x, y, scale, **more: wf.siglip_loss(x, y, scale, -5.0, **more),
        lambda x, y, scale: reference.siglip_loss(x, y, scale, -5.0),
        plain_siglip,
    ),
    "SupCon": (
        lambda x, y, scale, **more: wf.sup_con_loss(torch.cat([x, y]), labels_of(x), temperature=1 / scale, **more),
        lambda x, y, scale: reference.sup_con_loss(torch.cat([x, y]), labels_of(x), temperature=1 / scale),
        plain_sup_con,
    ),
    "PartialFC": (partial_fc(wf.partial_fc_loss), partial_fc(reference.partial_fc_loss), plain_partial_fc),
}
NOT_NORMALIZED = {  # the same classifier of rows as they are: if they are bfloat16, no product rounds them
    "PartialFC, not normalized": (
        partial_fc(wf.partial_fc_loss, CENTERS.bfloat16(), normalize="none"),
        partial_fc(reference.partial_fc_loss, CENTERS.bfloat16(), normalize="none"),
        plain_classes,
    ),
}


def value_and_gradients(loss, x, y, scale, **options):
    """Return the loss, and its gradient by both towers, in float64."""
    x, y = (z.clone().requires_grad_() for z in (x, y))
    value = loss(x, y, scale, **options)
    grads = torch.autograd.grad(value, (x, y))
    return value.detach().double(), torch.cat(grads).double()


def errors(name, kind, scale, precision, *, given=torch.float32):
    """Return the relative errors of the loss and of its gradient, against the reference in float64.

    Args:
        name: of the loss.
        kind: of the features.
        scale: the scale of logits.
        precision: of products; "autocast": plain PyTorch under autocast.
        given: the dtype to which features are rounded beforehand.
    """
    ours, truth, plain = (LOSSES | NOT_NORMALIZED)[name]
    x, y = (z.to(given).float() for z in features(kind))
    value, grad = value_and_gradients(truth, x.double(), y.double(), scale)
    if precision == "autocast":
        found, of = value_and_gradients(plain, x, y, scale)
    else:
        found, of = value_and_gradients(ours, x, y, scale, precision=precision)
    return ((found - value).abs() / value).item(), ((of - grad).norm() / grad.norm()).item()

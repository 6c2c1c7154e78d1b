"""checks="deferred": the loss and gradients of the reference, nothing read, and mistakes that raise at the next call."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from kernel_losses import CANARIES, PASSED, REHEARSE
from test_host_sync import reads_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.testing import run_ranks

STEPS = 4
SCALES = (14.3, 15.0, 40.0, 99.0)


def losses_of(x, y, scale, bias, labels):
    """Return functions of a module of losses and its options, by name; scale and bias are learned."""
    temperature = 1 / scale.detach()
    learned, few = temperature.clone().requires_grad_(), normalize(torch.ones(5, x.shape[1]).to(x).cumsum(0), dim=1)
    return {
        "clip": (lambda f, m: f.clip_loss(x, y, scale, **m), [x, y, scale]),
        "clip, smoothed": (lambda f, m: f.clip_loss(x, y, scale, label_smoothing=0.1, **m), [x, y, scale]),
        "clip, ids": (lambda f, m: f.clip_loss(x, y, scale, ids=labels, **m), [x, y, scale]),
        "clip, weights": (lambda f, m: f.clip_loss(x, y, scale, weights=1.0 + labels.abs(), **m), [x, y, scale]),
        "clip, scale of the host": (lambda f, m: f.clip_loss(x, y, 14.3, **m), [x, y]),
        "info_nce": (lambda f, m: f.info_nce_loss(x, y, logit_scale=scale, **m), [x, y, scale]),
        "info_nce, all": (
            lambda f, m: f.info_nce_loss(
                x, y, logit_scale=scale, directions=ALL, partition="joint", **m
            ),
            [x, y, scale],
        ),
        "nt_xent": (lambda f, m: f.nt_xent_loss(x, y, temperature=0.1, **m), [x, y]),
        "nt_xent, learned": (lambda f, m: f.nt_xent_loss(x, y, temperature=learned, **m), [x, y, learned]),
        "sup_con": (lambda f, m: f.sup_con_loss(x, labels, temperature=learned, **m), [x, learned]),
        "siglip": (lambda f, m: f.siglip_loss(x, y, scale, bias, **m), [x, y, scale, bias]),
        "dcl": (lambda f, m: f.dcl_loss(x, y, temperature=0.1, sigma=0.5, **m), [x, y]),
        "debiased": (lambda f, m: f.debiased_loss(x, y, temperature=0.1, tau_plus=0.1, beta=0.5, **m), [x, y]),
        "moco": (lambda f, m: f.moco_loss(x, y, few, logit_scale=scale, **m), [x, y, scale]),
    }


ALL = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
NAMES = [*losses_of(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(()), torch.ones(()), torch.zeros(1))]


def batch(step, counts, dtype=torch.float64, dim=8):
    """Return the tensors of all ranks in a step, and this rank's leaves."""
    torch.manual_seed(step)
    total = sum(counts)
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = sum(counts[:rank])
    x = normalize(torch.randn(total, dim, dtype=torch.float64), dim=1)
    y = normalize(x + 0.5 * torch.randn(total, dim, dtype=torch.float64), dim=1)
    labels = torch.randint(0, 4, (total,))
    local = [of[start : start + counts[rank]].to(dtype).requires_grad_() for of in (x, y)]
    scalars = [torch.tensor(of, dtype=torch.float64, requires_grad=True) for of in (SCALES[step % STEPS], -5.0 - step)]
    return (x, y, labels), (*local, *scalars, labels[start : start + counts[rank]]), slice(start, start + counts[rank])


def outcome(name, leaves, more, module=wb.functional, backward=True):
    function, inputs = losses_of(*leaves)[name]
    loss = function(module, more)
    for of in inputs:
        of.grad = None
    if backward:
        loss.backward()
    return [loss.detach(), *(of.grad for of in inputs)]


def body(name, kernel, counts):
    """Return the largest relative error of values and gradients in steps of which no rank reads but the first."""
    size, found = len(counts), []
    for step in range(STEPS):
        (x, y, labels), leaves, at = batch(step, counts, torch.float64 if kernel == "torch" else torch.float32)
        more = {"kernel": kernel, "sync": None, "checks": "deferred"}
        if name == "moco":
            more.pop("sync")
        loss, *grads = outcome(name, leaves, more | {"sync": None})
        assert not loss.isnan()
        scalars = [of.detach().clone().requires_grad_() for of in leaves[2:4]]
        whole = [x.clone().requires_grad_(), y.clone().requires_grad_(), *scalars, labels]
        expected, *exact = outcome(name, whole, {}, wb.reference)
        found.append(((loss - expected).abs() / expected.abs().clamp(min=1e-3)).item())
        for of, wanted in zip(grads, exact, strict=True):
            if of.dim() == 0 and size > 1:
                dist.all_reduce(of)
            wanted = wanted[at] if of.dim() else wanted
            found.append(((of - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item() if of.numel() else 0.0)
    return max(found)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_reference(name, kernel):
    """A scale that changes in each step is read on the device."""
    assert body(name, kernel, (9,)) < (1e-11 if kernel == "torch" else 2e-4)


@pytest.mark.parametrize("counts", [(5, 4), (4, 0, 5), (1, 2, 3, 4)])
def test_values_and_gradients_on_several_ranks(counts):
    for found in run_ranks(several, len(counts), counts, timeout_s=240):
        assert max(found.values()) < 1e-11, found


def several(counts):
    return {name: body(name, "torch", counts) for name in NAMES}


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read(name, kernel, monkeypatch):
    if kernel == "triton":  # the interpreter reads tensors
        monkeypatch.setattr(REHEARSE, lambda *_, **more: PASSED)
        monkeypatch.setattr(CANARIES, lambda *_: None)
        monkeypatch.setattr("wholebatch.kernels.launch.run", lambda *_, **constants: None)
    elif name in ("clip, ids", "sup_con"):
        pytest.skip("plain PyTorch lists the entries with equal ids")
    reads = []
    for checks in ("entry", "deferred"):
        more = {"kernel": kernel, "checks": checks}
        outcome(name, batch(0, (9,))[1], more)
        with pytest.MonkeyPatch.context() as patch:
            leaves, found = batch(0, (9,))[1], reads_of(patch)
            outcome(name, leaves, more)
        reads.append(len(found))
    assert reads == [1, 0]

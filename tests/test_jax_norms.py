"""Losses of wholebatch.jax that normalize, on rows of extreme norms: the values of PyTorch's `normalize`, no NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import wholebatch as wb

jax = pytest.importorskip("jax")
jnp = jax.numpy
wbj = pytest.importorskip("wholebatch.jax")

NORMS = [0.0, 1e-13, 3e-13, 2e-12, 1.0, 1e15, 1e19, 1e20]
LABELS = [0, 0, 0, 1, 1, 1, 2, 2]
LOSSES = {
    "nt_xent": lambda f, x, y, labels, of: f.nt_xent_loss(x, y),
    "sup_con": lambda f, x, y, labels, of: f.sup_con_loss(x, labels),
    "partial_fc": lambda f, x, y, labels, of: f.partial_fc_loss(x, labels, y, margin=of.ArcFace(8.0, 0.3)),
}


def features(zeros):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    norms = torch.tensor(NORMS, dtype=torch.float64)
    norms = norms if zeros else norms.clamp(min=1e-13)
    x, y = (n[:, None] * z / z.norm(dim=1, keepdim=True) for n, z in ((norms, x), (norms.flip(0), y)))
    return [z.float() for z in (x, y)]


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name):
    x, y = features(zeros=name != "partial_fc")
    labels = torch.tensor(LABELS)
    leaves = [z.double().requires_grad_() for z in (x, y)]
    true = LOSSES[name](wb.reference, *leaves, labels, wb)
    differentiated = 1 if name == "sup_con" else 2
    grads = torch.autograd.grad(true, leaves[:differentiated])
    for functions in (wbj, wbj.reference):

        def loss(x, y, functions=functions):
            return LOSSES[name](functions, x, y, jnp.asarray(LABELS), wbj)

        found, of_rows = jax.value_and_grad(loss, argnums=tuple(range(differentiated)))(
            *(jnp.asarray(z.numpy()) for z in (x, y))
        )
        assert abs(float(found) - true.item()) < 1e-5 * abs(true.item())
        for z, ours, truth in zip((x, y), of_rows, grads, strict=False):
            assert np.isfinite(np.asarray(ours)).all()
            # Derivatives by a normalized row are about 1: gradients are multiplied by the rows' divisors.
            divisors = z.double().norm(dim=1, keepdim=True).clamp(min=1e-12)
            error = (torch.from_numpy(np.array(ours)).double() - truth) * divisors
            assert error.abs().max() < 2e-5 * (truth * divisors).abs().max()

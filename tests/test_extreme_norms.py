"""Rows of any norm: losses that normalize divide by max(norm, 1e-12), as torch's `normalize`, in value and gradient.

The expected result is the dense float64 reference. Losses and reference share one rule for norms, so the reference is
compared with its own formulas on `torch.nn.functional.normalize`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from faults.numerics import MORE, PARTIAL_FC
from loss_cases import LOSSES, gradients, rows_of, whole_batch

import wholebatch as wb
from wholebatch import reference
from wholebatch._base.normalize import normalize_rows, project_, row_norms
from wholebatch.reference import _shared as parts_of_reference
from wholebatch.testing import run_ranks

NORMS = [0.0, 1e-20, 1e-13, 3e-13, 0.999e-12, 1.001e-12, 2e-12, 1e-3, 1.0, 1e6, 1e15, 1e19, 1e20]
CASES = {
    name: case
    for name, case in (LOSSES | MORE | PARTIAL_FC).items()
    if (case.normalizes or name == "matryoshka")
    and case.choices  # without any it is a loss of moments, which takes rows as they are
    and name != "triplet, no hinge, not normalized"
}
TORCH = {"normalize_rows": lambda x, eps=1e-12: F.normalize(x, dim=-1, eps=eps or 1e-300)}


@contextmanager
def normalize_of_torch():
    """Make the reference use `torch.nn.functional.normalize` instead of the library's rule."""
    ours = {name: getattr(parts_of_reference, name) for name in TORCH}
    for name, theirs in TORCH.items():
        setattr(parts_of_reference, name, theirs)
    try:
        yield
    finally:
        for name, of in ours.items():
            setattr(parts_of_reference, name, of)


def extreme_batch(name, case, counts):
    """Return all ranks' inputs: about two rows of features of each norm, one duplicate, one antipode."""
    inputs = whole_batch(case, counts, d=6, seed=len(name))
    zeros = "partial_fc" not in name
    for shift, position in enumerate(case.differentiable):
        z = inputs[position]
        if z.dim() == 2:
            norms = torch.tensor(NORMS if zeros else NORMS[1:], dtype=torch.float64)
            z = norms.roll(5 * shift).repeat(3)[: len(z), None] * normalize_rows(z)
            z[1], z[-1] = z[-2], -z[len(z) // 2]
            inputs[position] = z
    return inputs


def compared(name, case, inputs, found, true, relative):
    """Compare gradients times the rows' norms, so that all rows have derivatives of similar size."""
    assert abs(found[0] - true[0]) <= relative * true[0].abs() + relative
    for of, truth, position in zip(found[1:], true[1:], case.differentiable, strict=False):
        assert of.isfinite().all()
        if of.dim() != 2:
            continue
        z = inputs[position].double()
        divisors = z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        of, truth = of.double() * divisors, truth * divisors
        if not case.smooth:  # the choice among equal rows, and the farthest row from zero, are arbitrary
            _, group = torch.unique(z, dim=0, return_inverse=True)
            nonzero = (z != 0).any(1, keepdim=True)
            of, truth = (torch.zeros_like(g).index_add_(0, group, g * nonzero) for g in (of, truth))
        assert (of - truth).abs().max() <= relative * truth.abs().max(), name


@pytest.mark.parametrize("name", CASES)
def test_losses_that_normalize_have_torchs_rule_for_norms(name):
    case = CASES[name]
    inputs, scale = extreme_batch(name, case, (26,)), torch.tensor(5.0, dtype=torch.float64)
    true = gradients(case, wb.reference, inputs, scale)
    with normalize_of_torch():
        independent = gradients(case, wb.reference, inputs, scale)
    compared(name, case, inputs, true, independent, 1e-9)
    compared(name, case, inputs, gradients(case, wb.functional, inputs, scale), independent, 1e-9)
    narrow = [z.float() if z.is_floating_point() else z for z in inputs]
    true = gradients(case, wb.reference, [z.double() if z.is_floating_point() else z for z in narrow], scale)
    compared(name, case, narrow, gradients(case, wb.functional, narrow, scale.float()), true, 1e-4)


SEVERAL = ("nt_xent", "sup_con", "triplet", "matryoshka", "smooth_ap", "multi_similarity, mined", "dcl, weighted")


def on_ranks(names, counts):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        case = CASES[name]
        inputs, scale = extreme_batch(name, case, counts), torch.tensor(5.0, dtype=torch.float64)
        true = gradients(case, wb.reference, inputs, scale)
        at = rows_of(case, counts, rank)
        found = gradients(case, wb.functional, [z[rows] for z, rows in zip(inputs, at, strict=True)], scale, sync="sum")
        for n in range(1, 1 + len(case.differentiable)):
            parts = [None] * world
            dist.all_gather_object(parts, found[n])
            found[n] = torch.cat(parts)
        compared(name, case, inputs, found, true, 1e-9)


@pytest.mark.parametrize("counts", [(9, 17), (14, 0, 12)])
def test_several_ranks_equal_one_process(counts):
    run_ranks(on_ranks, len(counts), SEVERAL, counts, timeout_s=300)


def test_triplets_with_a_row_of_zeros_are_exact():
    """Distances of unit rows are ordered by their products; with a row of zeros among them they are not."""
    wrong = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(10, 4, dtype=torch.float64, generator=generator)
        z[seed % 10] = 0
        labels = torch.randint(0, 3, (10,), generator=generator)
        true = reference.triplet_loss(z, labels)
        torch.testing.assert_close(wb.functional.triplet_loss(z, labels), true, rtol=1e-12, atol=0)
        units = normalize_rows(z)
        products, equal = units @ units.T, labels[:, None] == labels
        far = products.masked_fill(~equal | torch.eye(10, dtype=torch.bool), math.inf).argmin(1)
        near = products.masked_fill(equal, -math.inf).argmax(1)
        other = (units - units[far]).norm(dim=1) - (units - units[near]).norm(dim=1) + 0.2
        wrong += not torch.isclose(other.relu().mean(), true, rtol=1e-6)
    assert wrong > 50  # as if all rows had norm 1


def test_rows_too_close_for_products_in_float64_have_the_right_gradient():
    z = torch.tensor([[1e9, 1.0], [1e9, 1.0 + 1e-7], [1e9, 1.0 + 3e-7], [1e9, 5.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0])
    for distance in ("euclidean", "squared"):
        leaf, expected = (z.clone().requires_grad_() for _ in range(2))
        for of, f in ((leaf, wb.functional), (expected, wb.reference)):
            f.triplet_loss(of, labels, normalize=False, distance=distance).backward()
        torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_equals_torchs_unless_squares_overflow(dtype):
    """Rows equal torch's bit by bit unless its squares overflow; then they are unit rows; both adjoints agree."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 7, dtype=dtype, generator=generator)
    x = torch.tensor([0, 1e-25, 1e-13, 0.9e-12, 1.1e-12, 1e-6, 1, 3, 1e3, 1e9, 1e15, 1e18], dtype=dtype)[:, None] * x
    x.requires_grad_()
    grad = torch.randn(12, 7, dtype=dtype, generator=generator)
    assert torch.equal(normalize_rows(x), F.normalize(x, dim=1))
    (ours,), (theirs,) = (torch.autograd.grad(f, x, grad) for f in (normalize_rows(x), F.normalize(x, dim=1)))
    divisors = x.detach().norm(dim=1, keepdim=True).clamp(min=1e-12)
    near = {"rtol": 0, "atol": 30 * torch.finfo(dtype).eps}
    torch.testing.assert_close(ours * divisors, theirs * divisors, **near)
    by_hand = grad.clone()
    project_(by_hand, normalize_rows(x).detach(), row_norms(x).detach())
    torch.testing.assert_close(by_hand * divisors, theirs * divisors, **near)
    longest = torch.full((2, 7), 1e38 if dtype == torch.float32 else 1e300, dtype=dtype)
    assert normalize_rows(longest).norm(dim=1).allclose(torch.ones(2, dtype=dtype))
    assert (F.normalize(longest, dim=1) == 0).all()  # torch's squares overflow


def test_matryoshka_accepts_rows_whose_first_part_is_zero():
    x, y = (torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    x[:2, :3], y[1:3, :3] = 0, 1e-14
    for zoom in (1.0, 1e120, 1e180):
        leaves = [[(zoom * z).requires_grad_() for z in (x, y)] for _ in range(2)]
        for of, f in zip(leaves, (wb.functional, wb.reference), strict=True):
            f.matryoshka_loss(*of, logit_scale=5.0, dims=(3, 8)).backward()
        for ours, true in zip(*leaves, strict=True):
            for part in (slice(0, 3), slice(3, 8)):
                torch.testing.assert_close(ours.grad[:, part] * zoom, true.grad[:, part] * zoom, rtol=1e-9, atol=1e-9)

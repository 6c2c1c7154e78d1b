"""Losses in low precision, at edges and far from the origin are as exact as plain PyTorch's or more."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import BIAS, LOSSES, dense, gradients, options_of, whole_batch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

SMOOTH = [name for name, case in LOSSES.items() if case.smooth]


def narrow(inputs, dtype):
    return [z.to(dtype) if z.is_floating_point() else z for z in inputs]


@pytest.mark.parametrize("name", SMOOTH)
def test_float32_is_no_worse_than_plain_pytorch(name):
    """Errors are at most 3e-6 against float64, or 1.5 times plain float32 PyTorch's for ill-conditioned problems.

    A scalar's gradient is an inner product, <X, dL/dX> / scale; its error is relative to the size of the factors.
    """
    case = LOSSES[name]
    whole = narrow(whole_batch(case, (300,), d=32), torch.float32)
    expected = dense(case, whole, 16.0)
    plain, ours = (gradients(case, f, whole, torch.tensor(16.0)) for f in (wb.reference, wb.functional))
    factors = (whole[0].norm() * expected[1].norm() / 16.0).item()
    for position, (got, other, true) in enumerate(zip(ours, plain, expected, strict=True)):
        size = max(true.norm().item(), factors if position and not got.dim() else 1e-6)
        error, plain_error = ((z.double() - true).norm().item() / size for z in (got, other))
        assert error <= max(3e-6, 1.5 * plain_error), (position, error, plain_error)


def test_float32_distillation_of_nearly_solved_pairs_is_exact():
    """At scale 100 the rounding error of a logsumexp is 1e-5, and the loss is 2e-3."""
    generator = torch.Generator().manual_seed(0)
    x, tx, dy, dty = (torch.randn(512, 64, dtype=torch.float64, generator=generator) for _ in range(4))
    x, tx = F.normalize(x + 1.5, dim=1).float(), F.normalize(tx + 1.5, dim=1).float()
    y, ty = (F.normalize(of + 0.5 * F.normalize(by, dim=1), dim=1).float() for of, by in ((x, dy), (tx, dty)))

    def found(functions, dtype):
        leaf = x.to(dtype, copy=True).requires_grad_()
        loss = functions.distillation_loss(leaf, y.to(dtype), 100.0, tx.to(dtype), ty.to(dtype), 100.0)
        return loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()

    true, plain, ours = (
        found(wb.reference, torch.float64),
        found(wb.reference, torch.float32),
        found(wb.functional, torch.float32),
    )
    assert (ours[0] - true[0]).abs() <= max(3e-7 * true[0], 3 * (plain[0] - true[0]).abs())
    assert (ours[1] - true[1]).norm() <= 4 * (plain[1] - true[1]).norm()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_hardest_of_close_rows_is_right(normalize):
    """In float32 x . y - |y|^2 / 2 cannot separate such rows and picks others; the reference subtracts first."""
    generator = torch.Generator().manual_seed(0)
    if normalize:
        z = F.normalize(torch.randn(1, 16, generator=generator), dim=1) + 1e-4 * torch.randn(
            64, 16, generator=generator
        )
    else:
        z = 300 * torch.randn(8, 16, generator=generator).repeat_interleave(8, 0)
        z = z + 0.1 * torch.randn(64, 16, generator=generator)
    labels = torch.arange(64) // 2
    options = {"margin": 0.0, "smooth": True, "distance": "euclidean", "normalize": normalize, "reduction": "none"}
    true = wb.reference.triplet_loss(z.double(), labels, **options)
    plain, ours = (f.triplet_loss(z, labels, **options) for f in (wb.reference, wb.functional))
    assert_same(ours.double(), plain.double(), relative=1e-6)
    assert (ours - true).abs().max() <= 2 * (plain - true).abs().max() + 1e-7
    key = F.normalize(z, dim=1) if normalize else z - z.mean(0)
    similar = (key @ key.T - key.square().sum(1) / 2).masked_fill(labels[:, None] == labels, -torch.inf)
    away = torch.cdist(key.double(), key.double()).masked_fill(labels[:, None] == labels, torch.inf)
    assert (similar.argmax(1) != away.argmin(1)).any(), "the result of one sweep in float32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    """The loss is float32; gradients have the inputs' dtype, and are those of the inputs' values up to its rounding."""
    for name in SMOOTH:
        case = LOSSES[name]
        whole = narrow(whole_batch(case, (40,), d=16), dtype)
        expected = dense(case, whole, 16.0)
        ours = gradients(case, wb.functional, whole, torch.tensor(16.0, dtype=dtype))
        assert ours[0].dtype == torch.float32, name
        factors = (whole[0].double().norm() * expected[1].norm() / 16.0).item()
        for position, (got, true) in enumerate(zip(ours, expected, strict=True)):
            size = max(true.norm().item(), factors if position and not got.dim() else 0.0)
            assert (got.double() - true).norm().item() <= 2 * torch.finfo(dtype).eps * size + 1e-4, name
        assert all(got.dtype == dtype for got in ours[1:]), name


def test_of_equal_views_uniformity_is_left():
    z = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.pdist(F.normalize(z, dim=1)).square().mul(-2).exp().mean().log()
    (wanted,) = torch.autograd.grad(expected, z)
    loss = wb.AlignmentUniformityLoss()(z, z)
    assert_same(loss, expected.detach(), relative=1e-12)
    assert_same(torch.autograd.grad(loss, z)[0], wanted, relative=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_can_be_used_twice_and_its_gradient_not_differentiated(name):
    case = LOSSES[name]
    whole = whole_batch(case, (7,))
    x, *others = whole
    x = x.clone().requires_grad_()
    scalars = [torch.tensor(value, dtype=torch.float64) for value in (9.0, BIAS)]
    loss = case.call(wb.functional, x, *others, *scalars, **options_of(case, memory="flat"))
    once, twice = (torch.autograd.grad(factor * loss, x, retain_graph=True)[0] for factor in (1, 2))
    assert_same(twice, 2 * once, relative=1e-12)
    if not case.choices:
        return  # plain PyTorch on one process, where second derivatives exist
    (again,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        again.square().sum().backward()


def lonely_body():
    """Anchors without positives, negatives or both give 0, with gradient 0, on all ranks."""
    torch.manual_seed(0)
    x = F.normalize(torch.randn(3, 4, dtype=torch.float64), dim=-1).requires_grad_()
    rank, size = dist.get_rank(), dist.get_world_size()
    unique, equal = 3 * rank + torch.arange(3), torch.zeros(3, dtype=torch.int64)
    for loss in (wb.SupConLoss(), wb.CircleLoss(), wb.TripletLoss(), wb.SmoothAPLoss()):
        value = loss(x, unique)
        (gradient,) = torch.autograd.grad(value, x)
        assert value == 0, loss
        assert not gradient.any(), loss
    for loss in (wb.CircleLoss(), wb.TripletLoss()):
        value = loss(x, equal)
        (gradient,) = torch.autograd.grad(value, x)
        assert value == 0, loss
        assert not gradient.any(), loss
    y = F.normalize(torch.randn(3, 4, dtype=torch.float64), dim=-1)
    for excluded in (
        wb.functional.clip_loss(x, y, 10.0, ids=equal, equal_ids="excluded"),
        wb.functional.info_nce_loss(x, y, logit_scale=10.0, query_ids=equal),
        wb.functional.info_nce_loss(x, y, logit_scale=10.0, exclude_above=-3.0),
        wb.functional.nt_xent_loss(x, y, ids=equal),
        wb.functional.dcl_loss(x, y, ids=equal),
    ):
        (gradient,) = torch.autograd.grad(excluded, x)
        assert excluded == 0
        assert not gradient.any()
    # One anchor has a positive, on another rank. The mean is over this anchor and its partner.
    labels = torch.tensor([7, 10 * rank + 1, 10 * rank + 2]) if rank < 2 else unique + 100
    value = wb.functional.sup_con_loss(x, labels)
    whole = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(whole, x.detach())
    numbers = [torch.empty_like(labels) for _ in range(size)]
    dist.all_gather(numbers, labels)
    assert_same(value, wb.reference.sup_con_loss(torch.cat(whole), torch.cat(numbers)), relative=1e-12, absolute=1e-14)
    weights = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert wb.functional.sup_con_loss(x, labels, weights=weights) == (0 if size > 1 else value.detach() * 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_anchors_without_positives_or_negatives_give_zero(world_size):
    run_ranks(lonely_body, world_size, timeout_s=60)


def test_views_are_rows_with_the_same_label():
    z, labels = torch.randn(5, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 2, 3])
    for name in ("sup_con_loss", "multi_similarity_loss", "circle_loss", "triplet_loss", "smooth_ap_loss"):
        together = getattr(wb.functional, name)(z, labels)
        apart = getattr(wb.functional, name)(z.flatten(0, 1), labels.repeat_interleave(3))
        assert_same(together, apart, relative=1e-14)
        assert_same(together, getattr(wb.reference, name)(z, labels), relative=1e-12)
        weights = torch.rand(5, dtype=torch.float64)
        by_example = getattr(wb.functional, name)(z, labels, weights=weights)
        assert_same(
            by_example, getattr(wb.functional, name)(z, labels, weights=weights[:, None].expand(5, 3)), relative=1e-14
        )
        each = getattr(wb.functional, name)(z, labels, weights=weights, reduction="none")
        assert each.shape == (5, 3)


def shared_body():
    """Count the collectives of Matryoshka with three parts."""
    comm = wb.comm.TorchCommunicator()
    moved = []
    for name in ("all_gather", "reduce_scatter"):
        operation = getattr(comm.transport, name)

        def call(x, *arguments, name=name, operation=operation):
            moved.append((name, tuple(x.shape)))
            return operation(x, *arguments)

        setattr(comm.transport, name, call)
    x, y = torch.randn(2, 4, 8, requires_grad=True)
    wb.functional.matryoshka_loss(x, y, logit_scale=5.0, dims=(2, 4, 8), group=comm, exchange="gather").backward()
    return [entry for entry in moved if len(entry[1]) == 2 and entry[1][0] in (4, 8)]


def test_matryoshka_moves_features_once():
    """Y and three inverse norms are sent once, and its gradient is reduced once: not once for each part."""
    assert run_ranks(shared_body, 2)[0] == [
        ("all_gather", (4, 11)),
        ("all_gather", (4, 3)),
        ("reduce_scatter", (8, 11)),
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    """Parts of a loss in plain PyTorch do not change either."""
    case = LOSSES[name]
    whole = narrow(whole_batch(case, (9,)), torch.float32)
    found = []
    for enabled in (False, True):
        leaves = [z.clone() for z in whole]
        differentiated = [leaves[position].requires_grad_() for position in case.differentiable]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = case.call(wb.functional, *leaves, torch.tensor(9.0), torch.tensor(BIAS))
        found.append([loss, *torch.autograd.grad(loss, differentiated)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def both_directions_body(negatives):
    """Run both directions with more keys than queries, and with logits for which the underflow check runs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    q, k = (F.normalize(torch.randn(3 * size, 8, generator=generator), dim=1) for _ in range(2))
    n = F.normalize(torch.randn(sum(negatives), 8, generator=generator), dim=1)
    ours = (Partition((3,) * size).rows(rank), Partition((3,) * size).rows(rank), Partition(negatives).rows(rank))
    options = {"logit_scale": 100.0, "directions": ("query_to_key", "key_to_query")}
    value = wb.functional.info_nce_loss(q[ours[0]], k[ours[1]], negatives=n[ours[2]], **options)
    true = wb.reference.info_nce_loss(q.double(), k.double(), negatives=n.double(), **options)
    assert_same(value, true, relative=1e-6)


@pytest.mark.parametrize("negatives", [(4,), (0, 5), (3, 0, 4)], ids=str)
def test_both_directions_have_an_underflow_check(negatives):
    run_ranks(both_directions_body, len(negatives), negatives, timeout_s=30)


def mixed_scale_body():
    """A scale that is learned on one rank and a number on the other gives the loss of one that is learned on both."""
    rank, counts = dist.get_rank(), (3, 2)
    for name, case in LOSSES.items():
        if not case.has_scale:
            continue
        whole = whole_batch(case, counts)
        rows = [slice(None) if of.replicated else Partition(of.counts(counts)).rows(rank) for of in case.inputs]
        local = [z[at] for z, at in zip(whole, rows, strict=True)]
        scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True) if rank == 0 else 9.0
        bias = torch.tensor(BIAS, dtype=torch.float64) if rank == 0 else BIAS
        loss = case.call(wb.functional, *local, scale, bias)
        (expected, *gradients_) = dense(case, whole, 9.0)
        assert_same(loss, expected, relative=1e-12, absolute=1e-12, what=name)
        loss.backward()
        if rank == 0:
            true = gradients_[len(case.differentiable)]
            assert_same(scale.grad, true, relative=1e-9, absolute=1e-13, what=name)


def test_a_scale_may_be_learned_on_one_rank():
    run_ranks(mixed_scale_body, 2, timeout_s=60)


def other_type_body():
    """If rank 1 passes an option of another type, every rank raises."""
    rank, x = dist.get_rank(), torch.randn(3, 4)
    labels = torch.tensor([0, 0, 1])

    class Flag:
        pass

    for call, message in (
        (lambda odd: wb.functional.info_nce_loss(x, x, logit_scale=1.0, directions=None if odd else ("query_to_key",)),
         "directions must be one of"),
        (lambda odd: wb.functional.triplet_loss(x, labels, normalize=Flag() if odd else True), "normalize must be"),
        (lambda odd: wb.functional.distillation_loss(x, x, 5.0, x, x, 3.0 if odd else 2.0),
         r"teacher_logit_scale must be the same on all ranks, got \[2.0, 3.0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(rank == 1)
    assert wb.functional.triplet_loss(x, labels).isfinite()


def test_an_option_of_another_type_on_one_rank_raises_on_all_ranks():
    run_ranks(other_type_body, 2, timeout_s=30)


def test_triplets_far_from_the_origin_are_exact():
    """Distances do not depend on an offset that all rows share; products do."""
    z = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) + 300
    labels = torch.arange(64) // 4
    value = wb.functional.triplet_loss(z, labels, normalize=False)
    assert_same(value, wb.reference.triplet_loss(z.double(), labels, normalize=False), relative=1e-5)


def test_a_scale_in_half_precision_is_not_rounded_again():
    """The scale's value is used unchanged; results computed from it are not rounded to its dtype."""
    x, y = whole_batch(LOSSES["clip"], (9,))
    scale = torch.tensor(20.25, dtype=torch.bfloat16, requires_grad=True)
    value = wb.functional.info_nce_loss(x, y, logit_scale=scale, margin=0.3)
    assert_same(value, wb.reference.info_nce_loss(x, y, logit_scale=20.25, margin=0.3), relative=1e-12)
    value.backward()
    assert scale.grad.dtype == torch.bfloat16


def test_sharp_temperatures_have_gradients():
    z = F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1).requires_grad_()
    for temperature in (1e-3, 3e-3):
        for loss in (
            wb.functional.debiased_loss(z, z.detach(), temperature=temperature),
            wb.functional.dcl_loss(z, z.detach(), temperature=temperature),
            wb.functional.nt_xent_loss(z, z.detach(), temperature=temperature),
        ):
            assert torch.autograd.grad(loss, z)[0].isfinite().all()


def test_terms_of_a_gradient_in_half_precision_are_added_before_they_are_rounded():
    """Each entry is 131,072 of the covariance less 100,000 of the invariance; float16 ends at 65,504."""
    z0 = torch.tensor([[32.0, 32.0], [-32.0, -32.0]], dtype=torch.float16, requires_grad=True)
    z1 = (251 * z0).detach()
    wb.functional.vicreg_loss(z0, z1).backward()
    assert torch.equal(z0.grad, z0.detach() * 971)

"""What the losses have in common beside their exactness: precision, edges, statistics, state across ranks."""

import math
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import BIAS, LOSSES, dense, gradients, options_of, whole_batch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch import with_statistics
from wholebatch.partition import Partition
from wholebatch.sweep import Driver
from wholebatch.testing import run_ranks

SMOOTH = [name for name, case in LOSSES.items() if case.smooth]


def narrow(inputs, dtype):
    return [z.to(dtype) if z.is_floating_point() else z for z in inputs]


@pytest.mark.parametrize("name", SMOOTH)
def test_float32_is_no_worse_than_plain_pytorch(name):
    """Within 3e-6 of float64, or within 1.5 times plain float32 PyTorch's error where the problem asks for more.

    A scalar's gradient is an inner product, <X, dL/dX> / scale, and is measured against the size of its factors.
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


def test_float32_distillation_of_what_is_nearly_solved():
    """At a scale of 100 a logsumexp is rounded by 10^-5, and the loss is 2 10^-3."""
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
def test_the_hardest_of_rows_that_lie_close_together(normalize):
    """In float32 x . y - |y|^2 / 2 cannot tell them apart, and picks others; the twin subtracts first."""
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
    assert (similar.argmax(1) != away.argmin(1)).any(), "what one sweep in float32 finds"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    """The loss is float32; its gradients come in the inputs' dtype, and are those of their values to its rounding."""
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


# Edges that have a meaning.
def lonely_body():
    """Anchors without positives, without negatives, without anything: 0, with gradient 0, the same on all ranks."""
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
    # One anchor has a positive: on another rank. The mean is that anchor's and its partner's.
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
def test_anchors_that_are_alone(world_size):
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


# Statistics.
def dense_statistics(similarities, positive, negative, scale):
    """By definition: rows of similarities, with masks."""
    largest = similarities.masked_fill(~negative, -math.inf).amax(1)
    mean_positive = (similarities * positive).sum(1) / positive.sum(1)
    p = (scale * similarities).masked_fill(~negative, -math.inf).softmax(1)
    return [
        (mean_positive > largest).double().mean(),
        mean_positive.mean(),
        largest.mean(),
        (1 / p.square().sum(1)).mean(),
        torch.tensor(1 / scale, dtype=torch.float64),
    ]


def statistics_body(counts):
    case = LOSSES["clip, ids, weights"]
    x, y, *_ = whole_batch(case, counts)
    rows, scale = Partition(counts).rows(dist.get_rank()), 5.0
    diagonal = torch.eye(len(x), dtype=torch.bool)
    z = F.normalize(torch.cat([x, y]), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    other = itself.roll(len(x), 0)
    h = F.normalize(
        torch.randn(len(x), 2, x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(5)), dim=-1
    )
    with_hard = torch.cat([x @ y.T, torch.einsum("bd,bhd->bh", x, h)], 1)
    labels = torch.arange(len(x)) // 2 % 2
    classmates = (labels[:, None] == labels) & ~diagonal
    hard = torch.ones(len(x), 2, dtype=torch.bool)
    cases = {
        "clip": (
            with_statistics(wb.functional.clip_loss)(x[rows], y[rows], scale),
            [
                torch.stack(pair).mean()
                for pair in zip(
                    *(dense_statistics(s, diagonal, ~diagonal, scale) for s in (x @ y.T, y @ x.T)), strict=True
                )
            ],
        ),
        "info_nce": (
            with_statistics(wb.functional.info_nce_loss)(x[rows], y[rows], logit_scale=scale, hard_negatives=h[rows]),
            dense_statistics(with_hard, torch.cat([diagonal, ~hard], 1), torch.cat([~diagonal, hard], 1), scale),
        ),
        "nt_xent": (
            with_statistics(wb.functional.nt_xent_loss)(x[rows], y[rows], temperature=1 / scale),
            dense_statistics(z @ z.T, other, ~other & ~itself, scale),
        ),
        "dcl": (
            with_statistics(wb.functional.dcl_loss)(x[rows], y[rows], temperature=1 / scale, sigma=0.5),
            dense_statistics(z @ z.T, other, ~other & ~itself, scale),
        ),
        "moco": (
            with_statistics(wb.functional.moco_loss)(x[rows], y[rows], h[:, 0], logit_scale=scale),
            dense_statistics(
                torch.cat([(x * y).sum(1, keepdim=True), x @ h[:, 0].T], 1),
                torch.arange(len(x) + 1).expand(len(x), -1) == 0,
                torch.arange(len(x) + 1).expand(len(x), -1) > 0,
                scale,
            ),
        ),
        "info_nce, key_to_query": (
            with_statistics(wb.functional.info_nce_loss)(
                x[rows], y[rows], logit_scale=scale, directions="key_to_query"
            ),
            dense_statistics(y @ x.T, diagonal, ~diagonal, scale),
        ),
        "sup_con": (
            with_statistics(wb.functional.sup_con_loss)(x[rows], labels[rows], temperature=1 / scale),
            dense_statistics(x @ x.T, classmates, ~classmates & ~diagonal, scale),
        ),
    }
    for name, ((loss, found), expected) in cases.items():
        assert loss.isfinite()
        numbers = [getattr(found, field) for field in found._fields]
        assert not any(number.requires_grad for number in numbers)
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [number.item() for number in numbers])
        assert everywhere == [everywhere[0]] * len(everywhere), name
        for field, got, true in zip(found._fields, numbers, expected, strict=True):
            assert_same(got, true, relative=1e-10, what=f"{name} {field}")


@pytest.mark.parametrize("counts", [(7,), (5, 2), (4, 0, 5)], ids=str)
def test_statistics(counts):
    run_ranks(statistics_body, len(counts), counts, timeout_s=60)


@pytest.mark.parametrize("name", ["clip", "info_nce", "nt_xent"])
def test_statistics_take_no_further_sweep(name):
    """As many tiles of S are computed, and the loss and its gradient have the same bits."""
    case, tiles = LOSSES[name], []
    x, y = whole_batch(case, (20,))
    x.requires_grad_()
    computed, logits = [], Driver.logits

    def counted(driver, tile, *features):
        tiles.append(tile)
        return logits(driver, tile, *features)

    with patch.object(Driver, "logits", counted):
        for statistics in (False, True):
            tiles.clear()
            call = partial(case.call, wb.functional, x, y, torch.tensor(5.0), None, memory=512)
            loss = with_statistics(call)().loss if statistics else call()
            computed.append((loss.detach(), torch.autograd.grad(loss, x)[0], len(tiles)))
    (loss, gradient, before), (same_loss, same_gradient, after) = computed
    assert before == after > 10
    assert torch.equal(loss, same_loss)
    assert torch.equal(gradient, same_gradient)


# State that lives across steps.
def queue_body(size):
    """Uneven pushes around the ring: the same keys, in the same places, as on one process."""
    queue, alone = wb.KeyQueue(7, 2), wb.KeyQueue(7, 2, group=wb.comm.LocalCommunicator())
    pushed = []
    for step, counts in enumerate([(2, 1, 0), (0, 3, 2), (1, 1, 1), (4, 0, 3)]):
        counts = counts[:size]
        keys = torch.arange(2.0 * sum(counts)).view(-1, 2) + 100 * step
        before = queue.keys
        copy = before.clone()
        queue.enqueue(keys[Partition(counts).rows(dist.get_rank())])
        alone.enqueue(keys)
        pushed.append(keys)
        assert torch.equal(queue.ring, alone.ring)
        assert torch.equal(before, copy), "a loss may still need it"
        last = torch.cat(pushed)[-7:]
        assert sorted(queue.keys.tolist()) == sorted(last.tolist())
    again = wb.KeyQueue(7, 2)
    again.load_state_dict(queue.state_dict())
    assert torch.equal(again.keys, queue.keys)
    for wrong, message in (
        (torch.zeros(8, 2), r"do not fit into a queue of 7"),
        (torch.zeros(1, 3), "same feature size, got 3 and 2"),
        (torch.zeros(1, 2).double(), "same dtype"),
        (torch.full((1, 2), torch.nan), "keys must be finite"),
        ("keys", "must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            queue.enqueue(wrong if dist.get_rank() == 0 else torch.zeros(1, 2))
    assert torch.equal(again.keys, queue.keys)
    if size > 1:
        rank = dist.get_rank()
        for differing, message in ((wb.KeyQueue(7 + rank, 2), "size, width, dtype"), (queue, "keys enqueued")):
            queue.enqueued += rank
            with pytest.raises(ValueError, match=f"{message} must be the same on all ranks"):
                differing.enqueue(torch.zeros(1, 2))
            queue.enqueued -= rank
        x = torch.eye(2)
        with pytest.raises(ValueError, match="examples must be the same on all ranks"):
            wb.GlobalContrastiveLoss(9 + rank)(x, x, torch.arange(2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_queue_is_the_same_on_all_ranks(world_size):
    run_ranks(queue_body, world_size, world_size, timeout_s=60)


def averages_body(counts):
    """Three steps of SogCLR with uneven rows: loss, gradient and the whole state are those of one process."""
    together = wb.GlobalContrastiveLoss(20, temperature=0.2, dtype=torch.float64)
    alone = wb.GlobalContrastiveLoss(20, temperature=0.2, dtype=torch.float64, group=wb.comm.LocalCommunicator())
    rows = Partition(counts).rows(dist.get_rank())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (
            F.normalize(torch.randn(sum(counts), 4, dtype=torch.float64, generator=generator), dim=1).requires_grad_()
            for _ in range(2)
        )
        indices = torch.randperm(20, generator=generator)[: sum(counts)]
        results = []
        for loss, at in ((together, rows), (alone, slice(None))):
            value = loss(x[at], y[at], indices[at])
            results.append((value.detach(), *(g[rows] for g in torch.autograd.grad(value, (x, y)))))
        (value, *got), (expected, *true) = results
        assert_same(value, expected, relative=1e-12)
        for ours, theirs in zip(got, true, strict=True):
            assert_same(ours, len(counts) * theirs, relative=1e-9, absolute=1e-14)
        for name in ("image_log_averages", "text_log_averages"):
            both = [getattr(loss, name) for loss in (together, alone)]
            assert torch.equal(both[0].isneginf(), both[1].isneginf())
            assert_same(*(averages.nan_to_num(neginf=0.0) for averages in both), relative=1e-12)
    state = {name: value.clone() for name, value in together.state_dict().items()}
    together.eval()
    together(x[rows], y[rows], indices[rows])
    together.train()
    with torch.no_grad():
        together(x[rows], y[rows], indices[rows])
    assert all(torch.equal(together.state_dict()[name], value) for name, value in state.items())
    for wrong, message in (
        (indices[rows].float(), "indices must be a tensor of integers"),
        (indices[rows] + 20, "between 0 and 19"),
        (torch.cat([indices[rows], indices[:1]]), "one integer for each row"),
    ):
        if len(x[rows]):
            with pytest.raises(ValueError, match=message):
                together(x[rows], y[rows], wrong)


@pytest.mark.parametrize("counts", [(6,), (4, 2), (3, 1, 2)], ids=str)
def test_averages_are_those_of_one_process(counts):
    run_ranks(averages_body, len(counts), counts, timeout_s=60)


def test_a_gradient_through_the_average_would_be_another():
    """The twin's teeth: with gamma in the gradient, as plain differentiation of u has it, it is 0.9 times as large."""
    case = LOSSES["global contrastive"]
    whole = whole_batch(case, (6,))
    right = dense(case, whole, 5.0)
    x, y, u, v = whole
    x.requires_grad_()
    g = ((x @ y.T - (x * y).sum(1, keepdim=True)) * 5.0).exp().masked_fill(torch.eye(6, dtype=torch.bool), 0).sum(1) / 5
    h = ((y @ x.T - (x * y).sum(1, keepdim=True)) * 5.0).exp().masked_fill(torch.eye(6, dtype=torch.bool), 0).sum(1) / 5
    averages = [0.1 * old.exp() + 0.9 * new for old, new in ((u, g), (v, h))]
    value = sum((1e-14 + average).log().mean() for average in averages) / 2 / 5.0
    (wrong,) = torch.autograd.grad(value, x)
    assert_same(value, right[0], relative=1e-12)
    assert_same(wrong, 0.9 * right[1], relative=1e-9)


def shared_body():
    """Collectives of Matryoshka with three parts, in all."""
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
    """Y with three inverse norms out, its gradient home: not once for each part."""
    assert run_ranks(shared_body, 2)[0] == [
        ("all_gather", (4, 11)),
        ("all_gather", (4, 3)),
        ("reduce_scatter", (8, 11)),
    ]


# What once was wrong.
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    """Not even in what a loss makes of its numbers in plain PyTorch."""
    case = LOSSES[name]
    whole = narrow(whole_batch(case, (9,)), torch.float32)
    found = []
    for enabled in (False, True):
        leaves = [z.clone() for z in whole]
        wanted = [leaves[position].requires_grad_() for position in case.differentiable]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = case.call(wb.functional, *leaves, torch.tensor(9.0), torch.tensor(BIAS))
        found.append([loss, *torch.autograd.grad(loss, wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def both_ways_body(negatives):
    """More keys than queries, both directions, logits for which the certificate is asked."""
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
def test_certificates_of_both_directions(negatives):
    run_ranks(both_ways_body, len(negatives), negatives, timeout_s=30)


def mixed_scale_body():
    """A scale that is learned on one rank and a number on the other: the same loss as if it were learned on both."""
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


def test_a_scale_that_is_learned_on_one_rank():
    run_ranks(mixed_scale_body, 2, timeout_s=60)


def strange_body():
    """Arguments of strange types, on one rank: every rank says so."""
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


def test_strange_arguments():
    run_ranks(strange_body, 2, timeout_s=30)


@pytest.mark.parametrize("scale", [50.0, 100.0])
def test_effective_negatives_in_float32(scale):
    generator = torch.Generator().manual_seed(2)
    base = F.normalize(torch.randn(8, 6, dtype=torch.float64, generator=generator), dim=1)
    x = F.normalize(base.repeat(4, 1) + 0.1 * torch.randn(32, 6, dtype=torch.float64, generator=generator), dim=1)
    for call in (
        lambda x: wb.functional.clip_loss(x, x, scale),
        lambda x: wb.functional.sup_con_loss(x, torch.arange(32) // 2, temperature=1 / scale),
    ):
        narrowed, wide = (with_statistics(call)(z).statistics.effective_negatives for z in (x.float(), x))
        assert wide > 1
        assert_same(narrowed, wide, relative=1e-3)


def test_statistics_are_in_the_units_of_similarities():
    x, y = whole_batch(LOSSES["clip"], (9,))
    h = F.normalize(torch.randn(9, 2, 6, dtype=torch.float64), dim=-1)
    options = {"logit_scale": 5.0, "hard_negatives": h}
    info_nce = with_statistics(wb.functional.info_nce_loss)
    (_, plain), (_, harder) = (info_nce(x, y, hardness=a, **options) for a in (0.0, 7.0))
    for name in ("accuracy", "positive_similarity", "hardest_negative_similarity"):
        assert_same(getattr(harder, name), getattr(plain, name), relative=1e-12, what=name)


def test_triplets_far_from_the_origin():
    """Distances do not see an offset that all rows share; products of them do."""
    z = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) + 300
    labels = torch.arange(64) // 4
    value = wb.functional.triplet_loss(z, labels, normalize=False)
    assert_same(value, wb.reference.triplet_loss(z.double(), labels, normalize=False), relative=1e-5)


def test_a_scale_in_half_precision():
    """Its value is what it is; what is made of it is not rounded again."""
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


def test_a_queue_filled_in_inference_mode():
    queue = wb.KeyQueue(4, 3)
    with torch.inference_mode():
        queue.enqueue(torch.randn(2, 3))
    x = torch.randn(2, 3, requires_grad=True)
    wb.functional.moco_loss(x, x.detach(), queue.keys, logit_scale=5.0).backward()
    assert x.grad.isfinite().all()


def test_what_has_state_leaves_a_compiled_graph():
    queue, loss, x = wb.KeyQueue(4, 3), wb.GlobalContrastiveLoss(5), torch.eye(3, requires_grad=True)

    @torch.compile(backend="eager")
    def step(x):
        value = loss(2 * x, x, torch.arange(3))
        queue.enqueue(x.detach())
        return 2 * value

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x).backward()
    assert not [str(one.message) for one in caught if "Dynamo" in str(one.message)]
    assert x.grad.isfinite().all()
    assert len(queue.keys) == 3


def test_ids_of_any_strides():
    x, y, ids = *whole_batch(LOSSES["clip"], (6,)), torch.arange(12).view(6, 2) // 4
    assert torch.equal(
        wb.functional.clip_loss(x, y, 5.0, ids=ids[:, 0]), wb.functional.clip_loss(x, y, 5.0, ids=ids[:, 0].clone())
    )


def test_the_last_of_equal_indices_stays():
    loss = wb.GlobalContrastiveLoss(5, dtype=torch.float64, gamma=1.0)
    x, y = whole_batch(LOSSES["clip"], (3,))
    loss(x, y, torch.tensor([2, 2, 4]))
    alone = wb.GlobalContrastiveLoss(5, dtype=torch.float64, gamma=1.0)
    alone(x, y, torch.tensor([0, 2, 4]))
    assert torch.equal(loss.image_log_averages[[2, 4]], alone.image_log_averages[[2, 4]])

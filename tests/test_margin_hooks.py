"""A margin of the user's that has every hook: the loss and all gradients equal a dense computation by its formulas.

The dense computation is written here, from the formulas and with autograd, and calls no hook of the margin.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from partial_fc_data import D, data
from torch import nn

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

S, SHARE, WEIGHT = 12.0, 0.1, 0.02


class Everything(nn.Module):
    """phi = cos theta - 0.1 |x| / mean|x|; a negative c becomes c + (1 - t) relu(c - 0.5 cos theta)^2; a penalty."""

    s = S

    def __init__(self, bounded=True):
        super().__init__()
        self.bounded = bounded
        self.register_buffer("mean", torch.tensor(5.0, dtype=torch.float64))
        self.register_buffer("t", torch.tensor(0.0, dtype=torch.float64))

    def observe_norms(self, norms):
        if self.training:
            self.mean.lerp_(norms.mean(), SHARE)

    def observe_angles(self, angles):
        if self.training:
            self.t.lerp_(angles.cos().mean(), SHARE)

    def of_negatives(self, angles):
        return Steeper(1 - self.t.item(), 0.5 * angles.cos().view(-1), self.bounded)

    def forward(self, targets):
        return targets.angles.cos() - 0.1 * targets.norms / self.mean

    def regularizer(self, targets):
        return WEIGHT * targets.norms * targets.angles


@dataclass
class Steeper:
    factor: float
    limits: torch.Tensor
    bounded: bool

    def transform_(self, logits, cols):
        more = (logits / S - self.limits[cols].to(logits.dtype)).clamp(min=0)
        return logits.add_(S * self.factor * more.square())

    def slope_(self, logits, cols):
        more = (logits / S - self.limits[cols].to(logits.dtype)).clamp(min=0)
        return logits.copy_(1 + 2 * self.factor * more)

    def bound(self, largest):
        return largest + S * abs(self.factor) * (largest / S + 0.5) ** 2 if self.bounded else float("inf")


def steps(x, labels, centers, count):
    """Return the losses and the gradients of some steps, by the formulas above."""
    mean, t, found = torch.tensor(5.0).double(), torch.tensor(0.0).double(), []
    for step in range(count):
        x_, w_ = ((1 + 0.2 * step * z.sign()) * z for z in (x, centers))
        x_, w_ = x_.requires_grad_(), w_.requires_grad_()
        counted = labels >= 0
        norms, z, w = x_.norm(dim=1), nn.functional.normalize(x_), nn.functional.normalize(w_)
        cosines = z @ w.T
        at = labels.clamp(min=0)
        own = cosines.gather(1, at[:, None])[:, 0]
        theta = own.clamp(-1, 1).acos()
        with torch.no_grad():
            mean = mean.lerp(norms[counted].mean(), SHARE)
            t = t.lerp(own[counted].mean(), SHARE)
        more = (cosines - 0.5 * own.detach()[:, None]).clamp(min=0)
        negatives = cosines + (1 - t) * more.square()
        phi = own - 0.1 * norms / mean
        logits = S * negatives.scatter(1, at[:, None], phi[:, None])
        losses = nn.functional.cross_entropy(logits, at, reduction="none") + WEIGHT * norms * theta
        loss = losses[counted].mean()
        loss.backward()
        found.append((loss.detach(), x_.grad, w_.grad))
    return found, mean, t


def ordinary(rows):
    """Return data whose embeddings are in general position, so that the dense acos has exact gradients."""
    x, labels, centers = data(rows)
    return x + 0.5 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(5)), labels, centers


def hooks_body(rows, classes, bounded):
    rank = dist.get_rank()
    local, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, labels, centers = ordinary(sum(rows))
    true, mean, t = steps(x, labels, centers, 3)
    margin = Everything(bounded)
    for step, expected in enumerate(true):
        x_, w_ = ((1 + 0.2 * step * z.sign()) * z for z in (x, centers))
        x_, w_ = x_[local].clone().requires_grad_(), w_[held].clone().requires_grad_()
        loss = wb.functional.partial_fc_loss(x_, labels[local], w_, margin=margin, sync="sum")
        loss.backward()
        assert_same(loss.detach(), expected[0], relative=1e-11)
        for found, whole, part in ((x_.grad, expected[1], local), (w_.grad, expected[2], held)):
            assert_same(found, whole[part], relative=0, absolute=1e-9 * whole.abs().max().item())
    assert_same(margin.mean, mean, relative=1e-13)
    assert_same(margin.t, t, relative=1e-10)

    margin.eval()  # the reference implementation calls the hooks of a margin that it does not know
    x_, w_ = x.clone().requires_grad_(), centers.clone().requires_grad_()
    expected = wb.reference.partial_fc_loss(x_, labels, w_, margin=margin)
    expected.backward()
    mine = x[local].clone().requires_grad_(), centers[held].clone().requires_grad_()
    loss = wb.functional.partial_fc_loss(mine[0], labels[local], mine[1], margin=margin, sync="sum")
    loss.backward()
    assert_same(loss.detach(), expected.detach(), relative=1e-11)
    for found, whole, part in zip(mine, (x_, w_), (local, held), strict=True):
        assert_same(found.grad, whole.grad[part], relative=0, absolute=1e-9 * whole.grad.abs().max().item())


@pytest.mark.parametrize(
    ("rows", "classes"), [((7,), (11,)), ((4, 3), (6, 5)), ((5, 0, 2), (1, 7, 3))], ids=lambda counts: str(len(counts))
)
@pytest.mark.parametrize("bounded", [True, False])
def test_a_users_margin_with_every_hook(rows, classes, bounded):
    run_ranks(hooks_body, len(rows), rows, classes, bounded, timeout_s=60)


def test_a_transform_of_negatives_excludes_other_settings():
    x, labels, centers = data(4)
    loss = wb.functional.partial_fc_loss
    for settings, message in (
        (
            {"exclude_above": 0.5},
            "exclude_above must be None with Everything, which transforms the logits of negatives",
        ),
        ({"normalize": "none"}, "normalize must be 'both' with Everything, .* got 'none'; pass 'both'"),
        ({"labels": torch.stack([labels, labels + 1], 1) % 11}, "one for each example with Everything, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(x, **({"labels": labels, "centers": centers, "margin": Everything()} | settings))


def test_the_margin_of_a_head_is_the_one_that_trains():
    """Its statistics are updated in place, and are those of a state_dict; another margin takes effect at once."""
    torch.manual_seed(0)
    margin = wb.AdaFace(10.0)
    head = wb.PartialFC(D, 11, margin=margin)
    assert head.margin is margin
    assert head.logits.margin is margin
    x, labels = 3 * torch.randn(6, D), torch.arange(6)
    head(x, labels).backward()
    assert_same(head.margin.mean, 0.99 * 20 + 0.01 * x.double().norm(dim=1).mean(), relative=1e-6)
    assert torch.equal(head.state_dict()["margin.mean"], margin.mean)
    other = wb.PartialFC(D, 11, margin=wb.AdaFace(10.0))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.margin.mean, margin.mean)

    head = wb.PartialFC(D, 11, margin=wb.CosFace(10.0, 0.3))
    head.margin = wb.CosFace(10.0, 0.0)
    plain = wb.PartialFC(D, 11, margin=wb.NormFace(10.0))
    assert_same(head(x, labels), plain(x, labels), relative=1e-6)
    head.margin = None
    with pytest.raises(ValueError, match="margin must be one such as"):
        head(x, labels)


def test_the_counters_of_a_head_stay_on_the_cpu():
    """The host reads them in each step: from a GPU it would wait."""
    head = wb.PartialFC(D, 11, seed=3, sample_rate=0.5)
    head(torch.randn(4, D), torch.arange(4))
    before = {name: int(getattr(head, name)) for name in ("seed", "step", "first_class")}
    assert before == {"seed": 3, "step": 1, "first_class": 0}
    assert head.to("meta", torch.float64) is head
    assert head.weight.device.type == "meta"
    assert head.weight.dtype == torch.float64
    for name, value in before.items():
        assert getattr(head, name).device.type == "cpu"
        assert int(getattr(head, name)) == value
        assert int(head.state_dict()[name]) == value
    loaded = wb.PartialFC(D, 11)
    loaded.load_state_dict({"step": torch.tensor(7), "seed": torch.tensor(5)}, strict=False)
    assert (int(loaded.step), int(loaded.seed)) == (7, 5)


@pytest.mark.parametrize(
    "margin", [wb.AdaFace(10.0), wb.CurricularFace(10.0), Everything()], ids=lambda m: type(m).__name__
)
def test_running_averages_keep_their_dtype(margin):
    """A head that is cast to bfloat16 goes on with averages that move in float64."""
    torch.manual_seed(0)
    head = wb.PartialFC(D, 11, margin=margin).bfloat16()
    assert head.weight.dtype == torch.bfloat16
    before = {name: x.clone() for name, x in margin.named_buffers()}
    head(torch.randn(4, D).bfloat16(), torch.arange(4))
    for name, x in margin.named_buffers():
        assert x.dtype == torch.float64
        assert 0 < (x - before[name]).abs() < 2
    assert all(x.device.type == "meta" for _, x in head.to("meta").margin.named_buffers())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [1e30, -1e30, torch.finfo(torch.float32).min])
def test_the_largest_offsets_are_exact(value, label_smoothing):
    """The least number of the dtype is a usual mask; label smoothing adds up all logits, so it refuses this one."""
    x, labels, centers = (z.float() if z.is_floating_point() else z for z in ordinary(7))
    offsets = torch.zeros(11)
    offsets[3], offsets[6] = value, -value / 2
    if label_smoothing and abs(value) > 1e30:
        with pytest.raises(ValueError, match="with label_smoothing"):
            wb.functional.partial_fc_loss(x, labels, centers, bias=offsets, label_smoothing=label_smoothing)
        label_smoothing = 0.0
    found = []
    for loss_fn, dtype in (
        (wb.functional.partial_fc_loss, torch.float32),
        (wb.reference.partial_fc_loss, torch.float64),
    ):
        x_, w_, b_ = (z.to(dtype, copy=True).requires_grad_() for z in (x, centers, offsets))
        loss = loss_fn(x_, labels, w_, bias=b_, margin=wb.CosFace(8.0), label_smoothing=label_smoothing)
        loss.backward()
        found.append([loss.detach().double(), *(z.grad.double() for z in (x_, w_, b_))])
    for ours, true in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours - true).norm() <= 1e-5 * true.norm() + 1e-6


def offsets_body():
    """On the last rank alone: an error on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, labels, centers = (z.float() if z.is_floating_point() else z for z in data(6))
    rows, classes = Partition.even(6, world).rows(rank), Partition.even(11, world).rows(rank)
    large = torch.zeros(len(centers[classes]))
    if rank == world - 1:
        large[-1] = 3e38
    for offsets, message in (
        (
            {"bias": large},
            r"bias must have absolute values up to 1e\+30 with label_smoothing, got 3e\+38; -1e\+30 is enough",
        ),
        ({"bias": 0 * large, "log_weights": -large}, "log_weights must have absolute values up to"),
        ({"bias": large / 3e8, "log_weights": large / 3e8}, r"bias \+ log_weights must have .* got 2e\+30"),
        ({"bias": large * 10}, "bias must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.functional.partial_fc_loss(x[rows], labels[rows], centers[classes], **offsets, label_smoothing=0.1)
    both = {"bias": large, "log_weights": large}
    with pytest.raises(ValueError, match=r"bias \+ log_weights must be finite"):
        wb.functional.partial_fc_loss(x[rows], labels[rows], centers[classes], **both)


@pytest.mark.parametrize("world", [1, 2])
def test_larger_offsets_are_refused_on_all_ranks(world):
    run_ranks(offsets_body, world, timeout_s=60)


def test_offsets_of_half_precision_are_added_in_float32():
    """The sum of two numbers that float16 holds, and whose sum it does not."""
    x, labels, centers = (z.half() if z.is_floating_point() else z for z in ordinary(7))
    offsets = torch.full((11,), 4e4).half()
    loss = wb.functional.partial_fc_loss(x, labels, centers, margin=wb.CosFace(8.0), bias=offsets, log_weights=offsets)
    assert loss.item() == pytest.approx(offsets[0].item() + 10.0, rel=1e-3)

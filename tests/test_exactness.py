"""Exact gradients in training code: encoders under DDP, engines that sum gradients, groups, partial gradients.

`test_losses` tests every loss with every option on leaves, and explains the tolerances.
"""

import pytest
import torch
import torch.distributed as dist
from cases import SCALES, SHARDS
from compare import assert_same
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

VALUE, GRADIENT = 1e-12, 1e-10


def unit_pairs(rows, d=6, dtype=torch.float64, seed=0):
    """Return correlated unit vectors: pairs that are neither random nor solved."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, dtype=torch.float64, generator=generator)
    y = x + 1.5 * torch.randn(rows, d, dtype=torch.float64, generator=generator)
    return normalize(x, dim=-1).to(dtype), normalize(y, dim=-1).to(dtype)


def dense(x, y, scale, **options):
    """Return loss and gradients of the reference on one process."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    scale = torch.as_tensor(scale, dtype=torch.float64).requires_grad_()
    loss = wb.reference.clip_loss(x, y, scale, **options)
    return (loss.detach(), *torch.autograd.grad(loss, (x, y, scale)))


def noise(scale, factor=1.0):
    """Return the rounding error of 1 - P_ii in a feature's gradient."""
    return 8 * torch.finfo(torch.float64).eps * scale * factor


class DualEncoder(nn.Module):
    """A small encoder per tower and a learnable scale in one module, as users write it."""

    def __init__(self, scale):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.image, self.text = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double() for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64).log())
        for parameter in (*self.image.parameters(), *self.text.parameters()):
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, images, texts):
        return normalize(self.image(images), dim=-1), normalize(self.text(texts), dim=-1), self.log_scale.exp()


def inputs(rows):
    return torch.randn(2, rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def gradients(model):
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def dense_gradients(counts, scale, **options):
    model = DualEncoder(scale)
    loss = wb.reference.clip_loss(*model(*inputs(sum(counts))), **options)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_gradients(actual, expected, what):
    for name in expected:
        assert_same(actual[name], expected[name], relative=GRADIENT, absolute=noise(100), what=f"{what}: {name}")


def ddp_gradients(counts, scale, loss_of):
    rows = Partition(counts).rows(dist.get_rank())
    model = DistributedDataParallel(DualEncoder(scale))
    loss = loss_of(*model(*inputs(sum(counts))[:, rows]))
    loss.backward()
    return loss.detach(), gradients(model)


def ddp_body(counts):
    for scale in SCALES:
        for smoothing in (0.0, 0.2):
            expected, reference = dense_gradients(counts, scale, label_smoothing=smoothing)
            for what, loss_fn in {
                "CLIPLoss": wb.CLIPLoss(label_smoothing=smoothing),
                "WholeBatch gather": wb.WholeBatch(wb.reference.clip_loss, strategy="gather"),
                "WholeBatch replicate": wb.WholeBatch(wb.reference.clip_loss, strategy="replicate"),
            }.items():
                options = {} if what == "CLIPLoss" else {"label_smoothing": smoothing}
                loss, actual = ddp_gradients(counts, scale, lambda *out, f=loss_fn, o=options: f(*out, **o))
                assert_same(loss, expected, relative=0, absolute=VALUE, what=what)
                assert_same_gradients(actual, reference, f"{what} {counts} scale {scale}")


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_every_parameter_of_an_encoder_under_ddp(counts):
    run_ranks(ddp_body, len(counts), counts)


def gathered(x):
    """Return all rows by plain torch.distributed, with local rows put back: other rows have no gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def wrong_ddp_averages_the_share(x, y, scale):
    """Gather without gradient, put local rows back, no factor: the encoder's gradient is too small by a factor of W."""
    return wb.reference.clip_loss(gathered(x), gathered(y), scale)


def wrong_temperature_times_w(x, y, scale):
    """Multiply the loss by W: the encoder's gradient is right, the temperature's is W times too large."""
    return dist.get_world_size() * wrong_ddp_averages_the_share(x, y, scale)


def wrong_local_rows_only(x, y, scale):
    """Compare local rows with all columns by a gather without gradient: the key side's gradient is missing."""
    targets = torch.arange(len(x)) + dist.get_rank() * len(x)
    one = scale * x @ gathered(y).detach().T
    two = scale * y @ gathered(x).detach().T
    return (nn.functional.cross_entropy(one, targets) + nn.functional.cross_entropy(two, targets)) / 2


def wrong_local_negatives(x, y, scale):
    """Use each rank's local batch only: the loss of W small batches."""
    return wb.reference.clip_loss(x, y, scale)


def ratio(actual, expected):
    return (torch.vdot(actual.flatten(), expected.flatten()) / expected.square().sum()).item()


def wrong_answers_body():
    """Compute the plausible wrong answers; the same comparators reject them."""
    counts, size, scale = (4,) * dist.get_world_size(), dist.get_world_size(), 14.3
    _, reference = dense_gradients(counts, scale)
    weight, temperature = "image.2.weight", "log_scale"

    def rejected(loss_of):
        _, actual = ddp_gradients(counts, scale, loss_of)
        with pytest.raises(AssertionError, match="largest error"):
            assert_same_gradients(actual, reference, "planted")
        return ratio(actual[weight], reference[weight]), ratio(actual[temperature], reference[temperature])

    assert rejected(wrong_ddp_averages_the_share) == pytest.approx((1 / size, 1))
    assert rejected(wrong_temperature_times_w) == pytest.approx((1, size))
    assert rejected(wb.CLIPLoss(sync="sum")) == pytest.approx((1 / size, 1 / size))
    assert rejected(lambda *out: size * wb.CLIPLoss()(*out)) == pytest.approx((size, size))
    for wrong_direction in (wrong_local_rows_only, wrong_local_negatives):
        rejected(wrong_direction)


@pytest.mark.planted
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_plausible_wrong_answers_are_rejected(world_size):
    run_ranks(wrong_answers_body, world_size)


def sum_engine_body(counts):
    """Sum gradients by hand, as some engines do: sync="sum"."""
    rows = Partition(counts).rows(dist.get_rank())
    _, reference = dense_gradients(counts, 14.3)
    for loss_fn in (
        wb.CLIPLoss(sync="sum"),
        wb.WholeBatch(wb.reference.clip_loss, sync="sum", strategy="gather"),
        wb.WholeBatch(wb.reference.clip_loss, sync="sum", strategy="replicate"),
    ):
        model = DualEncoder(14.3)
        loss_fn(*model(*inputs(sum(counts))[:, rows])).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        assert_same_gradients(gradients(model), reference, f"sum {loss_fn}")


@pytest.mark.parametrize("counts", [(7,), (5, 2), (5, 0, 6), (4, 1, 2, 0)], ids=str)
def test_engines_that_add(counts):
    run_ranks(sum_engine_body, len(counts), counts)


def subgroup_body():
    """Compute losses over two groups of two ranks, each with another batch."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, counts = groups[rank % 2], (3, 2)
    rows = Partition(counts).rows(rank // 2)
    x_full, y_full = unit_pairs(5, seed=rank % 2)
    expected, dx, _, dscale = dense(x_full, y_full, 14.3)
    for loss_fn in (wb.CLIPLoss(group=group), wb.WholeBatch(wb.reference.clip_loss, group=group)):
        x, scale = x_full[rows].clone().requires_grad_(), torch.tensor(14.3, dtype=torch.float64, requires_grad=True)
        loss = loss_fn(x, y_full[rows], scale)
        loss.backward()
        assert_same(loss, expected, relative=0, absolute=VALUE)
        assert_same(x.grad, 2 * dx[rows], relative=GRADIENT)
        assert_same(scale.grad, dscale, relative=GRADIENT)
    with pytest.raises(ValueError, match="not a member of the group"):
        wb.CLIPLoss(group=groups[1 - rank % 2])(x, x, 1.0)


def test_losses_over_subgroups_are_exact():
    run_ranks(subgroup_body, 4)


def mesh_body():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "batch"))
    x_full, y_full = unit_pairs(4)
    rows = Partition((2, 2)).rows(mesh.get_local_rank("batch"))
    expected = dense(x_full, y_full, 5.0)[0]
    assert_same(wb.CLIPLoss(group=mesh["batch"])(x_full[rows], y_full[rows], 5.0), expected, relative=0, absolute=VALUE)
    with pytest.raises(ValueError, match="one-dimensional mesh, got 2 axes"):
        wb.CLIPLoss(group=mesh)(x_full[rows], y_full[rows], 5.0)


def test_one_axis_of_a_device_mesh():
    run_ranks(mesh_body, 4)


def partial_gradients_body(counts):
    """With a frozen tower, a fixed scale or constant rows on a rank, every rank still enters every collective."""
    rank = dist.get_rank()
    rows = Partition(counts).rows(rank)
    x_full, y_full = unit_pairs(sum(counts))
    _, dx, dy, dscale = dense(x_full, y_full, 14.3)
    size = dist.get_world_size()
    for wants in ("x", "y", "scale", "x scale", "y scale", "x of rank 0 only"):
        x, y = x_full[rows].clone(), y_full[rows].clone()
        scale = torch.tensor(14.3, dtype=torch.float64)
        x.requires_grad_("x" in wants.split() and ("only" not in wants or rank == 0))
        y.requires_grad_("y" in wants.split())
        scale.requires_grad_("scale" in wants.split())
        for loss_fn in (wb.CLIPLoss(), wb.WholeBatch(wb.reference.clip_loss)):
            for leaf in (x, y, scale):
                leaf.grad = None
            loss_fn(x, y, scale).backward()
            for leaf, whole in ((x, size * dx[rows]), (y, size * dy[rows]), (scale, dscale)):
                assert (leaf.grad is not None) == leaf.requires_grad
                if leaf.requires_grad and leaf.numel():
                    assert_same(leaf.grad, whole, relative=GRADIENT, what=wants)


@pytest.mark.parametrize("counts", [(4,), (3, 2), (3, 0, 2)], ids=str)
def test_partial_gradients(counts):
    run_ranks(partial_gradients_body, len(counts), counts)


def low_precision_body(counts, dtype):
    """Return the errors of this rank's loss, dX and dY against float64, and those of plain PyTorch on one process."""
    rows = Partition(counts).rows(dist.get_rank())
    rounding = torch.finfo(dtype).eps
    for scale in (1.0, 16.0, 100.0):  # exact in every dtype
        x_full, y_full = unit_pairs(sum(counts), d=32, dtype=dtype)
        true_loss, true_dx, true_dy, _ = dense(x_full.double(), y_full.double(), scale)

        def errors(loss_fn, rows, true_rows, x_full=x_full, y_full=y_full, scale=scale):
            x, y = x_full[rows].clone().requires_grad_(), y_full[rows].clone().requires_grad_()
            loss = loss_fn(x, y, torch.tensor(scale, dtype=dtype))
            loss.backward()
            pairs = zip((loss, x.grad, y.grad), true_rows, strict=True)
            return [(got.double() - true).norm().item() / true.norm().item() for got, true in pairs]

        plain = errors(wb.reference.clip_loss, slice(None), (true_loss, true_dx, true_dy))
        ours = errors(wb.CLIPLoss(sync=None), rows, (true_loss, true_dx[rows], true_dy[rows]))
        assert all(o <= 1.5 * p + rounding for o, p in zip(ours, plain, strict=True)), (scale, plain, ours)


@pytest.mark.parametrize("counts", [(200,), (500, 300, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_pytorch(counts, dtype):
    run_ranks(low_precision_body, len(counts), counts, dtype)

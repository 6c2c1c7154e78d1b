"""The contract: on W ranks, loss and every gradient equal those of the dense float64 twin on the whole batch.

`value` within 1e-12, gradients within 1e-10 of the largest entry. In float64 both sides are exact to about 1e-15;
what the tolerances leave room for is the order of summation, and nothing else. Where all pairs are solved, dS_ii is
P_ii + Q_ii - 2 with both near 1: twin and sweep alike know it to a few eps, hence the absolute floor `noise`.
"""

import pytest
import torch
import torch.distributed as dist
from cases import SCALES, SHARDS, SYNCS
from compare import assert_same
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

VALUE, GRADIENT = 1e-12, 1e-10


def unit_pairs(rows, d=6, dtype=torch.float64, seed=0):
    """Correlated unit vectors: pairs that are neither random nor solved."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, dtype=torch.float64, generator=generator)
    y = x + 1.5 * torch.randn(rows, d, dtype=torch.float64, generator=generator)
    return normalize(x, dim=-1).to(dtype), normalize(y, dim=-1).to(dtype)


def dense(x, y, scale, **options):
    """Loss and gradients of the twin, on one process."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    scale = torch.as_tensor(scale, dtype=torch.float64).requires_grad_()
    loss = wb.reference.clip_loss(x, y, scale, **options)
    return (loss.detach(), *torch.autograd.grad(loss, (x, y, scale)))


def noise(scale, factor=1.0):
    """Rounding of 1 - P_ii, carried to a feature's gradient."""
    return 8 * torch.finfo(torch.float64).eps * scale * factor


def same_bits_everywhere(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach())
    return all(torch.equal(value, values[0]) for value in values)


def leaves_body(counts):
    """Features, scale and bias as leaves, all options; what each holds under each sync is the contract's table."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x_full, y_full = unit_pairs(sum(counts))
    rows = Partition(counts).rows(rank)
    for scale_value in SCALES:
        for smoothing in (0.0, 0.2):
            expected, dx, dy, dscale = dense(x_full, y_full, scale_value, label_smoothing=smoothing)
            for sync in SYNCS:
                for shape in ((), (1,)):
                    x, y = x_full[rows].clone().requires_grad_(), y_full[rows].clone().requires_grad_()
                    scale = torch.full(shape, scale_value, dtype=torch.float64, requires_grad=True)
                    bias = torch.full(shape, -10.0, dtype=torch.float64, requires_grad=True)
                    loss = wb.CLIPLoss(sync=sync, label_smoothing=smoothing)(x, y, scale, logit_bias=bias)
                    (3 * loss).backward()
                    assert loss.shape == ()
                    assert same_bits_everywhere(loss)
                    what = f"{counts} scale {scale_value} smoothing {smoothing} sync {sync}"
                    assert_same(loss, expected, relative=0, absolute=VALUE, what=what)
                    factor = 3 * (size if sync == "mean" else 1)
                    near = {"relative": GRADIENT, "absolute": noise(scale_value, factor)}
                    for gradient, whole in ((x.grad, dx), (y.grad, dy)):
                        if rows.stop > rows.start:
                            assert_same(gradient, factor * whole[rows], **near, what=what)
                        assert gradient.shape == whole[rows].shape
                    gradient = scale.grad.clone()
                    assert gradient.shape == shape
                    if sync != "mean":
                        dist.all_reduce(gradient)
                    assert_same(
                        gradient.reshape(()), 3 * dscale, relative=GRADIENT, absolute=noise(1), what=f"{what}: scale"
                    )
                    assert bias.grad.shape == shape
                    assert bias.grad.item() == 0.0


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_loss_and_leaf_gradients(counts):
    run_ranks(leaves_body, len(counts), counts)


class DualEncoder(nn.Module):
    """A small encoder per tower and a learnable scale, as users have it: everything inside one module."""

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
    """All rows by plain torch.distributed, own rows put back: no gradient reaches the others'."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def wrong_ddp_averages_the_share(x, y, scale):
    """Gathered without gradient, own rows put back, no factor: the encoder's gradient is 1/W of the truth."""
    return wb.reference.clip_loss(gathered(x), gathered(y), scale)


def wrong_temperature_times_w(x, y, scale):
    """The recipe that multiplies the loss by W: encoder right, temperature W times too large."""
    return dist.get_world_size() * wrong_ddp_averages_the_share(x, y, scale)


def wrong_own_rows_only(x, y, scale):
    """Local rows against all columns with a gather that has no gradient: the key side's gradient is missing."""
    targets = torch.arange(len(x)) + dist.get_rank() * len(x)
    one = scale * x @ gathered(y).detach().T
    two = scale * y @ gathered(x).detach().T
    return (nn.functional.cross_entropy(one, targets) + nn.functional.cross_entropy(two, targets)) / 2


def wrong_local_negatives(x, y, scale):
    """Each rank's own batch only: the loss of W small batches."""
    return wb.reference.clip_loss(x, y, scale)


def ratio(actual, expected):
    return (torch.vdot(actual.flatten(), expected.flatten()) / expected.square().sum()).item()


def teeth_body():
    """The plausible wrong answers, computed for real and rejected by the same comparators."""
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
    for wrong_direction in (wrong_own_rows_only, wrong_local_negatives):
        rejected(wrong_direction)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_plausible_wrong_answers_are_rejected(world_size):
    run_ranks(teeth_body, world_size)


def sum_engine_body(counts):
    """An engine that adds gradients, by hand: sync="sum"."""
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


def many_tiles_body(counts):
    """Shards that end inside a tile, positives that cross tiles: 2600 x 2600 in tiles of 1024."""
    rows = Partition(counts).rows(dist.get_rank())
    x_full, y_full = unit_pairs(sum(counts), d=8)
    expected, dx, dy, dscale = dense(x_full, y_full, 30.0, label_smoothing=0.1)
    x, y = x_full[rows].clone().requires_grad_(), y_full[rows].clone().requires_grad_()
    scale = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    loss = wb.CLIPLoss(sync="sum", label_smoothing=0.1)(x, y, scale)
    loss.backward()
    dist.all_reduce(scale.grad)
    assert_same(loss, expected, relative=VALUE)
    assert_same(x.grad, dx[rows], relative=GRADIENT)
    assert_same(y.grad, dy[rows], relative=GRADIENT)
    assert_same(scale.grad, dscale, relative=GRADIENT)


@pytest.mark.parametrize("counts", [(2600,), (1500, 1100), (1, 2500, 99)], ids=str)
def test_many_tiles(counts):
    run_ranks(many_tiles_body, len(counts), counts)


def subgroup_body():
    """Two groups of two ranks, each with a batch of its own."""
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


def test_subgroups():
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
    """A frozen tower, a fixed scale, a rank whose own rows are constants: every rank still enters every collective."""
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
    """Errors against float64 of this rank's loss, dX and dY, and of plain PyTorch's on one process."""
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
            return [(got.double() - true).abs().max().item() / true.abs().max().item() for got, true in pairs]

        plain = errors(wb.reference.clip_loss, slice(None), (true_loss, true_dx, true_dy))
        ours = errors(wb.CLIPLoss(sync=None), rows, (true_loss, true_dx[rows], true_dy[rows]))
        assert all(o <= p + rounding for o, p in zip(ours, plain, strict=True)), (scale, plain, ours)


@pytest.mark.parametrize("counts", [(200,), (500, 300, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_pytorch(counts, dtype):
    run_ranks(low_precision_body, len(counts), counts, dtype)


def test_accumulation_and_graphs_used_twice():
    x_full, y_full = unit_pairs(6)
    _, dx, _, _ = dense(x_full, y_full, 14.3)
    x = x_full.clone().requires_grad_()
    for _ in range(2):
        (wb.functional.clip_loss(x, y_full, 14.3) / 2).backward()
    assert_same(x.grad, dx, relative=GRADIENT, what="gradient accumulation")
    x.grad = None
    (wb.functional.clip_loss(x, y_full, 14.3) + 2 * wb.functional.clip_loss(x, y_full, 14.3)).backward()
    assert_same(x.grad, 3 * dx, relative=GRADIENT, what="twice in one graph")
    x.grad = None
    loss = wb.functional.clip_loss(x, y_full, 14.3)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(x.grad, 2 * dx, relative=GRADIENT, what="the same graph twice")


def test_autocast_changes_nothing():
    def everything():
        leaves = [z.requires_grad_() for z in unit_pairs(6, dtype=torch.float32)] + [
            torch.tensor(14.3).requires_grad_()
        ]
        loss = wb.functional.clip_loss(*leaves, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, leaves)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = everything()
    assert all(torch.equal(a, b) for a, b in zip(inside, everything(), strict=True))


@pytest.mark.parametrize("first", ["x", "scale", "bias"])
@pytest.mark.parametrize("second", ["x", "scale"])
def test_the_gradient_cannot_be_differentiated_again(first, second):
    """Not even where another term has a gradient, which would hide that this one's is missing."""
    leaves = dict(zip("xy", unit_pairs(4), strict=True)) | {"scale": torch.tensor(2.0), "bias": torch.tensor(0.0)}
    leaves = {name: leaf.double().requires_grad_(name != "y") for name, leaf in leaves.items()}
    loss = wb.functional.clip_loss(leaves["x"], leaves["y"], leaves["scale"], logit_bias=leaves["bias"])
    (gradient,) = torch.autograd.grad(loss, leaves[first], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        (gradient.sum() + leaves[second].sum()).backward()


def same_bits_body():
    rows = Partition((700, 500)).rows(dist.get_rank())
    x, y = (z[rows].clone().requires_grad_() for z in unit_pairs(1200, dtype=torch.float32))
    scale = torch.tensor(14.3, requires_grad=True)
    loss = wb.functional.clip_loss(x, y, scale)
    return loss, *torch.autograd.grad(loss, (x, y, scale))


def test_the_same_bits_on_every_run():
    for once, again in zip(run_ranks(same_bits_body, 2), run_ranks(same_bits_body, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_extreme_logits():
    """Antipodal, duplicated and unnormalised features, and a scale at which plain exponentials overflow."""
    base, _ = unit_pairs(8)
    for x, y, scale in ((base, -base, 100.0), (base[:1].repeat(8, 1), base, 100.0), (30 * base, 20 * base, 50.0)):
        expected, dx, dy, dscale = dense(x, y, scale)
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
        loss = wb.functional.clip_loss(a, b, s)
        loss.backward()
        assert_same(loss, expected, relative=VALUE, absolute=VALUE)
        for actual, whole in ((a.grad, dx), (b.grad, dy), (s.grad, dscale)):
            assert_same(actual, whole, relative=GRADIENT, absolute=1e-13)

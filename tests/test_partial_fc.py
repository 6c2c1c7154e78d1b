"""Softmax over class shards: the loss and all gradients equal the dense reference's, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_same
from partial_fc_data import CLASSES, IGNORED, MARGINS, SPLITS, D, data, dense
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

OPTIONS = [
    {},
    {"margin_grad": "straight_through"},
    {"label_smoothing": 0.2},
    {"reduction": "sum"},
    {"exclude_above": 0.2},
    {"exclude_above": 0.2, "label_smoothing": 0.2},
]


def sharded(rows, classes, x, labels, centers, **options):
    """Return loss and gradients of this rank's part."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    local, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, centers = x[local].clone().requires_grad_(), centers[held].clone().requires_grad_()
    loss = wb.functional.partial_fc_loss(x, labels[local], centers, **options)
    loss.sum().backward()
    return loss.detach(), x.grad, centers.grad


def exact_body(rows, classes):
    rank, world = dist.get_rank(), dist.get_world_size()
    local, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, labels, centers = data(sum(rows))
    weights = torch.rand(sum(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for name, margin in MARGINS.items():
        for options in OPTIONS if name in ("ArcFace", "MagFace") else OPTIONS[:2]:
            true = dense(x, labels, centers, margin=margin, **options)
            found = sharded(rows, classes, x, labels, centers, margin=margin, sync="sum", **options)
            assert_same(found[0], true[0], relative=1e-12, what=name)
            assert_same(found[1], true[1][local], relative=0, absolute=1e-10 * true[1].abs().max().item())
            assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    margin = MARGINS["ArcFace"]
    true = dense(x, labels, centers, margin=margin, weights=weights)
    for memory in ("flat", 2**12, 2**20):
        found = sharded(rows, classes, x, labels, centers, margin=margin, weights=weights[local], memory=memory)
        assert_same(found[0], true[0], relative=1e-12)
        assert_same(
            found[1], world * true[1][local], relative=0, absolute=1e-10 * world * true[1].abs().max().item()
        )  # what DDP averages
        assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    true = dense(x, labels, centers, margin=margin, reduction="none")
    found = sharded(rows, classes, x, labels, centers, margin=margin, reduction="none")
    assert_same(found[0], true[0][local], relative=1e-12)
    assert_same(found[1], true[1][local], relative=0, absolute=1e-10 * true[1].abs().max().item())
    assert_same(found[2] * world, true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())


class UserMargin:
    """A margin that a user writes."""

    s = 7.0

    def __call__(self, targets):
        return (targets.angles.cos() - 0.1 * targets.norms / (1 + targets.norms)).clamp(min=-1.0)


def user_margin_body():
    rank = dist.get_rank()
    local, held = Partition((4, 3)).rows(rank), Partition((6, 5)).rows(rank)
    x, labels, centers = data(7)
    true = dense(x, labels, centers, margin=UserMargin())
    found = sharded((4, 3), (6, 5), x, labels, centers, margin=UserMargin(), sync="sum")
    assert_same(found[0], true[0], relative=1e-12)
    assert_same(found[1], true[1][local], relative=0, absolute=1e-10 * true[1].abs().max().item())
    assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    margin = wb.AdaFace(20.0) if rank else wb.AdaFace(30.0)
    with pytest.raises(ValueError, match="margin"):
        wb.functional.partial_fc_loss(x[local], labels[local], centers[held], margin=margin)


def test_a_user_may_write_a_margin():
    run_ranks(user_margin_body, 2, timeout_s=60)


def several_body(rows, classes):
    """Use up to three labels for each example; with one label each, the result is that of a vector of labels."""
    rank = dist.get_rank()
    local, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, labels, centers = data(sum(rows))
    generator = torch.Generator().manual_seed(1)
    others = torch.stack([torch.randperm(CLASSES, generator=generator)[:3] for _ in range(sum(rows))])
    others[::2, 1:] = IGNORED
    others[1::4, 2] = IGNORED
    for name in ("ArcFace", "combined", "MagFace", "AdaFace"):
        true = dense(x, others, centers, margin=MARGINS[name])
        found = sharded(rows, classes, x, others, centers, margin=MARGINS[name], sync="sum")
        assert_same(found[0], true[0], relative=1e-12, what=name)
        assert_same(found[1], true[1][local], relative=0, absolute=1e-10 * true[1].abs().max().item())
        assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    padded = torch.stack([labels, torch.full_like(labels, IGNORED)], 1)
    one = sharded(rows, classes, x, labels, centers, margin=MARGINS["ArcFace"])
    assert_same(sharded(rows, classes, x, padded, centers, margin=MARGINS["ArcFace"])[0], one[0], relative=1e-14)


@pytest.mark.parametrize(("rows", "classes"), SPLITS[:4], ids=str)
def test_several_labels_for_each_example_are_exact(rows, classes):
    run_ranks(several_body, len(rows), rows, classes, timeout_s=60)


FORMS = [
    {"sub_centers": 3},
    {"sub_centers": 2, "margin": MARGINS["CurricularFace"], "bias": True},
    {"sub_centers": 2, "normalize": "centers", "label_smoothing": 0.1},
    {"bias": True, "exclude_above": 0.3},
    {"bias": True, "label_smoothing": 0.1, "log_weights": True},
    *({"normalize": name, "bias": bias} for name in ("centers", "embeddings", "none") for bias in (False, True)),
    {"normalize": "none", "margin": wb.NormFace(1.0), "bias": True},
    {"normalize": "none", "margin": wb.NormFace(1.0), "margin_grad": "straight_through"},
]


def forms(classes=CLASSES):
    """Return centers, bias and settings of each form: sub-centers, biases, and which operands are normalized."""
    generator = torch.Generator().manual_seed(2)
    for form in FORMS:
        form = dict(form)
        shape = (classes, form.pop("sub_centers")) if "sub_centers" in form else (classes,)
        centers, bias, log_weights = (
            torch.randn(*of, dtype=torch.float64, generator=generator) for of in ((*shape, D), (classes,), (classes,))
        )
        form |= {"bias": bias if form.get("bias") else None, "log_weights": log_weights * form.get("log_weights", 0)}
        yield centers, {"margin": MARGINS["combined"]} | form


def form_gradients(loss_fn, x, labels, centers, *, bias, **options):
    x, centers, bias = (None if z is None else z.clone().requires_grad_() for z in (x, centers, bias))
    loss = loss_fn(x, labels, centers, bias=bias, **options)
    loss.sum().backward()
    return [loss.detach(), x.grad, centers.grad, None if bias is None else bias.grad]


def forms_body(rows, classes):
    rank, world = dist.get_rank(), dist.get_world_size()
    local, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, labels, _ = data(sum(rows))
    for memory in ("flat", 3 * 8 * 40):  # tiles smaller than the classes, in which groups of sub-centers stay together
        for centers, options in forms():
            true = form_gradients(wb.reference.partial_fc_loss, x, labels, centers, **options)
            sliced = {n: z[held] for n, z in options.items() if n in ("bias", "log_weights") and z is not None}
            found = form_gradients(
                wb.functional.partial_fc_loss,
                x[local],
                labels[local],
                centers[held],
                memory=memory,
                **(options | sliced),
            )
            assert_same(found[0], true[0], relative=1e-12, what=options)
            for z, t, part, times in zip(found[1:], true[1:], (local, held, held), (world, 1, 1), strict=True):
                if t is not None:
                    assert_same(z, times * t[part], relative=0, absolute=1e-10 * times * t.abs().max().item())
    generator = torch.Generator().manual_seed(1)
    several = torch.stack([torch.randperm(CLASSES, generator=generator)[:3] for _ in range(sum(rows))])
    several[::2, 1:] = IGNORED
    weights = torch.rand(sum(rows), dtype=torch.float64, generator=generator)
    for centers, options in forms():
        if "label_smoothing" in options or options["margin"] is MARGINS["CurricularFace"]:
            continue
        true = form_gradients(
            wb.reference.partial_fc_loss, x, several, centers, weights=weights, reduction="none", **options
        )
        sliced = {n: z[held] for n, z in options.items() if n in ("bias", "log_weights") and z is not None}
        found = form_gradients(
            wb.functional.partial_fc_loss,
            *(x[local], several[local], centers[held]),
            weights=weights[local],
            reduction="none",
            **(options | sliced),
        )
        assert_same(found[0], true[0][local], relative=1e-12, what=options)
        for z, t, part, times in zip(found[1:], true[1:], (local, held, held), (1, 1 / world, 1 / world), strict=True):
            if t is not None:
                assert_same(z, times * t[part], relative=0, absolute=1e-10 * t.abs().max().item())


@pytest.mark.parametrize(("rows", "classes"), SPLITS[:4], ids=str)
def test_sub_centers_biases_and_normalization_are_exact(rows, classes):
    run_ranks(forms_body, len(rows), rows, classes, timeout_s=60)


def test_a_bias_of_half_precision_has_the_gradient_of_many_rows():
    """There are more rows than bfloat16 can count one by one."""
    x, w = torch.randn(2048, D).bfloat16(), torch.randn(CLASSES, D).bfloat16()
    labels, found = torch.zeros(2048, dtype=torch.int64), []
    for loss_fn, dtype in (
        (wb.functional.partial_fc_loss, torch.bfloat16),
        (wb.reference.partial_fc_loss, torch.float64),
    ):
        bias = torch.full((CLASSES,), 10.1).bfloat16().to(dtype).requires_grad_()
        log_weights = torch.full((CLASSES,), -2.3).bfloat16().to(dtype)
        loss = loss_fn(x.to(dtype), labels, w.to(dtype), margin=wb.CosFace(8.0), bias=bias, log_weights=log_weights)
        loss.backward()
        found.append((loss.item(), bias.grad.double()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert_same(found[0][1], found[1][1], relative=1e-2)


def test_only_the_nearest_sub_center_counts():
    """Sub-centers as separate classes would be another loss; plain logits are those of torch's cross-entropy."""
    x, labels, _ = data(4)
    centers = torch.randn(CLASSES, 2, D, dtype=torch.float64)
    centers[:, 1] = centers[:, 0]  # equal ones count once
    margin = wb.CosFace(20.0, 0.3)
    once = wb.functional.partial_fc_loss(x, labels, centers[:, 0], margin=margin)
    assert_same(wb.functional.partial_fc_loss(x, labels, centers, margin=margin), once, relative=1e-12)
    twice = wb.functional.partial_fc_loss(x, 2 * labels, centers.flatten(0, 1), margin=margin)
    assert abs(twice - once) > 0.01
    bias = torch.randn(CLASSES, dtype=torch.float64)
    linear = wb.functional.partial_fc_loss(
        x, labels, centers[:, 0], margin=wb.NormFace(1.0), normalize="none", bias=bias
    )
    assert_same(linear, F.cross_entropy(F.linear(x, centers[:, 0], bias), labels), relative=1e-12)


def top_body(rows, classes):
    """Compare the module's best classes with those of the whole matrix of logits."""
    rank = dist.get_rank()
    local = Partition(rows).rows(rank)
    x = torch.randn(sum(rows), D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    forms = [{}, {"sub_centers": 3}, {"normalize": "none", "bias": True}, {"normalize": "embeddings"}]
    for settings in [*forms, {"normalize": "centers", "sub_centers": 2}]:
        head = wb.PartialFC(D, classes, margin=wb.CosFace(8.0, 0.3), dtype=torch.float64, **settings)
        whole = wb.PartialFC(
            D, classes, dtype=torch.float64, group=wb.comm.LocalCommunicator(), **settings
        ).weight.detach()
        bias = torch.arange(classes).double() / 100 if settings.get("bias") else torch.zeros(classes).double()
        if head.bias is not None:
            head.bias.data.copy_(bias[head.local_classes])
        normalize = settings.get("normalize", "both")
        z = F.normalize(x) if normalize in ("both", "embeddings") else x
        w = F.normalize(whole, dim=-1) if normalize in ("both", "centers") else whole
        logits = 8.0 * (z @ w.view(-1, D).T).unflatten(1, (classes, -1)).amax(2) + bias
        for k in (1, 4):
            found = head.top_classes(x[local], k)
            true = logits.topk(k, dim=1)
            assert torch.equal(found.class_ids, true.indices[local]), settings
            assert_same(found.logits, true.values[local], relative=1e-12)
    wrong = (x[local], 4 if rank else 3) if len(rows) > 1 else (x[local], 12)
    with pytest.raises(ValueError, match="k must be"):
        head.top_classes(*wrong)


@pytest.mark.parametrize("rows", [(5,), (4, 0, 3)], ids=str)
def test_top_classes_are_those_of_all_logits(rows):
    run_ranks(top_body, len(rows), rows, CLASSES, timeout_s=60)


@pytest.mark.parametrize(("rows", "classes"), SPLITS, ids=str)
def test_the_loss_and_all_gradients_are_the_dense_references(rows, classes):
    run_ranks(exact_body, len(rows), rows, classes, timeout_s=90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close_to_float64(dtype):
    """Compare with the float64 reference on the same numbers, including both ends of the angle."""
    x, labels, centers = data(30, 40, dtype)
    for name, margin in MARGINS.items():
        true = dense(x.double(), labels, centers.double(), margin=margin)
        found = sharded((30,), (40,), x, labels, centers, margin=margin)
        for z, t in zip(found, true, strict=True):
            error = ((z.double() - t).norm() / t.norm()).item()
            assert error < (3e-6 if dtype == torch.float32 else 1e-2), (name, error)


def cached_body(rows, rate):
    """Use the head as the loss of gradient caching: gradients are the uncached step's, also those of centers."""
    rank = dist.get_rank()
    local = Partition(rows).rows(rank)
    torch.manual_seed(0)
    x, y = torch.randn(sum(rows), 5).double(), torch.randint(CLASSES, (sum(rows),))
    found = []
    for cached in (False, True):
        torch.manual_seed(1)
        backbone = DistributedDataParallel(nn.Linear(5, D).double())
        head = wb.PartialFC(D, CLASSES, margin=wb.ArcFace(10.0, 0.3), sample_rate=rate, dtype=torch.float64)
        if cached:
            loss = wb.GradCache([backbone], 2, head)(x[local], labels=y[local])
        else:
            loss = head(backbone(x[local]), y[local])
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in backbone.parameters()), head.weight.grad.to_dense()])
    for a, b in zip(*found, strict=True):
        assert_same(a, b, relative=1e-12)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_a_head_is_exact_with_gradient_caching(rate):
    run_ranks(cached_body, 2, (5, 3), rate, timeout_s=60)


def constants_body():
    """Without an input that needs a gradient on any rank there is no graph; one rank's bias makes one on all ranks."""
    rank, rows, classes = dist.get_rank(), Partition((4, 3)), Partition((6, 5))
    x, labels, centers = data(7)
    mine = x[rows.rows(rank)], labels[rows.rows(rank)], centers[classes.rows(rank)]
    bias, held = torch.linspace(-1, 1, CLASSES, dtype=torch.float64), classes.rows(rank)
    for options in (
        *({"margin": margin} for margin in MARGINS.values()),
        *({"reduction": "none"}, {"bias": bias[held]}, {"exclude_above": 0.2}, {"normalize": "embeddings"}),
    ):
        assert not wb.functional.partial_fc_loss(*mine, **options).requires_grad, options
    for rate in (1.0, 0.5):
        frozen = wb.PartialFC(D, CLASSES, sample_rate=rate, dtype=torch.float64).requires_grad_(False)
        assert not frozen(*mine[:2]).requires_grad, rate
        assert frozen(mine[0].clone().requires_grad_(rank == 1), mine[1]).requires_grad, "on all ranks"
    whole, local = bias.clone().requires_grad_(), bias[held].clone().requires_grad_(rank == 1)
    true = wb.reference.partial_fc_loss(x, labels, centers, margin=MARGINS["CosFace"], bias=whole)
    loss = wb.functional.partial_fc_loss(*mine, margin=MARGINS["CosFace"], bias=local)
    assert_same(loss, true, relative=1e-12)
    true.backward()
    loss.backward()
    assert (local.grad is None) == (rank == 0)
    if local.grad is not None:
        assert_same(local.grad, whole.grad[held], relative=0, absolute=1e-12)


def test_without_an_input_that_needs_a_gradient_there_is_no_graph():
    run_ranks(constants_body, 2, timeout_s=60)

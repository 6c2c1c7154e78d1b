"""Softmax over class shards: the loss and every gradient are those of the dense twin, on any number of ranks."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.heads import Targets
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

D, CLASSES, IGNORED = 6, 11, -100


def curricular():
    margin = wb.CurricularFace(20.0, 0.5).eval()
    margin.t.fill_(0.3)
    return margin


MARGINS = {
    "ArcFace": wb.ArcFace(20.0, 0.5),
    "ArcFace, linear": wb.ArcFace(20.0, 0.5, fold="linear"),
    "ArcFace, none": wb.ArcFace(20.0, 0.5, fold="none"),
    "CosFace": wb.CosFace(20.0, 0.3),
    "SphereFace": wb.SphereFace(20.0, 1.7),
    "NormFace": wb.NormFace(20.0),
    "combined": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2),
    "combined, clip": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2, fold="clip"),
    "CurricularFace": curricular(),
    "AdaFace": wb.AdaFace(20.0).eval(),
    "MagFace": wb.MagFace(20.0, norms=(1.0, 9.0)),
}
OPTIONS = [
    {},
    {"margin_grad": "straight_through"},
    {"label_smoothing": 0.2},
    {"reduction": "sum"},
    {"exclude_above": 0.2},
    {"exclude_above": 0.2, "label_smoothing": 0.2},
]
SPLITS = [((7,), (11,)), ((4, 3), (6, 5)), ((5, 0, 2), (1, 7, 3)), ((1, 3, 2, 1), (3, 3, 3, 2)), ((0, 1), (11, 0))]


def data(rows, classes=CLASSES, dtype=torch.float64):
    """Some embeddings lie along their centers, opposite, or at the fold of ArcFace's margin; one has no label."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, D, dtype=dtype, generator=generator)
    x = 3 * torch.randn(rows, D, dtype=dtype, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    for row, angle in enumerate((0.0, math.pi, math.pi - 0.5)[: rows - 1]):
        w = centers[labels[row]]
        across = F.normalize(x[row] - w * (x[row] @ w) / (w @ w), dim=0)
        x[row] = (
            2 * w
            if angle == 0.0
            else -w
            if angle == math.pi
            else w * math.cos(angle) + w.norm() * across * math.sin(angle)
        )
    if rows > 4:
        labels[4] = IGNORED
    return x, labels, centers


def dense(x, labels, centers, **options):
    """The twin's loss and gradients."""
    x, centers = x.clone().requires_grad_(), centers.clone().requires_grad_()
    loss = wb.reference.partial_fc_loss(x, labels, centers, **options)
    loss.sum().backward()
    return loss.detach(), x.grad, centers.grad


def sharded(rows, classes, x, labels, centers, **options):
    """The same of this rank's part."""
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


class Own:
    """A margin of the user's."""

    s = 7.0

    def __call__(self, targets):
        return (targets.angles.cos() - 0.1 * targets.norms / (1 + targets.norms)).clamp(min=-1.0)


def own_margin_body():
    rank = dist.get_rank()
    local, held = Partition((4, 3)).rows(rank), Partition((6, 5)).rows(rank)
    x, labels, centers = data(7)
    true = dense(x, labels, centers, margin=Own())
    found = sharded((4, 3), (6, 5), x, labels, centers, margin=Own(), sync="sum")
    assert_same(found[0], true[0], relative=1e-12)
    assert_same(found[1], true[1][local], relative=0, absolute=1e-10 * true[1].abs().max().item())
    assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    margin = wb.AdaFace(20.0) if rank else wb.AdaFace(30.0)
    with pytest.raises(ValueError, match="margin"):
        wb.functional.partial_fc_loss(x[local], labels[local], centers[held], margin=margin)


def test_a_margin_of_ones_own():
    run_ranks(own_margin_body, 2, timeout_s=60)


def several_body(rows, classes):
    """Up to three labels for each example, on any number of ranks; of one each, the same as without."""
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
def test_several_labels_for_each_example(rows, classes):
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
    """Sub-centers, biases, and what is normalized: centers, bias and other settings of each form."""
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
def test_sub_centers_biases_and_what_is_normalized(rows, classes):
    run_ranks(forms_body, len(rows), rows, classes, timeout_s=60)


def test_a_bias_of_half_precision_has_the_gradient_of_many_rows():
    """More than bfloat16 could count one by one."""
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
    """All of them as classes of their own would be another loss; plain logits are those of torch's cross-entropy."""
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
    """The best classes by the module, against those of the whole matrix of logits."""
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
def test_the_most_similar_classes(rows):
    run_ranks(top_body, len(rows), rows, CLASSES, timeout_s=60)


@pytest.mark.parametrize(("rows", "classes"), SPLITS, ids=str)
def test_the_loss_and_all_gradients_are_the_dense_twins(rows, classes):
    run_ranks(exact_body, len(rows), rows, classes, timeout_s=90)


# The module: samples, optimizers, any number of ranks.
RATES = [1.0, 0.3, 0.0]


def trained(world_rows, rate, optimizer, steps=4, classes=CLASSES, **options):
    """A backbone and a head, trained for some steps on the ranks of this call; what all ranks have in the end."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = Partition(world_rows).rows(rank)
    torch.manual_seed(0)
    backbone = nn.Linear(5, D).double()
    model = DistributedDataParallel(backbone) if dist.is_initialized() else backbone
    head = wb.PartialFC(D, classes, margin=wb.ArcFace(10.0, 0.3), sample_rate=rate, dtype=torch.float64, **options)
    first = optimizer(head.parameters())
    second = torch.optim.SGD(backbone.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(world_rows), 5, dtype=torch.float64, generator=generator)[local]
        y = torch.randint(classes, (sum(world_rows),), generator=generator)[local]
        loss = head(model(x), y)
        loss.backward()
        losses.append(loss.item())
        for one in (first, second):
            one.step()
            one.zero_grad()
    gathered = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(gathered, head.weight.detach())
    else:
        gathered = [head.weight.detach()]
    return losses, torch.cat(gathered), backbone.weight.detach()


def sgd(params):
    return wb.SparseSGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return wb.SparseAdamW(params, lr=0.05, weight_decay=0.1)


def trained_body(rows, rate, optimizer, unbiased):
    found = trained(rows, rate, optimizer, unbiased=unbiased)
    if dist.get_rank() == 0:
        return found
    return None


@pytest.mark.parametrize(("rate", "optimizer", "unbiased"), [(1.0, sgd, False), (0.3, sgd, True), (0.3, adamw, False)])
def test_training_is_the_same_on_any_number_of_ranks(rate, optimizer, unbiased):
    """Centers at the start, samples, losses, and what the optimizers make of them."""
    losses, centers, backbone = trained((6,), rate, optimizer, unbiased=unbiased)
    assert len({*losses}) == 4
    for rows in ((4, 2), (3, 0, 3)):
        found = run_ranks(trained_body, len(rows), rows, rate, optimizer, unbiased, timeout_s=60)[0]
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert_same(found[1], centers, relative=1e-10)
        assert_same(found[2], backbone, relative=1e-10)


def sampled_body(rows, rate):
    """The loss and gradients of a sample are the dense twin's of the same classes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = Partition(rows).rows(rank)
    x, labels, _ = data(sum(rows))
    kept = labels[labels != IGNORED]
    for name, margin in MARGINS.items():
        for unbiased in (False, True) if rate else (False,):
            head = wb.PartialFC(D, CLASSES, margin=margin, sample_rate=rate, unbiased=unbiased, dtype=torch.float64)
            embeddings = x[local].clone().requires_grad_()
            loss = head(embeddings, labels[local])
            loss.backward()
            gathered = [None] * world
            grad = head.weight.grad
            index = grad.coalesce().indices()[0] if grad.is_sparse else torch.arange(len(grad))
            dist.all_gather_object(gathered, (head.weight.detach(), head.local_classes.start + index, grad.to_dense()))
            centers, ids, grads = (torch.cat(parts) for parts in zip(*gathered, strict=True))
            assert set(kept.tolist()) <= set(ids.tolist())
            log_weights = None
            if unbiased and rate < 1:
                log_weights = torch.full(ids.shape, -math.log(rate), dtype=torch.float64)
                log_weights[torch.isin(ids, kept)] = 0
            twin_x, twin = x.clone().requires_grad_(), centers.clone().requires_grad_()
            true = wb.reference.partial_fc_loss(
                twin_x, labels, twin[ids], margin=margin, class_ids=ids, log_weights=log_weights
            )
            true.backward()
            assert_same(loss.detach(), true.detach(), relative=1e-12, what=name)
            assert_same(
                embeddings.grad, world * twin_x.grad[local], relative=0, absolute=1e-10 * twin_x.grad.abs().max()
            )
            assert_same(grads, twin.grad, relative=1e-10, what=name)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("rows", [rows for rows, _ in SPLITS[:4]], ids=str)
def test_samples_have_the_dense_twins_gradient(rows, rate):
    run_ranks(sampled_body, len(rows), rows, rate, timeout_s=60)


def test_a_sample_is_a_function_of_seed_step_and_class():
    head = wb.PartialFC(4, 5000, sample_rate=0.1, seed=3)
    x, y = torch.randn(2, 4), torch.tensor([4999, 17])
    samples = []
    for _ in range(3):
        head.zero_grad()
        head(x, y).backward()
        samples.append(head.weight.grad.coalesce().indices()[0])
    assert all(300 < len(sample) < 700 and torch.isin(y, sample).all() for sample in samples)
    assert not torch.equal(samples[0], samples[1])
    again = wb.PartialFC(4, 5000, sample_rate=0.1, seed=3)
    again.load_state_dict(head.state_dict() | {"step": torch.tensor(1)})
    again(x, y).backward()
    assert torch.equal(again.weight.grad.coalesce().indices()[0], samples[1])
    head.eval()
    head.zero_grad()
    head(x, y).backward()
    assert head.weight.grad.layout == torch.strided
    assert int(head.step) == 3, "evaluation is of all classes"


def test_unbiased_samples_estimate_the_sum_of_all_negatives():
    head = wb.PartialFC(4, 400, margin=wb.NormFace(4.0), dtype=torch.float64)
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 2, 3])
    full, found = head(x, y, weights=None).item(), {}
    for unbiased in (True, False):
        sampled = wb.PartialFC(
            4, 400, margin=wb.NormFace(4.0), sample_rate=0.25, unbiased=unbiased, dtype=torch.float64
        )
        with torch.no_grad():
            found[unbiased] = sum(sampled(x, y).item() for _ in range(300)) / 300
    assert abs(found[True] - full) < 0.02
    assert full - found[False] > 1.0, "the usual recipe's is log(rate) off"


# Optimizers.
@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_gradients_are_stepped_as_by_pytorch(nesterov):
    torch.manual_seed(0)
    for ours, theirs in (
        (
            lambda p: wb.SparseSGD([p], 0.1, 0.9, 0.01, nesterov=nesterov),
            lambda p: torch.optim.SGD([p], 0.1, 0.9, weight_decay=0.01, nesterov=nesterov),
        ),
        (lambda p: wb.SparseAdamW([p], 0.1), lambda p: torch.optim.AdamW([p], 0.1)),
    ):
        a = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        b = nn.Parameter(a.detach().clone())
        steps = ours(a), theirs(b)
        for _ in range(5):
            a.grad = b.grad = torch.randn(5, 3, dtype=torch.float64)
            for one in steps:
                one.step()
        assert_same(a, b, relative=1e-12)


def test_rows_without_a_gradient_stand_still_and_others_go_on():
    """A row is stepped as if the steps in which it has a gradient were all there are."""
    torch.manual_seed(0)
    for optimizer in (sgd, adamw):
        p = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
        alone = [nn.Parameter(p[row : row + 1].detach().clone()) for row in range(6)]
        ours, each = optimizer([p]), [optimizer([row]) for row in alone]
        for step in range(6):
            index = torch.arange(6)[torch.arange(6) % (step + 1) == 0]
            grad = torch.randn(len(index), 3, dtype=torch.float64)
            p.grad = torch.sparse_coo_tensor(index[None], grad, p.shape, check_invariants=True)
            for row, of_row in zip(index.tolist(), grad, strict=True):
                alone[row].grad = of_row[None]
                each[row].step()
            ours.step()
        assert_same(p.detach(), torch.cat([row.detach() for row in alone]), relative=1e-12)


def test_sampled_gradients_accumulate():
    x, y = torch.randn(2, 4, D, dtype=torch.float64), torch.randint(50, (2, 4))
    heads = [wb.PartialFC(D, 50, sample_rate=0.2, dtype=torch.float64) for _ in range(2)]
    for step in range(2):
        heads[0](x[step], y[step]).backward()
    total = torch.zeros_like(heads[1].weight)
    for step in range(2):
        heads[1].zero_grad()
        heads[1](x[step], y[step]).backward()
        total += heads[1].weight.grad.to_dense()
    assert_same(heads[0].weight.grad.to_dense(), total, relative=1e-12)


# Margins.
def test_margins_are_the_papers():
    """By the formulas with acos, away from its ends."""
    theta = torch.linspace(0.2, 2.2, 50, dtype=torch.float64)
    norms = torch.linspace(5.0, 130.0, 50, dtype=torch.float64)
    theta, norms = theta[:, None], norms[:, None]
    targets, c = Targets(theta, norms), theta.cos()
    assert_same(wb.ArcFace(m=0.5)(targets), (c.acos() + 0.5).cos(), relative=1e-12)
    assert_same(wb.CosFace(m=0.4)(targets), c - 0.4, relative=1e-12)
    assert_same(wb.SphereFace(m=1.3)(targets), (1.3 * c.acos()).cos(), relative=1e-12)
    combined = wb.CombinedMargin(64.0, 1.2, 0.3, 0.1)
    assert_same(combined(targets), (1.2 * c.acos() + 0.3).cos() - 0.1, relative=1e-12)
    a = norms.clamp(10, 110)
    assert_same(wb.MagFace()(targets), (theta + 0.35 / 100 * (a - 10) + 0.45).cos(), relative=1e-12)
    ada = wb.AdaFace()
    ada.observe(norms)
    mean, std = 0.99 * 20 + 0.01 * norms.clamp(max=100).mean(), 0.99 * 100 + 0.01 * norms.clamp(max=100).std()
    u = ((norms.clamp(max=100) - mean) / (std + 1e-3) * 0.333).clamp(-1, 1)
    assert_same(ada(targets), (theta - 0.4 * u).clamp(0, math.pi).cos() - 0.4 * u - 0.4, relative=1e-12)
    assert_same(ada.mean, mean, relative=1e-12)
    curricular = wb.CurricularFace(10.0, 0.5)
    curricular.observe(theta)
    assert_same(curricular.t, 0.01 * c.mean(), relative=1e-12)
    negatives = torch.linspace(-1, 1, 50, dtype=torch.float64).expand(50, 50).T.contiguous()
    bent = curricular.of_negatives(theta).transform_(10 * negatives, slice(0, 50)) / 10
    hard = negatives > (theta[:, 0] + 0.5).cos()
    assert hard.any()
    assert not hard.all()
    assert_same(bent, torch.where(hard, negatives * (0.01 * c.mean() + negatives), negatives), relative=1e-12)


@pytest.mark.parametrize("margin", [wb.ArcFace(m=0.5), wb.SphereFace(m=3.3), wb.CombinedMargin(64.0, 2.0, 0.5, 0.1)])
def test_a_larger_angle_is_never_rewarded(margin):
    """Beyond pi, too; and the plain cosine would be."""
    theta = torch.linspace(0, math.pi, 2000, dtype=torch.float64)[:, None]
    change = margin(Targets(theta, theta)).diff(dim=0)
    assert (change <= 1e-12).all()
    assert change.abs().max() < 0.01, "without a jump"
    plain = wb.CombinedMargin(64.0, margin.m1, margin.m2, margin.m3, fold="none")
    assert (plain(Targets(theta, theta)).diff(dim=0) > 1e-6).any()


def test_the_straight_through_gradient_is_another():
    """As insightface's code has it: smaller by sin(theta + m) / sin(theta) at the target."""
    x, labels, centers = data(6)
    exact, through = (
        dense(x, labels, centers, margin=wb.ArcFace(), margin_grad=g) for g in ("exact", "straight_through")
    )
    assert_same(exact[0], through[0], relative=1e-15)
    assert (exact[2] - through[2]).norm() > 0.05 * exact[2].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    """Against the float64 twin on the same numbers, those at the ends of the angle included."""
    x, labels, centers = data(30, 40, dtype)
    for name, margin in MARGINS.items():
        true = dense(x.double(), labels, centers.double(), margin=margin)
        found = sharded((30,), (40,), x, labels, centers, margin=margin)
        for z, t in zip(found, true, strict=True):
            error = ((z.double() - t).norm() / t.norm()).item()
            assert error < (3e-6 if dtype == torch.float32 else 1e-2), (name, error)


# Mistakes.
def good_call(x, y, w):
    return wb.functional.partial_fc_loss(x, y, w)


BAD = {
    "label too large": (lambda x, y, w: good_call(x, y + CLASSES, w), r"labels must lie in \[0, 11\)"),
    "label negative": (lambda x, y, w: good_call(x, y - CLASSES, w), r"labels must lie in \[0, 11\)"),
    "float labels": (lambda x, y, w: good_call(x, y.float(), w), "labels must be a tensor of integers"),
    "zero embedding": (lambda x, y, w: good_call(0 * x, y, w), "embeddings must not have a row of zeros"),
    "zero center": (
        lambda x, y, w: good_call(x, y, torch.cat([0 * w[:1], w[1:]])),
        "centers must not have a row of zeros",
    ),
    "a label twice": (
        lambda x, y, w: good_call(x, torch.stack([y, y], 1), w),
        "must be different ones|labels of an example",
    ),
    "NaN": (lambda x, y, w: good_call(x, y, w / 0 * 0), "centers must be finite"),
    "width": (lambda x, y, w: good_call(x, y, w[:, 1:]), "must have the same feature size"),
    "margin": (lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, margin=0.5), "margin must be one such as"),
    "other margin": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, margin=wb.CosFace()),
        "margin|must be one",
    ),
    "classes": (lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, num_classes=12), "num_classes"),
    "class left out": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, class_ids=torch.arange(len(w)) + 100),
        "each label's class must be among|whether there are class_ids",
    ),
    "bias": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, bias=torch.zeros(len(w) + 1)),
        "bias must have shape|whether there is a bias",
    ),
    "sub-centers": (
        lambda x, y, w: good_call(x, y, torch.stack([w, w], 1)[..., None]),
        "centers must have shape",
    ),
    "sub-centers of one rank": (lambda x, y, w: good_call(x, y, torch.stack([w, w], 1)), "sub-centers of a class"),
    "order": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, class_ids=torch.arange(len(w)).flip(0)),
        "class_ids must be ascending|whether there are",
    ),
}


def bad_body():
    """On the last rank alone: an error on all, and the next call is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, labels, centers = data(6)
    labels[4] = 0
    rows, classes = Partition.even(6, world), Partition.even(CLASSES, world)
    mine = x[rows.rows(rank)], labels[rows.rows(rank)], centers[classes.rows(rank)]
    for name, (call, message) in BAD.items():
        if world == 1 and name in ("other margin", "sub-centers of one rank"):
            continue
        with pytest.raises(ValueError, match=message):
            (call if rank == world - 1 else good_call)(*mine)
        true = wb.reference.partial_fc_loss(x, labels, centers, margin=wb.ArcFace())
        assert_same(good_call(*mine), true, relative=1e-12, what=name)


@pytest.mark.parametrize("world", [1, 2])
def test_mistakes(world):
    run_ranks(bad_body, world, timeout_s=60)


class Upside:
    s = -1.0

    def __call__(self, targets):
        return targets.angles.cos()


class Learned(nn.Module):
    s = 8.0

    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.tensor(0.1))

    def forward(self, targets):
        return targets.angles.cos() - self.m


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_rate": 1.5}, r"sample_rate must lie in \[0, 1\], got 1.5"),
        ({"num_classes": 0}, "num_classes must be a positive integer"),
        ({"embedding_size": 2.0}, "embedding_size must be a positive integer"),
        ({"margin_grad": "sometimes"}, "margin_grad must be one of 'exact', 'straight_through'"),
        ({"unbiased": True, "sample_rate": 0.0}, "unbiased needs a sample_rate above 0"),
        ({"seed": "x"}, "seed must be an integer from -9223372036854775808 to 9223372036854775807; got 'x'"),
        ({"seed": 2**64}, "seed must be an integer from -9223372036854775808 to 9223372036854775807; got 1844"),
        ({"margin": Upside()}, "the margin's scale s must be positive, got -1.0"),
        ({"margin": wb.ArcFace}, "margin must be one such as wholebatch.ArcFace"),
        ({"bias": "no"}, "bias must be True or False, got 'no'"),
        ({"unbiased": 1}, "unbiased must be True or False, got 1"),
        ({"sample_rate": True}, "sample_rate must be a number, got bool"),
        ({"label_smoothing": True}, "label_smoothing must be a number, got bool"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer"),
        ({"dtype": torch.bool}, "dtype must be torch.float64, float32, bfloat16 or float16, got torch.bool"),
        ({"device": "toaster"}, "device must be a torch.device or its name, got 'toaster'"),
        ({"num_classes": 10**14}, "ask for a tensor of shape .100000000000000, 4.*this machine has"),
        ({"margin": Learned()}, "a margin must have no parameters to learn"),
        ({"margin": None}, "margin must be one such as"),
        ({"exclude_above": 2.0}, "exclude_above must be a cosine from -1 to 1"),
        ({"exclude_above": 0.5, "normalize": "none"}, "they need normalize='both', got 'none'"),
        ({"normalize": True}, "normalize must be one of 'both', 'centers', 'embeddings', 'none'"),
        ({"sub_centers": 0}, "sub_centers must be a positive integer"),
        ({"sub_centers": 2, "normalize": "none"}, "sub-centers are compared as unit vectors"),
    ],
)
def test_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        wb.PartialFC(**{"embedding_size": 4, "num_classes": 10} | arguments)


def few_classes_body():
    with pytest.raises(ValueError, match="a class for each of the 2 ranks, got num_classes=1"):
        wb.PartialFC(4, 1)


def test_more_ranks_than_classes():
    run_ranks(few_classes_body, 2, timeout_s=60)


def wrapped_body():
    """By DDP or FSDP2, called in their forward pass or outside of it; before there are ranks; with another's state."""

    class Model(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.backbone, self.head = nn.Linear(5, 4), head

        def forward(self, x, y=None):
            return self.backbone(x) if y is None else self.head(self.backbone(x), y)

    x, y = torch.randn(2, 5), torch.tensor([0, 1])
    refused = "the head holds another rank's centers|DistributedDataParallel has wrapped the head"
    for rate in (1.0, 0.3):
        model = DistributedDataParallel(Model(wb.PartialFC(4, 10, sample_rate=rate)))
        with pytest.raises(ValueError, match=refused):
            model(x, y)
        with pytest.raises(ValueError, match=refused):
            model.module.head(model(x), y)
        for how in ({"broadcast_buffers": False}, {"broadcast_buffers": False, "init_sync": False}):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # users still say it
                model = DistributedDataParallel(Model(wb.PartialFC(4, 10, sample_rate=rate)), **how)
            with pytest.raises(ValueError, match="DistributedDataParallel has wrapped the head"):
                model(x, y)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = fully_shard(Model(wb.PartialFC(4, 10, sample_rate=rate)), mesh=mesh)
        with pytest.raises(ValueError, match="must stay outside of FSDP"):
            model(x, y)
        early = wb.PartialFC(4, 10, sample_rate=rate, group=wb.comm.LocalCommunicator())
        early.options = wb.PartialFC(4, 10).options
        with pytest.raises(ValueError, match="make it after"):
            early(torch.randn(2, 4), y)
        head = wb.PartialFC(4, 10, sample_rate=rate)
        states = [None, None]
        dist.all_gather_object(states, head.state_dict())
        head.load_state_dict(states[0])
        with pytest.raises(ValueError, match=refused):
            head(torch.randn(2, 4), y)
    for one in ({"sample_rate": 0.5}, {"unbiased": True}, {"seed": 1}):
        head = wb.PartialFC(4, 10, **({"sample_rate": 0.3} | (one if dist.get_rank() else {})))
        with pytest.raises(ValueError, match="sample_rate, unbiased, seed, step and training must be the same"):
            head(torch.randn(2, 4), y)


def test_heads_that_are_not_this_ranks_are_refused():
    run_ranks(wrapped_body, 2, timeout_s=60)


# Checkpoints.
def steps_body(folder, optimizer, rate, saved_after, steps):
    """Train, save, or load and go on; the losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = Partition.even(10, world).rows(rank)
    head = wb.PartialFC(D, 23, margin=wb.ArcFace(10.0, 0.3), sample_rate=rate, dtype=torch.float64, seed=5)
    one = optimizer(head.parameters())
    first = 0
    if saved_after is None:
        wb.heads.load_head(folder, head, one)
        first = int(head.step)
    losses = []
    for step in range(first, first + steps):
        if step == saved_after:
            wb.heads.save_head(folder, head, one)
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(10, D, dtype=torch.float64, generator=generator)[local]
        y = torch.randint(23, (10,), generator=generator)[local]
        loss = head(x, y)
        loss.backward()
        losses.append(loss.item())
        one.step()
        one.zero_grad()
    return losses


@pytest.mark.parametrize(("optimizer", "worlds"), [(sgd, (2, 5)), (adamw, (1,))])
def test_checkpoints_of_three_ranks_go_on_with_any_number(optimizer, worlds, tmp_path):
    """Centers, momentum and samples: the next ten losses are those of the run that was not interrupted."""
    folder = tmp_path / "head"
    losses = run_ranks(steps_body, 3, folder, optimizer, 0.4, 4, 14, timeout_s=90)[0]
    for world in worlds:
        found = run_ranks(steps_body, world, folder, optimizer, 0.4, None, 10, timeout_s=90)[0]
        assert found == pytest.approx(losses[4:], rel=1e-10), world


def test_what_a_checkpoint_is_not_loaded_into(tmp_path):
    head = wb.PartialFC(4, 10)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    head(torch.randn(2, 4), torch.tensor([0, 1])).backward()
    optimizer.step()
    wb.heads.save_head(tmp_path / "a", head, optimizer)
    for other, one, message in (
        (wb.PartialFC(5, 10), None, "embeddings have 4 numbers, the head's 5"),
        (wb.PartialFC(4, 11), None, "has 10 classes, the head 11"),
        (wb.PartialFC(4, 10), wb.SparseAdamW, "the checkpoint's optimizer has"),
        (wb.PartialFC(4, 10), torch.optim.AdamW, "must be a SparseSGD or SparseAdamW, or None; got AdamW"),
    ):
        before = other.weight.detach().clone()
        with pytest.raises(ValueError, match=message):
            wb.heads.load_head(tmp_path / "a", other, one and one(other.parameters()))
        assert torch.equal(other.weight, before)
    with pytest.raises(ValueError, match=r"optimizer must be a wholebatch\.SparseSGD or SparseAdamW, .* got AdamW"):
        wb.heads.save_head(tmp_path / "c", head, torch.optim.AdamW(head.parameters()))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        wb.heads.load_head(tmp_path / "b", head)
    for other, classes, message in (
        (wb.PartialFC(4, 12), torch.arange(9), r"classes must have shape \(10,\)"),
        (wb.PartialFC(4, 12), torch.arange(10) + 3, r"classes must lie in \[0, 12\), or be -1; got 3 to 12"),
        (wb.PartialFC(4, 10, bias=True), None, "bias: the checkpoint has False, the head True"),
        (wb.PartialFC(4, 10, sub_centers=2), None, "sub-centers of a class: the checkpoint has 1, the head 2"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.heads.load_head(tmp_path / "a", other, classes=classes)


def refused_saves_body(folder):
    """What one rank alone does wrong, all ranks are told; then a checkpoint is written that is no other's."""
    rank = dist.get_rank()
    head = wb.PartialFC(4, 10)
    good, bad = wb.SparseSGD(head.parameters()), torch.optim.AdamW(head.parameters())
    with pytest.raises(ValueError, match=r"optimizer must be a wholebatch\.SparseSGD or SparseAdamW, .* got AdamW"):
        wb.heads.save_head(folder / "a", head, bad if rank else good)
    with pytest.raises(ValueError, match="folder must be the same on all ranks"):
        wb.heads.save_head(folder / f"a{rank}", head, good)
    with pytest.raises(ValueError, match="head must be the same on all ranks"):
        wb.heads.save_head(folder / "a", head, good if rank else None)
    with pytest.raises(ValueError, match="it lacks weight"):
        wb.heads.save_head(folder / "a", head, wb.SparseSGD(wb.PartialFC(4, 10).parameters()) if rank else good)
    other = wb.PartialFC(4, 10)
    other.first_class.fill_(rank)
    with pytest.raises(ValueError, match="the head holds another rank's centers"):
        wb.heads.save_head(folder / "a", other)
    (folder / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"file cannot be written: .*(exists|directory)"):
        wb.heads.save_head(folder / "file", head)
    wb.heads.save_head(folder / "a", head)
    with pytest.raises(ValueError, match="has a checkpoint already"):
        wb.heads.save_head(folder / "a", head)
    with pytest.raises(ValueError, match="the head holds another rank's centers"):
        wb.heads.load_head(folder / "a", other)
    with pytest.raises(ValueError, match="the checkpoint was saved without an optimizer"):
        wb.heads.load_head(folder / "a", head, good)


def test_what_is_not_saved(tmp_path):
    run_ranks(refused_saves_body, 2, tmp_path, timeout_s=60)


def damaged_body(folder):
    """A slice that one rank alone needs: none of them is changed."""
    head = wb.PartialFC(4, 10, seed=1)
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors is damaged or incomplete"):
        wb.heads.load_head(folder, head)
    assert torch.equal(head.weight, before)


def saved_body(folder):
    wb.heads.save_head(folder, wb.PartialFC(4, 10))


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    run_ranks(saved_body, 2, tmp_path / "a", timeout_s=60)
    (file,) = (tmp_path / "a").glob("rank-00001-*")
    file.write_bytes(file.read_bytes()[:40])
    run_ranks(damaged_body, 2, tmp_path / "a", timeout_s=60)


def foreign_body(folder):
    """Of two saves with the same shapes: one's index with a file of the other's."""
    head, other = wb.PartialFC(4, 10), wb.PartialFC(4, 10, seed=1)
    saves = [wb.heads.save_head(folder / name, one) for name, one in (("a", head), ("b", other))]
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("a", "b"):
            (folder / name / "rank-00001-of-00002.safetensors").rename(folder / f"{name}1")
        (folder / "b1").rename(folder / "a" / "rank-00001-of-00002.safetensors")
        (folder / "b" / "rank-00001-of-00002.safetensors").symlink_to(folder / "a1")
    dist.barrier()
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors belongs to another save") as error:
        wb.heads.load_head(folder / "a", head)
    assert saves[0] in str(error.value)
    assert saves[1] in str(error.value)
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors is a link"):
        wb.heads.load_head(folder / "b", head)
    assert torch.equal(head.weight, before)
    return saves


def test_files_of_another_save_are_refused(tmp_path):
    first, second = run_ranks(foreign_body, 2, tmp_path, timeout_s=60)
    assert first == second, "the ids are the same on all ranks"
    assert first[0] != first[1]


def test_the_id_of_a_save(tmp_path):
    head = wb.PartialFC(4, 10)
    first, second = (wb.heads.save_head(tmp_path / name, head) for name in "ab")
    wb.heads.load_head(tmp_path / "a", head, save_id=first)
    with pytest.raises(ValueError, match=f"a belongs to another save: expected {second}, got {first}"):
        wb.heads.load_head(tmp_path / "a", head, save_id=second)
    with pytest.raises(ValueError, match="save_id must be an id that save_head has returned, or None; got 5"):
        wb.heads.load_head(tmp_path / "a", head, save_id=5)
    for load in (wb.heads.save_head, wb.heads.load_head, wb.heads.load_insightface):
        with pytest.raises(ValueError, match=r"head must be a wholebatch\.PartialFC, got Linear"):
            load(tmp_path / "a", nn.Linear(4, 10))


def test_folders_of_distributed_checkpoints_are_not_read(tmp_path):
    """They would have to be unpickled."""
    from torch.distributed.checkpoint import save

    head = wb.PartialFC(4, 10)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"weight/000000000000": head.weight.detach()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"is a folder of torch\.distributed\.checkpoint .* save the head again"):
        wb.heads.load_head(tmp_path, head)
    with pytest.raises(ValueError, match=r"has a checkpoint already, \.metadata"):
        wb.heads.save_head(tmp_path, head)


def test_what_a_margin_remembers_is_part_of_a_checkpoint(tmp_path):
    heads = [wb.PartialFC(4, 10, margin=wb.AdaFace()) for _ in range(2)]
    heads[0](torch.randn(3, 4), torch.tensor([0, 1, 2]))
    wb.heads.save_head(tmp_path / "a", heads[0])
    wb.heads.load_head(tmp_path / "a", heads[1])
    assert heads[0].margin.mean != 20.0
    assert torch.equal(heads[1].margin.mean, heads[0].margin.mean)
    with pytest.raises(ValueError, match="buffers of the margin"):
        wb.heads.load_head(tmp_path / "a", wb.PartialFC(4, 10))


def merged_body(folder, classes):
    head = wb.PartialFC(4, 9, bias=True)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    wb.heads.load_head(folder, head, optimizer, classes=classes)
    state = optimizer.state[head.weight]["momentum_buffer"]
    return head.weight.detach(), head.bias.detach(), state


def test_classes_that_come_go_and_become_one(tmp_path):
    """Of ten classes 2 and 3 become one, 5 goes, and the last is new; on one rank and on two."""
    head = wb.PartialFC(4, 10, bias=True)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    head(torch.randn(2, 4), torch.tensor([0, 1])).backward()
    optimizer.step()
    wb.heads.save_head(tmp_path / "a", head, optimizer)
    old = head.weight.detach(), head.bias.detach(), optimizer.state[head.weight]["momentum_buffer"]
    new = wb.PartialFC(4, 9, bias=True).weight.detach()
    classes = torch.tensor([0, 1, 2, 2, 3, -1, 4, 5, 6, 7])
    for world in (1, 2):
        found = run_ranks(merged_body, world, tmp_path / "a", classes, timeout_s=60)
        for x, was in zip((torch.cat(parts) for parts in zip(*found, strict=True)), old, strict=True):
            assert torch.equal(x[[0, 1, 3, 4, 5, 6, 7]], was[[0, 1, 4, 6, 7, 8, 9]])
            assert_same(x[2], was[2:4].mean(0), relative=1e-6)
            assert torch.equal(x[8], new[8] if x.shape == new.shape and was is old[0] else torch.zeros_like(x[8]))
    several = wb.PartialFC(4, 10, sub_centers=2)
    wb.heads.save_head(tmp_path / "b", several)
    with pytest.raises(ValueError, match="classes must map no two classes to one for a head with sub-centers"):
        wb.heads.load_head(tmp_path / "b", wb.PartialFC(4, 9, sub_centers=2), classes=classes)
    wb.heads.load_head(tmp_path / "b", several, classes=torch.arange(10).flip(0))


# Gradients of what all hold and of what each has a part of.
def clipped_body():
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, backbone = torch.arange(1.0, 8.0).double(), nn.Parameter(torch.ones(3).double())
    for sparse in (False, True):
        backbone.grad = torch.tensor([3.0, 0.0, 4.0]).double()
        local = whole[Partition.even(7, world).rows(rank)]
        head = nn.Parameter(torch.ones(len(local), 1).double())
        head.grad = local[:, None].clone()
        if sparse:
            index = torch.arange(len(local))
            twice = torch.cat([index, index])[None]
            with torch.sparse.check_sparse_tensor_invariants():
                head.grad = torch.sparse_coo_tensor(twice, head.grad.repeat(2, 1) / 2, head.shape)
        norm = wb.heads.clip_grad_norm_([backbone], [head], 2.0)
        true = math.sqrt(25 + float(whole.square().sum()))
        assert abs(norm.item() - true) < 1e-12
        assert_same(backbone.grad, torch.tensor([3.0, 0.0, 4.0]).double() * 2 / true, relative=1e-6)
        assert_same(head.grad.to_dense()[:, 0], local * 2 / true, relative=1e-6)


def wrong_clips_body():
    """On one rank alone, and where the other does something else."""
    rank = dist.get_rank()
    head, backbone = wb.PartialFC(4, 10), nn.Linear(4, 4)
    for wrong, message in (
        (
            lambda: wb.heads.clip_grad_norm_([*backbone.parameters(), *head.parameters()], head.parameters(), 1.0),
            "not both",
        ),
        (lambda: wb.heads.clip_grad_norm_(backbone.parameters(), head.weight, -1.0), "max_norm must be at least 0"),
        (lambda: head(torch.randn(2, 4), torch.tensor([0, 1])), "all ranks must make the same calls"),
        (
            lambda: wb.heads.agree_on_overflow(torch.amp.GradScaler("cpu"), wb.SparseSGD(head.parameters())),
            "call scaler.unscale_|same calls",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong() if rank else wb.heads.clip_grad_norm_(backbone.parameters(), head.weight, 1.0)


def test_mistakes_in_clipping():
    run_ranks(wrong_clips_body, 2, timeout_s=60)


@pytest.mark.parametrize("world", [1, 3])
def test_clipping_by_the_norm_of_the_whole_gradient(world):
    run_ranks(clipped_body, world, timeout_s=60)


def overflow_body(agree):
    """Infinity in one rank's part of the head."""
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backbone, head = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    optimizers = [torch.optim.SGD([backbone], 1.0), wb.SparseSGD([head], 1.0)]
    scaler.scale(torch.zeros(()))
    backbone.grad = torch.ones(2)
    head.grad = torch.full((2, 2), math.inf if rank == 1 else 1.0)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if agree:
        wb.heads.agree_on_overflow(scaler, *optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool((head == 1).all())


def test_an_overflow_of_one_rank_is_everyones():
    assert run_ranks(overflow_body, 2, False, timeout_s=60) == [(8.0, False), (4.0, True)], "without: they part"
    assert run_ranks(overflow_body, 2, True, timeout_s=60) == [(4.0, True), (4.0, True)]


def export_body():
    head = wb.PartialFC(3, 2500, seed=2)
    whole = head.full_weight(root=1)
    assert (whole is None) == (dist.get_rank() != 1)
    return whole


def test_the_whole_classifier_is_the_same_for_any_number_of_ranks():
    alone = wb.PartialFC(3, 2500, seed=2).full_weight()
    assert torch.equal(run_ranks(export_body, 3, timeout_s=60)[1], alone)
    assert len(alone.unique(dim=0)) == 2500, "no two ranks start with the same centers"


def insightface_body(folder):
    head = wb.PartialFC(4, 11)
    optimizer = wb.SparseSGD(head.parameters())
    wb.heads.load_insightface(folder, head, optimizer if (folder / "rank_0_softmax_weight_mom.pt").exists() else None)
    return head.weight.detach(), optimizer.state[head.weight].get("momentum_buffer")


def test_shards_of_insightface(tmp_path):
    """Of three ranks, on one and on two."""
    whole, momentum = torch.randn(11, 4), torch.randn(11, 4)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
    for rank in range(3):
        rows = Partition.even(11, 3).rows(rank)
        torch.save(whole[rows].clone(), tmp_path / "1" / f"rank_{rank}_softmax_weight.pt")
        torch.save(momentum[rows].clone(), tmp_path / "1" / f"rank_{rank}_softmax_weight_mom.pt")
        torch.save({"weight": whole[rows].clone()}, tmp_path / "2" / f"softmax_fc_gpu_{rank}.pt")
    for world in (1, 2):
        for version in ("1", "2"):
            found = run_ranks(insightface_body, world, tmp_path / version, timeout_s=60)
            assert torch.equal(torch.cat([weight for weight, _ in found]), whole)
            if version == "1":
                assert torch.equal(torch.cat([of_rank for _, of_rank in found]), momentum)
    for other, message in ((wb.PartialFC(4, 12), "have 11 classes"), (wb.PartialFC(5, 11), r"of \[4\] numbers")):
        with pytest.raises(ValueError, match=message):
            wb.heads.load_insightface(tmp_path / "2", other)
    head = wb.PartialFC(4, 11)
    with pytest.raises(ValueError, match=r"files like softmax_fc_gpu_0\.pt hold no momentum; leave the optimizer out"):
        wb.heads.load_insightface(tmp_path / "2", head, wb.SparseSGD(head.parameters()))
    (tmp_path / "2" / "softmax_fc_gpu_1.pt").unlink()
    with pytest.raises(ValueError, match=r"those of \[1\] are missing"):
        wb.heads.load_insightface(tmp_path / "2", wb.PartialFC(4, 11))


def of_train_v2(rank, whole, momentum, step=40):
    """What insightface's train_v2.py saves on one of three ranks."""
    rows = Partition.even(11, 3).rows(rank)
    backbone, weight = nn.Linear(3, 4), nn.Parameter(whole[rows].clone())
    optimizer = torch.optim.SGD([{"params": backbone.parameters()}, {"params": [weight]}], lr=0.1, momentum=0.9)
    for p in (*backbone.parameters(), weight):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[weight]["momentum_buffer"] = momentum[rows].clone()
    head = nn.Module()
    head.weight = weight
    return {
        "epoch": 2, "global_step": step, "state_dict_backbone": backbone.state_dict(),
        "state_dict_softmax_fc": head.state_dict(), "state_optimizer": optimizer.state_dict(),
        "state_lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
    }  # fmt: skip


def train_v2_body(folder):
    head = wb.PartialFC(4, 11)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    wb.heads.load_insightface(folder, head, optimizer)
    return head.weight.detach(), optimizer.state[head.weight]["momentum_buffer"]


def test_what_train_v2_of_insightface_saves(tmp_path):
    """Of three ranks, on one and on two; then files that do not belong together."""
    whole, momentum = torch.randn(11, 4), torch.randn(11, 4)
    for rank in range(3):
        torch.save(of_train_v2(rank, whole, momentum), tmp_path / f"checkpoint_gpu_{rank}.pt")
    for world in (1, 2):
        found = run_ranks(train_v2_body, world, tmp_path, timeout_s=60)
        assert torch.equal(torch.cat([weight for weight, _ in found]), whole)
        assert torch.equal(torch.cat([of_rank for _, of_rank in found]), momentum)
    head = wb.PartialFC(4, 11)
    before = head.weight.detach().clone()
    for optimizer in (wb.SparseAdamW(head.parameters()), wb.SparseSGD(wb.PartialFC(4, 11).parameters())):
        with pytest.raises(ValueError, match=r"optimizer must (be a wholebatch\.SparseSGD|have head\.parameters)"):
            wb.heads.load_insightface(tmp_path, head, optimizer)
    last = tmp_path / "checkpoint_gpu_2.pt"
    last.rename(tmp_path / "other")
    torch.save(of_train_v2(2, whole, momentum, step=80), last)
    with pytest.raises(ValueError, match=r"checkpoint_gpu_2\.pt is of epoch and step \(2, 80\), .* of different saves"):
        wb.heads.load_insightface(tmp_path, head)
    (tmp_path / "checkpoint_gpu_0.pt").rename(last)
    (tmp_path / "other").rename(tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ValueError, match=r"checkpoint_gpu_0\.pt was saved as checkpoint_gpu_2\.pt: another rank's"):
        wb.heads.load_insightface(tmp_path, head)
    torch.save({"state_dict_softmax_fc": {}}, tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ValueError, match=r"checkpoint_gpu_0\.pt must hold the classifier's weight"):
        wb.heads.load_insightface(tmp_path, head)
    assert torch.equal(head.weight, before)


def cached_body(rows, rate):
    """The head as the loss of gradient caching: every gradient that of the step without, the centers' once."""
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
def test_with_gradient_caching(rate):
    run_ranks(cached_body, 2, (5, 3), rate, timeout_s=60)

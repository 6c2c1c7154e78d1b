"""Training of class shards: samples of classes, sparse optimizers, clipping; the same on any number of ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from partial_fc_data import CLASSES, IGNORED, MARGINS, SPLITS, D, adamw, data, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

RATES = [1.0, 0.3, 0.0]


def trained(world_rows, rate, optimizer, steps=4, classes=CLASSES, **options):
    """Train a backbone and a head for some steps on the ranks of this call; return the final values of all ranks."""
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


def trained_body(rows, rate, optimizer, unbiased):
    found = trained(rows, rate, optimizer, unbiased=unbiased)
    if dist.get_rank() == 0:
        return found
    return None


@pytest.mark.parametrize(("rate", "optimizer", "unbiased"), [(1.0, sgd, False), (0.3, sgd, True), (0.3, adamw, False)])
def test_training_is_the_same_on_any_number_of_ranks(rate, optimizer, unbiased):
    """Initial centers, samples, losses and the optimizers' results are equal."""
    losses, centers, backbone = trained((6,), rate, optimizer, unbiased=unbiased)
    assert len({*losses}) == 4
    for rows in ((4, 2), (3, 0, 3)):
        found = run_ranks(trained_body, len(rows), rows, rate, optimizer, unbiased, timeout_s=60)[0]
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert_same(found[1], centers, relative=1e-10)
        assert_same(found[2], backbone, relative=1e-10)


def sampled_body(rows, rate):
    """Compare the loss and gradients of a sample with the dense reference on the same classes."""
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
            x_leaf, reference = x.clone().requires_grad_(), centers.clone().requires_grad_()
            true = wb.reference.partial_fc_loss(
                x_leaf, labels, reference[ids], margin=margin, class_ids=ids, log_weights=log_weights
            )
            true.backward()
            assert_same(loss.detach(), true.detach(), relative=1e-12, what=name)
            assert_same(
                embeddings.grad, world * x_leaf.grad[local], relative=0, absolute=1e-10 * x_leaf.grad.abs().max()
            )
            assert_same(grads, reference.grad, relative=1e-10, what=name)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("rows", [rows for rows, _ in SPLITS[:4]], ids=str)
def test_samples_have_the_dense_references_gradient(rows, rate):
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
    assert full - found[False] > 1.0, "the common recipe is off by log(rate)"


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


def test_a_row_without_a_gradient_skips_the_step():
    """A row is updated as if only the steps existed in which it has a gradient."""
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
    """Make mistakes on one rank alone, or call something else on the other."""
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


def test_mistakes_in_clipping_raise_on_all_ranks():
    run_ranks(wrong_clips_body, 2, timeout_s=60)


@pytest.mark.parametrize("world", [1, 3])
def test_clipping_by_the_norm_of_the_whole_gradient(world):
    run_ranks(clipped_body, world, timeout_s=60)


def overflow_body(agree):
    """Put infinity into one rank's part of the head."""
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


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(overflow_body, 2, False, timeout_s=60) == [(8.0, False), (4.0, True)], "without it, ranks differ"
    assert run_ranks(overflow_body, 2, True, timeout_s=60) == [(4.0, True), (4.0, True)]


def next_step_body(growth_factor):
    """Put infinity into one rank's part of the head, and make one more step with the scales that differ then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=1 / growth_factor)
    backbone, head = nn.Linear(4, 4), wb.PartialFC(4, 10)
    optimizers = [torch.optim.SGD(backbone.parameters(), 1.0), wb.SparseSGD(head.parameters(), 1.0)]

    def backward():
        scaler.scale(head(backbone(torch.ones(1, 4)), torch.tensor([1]))).backward()

    backward()
    if dist.get_rank():
        head.weight.grad[0] = math.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match="the incoming gradient must be the same on all ranks") as refused:
        backward()
    return str(refused.value).partition(": the incoming gradient must be the same on all ranks, got ")[2]


def test_an_overflow_on_one_rank_is_named_as_the_cause():
    overflow = (
        "a GradScaler has found an overflow on one rank alone and skipped the step there, so the weights have parted: "
        "resume from a checkpoint, and call wholebatch.heads.agree_on_overflow"
    )
    for message in run_ranks(next_step_body, 2, 2.0, timeout_s=60):
        assert message.startswith(f"[65536.0, 32768.0]: {overflow}"), "a power of two apart, the cause is certain"
    for message in run_ranks(next_step_body, 2, 3.0, timeout_s=60):
        assert message.startswith("[65536.0, 21845.3")
        assert "multiply the loss" in message.partition(overflow)[0], "one cause of two"

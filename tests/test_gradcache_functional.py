"""`wholebatch.gradcache.cached`: the functional form has the gradient of the whole batch, or raises."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from gradcache_models import Clip, assert_all_same, batch, good_loss, gradients_of_kept, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def functional_body(counts, small):
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = Partition(counts).rows(rank)
    x, y = batch(sum(counts))
    plain, loss_fn = mlp(0, nn.Dropout(0.3)), Clip()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    reduced = counting(model) if dist.is_initialized() else [0]
    part = wb.gradcache.cached(lambda model, *, x: model(x))
    loss = wb.gradcache.cat_input_tensor(loss_fn)

    torch.manual_seed(rank)
    found, closures = ([], []), []
    for tower, z in enumerate((x[rows], y[rows])):
        for rows_of_part in z.split(small):
            r, again = part(model, x=rows_of_part)
            found[tower].append(r)
            closures.append((again, r))
    value = loss(found[0], y=found[1])
    value.backward()
    torch.rand(3)
    for again, r in closures:
        again(r)

    # The same masks on one process: each rank's, in the order in which the rank drew them.
    towers = [[], []]
    for other, count in enumerate(counts):
        torch.manual_seed(other)
        at = Partition(counts).rows(other)
        for tower, z in enumerate((x[at], y[at])):
            towers[tower] += [alone(part_of) for part_of in (z.split(small) if count else [])]
    true = single(*(torch.cat(parts) for parts in towers), group=wb.comm.LocalCommunicator())
    true.backward()
    assert_same(value.detach(), true.detach(), relative=1e-12)
    assert_all_same(gradients_of_kept(plain), gradients_of_kept(alone))
    assert_same(loss_fn.log_scale.grad, single.log_scale.grad, relative=1e-10)
    assert reduced == [0]


def test_the_functional_form():
    functional_body((7,), 3)


def unused_call_body():
    """Run the second pass of one of two calls only: it synchronizes nevertheless."""
    rank = dist.get_rank()
    model = DistributedDataParallel(mlp(0))
    encode = wb.gradcache.cached(lambda model, x: model(x))
    (x, y), alone = batch(4), mlp(0)
    alone(x).square().sum().div(2).backward()
    constant, never = encode(model, y[:2])
    r, again = encode(model, x[2 * rank : 2 * rank + 2])
    (r.square().sum() + 0 * constant.detach().sum()).backward()
    again(r)
    assert_all_same(gradients_of_kept(model), gradients_of_kept(alone))
    return never is not None


def test_a_call_without_a_second_pass_does_not_stop_the_other():
    run_ranks(unused_call_body, 2, timeout_s=60)


@pytest.mark.parametrize("counts", [(4, 4), (6, 3)], ids=str)
def test_the_functional_form_under_ddp(counts):
    run_ranks(functional_body, 2, counts, 2, timeout_s=60)


def gathered_body(counts):
    """Use GradCache's original recipe: every rank computes W times the loss of all rows, and DDP averages."""
    rows, world = Partition(counts).rows(dist.get_rank()), dist.get_world_size()
    x, y = batch(sum(counts))
    plain = mlp(0)
    alone = copy.deepcopy(plain)
    wb.reference.info_nce_loss(alone(x), alone(y), logit_scale=0.5).backward()
    model = DistributedDataParallel(plain)

    @wb.gradcache.cat_input_tensor
    @wb.gradcache.gather_input_tensor
    def loss_fn(a, b):
        return wb.reference.info_nce_loss(a, b, logit_scale=0.5) * world

    encode = wb.gradcache.cached(lambda model, x: model(x))
    calls = [[encode(model, part) for part in z[rows].split(2)] for z in (x, y)]
    loss_fn([r for r, _ in calls[0]], b=[r for r, _ in calls[1]]).backward()
    for tower in calls:
        for r, again in tower:
            again([r])
    assert_all_same(gradients_of_kept(plain), gradients_of_kept(alone))


def test_the_recipe_of_the_original_works_on_several_processes():
    run_ranks(gathered_body, 2, (4, 3), timeout_s=60)


def wrong_call_body():
    x, _ = batch(4)
    loss = wb.gradcache.gather_input_tensor(lambda a, b: (a * b).sum())
    wrong = {"c": x} if dist.get_rank() == 1 else {}
    with pytest.raises((TypeError, ValueError), match=r"rank 1: .*unexpected keyword argument 'c'"):
        loss(x, b=x, **wrong)


def test_a_wrong_call_of_one_rank_raises_on_all():
    run_ranks(wrong_call_body, 2, timeout_s=60)


def test_autocast_in_the_functional_form_is_that_of_the_first_call():
    model, (x, _) = mlp(0).float(), [z.float() for z in batch(4)]
    encode, dtypes = wb.gradcache.cached(lambda model, x: model(x)), []
    model.register_forward_hook(lambda _m, _a, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        r, again = encode(model, x)
    r.square().sum().backward()
    again(r)
    assert dtypes == [torch.bfloat16] * 2
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_calls_of_the_functional_form_are_refused(monkeypatch):
    model, (x, _) = mlp(0), batch(4)
    encode = wb.gradcache.cached(lambda model, x: model(x))
    r, again = encode(model, x)
    with pytest.raises(ValueError, match="has no gradient: call the loss's backward first"):
        again(r)
    with pytest.raises(ValueError, match="gave 1 representations, got back 2"):
        again(r, r)
    r.sum().backward()
    other = torch.zeros_like(r)
    other.grad = r.grad
    with pytest.raises(ValueError, match="is not the one that came with this call"):
        again(other)
    again(r)
    with pytest.raises(ValueError, match="has had its second pass already, and its gradient is counted"):
        again(r)
    with pytest.raises(ValueError, match="must return a tensor, or a tuple of tensors, got dict"):
        wb.gradcache.cached(lambda: {"x": x})()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a launcher has started 2 processes"):
        wb.gradcache.gather_input_tensor(good_loss)(x, x)

"""Gradients that are reduced by hand, sharded or on one rank do not raise: only an unreduced gradient is an error."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from gradcache_towers import OUT, D, OfSubclass, Towers, batch, local_rows, loss_fn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch._base.sharded import is_sharded, mark_sharded
from wholebatch.gradcache.engines.lost_gradients import live_engines
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def reduced_by_hand(net):
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def train(net, step, local, *, by_hand=False, steps=4):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        step(*local)
        if by_hand:
            reduced_by_hand(net)
        optimizer.step()
        optimizer.zero_grad()


class Experts(nn.Module):
    """An expert that differs between ranks, beside a layer that all ranks share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(D, OUT).double()
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(OUT, OUT).double()

    def forward(self, z):
        return self.expert(self.common(z))


def no_alarm_body(counts):
    local = local_rows(counts)

    net = Towers()
    ddp = DistributedDataParallel(net)
    train(net, wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 2, loss_fn), local)

    net = Towers()
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), local, by_hand=True)
    net.text.requires_grad_(False)  # frozen, and different on each rank
    with torch.no_grad():
        net.text[0].weight += dist.get_rank()

    def half_frozen(a, b):
        return loss_fn(a, b)

    constant = net.text(local[1]).detach()
    one = wb.GradCache([net.image], 2, lambda a: half_frozen(a, constant))
    train(net, lambda x, _y: one(x), local, by_hand=True)

    shared = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, OUT)).double()  # with buffers that differ
    with torch.no_grad():
        for p in shared.parameters():
            dist.broadcast(p, 0)
    shared[1].eval()
    shared[1].running_mean += dist.get_rank()
    train(shared, wb.GradCache([shared, shared], 2, loss_fn), local, by_hand=True)

    plain = Towers()
    for tower in (plain.image, plain.text):
        fully_shard(tower)
    train(plain, wb.GradCache([plain.image, plain.text], 2, loss_fn), local)
    train(plain, wb.GradCache([plain.image, lambda b: 1 * plain.text(b)], 2, loss_fn), local)

    # An engine that held the module and has been freed.
    net = Towers()
    DistributedDataParallel(net)
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), local, by_hand=True)

    # An engine whose user reduces by hand and declares it, and parameters that are local to each rank.
    net = Towers()
    ddp = DistributedDataParallel(net)
    step = wb.GradCache([ddp.module.image, ddp.module.text], 2, loss_fn, unchecked=net.parameters())
    train(net, step, local, by_hand=True)
    model = Experts()
    differ = r"different values of 'expert.weight' of model 0 \(Experts\).*go into unchecked="
    with pytest.raises(ValueError, match=differ):
        wb.GradCache([model, model], 2, loss_fn)(*local)
    model.zero_grad()
    train(
        model.common,
        wb.GradCache([model, model], 2, loss_fn, unchecked=model.expert.parameters()),
        local,
        by_hand=True,
    )
    model.expert.weight.allreduce = model.expert.bias.allreduce = False  # as DeepSpeed marks its experts
    train(model.common, wb.GradCache([model, model], 2, loss_fn), local, by_hand=True)

    # Functions that call other modules on other ranks, of the same shapes.
    rank, towers = dist.get_rank(), [Towers(seed).image for seed in range(dist.get_world_size())]
    step = wb.GradCache([lambda a: 1 * towers[rank](a), lambda b: 2 * towers[rank](b)], 2, loss_fn)
    train(nn.ModuleList(towers), step, local, by_hand=False)
    return True


@pytest.mark.parametrize("counts", [(4, 4), (6, 1, 3)], ids=str)
def test_no_false_alarm(counts):
    assert all(run_ranks(no_alarm_body, len(counts), counts, timeout_s=120))


def head_body(counts):
    """Train a head whose classes are distributed over the ranks, with a backbone that is replicated."""
    (x, _), labels = local_rows(counts), torch.arange(sum(counts))[Partition(counts).rows(dist.get_rank())]
    for rate in (1.0, 0.5):
        net = Towers()
        ddp = DistributedDataParallel(net.image)
        head = copy.deepcopy(wb.PartialFC(OUT, 12, sample_rate=rate, dtype=torch.float64))
        step = wb.GradCache([ddp], 2, lambda a, labels, head=head: head(a, labels))
        optimizers = [torch.optim.SGD(net.image.parameters(), lr=0.1), wb.SparseSGD(head.parameters(), lr=0.1)]
        for _ in range(4):
            step(x, labels=labels)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    # The functional loss with a parameter of the caller as centers.
    torch.manual_seed(dist.get_rank())
    centers = nn.Parameter(torch.randn(3, OUT))
    step = wb.GradCache(
        [ddp], 2, lambda a, labels: wb.functional.partial_fc_loss(a, labels % 3, centers.double(), num_classes=None)
    )
    step(x, labels=labels)
    assert is_sharded(centers)

    # Clipped by each rank's local norm, as frameworks do: the copies of the backbone differ after one step.
    net = Towers()
    ddp, head = DistributedDataParallel(net.image), wb.PartialFC(OUT, 12, dtype=torch.float64)
    step = wb.GradCache([ddp], 2, head)
    both = [*net.image.parameters(), *head.parameters()]
    step(x, labels=labels)
    torch.nn.utils.clip_grad_norm_(both, 0.1)
    torch.optim.SGD(both, lr=0.1).step()
    with pytest.raises(ValueError, match="or not alike"):
        step(x, labels=labels)


@pytest.mark.parametrize("counts", [(4, 4), (5, 0, 3)], ids=str)
def test_a_sharded_head_raises_no_false_alarm(counts):
    run_ranks(head_body, len(counts), counts, timeout_s=90)


def test_on_one_rank_nothing_is_compared(monkeypatch):
    monkeypatch.setattr("wholebatch.gradcache.same_parameters.checksums", None)
    net = Towers()
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), batch(6))
    assert run_ranks(one_rank_body, 1) == [True]


def one_rank_body():
    ddp = DistributedDataParallel(Towers())
    train(ddp, wb.GradCache([ddp.module.image, ddp.module.text], 2, loss_fn), batch(6))
    return True


def test_the_garbage_collector_lists_live_engines():
    """`live_engines` relies on this in every release of Python and torch."""
    assert run_ranks(live_body, 2) == [[1, 2, 0]] * 2


def live_body():
    found = []
    one = DistributedDataParallel(Towers())
    found.append(len([*live_engines()]))
    other = OfSubclass(Towers())
    found.append(len([*live_engines()]))
    assert {id(x) for x in live_engines()} == {id(one), id(other)}
    gc.freeze()  # before forks, as users do
    assert {id(x) for x in live_engines()} == {id(one), id(other)}
    assert gc.get_freeze_count() > 0
    third = DistributedDataParallel(Towers())
    assert {id(x) for x in live_engines()} == {id(one), id(other), id(third)}
    gc.unfreeze()
    del one, other, third
    gc.collect()
    return [*found, len([*live_engines()])]


@pytest.mark.parametrize("unchecked", [nn.Linear(2, 2), torch.zeros(2), 3, ["weight"], None])
def test_unchecked_accepts_parameters_only(unchecked):
    with pytest.raises(ValueError, match="unchecked must be a list of parameters"):
        wb.GradCache([nn.Linear(2, 2)], 2, loss_fn, unchecked=unchecked)


def test_a_mark_reaches_the_parameter_behind_a_product():
    net = nn.Linear(2, 2)
    mark_sharded(net.weight.float() * 2, None)
    assert is_sharded(net.weight)
    assert not is_sharded(net.bias)

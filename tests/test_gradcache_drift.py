"""Replicas that drift apart for any reason: their checksums differ, and the next step raises on every rank."""

import pytest
import torch
import torch.distributed as dist
from gradcache_towers import OUT, Towers, local_rows, loss_fn, without_checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch._base.checksum import _weights
from wholebatch.auditing.causes import NOT_REDUCED
from wholebatch.gradcache.same_parameters import History, checksums
from wholebatch.testing import run_ranks

APART = "an optimizer step has driven them apart"


def drift_body(counts, what):
    """Step without an engine: an error before the second step names the first parameter that differs."""
    local, net = local_rows(counts), Towers()
    scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    models = [net.image, net.text] if what == "modules" else [lambda a: net(x=a)[0], lambda b: net(y=b)[1]]
    head = nn.Linear(OUT, OUT).double()
    torch.nn.init.eye_(head.weight)

    def with_parameters(a, b):
        return loss_fn(head(a), b) * scale.exp()

    trained = [*net.parameters()]
    if what == "of the loss":
        for p in net.parameters():
            p.requires_grad_(False)
        net.image[2].weight.requires_grad_(True)
        net.text[2].weight.requires_grad_(True)
        trained = [*head.parameters(), scale]
    step = wb.GradCache(models, 2, with_parameters if what == "of the loss" else loss_fn)
    step(*local)
    torch.optim.SGD(trained, lr=0.1).step()
    before = [None if p.grad is None else p.grad.clone() for p in (*net.parameters(), *head.parameters())]
    with pytest.raises(ValueError, match=APART) as error:
        step(*local)
    for p, grad in zip((*net.parameters(), *head.parameters()), before, strict=True):
        assert p.grad is None if grad is None else torch.equal(p.grad, grad), "gradients are unchanged"
    return str(error.value)


@pytest.mark.parametrize("counts", [(4, 4), (5, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("modules", r"'0.weight' of model 0 (Sequential) (8, 5)"),
        ("functions", r"'image.0.weight' of model 0 (function) (8, 5)"),
        ("of the loss", r"'weight' of loss_fn (4, 4)"),
    ],
)
def test_parameters_that_drift_apart(counts, what, name):
    messages = run_ranks(drift_body, len(counts), counts, what, timeout_s=60)
    assert len(set(messages)) == 1, "the same on all ranks"
    assert name in messages[0]
    assert NOT_REDUCED.title in messages[0]
    assert "agree_on_overflow" in messages[0]


def changed_body(change, steps):
    """Change one rank's parameter after some steps: the next step that compares raises."""
    local, net = local_rows((4, 4)), Towers()
    ddp = DistributedDataParallel(net)
    step = wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 4, loss_fn)
    for _ in range(steps):
        step(*local)
    with torch.no_grad():
        if dist.get_rank() == 1:
            CHANGES[change](net.text[2].weight)
    message = APART if steps else "they differ before the first step of this GradCache. Make models from the same seed"

    def go_on():
        for _ in range(steps, 100):
            step(*local)

    with pytest.raises(ValueError, match=message) as error:
        go_on()
    assert "'module.text.2.weight' of model 0 (function)" in str(error.value)


def flip_a_bit(p):
    p.view(torch.int64)[0, 0] ^= 1


CHANGES = {
    "a bit": flip_a_bit,
    "a sign": lambda p: p[3, 7].neg_(),
    "all signs": lambda p: p.neg_(),
    "two entries": lambda p: p[0, :2].copy_(p[0, :2].flip(0)),
}


@pytest.mark.planted
@pytest.mark.parametrize(
    ("change", "steps"), [*((change, 2) for change in CHANGES), ("a bit", 0), ("a bit", 1), ("a bit", 97)]
)
def test_any_change_is_noticed(change, steps):
    run_ranks(changed_body, 2, change, steps, timeout_s=90)


def compared(micro_steps, steps=301):
    """Return the steps that compare, if the parameters change after so many."""
    history, found = History(), []
    for n in range(steps):
        if history.due():
            history.compared({"p": n // micro_steps})
            found.append(n + 1)
        history.steps += 1
    return found


def test_three_states_of_the_parameters_and_every_hundredth_step_are_compared():
    assert compared(1) == [1, 2, 3, 100, 200, 300]
    assert compared(4) == [*range(1, 10), 100, 200, 300]
    assert compared(500) == [*range(1, 101), 200, 300], "parameters that stay the same are not compared forever"


def accumulated_body():
    local, net = local_rows((4, 4)), Towers()
    step, optimizer = wb.GradCache([net.image, net.text], 2, loss_fn, deferred=True), torch.optim.SGD(net.parameters())
    for _ in range(8):
        (step(*local) / 8).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=APART):
        step(*local).backward()


def test_micro_steps_do_not_use_up_the_comparisons():
    """After one optimizer step of eight micro-steps, ranks that have not reduced gradients are found apart."""
    run_ranks(accumulated_body, 2, timeout_s=90)


@pytest.mark.planted
def test_without_the_comparison_ranks_drift_apart_silently():
    """With the comparison switched off, ranks drift apart silently."""
    assert run_ranks(silent_drift_body, 2, timeout_s=60) == [True, True]


def silent_drift_body():
    local, net = local_rows((4, 4)), Towers()
    step, optimizer = wb.GradCache([net.image, net.text], 2, loss_fn), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_checks(monkeypatch)
        for _ in range(3):
            step(*local)
            optimizer.step()
    of_all_ranks = [None, None]
    dist.all_gather_object(of_all_ranks, net.image[0].weight.detach())
    return not torch.equal(*of_all_ranks)


def test_checksums_depend_on_every_bit():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.randn(7, 3, generator=generator).to(dtype)
        local = checksums({"x": x})["x"]
        assert checksums({"x": x.clone()})["x"] == local
        raw = x.clone().view(-1).view(torch.uint8)
        seen = {local}
        for at in range(len(raw)):
            for bit in range(8):
                raw[at] ^= 1 << bit
                seen.add(checksums({"x": raw.view(dtype).view(7, 3)})["x"])
                raw[at] ^= 1 << bit
        assert len(seen) == 1 + 8 * len(raw)


def test_checksums_do_not_depend_on_the_default_device():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    local = checksums({"x": x})
    _weights.cache_clear()
    with torch.device("meta"):
        assert checksums({"x": x}) == local


def test_checksums_depend_on_order_in_large_tensors():
    """Checksums depend on the order of numbers whose bits end with many zeros, and of numbers beyond a block."""
    x = torch.ones(3 * 2**18 + 5, dtype=torch.float64)
    seen = set()
    for at in (None, 0, 1, 2, 2048, 2**17, 2**18, 2**18 + 1, 3 * 2**18 + 4):
        moved = x.clone()
        if at is not None:
            moved[at] = 2.0
        seen.add(checksums({"x": moved})["x"])
    assert len(seen) == 9
    rows = torch.arange(2**19, dtype=torch.float32)
    assert checksums({"x": rows})["x"] != checksums({"x": rows.view(2, -1).flip(0).reshape(-1)})["x"]
    assert checksums({"x": rows.view(2, -1)}) == checksums({"x": rows.view(2, -1).t().contiguous().t()})
    assert checksums({"none": torch.zeros(0), "nan": torch.tensor(float("nan"))}) == checksums(
        {"none": torch.zeros(0), "nan": torch.tensor(float("nan"))}
    )

"""lightly's losses in a loop under DDP and in Lightning on two processes: 20 steps give the weights of one process.

    make vision

One process trains with lightly's loss on the whole batch, in float64, which is the truth. The distance between two runs
is relative to the distance that training has moved the weights.
"""

import inspect
from importlib.util import find_spec

import pytest

if find_spec("lightly") is None:
    pytest.skip("lightly is not installed: `make vision`", allow_module_level=True)

import torch
from dual import distance
from lightly_runs import BANK, CASES, WIDTH, in_a_loop, in_lightning, loss_of, on_two, run_cases

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.auditing import presets

declare_torchvision_operators()
from lightly import loss as theirs  # noqa: E402

from wholebatch.integrations import lightly as ours  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # lightly and Lightning warn

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order
GATHERING = {name: case for name, case in CASES.items() if name != "KoLeoLoss"}
IN_LIGHTNING = {name: CASES[name] for name in ("NTXentLoss", "NTXentLoss, memory bank", "BarlowTwinsLoss")}
EXACT_IN_THEIRS = ("NTXentLoss", "DCLLoss", "VICRegLoss")  # with gather_distributed=True and equally many rows


@pytest.fixture(scope="module")
def true():
    """The truth: their loss in one process."""
    return run_cases(in_a_loop, "theirs", CASES, 1)


@pytest.fixture(scope="module")
def found():
    """All runs on two processes, by the kind of loop and of loss."""
    jobs = [
        (in_a_loop, "ours", CASES),
        (in_a_loop, "theirs", CASES),
        (in_a_loop, "gathered", GATHERING),
        (in_a_loop, "local", {name: case for name, case in GATHERING.items() if "bank" not in name}),
        (in_lightning, "ours", IN_LIGHTNING),
        (in_lightning, "theirs", IN_LIGHTNING),
    ]
    return on_two(jobs)


def assert_trained_alike(runs, true):
    for run in runs:
        assert not isinstance(run, str), run
        assert (true.weights - true.start).norm() > 0.01 * true.start.norm(), "nothing was trained"
        assert distance(run, true) < ROUNDING
        assert torch.equal(run.weights, runs[0].weights)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(found, true, name):
    runs = [of_rank["in_a_loop", "ours"][name] for of_rank in found]
    assert_trained_alike(runs, true[name])
    assert runs[0].losses == runs[1].losses == pytest.approx(true[name].losses, rel=1e-10)


@pytest.mark.parametrize("name", IN_LIGHTNING)
def test_two_processes_in_lightning_end_with_the_weights_of_one(found, true, name):
    assert_trained_alike([of_rank["in_lightning", "ours"][name] for of_rank in found], true[name])
    assert distance(found[0]["in_lightning", "theirs"][name], true[name]) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_their_default_ends_elsewhere(found, true, name):
    assert distance(found[0]["in_a_loop", "theirs"][name], true[name]) > 0.1


@pytest.mark.parametrize("name", GATHERING)
def test_their_gathering_is_exact_for_some_losses(found, true, name):
    off = distance(found[0]["in_a_loop", "gathered"][name], true[name])
    if name.partition(",")[0] in EXACT_IN_THEIRS:  # the banks of this test start from one seed
        assert off < ROUNDING
    else:
        assert off > 0.05


@pytest.mark.parametrize("name", [name for name in GATHERING if "bank" not in name])
def test_without_gathering_the_loss_is_theirs(found, name):
    assert distance(found[0]["in_a_loop", "local"][name], found[0]["in_a_loop", "theirs"][name]) < ROUNDING


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("NTXentLoss, default", False),
        ("NTXentLoss, gather_distributed=True", True),
        ("BarlowTwinsLoss, gather_distributed=True", False),
        ("NTXentLoss of wholebatch.integrations", True),
        ("DCLWLoss of wholebatch.integrations", True),
        ("BarlowTwinsLoss of wholebatch.integrations", True),
    ],
)
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("lightly")[name], ranks=(1, 2))
    assert report.exact is exact, report


# One call: value and gradient, with uneven rows.

COUNTS = (7, 5)


def views():
    return torch.randn(2, sum(COUNTS), WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(loss_fn, x0, x1):
    x0, x1 = x0.clone().requires_grad_(), x1.clone().requires_grad_()
    loss = loss_fn(x0, x1)
    loss.backward()
    return loss.detach(), torch.stack([x0.grad, x1.grad])


def on_a_rank(seed):
    rank = torch.distributed.get_rank()
    found = {}
    for name, case in GATHERING.items():
        loss = loss_of("ours", case)
        if "bank" in name and rank:  # another bank to begin with: rank 0's is taken
            loss.memory_bank.bank = torch.nn.functional.normalize(loss.memory_bank.bank + seed, dim=-1)
        found[name] = [gradients(loss, *(x.split(COUNTS)[rank] for x in views())) for _ in range(6)]
    return found


def test_uneven_rows_have_the_gradient_of_one_process():
    """Six calls fill the bank and write over its first rows."""
    found = run_ranks(on_a_rank, 2, 1.0, timeout_s=120)
    for name, case in GATHERING.items():
        one, loss = loss_of("ours", case), loss_of("theirs", case)
        for call in range(6):
            value, gradient = gradients(loss, *views())
            alone = gradients(one, *views())
            assert alone[0].item() == pytest.approx(value.item(), rel=1e-12)
            assert (alone[1] - gradient).norm() <= 1e-12 * gradient.norm()
            assert [of_rank[name][call][0].item() for of_rank in found] == pytest.approx([value.item()] * 2, rel=1e-12)
            both = torch.cat([of_rank[name][call][1] for of_rank in found], dim=1) / 2
            assert (both - gradient).norm() <= 1e-12 * gradient.norm()


def test_a_bank_is_not_changed_without_gradient():
    loss = ours.NTXentLoss(memory_bank_size=(BANK, WIDTH))
    before = loss.memory_bank.bank.clone()
    loss(*views().float())
    assert torch.equal(loss.memory_bank.bank, before)
    loss(*views().float().requires_grad_())
    assert not torch.equal(loss.memory_bank.bank, before)
    assert "memory_bank.bank" not in loss.state_dict()


# Signatures.


@pytest.mark.parametrize("name", ours.__all__)
def test_arguments_are_theirs_in_their_order(name):
    def parameters(function):
        return [p for p in inspect.signature(function).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]

    constructor, call = (parameters(f) for f in (getattr(theirs, name), getattr(theirs, name).forward))
    found = parameters(getattr(ours, name))
    assert [p.name for p in found] == [p.name for p in constructor]
    differ = [p.name for p, other in zip(found, constructor, strict=True) if p.default != other.default]
    assert differ == ["gather_distributed"]
    assert [p.name for p in parameters(getattr(ours, name).forward)] == [p.name for p in call]

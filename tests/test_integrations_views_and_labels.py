"""Losses with pytorch-metric-learning's signatures and with lightly's, without either: dense formulas on several ranks.

`make ecosystem` runs them inside pytorch-metric-learning's trainer, and in loops with lightly.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations import lightly
from wholebatch.integrations import pytorch_metric_learning as pml
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import run_ranks

COUNTS = {2: (7, 5), 3: (5, 0, 7)}
WIDTH, BANK = 4, 15
FRAMEWORKS = ["lightly", "pytorch_metric_learning", "pytorch_lightning", "torchvision"]


def test_importing_the_adapters_imports_no_framework():
    program = (
        "import sys; import wholebatch.integrations.lightly, wholebatch.integrations.pytorch_metric_learning; "
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


def rows(seed=0):
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bank():
    return F.normalize(torch.randn(BANK, WIDTH, generator=torch.Generator().manual_seed(9)), dim=-1)


LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 5, 6])  # at most two of each; pairs are on different ranks


def dense_nt_xent(x, temperature):
    """The mean over positive pairs of the cross-entropy of the positive among itself and the negatives."""
    s = F.normalize(x, dim=1) @ F.normalize(x, dim=1).T / temperature
    losses = []
    for i, label in enumerate(LABELS):
        for j, other in enumerate(LABELS):
            if i != j and label == other:
                negatives = s[i, label != LABELS]
                losses.append(torch.cat([s[i, j][None], negatives]).logsumexp(0) - s[i, j])
    return torch.stack(losses).mean()


def dense_views(x, y, temperature, with_positive=True):
    z = F.normalize(torch.cat([x, y]), dim=1)
    s, b = z @ z.T / temperature, len(x)
    eye = torch.eye(2 * b, dtype=torch.bool)
    positive = s[eye.roll(b, 1)]
    excluded = eye if with_positive else eye | eye.roll(b, 1)
    return (s.masked_fill(excluded, -torch.inf).logsumexp(1) - positive).mean()


def dense_bank(x, y):
    q, k = F.normalize(x, dim=1), F.normalize(y, dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ bank().double().T], dim=1) / 0.5
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def with_bank():
    loss = lightly.NTXentLoss(0.5, (BANK, WIDTH))
    loss.memory_bank.bank = bank() if not dist.is_initialized() or dist.get_rank() == 0 else -bank()
    return loss


def ours_labeled(loss):
    """Return a loss of this rank's labels."""

    def call(x, _y):
        counts = COUNTS[dist.get_world_size()] if dist.is_initialized() else (12,)
        return loss(x, LABELS.split(counts)[dist.get_rank() if dist.is_initialized() else 0])

    return call


CASES = {
    "NTXentLoss": (lambda x, y: dense_nt_xent(x, 0.07), lambda: ours_labeled(pml.NTXentLoss())),
    "SupConLoss": (
        lambda x, y: wb.reference.sup_con_loss(x, LABELS, temperature=0.1),
        lambda: ours_labeled(pml.SupConLoss()),
    ),
    "MultiSimilarityLoss": (
        lambda x, y: wb.reference.multi_similarity_loss(x, LABELS, alpha=3.0),
        lambda: ours_labeled(pml.MultiSimilarityLoss(3)),
    ),
    "CircleLoss": (lambda x, y: wb.reference.circle_loss(x, LABELS, m=0.3), lambda: ours_labeled(pml.CircleLoss(0.3))),
    "views": (lambda x, y: dense_views(x, y, 0.07), lambda: pml.SelfSupervisedLoss(pml.NTXentLoss())),
    "lightly's NTXentLoss": (lambda x, y: dense_views(x, y, 0.5), lightly.NTXentLoss),
    "lightly's memory bank": (dense_bank, with_bank),
    "DCLLoss": (lambda x, y: dense_views(x, y, 0.1, with_positive=False), lightly.DCLLoss),
    "DCLWLoss": (
        lambda x, y: wb.reference.dcl_loss(x, y, temperature=0.1, sigma=0.5),
        lightly.DCLWLoss,
    ),
    "BarlowTwinsLoss": (
        lambda x, y: wb.reference.barlow_twins_loss(x, y, redundancy=5e-3),
        lightly.BarlowTwinsLoss,
    ),
    "VICRegLoss": (wb.reference.vicreg_loss, lightly.VICRegLoss),
}


def gradients(loss, x, y):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    value = loss(x, y)
    value.backward()
    return value.detach(), *(torch.zeros_like(z) if z.grad is None else z.grad for z in (x, y))


def on_a_rank():
    counts, rank = COUNTS[dist.get_world_size()], dist.get_rank()
    mine = [rows(seed).split(counts)[rank] for seed in (0, 1)]
    return {name: gradients(build(), *mine) for name, (_, build) in CASES.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_losses_are_those_of_the_whole_batch(world):
    """Rows hold W times their gradient, for the averaging of the engine."""
    found = run_ranks(on_a_rank, world, timeout_s=120)
    for name, (dense, build) in CASES.items():
        value, *true = gradients(dense, rows(), rows(1))
        for one in (*(of_rank[name][0] for of_rank in found), gradients(build(), rows(), rows(1))[0]):
            assert one.item() == pytest.approx(value.item(), rel=1e-12), name
        for position, gradient in enumerate(true, 1):
            ours = torch.cat([of_rank[name][position] for of_rank in found]) / world
            assert (ours - gradient).norm() <= 1e-11 * max(gradient.norm(), 1), name


def bank_on_a_rank():
    loss, counts = with_bank(), COUNTS[dist.get_world_size()]
    for seed in (1, 2):
        mine = [rows(s).split(counts)[dist.get_rank()].clone().requires_grad_() for s in (0, seed)]
        loss(*mine).backward()
    return loss.memory_bank.bank


def test_a_bank_holds_the_rows_of_all_ranks():
    """The second batch of 12 rows fills the last 3 of 15, and its other rows are dropped, as in lightly."""
    expected = torch.cat([F.normalize(rows(1), dim=1), F.normalize(rows(2), dim=1)[:3]]).float()
    for found in run_ranks(bank_on_a_rank, 3, timeout_s=60):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lightly.NTXentLoss(0.0), "temperature must be a positive number"),
        (lambda: lightly.NTXentLoss(0.5, 100), r"memory_bank_size must be \(rows, embedding size\), or 0 .*, got 100"),
        (lambda: lightly.NTXentLoss(0.5, (1, 2, 3)), r"memory_bank_size must be .*, got \(1, 2, 3\)"),
        (lambda: lightly.NTXentLoss(gather_distributed=1), "gather_distributed must be True or False, got 1"),
        (
            lambda: lightly.VICRegLoss(gather_distributed=False, group=wb.comm.LocalCommunicator()),
            "gather_distributed=False compares the rows of one process, so it does not go with group=",
        ),
        (
            lambda: lightly.DCLLoss(weight_fn=dense_views),
            r"weight_fn must be None, got 'dense_views': .* DCLWLoss\(",
        ),
        (lambda: lightly.DCLWLoss(sigma=-1.0), "sigma must be a positive number"),
        (lambda: pml.CircleLoss(collect_stats=True), "collect_stats must be False, got True"),
        (
            lambda: pml.SelfSupervisedLoss(pml.SupConLoss(), group=wb.comm.LocalCommunicator()),
            "group must be None with a loss of this module",
        ),
        (lambda: pml.SupConLoss()(rows()), "labels must be given, one integer for each row of embeddings, got None"),
        (
            lambda: pml.SupConLoss()(rows(), LABELS.double()),
            r"labels must be integers of shape \(rows,\), got torch.float64",
        ),
        (
            lambda: pml.SelfSupervisedLoss(pml.SupConLoss())(rows(), rows()[:5]),
            "ref_emb must have a row for each of the 12 rows of embeddings, got 5",
        ),
    ],
)
def test_mistakes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_no_bank_and_no_gathering():
    for none in (0, (0,), [0], (0, WIDTH)):
        assert lightly.NTXentLoss(memory_bank_size=none).memory_bank is None
    local = lightly.NTXentLoss(gather_distributed=False)
    assert local(rows(), rows(1)).item() == pytest.approx(dense_views(rows(), rows(1), 0.5).item(), rel=1e-12)


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    several = torch.zeros(12, dtype=torch.int64)
    text = r"tested with pytorch_metric_learning 2\.9\.0: pip install 'pytorch-metric-learning>=2\.9'"
    for call in (
        lambda: pml.DistributedLossWrapper(torch.nn.Identity()),
        lambda: pml.NTXentLoss()(rows(), several),
        lambda: pml.SupConLoss(reducer=object())(rows(), several),
    ):
        with pytest.raises(FrameworkError, match=text):
            call()
    wrapper = pml.DistributedLossWrapper(pml.SupConLoss())  # needs nothing of theirs
    assert wrapper(rows(), LABELS).item() > 0

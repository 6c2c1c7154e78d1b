"""Runs with lightly's projection head and losses, in a plain loop under DDP or in Lightning, in one process or on two.

The rows of a step are the same on one process and on two: rank r has every second row. Weights and losses are float64.
"""

import logging
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from dual import Run, as_launched, free_port, weights
from torch import nn

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.testing import run_ranks

ROWS, STEPS, WIDTH, BANK = 16, 20, 4, 48


@dataclass
class Case:
    """A loss by its name and arguments, and the learning rate."""

    loss: str
    settings: dict = field(default_factory=dict)
    rate: float = 0.05


CASES = {
    "NTXentLoss": Case("NTXentLoss", {"temperature": 0.2}),
    "NTXentLoss, memory bank": Case("NTXentLoss", {"temperature": 0.2, "memory_bank_size": (BANK, WIDTH)}),
    "DCLLoss": Case("DCLLoss", {"temperature": 0.2}),
    "DCLWLoss": Case("DCLWLoss", {"temperature": 0.2, "sigma": 0.3}),
    "BarlowTwinsLoss": Case("BarlowTwinsLoss", {"lambda_param": 0.1}),
    "VICRegLoss": Case("VICRegLoss", rate=0.01),
    "KoLeoLoss": Case("KoLeoLoss", rate=0.01),
}


class Views(torch.utils.data.Dataset):
    """Two views of random rows."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS * STEPS, 6, generator=generator, dtype=torch.float64)
        self.views = [x + 0.5 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2)]

    def __len__(self):
        return len(self.views[0])

    def __getitem__(self, row):
        return self.views[0][row], self.views[1][row]


class BothViews(nn.Module):
    """A regularizer of both views."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, out0, out1):
        return self.loss(out0) + self.loss(out1)


def loss_of(how, case):
    """Return a loss: "ours", "theirs", "gathered" for theirs with gather_distributed=True, "local" for ours without."""
    declare_torchvision_operators()
    from lightly import loss as theirs

    from wholebatch.integrations import lightly as ours

    torch.manual_seed(2)
    if case.loss == "KoLeoLoss":
        return BothViews(wb.WholeBatch(theirs.KoLeoLoss()) if how == "ours" else theirs.KoLeoLoss())
    gather = {"gathered": {"gather_distributed": True}, "local": {"gather_distributed": False}}.get(how, {})
    module = ours if how in ("ours", "local") else theirs
    return getattr(module, case.loss)(**case.settings, **gather).double()


def network():
    declare_torchvision_operators()
    from lightly.models.modules.heads import ProjectionHead

    torch.manual_seed(0)
    return ProjectionHead([(6, 8, None, nn.Tanh()), (8, WIDTH, None, None)]).double()


def loader(ranks):
    data = Views()
    if ranks == 1:
        return torch.utils.data.DataLoader(data, ROWS)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return torch.utils.data.DataLoader(data, ROWS // ranks, sampler=sampler)


def in_a_loop(how, case, ranks):
    """Train in a loop, with DDP on several processes."""
    model, criterion, losses = network(), loss_of(how, case), []
    start = weights(model)
    engine = model if ranks == 1 else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    for x0, x1 in loader(ranks):
        loss = criterion(engine(x0), engine(x1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(start, weights(model), losses)


def in_lightning(how, case, ranks):
    """Train with Lightning's Trainer and its DDP strategy, as lightly's examples do."""
    import pytorch_lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    losses = []

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.head, self.criterion = network(), loss_of(how, case)

        def training_step(self, batch, _):
            loss = self.criterion(self.head(batch[0]), self.head(batch[1]))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=case.rate)

    model = Model()
    start = weights(model.head)
    pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    ).fit(model, loader(ranks))
    return Run(start, weights(model.head), losses)


def run_cases(form, how, cases, ranks):
    """Train all cases, each from the same start; the text of an error takes the place of a run."""
    runs = {}
    for name, case in cases.items():
        try:
            runs[name] = form(how, case, ranks)
        except Exception as error:  # a test asserts on it
            runs[name] = f"{type(error).__name__}: {error}"
    return runs


def _rank(port, jobs):
    as_launched(port)
    assert dist.get_world_size() == 2
    return {(form.__name__, how): run_cases(form, how, cases, 2) for form, how, cases in jobs}


def on_two(jobs):
    """Train the cases of (form, kind of loss, cases) on two processes, and return both processes' runs."""
    return run_ranks(partial(_rank, free_port(), jobs), 2, timeout_s=400)

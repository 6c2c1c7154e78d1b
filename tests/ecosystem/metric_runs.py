"""Runs of pytorch-metric-learning's own trainer with a tiny network, in one process or on two.

The rows of a step are the same on one process and on two: rank r has every second row. Weights and losses are float64.
"""

import importlib
import logging
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from dual import Run, as_launched, free_port, weights
from torch import nn

from wholebatch.testing import run_ranks

ROWS, STEPS, WIDTH, CLASSES = 16, 20, 4, 5


@dataclass
class Case:
    """A loss of theirs by its name and arguments; one of ours takes its place if `ours` is true."""

    loss: str
    settings: dict = field(default_factory=dict)
    ours: bool = False
    miner: str | None = None
    pairs: bool = False
    memory: int = 0
    more: dict = field(default_factory=dict)
    """Arguments that are objects of theirs, by the name of their class."""


PROXIES = {"num_classes": CLASSES, "embedding_size": WIDTH}
CASES = {
    "NTXentLoss, pairs": Case("NTXentLoss", {"temperature": 0.2}, ours=True, pairs=True),
    "NTXentLoss, classes": Case("NTXentLoss", {"temperature": 0.2}, ours=True),
    "SupConLoss": Case("SupConLoss", ours=True),
    "SupConLoss, MeanReducer": Case("SupConLoss", ours=True, more={"reducer": "reducers.MeanReducer"}),
    "MultiSimilarityLoss": Case("MultiSimilarityLoss", ours=True),
    "MultiSimilarityLoss, miner": Case("MultiSimilarityLoss", ours=True, miner="MultiSimilarityMiner"),
    "CircleLoss": Case("CircleLoss", {"gamma": 8.0}, ours=True),
    "TripletMarginLoss": Case("TripletMarginLoss", {"margin": 0.2}),
    "TripletMarginLoss, BatchHardMiner": Case("TripletMarginLoss", {"margin": 0.2}, miner="BatchHardMiner"),
    "ContrastiveLoss": Case("ContrastiveLoss"),
    "ContrastiveLoss, regularizer": Case(
        "ContrastiveLoss", more={"embedding_regularizer": "regularizers.LpRegularizer"}
    ),
    "ProxyAnchorLoss": Case("ProxyAnchorLoss", PROXIES),
    "ArcFaceLoss": Case("ArcFaceLoss", PROXIES | {"scale": 4}),
    "CrossBatchMemory of ContrastiveLoss": Case("ContrastiveLoss", memory=64),
}


class Rows(torch.utils.data.Dataset):
    """Random rows, with labels: two rows of each label in a batch, or few classes."""

    def __init__(self, pairs):
        generator = torch.Generator().manual_seed(1)
        count = ROWS * STEPS
        self.x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        if pairs:
            order = torch.stack([torch.randperm(ROWS, generator=generator) for _ in range(STEPS)])
            self.labels = (order // 2).flatten()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], self.labels[row]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def loss_and_miner(how, case):
    """Return the loss and the miner: "ours", "theirs" (each process alone), "wrapped" or "efficient" (in theirs)."""
    from pytorch_metric_learning import losses, miners
    from pytorch_metric_learning.utils import distributed as theirs

    from wholebatch.integrations import pytorch_metric_learning as ours

    torch.manual_seed(2)
    settings = dict(case.settings)
    for name, path in case.more.items():
        module, _, cls = path.partition(".")
        settings[name] = getattr(importlib.import_module(f"pytorch_metric_learning.{module}"), cls)()
    flat = how == "ours" and case.ours
    loss = getattr(ours if flat else losses, case.loss)(**settings)
    loss = loss.double()
    if case.memory:
        loss = losses.CrossBatchMemory(loss, WIDTH, memory_size=case.memory)
    miner = getattr(miners, case.miner)() if case.miner else None
    if how == "ours" and not flat:
        loss = ours.DistributedLossWrapper(loss)
    elif how in ("wrapped", "efficient"):
        loss = theirs.DistributedLossWrapper(loss, efficient=how == "efficient")
    if miner is not None and how != "theirs":
        module = ours if how == "ours" else theirs
        miner = module.DistributedMinerWrapper(miner, efficient=how == "efficient")
    return loss, miner


def train(how, case, ranks):
    """Train with MetricLossOnly in this process, as a rank or alone."""
    from pytorch_metric_learning.trainers import MetricLossOnly

    logging.getLogger("PML").setLevel(logging.ERROR)
    model, data = network(), Rows(case.pairs)
    loss, miner = loss_and_miner(how, case)
    proxies = list(loss.parameters())
    optimizers = {"trunk_optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}
    if proxies:
        optimizers["metric_loss_optimizer"] = torch.optim.SGD(proxies, lr=0.05)
    found = []
    if ranks == 1:
        sampler = torch.utils.data.SequentialSampler(data)
    else:
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    trained = [model, loss]

    def after_step(trainer):
        found.append(trainer.losses["metric_loss"].item())

    start = torch.cat([weights(module) for module in trained if list(module.parameters())])
    MetricLossOnly(
        models={"trunk": model if ranks == 1 else nn.parallel.DistributedDataParallel(model)},
        optimizers=optimizers,
        batch_size=ROWS // ranks,
        loss_funcs={"metric_loss": loss},
        mining_funcs={"tuple_miner": miner} if miner is not None else {},
        dataset=data,
        sampler=sampler,
        data_device=torch.device("cpu"),
        dtype=torch.float64,
        dataloader_num_workers=0,
        iterations_per_epoch=STEPS,
        end_of_iteration_hook=after_step,
    ).train()
    return Run(start, torch.cat([weights(module) for module in trained if list(module.parameters())]), found)


def run_cases(how, cases, ranks):
    """Train all cases, each from the same start; the text of an error takes the place of a run."""
    runs = {}
    for name, case in cases.items():
        try:
            runs[name] = train(how, case, ranks)
        except Exception as error:  # a test asserts on it
            runs[name] = f"{type(error).__name__}: {error}"
    return runs


def _rank(port, jobs):
    as_launched(port)
    assert dist.get_world_size() == 2
    return {how: run_cases(how, cases, 2) for how, cases in jobs.items()}


def on_two(jobs):
    """Train the cases of each kind of loss on two processes, and return both processes' runs."""
    return run_ranks(partial(_rank, free_port(), jobs), 2, timeout_s=500)

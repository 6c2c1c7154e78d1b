"""Lightning's Trainer with a head of sharded classes, on two and three processes: the weights of one process.

make ecosystem
"""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dual import as_launched, free_port
from head_runs import CLASSES, OPTIMIZERS, STEPS, Model, distance, local_batches, make_head, true_weights, whole_vector
from torch import nn

import wholebatch as wb
from wholebatch.integrations.lightning import ddp_strategy
from wholebatch.testing import run_ranks

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order


class Classifier(lightning.LightningModule):
    """The model as a LightningModule; where the head is created depends on `early`."""

    def __init__(self, optimizer="SGD", rate=1.0, early=False, automatic=True, clip=None):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = automatic
        made = Model(rate)
        self.backbone = made.backbone
        self.head = made.head if early else None

    def configure_model(self):
        if self.head is None:
            self.head = make_head(self.hparams.rate)

    def training_step(self, batch, _):
        loss = self.head(self.backbone(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, self.hparams.clip, "norm")
            optimizer.step()
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.head(self.backbone(batch[0]), batch[1]), prog_bar=False)

    def configure_optimizers(self):
        return OPTIMIZERS[self.hparams.optimizer](self.parameters())


def trainer_of(folder=None, epochs=2, strategy=None, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ddp_strategy() if strategy is None else strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **quiet,
        **{"enable_checkpointing": False, **settings},
    )


def batches(micro_steps=1):
    return torch.utils.data.DataLoader(local_batches(micro_steps), batch_size=None)


def train(early=False, optimizer="SGD", rate=1.0, micro_steps=1, clip=None, by_value=False, engine=None, manual=False):
    module = Classifier(optimizer, rate, early, not manual, clip)
    trainer = trainer_of(
        strategy=ddp_strategy(**(engine or {})),
        accumulate_grad_batches=micro_steps,
        gradient_clip_val=None if manual else clip,
        gradient_clip_algorithm="value" if by_value else None,
    )
    trainer.fit(module, batches(micro_steps))
    assert trainer.global_step == STEPS
    return whole_vector(module)


JOBS = [
    {},
    {"early": True},
    {"micro_steps": 3},
    {"clip": 0.1},
    {"clip": 0.01, "by_value": True},
    {"clip": 0.1, "micro_steps": 3, "optimizer": "AdamW"},
    {"rate": 0.4, "optimizer": "SparseSGD", "clip": 0.1},
    {"rate": 0.4, "optimizer": "SparseAdamW"},
    {"engine": {"find_unused_parameters": True}},
    {"engine": {"static_graph": True}},
    {"engine": {"gradient_as_bucket_view": True}, "micro_steps": 3},
    {"manual": True, "clip": 0.1},
]


def body(port, jobs):
    as_launched(port)
    return [train(**job) for job in jobs]


@pytest.fixture(scope="module", params=[2, 3])
def found(request):
    return [*zip(*run_ranks(partial(body, free_port(), JOBS), request.param, timeout_s=500), strict=True)]


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: str(JOBS[number]))
def test_several_processes_end_with_the_weights_of_one(found, number):
    names = ("optimizer", "rate", "micro_steps", "clip", "by_value")
    true = true_weights(**{name: value for name, value in JOBS[number].items() if name in names})
    for of_rank in found[number]:
        assert distance(of_rank, true) < ROUNDING

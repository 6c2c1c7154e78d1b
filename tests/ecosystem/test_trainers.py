"""The trainers of other libraries on two processes: 20 steps with gradient caching give the weights of 20 without.

    make ecosystem

Each body is the form that a user writes. `encode` calls the model: `plain` as it is, and `cached` by
`wb.gradcache.encode(model, batch, chunk_size)`. Reductions of gradients are counted.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist
from dual import (
    BATCH,
    MICRO_STEPS,
    STEPS,
    Dual,
    Pairs,
    as_launched,
    assert_same_training,
    cached,
    free_port,
    loss_fn,
    plain,
    reductions_counted,
    sgd,
    weights,
)

from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # these libraries warn of each other's deprecations


def trained(body, *arguments):
    return run_ranks(body, 2, free_port(), *arguments, timeout_s=240)


def loader(micro_steps=1):
    """Return this rank's batches for all steps."""
    data = Pairs(BATCH * STEPS * micro_steps * dist.get_world_size())
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return torch.utils.data.DataLoader(data, BATCH, sampler=sampler)


# Hugging Face Trainer.


def trainer_body(port, encode, micro_steps):
    from transformers import Trainer, TrainingArguments

    as_launched(port)
    reductions = reductions_counted()

    class Contrastive(Trainer):
        loss_is_scaled_for_ga = False  # the loss is a mean: divide it by the micro-steps

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_fn(encode(model, inputs))

    model = Dual()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=micro_steps,
            max_steps=STEPS,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Pairs(2 * BATCH * STEPS * micro_steps)
        Contrastive(model, arguments, train_dataset=data, optimizers=(sgd(model.parameters()), None)).train()
    return weights(model), len(reductions)


@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_trainer(micro_steps):
    true = trained(trainer_body, plain, micro_steps)
    found = trained(trainer_body, cached, micro_steps)
    assert_same_training(found, true)
    assert found[0][1] <= STEPS + 1  # DDP makes its buckets anew after its first step


# accelerate.


def accelerate_body(port, encode, micro_steps, fsdp):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    as_launched(port)
    reductions = reductions_counted()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_steps)
    if fsdp:  # accelerate takes FSDP on accelerators only: its state is set here
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator.state.distributed_type = DistributedType.FSDP
    model = Dual()
    model, optimizer, batches = accelerator.prepare(model, sgd(model.parameters()), _alone(micro_steps))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(encode(model, batch)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), len(reductions)


def _alone(micro_steps):
    """Return the loader of one process, which accelerate shards."""
    return torch.utils.data.DataLoader(Pairs(2 * BATCH * STEPS * micro_steps), BATCH)


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_accelerate(micro_steps, fsdp):
    true = trained(accelerate_body, plain, micro_steps, fsdp)
    assert_same_training(trained(accelerate_body, cached, micro_steps, fsdp), true)


# Lightning.


def lightning_body(port, encode, micro_steps, automatic, strategy):
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    as_launched(port)
    reductions = reductions_counted()

    class FSDPOnCPU(FSDPStrategy):
        """Lightning refuses FSDPStrategy itself on CPUs."""

    class Contrastive(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic
            self.net = Dual()

        def configure_model(self):
            if strategy == "model_parallel" and not hasattr(type(self.net), "set_requires_gradient_sync"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def forward(self, x, y):
            return self.net(x, y)

        def training_step(self, batch, _):
            if automatic:
                return loss_fn(encode(self.net, batch))
            loss = loss_fn(encode(self.trainer.strategy.model if strategy == "ddp" else self.net, batch))
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self):
            return sgd(self.parameters())

        def train_dataloader(self):
            return loader(micro_steps)

    strategies = {"ddp": "ddp", "fsdp": FSDPOnCPU(), "model_parallel": ModelParallelStrategy()}
    module = Contrastive()
    lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategies[strategy],
        max_steps=STEPS,
        accumulate_grad_batches=micro_steps,
        gradient_clip_val=1.0 if automatic and strategy == "ddp" else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    ).fit(module)
    return weights(module), len(reductions)


@pytest.mark.parametrize(
    ("micro_steps", "automatic", "strategy"),
    [
        (1, True, "ddp"),
        (MICRO_STEPS, True, "ddp"),
        (1, False, "ddp"),
        (1, True, "model_parallel"),
        (MICRO_STEPS, True, "model_parallel"),
    ],
)
def test_lightning(micro_steps, automatic, strategy):
    true = trained(lightning_body, plain, micro_steps, automatic, strategy)
    assert_same_training(trained(lightning_body, cached, micro_steps, automatic, strategy), true)


# Lightning Fabric.


def fabric_body(port, encode, micro_steps):
    from lightning.fabric import Fabric

    as_launched(port)
    reductions = reductions_counted()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = Dual()
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    for number, batch in enumerate(loader(micro_steps), 1):
        accumulates = number % micro_steps != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(loss_fn(encode(model, batch)) / micro_steps)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), len(reductions)


@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_fabric(micro_steps):
    true = trained(fabric_body, plain, micro_steps)
    assert_same_training(trained(fabric_body, cached, micro_steps), true)

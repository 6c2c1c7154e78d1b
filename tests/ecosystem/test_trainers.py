"""The trainers of other libraries on two processes: 20 steps with gradient caching give the weights of 20 without.

    make ecosystem

Each body is the form that a user writes. `encode` calls the model: `plain` as it is, and `cached` by
`wb.gradcache.encode(model, batch, chunk_size)`. Reductions of gradients are counted.
"""

import os
import sys
import tempfile
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dual import (
    BATCH,
    CHUNK,
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

import wholebatch as wb
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # these libraries warn of each other's deprecations


def trained(body, *arguments):
    return run_ranks(body, 2, free_port(), *arguments, timeout_s=240)


def loader(micro_steps=1, rows=BATCH):
    """Return this rank's batches of so many rows for all steps."""
    data = Pairs(rows * STEPS * micro_steps * dist.get_world_size())
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return torch.utils.data.DataLoader(data, rows, sampler=sampler)


# Hugging Face Trainer.


def allow_fsdp_on_cpus():
    """Override what keeps accelerate from FSDP on CPUs.

    AcceleratorState.__init__ takes FSDP only for processes that have accelerators: it is set afterward. Each of its
    states copies the partial one. And Accelerator.prepare_model gives FSDP1 the device "cpu:0" (set_device), which
    torch finds to be another one than "cpu" (_get_compute_device).
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    make = AcceleratorState.__init__

    def made(self, *args, fsdp_plugin=None, **kwargs):
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            PartialState().distributed_type = self.distributed_type = DistributedType.FSDP
            PartialState().device = self.device = torch.device("cpu")

    AcceleratorState.__init__ = made


def trainer_body(port, encode, micro_steps, stage=None, *, fsdp=None, is_scaled=False, clip=1.0, lr=0.1):
    as_launched(port)
    allow_fsdp_on_cpus()
    if stage is not None:
        without_compiled_operators()
    from transformers import Trainer, TrainingArguments

    dtype = torch.float64 if stage is None and fsdp != 1 else torch.float32
    reductions = reductions_counted()

    class Contrastive(Trainer):
        loss_is_scaled_for_ga = is_scaled  # False: the loss is a mean, which the Trainer divides by the micro-steps

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_fn(encode(model, inputs))

    model = Dual(dtype)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=micro_steps,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=lr,
            max_grad_norm=clip,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            deepspeed=None if stage is None else zero(stage, micro_steps),
            fsdp=fsdp is not None,
            # sync_module_states=True asks for an accelerator; both ranks have the same parameters already
            fsdp_config=None if fsdp is None else {"version": fsdp, "sync_module_states": False},
        )
        data = Pairs(2 * BATCH * STEPS * micro_steps, dtype)
        trainer = Contrastive(model, arguments, train_dataset=data)
        trainer.train()
    return whole_weights(trainer.model), len(reductions)


@pytest.mark.parametrize("fsdp", [None, 1, 2])
@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_trainer(micro_steps, fsdp):
    true = trained(partial(trainer_body, fsdp=fsdp), plain, micro_steps)
    found = trained(partial(trainer_body, fsdp=fsdp), cached, micro_steps)
    # The Trainer clips gradients, or logs their norm, with clip_grad_norm_ of FSDP1, which refuses float64.
    assert_same_training(found, true, FLOAT32 if fsdp == 1 else 1e-10)
    if fsdp is None:
        assert found[0][1] <= STEPS + 1  # DDP makes its buckets again after its first step
    else:
        assert found[0][1] <= 2 * STEPS  # the model, and once more to clip the gradients of shards


def test_a_trainer_that_does_not_divide_the_loss_is_off_by_the_number_of_micro_steps():
    def weights_of(**settings):
        return trained(partial(trainer_body, clip=0.0, **settings), cached, MICRO_STEPS)[0][0]

    right, wrong = weights_of(), weights_of(is_scaled=True)
    assert (wrong - right).norm() > 0.1 * right.norm()
    assert torch.allclose(weights_of(is_scaled=True, lr=0.1 / MICRO_STEPS), right, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("stage", "micro_steps"), [(0, 1), (1, MICRO_STEPS), (2, MICRO_STEPS), (3, MICRO_STEPS)])
def test_trainer_with_deepspeed(stage, micro_steps):
    true = trained(trainer_body, plain, micro_steps, stage)
    assert_same_training(trained(trainer_body, cached, micro_steps, stage), true, FLOAT32)


# accelerate.


def plugin_of(fsdp):
    from accelerate import FullyShardedDataParallelPlugin

    allow_fsdp_on_cpus()
    return None if fsdp is None else FullyShardedDataParallelPlugin(fsdp_version=fsdp)


def accelerate_body(port, encode, micro_steps, fsdp):
    from accelerate import Accelerator

    as_launched(port)
    reductions = reductions_counted()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_steps, fsdp_plugin=plugin_of(fsdp))
    model, optimizer, batches = prepared(accelerator, micro_steps)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(encode(model, batch)))
            if accelerator.sync_gradients and fsdp != 1:  # FSDP1's clip_grad_norm_ refuses float64
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), len(reductions)


def prepared(accelerator, micro_steps):
    """Return the model, its optimizer, and the batches; FSDP1 must come first, and FSDP2 at once with the optimizer."""
    model, batches = Dual(), _alone(micro_steps)
    if not accelerator.is_fsdp2:
        model = accelerator.prepare(model)
    return accelerator.prepare(model, sgd(model.parameters()), batches)


def _alone(micro_steps):
    """Return the loader of one process, which accelerate shards."""
    return torch.utils.data.DataLoader(Pairs(2 * BATCH * STEPS * micro_steps), BATCH)


@pytest.mark.parametrize("fsdp", [None, 1, 2])
@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_accelerate(micro_steps, fsdp):
    true = trained(accelerate_body, plain, micro_steps, fsdp)
    found = trained(accelerate_body, cached, micro_steps, fsdp)
    assert_same_training(found, true)
    assert found[0][1] <= 2 * STEPS  # the model, and once more to clip the gradients of shards


def accelerate_no_sync_body(port, encode):
    """accelerate's no_sync() turns the synchronization of FSDP2 on when it ends, whatever it was before."""
    from accelerate import Accelerator

    as_launched(port)
    reductions = reductions_counted()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of(2))
    model, optimizer, batches = prepared(accelerator, MICRO_STEPS)
    for number, batch in enumerate(batches, 1):
        last = number % MICRO_STEPS == 0
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(loss_fn(encode(model, batch)) / MICRO_STEPS)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), len(reductions)


def test_accelerates_no_sync_with_fsdp2():
    true = trained(accelerate_no_sync_body, plain)
    found = trained(accelerate_no_sync_body, cached)
    assert_same_training(found, true)
    assert found[0][1] <= STEPS + 1  # not in each micro-step


# Lightning.


def allow_fsdp1_on_cpus(strategy):
    """Return an FSDPStrategy that works on CPUs; it computes in float32 (FSDPPrecision).

    Lightning and Fabric refuse the class itself on CPUs (_check_strategy_and_fallback), but no subclass. They give
    FullyShardedDataParallel the index of the device, which is None for CPUs, and torch then asks for an accelerator
    (_init_device_handle).
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    make = FullyShardedDataParallel.__init__

    def made(self, *args, **kwargs):
        make(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = made
    return type("FSDPOnCPU", (strategy,), {})()


def lightning_body(port, encode, micro_steps, automatic, strategy, by_engine=False):
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    as_launched(port)
    reductions = reductions_counted()

    class Contrastive(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic
            self.net = Dual()
            self.cache = None

        def configure_model(self):
            if strategy == "model_parallel" and not hasattr(type(self.net), "set_requires_gradient_sync"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def forward(self, x, y):
            return self.net(x, y)

        def training_step(self, batch, _):
            model = self.trainer.strategy.model if by_engine else self.net
            if encode is None:  # the form that goes backward itself
                self.cache = self.cache or wb.GradCache([model], CHUNK, loss_fn)
                loss = self.cache(batch)
            else:
                loss = loss_fn(encode(model, batch))
            if not automatic:
                if encode is not None:
                    self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self):
            return sgd(self.parameters())

        def train_dataloader(self):
            return loader(micro_steps)

    strategies = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: allow_fsdp1_on_cpus(FSDPStrategy),
        "model_parallel": lambda: ModelParallelStrategy(2, 1),
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategies[strategy](),
        max_steps=STEPS,
        accumulate_grad_batches=micro_steps,
        gradient_clip_val=1.0 if automatic and strategy == "ddp" else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Contrastive())
    return weights(trainer.strategy.model), len(reductions)


@pytest.mark.parametrize(
    ("micro_steps", "automatic", "strategy", "by_engine"),
    [
        (1, True, "ddp", False),
        (MICRO_STEPS, True, "ddp", False),
        (1, False, "ddp", False),
        (1, False, "ddp", True),
        (1, True, "fsdp", True),
        (MICRO_STEPS, True, "fsdp", True),
        (1, False, "fsdp", True),
        (1, True, "model_parallel", False),
        (MICRO_STEPS, True, "model_parallel", False),
        (1, False, "model_parallel", False),
    ],
)
def test_lightning(micro_steps, automatic, strategy, by_engine):
    """`by_engine`: the encoder is the engine, self.trainer.strategy.model, and not the module inside of it."""
    true = trained(lightning_body, plain, micro_steps, automatic, strategy, by_engine)
    for encode in (cached,) if automatic else (cached, None):
        if encode is not None or strategy != "ddp" or by_engine:
            found = trained(lightning_body, encode, micro_steps, automatic, strategy, by_engine)
            assert_same_training(found, true, FLOAT32 if strategy == "fsdp" else 1e-10)


def lightning_refuses_body(port, automatic):
    with pytest.raises(
        ValueError, match=r"called inside of a larger one, .* \(in Lightning: self.trainer.strategy.model"
    ):
        lightning_body(port, cached, 1, automatic, "fsdp")


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_with_fsdp1_names_the_encoder_to_use(automatic):
    trained(lightning_refuses_body, automatic)


# Lightning Fabric.


def fabric_strategy(name):
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    if name == "fsdp":
        return allow_fsdp1_on_cpus(FSDPStrategy)
    if name == "model_parallel":
        return ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), 2, 1)
    return name


def fabric_body(port, encode, micro_steps, strategy):
    from lightning.fabric import Fabric

    as_launched(port)
    reductions = reductions_counted()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=fabric_strategy(strategy))
    fabric.launch()
    model = fabric.setup_module(Dual())  # before the optimizer, as FSDP2 has to be
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    for number, batch in enumerate(loader(micro_steps), 1):
        accumulates = number % micro_steps != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(loss_fn(encode(model, batch)) / micro_steps)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), len(reductions)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "model_parallel"])
@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
def test_fabric(micro_steps, strategy):
    true = trained(fabric_body, plain, micro_steps, strategy)
    found = trained(fabric_body, cached, micro_steps, strategy)
    assert_same_training(found, true, FLOAT32 if strategy == "fsdp" else 1e-10)


# DeepSpeed: float32, since ZeRO keeps its shards in it. A batch in chunks adds up gradients in another order.
FLOAT32 = 1e-5


def without_compiled_operators():
    """DeepSpeed compiles an operator for messages between processes of one CPU; gloo carries them here."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")


def zero(stage, micro_steps=1):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed 0.19.1 and 0.19.2 start the gathering of several parameters, and wait for the last one only. Those
        # of gloo may then not have arrived, and ZeRO 3 computes with wrong parameters, with and without caching.
        "zero_optimization": {"stage": stage, "stage3_allgather_sequential": True},
    }


def whole_weights(model):
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return weights(model)
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return weights(model)


def deepspeed_body(port, form, stage, micro_steps, rows=(BATCH, BATCH)):
    import deepspeed

    as_launched(port)
    without_compiled_operators()
    reductions = reductions_counted()
    model = Dual(torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=sgd(model.parameters()), config=zero(stage, micro_steps), dist_init_required=False
    )
    immediate = wb.GradCache([engine], CHUNK, loss_fn, scaler=engine)  # the engine scales the loss, where it has to
    for batch in loader(micro_steps, max(rows)):
        batch = {name: x.float()[: rows[dist.get_rank()]] for name, x in batch.items()}
        if form == "immediate":
            immediate(batch)
        else:
            engine.backward(loss_fn({"plain": plain, "cached": cached}[form](engine, batch)))
        engine.step()
    return whole_weights(engine.module), len(reductions)


@pytest.mark.parametrize("micro_steps", [1, MICRO_STEPS])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage, micro_steps):
    true = trained(deepspeed_body, "plain", stage, micro_steps)
    for form in ("cached", "immediate"):
        assert_same_training(trained(deepspeed_body, form, stage, micro_steps), true, FLOAT32)


@pytest.mark.parametrize("rows", [(3, 8), (8, 0)], ids=str)
@pytest.mark.parametrize(("stage", "micro_steps"), [(0, 1), (1, MICRO_STEPS), (2, MICRO_STEPS), (3, MICRO_STEPS)])
def test_deepspeed_with_other_numbers_of_chunks_on_each_rank(stage, micro_steps, rows):
    true = trained(deepspeed_body, "plain", stage, micro_steps, rows)
    for form in ("cached", "immediate"):
        assert_same_training(trained(deepspeed_body, form, stage, micro_steps, rows), true, FLOAT32)


def do_nothing_body(port):
    """DeepSpeed itself notices that two passes have reduced the same gradient."""
    import deepspeed

    as_launched(port)
    without_compiled_operators()
    wb.gradcache.register_sync_control(
        wb.gradcache.SyncControl(
            matches=lambda module: isinstance(module, deepspeed.DeepSpeedEngine), hold=lambda _module: nullcontext()
        )
    )
    model = Dual(torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=sgd(model.parameters()), config=zero(2), dist_init_required=False
    )
    batch = {name: x.float() for name, x in next(iter(loader())).items()}
    with pytest.raises(AssertionError, match="already been reduced"):
        engine.backward(loss_fn(cached(engine, batch)))


def test_a_hold_that_does_nothing_is_an_error_under_zero_2():
    trained(do_nothing_body)


def accelerate_deepspeed_body(port, encode, stage, micro_steps):
    """accelerator.backward() makes DeepSpeed's step, too."""
    from accelerate import Accelerator, DeepSpeedPlugin

    as_launched(port)
    without_compiled_operators()
    reductions = reductions_counted()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero(stage, micro_steps)))
    model = Dual(torch.float32)
    model, optimizer, batches = accelerator.prepare(model, sgd(model.parameters()), _alone(micro_steps))
    for batch in batches:
        batch = {name: x.float() for name, x in batch.items()}
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(encode(model, batch)))
            optimizer.step()
            optimizer.zero_grad()
    return whole_weights(model.module), len(reductions)


@pytest.mark.parametrize(("stage", "micro_steps"), [(0, 1), (1, 1), (2, MICRO_STEPS), (3, MICRO_STEPS)])
def test_accelerate_with_deepspeed(stage, micro_steps):
    true = trained(accelerate_deepspeed_body, plain, stage, micro_steps)
    assert_same_training(trained(accelerate_deepspeed_body, cached, stage, micro_steps), true, FLOAT32)

"""Engines and launchers that cannot hold a head of sharded classes are refused; another package of Lightning works.

make ecosystem
"""

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from dual import as_launched, free_port
from head_runs import Model, distance, local_batches, make_head, true_weights, whole_vector
from test_trainers import allow_fsdp1_on_cpus, without_compiled_operators, zero
from torch import nn

from wholebatch.testing import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn
ROOT = Path(__file__).parents[2]


def deepspeed_body(port, stage):
    as_launched(port)
    without_compiled_operators()
    import deepspeed

    model = nn.Module()
    model.backbone, model.head = nn.Linear(6, 4), make_head(classes=8).float()
    model.forward = lambda x, y: model.head(model.backbone(x), y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero(stage))
    x, y = local_batches()[0]
    with pytest.raises(ValueError, match="must stay outside of DeepSpeed's engine"):
        engine(x.float(), y)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_head_inside_of_deepspeeds_engine_is_refused(stage):
    run_ranks(partial(deepspeed_body, free_port(), stage), 2, timeout_s=120)


def fsdp_body(port):
    as_launched(port)
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(6, 4), make_head(classes=8).float()

        def training_step(self, batch, _):
            return self.head(self.backbone(batch[0].float()), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=allow_fsdp1_on_cpus(FSDPStrategy), logger=False, max_steps=2,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="PartialFC must stay outside of FSDP"):
        trainer.fit(Classifier(), torch.utils.data.DataLoader(local_batches(), batch_size=None))


def test_a_head_inside_of_lightnings_fsdp_is_refused():
    run_ranks(partial(fsdp_body, free_port()), 2, timeout_s=120)


def model_parallel_body(port, clip=None, by_trainer=False):
    """FSDP2 shards the backbone alone, in configure_model; the head is an attribute beside it."""
    as_launched(port)
    import lightning
    from head_runs import OPTIMIZERS
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    import wholebatch as wb

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Model().backbone, None

        def configure_model(self):
            if self.head is None:
                fully_shard(self.backbone, mesh=self.device_mesh["data_parallel"])
                self.head = make_head()

        def training_step(self, batch, _):
            return self.head(self.backbone(batch[0]), batch[1])

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if by_trainer:
                super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            elif clip is not None:
                wb.heads.clip_grad_norm_(self.backbone.parameters(), self.head.parameters(), clip)

        def configure_optimizers(self):
            return OPTIMIZERS["SGD"](self.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(2, 1), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, gradient_clip_val=clip if by_trainer else None,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(local_batches(), batch_size=None))
    centers = module.head.full_weight()
    return torch.cat(
        [p.detach().full_tensor().flatten() for p in module.backbone.parameters()]
        + ([] if centers is None else [centers.flatten()])
    )


@pytest.mark.parametrize("clip", [None, 0.1])
def test_lightnings_fsdp2_beside_a_head_ends_with_the_weights_of_one_process(clip):
    for of_rank in run_ranks(partial(model_parallel_body, free_port(), clip), 2, timeout_s=120):
        assert distance(of_rank, true_weights(clip=clip)) < 1e-11


def test_lightnings_own_clipping_beside_fsdp2_is_torchs_error():
    with pytest.raises(RankError, match=r"2 of 2 ranks failed[\s\S]*got mixed torch.Tensor and DTensor"):
        run_ranks(partial(model_parallel_body, free_port(), 0.1, True), 2, timeout_s=120)


def other_package_body(port):
    """The package pytorch_lightning has classes of its own."""
    as_launched(port)
    warnings.simplefilter("ignore")
    import pytorch_lightning
    from head_runs import OPTIMIZERS

    from wholebatch.integrations.lightning import ddp_strategy

    class Classifier(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            made = Model()
            self.backbone, self.head = made.backbone, made.head

        def training_step(self, batch, _):
            return self.head(self.backbone(batch[0]), batch[1])

        def configure_optimizers(self):
            return OPTIMIZERS["SGD"](self.parameters())

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ddp_strategy(pytorch_lightning.strategies.DDPStrategy), max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, gradient_clip_val=0.1,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(local_batches(), batch_size=None))
    return whole_vector(module)


def test_the_package_pytorch_lightning():
    pytest.importorskip("pytorch_lightning")
    for of_rank in run_ranks(partial(other_package_body, free_port()), 2, timeout_s=120):
        assert distance(of_rank, true_weights(clip=0.1)) < 1e-11


SPAWNED = """
import torch, lightning, wholebatch as wb
from wholebatch.integrations.lightning import ddp_strategy

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(6, 4), wb.PartialFC(4, 7)

    def training_step(self, batch, _):
        print("a step", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=ddp_strategy(start_method="METHOD"), max_steps=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), torch.utils.data.DataLoader([torch.ones(6)] * 8))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_return_rank_0s_part_are_refused_before_training(method, tmp_path):
    """Lightning returns the module's state of rank 0 to the process of the trainer, without asking the strategy."""
    (tmp_path / "program.py").write_text(SPAWNED.replace("METHOD", method))
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert f"ValueError: start_method must be 'popen' with a head of sharded classes, got '{method}'" in run.stderr
    assert "a step" not in run.stdout

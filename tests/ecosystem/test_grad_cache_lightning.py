"""PLGradCache under its own name, in a LightningModule with manual optimization on two processes.

    make ecosystem

20 steps give the weights of one process, which trains with a dense loss.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from dual import BATCH, CHUNK, STEPS, Dual, Pairs, as_launched, free_port, sgd, weights
from torch.nn import functional as F

from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns


def dense(reps):
    x, y, scale = reps
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


def body(port):
    import lightning

    from wholebatch.integrations import grad_cache as alias

    alias.install()
    from grad_cache.loss import DistributedContrastiveLoss
    from grad_cache.pytorch_lightning.pl_gradcache import PLGradCache

    as_launched(port)

    class Contrastive(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = Dual()

        def forward(self, x, y):
            return self.net(x, y)

        def on_train_start(self):
            loss_fn = DistributedContrastiveLoss()
            self.gc = PLGradCache(
                models=[self.trainer.strategy.model],
                chunk_sizes=CHUNK,
                loss_fn=lambda reps: loss_fn(reps[2] * reps[0], reps[1]),
                backward_fn=self.manual_backward,
            )

        def training_step(self, batch, _):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.gc(batch, no_sync_except_last=True)
            optimizer.step()
            return loss

        def configure_optimizers(self):
            return sgd(self.parameters())

        def train_dataloader(self):
            data = Pairs(BATCH * STEPS * dist.get_world_size())
            sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
            return torch.utils.data.DataLoader(data, BATCH, sampler=sampler)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Contrastive())
    return weights(trainer.strategy.model)


def true_weights():
    model, data = Dual(), Pairs(2 * BATCH * STEPS)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        rows = range(2 * BATCH * step, 2 * BATCH * (step + 1))
        optimizer.zero_grad()
        dense(model(**torch.utils.data.default_collate([data[row] for row in rows]))).backward()
        optimizer.step()
    return weights(model)


def test_two_processes_end_with_the_weights_of_one():
    true, start = true_weights(), weights(Dual())
    for end in run_ranks(partial(body, free_port()), 2, timeout_s=120):
        print(((end - true).norm() / (true - start).norm()).item())
        assert (end - true).norm() < 1e-10 * (true - start).norm()

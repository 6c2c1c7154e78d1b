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

import wholebatch as wb
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


class Scaled(torch.nn.Module):
    """CLIP's loss of the representations, with a scale of its own."""

    def __init__(self):
        super().__init__()
        self.clip = wb.CLIPLoss(logit_scale=wb.Scale(5.0)).double()

    def forward(self, reps):
        return self.clip(reps[0], reps[1])


def train_with_own_scale(folder, epochs, saved=True, checkpoint=None):
    """Train so many epochs of five steps, write a checkpoint, and return the weights, the loss's included."""
    import lightning

    from wholebatch.integrations.grad_cache import PLGradCache

    class Contrastive(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net, loss_fn = Dual(), Scaled()
            if saved:
                self.loss_fn = loss_fn
            self.gc = PLGradCache([self.net], CHUNK, loss_fn, backward_fn=self.manual_backward)

        def training_step(self, batch, _):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.gc(batch)
            optimizer.step()
            return loss

        def configure_optimizers(self):
            return sgd([p for name, p in self.named_parameters() if not name.startswith("net.scale")])

        def train_dataloader(self):
            return torch.utils.data.DataLoader(Pairs(2 * BATCH * 5), 2 * BATCH)

    module = Contrastive()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return weights(module)


def test_a_scale_of_the_loss_is_trained_saved_and_resumed(tmp_path):
    once, name = train_with_own_scale(tmp_path, 2), "loss_fn.clip.logit_scale.log_scale"
    train_with_own_scale(tmp_path, 1)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    start = Scaled().clip.logit_scale.log_scale
    assert (saved["state_dict"][name] - start).abs() > 1e-4
    resumed = train_with_own_scale(tmp_path, 2, checkpoint=tmp_path / "last.ckpt")
    assert torch.equal(resumed, once)
    saved["state_dict"][name] = start.detach()  # as if it had not been saved
    torch.save(saved, tmp_path / "without.ckpt")
    assert not torch.equal(train_with_own_scale(tmp_path, 2, checkpoint=tmp_path / "without.ckpt"), once)


def test_a_scale_that_is_not_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"but the Contrastive's, got clip\.logit_scale\.log_scale: its optimizers"):
        train_with_own_scale(tmp_path, 1, saved=False)

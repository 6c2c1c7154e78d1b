"""The training loop of one rank, from the first step to the report, readable top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .. import kernels
from .checkpoint import FILE
from .config import TrainConfig
from .progress import Progress
from .run_folder import RunFolder
from .signals import Asked, Requests, Stopped, name
from .task import Task, not_finite


def train(
    config: TrainConfig,
    task: Task,
    path: Path,
    folder: RunFolder | None,
    progress: Progress,
    requests: Requests,
    *,
    size: int,
) -> None:
    """Run this rank's part of the training in the run folder `path`; rank 0, the one with a `folder`, reports.

    The global batch, its order and its augmentation depend on the seed and the step alone, and each rank takes its
    rows of it: the curve is the same for any number of ranks, up to float32's order of summation.

    Raises:
        UserError: if the numbers are no longer finite, or the folder cannot be written.
        Stopped: if a signal on any rank has requested it; the last step then has a checkpoint.
    """
    resumed_at, seconds = 0, 0.0
    if config.resume is not None and (path / FILE).exists():
        facts = task.load(path)
        resumed_at, seconds = facts["step"], facts["seconds"]
    saved_at = resumed_at
    progress.start(config, task, size=size, done=resumed_at)
    requests.begin()
    started = time.monotonic() - seconds
    for step in range(resumed_at, config.steps):
        set_learning_rate(task.optimizers, config, step)
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        # Some losses have state that the forward pass changes; a run that resumes from here makes this pass again.
        due = step % config.checkpoint_every == 0 and step not in (0, saved_at)
        loss_state = task.loss_state() if due else {}
        loss = task.add_gradients(step)
        grad_norm = task.grad_norm()
        if not math.isfinite(grad_norm):
            raise not_finite(step, f"the norm of the gradient is {grad_norm}")
        if due:  # only now the weights of the last step are known to give a finite loss and gradient
            task.save(path, loss_state, step=step, seconds=seconds)
            saved_at = step
        for optimizer in task.optimizers:
            optimizer.step()
        task.after_step()

        seconds = time.monotonic() - started
        metrics: dict[str, Any] = {
            "step": step + 1,
            "loss": loss.item(),
            **task.metrics(),
            "learning_rate": task.optimizers[0].param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "seconds": round(seconds, 3),
        }
        if (step + 1) % config.validate_every == 0 or step + 1 == config.steps:
            metrics["validation"] = task.validate()
        if folder is not None:
            folder.append(metrics)
            progress.step(metrics)
        asked = requests.combined()
        if asked.stop or asked.checkpoint:  # now, because a stop cannot wait for another pass
            task.save(path, task.loss_state(), step=step + 1, seconds=seconds)
            saved_at = step + 1
        if asked.stop:
            raise _end(asked, requests, progress, step=step + 1)
        if asked.checkpoint:
            progress.show_checkpoint(step + 1)

    report = task.test()
    if saved_at < config.steps:
        task.save(path, task.loss_state(), step=config.steps, seconds=seconds)
    weights = task.weights()
    if folder is not None:
        choices = [asdict(choice) for choice in kernels.choices()]
        folder.finish(task, report | {"seconds": round(seconds, 1), "kernels": choices}, weights)
    asked = requests.combined()
    if asked.stop:
        raise _end(asked, requests, progress, step=config.steps, finished=True)


def _end(asked: Asked, requests: Requests, progress: Progress, *, step: int, finished: bool = False) -> Stopped:
    """Show how to resume, wait until all ranks are done, and return the exception that ends the run."""
    progress.stop()
    progress.show_stop(name(asked.stop), step, requests.how_to_resume, finished=finished)
    requests.combined()  # a launcher may end the other ranks as soon as one has ended
    return Stopped(asked.stop)


def set_learning_rate(optimizers: Sequence[Optimizer], config: TrainConfig, step: int) -> None:
    """Set each group's learning rate: its peak, times the linear warm-up, times the cosine decay."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = (1 + math.cos(math.pi * step / config.steps)) / 2
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * warmup * cosine

"""The training loop, readable top to bottom: what one rank does from the first step to the report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .checkpoint import FILE
from .config import TrainConfig
from .progress import Progress
from .run_folder import RunFolder
from .signals import Asked, Requests, Stopped, name
from .task import Task, stopped


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
        Stopped: if a signal on any rank has asked for it; the last step that was made has a checkpoint then.
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
        # Some losses have a memory, which the forward pass changes; a run that goes on from here makes this pass again.
        due = step % config.checkpoint_every == 0 and step not in (0, saved_at)
        memory = task.memory() if due else {}
        loss = task.add_gradients(step)
        grad_norm = task.grad_norm()
        if not math.isfinite(grad_norm):
            raise stopped(step, f"the norm of the gradient is {grad_norm}")
        if due:  # only now is it known that the weights of the last step give a finite loss and gradient
            task.save(path, memory, step=step, seconds=seconds)
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
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            metrics["validation"] = task.validate()
        if folder is not None:
            folder.append(metrics)
            progress.step(metrics)
        asked = requests.agree()
        if asked.stop or asked.checkpoint:  # now: whoever stops a run does not wait for another pass
            task.save(path, task.memory(), step=step + 1, seconds=seconds)
            saved_at = step + 1
        if asked.stop:
            raise _end(asked, requests, path, progress, step=step + 1)
        if asked.checkpoint:
            progress.show_checkpoint(step + 1)

    report = task.judge()
    if saved_at < config.steps:
        task.save(path, task.memory(), step=config.steps, seconds=seconds)
    weights = task.weights()
    if folder is not None:
        folder.finish(task, report | {"seconds": round(seconds, 1)}, weights)
    asked = requests.agree()
    if asked.stop:
        raise _end(asked, requests, path, progress, step=config.steps, finished=True)


def _end(
    asked: Asked, requests: Requests, path: Path, progress: Progress, *, step: int, finished: bool = False
) -> Stopped:
    """Tell the user how to go on, wait until no rank has anything to do, and return the exception that ends the run."""
    progress.stop()
    progress.show_stop(name(asked.stop), step, path, finished=finished)
    requests.agree()  # a launcher may end the other ranks as soon as one has ended
    return Stopped(asked.stop)


def set_learning_rate(optimizers: Sequence[Optimizer], config: TrainConfig, step: int) -> None:
    """Linear warm-up times cosine decay, of each group's peak."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = (1 + math.cos(math.pi * step / config.steps)) / 2
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * warmup * cosine

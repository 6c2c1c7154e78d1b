"""The training loop, readable top to bottom: what one rank does from the first step to the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb

from .._user_error import UserError
from .augment import affine_maps, apply_maps
from .checkpoint import FILE, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .evaluation import as_float, held_out_features, tokens
from .model import DualEncoder
from .objectives import Objective, make_objective
from .pairs import Pairs, Split, batch_of_step
from .progress import Progress
from .retrieval import both_ways
from .run_folder import RunFolder
from .text import TextBatch


def train(
    config: TrainConfig,
    pairs: Pairs,
    split: Split,
    folder: RunFolder | None,
    progress: Progress,
    device: torch.device,
) -> None:
    """Run this rank's part of the training; rank 0, the one with a folder, writes and reports.

    The global batch, its order and its augmentation depend on the seed and the step alone, and each rank takes its
    rows of it: the curve is the same for any number of ranks, up to float32's order of summation.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = wb.partition.Partition.even(config.batch_size, size).rows(rank)

    torch.manual_seed(config.seed)
    encoder = DualEncoder(
        config.model, channels=config.image_channels, image_size=config.image_size, bias=config.loss == "siglip"
    ).to(device)
    objective = make_objective(config, len(pairs)).to(device)
    state = nn.ModuleDict({"encoder": encoder, "objective": objective})
    optimizer = make_optimizer(encoder, config)
    resumed_at, seconds = 0, 0.0
    if config.resume is not None and (config.resume / FILE).exists():
        facts = load_checkpoint(config.resume, state, optimizer)
        resumed_at, seconds = facts["step"], facts["seconds"]
    model = DistributedDataParallel(encoder) if size > 1 else encoder
    train_step = step_of(model, objective, lambda texts: tokens(config, pairs, texts, device), config.chunk_size)
    progress.start(config, pairs, split, size=size, done=resumed_at)
    started = time.monotonic() - seconds
    for step in range(resumed_at, config.steps):
        set_learning_rate(optimizer, config, step)
        image_rows, text_rows = batch_of_step(
            split.train, pairs, batch_size=config.batch_size, step=step, seed=config.seed
        )
        images = as_float(pairs.images[image_rows[rows]], device)
        if config.augment:
            maps = affine_maps(config.batch_size, strength=config.augment, step=step, seed=config.seed)
            images = apply_maps(images, maps[rows].to(device))
        texts = text_rows[rows]

        optimizer.zero_grad()
        # Some losses have a memory, which the forward pass changes; a run that goes on from here makes this pass again.
        due = folder is not None and step % config.checkpoint_every == 0 and step not in (0, resumed_at)
        remembered = {f"objective.{name}": x.clone() for name, x in objective.state_dict().items() if due}
        loss = train_step(images, texts, step=step, names=texts.to(device))
        grad_norm = finite_grad_norm(encoder, step)
        if folder is not None and due:
            # Only now is it known that the weights of the last step give a finite loss and gradient.
            save_checkpoint(folder.path, state.state_dict() | remembered, optimizer, step=step, seconds=seconds)
        optimizer.step()
        encoder.limit_logit_scale()

        seconds = time.monotonic() - started
        metrics: dict[str, Any] = {
            "step": step + 1,
            "loss": loss.item(),
            "logit_scale": encoder.logit_scale.item(),
            "learning_rate": optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "seconds": round(seconds, 3),
        }
        if folder is not None:
            if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
                metrics["validation"] = both_ways(*held_out_features(encoder, config, pairs, split.validation, device))
            folder.append(metrics)
            progress.step(metrics)

    if folder is not None:
        image_features, text_features = held_out_features(encoder, config, pairs, split.test, device)
        if not (image_features.isfinite().all() and text_features.isfinite().all()):
            raise stopped(config.steps, "the features of the test set are not finite")
        save_checkpoint(folder.path, state.state_dict(), optimizer, step=config.steps, seconds=seconds)
        folder.finish(encoder, pairs, split, image_features, text_features, seconds)


def step_of(
    model: nn.Module, objective: Objective, tokenize: Callable[[Tensor], TextBatch], chunk_size: int
) -> Callable[..., Tensor]:
    """What adds the gradient of a batch to the parameters': (images, texts; step, names) -> the loss."""

    def loss_fn(features: Sequence[Tensor], *, step: int, names: Tensor) -> Tensor:
        images, texts, scale, *bias = features
        return loss_of(objective, images, texts, scale, bias[0] if bias else None, names, step=step)

    def chunks(batch: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, TextBatch]]:
        return [(images, tokenize(texts)) for images, texts in zip(*(part.split(size) for part in batch), strict=True)]

    def given(features: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(x for x in features if x is not None)

    if chunk_size:
        cached = wb.GradCache([model], chunk_size, loss_fn, split_input_fn=chunks, get_rep_fn=given)
        return lambda images, texts, **named: cached((images, texts), **named)

    def whole(images: Tensor, texts: Tensor, **named: Any) -> Tensor:
        loss = loss_fn(given(model(images, tokenize(texts))), **named)
        loss.backward()
        return loss.detach()

    return whole


def make_optimizer(encoder: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, decay on matrices only. eps well above rounding: a gradient of pure rounding noise stays a small step."""
    matrices = [p for p in encoder.parameters() if p.dim() > 1]
    others = [p for p in encoder.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-6)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Linear warm-up times cosine decay."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = (1 + math.cos(math.pi * step / config.steps)) / 2
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * warmup * cosine


def loss_of(objective: Objective, *features: Any, step: int) -> Tensor:
    """The loss of the global batch, or the end of the run if it is not finite."""
    try:
        loss: Tensor = objective(*features)
    except ValueError as error:
        raise stopped(step, str(error)) from error
    if not math.isfinite(loss.item()):
        raise stopped(step, f"the loss is {loss.item()}")
    return loss


def finite_grad_norm(encoder: nn.Module, step: int) -> float:
    """Euclidean norm of all gradients, or the end of the run if it is not finite."""
    norm = nn.utils.get_total_norm([p.grad for p in encoder.parameters() if p.grad is not None]).item()
    if not math.isfinite(norm):
        raise stopped(step, f"the norm of the gradient is {norm}")
    return norm


def stopped(step: int, why: str) -> UserError:
    """The error that ends a run whose numbers are no longer finite."""
    return UserError(
        f"training stopped in step {step + 1}: {why}. An earlier checkpoint, if there is one, is kept; a new run "
        "with a lower --learning-rate is the usual remedy"
    )

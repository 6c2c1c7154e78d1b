"""The training loop, readable top to bottom: what one rank does from the first step to the report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb

from .augment import affine_maps, apply_maps
from .checkpoint import load_checkpoint, save_checkpoint
from .config import TrainConfig
from .errors import UserError
from .files import file_pairs
from .glyphs import glyph_pairs
from .model import DualEncoder
from .pairs import Pairs, Split, batch_of_step, split_by_text
from .progress import Progress
from .retrieval import both_ways
from .run_folder import RunFolder
from .text import TextBatch, tokenize


@dataclass(frozen=True)
class Outcome:
    """What a finished run knows: recall on the held-out texts, their features, and the time it took."""

    recall: dict[str, dict[str, float]]
    image_features: Tensor
    text_features: Tensor
    seconds: float


def train(config: TrainConfig, folder: RunFolder | None, progress: Progress, device: torch.device) -> Outcome:
    """Run this rank's part of the training; rank 0, the one with a folder, writes and reports.

    The global batch, its order and its augmentation depend on the seed and the step alone, and each rank takes its
    rows of it: the curve is the same for any number of ranks, up to float32's order of summation.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    pairs, split = load_data(config)
    rows = wb.partition.Partition.even(config.batch_size, size).rows(rank)

    torch.manual_seed(config.seed)
    encoder = DualEncoder(config.model, channels=config.image_channels, image_size=config.image_size).to(device)
    optimizer = make_optimizer(encoder, config)
    done, seconds = 0, 0.0
    if config.resume is not None:
        facts = load_checkpoint(config.resume, encoder, optimizer)
        done, seconds = facts["step"], facts["seconds"]
    model = DistributedDataParallel(encoder) if size > 1 else encoder
    loss_fn = make_loss(config)

    progress.start(config, pairs, split, size=size, done=done)
    started = time.monotonic() - seconds
    for step in range(done, config.steps):
        set_learning_rate(optimizer, config, step)
        image_rows, text_rows = batch_of_step(
            split.train, pairs, batch_size=config.batch_size, step=step, seed=config.seed
        )
        images = as_float(pairs.images[image_rows[rows]], device)
        if config.augment:
            maps = affine_maps(config.batch_size, strength=config.augment, step=step, seed=config.seed)
            images = apply_maps(images, maps[rows].to(device))
        texts = tokens(config, pairs, text_rows[rows], device)

        optimizer.zero_grad()
        loss = loss_of_step(model, loss_fn, images, texts, step)
        loss.backward()
        grad_norm = finite_grad_norm(encoder, step)
        optimizer.step()

        done, seconds = step + 1, time.monotonic() - started
        metrics: dict[str, Any] = {
            "step": done,
            "loss": loss.item(),
            "logit_scale": encoder.logit_scale.item(),
            "learning_rate": optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "seconds": round(seconds, 3),
        }
        if folder is not None:
            if done % config.evaluate_every == 0 or done == config.steps:
                metrics["validation"] = both_ways(*held_out_features(encoder, config, pairs, split.validation, device))
            folder.append(metrics)
            if done % config.checkpoint_every == 0 or done == config.steps:
                save_checkpoint(folder.path, encoder, optimizer, step=done, seconds=seconds)
            progress.step(metrics)

    image_features, text_features = held_out_features(encoder, config, pairs, split.test, device)
    if folder is not None:
        folder.finish(encoder, pairs, split, image_features, text_features, seconds)
    return Outcome(both_ways(image_features, text_features), image_features, text_features, seconds)


def load_data(config: TrainConfig) -> tuple[Pairs, Split]:
    """All pairs, and which texts are for training, validation and test."""
    if config.data == "glyphs":
        if config.image_channels != 1:
            raise UserError("--data glyphs are grey: --image-channels must be 1")
        pairs = glyph_pairs(config.image_size)
    else:
        from pathlib import Path

        pairs = file_pairs(Path(config.data), image_size=config.image_size, channels=config.image_channels)
    split = split_by_text(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    if len(split.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many texts to train on, got {len(split.train)}: the data hold "
            f"{len(pairs)} different texts, less {config.validation_texts} for validation and {config.test_texts} for "
            "test. Lower --batch-size, --validation-texts or --test-texts"
        )
    return pairs, split


def make_loss(config: TrainConfig) -> nn.Module:
    """The loss of the global batch; on several ranks DDP averages, which is the loss's default."""
    return wb.CLIPLoss(label_smoothing=config.label_smoothing)


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


def loss_of_step(model: nn.Module, loss_fn: nn.Module, images: Tensor, texts: TextBatch, step: int) -> Tensor:
    """The loss of the global batch, or the end of the run if it is not finite."""
    try:
        loss = loss_fn(*model(images, texts))
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
        f"training stopped in step {step + 1}: {why}. The last checkpoint is kept; a lower --learning-rate is the "
        "usual remedy"
    )


def as_float(images: Tensor, device: torch.device) -> Tensor:
    """uint8 -> [0, 1]."""
    return images.to(device).float() / 255


def tokens(config: TrainConfig, pairs: Pairs, rows: Tensor, device: torch.device) -> TextBatch:
    """The texts with these indices, as the text encoder reads them."""
    batch = tokenize(
        [pairs.texts[i] for i in rows.tolist()], max_words=config.model.max_words, buckets=config.model.text_buckets
    )
    return TextBatch(*(x.to(device) for x in batch))


@torch.no_grad()
def held_out_features(
    encoder: DualEncoder, config: TrainConfig, pairs: Pairs, texts: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features of the first image of each text and of the text, on the CPU, without augmentation."""
    images, names = [], []
    for rows in texts.split(512):
        images.append(encoder.encode_images(as_float(pairs.images[pairs.first[rows]], device)).cpu())
        names.append(encoder.encode_texts(tokens(config, pairs, rows, device)).cpu())
    return torch.cat(images), torch.cat(names)

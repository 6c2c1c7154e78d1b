"""The checks of a configuration: values that make no sense are refused before anything is loaded.

That a value is one of its type, the parsers of the command line and of files have checked before.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math

from wholebatch.app import UserError, launcher_size, require

from .config import TrainConfig, value_of
from .encoder_options import check_encoder

# Larger values are mistakes: they would exhaust a machine's memory or processes before any other check.
_RANGES: dict[str, tuple[int, float]] = {
    "ranks": (1, 4096), "workers": (-1, 256), "steps": (1, 10**9), "batch_size": (0, 2**31), "chunk_size": (0, 2**31),
    "warmup_steps": (0, 10**12), "patience": (0, 10**9), "validate_every": (1, math.inf),
    "checkpoint_every": (1, math.inf), "validation_texts": (0, math.inf), "test_texts": (0, math.inf),
    "image_size": (0, 4096), "model.embedding_size": (1, 2**16), "model.image_width": (1, 2**12),
    "model.text_width": (1, 2**16), "model.text_layers": (0, 2**10), "model.text_heads": (1, math.inf),
    "model.text_buckets": (1, 2**26), "model.max_words": (0, 2**16), "head.sub_centers": (1, 2**10),
}  # fmt: skip


def check_options(config: TrainConfig) -> None:
    """Refuse values that make no sense, before anything is loaded."""
    for name, (low, high) in _RANGES.items():
        if (value := value_of(config, name)) != "auto":
            require(value >= low, name, f"at least {low}", value)
            require(value <= high, name, f"at most {high}", value)
    require("\0" not in config.data, "data", "'glyphs' or a path", repr(config.data))
    # Gradient caching observes the calls of modules by hooks, for which torch would compile in every step again.
    both = config.compile and (config.has_automatic_chunks or config.chunk_size > 0)
    require(not both, "compile", f"left out with --chunk-size {config.chunk_size}", config.compile)
    for name in ("weight_decay", "augment"):
        require(0 <= getattr(config, name) <= 1e30, name, "in [0, 1e30]", getattr(config, name))
    until, most = config.until_step, _RANGES["steps"][1]
    require(until is None or 1 <= until <= most, "until_step", f"from 1 to {most}", until)
    require(until is None or config.resume is not None, "until_step", "given with --resume, to extend a run", until)
    require(config.wandb is None or config.wandb.strip() != "", "wandb", "the name of a project", repr(config.wandb))
    require(0 < config.learning_rate <= 1e30, "learning_rate", "in (0, 1e30]", config.learning_rate)
    require(-(2**63) <= config.seed < 2**63, "seed", "an integer of 64 bits", config.seed)
    glyphs_in_color = config.data == "glyphs" and config.image_channels == 3
    require(not glyphs_in_color, "image_channels", "1 for --data glyphs, which are gray", config.image_channels)
    require(config.image_size % 8 == 0, "image_size", "a multiple of 8", config.image_size)
    without_negatives = config.task == "retrieve" and config.batch_size == 1
    require(not without_negatives, "batch_size", "at least 2, because a pair alone has no negatives", config.batch_size)
    has_smoothing = config.label_smoothing == 0 or config.loss == "clip"
    require(has_smoothing, "label_smoothing", f"0 for --loss {config.loss}, which has none", config.label_smoothing)
    require(0 <= config.label_smoothing <= 1, "label_smoothing", "in [0, 1]", config.label_smoothing)
    model = config.model
    scale, heads, width = model.initial_logit_scale, model.text_heads, model.text_width
    require(0 < scale <= 100, "model.initial_logit_scale", "in (0, 100]", scale)
    require(width % heads == 0, "model.text_width", f"a multiple of --model.text-heads ({heads})", width)
    require(model.image_width % 8 == 0, "model.image_width", "a multiple of 8", model.image_width)
    check_encoder("image", config.image_encoder, config.image)
    check_encoder("text", config.text_encoder, config.text)
    _check_head(config)


def number_of_ranks(config: TrainConfig) -> int:
    """Return the number of ranks that the launcher has started, or else that of the configuration."""
    launched = launcher_size()
    if launched is not None and config.ranks not in (1, launched):
        raise UserError(f"--ranks must be left out under a launcher, which has started {launched}; got {config.ranks}")
    size = launched or config.ranks
    if 0 < config.batch_size < size:
        raise UserError(f"--batch-size must be at least the number of ranks, {size}; got {config.batch_size}")
    return size


def _check_head(config: TrainConfig) -> None:
    head = config.head
    if config.task == "retrieve":
        for f in dataclasses.fields(head):
            require(getattr(head, f.name) == f.default, f"head.{f.name}", "left out without --task identify",
                     getattr(head, f.name))  # fmt: skip
        return
    require(config.loss == "clip", "loss", "left out for --task identify, whose loss is --head.margin", config.loss)
    require(0 < head.scale <= 1e4, "head.scale", "in (0, 1e4]", head.scale)
    require(0 <= head.sample_rate <= 1, "head.sample_rate", "in [0, 1]", head.sample_rate)
    require(0 < head.learning_rate <= 1e30, "head.learning_rate", "in (0, 1e30]", head.learning_rate)
    has_size = head.margin not in ("normface", "magface")
    require(head.m is None or has_size, "head.m", f"left out for --head.margin {head.margin}", head.m)
    smallest = 1.0 if head.margin == "sphereface" else 0.0
    require(head.m is None or smallest <= head.m <= 10, "head.m", f"in [{smallest:g}, 10]", head.m)

"""The checks of a configuration: values that make no sense are refused before anything is loaded.

That a value is one of its type, the parsers of the command line and of files have checked before.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path

from wholebatch.app import UserError, launcher_size, needs, require

from .config import Kind, Named, SideConfig, TrainConfig, Tune, value_of

# Larger values are mistakes: they would exhaust a machine's memory or processes before any other check.
_RANGES: dict[str, tuple[int, float]] = {
    "ranks": (1, 4096), "workers": (-1, 256), "steps": (1, 10**9), "batch_size": (0, 2**31), "chunk_size": (0, 2**31),
    "warmup_steps": (0, 10**12), "patience": (0, 10**9), "validate_every": (1, math.inf),
    "checkpoint_every": (1, math.inf), "validation_texts": (0, math.inf), "test_texts": (0, math.inf),
    "image_size": (0, 4096), "model.embedding_size": (1, 2**16), "model.image_width": (1, 2**12),
    "model.text_width": (1, 2**16), "model.text_layers": (0, 2**10), "model.text_heads": (1, math.inf),
    "model.text_buckets": (1, 2**26), "model.max_words": (0, 2**16), "head.sub_centers": (1, 2**10),
}  # fmt: skip
_FORMS = {
    "image": ("small", "timm:NAME", "transformers:NAME", "FILE.py:FUNCTION"),
    "text": ("small", "transformers:NAME", "FILE.py:FUNCTION"),
}


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
    _check_encoder("image", config.image_encoder, config.image)
    _check_encoder("text", config.text_encoder, config.text)
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


def check_present(kind: Kind, encoder: str) -> None:
    """Refuse an encoder whose file or library is missing."""
    named = Named.parse(encoder)
    value = f"--{kind}-encoder {encoder}"
    if named.library == "file" and not Path(named.name).is_file():
        raise UserError(f"{value}: there is no file {named.name!r}")
    if named.library in ("timm", "transformers") and find_spec(named.library) is None:
        raise UserError(needs(value, named.library))


def _check_encoder(kind: Kind, encoder: str, side: SideConfig) -> None:
    """Refuse options of one kind of encoder that make no sense, before any library is imported."""
    library = Named.parse(encoder).library
    forms = _FORMS[kind]
    known = library and "\0" not in encoder and (library != "timm" or kind == "image")
    require(known, f"{kind}_encoder", f"one of {', '.join(forms)}", repr(encoder))
    no_adapters = library == "small" and side.tune == "lora"
    require(not no_adapters, f"{kind}.tune", "full or frozen with the built-in encoder", side.tune)
    require(1 <= side.lora_rank <= 2**16, f"{kind}.lora_rank", "in [1, 65536]", side.lora_rank)
    require(0 < side.lora_alpha <= 1e6, f"{kind}.lora_alpha", "in (0, 1e6]", side.lora_alpha)
    factor = side.learning_rate_factor
    require(factor is None or 0 < factor <= 1e6, f"{kind}.learning_rate_factor", "in (0, 1e6]", factor)
    tokens = getattr(side, "max_tokens", None)
    require(tokens is None or 1 <= tokens <= 2**20, f"{kind}.max_tokens", "in [1, 1048576]", tokens)
    for f in dataclasses.fields(side):
        reason, value = _reason_without_effect(f.name, kind, library, side.tune), getattr(side, f.name)
        require(not reason or value == f.default, f"{kind}.{f.name}", f"left out {reason}", value)


def _reason_without_effect(name: str, kind: str, library: str, tune: Tune) -> str:
    """Return why an option has no effect: the end of a message, or ""."""
    libraries = {"pretrained": ("timm", "transformers"), "pooling": ("transformers",), "max_tokens": ("transformers",),
                 "recompute": ("timm", "transformers", "file")}.get(name)  # fmt: skip
    if libraries is not None and library not in libraries:
        return f"with an encoder of this kind (it is for {', '.join(libraries)})"
    if name.startswith("lora_") and tune != "lora":
        return f"without --{kind}.tune lora"
    if name in ("learning_rate_factor", "recompute") and tune == "frozen":
        return f"with --{kind}.tune frozen"
    return ""

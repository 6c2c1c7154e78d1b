"""What a run is: one frozen dataclass, written beside every run and read back by `--resume`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from .._bounded_json import parse_json
from .._settings import shown
from .._user_error import UserError
from .model import ModelConfig

Loss = Literal[
    "clip", "siglip", "info_nce", "matryoshka", "nt_xent", "sup_con", "dcl", "debiased", "global_contrastive",
    "triplet", "multi_similarity", "circle", "smooth_ap", "barlow_twins", "vicreg", "w_mse",
]  # fmt: skip


Margin = Literal["arcface", "cosface", "sphereface", "normface", "adaface", "magface", "curricularface"]


@dataclass(frozen=True)
class HeadConfig:
    """The classifier of --task identify."""

    margin: Margin = "cosface"
    """What an image's own class has to be better by; docs/classification.md says which is what."""
    scale: float = 16.0
    """Multiplies the cosines."""
    m: float | None = None
    """Size of the margin, in radians or of the cosine. None: that of its paper, but 0.1 for cosface."""
    sample_rate: float = 1.0
    """Of the classes that are not in the batch, the part that is drawn for each step."""
    sub_centers: int = 1
    """Of each class; the one nearest to an image counts."""
    learning_rate: float = 0.01
    """Peak of the learning rate of the centers."""


@dataclass(frozen=True)
class TrainConfig:
    """Train with the exact loss of the global batch: a dual encoder on pairs, or an encoder and a classifier."""

    task: Literal["retrieve", "identify"] = "retrieve"
    """"retrieve": a dual encoder on (image, text) pairs, with CLIP's loss by default, tested on texts never seen.
    "identify": an encoder of images and a classifier whose classes are the texts, tested on images never seen."""
    data: str = "glyphs"
    """"glyphs": images of Unicode characters and their names, made on the spot from the fonts of matplotlib. Or the
    path of a .jsonl or .csv file of (image, text) pairs; image paths are relative to that file."""
    run_folder: Path | None = None
    """Folder of the run: config, metrics, checkpoint, pictures. Default: runs/ and the time of the start."""
    resume: Path | None = None
    """Folder of a run to go on with, from its last checkpoint and with its configuration."""
    processes: int = 1
    """Ranks to start on this machine, each with its share of the cores. Under torchrun its ranks are taken instead."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto": CUDA if there is a GPU for each rank of this machine, else the CPU."""
    steps: int = 300
    """Optimizer steps in all; to identify 450, if not said."""
    batch_size: int = 1024
    """Pairs in the global batch, over all ranks."""
    chunk_size: int = 0
    """Pairs of a rank that are encoded at a time, by gradient caching: the same gradient in less memory. 0: all."""
    learning_rate: float = 2e-3
    """Peak of AdamW's learning rate, reached after the warm-up and taken to 0 by a cosine."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, per unit of learning rate; on matrices only."""
    loss: Loss = "clip"
    """The loss of the global batch, to retrieve; docs/losses.md says which is for what."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the targets of the clip loss or of the classifier, 0 to 1."""
    augment: float = 1.0
    """Strength of the random affine maps of training images: 1 is up to 3.4 degrees, 6 % in size, 1 pixel of 32."""
    image_size: int = 32
    """Height and width of the images, in pixels; a multiple of 8. Files are scaled to fit and padded."""
    image_channels: Literal[1, 3] = 1
    """1: gray, 3: color."""
    validation_texts: int = 325
    """Texts kept for validation, which is made during training; to identify, texts of which one image is kept."""
    test_texts: int = 650
    """Texts kept for the final report, to retrieve. To identify it is two faces, or of a file the last two images of
    each text that has three or more."""
    evaluate_every: int = 50
    """Steps between two validations."""
    checkpoint_every: int = 50
    """Steps between two checkpoints; the last step has one too."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of the data and the augmentation."""
    audit: bool = True
    """At the start, compare the gradient of a few examples with that of the dense loss on one process."""
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def check(self) -> None:
        """Refuse numbers that make no sense, before anything is loaded.

        Raises:
            UserError: with the option's name, what it must be and what it is.
        """
        for name in ("processes", "steps", "batch_size", "image_size", "validation_texts", "test_texts",
                     "evaluate_every", "checkpoint_every"):  # fmt: skip
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name, most in _MOST.items():
            _require(_get(self, name) <= most, name, f"at most {most}", _get(self, name))
        _require("\0" not in self.data, "data", "'glyphs' or a path", repr(self.data))
        for name in ("warmup_steps", "weight_decay", "augment", "chunk_size"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(0 < self.learning_rate <= 1e30, "learning_rate", "in (0, 1e30]", self.learning_rate)
        _require(-(2**63) <= self.seed < 2**63, "seed", "an integer of 64 bits", self.seed)
        _require(self.device in ("auto", "cpu", "cuda"), "device", "'auto', 'cpu' or 'cuda'", self.device)
        _require(self.image_channels in (1, 3), "image_channels", "1 or 3", self.image_channels)
        _require(self.loss in get_args(Loss), "loss", f"one of {', '.join(get_args(Loss))}", self.loss)
        _require(self.task in ("retrieve", "identify"), "task", "'retrieve' or 'identify'", self.task)
        self._check_head()
        only_clip = self.label_smoothing == 0 or self.loss == "clip"
        _require(only_clip, "label_smoothing", f"0 for --loss {self.loss}, which has none", self.label_smoothing)
        _require(0 <= self.label_smoothing <= 1, "label_smoothing", "in [0, 1]", self.label_smoothing)
        _require(self.image_size % 8 == 0, "image_size", "a multiple of 8", self.image_size)
        for name in ("feature_size", "image_width", "text_width", "text_heads", "text_buckets", "max_words"):
            _require(getattr(self.model, name) >= 1, f"model.{name}", "at least 1", getattr(self.model, name))
        _require(self.model.text_layers >= 0, "model.text_layers", "at least 0", self.model.text_layers)
        scale = self.model.initial_logit_scale
        _require(0 < scale <= 100, "model.initial_logit_scale", "in (0, 100]", scale)
        width, heads = self.model.text_width, self.model.text_heads
        _require(width % heads == 0, "model.text_width", f"a multiple of model.text_heads ({heads})", width)
        _require(self.model.image_width % 8 == 0, "model.image_width", "a multiple of 8", self.model.image_width)

    def _check_head(self) -> None:
        head = self.head
        if self.task == "retrieve":
            for f in dataclasses.fields(head):
                _require(getattr(head, f.name) == f.default, f"head.{f.name}", "left out without --task identify",
                         getattr(head, f.name))  # fmt: skip
            return
        _require(self.loss == "clip", "loss", "left out for --task identify, whose loss is --head.margin", self.loss)
        _require(head.margin in get_args(Margin), "head.margin", f"one of {', '.join(get_args(Margin))}", head.margin)
        _require(0 < head.scale <= 1e4, "head.scale", "in (0, 1e4]", head.scale)
        _require(0 <= head.sample_rate <= 1, "head.sample_rate", "in [0, 1]", head.sample_rate)
        _require(head.sub_centers >= 1, "head.sub_centers", "at least 1", head.sub_centers)
        _require(0 < head.learning_rate <= 1e30, "head.learning_rate", "in (0, 1e30]", head.learning_rate)
        local = head.margin not in ("normface", "magface")
        _require(head.m is None or local, "head.m", f"left out for --head.margin {head.margin}", head.m)
        smallest = 1.0 if head.margin == "sphereface" else 0.0
        _require(head.m is None or smallest <= head.m <= 10, "head.m", f"in [{smallest:g}, 10]", head.m)

    def to_json(self) -> str:
        """The configuration as JSON; `from_json` is its inverse."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str, source: Path) -> TrainConfig:
        """Read what `to_json` wrote; `source` is named in errors."""
        try:
            values = parse_json(text.encode(), "its text")
        except ValueError as error:
            raise UserError(f"{source} is not the configuration of a run of this version: {error}") from error
        return cls.from_values(values, source)

    @classmethod
    def from_values(cls, given: Any, source: Path) -> TrainConfig:
        """Read what `to_json` wrote, parsed."""
        try:
            values = dict(given)
            parts = {name: _typed(part(), values.pop(name)) for name, part in _PARTS.items()}
            for name in ("run_folder", "resume"):
                values[name] = None if values[name] is None else Path(values[name])
            values["data"].encode()  # half a character is no path
            config = _typed(cls(), values | parts)
            config.check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{source} is not the configuration of a run of this version: {error}") from error
        return config


_PARTS: dict[str, Any] = {"model": ModelConfig, "head": HeadConfig}
_OPTIONAL: dict[str, tuple[type, ...]] = {"run_folder": (Path,), "resume": (Path,), "m": (float, int)}
_Config = TypeVar("_Config", TrainConfig, ModelConfig, HeadConfig)


def _typed(default: _Config, values: dict[str, Any]) -> _Config:
    """`default` with every field replaced; a value of another type than the default's is a TypeError."""
    names = [f.name for f in dataclasses.fields(default)]
    if sorted(values) != sorted(names):
        raise TypeError(f"expected the fields {sorted(names)}, got {sorted(values)}")
    for name in names:
        expected, value = type(getattr(default, name)), values[name]
        if expected is type(None):
            fits = value is None or (isinstance(value, _OPTIONAL[name]) and not isinstance(value, bool))
        else:
            fits = type(value) is expected or (expected is float and type(value) is int)
        if not fits:
            of = _OPTIONAL[name][0] if expected is type(None) else expected
            raise TypeError(f"{name} must be {of.__name__}, got {shown(value)}")
    return dataclasses.replace(default, **values)


# Larger ones are mistakes: they would take all of a machine's memory or processes before anything else complains.
_MOST = {
    "processes": 4096, "steps": 10**9, "batch_size": 2**31, "chunk_size": 2**31, "warmup_steps": 10**12,
    "image_size": 4096, "model.feature_size": 2**16, "model.image_width": 2**12, "model.text_width": 2**16,
    "model.text_layers": 2**10, "model.text_buckets": 2**26, "model.max_words": 2**16, "head.sub_centers": 2**10,
}  # fmt: skip

# What a task begins with, where that is not what the fields above say.
DEFAULTS = {
    "retrieve": TrainConfig(),
    "identify": TrainConfig(task="identify", steps=450),
}

# May change between a run and its continuation: they do not change what is computed.
_FREE_ON_RESUME = ("run_folder", "resume", "processes", "device", "chunk_size", "audit")


def check_same_run(saved: TrainConfig, asked: TrainConfig) -> None:
    """Raise UserError if `asked` differs from the `saved` configuration in anything that changes the numbers."""
    differences = [
        f"{name} was {_get(saved, name)!r}, got {_get(asked, name)!r}"
        for name in _names(saved)
        if name not in _FREE_ON_RESUME and _get(saved, name) != _get(asked, name)
    ]
    if differences:
        raise UserError(
            f"--resume goes on with the configuration of the run: {'; '.join(differences)}. "
            "Leave these options out, or start a new run"
        )


def _names(config: TrainConfig) -> list[str]:
    local = [f.name for f in dataclasses.fields(config) if f.name not in _PARTS]
    return local + [f"{part}.{f.name}" for part in _PARTS for f in dataclasses.fields(getattr(config, part))]


def _get(config: TrainConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"--{name.replace('_', '-')} must be {expected}, got {got}")

"""The configuration of a run: one frozen dataclass, written beside every run and read back by `--resume`.

This module imports no torch: --help and mistakes in options need only the configuration.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from .._bounded_json import parse_json
from .._declared_names import LOSS_NAMES
from .._settings import shown
from .._user_error import UserError, option
from .encoder_options import SideConfig, TextSideConfig, check_encoder

LOSSES = (*LOSS_NAMES, "global_contrastive")
if TYPE_CHECKING:
    Loss = str
    ChunkSize = int  # "auto" is replaced by a number before any other module reads it
else:
    Loss = Literal[LOSSES]
    ChunkSize = int | Literal["auto"]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
Margin = Literal["arcface", "cosface", "sphereface", "normface", "adaface", "magface", "curricularface"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the two encoders."""

    embedding_size: int = 256
    """Length of the embedding of an image or a text."""
    image_width: int = 64
    """Channels after the first convolution, at a quarter of the resolution; doubled at an eighth."""
    text_width: int = 128
    """Length of a word vector."""
    text_layers: int = 0
    """Transformer layers over the words; 0: only the mean of the words, which learns names of characters fastest."""
    text_heads: int = 4
    """Attention heads of each layer; must divide --model.text-width."""
    text_buckets: int = 16384
    """Rows of the table of hashed word pieces."""
    max_words: int = 12
    """Words of a text that are read; the rest is cut off."""
    initial_logit_scale: float = 14.3
    """Scale of the similarities before the first step (1 / temperature)."""


@dataclass(frozen=True)
class HeadConfig:
    """The classifier of --task identify."""

    margin: Margin = "cosface"
    """The margin by which an image's true class must win; docs/classification.md explains each."""
    scale: float = 16.0
    """Factor of the cosines."""
    m: float | None = None
    """Size of the margin, in radians or as a cosine. None: the default of its paper, but 0.1 for cosface."""
    sample_rate: float = 1.0
    """Fraction of the classes absent from the batch that each step samples."""
    sub_centers: int = 1
    """Centers of each class; the one nearest to an image counts."""
    learning_rate: float = 0.01
    """Peak of the learning rate of the centers."""


@dataclass(frozen=True)
class TrainConfig:
    """Train with the exact loss of the global batch: a dual encoder on pairs, or an encoder and a classifier."""

    task: Literal["retrieve", "identify"] = "retrieve"
    """"retrieve": a dual encoder of (image, text) pairs, by default with CLIP's loss, tested on texts never seen.
    "identify": an image encoder and a classifier whose classes are the texts, tested on images never seen."""
    data: str = "glyphs"
    """"glyphs": images of Unicode characters and their names, drawn at the start with the fonts of matplotlib.
    Or a path: a .csv, .tsv, .jsonl or .parquet file (paths of images are relative to it), a folder of pictures, tar
    shards (a .tar file, a folder of them, "shards/{000..099}.tar"), or a data set saved by the library datasets."""
    columns: str = ""
    """Columns of the data by their roles, "image=filepath,text=title". Roles: image and text, or query, positive and
    negatives, or label, whose usual names are recognized without this; and group: rows with an equal value in it are
    positives of each other, "group=product_id"."""
    skip_bad: bool = False
    """Leave out rows whose picture cannot be read; left_out.csv of the run folder lists them. All pictures are read
    once to find them, and again when a file of theirs changes."""
    workers: int = -1
    """Processes of each rank that read pictures ahead. -1: as many as the rank has cores, at most 8; 0: none."""
    run_folder: Path | None = None
    """Folder of the run: configuration, metrics, checkpoint, pictures. None: runs/ and the time of the start."""
    config: Path | None = None
    """TOML file of options, `steps = 600` or `[model]`, or the config.json of a run; the command line has precedence.
    Paths in it are relative to its folder."""
    resume: Path | None = None
    """Folder of a run to resume from its last checkpoint, with its configuration."""
    until_step: int | None = None
    """With --resume: train until this step, more than the run has had. The learning rate goes on along the cosine of
    so many steps, reached over --warmup-steps steps."""
    ranks: int = 1
    """Processes to start on this machine, each with its share of the cores. torchrun decides this by itself."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto": CUDA if this machine has a GPU for each of its ranks, else the CPU."""
    steps: int = 300
    """Optimizer steps in all; the default of --task identify is 450."""
    batch_size: int = 0
    """Examples in the global batch, over all ranks. 0: 1024, or the largest power of two that the data allow."""
    chunk_size: ChunkSize = 0
    """Rows that a rank encodes at a time, by gradient caching: the same gradient in less memory. 0: all.
    "auto": the largest power of two whose measured memory is at most half of the free memory, or all."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the encoders' products. tf32 and fp16 need a GPU. Weights, gradients and sums stay in float32."""
    compile: bool = False
    """Compile the encoders with torch.compile; without --chunk-size only."""
    learning_rate: float = 2e-3
    """Peak of AdamW's learning rate, reached after the warm-up and reduced to 0 along a cosine."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, per unit of learning rate; on matrices only."""
    loss: Loss = "clip"
    """The loss of the global batch for --task retrieve; docs/losses.md helps to choose."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the targets of the clip loss or of the classifier, 0 to 1."""
    fsdp: bool = False
    """Keep weights, gradients and the optimizer's state in parts, one on each rank (FSDP2): for encoders that do not
    fit. The numbers are the same."""
    augment: float = 1.0
    """Strength of the random affine maps of training images: 1 is up to 3.4 degrees, 6 % in size, 1 pixel of 32."""
    image_size: int = 0
    """Height and width of the images, in pixels; a multiple of 8. Images of files are scaled to fit and padded.
    0: 32 for the embedded characters, else as the pictures are, at most 64."""
    image_channels: Literal[0, 1, 3] = 0
    """1: gray, 3: color, 0: as the pictures are."""
    validation_texts: int = 0
    """Texts held out for validation during training; for --task identify, texts of which one image is held out.
    0: one in twenty, at most 325."""
    test_texts: int = 0
    """Texts held out for the final report of --task retrieve. 0: one in ten, at most 650.
    --task identify holds out two faces, or the last two images of each text in a file that has three or more."""
    validate_every: int = 50
    """Steps between two validations."""
    checkpoint_every: int = 50
    """Steps between two checkpoints; the last step has one too."""
    patience: int = 0
    """End after so many validations without a better headline figure. 0: never."""
    keep_best: bool = False
    """Keep the weights of the best validation in best.safetensors; --patience does so, too."""
    tensorboard: bool = True
    """Write TensorBoard event files into the folder tensorboard/ of the run, where tensorboard is installed."""
    wandb: str | None = None
    """Project of Weights & Biases to log to, where wandb is installed. None: do not."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of the data and the augmentation."""
    audit: bool = True
    """Before training, compare the gradient of a few examples with that of the dense loss on one process."""
    image_encoder: str = "small"
    """Encoder of images: "small", timm:NAME, transformers:NAME (in the local cache, or a folder), or FILE.py:FUNCTION,
    a function of yours that returns a module; docs/training.md says what the module must have."""
    text_encoder: str = "small"
    """Encoder of texts: "small", transformers:NAME, or FILE.py:FUNCTION."""
    two_encoders: bool = False
    """Queries and documents have an encoder each, both as --text-encoder says. no: they share one."""
    image: SideConfig = field(default_factory=SideConfig)
    text: TextSideConfig = field(default_factory=TextSideConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    @property
    def has_automatic_chunks(self) -> bool:
        """Whether the chunk size is "auto"."""
        return str(self.chunk_size) == "auto"

    def check(self) -> None:
        """Refuse values that make no sense, before anything is loaded.

        Raises:
            UserError: with the option's name, the accepted values and the value.
        """
        for name in ("ranks", "steps", "validate_every", "checkpoint_every"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name, largest in _LARGEST.items():
            if value_of(self, name) == "auto":
                continue
            _require(value_of(self, name) <= largest, name, f"at most {largest}", value_of(self, name))
        _require("\0" not in self.data, "data", "'glyphs' or a path", repr(self.data))
        for name in (
            "warmup_steps", "patience", "batch_size", "image_size", "validation_texts", "test_texts",
        ):  # fmt: skip
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(
            self.has_automatic_chunks or self.chunk_size >= 0, "chunk_size", "at least 0, or auto", self.chunk_size
        )
        # Gradient caching observes the calls of modules by hooks, for which torch would compile in every step again.
        both = self.compile and (self.has_automatic_chunks or self.chunk_size > 0)
        _require(not both, "compile", f"left out with --chunk-size {self.chunk_size}", self.compile)
        _require(self.precision in PRECISIONS, "precision", f"one of {', '.join(PRECISIONS)}", self.precision)
        _require(self.workers >= -1, "workers", "at least 0, or -1 for as many as there are cores", self.workers)
        for name in ("weight_decay", "augment"):
            _require(0 <= getattr(self, name) <= 1e30, name, "in [0, 1e30]", getattr(self, name))
        until, most = self.until_step, _LARGEST["steps"]
        _require(until is None or 1 <= until <= most, "until_step", f"from 1 to {most}", until)
        _require(until is None or self.resume is not None, "until_step", "given with --resume, to extend a run", until)
        _require(self.wandb is None or self.wandb.strip() != "", "wandb", "the name of a project", repr(self.wandb))
        _require(0 < self.learning_rate <= 1e30, "learning_rate", "in (0, 1e30]", self.learning_rate)
        _require(-(2**63) <= self.seed < 2**63, "seed", "an integer of 64 bits", self.seed)
        _require(self.device in ("auto", "cpu", "cuda"), "device", "'auto', 'cpu' or 'cuda'", self.device)
        _require(self.image_channels in (0, 1, 3), "image_channels", "1, 3 or 0", self.image_channels)
        glyphs_in_color = self.data == "glyphs" and self.image_channels == 3
        _require(not glyphs_in_color, "image_channels", "1 for --data glyphs, which are gray", self.image_channels)
        _require(self.image_size % 8 == 0, "image_size", "a multiple of 8", self.image_size)
        _require(self.task in ("retrieve", "identify"), "task", "'retrieve' or 'identify'", self.task)
        _require(self.loss in LOSSES, "loss", f"one of {', '.join(LOSSES)}", self.loss)
        without_negatives = self.task == "retrieve" and self.batch_size == 1
        _require(
            not without_negatives, "batch_size", "at least 2, because a pair alone has no negatives", self.batch_size
        )
        has_smoothing = self.label_smoothing == 0 or self.loss == "clip"
        _require(has_smoothing, "label_smoothing", f"0 for --loss {self.loss}, which has none", self.label_smoothing)
        _require(0 <= self.label_smoothing <= 1, "label_smoothing", "in [0, 1]", self.label_smoothing)
        self._check_model()
        check_encoder("image", self.image_encoder, self.image)
        check_encoder("text", self.text_encoder, self.text)
        self._check_head()

    def _check_model(self) -> None:
        model = self.model
        for name in ("embedding_size", "image_width", "text_width", "text_heads", "text_buckets", "max_words"):
            _require(getattr(model, name) >= 1, f"model.{name}", "at least 1", getattr(model, name))
        _require(model.text_layers >= 0, "model.text_layers", "at least 0", model.text_layers)
        scale = model.initial_logit_scale
        _require(0 < scale <= 100, "model.initial_logit_scale", "in (0, 100]", scale)
        heads, width = model.text_heads, model.text_width
        _require(width % heads == 0, "model.text_width", f"a multiple of --model.text-heads ({heads})", width)
        _require(model.image_width % 8 == 0, "model.image_width", "a multiple of 8", model.image_width)

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
        has_size = head.margin not in ("normface", "magface")
        _require(head.m is None or has_size, "head.m", f"left out for --head.margin {head.margin}", head.m)
        smallest = 1.0 if head.margin == "sphereface" else 0.0
        _require(head.m is None or smallest <= head.m <= 10, "head.m", f"in [{smallest:g}, 10]", head.m)

    def to_json(self) -> str:
        """The configuration as JSON; `from_json` is its inverse."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str, source: Path) -> TrainConfig:
        """Read the text that `to_json` wrote; errors name its `source`."""
        try:
            values = parse_json(text.encode(), "its text")
        except ValueError as error:
            raise UserError(f"{source} is not the configuration of a run of this version: {error}") from error
        return cls.from_values(values, source)

    @classmethod
    def from_values(cls, given: Any, source: Path) -> TrainConfig:
        """Read the parsed values that `to_json` wrote; errors name their `source`."""
        try:
            values = dict(given)
            parts = {name: _typed(part(), values.pop(name)) for name, part in _PARTS.items()}
            for name in PATHS:
                values[name] = None if values[name] is None else Path(values[name])
            values["data"].encode()  # half of a surrogate pair is no path
            config = _typed(cls(), values | parts)
            config.check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{source} is not the configuration of a run of this version: {error}") from error
        return config


_PARTS: dict[str, Any] = {"image": SideConfig, "text": TextSideConfig, "model": ModelConfig, "head": HeadConfig}
PATHS = ("run_folder", "config", "resume")
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(PATHS, (Path,)), "until_step": (int,), "wandb": (str,), "m": (float, int),
    "learning_rate_factor": (float, int), "max_tokens": (int,),
}  # fmt: skip
_Config = TypeVar("_Config", TrainConfig, ModelConfig, HeadConfig, SideConfig, TextSideConfig)


def _typed(default: _Config, values: dict[str, Any]) -> _Config:
    """Return `default` with every field replaced; a value of another type than the default's is a TypeError."""
    names = [f.name for f in dataclasses.fields(default)]
    if sorted(values) != sorted(names):
        raise TypeError(f"expected the fields {sorted(names)}, got {sorted(values)}")
    for name in names:
        expected, value = type(getattr(default, name)), values[name]
        if expected is type(None):
            fits = value is None or (isinstance(value, _OPTIONAL[name]) and not isinstance(value, bool))
        else:
            is_auto = name == "chunk_size" and value == "auto"
            fits = type(value) is expected or (expected is float and type(value) is int) or is_auto
        if not fits:
            of = _OPTIONAL[name][0] if expected is type(None) else expected
            raise TypeError(f"{name} must be {of.__name__}, got {shown(value)}")
    return dataclasses.replace(default, **values)


# Larger values are mistakes: they would exhaust a machine's memory or processes before any other check.
_LARGEST = {
    "ranks": 4096, "workers": 256, "steps": 10**9, "batch_size": 2**31, "chunk_size": 2**31, "warmup_steps": 10**12,
    "patience": 10**9,
    "image_size": 4096, "model.embedding_size": 2**16, "model.image_width": 2**12, "model.text_width": 2**16,
    "model.text_layers": 2**10, "model.text_buckets": 2**26, "model.max_words": 2**16, "head.sub_centers": 2**10,
}  # fmt: skip

# Defaults of a task, where they differ from the fields above.
DEFAULTS = {
    "retrieve": TrainConfig(),
    "identify": TrainConfig(task="identify", steps=450),
}


GLYPHS = {"batch_size": 1024, "image_size": 32, "image_channels": 1, "validation_texts": 325, "test_texts": 650}
"""What 0 means in these fields for the embedded characters."""


def for_glyphs(config: TrainConfig) -> TrainConfig:
    """Return a configuration for the embedded characters in which nothing is left to the data."""
    chosen: dict[str, Any] = {name: getattr(config, name) or each for name, each in GLYPHS.items()}
    return dataclasses.replace(config, **chosen)


def differences(saved: TrainConfig, asked: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, as {name: (saved value, asked value)}; a field of a part is PART.NAME."""
    values = {name: (value_of(saved, name), value_of(asked, name)) for name in names_of(saved)}
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


def names_of(config: TrainConfig) -> list[str]:
    """Return the name of every option; an option of a part is PART.NAME."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in _PARTS]
    return names + [f"{part}.{f.name}" for part in _PARTS for f in dataclasses.fields(getattr(config, part))]


def value_of(config: TrainConfig, name: str) -> Any:
    """Return the value of an option by its name."""
    return reduce(getattr, name.split("."), config)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"{option(name)} must be {expected}, got {got}")

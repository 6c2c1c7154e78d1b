"""The configuration of a run: one frozen dataclass, whose fields are the options of `wholebatch train`.

`option_checks` refuses values that make no sense; `config_file` reads a configuration, and writes that of a run.
This module imports no torch: --help and mistakes in options need only the configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wholebatch.app import LOSS_NAMES

LOSSES = (*LOSS_NAMES, "global_contrastive")
if TYPE_CHECKING:
    Loss = str
    ChunkSize = int  # "auto" is replaced by a number before any other module reads it
else:
    Loss = Literal[LOSSES]
    ChunkSize = int | Literal["auto"]

Margin = Literal["arcface", "cosface", "sphereface", "normface", "adaface", "magface", "curricularface"]
Kind = Literal["image", "text"]
"""The items of a side, which its encoder reads."""
Pooling = Literal["auto", "cls", "mean", "last"]
Tune = Literal["full", "frozen", "lora"]


@dataclass(frozen=True)
class SideConfig:
    """How an encoder of images starts, pools and is tuned; --model has the sizes of "small"."""

    pretrained: bool = True
    """Start a model of a library from its pretrained weights, which must be on this machine. no: from random ones."""
    pooling: Pooling = "auto"
    """The row of a sequence: of its first token, the mean of its tokens, or of its last token.
    "auto": as the model's own files say, or else as this kind of model usually has it."""
    tune: Tune = "full"
    """The weights to train: all, none, or adapters of low rank beside the linear layers (LoRA, which needs peft)."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Factor of an adapter's product, divided by the rank."""
    lora_targets: str = "auto"
    """Layers with adapters: ends of their names, separated by commas. "auto": all linear layers."""
    learning_rate_factor: float | None = None
    """Factor of --learning-rate for this encoder. None: 0.01 for pretrained weights, 0.1 for adapters, else 1."""
    recompute: bool = False
    """Keep fewer activations, and compute them again in the backward pass (activation checkpointing)."""


@dataclass(frozen=True)
class TextSideConfig(SideConfig):
    """How an encoder of texts starts, pools, cuts off and is tuned; --model has the sizes of "small"."""

    max_tokens: int | None = None
    """Tokens of a text that are read; the rest is cut off. None: as many as the model reads."""


@dataclass(frozen=True)
class Named:
    """The parts of `--image-encoder` or `--text-encoder`: a form that `option_checks` lists, and what follows its name.

    >>> Named.parse("timm:resnet18"), Named.parse("mine.py:make")
    (Named(library='timm', name='resnet18', function=''), Named(library='file', name='mine.py', function='make'))
    """

    library: Literal["small", "timm", "transformers", "file", ""]
    """"": none of these."""
    name: str = ""
    function: str = ""

    @classmethod
    def parse(cls, text: str) -> Named:
        """Return the parts of the option's text."""
        before, _, function = text.rpartition(":")
        if before.endswith(".py") and function.isidentifier():
            return cls("file", before, function)
        library, _, name = text.partition(":")
        if library == "timm" and name.strip():
            return cls("timm", name)
        if library == "transformers" and name.strip():
            return cls("transformers", name)
        return cls("small" if text == "small" else "")


def absolute(encoder: str, base: Path) -> str:
    """Return the text of an option with an absolute path, of a file or of an existing folder, seen from `base`.

    >>> absolute("mine.py:make", Path("/home/me")), absolute("timm:resnet18", Path("/home/me"))
    ('/home/me/mine.py:make', 'timm:resnet18')
    """
    named = Named.parse(encoder)
    path = base.absolute() / named.name
    if named.library == "file":
        return f"{path}:{named.function}"
    is_folder = named.library in ("timm", "transformers") and path.is_dir()
    return f"{named.library}:{path}" if is_folder else encoder


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
    max_words: int = 0
    """Words of a text that are read; the rest is cut off. 0: as many as 99 of 100 texts to train on have, from 12 to
    128; 12 for the embedded characters."""
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
    """Train with the exact loss of the global batch: a dual encoder on pairs, or an encoder and a classifier.

    Start here: --data with a table or a folder of pictures, or nothing at all; then --steps and --batch-size.
    """

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
    """Leave out rows without a text, or whose picture cannot be read; left_out.csv of the run folder lists them. All
    pictures are read once to find them, and again when a file of theirs changes."""
    workers: int = -1
    """Processes of each rank that read pictures ahead. -1: as many as the rank has cores, at most 8; 0: none."""
    run_folder: Path | None = None
    """Folder of the run: configuration, metrics, checkpoint, pictures. None: runs/ and the time of the start."""
    config: Path | None = None
    """TOML file of options, `steps = 600` or `[model]`, or the config.json of a run; the command line has precedence.
    Paths in it are relative to its folder."""
    resume: Path | None = None
    """Folder of a run to resume from its last checkpoint, with its configuration."""
    trust: bool = False
    """Execute an encoder's Python file that --resume or --config names. One that is named here needs no --trust."""
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
    """Examples in the global batch, over all ranks. 0: 1024, or of fewer than 4096 to train on a power of two: at most
    a quarter of them, or at most 64."""
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
    """Texts held out for validation during training; for --task identify images, of each text one before any other.
    0: one in twenty, at most 325; of --task identify one image in twenty, or, if a text has fewer than ten on average,
    one of one text in twenty."""
    test_texts: int = 0
    """Texts held out for the final report of --task retrieve. 0: one in ten, at most 650.
    --task identify holds out two faces, or of each text in a file that has three images or more the last two, or
    the last tenth; of many fewer, so that all are about 10,000."""
    validate_every: int = 50
    """Steps between two validations."""
    checkpoint_every: int = 50
    """Steps between two checkpoints; the last step has one too."""
    patience: int = 0
    """End after so many validations without a better headline figure. 0: never."""
    keep_best: bool = True
    """Keep the weights of the best validation in best.safetensors; --patience does so in any case."""
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
    a function of yours that returns a module; docs/training_encoders.md says what the module must have."""
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


PARTS: dict[str, Any] = {"image": SideConfig, "text": TextSideConfig, "model": ModelConfig, "head": HeadConfig}
"""The fields that are configurations themselves."""

# Defaults of a task, where they differ from the fields above.
DEFAULTS = {"retrieve": TrainConfig(), "identify": TrainConfig(task="identify", steps=450)}


GLYPHS = {"batch_size": 1024, "image_size": 32, "image_channels": 1, "validation_texts": 325, "test_texts": 650}
"""What 0 means in these fields for the embedded characters."""


def for_glyphs(config: TrainConfig) -> TrainConfig:
    """Return a configuration for the embedded characters in which nothing is left to the data."""
    chosen: dict[str, Any] = {name: getattr(config, name) or each for name, each in GLYPHS.items()}
    return dataclasses.replace(config, **chosen)


def files_of_encoders(config: TrainConfig) -> list[str]:
    """Return the options that name a Python file, which is executed."""
    options = {"--image-encoder": config.image_encoder, "--text-encoder": config.text_encoder}
    return [f"{name} {value}" for name, value in options.items() if Named.parse(value).library == "file"]


def differences(saved: TrainConfig, asked: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, as {name: (saved value, asked value)}; a field of a part is PART.NAME."""
    values = {name: (value_of(saved, name), value_of(asked, name)) for name in names_of(saved)}
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


def names_of(config: TrainConfig) -> list[str]:
    """Return the name of every option; an option of a part is PART.NAME."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in PARTS]
    return names + [f"{part}.{f.name}" for part in PARTS for f in dataclasses.fields(getattr(config, part))]


def value_of(config: TrainConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)

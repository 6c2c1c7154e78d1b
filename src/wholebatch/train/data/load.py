"""The data of `--data`, loaded and split for the task, and the task made from them."""

from __future__ import annotations

from pathlib import Path

import torch

from ..._user_error import UserError
from ..config import TrainConfig
from ..identify import Identify
from ..retrieve import Retrieve
from ..task import Task
from .files import file_pairs
from .glyphs import glyph_classes, glyph_pairs
from .labeled import LabeledImages, classes_of_texts
from .pairs import Pairs, Split, split_by_text

Data = tuple[Pairs, Split] | LabeledImages


def load_data(config: TrainConfig, size: int) -> Data:
    """Load pairs split by text for --task retrieve, or labeled images for --task identify.

    Args:
        config: the configuration of the run.
        size: number of ranks.
    """
    glyphs = config.data == "glyphs"
    return _classes(config, glyphs, size) if config.task == "identify" else _pairs(config, glyphs)


def make_task(
    config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int, dense: bool = False
) -> Task:
    """Make this rank's part of the task; if `dense`, with a loss that this process computes alone."""
    if isinstance(data, LabeledImages):
        return Identify(config, data, device, rank=rank, size=size, dense=dense)
    return Retrieve(config, *data, device, rank=rank, size=size, dense=dense)


def _pairs(config: TrainConfig, glyphs: bool) -> tuple[Pairs, Split]:
    pairs = glyph_pairs(config.image_size) if glyphs else _file(config)
    split = split_by_text(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    if len(split.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many texts to train on, got {len(split.train)}: the data have "
            f"{len(pairs)} different texts, less {config.validation_texts} for validation and {config.test_texts} for "
            f"test. Lower --batch-size, --validation-texts or --test-texts{_that_fit(config, len(pairs))}"
        )
    return pairs, split


def _that_fit(config: TrainConfig, texts: int) -> str:
    """Return options that fit a number of texts, as the end of an error; "" where there are too few texts for any.

    One text in 20 is for validation and one in ten for the test, or as few as asked for; the batch is a power of two.
    """
    validation, test = min(config.validation_texts, texts // 20), min(config.test_texts, texts // 10)
    batch = min(config.batch_size, 1 << max(0, (texts - validation - test).bit_length() - 1))
    if not (validation and test and batch >= 2):
        return ""
    return f", for instance: --batch-size {batch} --validation-texts {validation} --test-texts {test}"


def _classes(config: TrainConfig, glyphs: bool, size: int) -> LabeledImages:
    held_out = {"validation": config.validation_texts, "seed": config.seed}
    data = glyph_classes(config.image_size, **held_out) if glyphs else classes_of_texts(_file(config), **held_out)
    if len(data.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many images to train on, got {len(data.train)}, of "
            f"{len(data)} texts. Lower --batch-size"
        )
    if len(data) < max(2, size):
        raise UserError(
            f"--data has {len(data)} texts to be classes; expected at least {max(2, size)}: each of the {size} ranks "
            "needs one, and there must be two"
        )
    return data


def _file(config: TrainConfig) -> Pairs:
    return file_pairs(Path(config.data), image_size=config.image_size, channels=config.image_channels)

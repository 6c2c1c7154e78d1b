"""From `--data` to what the task trains with."""

from __future__ import annotations

from pathlib import Path

import torch

from .._user_error import UserError
from .config import TrainConfig
from .files import file_pairs
from .glyphs import glyph_classes, glyph_pairs
from .identify import Identify
from .labeled import LabeledImages, classes_of_texts
from .pairs import Pairs, Split, split_by_text
from .retrieve import Retrieve
from .task import Task

Data = tuple[Pairs, Split] | LabeledImages


def load_data(config: TrainConfig, size: int) -> Data:
    """All pairs, and which texts are for training, validation and test; or all images of classes, and which are.

    Args:
        config: of the run.
        size: how many ranks there are.
    """
    glyphs = config.data == "glyphs"
    if glyphs and config.image_channels != 1:
        raise UserError("--data glyphs are gray: --image-channels must be 1")
    return _classes(config, glyphs, size) if config.task == "identify" else _pairs(config, glyphs)


def make_task(
    config: TrainConfig, data: Data, device: torch.device, *, rank: int, size: int, dense: bool = False
) -> Task:
    """What is to be trained, this rank's part of it; with `dense`, by a loss that computes all on this process."""
    if isinstance(data, LabeledImages):
        return Identify(config, data, device, rank=rank, size=size, dense=dense)
    return Retrieve(config, *data, device, rank=rank, size=size, dense=dense)


def _pairs(config: TrainConfig, glyphs: bool) -> tuple[Pairs, Split]:
    pairs = glyph_pairs(config.image_size) if glyphs else _file(config)
    split = split_by_text(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    if len(split.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many texts to train on, got {len(split.train)}: the data hold "
            f"{len(pairs)} different texts, less {config.validation_texts} for validation and {config.test_texts} for "
            "test. Lower --batch-size, --validation-texts or --test-texts"
        )
    return pairs, split


def _classes(config: TrainConfig, glyphs: bool, size: int) -> LabeledImages:
    how = {"validation": config.validation_texts, "seed": config.seed}
    data = glyph_classes(config.image_size, **how) if glyphs else classes_of_texts(_file(config), **how)
    if len(data.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many images to train on, got {len(data.train)}, of "
            f"{len(data)} texts. Lower --batch-size"
        )
    if len(data) < max(2, size):
        raise UserError(
            f"there are {len(data)} classes, which are too few: each of the {size} processes needs one, and there must "
            "be two"
        )
    return data


def _file(config: TrainConfig) -> Pairs:
    return file_pairs(Path(config.data), image_size=config.image_size, channels=config.image_channels)

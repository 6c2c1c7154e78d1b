"""From `--data` to pairs and their split."""

from __future__ import annotations

from pathlib import Path

from .._user_error import UserError
from .config import TrainConfig
from .files import file_pairs
from .glyphs import glyph_pairs
from .pairs import Pairs, Split, split_by_text


def load_data(config: TrainConfig) -> tuple[Pairs, Split]:
    """All pairs, and which texts are for training, validation and test."""
    if config.data == "glyphs":
        if config.image_channels != 1:
            raise UserError("--data glyphs are grey: --image-channels must be 1")
        pairs = glyph_pairs(config.image_size)
    else:
        pairs = file_pairs(Path(config.data), image_size=config.image_size, channels=config.image_channels)
    split = split_by_text(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    if len(split.train) < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} needs as many texts to train on, got {len(split.train)}: the data hold "
            f"{len(pairs)} different texts, less {config.validation_texts} for validation and {config.test_texts} for "
            "test. Lower --batch-size, --validation-texts or --test-texts"
        )
    return pairs, split

"""The data of `--data`, loaded and split for the task, and the options that 0, or a default, leaves to them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from wholebatch.app import UserError

from ..config import TrainConfig, for_glyphs
from ..encoders.small import FEWEST_WORDS
from ..encoders.words import split_words
from .classes import LabeledImages, classes_of_texts, glyph_classes, glyph_pairs
from .from_table import table_pairs
from .open_table import open_table
from .pairs import Pairs, Split, rows_of_ids, split_groups

Data = tuple[Pairs, Split] | LabeledImages
_LARGE = 10  # images of a class, on average
_SAMPLE = 64  # pictures that are looked at for the size and the colors
_FEW = 20  # texts of a test
_SIZES = (64, 48, 32)
_TEXTS = 10_000  # whose words are counted
_MOST_WORDS = 128  # the memory of a text grows with them


def load_data(config: TrainConfig, size: int, say: Callable[[str], None] = lambda _: None) -> tuple[TrainConfig, Data]:
    """Return the configuration with all choices made, and the data: pairs split by text, or labeled images."""
    if config.data == "glyphs":
        config = for_glyphs(config)
        if config.task == "identify":
            data = glyph_classes(config.image_size, validation=config.validation_texts, seed=config.seed)
            return with_batch(config, len(data.train), size, "images", lambda _: None), data
        pairs = glyph_pairs(config.image_size)
    else:
        table = open_table(config.data, say)
        pairs = table_pairs(table, config, say)
        left_out = {each.place for each in pairs.left_out}
        examples = (row for row in range(len(table)) if table.where(row) not in left_out)
        for row in table.arrow.select(table.names).take([*islice(examples, 3)]).to_pylist():
            say(textwrap.shorten(f"for example {row}", 200, placeholder=" ..."))
    config = with_loss(with_pictures(config, pairs, say), pairs, say)
    if config.task == "identify":
        return _classes(config, pairs, size, say)
    config = with_split_sizes(config, pairs, say)
    split = split_groups(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    if pairs.ids is not None:
        for groups in (split.validation, split.test):  # refuses ids of classes now, not in the first validation
            rows_of_ids(pairs.ids[torch.isin(pairs.group_of, groups).nonzero()[:, 0]])
    config = with_words(config, pairs, split, say)
    pairs = _drop_held_out(pairs, split, say)
    return with_batch(config, len(split.train), size, "groups", say), (pairs, split)


def _drop_held_out(pairs: Pairs, split: Split, say: Callable[[str], None]) -> Pairs:
    """Leave out the negatives that are texts of held-out rows, so that no held-out text is trained on in any role."""
    if pairs.negatives is None:
        return pairs
    rows = torch.isin(pairs.group_of, torch.cat([split.validation, split.test])).nonzero()[:, 0]
    left = pairs.negatives.without(torch.cat([numbers[rows] for numbers in pairs.numbers.values()]))
    if len(left) < len(pairs.negatives):
        say(f"{len(pairs.negatives) - len(left):,} mined negatives are left out: texts of held-out rows")
    return replace(pairs, negatives=left)


def _classes(
    config: TrainConfig, pairs: Pairs, size: int, say: Callable[[str], None]
) -> tuple[TrainConfig, LabeledImages]:
    validation = config.validation_texts or images_for_validation(len(pairs), len(pairs.order))
    data = classes_of_texts(pairs, validation=validation, seed=config.seed, at_most=not config.validation_texts)
    if not config.validation_texts:
        config = replace(config, validation_texts=len(data.validation))
        many = "pictures" if config.validation_texts > 1 else "picture"
        say(f"{config.validation_texts} {many} for validation, which the run does not learn (--validation-texts)")
    if len(data) < max(2, size):
        raise UserError(
            f"--data has {len(data)} texts to be classes; expected at least {max(2, size)}: each of the {size} ranks "
            "needs one, and there must be two"
        )
    return with_batch(config, len(data.train), size, "images", say), data


def with_pictures(config: TrainConfig, pairs: Pairs, say: Callable[[str], None]) -> TrainConfig:
    """Choose the size and the colors of the built-in encoder's pictures from a sample of the user's."""
    side = pairs.sides.get("image")
    is_decided = config.image_size and config.image_channels
    if side is None or config.image_encoder != "small" or is_decided:  # others have a size and channels of their own
        return config
    rows = pairs.order[torch.linspace(0, len(pairs.order) - 1, min(_SAMPLE, len(pairs.order))).long()]
    pictures = side.items(rows)
    if not config.image_size:
        shorter = statistics.median(min(picture.size) for picture in pictures)
        size = next((size for size in _SIZES if size <= shorter), _SIZES[-1])
        say(f"pictures become {size} x {size}: the shorter side of theirs is {shorter:g} (--image-size)")
        config = replace(config, image_size=size)
    if not config.image_channels:
        colored = any(_has_colors(picture) for picture in pictures)
        say(f"pictures are {'in color' if colored else 'gray'} (--image-channels)")
        config = replace(config, image_channels=3 if colored else 1)
    return config


def _has_colors(picture: Any) -> bool:
    if picture.mode == "L":
        return False
    red, green, blue = picture.split()
    return red.tobytes() != green.tobytes() or green.tobytes() != blue.tobytes()


def with_loss(config: TrainConfig, pairs: Pairs, say: Callable[[str], None]) -> TrainConfig:
    """Choose InfoNCE where the data have mined negatives, which no other loss of `--loss` uses."""
    if pairs.negatives is None or config.loss == "info_nce":
        return config
    if config.loss != "clip":
        raise UserError(
            f"--loss {config.loss} has no mined negatives, which --data has; use --loss info_nce, or leave them out by "
            "--columns query=NAME,positive=NAME of a table without them"
        )
    if config.label_smoothing:
        raise UserError(f"--label-smoothing must be 0 with mined negatives, got {config.label_smoothing}")
    say("loss info_nce: each query among the documents and the mined negatives of the batch (--loss)")
    return replace(config, loss="info_nce")


def with_words(config: TrainConfig, pairs: Pairs, split: Split, say: Callable[[str], None]) -> TrainConfig:
    """Choose how many words of a text the built-in encoder reads, from a sample of the texts to train on."""
    if config.text_encoder != "small" or config.model.max_words:
        return config
    rows = pairs.order[torch.isin(pairs.group_of[pairs.order], split.train)]
    rows = rows[torch.linspace(0, len(rows) - 1, min(_TEXTS, len(rows))).long()]
    texts = [text for side in pairs.sides.values() if side.kind == "text" for text in side.items(rows)]
    counts = torch.tensor([len(split_words(text)) for text in texts], dtype=torch.float64)
    words = min(_MOST_WORDS, max(FEWEST_WORDS, int(counts.quantile(0.99, interpolation="higher"))))
    longer = (counts > words).double().mean().item()
    if longer or words > FEWEST_WORDS:
        said = f"{longer:.1%} of those to train on are longer, and are cut off"
        say(f"of a text {words} words are read; {said} (--model.max-words)")
    return replace(config, model=replace(config.model, max_words=words))


def with_split_sizes(config: TrainConfig, pairs: Pairs, say: Callable[[str], None]) -> TrainConfig:
    """Choose how many texts are held out; at least two must be left to train on."""
    count = len(pairs)
    test = config.test_texts or min(650, max(1, count // 10))
    validation = config.validation_texts or min(325, max(1, count // 20))
    if count - test - validation < 2:
        held = f"{validation} for validation and {test} for test (--validation-texts, --test-texts)"
        raise UserError(
            f"--data has {count} group{'' if count == 1 else 's'} of rows, less {held}; expected at least two to "
            f"train on: rows that share {pairs.common} count once"
        )
    if not (config.test_texts and config.validation_texts):
        held = f"{validation} group{'' if validation == 1 else 's'} for validation, {test} for the test"
        say(f"{held}, which the run does not learn (--validation-texts, --test-texts)")
    if test < _FEW:
        say(f"so few groups for the test, {test}, say little about others: its figures are mostly luck")
    return replace(config, validation_texts=validation, test_texts=test)


def images_for_validation(classes: int, images: int) -> int:
    """Return how many images of classes are for validation, at most 325: 1 in 20, or of small classes one of 1 in 20.

    >>> images_for_validation(158, 790), images_for_validation(3, 3000), images_for_validation(9, 27)
    (7, 150, 1)
    """
    return min(325, max(1, (images if images >= _LARGE * classes else classes) // 20))


def with_batch(config: TrainConfig, count: int, size: int, noun: str, say: Callable[[str], None]) -> TrainConfig:
    """Choose the batch, or lower it to what there is to train on."""
    smallest = max(2, size) if config.task == "retrieve" else max(1, size)
    if count < smallest:
        raise UserError(f"--data has {count} {noun} to train on; expected at least {smallest} for {size} ranks")
    batch = config.batch_size or max(size, _batch_of(count))
    if batch < size:
        raise UserError(f"--batch-size must be at least the number of ranks, {size}; got {batch}")
    if batch > count:
        say(f"batch size {count} instead of {batch}: there are no more {noun} to train on")
        batch = count
    elif not config.batch_size and batch < 1024:
        say(f"batch size {batch}, for {count} {noun} to train on (--batch-size)")
    return replace(config, batch_size=batch)


def _batch_of(count: int) -> int:
    """Return the largest power of two up to 1024 and a quarter of the rows; of few rows up to 64 and all of them.

    >>> [_batch_of(count) for count in (9000, 1613, 300, 100, 34)]
    [1024, 256, 64, 64, 32]
    """
    return min(1024, 1 << (min(count, max(64, count // 4)).bit_length() - 1))

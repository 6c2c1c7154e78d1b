"""The data of `--data`, loaded and split for the task, with the options that 0 leaves to the data."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._user_error import UserError
from ..config import TrainConfig, for_glyphs
from .equal_pictures import numbers_in_common, numbers_of_pictures
from .feed import workers_of_a_rank
from .fingerprint import digest_of
from .glyphs import glyph_classes, glyph_pairs
from .labeled import LabeledImages, classes_of_texts
from .negatives import find_negatives
from .open_table import open_table
from .pairs import Pairs, Split, joined, joined_across, split_groups
from .roles import find_roles, text_column
from .sides import FilePictures, Side, Texts
from .table import Table
from .unreadable import readable_rows

Data = tuple[Pairs, Split] | LabeledImages
_SAMPLE = 64  # pictures that are looked at for the size and the colors
_SIZES = (64, 48, 32)


def load_data(config: TrainConfig, size: int, say: Callable[[str], None] = lambda _: None) -> tuple[TrainConfig, Data]:
    """Load pairs split by text for --task retrieve, or labeled images for --task identify.

    Args:
        config: the configuration of the run.
        size: number of ranks.
        say: called with a line about each choice that was left to the data.

    Returns:
        The configuration with those choices made, and the data.
    """
    if config.data == "glyphs":
        config = for_glyphs(config)
        if config.task == "identify":
            data = glyph_classes(config.image_size, validation=config.validation_texts, seed=config.seed)
            return _with_batch(config, len(data.train), size, "images", lambda _: None), data
        pairs = glyph_pairs(config.image_size)
    else:
        pairs = table_pairs(open_table(config.data), config, size, say)
    config = _with_loss(_with_pictures(config, pairs, say), pairs, say)
    if config.task == "identify":
        return _classes(config, pairs, size, say)
    config = _with_split(config, len(pairs), say)
    split = split_groups(pairs, validation=config.validation_texts, test=config.test_texts, seed=config.seed)
    pairs = _without_held_out(pairs, split, say)
    return _with_batch(config, len(split.train), size, "texts", say), (pairs, split)


def table_pairs(table: Table, config: TrainConfig, size: int = 1, say: Callable[[str], None] = lambda _: None) -> Pairs:
    """Return the pairs of a table: rows that share a text or a picture are one group."""
    roles = find_roles(table, config.columns, task=config.task)
    one, other = (name for name in roles if name != "negatives")
    for line in (*table.said, _said(roles)):
        say(line)
    rows = torch.arange(len(table))
    sides: dict[str, Side] = {}
    numbers: dict[str, Tensor] = {}
    texts: list[Any] = []
    fingerprint: list[Any] = [config.task]
    for role in (one, other):
        name = roles[role][0]
        if role == "image":
            pictures = sides["image"] = FilePictures(table, name)
            if config.skip_bad:
                rows = readable_rows(pictures, say, workers=workers_of_a_rank(config, sides, size))
            found = numbers_of_pictures(pictures, rows)
            numbers["image"] = found.numbers
            fingerprint += [role, rows, found.numbers[rows], found.sizes[rows]]
            if found.said:
                say(found.said)
        else:
            column = text_column(table, role, name)
            texts.append(column)
            sides["document" if role == "positive" else role] = Texts(column)
            fingerprint += [role, column]
    negatives = None
    if "negatives" in roles:
        negatives, of_texts = find_negatives(table, roles["negatives"], texts)
        say(f"{len(negatives):,} mined negatives")
        fingerprint += ["negatives", negatives.first, negatives.texts]
    else:
        of_texts = numbers_in_common(texts)
    numbers |= zip([name for name in sides if name != "image"], of_texts, strict=True)
    of_rows = [numbers[name][rows] for name in sides]
    if config.task == "identify":
        group = of_rows[1]
    else:
        group = joined(of_rows) if "image" in sides else joined_across(*of_rows)
    pairs = Pairs.grouped(sides, group, rows=rows, digest=digest_of(*fingerprint), numbers=numbers)
    return replace(pairs, negatives=negatives) if negatives else pairs


def _without_held_out(pairs: Pairs, split: Split, say: Callable[[str], None]) -> Pairs:
    """Leave out the negatives that are texts of held-out rows, so that no held-out text is trained on in any role."""
    if pairs.negatives is None:
        return pairs
    rows = torch.isin(pairs.group_of, torch.cat([split.validation, split.test])).nonzero()[:, 0]
    left = pairs.negatives.without(torch.cat([numbers[rows] for numbers in pairs.numbers.values()]))
    if len(left) < len(pairs.negatives):
        say(f"{len(pairs.negatives) - len(left):,} mined negatives are left out: texts of held-out rows")
    return replace(pairs, negatives=left)


def _said(roles: dict[str, list[str]]) -> str:
    return "columns: " + ", ".join(
        f"{role} is {' + '.join(names)}" if names != [role] else role for role, names in roles.items()
    )


def _with_pictures(config: TrainConfig, pairs: Pairs, say: Callable[[str], None]) -> TrainConfig:
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


def _with_loss(config: TrainConfig, pairs: Pairs, say: Callable[[str], None]) -> TrainConfig:
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


def _with_split(config: TrainConfig, count: int, say: Callable[[str], None]) -> TrainConfig:
    """Choose how many texts are held out; at least two must be left to train on."""
    test = config.test_texts or min(650, max(1, count // 10))
    validation = config.validation_texts or min(325, max(1, count // 20))
    if count - test - validation < 2:
        held = f"{validation} for validation and {test} for test (--validation-texts, --test-texts)"
        raise UserError(
            f"--data has {count} different text{'' if count == 1 else 's'}, less {held}; expected at least two to "
            "train on: texts that share a picture, and pictures that share a text, count once"
        )
    if not (config.test_texts and config.validation_texts):
        say(f"{validation} texts for validation, {test} for the test (--validation-texts, --test-texts)")
    return replace(config, validation_texts=validation, test_texts=test)


def _with_batch(config: TrainConfig, count: int, size: int, what: str, say: Callable[[str], None]) -> TrainConfig:
    """Choose the batch, or lower it to what there is to train on."""
    smallest = max(2, size) if config.task == "retrieve" else max(1, size)
    if count < smallest:
        raise UserError(f"--data has {count} {what} to train on; expected at least {smallest} for {size} ranks")
    batch = config.batch_size or min(1024, 1 << (count.bit_length() - 1))
    if batch < size:
        raise UserError(f"--batch-size must be at least the number of ranks, {size}; got {batch}")
    if batch > count:
        say(f"batch size {count} instead of {batch}: there are so many {what} to train on")
        batch = count
    elif not config.batch_size and batch < 1024:
        say(f"batch size {batch}: the largest power of two among {count} {what} to train on (--batch-size)")
    return replace(config, batch_size=batch)


def _classes(
    config: TrainConfig, pairs: Pairs, size: int, say: Callable[[str], None]
) -> tuple[TrainConfig, LabeledImages]:
    validation = config.validation_texts or min(325, max(1, len(pairs) // 20))
    data = classes_of_texts(pairs, validation=validation, seed=config.seed, at_most=not config.validation_texts)
    if not config.validation_texts:
        config = replace(config, validation_texts=len(data.validation))
        say(f"{config.validation_texts} texts of which one picture is for validation (--validation-texts)")
    if len(data) < max(2, size):
        raise UserError(
            f"--data has {len(data)} texts to be classes; expected at least {max(2, size)}: each of the {size} ranks "
            "needs one, and there must be two"
        )
    return _with_batch(config, len(data.train), size, "images", say), data

"""The data of `--data`, loaded and split for the task."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch

from wholebatch.app import UserError

from ..config import TrainConfig, for_glyphs
from .choices import images_for_validation, with_batch, with_loss, with_pictures, with_split_sizes, with_words
from .classes.labeled import LabeledImages
from .classes.split import classes_of_texts
from .glyphs import glyph_classes, glyph_pairs
from .pairs.from_table import table_pairs
from .pairs.ids import check_ids
from .pairs.pairs import Pairs, Split, split_groups
from .tables.open_table import open_table

Data = tuple[Pairs, Split] | LabeledImages


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
    _check_held_out_ids(pairs, split)
    config = with_words(config, pairs, split, say)
    pairs = _drop_held_out(pairs, split, say)
    return with_batch(config, len(split.train), size, "groups", say), (pairs, split)


def _check_held_out_ids(pairs: Pairs, split: Split) -> None:
    """Refuse ids of classes now, not in the first validation, after many steps."""
    if pairs.ids is None:
        return
    for groups in (split.validation, split.test):
        check_ids(pairs.ids[torch.isin(pairs.group_of, groups).nonzero()[:, 0]])


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

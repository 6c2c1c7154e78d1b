"""The rows of a table as pairs of two sides, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import TrainConfig
from .equal_pictures import first_of_each, numbers_of_texts
from .fingerprint import digest_of
from .kept_numbers import kept_numbers
from .left_out import LeftOut
from .negatives import find_negatives
from .pairs import Pairs, joined, joined_texts
from .roles import find_roles, group_numbers, text_column
from .sides import FilePictures, Side, Texts
from .table import Table
from .unreadable import readable_rows


def table_pairs(table: Table, config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> Pairs:
    """Return the pairs of a table: rows that share a text, a picture or a value of the column `group` are one group."""
    roles = find_roles(table, config.columns, task=config.task)
    one, other = [*roles][:2]
    for line in (*table.said, _said(roles)):
        say(line)
    rows = torch.arange(len(table))
    sides: dict[str, Side] = {}
    pictures = None
    left_out: tuple[LeftOut, ...] = ()
    numbers: list[Tensor] = []
    texts: list[Any] = []
    fingerprint: list[Any] = [config.task]
    for role in (one, other):
        name = roles[role][0]
        if role == "image":
            pictures = sides["image"] = FilePictures(table, name)
            if config.skip_bad:
                rows, left_out = readable_rows(pictures, say, workers=config.workers)
            found = kept_numbers(pictures, rows)
            numbers.append(found.numbers)
            fingerprint += [role, rows, found.numbers[rows], found.sizes[rows]]
            if found.said:
                say(found.said)
        else:
            column = text_column(table, role, name)
            texts.append(column)
            sides["document" if role == "positive" else role] = Texts(column)
            numbers.append(numbers_of_texts(column))
            fingerprint += [role, column]
    of_rows = [each[rows] for each in numbers]
    if config.task == "identify":
        group = of_rows[1]
    elif pictures is None:
        group = joined_texts(*texts)
    else:
        group = joined(of_rows)
    ids = None
    if "group" in roles:
        ids = group_numbers(table, roles["group"][0])
        group = joined([group, ids[rows]])
        fingerprint += ["group", ids]
    equal = None if pictures is None else numbers[0]
    pairs = Pairs.grouped(sides, group, rows=rows, equal_pictures=equal)
    negatives = None
    if "negatives" in roles:
        negatives = find_negatives(table, roles["negatives"], texts[1], pairs.group_of)
        say(f"{len(negatives):,} mined negatives")
        fingerprint += ["negatives", negatives.first, negatives.texts]
    return replace(
        pairs,
        digest=digest_of(*fingerprint),
        documents=first_of_each(numbers[1]) if "query" in roles else None,
        negatives=negatives or None,
        ids=ids,
        left_out=left_out,
    )


def _said(roles: dict[str, list[str]]) -> str:
    return "columns: " + ", ".join(
        f"{role} is {' + '.join(names)}" if names != [role] else role for role, names in roles.items()
    )

"""The rows of a table as pairs of two sides, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...config import TrainConfig
from ...encoders.words import identity
from ..cache.kept_numbers import kept_numbers
from ..pictures.equal import numbers_in_common
from ..pictures.left_out import LeftOut
from ..pictures.unreadable import readable_rows
from ..sides import FilePictures, Side, Texts
from ..tables.fingerprint import digest_of
from ..tables.roles import find_roles, group_numbers, text_column
from ..tables.table import Table
from .negatives import find_negatives
from .pairs import Pairs, joined, joined_across


def table_pairs(table: Table, config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> Pairs:
    """Return the pairs of a table: rows that share a text, a picture or a value of the column `group` are one group."""
    roles = find_roles(table, config.columns, task=config.task)
    one, other = [*roles][:2]
    for line in (*table.said, _said(roles)):
        say(line)
    rows = torch.arange(len(table))
    sides: dict[str, Side] = {}
    left_out: tuple[LeftOut, ...] = ()
    numbers: dict[str, Tensor] = {}
    texts: list[Any] = []
    fingerprint: list[Any] = [config.task]
    for role in (one, other):
        name = roles[role][0]
        if role == "image":
            pictures = sides["image"] = FilePictures(table, name)
            if config.skip_bad:
                rows, left_out = readable_rows(pictures, say, workers=config.workers)
            found = kept_numbers(pictures, rows)
            numbers["image"] = found.numbers
            fingerprint += [role, rows, found.numbers[rows], found.sizes[rows]]
            if found.said:
                say(found.said)
        else:
            column = text_column(table, role, name)
            texts.append(column)
            sides["document" if role == "positive" else role] = Texts(column)
            fingerprint += [role, column]
    ids = group_numbers(table, roles["group"][0]) if "group" in roles else None
    if ids is not None:
        fingerprint += ["group", ids]
    same = identity if config.task == "retrieve" and config.text_encoder == "small" else None
    negatives = None
    if "negatives" in roles:
        negatives, of_texts = find_negatives(table, roles["negatives"], texts, same)
        say(f"{len(negatives):,} mined negatives")
        fingerprint += ["negatives", negatives.first, negatives.texts]
    else:
        of_texts = numbers_in_common(texts, same)
    numbers |= zip([name for name in sides if name != "image"], of_texts, strict=True)
    of_rows = [numbers[name][rows] for name in sides]
    if config.task == "identify":
        group = of_rows[1]
    else:
        group = joined(of_rows) if "image" in sides else joined_across(*of_rows)
        group = group if ids is None else joined([group, ids[rows]])
    pairs = Pairs.grouped(sides, group, rows=rows, digest=digest_of(*fingerprint), numbers=numbers)
    return replace(pairs, negatives=negatives or None, ids=ids, left_out=left_out)


def _said(roles: dict[str, list[str]]) -> str:
    return "columns: " + ", ".join(
        f"{role} is {' + '.join(names)}" if names != [role] else role for role, names in roles.items()
    )

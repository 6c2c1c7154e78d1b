"""The rows of a table as pairs of two sides, in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError

from ...config import TrainConfig
from ...encoders.words import identity
from ..cache.kept_results import kept_numbers
from ..pictures.equal import numbers_in_common
from ..pictures.skip_bad import readable_rows, rows_with_texts
from ..sides import Chosen, FilePictures, Side, Texts
from ..tables.columns import digest_of, in_rows
from ..tables.roles import find_roles, group_numbers, text_column
from ..tables.table import Table
from .negatives import find_negatives
from .pairs import Pairs, joined, joined_across


def table_pairs(table: Table, config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> Pairs:
    """Return the pairs of a table: rows that share a text, a picture or a value of the column `group` are one group."""
    roles = find_roles(table, config.columns, task=config.task)
    first, second = [*roles][:2]
    for line in (*table.said, _roles_in_words(roles)):
        say(line)
    texts_of = {role: roles[role][0] for role in (first, second) if role != "image"}
    spread, owner = in_rows(table, [*texts_of.values()]) if config.task == "retrieve" else (table, None)
    empty: dict[int, str] | None = {} if config.skip_bad else None
    columns = {role: text_column(spread, role, name, empty) for role, name in texts_of.items()}
    rows, left_out = rows_with_texts(spread, empty or {}, say)
    sides: dict[str, Side] = {}
    numbers: dict[str, Tensor] = {}
    fingerprint: list[Any] = [config.task]
    for role in (first, second):
        if role == "image":
            pictures, usable = FilePictures(table, roles[role][0]), torch.arange(len(table))
            if config.skip_bad:
                usable, bad = readable_rows(pictures, say, workers=config.workers, said=left_out)
                left_out = tuple({each.place: each for each in (*bad, *left_out)}.values())
            numbered = kept_numbers(pictures, usable)
            fingerprint += [role, usable, numbered.numbers[usable], numbered.sizes[usable]]
            if numbered.said:
                say(numbered.said)
            of_rows = torch.arange(len(table)) if owner is None else owner
            rows = rows[torch.isin(of_rows[rows], usable)]
            if not len(rows):
                raise UserError(f"no row of --data has a text and a readable picture; the first: {left_out[0]}")
            sides["image"] = pictures if owner is None else Chosen(pictures, owner)
            numbers["image"] = numbered.numbers[of_rows]
        else:
            sides["document" if role == "positive" else role] = Texts(columns[role])
            fingerprint += [role, columns[role]]
    texts = [*columns.values()]
    ids = group_numbers(spread, roles["group"][0]) if "group" in roles else None
    if ids is not None:
        fingerprint += ["group", ids]
    same = identity if config.task == "retrieve" and config.text_encoder == "small" else None
    negatives = None
    if "negatives" in roles:
        negatives, of_texts = find_negatives(spread, roles["negatives"], texts, same)
        say(f"{len(negatives):,} mined negatives")
        fingerprint += ["negatives", negatives.first, negatives.texts]
    else:
        of_texts = numbers_in_common(texts, same)
    numbers |= zip([name for name in sides if name != "image"], of_texts, strict=True)
    of_sides = [numbers[name][rows] for name in sides]
    if config.task == "identify":
        group = of_sides[1]
    else:
        group = joined(of_sides) if "image" in sides else joined_across(*of_sides)
        group = group if ids is None else joined([group, ids[rows]])
    pairs = Pairs.grouped(sides, group, rows=rows, digest=digest_of(*fingerprint), numbers=numbers)
    return replace(pairs, negatives=negatives or None, ids=ids, left_out=left_out)


def _roles_in_words(roles: dict[str, list[str]]) -> str:
    return "columns: " + ", ".join(
        f"{role} is {' + '.join(names)}" if names != [role] else role for role, names in roles.items()
    )

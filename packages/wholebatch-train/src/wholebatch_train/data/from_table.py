"""The rows of a table as pairs of two sides, in groups, with their mined negatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from wholebatch.app import UserError

from ..config import TrainConfig
from ..encoders.words import identity
from .pairs import Pairs, joined, joined_across, pairs_of_ids
from .pictures import kept_numbers, numbers_in_common, readable_rows, rows_with_texts
from .roles import composed, find_roles, group_numbers, text_column
from .sides import Chosen, FilePictures, Side, Texts
from .table import Table, digest_of, flattened, in_rows, is_text


class Negatives:
    """Texts of each row, `texts[first[row] : first[row + 1]]`, and a number of each text.

    Args:
        texts: an Arrow column of all rows' negatives, one below the other.
        first: int64, (number of rows + 1,).
        numbers: int64, (number of texts,), equal for equal texts, and equal to that of an equal query or positive.
    """

    def __init__(self, texts: Any, first: Tensor, numbers: Tensor) -> None:
        self.texts, self.first, self._numbers = texts, first, numbers

    def of(self, rows: Tensor) -> tuple[list[str], Tensor]:
        """Return the texts of these rows, one row after another, and their numbers."""
        places = torch.cat([torch.arange(int(self.first[row]), int(self.first[row + 1])) for row in rows.tolist()])
        return [self.texts[place].as_py() for place in places.tolist()], self._numbers[places]

    def without(self, numbers: Tensor) -> Negatives:
        """Return the negatives whose number is none of these."""
        kept = ~torch.isin(self._numbers, numbers)
        before = torch.cat([self.first.new_zeros(1), kept.cumsum(0)])
        return Negatives(self.texts.filter(pa.array(kept.numpy())), before[self.first], self._numbers[kept])

    def __len__(self) -> int:
        return len(self._numbers)


class FalseNegatives:
    """Finds the negatives of a batch that the data state as a positive of one of its queries.

    A batch has one row of each group, and all queries with the same positive are in one group. So a negative is a
    stated positive of one query in the batch at most, and a single id says which.

    Args:
        queries: a number for each row's query, (n,).
        positives: a number for each row's positive, (n,); equal texts have equal numbers, here and among negatives.
        groups: the group of each row, (n,); -1 for rows that are left out.
        ids: a number for each row, (n,): rows with an equal one are positives of each other.
    """

    def __init__(self, queries: Tensor, positives: Tensor, groups: Tensor, ids: Tensor | None = None) -> None:
        has_group = groups >= 0
        self._queries = queries
        self._positives, order = positives[has_group].sort(stable=True)
        self._groups = groups[has_group][order]  # of the positives
        self._count = int(max(queries.max(), positives.max())) + 1
        query_row, positive_row = pairs_of_ids(None if ids is None else ids[has_group], int(has_group.sum()))
        self._stated = torch.unique(queries[has_group][query_row] * self._count + positives[has_group][positive_row])

    def ids(self, negatives: Tensor, rows: Tensor, groups: Tensor) -> Tensor:
        """Return for each negative (m,) the group of the query that it is a positive of, or -1."""
        index, is_positive = _search(self._positives, negatives)
        in_order, places = groups.sort()
        in_batch, is_here = _search(in_order, self._groups[index])
        query = self._queries[rows[places[in_batch]]]
        is_stated = _search(self._stated, query * self._count + negatives)[1]  # of no meaning unless it is a positive
        return torch.where(is_positive & is_here & is_stated, in_order[in_batch], -1)


def _search(ascending: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each value among ascending ones, or some place, and whether it is there."""
    places = torch.searchsorted(ascending, values).clamp(max=len(ascending) - 1)
    return places, ascending[places] == values


def find_negatives(
    table: Table, names: list[str], others: Sequence[Any], identity: Callable[[str], str] | None = None
) -> tuple[Negatives, list[Tensor]]:
    """Return the negatives in one column of lists, or in one or more columns of texts.

    Null and empty texts are left out.

    Returns:
        The negatives, and for each of the other columns a number of each row, equal for equal texts of all columns.
    """
    rows, texts = [], []
    for name in names:
        table.check_usable(name)
        column, owner = flattened(table.arrow[name])
        if not is_text(column.type):
            raise UserError(
                f"{table.source}: the column {name!r} must hold texts, or lists of texts, to be the negatives; "
                f"got {table.arrow[name].type}"
            )
        rows.append(owner)
        texts.append(composed(column).cast(pa.large_string()))
    flat = pa.chunked_array([chunk for column in texts for chunk in column.chunks], pa.large_string())
    owner = torch.cat(rows)
    has_text = torch.from_numpy(pc.fill_null(pc.not_equal(flat, ""), False).to_numpy().astype("bool"))
    order = owner.argsort(stable=True)
    order = order[has_text[order]]
    flat, owner = flat.take(pa.array(order.numpy())), owner[order]
    counts = torch.bincount(owner, minlength=len(table))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    *other_numbers, numbers = numbers_in_common([*others, flat], identity)
    return Negatives(flat, first, numbers), other_numbers


def table_pairs(table: Table, config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> Pairs:
    """Return the pairs of a table: rows that share a text, a picture or a value of the column `group` are one group."""
    roles = find_roles(table, config.columns, task=config.task)
    first, second = [*roles][:2]
    in_words = [f"{role} is {' + '.join(names)}" if names != [role] else role for role, names in roles.items()]
    for line in (*table.said, f"columns: {', '.join(in_words)}"):
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
            owner_rows = torch.arange(len(table)) if owner is None else owner
            rows = rows[torch.isin(owner_rows[rows], usable)]
            if not len(rows):
                raise UserError(f"no row of --data has a text and a readable picture; the first: {left_out[0]}")
            sides["image"] = pictures if owner is None else Chosen(pictures, owner)
            numbers["image"] = numbered.numbers[owner_rows]
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
        negatives, text_numbers = find_negatives(spread, roles["negatives"], texts, same)
        say(f"{len(negatives):,} mined negatives")
        fingerprint += ["negatives", negatives.first, negatives.texts]
    else:
        text_numbers = numbers_in_common(texts, same)
    numbers |= zip([name for name in sides if name != "image"], text_numbers, strict=True)
    side_numbers = [numbers[name][rows] for name in sides]
    if config.task == "identify":
        group = side_numbers[1]
    else:
        group = joined(side_numbers) if "image" in sides else joined_across(*side_numbers)
        group = group if ids is None else joined([group, ids[rows]])
    return Pairs.grouped(
        sides, group, rows=rows, digest=digest_of(*fingerprint), numbers=numbers, negatives=negatives or None, ids=ids,
        left_out=left_out,
    )  # fmt: skip

"""Which column of a table is the image, the text, the query, its positive, its negatives, the label or the group."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from wholebatch.app import UserError

from .table import Table, is_bytes, is_text, text_codes

USUAL = {
    "image": ("image", "filepath", "file_path", "file_name", "filename", "file", "path", "image_path", "img",
              "picture"),
    "text": ("text", "caption", "title", "txt", "description", "name", "sentence"),
    "query": ("query", "anchor", "question"),
    "positive": ("positive", "passage", "document", "answer", "pos", "code"),
    "negatives": ("negatives", "negative", "hard_negatives", "neg"),
    "label": ("label", "class", "category", "identity", "cls"),
    "group": (),  # a column `id` mostly numbers the rows, so this one is always named
}  # fmt: skip
"""The names by which a role is recognized."""

Roles = dict[str, list[str]]
"""The columns of each role; only `negatives` may have several."""


def asked_roles(columns: str) -> Roles:
    """Parse `--columns "image=filepath,text=title"`; several columns of negatives are joined by +."""
    roles: Roles = {}
    for part in filter(None, (part.strip() for part in columns.split(","))):
        role, equals, names = part.partition("=")
        if not equals or role not in USUAL or not all(names.split("+")):
            raise UserError(
                f"--columns must be ROLE=COLUMN,... with the roles {', '.join(USUAL)}, such as image=filepath,"
                f"text=title; got {part!r}"
            )
        if role in roles or (role != "negatives" and "+" in names):
            raise UserError(
                f"--columns gives {role!r} more than one column; only negatives may have several, joined by +"
            )
        roles[role] = names.split("+")
    return roles


def find_roles(table: Table, columns: str, *, task: str) -> Roles:
    """Return the columns of the two sides that the task needs, behind them those of `negatives` and `group`, if any."""
    asked = asked_roles(columns)
    for role, names in asked.items():
        for name in names:
            if name not in table.names:
                near = get_close_matches(name, table.names, 1)
                fix = f"did you mean {near[0]!r}?" if near else f"name one of them: --columns {role}=NAME"
                raise UserError(f"--columns: {table.source} has no column {name!r} for {role}; {_names(table)}; {fix}")
    used = {name for names in asked.values() for name in names}

    def find(role: str, *, needed: bool = False) -> list[str]:
        if role in asked:
            return asked[role]
        if role == "negatives":
            numbered = [name for name in table.names if name.lower().rstrip("0123456789").rstrip("_") in USUAL[role]]
            return [name for name in numbered if name not in used]
        usual = usual_columns(table, role, f"--columns {role}=", used)
        if needed and not usual:
            _refuse_addresses(table, role)
            raise UserError(
                f"{table.source} has no column for the {role}; {_names(table)}. Name it: --columns {role}=NAME "
                f"(usual names need no option: {', '.join(USUAL[role])})"
            )
        return usual

    if task == "identify":
        if "group" in asked:
            raise UserError(
                f"--columns group={asked['group'][0]} goes with --task retrieve; of --task identify name the column as "
                "the label"
            )
        label = [] if "text" in asked and "label" not in asked else find("label")
        return {"image": find("image", needed=True), "text": label or find("text", needed=True)}
    group = {"group": asked["group"]} if "group" in asked else {}
    pairs_of_texts = "query" in asked or "positive" in asked or ("image" not in asked and bool(find("query")))
    if pairs_of_texts:
        roles = {"query": find("query", needed=True), "positive": find("positive", needed=True)}
        negatives = find("negatives")
        return roles | ({"negatives": negatives} if negatives else {}) | group
    text = find("text") or (find("label") if "text" not in asked else [])
    return {"image": find("image", needed=True), "text": text or find("text", needed=True)} | group


def usual_columns(table: Table, role: str, option: str, used: Collection[str] = ()) -> list[str]:
    """Return the column with a usual name of a role, or none; UserError with the `option` to name one of several."""
    usual = [name for name in table.names if name.lower() in USUAL[role] and name not in used]
    usual.sort(key=lambda name: USUAL[role].index(name.lower()))
    # Of equal ones the first: img2dataset writes a caption twice.
    distinct = [
        name for place, name in enumerate(usual) if not (place and table.arrow[usual[0]].equals(table.arrow[name]))
    ]
    if len(distinct) > 1:
        raise UserError(
            f"{table.source} has several columns that could be the {role}: {', '.join(distinct)}; name one, for "
            f"instance {option}{distinct[0]}"
        )
    return distinct


def _refuse_addresses(table: Table, role: str) -> None:
    addresses = [name for name in table.names if name.lower() in ("url", "image_url", "link")]
    if role == "image" and addresses:
        raise UserError(
            f"{table.source} has addresses of images in the column {addresses[0]!r}; expected paths of files. Download "
            "them first: img2dataset writes tar shards, which --data reads"
        )


def _names(table: Table) -> str:
    return f"its columns are {', '.join(table.names)}" if table.names else "it has no columns"


def group_numbers(table: Table, name: str) -> Tensor:
    """Return a number for each row, int64 (n,), equal for equal values of a column; a row without one is alone."""
    table.check_usable(name)
    column = table.arrow[name]
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not (is_bytes(column.type) or is_text(column.type) or is_number):
        raise UserError(
            f"{table.source}: the column {name!r} must hold texts or numbers to be the group; got {column.type}"
        )
    if pa.types.is_floating(column.type):  # not a number is what some writers make of a missing one
        column = pc.if_else(pc.is_nan(column), None, column)
    if not is_bytes(column.type):
        column = pc.utf8_trim_whitespace(column if is_text(column.type) else column.cast(pa.string()))
    numbers = text_codes(pc.if_else(pc.equal(pc.binary_length(column), 0), None, column))[1]
    alone = int(numbers.max()) + 1 + torch.arange(len(numbers))
    return torch.where(numbers < 0, alone, numbers)


def composed(column: Any) -> Any:
    """Return texts in composed form (NFC), as most are written, without space at their ends."""
    return pc.utf8_trim_whitespace(pc.utf8_normalize(column, form="NFC"))


def text_column(table: Table, role: str, name: str, empty: dict[int, str] | None = None) -> Any:
    """Return a column of texts in composed form (NFC) without space at their ends; numbers and bytes become texts.

    Rows without a text stay empty and are added to `empty`, with the reason; if that is None they are refused.
    """
    table.check_usable(name)
    column = table.arrow[name]
    kind = column.type
    if pa.types.is_floating(kind):  # as pandas writes integers beside a missing one, which is not a number
        column = pc.if_else(pc.is_nan(column), None, column.cast(pa.float64()))
        whole = pc.and_(pc.equal(pc.trunc(column), column), pc.less(pc.abs(column), 2.0**53))
        if pc.all(whole).as_py() is not False:
            column, kind = column.cast(pa.int64()), pa.int64()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        column = column.cast(pa.string())
    elif is_bytes(kind):
        try:
            column = column.cast(pa.string() if pa.types.is_binary(kind) else pa.large_string())
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{table.source}: the column {name!r} must hold texts to be the {role}; its bytes are not UTF-8"
            ) from error
    elif not is_text(kind):
        raise UserError(f"{table.source}: the column {name!r} must hold texts to be the {role}; got {kind}")
    trimmed = composed(column)
    column = column if trimmed.equals(column) else trimmed  # a mapped column has no memory of its own
    is_empty = pc.fill_null(pc.equal(column, ""), True)
    if not pc.any(is_empty).as_py():
        return column
    reasons = {row: table.why_empty(row, role, name) for row in pc.indices_nonzero(is_empty).to_pylist()}
    if empty is None:
        row, reason = next(iter(reasons.items()))
        raise UserError(f"{table.where(row)}: {reason}; --skip-bad leaves such rows out")
    empty |= reasons
    return pc.fill_null(column, "")

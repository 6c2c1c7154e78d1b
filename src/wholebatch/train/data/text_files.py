"""Rows of .csv, .tsv and .jsonl files, each with its line number, as Arrow record batches.

pyarrow's own readers lose the lines of their rows; an error about row 70,312 of a file with line breaks inside quotes
must name the line that an editor shows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._user_error import UserError
from .table import LINE, need_pyarrow

_ROWS = 65536  # of a record batch
_EXAMPLE = '{"image": "cat.png", "text": "a cat"}'


def read_separated(path: Path) -> Iterator[Any]:
    """Yield record batches of a table with a header line; every column is text."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        reader = csv.reader(lines, delimiter=_separator(path, header), strict=True)
        names = next(reader, [])
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{path}, line 1: the column {repeated[0]!r} appears twice; rename one of them")
        rows: list[list[str | None]] = []
        numbers: list[int] = []
        for row in reader:
            if not row:
                continue
            if len(row) > len(names):
                raise UserError(
                    f"{path}, line {reader.line_num}: more values than columns; a text that holds a comma is "
                    'written in double quotes, "like, this"'
                )
            rows.append([*row, *[None] * (len(names) - len(row))])
            numbers.append(reader.line_num)
            if len(rows) == _ROWS:
                yield _batch(names, rows, numbers)
                rows, numbers = [], []
        yield _batch(names, rows, numbers)


def _separator(path: Path, header: str) -> str:
    if path.suffix == ".tsv":
        return "\t"
    return max(",", ";", "\t", key=header.count)  # the first of those that appear equally often


def _batch(names: list[str], rows: list[list[str | None]], numbers: list[int]) -> Any:
    pa = need_pyarrow()
    columns = [[row[place] for row in rows] for place in range(len(names))]
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch([*arrays, pa.array(numbers, pa.int64())], [*names, LINE])


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield record batches of a file with one JSON object a line; a value is a text, a number or a list of texts."""
    with path.open(encoding="utf-8-sig") as lines:
        objects: list[dict[str, Any]] = []
        numbers: list[int] = []
        schema = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(value, dict):
                raise UserError(f"{path}, line {number}: expected an object, as in {_EXAMPLE}; got {value}")
            objects.append(value)
            numbers.append(number)
            if len(objects) == _ROWS:
                batch = _objects(path, objects, numbers, schema)
                schema = batch.schema
                yield batch
                objects, numbers = [], []
        if objects or schema is None:
            yield _objects(path, objects, numbers, schema)


def _objects(path: Path, objects: list[dict[str, Any]], numbers: list[int], schema: Any) -> Any:
    """Return a record batch of objects, with the `schema` of the batches before it, if there were any."""
    pa = need_pyarrow()
    names = list(dict.fromkeys(name for value in objects for name in value))
    if schema is not None:
        known = [name for name in schema.names if name != LINE]
        if unknown := sorted(set(names) - set(known)):
            where = next(n for n, value in zip(numbers, objects, strict=True) if unknown[0] in value)
            raise UserError(
                f"{path}, line {where}: the key {unknown[0]!r} is in none of the lines before it; give it to each line"
            )
        names = known
    arrays = []
    for name in names:
        values = [value.get(name) for value in objects]
        is_list = any(isinstance(value, list) for value in values)
        for line, value in zip(numbers, values, strict=True):
            _check_value(path, line, name, value, is_list=is_list)
        of_type = pa.list_(pa.string()) if is_list else pa.string()
        arrays.append(pa.array([v if v is None or is_list else _as_text(v) for v in values], of_type))
    batch = pa.record_batch([*arrays, pa.array(numbers, pa.int64())], [*names, LINE])
    if schema is not None and batch.schema != schema:
        changed = next(name for name in names if batch.schema.field(name) != schema.field(name))
        raise UserError(f"{path}, lines {numbers[0]} to {numbers[-1]}: {changed!r} is not always a list, or never one")
    return batch


def _check_value(path: Path, line: int, name: str, value: Any, *, is_list: bool) -> None:
    items = value if isinstance(value, list) else [value]
    if any("\ud800" <= character <= "\udfff" for item in [name, *items] if isinstance(item, str) for character in item):
        raise UserError(f"{path}, line {line}: half of a surrogate pair in {value!a}")
    if is_list and value is not None and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
        raise UserError(f"{path}, line {line}: {name!r} must be a list of texts, as in other lines; got {value!r}")
    if isinstance(value, dict):
        raise UserError(f"{path}, line {line}: {name!r} must be a text, a number or a list of texts; got an object")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

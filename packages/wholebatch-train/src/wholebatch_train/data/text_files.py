"""Rows of .csv, .tsv and .jsonl files, each with its line number, as Arrow record batches.

pyarrow's own readers lose the lines of their rows; an error about row 70,312 of a file with line breaks inside quotes
must name the line that an editor shows.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from wholebatch.app import UserError, shown

from .table import LINE, REASON, UNUSABLE

_ROWS = 65536  # of a record batch
_EXAMPLE = '{"image": "cat.png", "text": "a cat"}'
_UTF8 = "utf-8-sig"  # with or without the mark that Excel puts in front
_MOST_LETTERS = 2**27  # of a value
_BYTES = re.compile("[\udc80-\udcff]")  # as which the decoder writes bytes that are not UTF-8


class _Row(NamedTuple):
    """A row that was read."""

    line: int
    reason: str | None
    """Why it has no values."""
    values: dict[str, Any]


def read_separated(path: Path) -> Iterator[Any]:
    """Yield record batches of a table with a header line; every column is text.

    Values between tabs in a .tsv file hold no line breaks; quotes are marks of text unless they enclose a whole value,
    as pandas writes one with quotes in it. Columns without a name, and rows without a value, are left out. A row that
    is not UTF-8 has null in all columns, and a reason.
    """
    has_quotes = path.suffix != ".tsv"
    before = csv.field_size_limit(_MOST_LETTERS)
    with path.open(encoding=_UTF8, errors="surrogateescape", newline="") as lines:
        bad: list[str] = []
        try:
            header = next((line for line in lines if line.strip()), "")
            lines.seek(0)
            said = _named_separator(header)
            reader = csv.reader(
                _note_bad_lines(lines, bad),
                delimiter=said or (max(",;\t", key=header.count) if has_quotes else "\t"),  # of equals the first
                quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
                skipinitialspace=True,
                strict=True,
            )
            if said:
                next(reader)
            rows = reader if has_quotes else ([*map(_unquote, row)] for row in reader)
            yield from _batches(path, _named_rows(path, reader, rows, bad))
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: not a {path.suffix[1:].upper()} file: {error}") from error
        finally:
            csv.field_size_limit(before)


def _note_bad_lines(lines: Iterable[str], bad: list[str]) -> Iterator[str]:
    """Yield lines, and note in `bad` what is wrong with one that is not UTF-8."""
    for line in lines:
        if match := _BYTES.search(line):
            column = len(line[: match.start()].encode()) + 1
            bad.append(
                f"not UTF-8 text (byte 0x{ord(match[0]) - 0xDC00:02x} at column {column}); save the file as UTF-8"
            )
        yield line


def _named_rows(path: Path, reader: Any, rows_read: Iterator[list[str]], bad: list[str]) -> Iterator[_Row]:
    """Yield the rows below the header; a value that is missing at the end of a row is null."""
    header = [name.strip() for name in next((row for row in rows_read if row), [])]
    if bad:
        raise UserError(f"{path}, line {reader.line_num}: {bad[0]}")
    if repeated := sorted(name for name, count in Counter(filter(None, header)).items() if count > 1):
        raise UserError(f"{path}, line {reader.line_num}: the column {repeated[0]!r} appears twice; rename one of them")
    named = [(place, name) for place, name in enumerate(header) if name]
    line = reader.line_num
    for row in rows_read:
        line, begins = reader.line_num, line + 1  # quotes may hold line breaks
        if not any(row):
            continue
        reason = bad[0] if bad else None
        bad.clear()
        if reason is None and any(map(str.strip, row[len(header) :])):
            raise UserError(
                f"{path}, line {begins}: more values than columns; a text that holds a comma is "
                'written in double quotes, "like, this"'
            )
        values = [] if reason else row
        yield _Row(begins, reason, {name: values[place] if place < len(values) else None for place, name in named})


def _unquote(value: str) -> str:
    """Return a value without the quotes that enclose all of it, and double those inside.

    >>> _unquote('"5"" disk"'), _unquote('"a" or "b"'), _unquote('5" disk')
    ('5" disk', '"a" or "b"', '5" disk')
    """
    inside = value[1:-1]
    enclosed = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in inside.replace('""', "")
    return inside.replace('""', '"') if enclosed else value


def _named_separator(header: str) -> str:
    """Return the separator that a first line names, or "".

    >>> _named_separator("sep=;"), _named_separator("sep=a;b")
    (';', '')
    """
    start, _, separator = header.rstrip("\r\n").partition("=")
    return separator if start == "sep" and len(separator) == 1 else ""


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield record batches of a file with one JSON object a line.

    A value that is a list of texts stays one; other lists and objects become JSON, and their column cannot be used. A
    row that is not UTF-8 has null in all columns, and a reason.
    """
    with path.open(encoding=_UTF8, errors="surrogateescape") as lines:
        bad: list[str] = []
        numbered = ((n, line) for n, line in enumerate(_note_bad_lines(lines, bad), 1) if line.strip())
        yield from _batches(
            path, (_Row(n, bad.pop(), {}) if bad else _Row(n, None, _object(path, n, line)) for n, line in numbered)
        )


def _refuse_number(name: str) -> NoReturn:
    """Refuse NaN and the like, which would become a word."""
    raise ValueError(f"{name} is no value; write null, or a text in quotes")


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}, line {number}: expected an object, as in {_EXAMPLE}; got {shown(value)}")
    if "\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path}, line {number}: half of a surrogate pair, {error.object[error.start]!a}; write the whole pair"
            ) from error
    return value


def _batches(path: Path, rows: Iterator[_Row]) -> Iterator[Any]:
    """Yield record batches of all rows; a row without one of the columns has null there."""
    tables: list[Any] = []
    kinds, unusable = dict[str, Any](), dict[str, str]()
    while (part := [*islice(rows, _ROWS)]) or not tables:
        names = dict.fromkeys(name for row in part for name in row.values)
        columns = {name: _column(path, name, part, unusable) for name in names}
        for name, column in columns.items():
            if not pa.types.is_null(column.type) and kinds.setdefault(name, column.type) != column.type:
                raise UserError(
                    f"{path}, lines {part[0].line} to {part[-1].line}: {name!r} is not of the type of the lines before "
                    "them; expected a text in each line, or a list of texts in each line"
                )
        columns[REASON] = pa.array([row.reason for row in part], pa.string())
        columns[LINE] = pa.array([row.line for row in part], pa.int64())
        tables.append(pa.table(columns))
    fields = []
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        kind = kinds.get(name, pa.int64() if name == LINE else pa.string())
        fields.append(pa.field(name, kind, metadata={UNUSABLE: unusable[name]} if name in unusable else None))
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in fields], schema=pa.schema(fields))
    whole = pa.concat_tables(tables, promote_options="default").select(empty.schema.names)
    yield from (empty, *whole.cast(empty.schema).to_batches())


def _column(path: Path, name: str, rows: list[_Row], unusable: dict[str, str]) -> Any:
    """Return the values of a column as texts, or as lists of texts; as JSON where some are neither."""
    values = [row.values.get(name) for row in rows]
    if all(value is None for value in values):
        return pa.nulls(len(rows))
    odd = next((row for row in rows if _is_odd(row.values.get(name))), None)
    if odd is not None:
        kind = "an object" if isinstance(odd.values[name], dict) else "a list of other things than texts"
        unusable.setdefault(name, f"line {odd.line} has {kind}")
    elif any(isinstance(value, list) for value in values):
        for row, value in zip(rows, values, strict=True):
            if value is not None and not isinstance(value, list):
                raise UserError(
                    f"{path}, line {row.line}: {name!r} must be a list of texts, as in other lines; got {shown(value)}"
                )
        return pa.array(values, pa.list_(pa.string()))
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _is_odd(value: Any) -> bool:
    """Return whether a value is neither a text, nor a number, nor a list of texts and nulls."""
    if isinstance(value, list):
        return not all(each is None or isinstance(each, str) for each in value)
    return isinstance(value, dict)

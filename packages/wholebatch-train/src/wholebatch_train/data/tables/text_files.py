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
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from wholebatch.app import UserError, shown

from .roles import RECOGNIZED
from .table import LINE, REASON, UNUSABLE, need_pyarrow

_ROWS = 65536  # of a record batch
_EXAMPLE = '{"image": "cat.png", "text": "a cat"}'
_UTF8 = "utf-8-sig"  # with or without the mark that Excel puts in front
_MOST_LETTERS = 2**27  # of a value
_BYTES = re.compile("[\udc80-\udcff]")  # as which the decoder writes bytes that are not UTF-8


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
                delimiter=said or _separator(path, header),
                quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
                skipinitialspace=True,
                strict=True,
            )
            if said:
                next(reader)
            rows = reader if has_quotes else ([*map(_unquote, row)] for row in reader)
            yield from _batches(path, reader, rows, bad)
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


def _batches(path: Path, reader: Any, rows_read: Iterator[list[str]], bad: list[str]) -> Iterator[Any]:
    header = [name.strip() for name in next((row for row in rows_read if row), [])]
    if bad:
        raise UserError(f"{path}, line {reader.line_num}: {bad[0]}")
    named = [place for place, name in enumerate(header) if name]
    names = [header[place] for place in named]
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise UserError(f"{path}, line {reader.line_num}: the column {repeated[0]!r} appears twice; rename one of them")
    rows: list[list[str | None]] = []
    numbers: list[int] = []
    reasons: list[str | None] = []
    line = reader.line_num
    for row in rows_read:
        line, begins = reader.line_num, line + 1  # quotes may hold line breaks
        if not any(row):
            continue
        reasons.append(bad[0] if bad else None)
        bad.clear()
        if reasons[-1] is not None:
            row = []
        if any(map(str.strip, row[len(header) :])):
            raise UserError(
                f"{path}, line {begins}: more values than columns; a text that holds a comma is "
                'written in double quotes, "like, this"'
            )
        rows.append([row[place] if place < len(row) else None for place in named])
        numbers.append(begins)
        if len(rows) == _ROWS:
            yield _batch(names, rows, numbers, reasons)
            rows, numbers, reasons = [], [], []
    yield _batch(names, rows, numbers, reasons)


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


def _separator(path: Path, header: str) -> str:
    if path.suffix == ".tsv":
        return "\t"
    return max(",", ";", "\t", key=header.count)  # the first of those that appear equally often


def _batch(names: list[str], rows: list[list[str | None]], numbers: list[int], reasons: list[str | None]) -> Any:
    pa = need_pyarrow()
    columns = [[row[place] for row in rows] for place in range(len(names))]
    arrays = [pa.array(column, pa.string()) for column in (*columns, reasons)]
    return pa.record_batch([*arrays, pa.array(numbers, pa.int64())], [*names, REASON, LINE])


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield record batches of a file with one JSON object a line.

    A value that is a list of texts stays one; other lists and objects become JSON, and their column cannot be used. A
    row that is not UTF-8 has null in all columns, and a reason.
    """
    with path.open(encoding=_UTF8, errors="surrogateescape") as lines:
        objects: list[dict[str, Any]] = []
        numbers: list[int] = []
        bad: list[str] = []
        schema = None
        for number, line in enumerate(_note_bad_lines(lines, bad), 1):
            if not line.strip():
                continue
            objects.append({REASON: bad.pop()} if bad else _object(path, number, line))
            numbers.append(number)
            if len(objects) == _ROWS:
                batch = _objects(path, objects, numbers, schema)
                schema = batch.schema
                yield batch
                objects, numbers = [], []
        if objects or schema is None:
            yield _objects(path, objects, numbers, schema)


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


def _objects(path: Path, objects: list[dict[str, Any]], numbers: list[int], schema: Any) -> Any:
    """Return a record batch of objects, with the `schema` of the batches before it, if there were any."""
    pa = need_pyarrow()
    names = list(dict.fromkeys(chain(*objects, [REASON])))
    if schema is not None:
        known = [name for name in schema.names if name != LINE]
        # Another key that is late is left out.
        if unknown := sorted(n for n in {*names} - {*known} if n.lower().rstrip("_0123456789") in RECOGNIZED):
            where = next(n for n, value in zip(numbers, objects, strict=True) if unknown[0] in value)
            raise UserError(
                f"{path}, line {where}: the key {unknown[0]!r} is in none of the lines before it; give it to each line"
            )
        names = known
    fields, arrays = [], []
    for name in names:
        values = [value.get(name) for value in objects]
        reason = next((f"line {n} has {_describe(v)}" for n, v in zip(numbers, values, strict=True) if _is_odd(v)), "")
        kind = pa.string()
        if not reason and any(isinstance(value, list) for value in values):
            kind = pa.list_(pa.string())
            for line, value in zip(numbers, values, strict=True):
                if value is not None and not isinstance(value, list):
                    raise UserError(
                        f"{path}, line {line}: {name!r} must be a list of texts, as in other lines; got {shown(value)}"
                    )
        else:
            values = [value if value is None else _as_text(value) for value in values]
        fields.append(pa.field(name, kind, metadata={UNUSABLE: reason} if reason else None))
        arrays.append(pa.array(values, kind))
    fields.append(pa.field(LINE, pa.int64()))
    batch = pa.RecordBatch.from_arrays([*arrays, pa.array(numbers, pa.int64())], schema=pa.schema(fields))
    if schema is None:
        return batch
    for name in names:
        before, now = schema.field(name), batch.schema.field(name)
        newly_odd = UNUSABLE in (now.metadata or {}) and UNUSABLE not in (before.metadata or {})
        empty = batch.column(name).null_count == len(batch)
        if newly_odd or (before.type != now.type and not empty):
            raise UserError(
                f"{path}, lines {numbers[0]} to {numbers[-1]}: {name!r} is not of the type of the lines before them; "
                "expected a text in each line, or a list of texts in each line"
            )
    return pa.RecordBatch.from_arrays(
        [pa.nulls(len(batch), f.type) if batch.column(f.name).null_count == len(batch) else batch.column(f.name)
         for f in schema], schema=schema
    )  # fmt: skip


def _is_odd(value: Any) -> bool:
    """Return whether a value is neither a text, nor a number, nor a list of texts and nulls."""
    if isinstance(value, list):
        return not all(each is None or isinstance(each, str) for each in value)
    return isinstance(value, dict)


def _describe(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list of other things than texts"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

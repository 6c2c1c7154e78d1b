"""Tar shards, as img2dataset and webdataset write them: a table of where each picture lies in which file.

The members that belong to one row have the same name up to its first dot: 000017.jpg, 000017.txt, 000017.json. The
headers are read once; a picture is read from its place when a batch needs it, in any order. Of the endings that
webdataset knows, those below are read; pickles (.pyd, .pth) and others are left alone.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._user_error import UserError
from .folders import PICTURES
from .table import MEMBER, need_pyarrow

_TEXTS = {"txt": "text", "text": "text", "caption": "caption", "cls": "label", "class": "label", "label": "label"}
_MOST_TEXT_BYTES = 2**20


def shard_batches(shards: list[Path]) -> Iterator[Any]:
    """Yield a record batch for each shard: `image` as {shard, offset, size}, texts, and the fields of .json files."""
    pa = need_pyarrow()
    place = pa.struct([("shard", pa.string()), ("offset", pa.int64()), ("size", pa.int64())])
    names: list[str] | None = None
    for shard in shards:
        rows = [row for row in _rows(shard) if "image" in row]
        found = list(
            dict.fromkeys(name for row in rows for name in row if not name.startswith("\0") and name != "image")
        )
        if names is None:
            names = found
        if missing := sorted(set(names) ^ set(found)):
            raise UserError(f"{shard} and {shards[0]} do not both have the field {missing[0]!r}")
        columns = [pa.array([row["image"] for row in rows], place)]
        columns += [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
        columns += [pa.array([f"{shard.name}, {row[MEMBER]}" for row in rows], pa.string())]
        yield pa.record_batch(columns, ["image", *names, MEMBER])


def _rows(shard: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a shard."""
    row: dict[str, Any] = {}
    stem = None
    try:
        with tarfile.open(shard, mode="r:") as members:
            for member in members:
                if not member.isreg():
                    continue
                folder, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                if (folder, key) != stem:
                    if row:
                        yield row
                    row, stem = {}, (folder, key)
                row |= _fields(shard, members, member, ending.lower())
    except tarfile.TarError as error:
        raise UserError(f"{shard} cannot be read as a tar file: {error}") from error
    if row:
        yield row


def _fields(shard: Path, members: tarfile.TarFile, member: tarfile.TarInfo, ending: str) -> dict[str, Any]:
    if f".{ending}" in PICTURES:
        image = {"shard": str(shard.absolute()), "offset": member.offset_data, "size": member.size}
        return {"image": image, MEMBER: member.name}
    if ending not in _TEXTS and ending != "json":
        return {}
    if member.size > _MOST_TEXT_BYTES:
        raise UserError(f"{shard}, {member.name}: {member.size} bytes; expected a text of at most {_MOST_TEXT_BYTES}")
    file = members.extractfile(member)
    assert file is not None
    try:
        content = file.read().decode("utf-8-sig")
        if ending != "json":
            return {_TEXTS[ending]: content.strip()}
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{shard}, {member.name}: not {'JSON' if ending == 'json' else 'UTF-8 text'} ({error})"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{shard}, {member.name}: expected a JSON object")
    return {name: each for name, each in value.items() if isinstance(each, str) and name != "image"}

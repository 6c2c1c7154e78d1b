"""Tar shards, as img2dataset and webdataset write them: a table of where each picture lies in which file.

The members that belong to one row have the same name up to its first dot: 000017.jpg, 000017.txt, 000017.json; they
are neighbors, as webdataset wants them. A member of its own, such as .txt, comes before a field of .json with its name.
The headers are read once; a picture is read from its place when a batch needs it, in any order. Of the endings that
webdataset knows, those below are read; pickles (.pyd, .pth) and others are left alone.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from wholebatch.app import UserError, cpus_of_a_rank

from .folders import OF_MACS, is_utf8
from .loader import WorkerDiedError, prepared
from .paths import PICTURES
from .table import MEMBER, REASON

_TEXTS = {"txt": "text", "text": "text", "caption": "caption", "cls": "label", "class": "label", "label": "label"}
_MOST_TEXT_BYTES = 2**20
_NO_PICTURE = "no picture stands beside it"
_FOR_WORKERS = 4  # shards that are worth their start


def shard_batches(shards: list[Path]) -> Iterator[Any]:
    """Yield a record batch for each shard: `image` as {shard, offset, size}, texts, and the fields of .json files.

    The first shard has the names of the fields; a row of a later one without a field has null there, as one without a
    picture has in `image`. Many shards are read by a worker process for each CPU.
    """
    workers = min(cpus_of_a_rank(1), len(shards)) if len(shards) >= _FOR_WORKERS else 0
    names: list[str] | None = None
    try:
        for batch in prepared(_batch, shards, workers=workers):
            by_name = dict(zip(batch.schema.names, batch.columns, strict=True))
            names = [*by_name][:-2] if names is None else names
            columns = [by_name[name] if name in by_name else pa.nulls(len(batch), pa.string()) for name in names]
            yield pa.record_batch([*columns, batch[MEMBER], batch[REASON]], [*names, MEMBER, REASON])
    except WorkerDiedError as error:
        raise UserError(f"--data: a process that reads the shards {error}") from error


def _batch(shard: Path) -> Any:
    """Return the rows of a shard as a record batch, with all fields of its own."""
    place = pa.struct([("shard", pa.string()), ("offset", pa.int64()), ("size", pa.int64())])
    endings: set[str] = set()
    rows = [*_rows(shard, endings)]
    if not any("image" in row for row in rows):
        members = f"its members end in {', '.join(sorted(endings)[:8])}" if endings else "it has no members"
        raise UserError(f"{shard} holds no pictures, such as 000017.jpg; {members}")
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("image", MEMBER, REASON)))
    columns = [pa.array([row.get("image") for row in rows], place)]
    columns += [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
    columns += [pa.array([f"{shard.name}, {row[MEMBER]}" for row in rows], pa.string())]
    columns += [pa.array([row.get(REASON, None if "image" in row else _NO_PICTURE) for row in rows], pa.string())]
    return pa.record_batch(columns, ["image", *names, MEMBER, REASON])


def _rows(shard: Path, endings: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a shard; `endings` gets those of its members."""
    row: dict[str, Any] = {}
    members_of: dict[str, str] = {}  # by the field of the row that each is
    stem, stems = None, set[tuple[str, str]]()
    try:
        with tarfile.open(shard, mode="r:") as members:
            for member in members:
                members.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them
                folder, _, name = member.name.rpartition("/")
                if not member.isreg() or name.startswith(".") or OF_MACS in folder.split("/"):
                    continue
                key, _, ending = name.partition(".")
                endings.add(f".{_as_utf8(ending)}")
                fields = _fields(shard, members, member, ending.lower())
                if not fields:
                    continue
                if (folder, key) != stem:
                    if row:
                        yield row
                    row, members_of, stem = {MEMBER: _as_utf8(member.name)}, {}, (folder, key)
                    if stem in stems:
                        raise UserError(
                            f"{shard}, {_as_utf8(member.name)}: other members of its row stand before other rows; the "
                            "members of a row must be neighbors: pack the files in the order of their names (tar "
                            "--sort=name)"
                        )
                    stems.add(stem)
                if ending.lower() == "json":
                    row = fields | row
                    continue
                field = next(iter(fields))
                if field in members_of:
                    raise UserError(
                        f"{shard}: {members_of[field]} and {_as_utf8(member.name)} are two "
                        f"{'picture' if field == 'image' else field}s of one row; expected one: give the other another "
                        "name, or leave it out"
                    )
                members_of[field] = _as_utf8(member.name)
                row |= fields
            _check_end(shard, members.offset)
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise UserError(f"{shard} cannot be read as a tar file: {error}; is it complete?") from error
    if row:
        yield row


def _check_end(shard: Path, offset: int) -> None:
    """Raise UserError unless zeros or the file's end follow: tarfile takes a header that it cannot read for the end."""
    with shard.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or 0 < len(block) < tarfile.BLOCKSIZE:
        raise UserError(f"{shard} cannot be read as a tar file: no header at byte {offset}; is it complete?")


def _fields(shard: Path, members: tarfile.TarFile, member: tarfile.TarInfo, ending: str) -> dict[str, Any]:
    name = _as_utf8(member.name)
    if f".{ending}" in PICTURES:
        if member.issparse():
            raise UserError(f"{shard}, {name}: a sparse member; expected a picture in one piece")
        image = {"shard": str(shard.absolute()), "offset": member.offset_data, "size": member.size}
        return {"image": image, MEMBER: name}
    if ending not in _TEXTS and ending != "json":
        return {}
    reason = f"{member.size} bytes; expected a text of at most {_MOST_TEXT_BYTES}"
    if member.size <= _MOST_TEXT_BYTES:
        file = members.extractfile(member)
        assert file is not None
        try:
            text = file.read().decode("utf-8-sig")
            return _json_fields(text, f"{shard}, {name}") if ending == "json" else {_TEXTS[ending]: text.strip()}
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 text: {error.reason} at byte {error.start}"
    return {**({} if ending == "json" else {_TEXTS[ending]: None}), REASON: f"{name}: {reason}"}


def _json_fields(text: str, where: str) -> dict[str, str]:
    """Return the texts and integers of a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object")
    fields = {name: str(each) for name, each in value.items() if isinstance(each, str) or type(each) is int}
    for name, each in fields.items():
        if not (is_utf8(name) and is_utf8(each)):
            raise UserError(f"{where}: half of a surrogate pair in {name!a}; write the whole pair")
    return {name: each for name, each in fields.items() if name != "image" and not name.startswith("\0")}


def _as_utf8(name: str) -> str:
    """Return the name of a member, which may have any bytes, as UTF-8."""
    return name.encode(errors="backslashreplace").decode()

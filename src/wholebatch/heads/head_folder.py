"""The folder of a saved head: a file of rows for each rank, and an index that is written last.

    rank-00000-of-00003.safetensors    slices of at most 65536 rows under the name of their first class:
                                       weight/000000000000, optimizer/weight/momentum_buffer/000000065536, ...
    index.json                         facts about the head, and the slices of each tensor: file, rows, digest

All files contain the id of the save that wrote them. With the index, any number of ranks find the slices with the rows
of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from .._base.bounded_json import Types, check_fields, is_digest, sealed, unsealed
from .._base.files import read_bounded, replacing
from .._base.settings import shown
from .._base.tensor_file import TensorFile, is_save_id, write_tensors

_INDEX = "index.json"
_OLD_INDEX = ".metadata"  # of torch.distributed.checkpoint, a pickle
_FORMAT = "wholebatch-head-1"
_ROWS = 65536  # the most rows of a slice
_MOST_INDEX_BYTES = 64 * 2**20
_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
_FACTS: Types = {
    "num_classes": int, "embedding_size": int, "sub_centers": int, "bias": bool, "margin": list, "step": int,
    "seed": int, "optimizer": (list, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """The place of a tensor's rows for the classes [first, first + rows)."""

    file: str
    first: int
    rows: int
    digest: str


@dataclass(frozen=True)
class Index:
    """The content of a folder."""

    folder: Path
    save: str  # the id of the save that wrote all of its files
    facts: dict[str, Any]  # about the head, by name
    slices: dict[str, list[Slice]]  # of each tensor with a row for each class, in the order of the classes
    whole: dict[str, Slice]  # the tensors that are the same on all ranks


def check_is_new(folder: Path) -> None:
    """Raise ValueError if the folder holds a checkpoint."""
    for name in (_INDEX, _OLD_INDEX):
        if (folder / name).exists() or (folder / name).is_symlink():
            raise ValueError(f"{folder} has a checkpoint already, {name}; save into a new folder")


def write_rows(
    folder: Path, rank: int, size: int, save: str, first: int, rows: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write a rank's file: the rows of its classes from `first` on, and on rank 0 the tensors that are not sharded.

    Return the file's entries in the index, in JSON's types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = f"rank-{rank:05d}-of-{size:05d}.safetensors"
    whole = whole if rank == 0 else {}
    parts = {
        name: {first + start: x[start : start + _ROWS] for start in range(0, len(x), _ROWS)} for name, x in rows.items()
    }
    tensors = {_key(name, row): part for name, by_row in parts.items() for row, part in by_row.items()}
    digests = write_tensors(folder / file, {**tensors, **whole}, {"format": _FORMAT, "save": save})
    slices = {
        name: [asdict(Slice(file, row, len(part), digests[_key(name, row)])) for row, part in by_row.items()]
        for name, by_row in parts.items()
    }
    return {"slices": slices, "whole": {name: asdict(Slice(file, 0, 0, digests[name])) for name in whole}}


def write_index(folder: Path, save: str, facts: Mapping[str, Any], written: Sequence[Mapping[str, Any]]) -> None:
    """Write the index, from the results of `write_rows` on each rank."""
    slices: dict[str, list[dict[str, Any]]] = {}
    for entries in written:
        for name, parts in entries["slices"].items():
            slices.setdefault(name, []).extend(parts)
    index = {"format": _FORMAT, "save": save, "head": facts, "slices": slices, "whole": written[0]["whole"]}
    with replacing(folder / _INDEX) as file:
        file.write(sealed(index))


def read_index(folder: Path) -> Index:
    """Read and check the index; raise ValueError if it is missing or damaged."""
    path = folder / _INDEX
    if (folder / _OLD_INDEX).exists():
        raise ValueError(
            f"{folder} is a folder of torch.distributed.checkpoint ({_OLD_INDEX}), which is not read because it is a "
            "pickle; save the head again with this version"
        )
    try:
        text = read_bounded(path, _MOST_INDEX_BYTES)
    except OSError as error:
        raise ValueError(f"{folder} holds no checkpoint of a head: {error}") from error
    source = str(path)
    value = unsealed(text, source)
    check_fields(value, source, {"format": str, "save": str, "head": dict, "slices": dict, "whole": dict})
    if value["format"] != _FORMAT or not is_save_id(value["save"]):
        raise ValueError(
            f"{source} must have format {_FORMAT!r} and the id of a save, got {shown(value['format'])} and "
            f"{shown(value['save'])}"
        )
    facts = check_fields(value["head"], source, _FACTS)
    for name, least in (("num_classes", 1), ("embedding_size", 1), ("sub_centers", 1), ("step", 0)):
        if not least <= facts[name] < 2**63:
            raise ValueError(f"{source}: {name} must be at least {least} and have 64 bits, got {shown(facts[name])}")
    if not -(2**63) <= facts["seed"] < 2**63:
        raise ValueError(f"{source}: seed must be an integer of 64 bits, got {shown(facts['seed'])}")
    for name in ("margin", "optimizer"):
        if not all(isinstance(x, str) for x in facts[name] or ()):
            raise ValueError(f"{source}: {name} must be a list of names, got {shown(facts[name])}")
    slices = {name: _slices(name, parts, facts["num_classes"], source) for name, parts in value["slices"].items()}
    whole = {name: _slice(x, source) for name, x in value["whole"].items()}
    for name, part in whole.items():
        if part.first or part.rows:
            raise ValueError(f"{source}: {shown(name)} has no rows of classes, got {part.rows} from {part.first} on")
    return Index(folder, value["save"], facts, slices, whole)


def _slice(value: Any, source: str) -> Slice:
    check_fields(value, source, {"file": str, "first": int, "rows": int, "digest": str})
    if not _FILE.fullmatch(value["file"]) or not is_digest(value["digest"]):
        raise ValueError(f"{source} has a slice in the file {shown(value['file'])}; expected one of the folder's own")
    return Slice(**value)


def _slices(name: str, parts: Any, count: int, source: str) -> list[Slice]:
    """Return a tensor's slices, if each of `count` classes has one row in them."""
    if not isinstance(parts, list):
        raise ValueError(f"{source}: the slices of {shown(name)} must be a list, got {shown(parts)}")
    slices, next_row = [_slice(part, source) for part in parts], 0
    for part in slices:
        if part.first != next_row or part.rows < 1:
            raise ValueError(f"{source}: {shown(name)} has rows from {part.first} on, expected them from {next_row} on")
        next_row += part.rows
    if next_row != count:
        raise ValueError(f"{source}: {shown(name)} has {next_row} rows, expected one for each of {count} classes")
    return slices


def read_rows(index: Index, name: str, wanted: Tensor, like: Tensor) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the slices of a tensor that have wanted classes, in order, each with its rows, of the shape of `like`'s.

    `wanted`, (C,), says for each class whether it is.
    """
    if name not in index.slices:
        raise ValueError(f"{index.folder} has no rows of {shown(name)}; it is damaged, or of another head")
    parts = [part for part in index.slices[name] if wanted[part.first : part.first + part.rows].any()]
    for file_name, parts_in_file in groupby(parts, key=attrgetter("file")):
        with _opened(index, file_name) as file:
            for part in parts_in_file:
                x = _read(index, file, part, _key(name, part.first), (part.rows, *like.shape[1:]))
                if not x.dtype.is_floating_point:
                    raise ValueError(f"{index.folder}: {shown(name)} must be of floating-point numbers, got {x.dtype}")
                yield part, x


def read_whole(index: Index, name: str, like: Tensor) -> Tensor:
    """Read a tensor that all ranks hold, of the shape and dtype of `like`."""
    if name not in index.whole:
        raise ValueError(f"{index.folder} has no {shown(name)}; it is damaged, or of another head")
    part = index.whole[name]
    with _opened(index, part.file) as file:
        x = _read(index, file, part, name, tuple(like.shape))
    if x.dtype != like.dtype:
        raise ValueError(f"{index.folder}: {shown(name)} must be {like.dtype}, got {x.dtype}")
    return x


@contextmanager
def _opened(index: Index, name: str) -> Iterator[TensorFile]:
    """Open a file of the folder, if it is of the index's save."""
    with TensorFile(index.folder / name) as file:
        if file.metadata.get("format") != _FORMAT or file.metadata.get("save") != index.save:
            raise ValueError(
                f"{file.path} belongs to another save, {shown(file.metadata.get('save'))}; the index beside it is of "
                f"save {index.save!r}"
            )
        yield file


def _read(index: Index, file: TensorFile, part: Slice, key: str, shape: tuple[int, ...]) -> Tensor:
    """Read a tensor with this shape and the index's digest."""
    entry = file.entries.get(key)
    if entry is None or entry.shape != shape or entry.digest != part.digest:
        raise ValueError(
            f"{file.path} is not the file that {index.folder / _INDEX} names: its {key!r} is missing, or has another "
            "shape or digest"
        )
    return file.read(key)


def _key(name: str, first: int) -> str:
    return f"{name}/{first:012d}"

"""The folder of a saved head: a file of rows for each rank, and an index that is written last.

    rank-00000-of-00003.safetensors    slices of at most 65536 rows under the name of their first class:
                                       weight/000000000000, optimizer/weight/momentum_buffer/000000065536, ...
    index.json                         facts about the head, and the slices of each tensor: file, rows, digest

All files contain the id of the save that wrote them. With the index, any number of ranks find the slices with the rows
of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
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
    """The content of a folder.

    Args:
        folder: the folder.
        save: the id of the save that wrote all of its files.
        facts: facts about the head, by name.
        slices: the slices of each tensor with a row for each class, in the order of the classes.
        whole: the tensors that are the same on all ranks, each as one slice.
    """

    folder: Path
    save: str
    facts: dict[str, Any]
    slices: dict[str, list[Slice]]
    whole: dict[str, Slice]


def check_is_new(folder: Path) -> None:
    """Raise ValueError if the folder holds a checkpoint."""
    for name in (_INDEX, _OLD_INDEX):
        if (folder / name).exists() or (folder / name).is_symlink():
            raise ValueError(f"{folder} has a checkpoint already, {name}; save into a new folder")


def write_rows(
    folder: Path, rank: int, size: int, save: str, first: int, rows: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write a rank's file: the rows of its classes from `first` on, and on rank 0 the tensors that are not sharded.

    Returns:
        The file's entries in the index, in JSON's types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = f"rank-{rank:05d}-of-{size:05d}.safetensors"
    entries: dict[str, list[tuple[str, int, int]]] = {}
    tensors: dict[str, Tensor] = {}
    for name, x in rows.items():
        for start in range(0, len(x), _ROWS):
            part = x[start : start + _ROWS]
            key = _key(name, first + start)
            tensors[key] = part
            entries.setdefault(name, []).append((key, first + start, len(part)))
    tensors |= {name: x for name, x in whole.items() if rank == 0}
    digests = write_tensors(folder / file, tensors, {"format": _FORMAT, "save": save})
    return {
        "slices": {
            name: [asdict(Slice(file, first, rows, digests[key])) for key, first, rows in parts]
            for name, parts in entries.items()
        },
        "whole": {name: asdict(Slice(file, 0, 0, digests[name])) for name in whole if rank == 0},
    }


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
    """Read and check the index.

    Raises:
        ValueError: if it is missing or damaged.
    """
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
    slices = {name: [_slice(x, source) for x in _parts(name, parts, source)] for name, parts in value["slices"].items()}
    for name, parts in slices.items():
        _check_cover(name, parts, facts["num_classes"], source)
    whole = {name: _slice(x, source) for name, x in value["whole"].items()}
    for name, part in whole.items():
        if part.first or part.rows:
            raise ValueError(f"{source}: {shown(name)} has no rows of classes, got {part.rows} from {part.first} on")
    return Index(folder, value["save"], facts, slices, whole)


def _parts(name: str, parts: Any, source: str) -> list[Any]:
    if not isinstance(parts, list):
        raise ValueError(f"{source}: the slices of {shown(name)} must be a list, got {shown(parts)}")
    return parts


def _slice(value: Any, source: str) -> Slice:
    check_fields(value, source, {"file": str, "first": int, "rows": int, "digest": str})
    if not _FILE.fullmatch(value["file"]) or not is_digest(value["digest"]):
        raise ValueError(f"{source} has a slice in the file {shown(value['file'])}; expected one of the folder's own")
    return Slice(**value)


def _check_cover(name: str, parts: list[Slice], count: int, source: str) -> None:
    """Raise ValueError unless each class has one row."""
    next_row = 0
    for part in parts:
        if part.first != next_row or part.rows < 1:
            raise ValueError(f"{source}: {shown(name)} has rows from {part.first} on, expected them from {next_row} on")
        next_row += part.rows
    if next_row != count:
        raise ValueError(f"{source}: {shown(name)} has {next_row} rows, expected one for each of {count} classes")


class Slices:
    """Read the slices that an index names; a context manager that keeps one file open."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: TensorFile | None = None

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def of(self, name: str) -> list[Slice]:
        """Return the slices of a tensor with a row for each class, in the order of the classes."""
        if name not in self._index.slices:
            raise ValueError(f"{self._index.folder} has no rows of {shown(name)}; it is damaged, or of another head")
        return self._index.slices[name]

    def rows(self, name: str, part: Slice, like: Tensor) -> Tensor:
        """Read a slice, whose rows have the shape of those of `like`."""
        x = self._read(part, _key(name, part.first), (part.rows, *like.shape[1:]))
        if not x.dtype.is_floating_point:
            raise ValueError(f"{self._index.folder}: {shown(name)} must be of floating-point numbers, got {x.dtype}")
        return x

    def whole(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor that all ranks hold, of the shape and dtype of `like`."""
        if name not in self._index.whole:
            raise ValueError(f"{self._index.folder} has no {shown(name)}; it is damaged, or of another head")
        x = self._read(self._index.whole[name], name, tuple(like.shape))
        if x.dtype != like.dtype:
            raise ValueError(f"{self._index.folder}: {shown(name)} must be {like.dtype}, got {x.dtype}")
        return x

    def _read(self, part: Slice, key: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor from a file of the index's save, with this shape and the index's digest."""
        file = self._file(part.file)
        entry = file.entries.get(key)
        if entry is None or entry.shape != shape or entry.digest != part.digest:
            raise ValueError(
                f"{file.path} is not the file that {self._index.folder / _INDEX} names: its {key!r} is missing, or has "
                "another shape or digest"
            )
        return file.read(key)

    def _file(self, name: str) -> TensorFile:
        path = self._index.folder / name
        if self._open is None or self._open.path != path:
            self._close()
            self._open = TensorFile(path)
            metadata = self._open.metadata
            if metadata.get("format") != _FORMAT or metadata.get("save") != self._index.save:
                raise ValueError(
                    f"{path} belongs to another save, {shown(metadata.get('save'))}; the index beside it is of save "
                    f"{self._index.save!r}"
                )
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _key(name: str, first: int) -> str:
    return f"{name}/{first:012d}"

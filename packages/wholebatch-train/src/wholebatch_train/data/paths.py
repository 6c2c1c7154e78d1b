"""The paths and patterns that `--data` accepts, checked before torch is imported and before anything is read."""

from __future__ import annotations

import glob
import os
import re
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from wholebatch.app import UserError

_COMPRESSED = (".gz", ".tgz", ".zst", ".xz", ".bz2", ".lz4", ".zip")
_MOST_NAMES = 10_000  # of a folder that are compared with a name
FILES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar")
PICTURES = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
     ".jp2", ".avif", ".ico", ".tga")
)  # fmt: skip
"""Endings of pictures, as Pillow names them."""


def check_path(data: str) -> None:
    """Raise UserError unless `--data` names something that exists and can be a table. No contents are read."""
    path = Path(data)
    try:
        is_there = path.exists()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--data: {data[:200]!r} cannot be read: {error.strerror or error}") from error
    if any(mark in data for mark in "*{[") and not is_there:
        expand_shards(data)
        return
    if not is_there:
        ending = near_miss(path, FILES)
        if not ending and path.suffix not in FILES:
            ending = f"; it must be 'glyphs', a folder or a {', '.join(FILES)} file"
        raise UserError(f"--data: there is no file or folder {data!r}{ending}")
    if path.is_dir():
        return
    if not path.is_file():
        raise UserError(f"--data must be a file or a folder; {data!r} is neither")
    _refuse_compressed([path])
    if path.suffix not in FILES:
        raise UserError(f"--data must be 'glyphs', a folder or a {', '.join(FILES)} file, got {data!r}")


def near_miss(path: Path, endings: tuple[str, ...] = ()) -> str:
    """Return "; did you mean ...?" if beside a path that is not there is a similar one, else ""."""
    similar: list[str] = []
    with suppress(OSError), os.scandir(path.parent) as entries:  # no such folder, or none that can be read
        fitting = [x.name for x in islice(entries, _MOST_NAMES) if x.name.endswith(endings) or x.is_dir()]
        others = [name for name in fitting if name != path.name]  # it may be a link to nothing
        similar = get_close_matches(path.name, others, 1, 0.75)
    return f"; did you mean {str(path.with_name(similar[0]))!r}?" if similar else ""


def _refuse_compressed(paths: list[Path]) -> None:
    for path in paths:
        if path.name.endswith(_COMPRESSED):
            raise UserError(
                f"--data: {str(path)!r} is compressed, and one cannot jump in it; decompress it to a "
                f"{path.with_suffix('').suffix or '.tar'} file"
            )


def expand_shards(data: str) -> list[Path]:
    """Return the shards of `--data`, in order: a .tar file, a folder of them, a pattern with * or {00..99}; else []."""
    path = Path(data)
    if path.is_dir():
        shards = sorted(path.glob("*.tar"))
        if not shards:
            _refuse_compressed([file for file in sorted(path.iterdir()) if {".tar", ".tgz"} & {*file.suffixes}])
        return shards
    if path.exists():
        return [path] if path.suffix == ".tar" else []
    shards = [Path(each) for part in _braces(data) for each in sorted(glob.glob(_pattern(part))) or [part]]
    missing = [each for each in shards if not each.is_file()]
    if missing:
        raise UserError(
            f"--data: {data!r} names {len(shards)} shards, {len(missing)} of which do not exist: {missing[0]}"
        )
    _refuse_compressed(shards)
    return shards


def _pattern(path: str) -> str:
    """Return a pattern whose marks in the names of folders that there are stand for themselves."""
    existing = next((folder for folder in Path(path).parents if folder.is_dir()), Path())
    return os.path.join(glob.escape(str(existing)), Path(path).relative_to(existing))


def _braces(pattern: str) -> list[str]:
    """Expand {a..b}, whose numbers keep the width of the first.

    >>> _braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    first, last = match.groups()
    if not int(first) <= int(last) < int(first) + 10**6:
        raise UserError(f"--data: {match[0]!r} in {pattern!r} must be a range of at most a million shards, upwards")
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [each for n in numbers for each in _braces(pattern[: match.start()] + n + pattern[match.end() :])]

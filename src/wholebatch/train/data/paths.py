"""What `--data` may name, checked before torch is imported and before anything is read."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from ..._user_error import UserError

FILES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar")


def check_path(data: str) -> None:
    """Raise UserError unless `--data` names something that exists and can be a table. No contents are read."""
    path = Path(data)
    if any(mark in data for mark in "*{[") and not path.exists():
        expand_shards(data)
        return
    if not path.exists():
        ending = "" if path.suffix in FILES else f"; it must be 'glyphs', a folder or a {', '.join(FILES)} file"
        raise UserError(f"--data: there is no file or folder {data!r}{ending}")
    if path.is_dir():
        return
    if not path.is_file():
        raise UserError(f"--data must be a file or a folder; {data!r} is neither")
    if data.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz")):
        raise UserError(f"--data: {data!r} is compressed, and one cannot jump in it; decompress it to a .tar file")
    if path.suffix not in FILES:
        raise UserError(f"--data must be 'glyphs', a folder or a {', '.join(FILES)} file, got {data!r}")


def expand_shards(data: str) -> list[Path]:
    """Return the shards that `--data` names, in order: a .tar file, a folder of them, a pattern with * or {00..99}.

    [] for anything else.
    """
    path = Path(data)
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    if path.exists():
        return [path] if path.suffix == ".tar" else []
    found = [Path(each) for part in _braces(data) for each in sorted(glob.glob(part)) or [part]]
    missing = [each for each in found if not each.is_file()]
    if missing:
        raise UserError(
            f"--data: {data!r} names {len(found)} shards, {len(missing)} of which do not exist: {missing[0]}"
        )
    return found


def _braces(pattern: str) -> list[str]:
    """Expand {a..b}, whose numbers keep the width of the first.

    >>> _braces("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not found:
        return [pattern]
    first, last = found.groups()
    if not int(first) <= int(last) < int(first) + 10**6:
        raise UserError(f"--data: {found[0]!r} in {pattern!r} must be a range of at most a million shards, upwards")
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [each for n in numbers for each in _braces(pattern[: found.start()] + n + pattern[found.end() :])]

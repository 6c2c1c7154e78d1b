"""A folder of pictures as a table: a subfolder for each class, texts beside the pictures, or texts that are names."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from wholebatch.app import UserError, read_bounded

from .paths import PICTURES
from .table import MEMBER, REASON

_MOST_TEXT_BYTES = 2**20
_SHOWN = 5  # names in a line
OF_MACS = "__MACOSX"  # a folder in their archives of what is no file of the user's


@dataclass(frozen=True)
class FolderFacts:
    """The pictures of a folder, and how they get their texts."""

    pictures: list[str]
    """Paths relative to the folder, sorted."""
    texts: dict[str, str]
    """Paths of the .txt files, by the same without their ending, in composed form."""
    kind: str
    """"class": the subfolder; "beside": the .txt file; "name": the file's name."""

    strays: list[str]
    """Pictures beside the subfolders of classes, which have none."""
    others: Counter[str]
    """The endings of the other files."""

    @property
    def said(self) -> Iterator[str]:
        """Lines about it."""
        how = {
            "class": "the text of a picture is the name of its subfolder",
            "beside": "the text of a picture is the .txt file beside it",
            "name": "the text of a picture is the name of its file",
        }[self.kind]
        yield f"{len(self.pictures):,} pictures in a folder: {how}"
        if self.strays:
            names = [*map(repr, self.strays[:_SHOWN]), *["..."] * (len(self.strays) > _SHOWN)]
            yield f"pictures in no subfolder are left out, {len(self.strays):,}: {', '.join(names)}"
        if self.others:
            yield f"other files are left out: {_counts_in_words(self.others)}"


def folder_facts(path: Path) -> FolderFacts:
    """List a folder's pictures, those behind links to folders, too."""
    pictures, texts, others = [], {}, Counter[str]()
    for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != OF_MACS)
        inside = Path(folder).relative_to(path)
        if os.path.islink(folder):
            _check_link(path, inside)
        for name in sorted(names):
            stem, ending = os.path.splitext(name)
            if name.startswith("."):
                continue
            if ending.lower() in PICTURES:
                pictures.append((inside / name).as_posix())
            elif ending.lower() == ".txt":
                texts[unicodedata.normalize("NFC", (inside / stem).as_posix())] = (inside / name).as_posix()
            else:
                others[(ending.lower() or "without an ending") if is_utf8(ending) else "not UTF-8"] += 1
    if not pictures:
        listing = f"; its files are {_counts_in_words(others)}" if others else ""
        raise UserError(
            f"--data: the folder {str(path)!r} holds no pictures, no .tar shards and no saved data set; expected files "
            f"such as .png and .jpg, in one subfolder for each class or with texts beside them{listing}"
        )
    pictures.sort()
    if any(_stem(name) in texts for name in pictures):
        return FolderFacts(pictures, texts, "beside", [], others)
    strays = [name for name in pictures if "/" not in name]
    class_pictures = [name for name in pictures if "/" in name]
    if strays and (len(strays) >= len(class_pictures) or len({*map(os.path.dirname, class_pictures)}) < 2):
        return FolderFacts(pictures, texts, "name", [], others)
    return FolderFacts(class_pictures, texts, "class", strays, others)


def _stem(name: str) -> str:
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])


def _counts_in_words(endings: Counter[str]) -> str:
    counts = [f"{count:,} {ending}" for ending, count in endings.most_common()]
    return ", ".join(counts[:_SHOWN] + ["..."] * (len(counts) > _SHOWN))


def _check_link(path: Path, link: Path) -> None:
    """Raise UserError if a link to a folder leads to one that it lies in, so that a walk would not end."""
    target = (path / link).resolve()
    if any((path / above).resolve().is_relative_to(target) for above in link.parents):
        raise UserError(f"--data: {str(path / link)!r} is a link to {str(target)!r}, in which it lies; remove the link")


def _raise(error: OSError) -> None:
    """End the walk, which would leave out a folder that cannot be read."""
    raise error


def folder_batches(path: Path, facts: FolderFacts) -> Iterator[Any]:
    """Yield one record batch with the columns `image` (a path) and `text`, or `label` for classes."""
    for name in facts.pictures:
        if not is_utf8(name):
            raise UserError(f"{path}: the file name {os.fsencode(name)!r} is not UTF-8; rename the file")
    texts, reasons = zip(*(_text(path, name, facts) for name in facts.pictures), strict=True)
    columns = [pa.array(column, pa.string()) for column in (facts.pictures, texts, facts.pictures, reasons)]
    yield pa.record_batch(columns, ["image", "label" if facts.kind == "class" else "text", MEMBER, REASON])


def _text(path: Path, name: str, facts: FolderFacts) -> tuple[str | None, str | None]:
    """Return the text of a picture and None, or None and the reason why it has no text."""
    stem = _stem(name)
    if facts.kind == "class":
        return in_words(name.split("/")[-2]), None
    if facts.kind == "name":
        return in_words(stem.rpartition("/")[2]), None
    if stem not in facts.texts:
        return None, f"there is no text beside it, {stem + '.txt'!r}; other pictures have one"
    file = path / facts.texts[stem]
    try:
        text = read_bounded(Path(os.path.realpath(file)), _MOST_TEXT_BYTES).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return None, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}"
    except ValueError as error:  # too many bytes, or no regular file
        return None, str(error)
    return (text, None) if text else (None, f"{file} is empty; expected the text of {name}")


def is_utf8(name: str) -> bool:
    """Return whether a name can be written as UTF-8, which Linux does not require of a file's name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def in_words(name: str) -> str:
    """Return a file's or folder's name as words.

    >>> in_words("red-breasted_merganser")
    'red breasted merganser'
    """
    return re.sub(r"[\s_-]+", " ", name).strip() or name

"""A folder of pictures as a table: a subfolder for each class, texts beside the pictures, or texts that are names."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa

from wholebatch.app import UserError, read_bounded

from .paths import PICTURES
from .table import MEMBER, REASON, Table

_MOST_TEXT_BYTES = 2**20
_SHOWN = 5  # names in a line
OF_MACS = "__MACOSX"  # a folder in their archives of what is no file of the user's


def folder_table(path: Path) -> Table:
    """Return the pictures of a folder, and of links in it: `image` (a path), and `text`, or `label` for classes."""
    pictures, texts, others = _list_files(path)
    strays, class_pictures = ([name for name in pictures if ("/" in name) == is_class] for is_class in (False, True))
    rows: list[tuple[str | None, str | None]]
    has_few_classes = len(strays) >= len(class_pictures) or len({*map(os.path.dirname, class_pictures)}) < 2
    if any(_stem(name) in texts for name in pictures):
        how, column, strays = "the .txt file beside it", "text", []
        rows = [_text_beside(path, name, texts) for name in pictures]
    elif strays and has_few_classes:
        how, column, strays = "the name of its file", "text", []
        rows = [(in_words(_stem(name).rpartition("/")[2]), None) for name in pictures]
    else:
        how, column, pictures = "the name of its subfolder", "label", class_pictures
        rows = [(in_words(name.split("/")[-2]), None) for name in pictures]
    for name in pictures:
        if not is_utf8(name):
            raise UserError(f"{path}: the file name {os.fsencode(name)!r} is not UTF-8; rename the file")
    said = [f"{len(pictures):,} pictures in a folder: the text of a picture is {how}"]
    if strays:
        names = [*map(repr, strays[:_SHOWN]), *["..."] * (len(strays) > _SHOWN)]
        said.append(f"pictures in no subfolder are left out, {len(strays):,}: {', '.join(names)}")
    if others:
        said.append(f"other files are left out: {_counts_in_words(others)}")
    columns = [pa.array(each, pa.string()) for each in (pictures, *zip(*rows, strict=True))]
    arrow = pa.table([columns[0], columns[1], columns[0], columns[2]], ["image", column, MEMBER, REASON])
    return Table(path, arrow, path, tuple(said))


def _list_files(path: Path) -> tuple[list[str], dict[str, str], Counter[str]]:
    """Return the pictures, sorted; the .txt files, by their path without its ending, in composed form; other endings.

    Paths are relative to the folder.
    """
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
    return sorted(pictures), texts, others


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


def _text_beside(path: Path, name: str, texts: dict[str, str]) -> tuple[str | None, str | None]:
    """Return the text of a picture and None, or None and the reason why it has no text."""
    stem = _stem(name)
    if stem not in texts:
        return None, f"there is no text beside it, {stem + '.txt'!r}; other pictures have one"
    file = path / texts[stem]
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

"""The user's (image path, text) pairs, from a JSON-lines or CSV file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..._user_error import UserError
from ..config import check_data_path
from .pairs import Pairs
from .pictures import read_image

_EXAMPLE = {".jsonl": '{"image": "cat.png", "text": "a cat"}', ".csv": "a header line: image,text"}


def file_pairs(path: Path, *, image_size: int, channels: int) -> Pairs:
    """Read every pair; the first unusable line is a UserError that names it."""
    check_data_path(path)
    try:
        rows = list(_jsonl(path) if path.suffix == ".jsonl" else _csv(path))
    except OSError as error:
        raise UserError(f"--data: {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise UserError(f"{path} holds no pairs; each needs an image and a text, as in {_EXAMPLE[path.suffix]}")
    images = [_image(path.parent / image, f"{path}, line {line}", image_size, channels) for line, image, _ in rows]
    return Pairs.grouped_by_text(torch.stack(images), [text for _, _, text in rows])


def _jsonl(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error})") from error
                yield number, *_pair(value, path, number)


def _csv(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        if reader.fieldnames is not None and not {"image", "text"} <= set(reader.fieldnames):
            raise UserError(f"{path}, line 1: the columns are {reader.fieldnames}; expected image and text among them")
        for value in reader:
            if None in value:
                raise UserError(
                    f"{path}, line {reader.line_num}: more values than columns; a text that holds a comma is "
                    'written in double quotes, "like, this"'
                )
            yield reader.line_num, *_pair(value, path, reader.line_num)


def _pair(value: Any, path: Path, number: int) -> tuple[str, str]:
    image = value.get("image") if isinstance(value, dict) else None
    text = value.get("text") if isinstance(value, dict) else None
    if not (isinstance(image, str) and image.strip() and isinstance(text, str) and text.strip()):
        raise UserError(
            f"{path}, line {number}: expected an image and a text, as in {_EXAMPLE[path.suffix]}; got {value}"
        )
    if any("\ud800" <= character <= "\udfff" for character in image + text):
        raise UserError(f"{path}, line {number}: half of a surrogate pair in {value!a}")
    return image, text.strip()


def _image(path: Path, where: str, size: int, channels: int) -> torch.Tensor:
    try:
        return read_image(path, size=size, channels=channels)
    except FileNotFoundError as error:
        raise UserError(f"{where}: there is no image {str(path)!r}") from error
    except ValueError as error:
        raise UserError(f"{where}: {str(path)!r} cannot be read as an image ({error})") from error

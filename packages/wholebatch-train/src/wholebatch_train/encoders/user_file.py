"""An encoder from a Python file of the user: FILE.py:FUNCTION, whose function returns a module."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from wholebatch.app import UserError

from ..config import Kind
from .encoder import FixedEncoder, Inputs, map_tensors
from .libraries import nearest

COPY = "encoder.py"
_ITEMS = ("one", "two words")


@dataclass(frozen=True)
class Stacked:
    """Prepare items one by one, and stack their tensors."""

    preprocess: Any

    def __call__(self, items: Sequence[Any]) -> Inputs:
        """Map b items to a tensor, or to a dictionary of tensors, of b rows."""
        tensors = [self.preprocess(item) for item in items]
        if isinstance(tensors[0], Mapping):
            return {key: torch.stack([each[key] for each in tensors]) for key in tensors[0]}
        return torch.stack(tensors)


class FileEncoder(FixedEncoder):
    """The module that a function of the user's returns.

    It has `prepare(items)`, or `preprocess(item)` for one picture, or `tokenize(texts)`; and may have `width`, and
    `channels`, 1 or 3, of the pictures that it reads.
    """

    form = "file"

    def __init__(self, path: Path, function: str, value: str, kind: Kind) -> None:
        super().__init__()
        self.kind, self._path, self._function = kind, path, function
        self.model = _make_module(path, function, value)
        self.channels = getattr(self.model, "channels", 3)
        if self.channels not in (1, 3):
            raise UserError(f"{value}: channels must be 1 or 3, got {self.channels!r}")
        self.prepare = _prepare(self.model, value, kind)
        self.eval()
        with torch.no_grad():
            self.width = _width(self, value)

    def forward(self, inputs: Inputs) -> Tensor:
        """Map what `prepare` returned for b items to (b, width)."""
        rows: Tensor = self.model(inputs)
        return rows

    def save(self, folder: Path) -> dict[str, Any]:
        shutil.copyfile(self._path, folder / COPY)
        return {"function": self._function, "kind": self.kind}


def _make_module(path: Path, function: str, value: str) -> nn.Module:
    if not path.is_file():
        raise UserError(f"{value}: there is no file {str(path)!r}")
    name = f"wholebatch_user_{zlib.crc32(str(path.absolute()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # what its functions return is pickled by this name
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # no compiled file beside it is read
    except Exception as error:
        raise UserError(f"{value}: {str(path)!r} cannot be imported: {_reason(error)}") from error
    make = getattr(module, function, None)
    if not callable(make):
        names = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
        listed = f"its functions are {', '.join(names)}" if names else "it has no functions"
        raise UserError(f"{value}: {str(path)!r} has no function {function!r}; {listed}{nearest(function, names)}")
    try:
        model = make()
    except Exception as error:
        raise UserError(f"{value}: {function}() raised {_reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{value}: {function}() must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _prepare(model: nn.Module, value: str, kind: str) -> Any:
    prepare, preprocess = getattr(model, "prepare", None), getattr(model, "preprocess", None)
    tokenize = getattr(model, "tokenize", None)
    if callable(prepare):
        return prepare
    if kind == "text" and callable(tokenize):
        return tokenize
    if callable(preprocess):
        return Stacked(preprocess)
    names = "prepare(items), or preprocess(item)" + (", or tokenize(texts)" if kind == "text" else "")
    raise UserError(f"{value}: the module must have {names}, to turn items into what it reads; it has none of these")


def _width(encoder: FileEncoder, value: str) -> int:
    """Return the columns of the result for two items, once everything about it is right."""
    items = list(_ITEMS) if encoder.kind == "text" else _pictures(encoder.channels)
    try:
        inputs = encoder.prepare(items)
    except Exception as error:
        raise UserError(f"{value}: preparing {len(items)} items raised {_reason(error)}") from error
    rows: list[int] = []

    def count(x: Any) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError(type(x).__name__)
        rows.append(len(x) if x.dim() else -1)
        return x

    try:
        map_tensors(count, inputs)
    except TypeError as error:
        raise UserError(
            f"{value}: prepare must return a tensor, a named tuple of tensors or a dictionary of tensors, got "
            f"{type(inputs).__name__}"
        ) from error
    if any(number != len(items) for number in rows):
        raise UserError(
            f"{value}: prepare must return tensors with a row for each of {len(items)} items, got rows {rows}"
        )
    try:
        output = encoder(inputs)
    except Exception as error:
        raise UserError(f"{value}: the module raised {_reason(error)} for {len(items)} items") from error
    shape = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    if not (
        isinstance(output, Tensor) and output.dim() == 2 and len(output) == len(items) and output.is_floating_point()
    ):
        raise UserError(f"{value}: the module must map {len(items)} items to floats ({len(items)}, width), got {shape}")
    declared = getattr(encoder.model, "width", None)
    if isinstance(declared, int) and declared != output.shape[1]:
        raise UserError(f"{value}: the module's width is {declared}, but its rows have {output.shape[1]} columns")
    return output.shape[1]


def _pictures(channels: int) -> list[Any]:
    mode, color = ("L", 128) if channels == 1 else ("RGB", (128, 64, 32))
    return [Image.new(mode, (40, 30), color), Image.new(mode, (30, 40), 0)]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

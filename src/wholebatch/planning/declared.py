"""A loss that a user has declared: found by its name, and called with a batch.

    loss_fn                       a PairLoss whose functions read no data, and whose parameters the constructor got
    make(rows, embedding_size)    returns a PairLoss and the further arguments of its call with so many rows of a rank:
                                  x_data, y_data, candidates, ...; {"y": None} if the rows of x are the columns
    "losses.py:make"              either of them, by its file or its module and its name

Features are random rows of length 1. With several similarities, these share the numbers of a row evenly.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .._base.settings import shown
from .._base.user_error import UserError
from ..pair_loss import PairLoss
from ..pair_loss.module import arguments_of
from ..pair_loss.similarity import ONE
from ..pair_loss.step_counts import tiles_held
from ..partition import Partition
from .form import Form

Make = Callable[[int, int], tuple[PairLoss, Mapping[str, Any]]]
DeclaredLoss = str | PairLoss | Make
_FEW, _WIDE = 64, 64  # rows, and numbers of a row, of a call that shows what a loss is
_FORM = "a wb.PairLoss, or a function of (rows, embedding_size) that returns one and the further arguments of its call"


def is_declared(loss: object) -> TypeGuard[DeclaredLoss]:
    """Return whether an argument is no name of a built-in loss."""
    return ":" in loss if isinstance(loss, str) else callable(loss)


def name_of(loss: DeclaredLoss) -> str:
    """Return the name under which rates and tables have a declared loss."""
    if isinstance(loss, str):
        return loss
    return "PairLoss" if isinstance(loss, PairLoss) else str(getattr(loss, "__qualname__", type(loss).__name__))


def find(loss: DeclaredLoss) -> PairLoss | Make:
    """Return the loss or the function that a name like "losses.py:make" stands for.

    Raises:
        UserError: if there is none.
    """
    if not isinstance(loss, str):
        return loss
    place, _, attribute = loss.rpartition(":")
    if not place or not attribute.isidentifier():
        raise UserError(f"name a declared loss as FILE.py:NAME or MODULE:NAME, as in my_losses.py:lifted; got {loss!r}")
    try:
        module = _module_in(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place} cannot be imported: there is no module {error.name!r} here; name a file as in "
            f"{place}.py:{attribute}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise UserError(f"{place} has no {attribute!r}")
    candidate = getattr(module, attribute)
    if not callable(candidate):
        raise UserError(f"{loss} must be {_FORM}; got {shown(candidate)}")
    loss_or_make: PairLoss | Make = candidate
    return loss_or_make


def _module_in(path: Path) -> Any:  # a module of the user
    """Return the module in a file, which may import the files beside it."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module, folder = importlib.util.module_from_spec(spec), str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def _make(loss: DeclaredLoss, rows: int, embedding_size: int) -> tuple[PairLoss, Mapping[str, Any]]:
    """Return the loss and the further arguments of a call that the user's function makes."""
    factory = find(loss)
    try:
        result: Any = (factory, {}) if isinstance(factory, PairLoss) else factory(rows, embedding_size)
    except Exception as error:  # whatever a user's function raises
        raise UserError(f"{name_of(loss)} must be {_FORM}; it raised {type(error).__name__}: {error}") from error
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    loss_fn, more = pair
    if not isinstance(loss_fn, PairLoss) or not isinstance(more, Mapping):
        raise UserError(f"{name_of(loss)} must be {_FORM}; it returned {shown(result)}")
    if "x" in more or more.get("y") is not None:
        raise UserError(f"{name_of(loss)} must return arguments without x and y, which are random; only y=None may be")
    return loss_fn, more


def call_of(
    loss: DeclaredLoss,
    rows: int,
    embedding_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # it is frozen
    seed: int = 0,
) -> tuple[PairLoss, dict[str, Any]]:
    """Return a declared loss and the arguments of a call with this rank's rows; features are leaves with a gradient.

    Raises:
        UserError: if the user's function does not return a loss and arguments, or features are too narrow.
    """
    loss_fn, more = _make(loss, rows, embedding_size)
    loss_fn = copy.deepcopy(loss_fn)  # gradients and device of the user's stay as they are
    kinds = loss_fn.declaration.kinds
    if embedding_size < len(kinds):
        raise UserError(
            f"the embedding size is that of all similarities together, at least {len(kinds)}; got {embedding_size}"
        )
    widths = dict(zip(kinds, Partition.even(embedding_size, len(kinds)).counts, strict=True))
    generator = torch.Generator().manual_seed(seed)

    def features() -> Tensor | dict[str, Tensor]:
        parts = {
            name: normalize(torch.randn(rows, width, generator=generator), dim=1).to(device, dtype).requires_grad_()
            for name, width in widths.items()
        }
        return parts.get(ONE, parts)

    arguments = {"x": features()}
    if not loss_fn.declaration.symmetric and "y" not in more:
        arguments["y"] = features()
    moved = {name: _move(device, x) for name, x in more.items() if name != "y"}
    return loss_fn.to(device), {**arguments, **moved}


def _move(device: torch.device, value: Any) -> Any:  # a tensor, or a mapping of them, or whatever else a call takes
    if isinstance(value, Mapping):
        return {name: _move(device, x) for name, x in value.items()}
    return value.to(device) if isinstance(value, Tensor | torch.nn.Module) else value


def leaves_of(loss_fn: PairLoss, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the leaves of a call that get a gradient: features, data and parameters."""
    values: list[Any] = [*arguments.values()]
    for value in arguments.values():
        values += value.values() if isinstance(value, Mapping) else []
    values += [p for module in values if isinstance(module, torch.nn.Module) for p in module.parameters()]
    values += loss_fn.parameters()
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]


def with_options(loss_fn: PairLoss, **options: Any) -> PairLoss:
    """Return the same loss, with the same parameters, and other options: group, exchange, memory, ..."""
    copied = copy.copy(loss_fn)
    copied.options = replace(loss_fn.options, **options)
    return copied


def declared(loss: DeclaredLoss, dtype: torch.dtype) -> Form:
    """Return the form of a user's loss. Steps of few rows run on the CPU.

    Raises:
        UserError: if the loss cannot be called with such arguments.
    """
    similarities = len(_make(loss, _FEW, _WIDE)[0].declaration.kinds)
    loss_fn, arguments = call_of(loss, _FEW, max(_WIDE, similarities), dtype=dtype)
    try:
        call = arguments_of(loss_fn, **arguments)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{name_of(loss)} cannot be called with random features alone: {error}. Data and parameters of its call "
            "come from a function of (rows, embedding_size): return loss_fn, {'x_data': ..., 'parameters': ...}"
        ) from error
    declaration = loss_fn.declaration
    return Form(
        towers=1 if call.y is None else 2,
        symmetric=declaration.symmetric,
        similarities=similarities,
        tiles=tiles_held(declaration, call),
        source=loss,
    )

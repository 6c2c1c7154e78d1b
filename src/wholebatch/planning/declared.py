"""A loss that a user has declared: found by its name, called with a batch, and counted on a few rows.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .._base.live_bytes import Counted
from .._base.settings import shown
from .._base.user_error import UserError
from ..pair_loss import PairLoss
from ..pair_loss.arguments import Arguments
from ..pair_loss.module import arguments_of
from ..pair_loss.row_data import PARTNER
from ..pair_loss.similarity import ONE
from ..pair_loss.step_counts import SIDE, TILES, count_step, of_an_entry
from ..partition import Partition

Make = Callable[[int, int], tuple[PairLoss, Mapping[str, Any]]]
DeclaredLoss = str | PairLoss | Make
_NARROW, _WIDE = 2, 1024  # numbers of each similarity, and of all together, while a step is counted
_FEW, _MORE, _SIDE = 512, 768, 256  # rows and tiles; partners are computed 256 rows at a time
_FORM = "a wb.PairLoss, or a function of (rows, embedding_size) that returns one and the further arguments of its call"


@dataclass(frozen=True)
class Counts:
    """The bytes of a declared loss, counted in steps of few rows.

    Args:
        symmetric: whether half of the tiles suffice.
        similarities: the number of them, which share the numbers of a row.
        towers: 1 if the rows of x are the columns, too, else 2.
        of_tile: bytes that are held at a time for each entry of a tile.
        of_row: bytes for each row, beside its features.
        of_feature: bytes for each number of a row while tiles are there, with gradients of both sides.
        after: bytes for each number of a row when they are gone, where similarities of partners have their gradient.
        moved: bytes that operations read and write for each entry of S.
        learned_of_columns: learned numbers of a column, whose gradients are reduced to its owner.
    """

    symmetric: bool
    similarities: int
    towers: int
    of_tile: float
    of_row: float
    of_feature: float
    after: float
    moved: float
    learned_of_columns: int


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
        raise UserError(f"{place} cannot be imported: there is no module {error.name!r} here") from error
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

    Args:
        loss: as given by the user.
        rows: on this rank.
        embedding_size: d, numbers of a row of all similarities together.
        dtype: of the features.
        device: of all tensors.
        seed: of the features.

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


def _make_call(loss: DeclaredLoss, rows: int, embedding_size: int, dtype: torch.dtype) -> tuple[PairLoss, Arguments]:
    """Return a loss and the checked arguments of a call of it."""
    loss_fn, arguments = call_of(loss, rows, embedding_size, dtype=dtype)
    try:
        return loss_fn, arguments_of(loss_fn, **arguments)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{name_of(loss)} cannot be called with random features alone: {error}. Data and parameters of its call "
            "come from a function of (rows, embedding_size): return loss_fn, {'x_data': ..., 'parameters': ...}"
        ) from error


def count(loss: DeclaredLoss, dtype: torch.dtype) -> Counts:
    """Return what steps of few rows show of a loss. They run on the CPU.

    Raises:
        UserError: if the loss cannot be called with such arguments.
    """
    counted: dict[tuple[int, int], Counted] = {}
    rows, names = TILES * SIDE, len(_make(loss, TILES * SIDE, _WIDE)[0].declaration.kinds)
    width, wide = _NARROW * names, max(_WIDE, names)
    loss_fn, call = _make_call(loss, rows, width, dtype)
    declaration = loss_fn.declaration

    def held(rows: int, embedding_size: int, side: int) -> Counted:
        if (rows, embedding_size) not in counted:
            fn, arguments = _make_call(loss, rows, embedding_size, dtype)
            counted[rows, embedding_size] = count_step(fn.declaration, arguments, side)
        return counted[rows, embedding_size]

    def narrow(side: int) -> Counted:
        return held(TILES * side, width, side)

    of_feature = (held(rows, 2 * width, SIDE).held - narrow(SIDE).held) / (rows * width)
    after = (held(_MORE, wide, _SIDE).held - held(_FEW, wide, _SIDE).held) / ((_MORE - _FEW) * wide)
    tiles = TILES * (TILES + 1) // 2 if declaration.symmetric else TILES**2
    linear = 2 * narrow(SIDE).held - narrow(2 * SIDE).held / 2
    learned = sum(x.requires_grad for x in (call.x_data if call.y is None else call.y_data).values())
    learned += len(declaration.distances) + (PARTNER in declaration.reads.y) * len(declaration.kinds)
    return Counts(
        symmetric=declaration.symmetric,
        similarities=names,
        towers=1 if call.y is None else 2,
        of_tile=of_an_entry(lambda side: narrow(side).held),
        of_row=linear / rows - of_feature * width,
        of_feature=of_feature,
        after=after,
        moved=of_an_entry(lambda side: narrow(side).moved) / tiles,
        learned_of_columns=learned,
    )

"""Which pictures are equal, byte by byte, so that none of them stands on both sides of the held-out split."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._user_error import UserError
from .sides import FilePictures

MOST = 200_000
"""Beyond so many pictures of equal sizes, their bytes are not compared: a start must not read millions of files."""


def numbers_of_pictures(side: FilePictures) -> tuple[Tensor, str]:
    """Return a number for each row, (n,), equal for equal pictures, and a line where bytes were not compared.

    Pictures of different sizes differ, so only those of equal sizes are read. A path named twice is one picture.

    Raises:
        UserError: a row without a picture, or with the path of none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    table, column = side.table, side.table.arrow[side.column]
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise UserError(f"{table.where(row)}: the image, column {side.column!r}, is empty")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        _check_paths(side, column)
        codes = column.combine_chunks().dictionary_encode()
        codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
        numbers = torch.from_numpy(codes.indices.to_numpy(zero_copy_only=False).astype("int64"))
        rows = first_of_each(numbers)
        if len(rows) > MOST:
            return numbers, f"{len(rows):,} pictures: equal ones under two names were not looked for"
        sizes = [_size(side, row) for row in rows.tolist()]
    else:
        numbers, rows = torch.arange(len(column)), torch.arange(len(column))
        sizes = _sizes(side, column)
    return _merged(side, numbers, rows, torch.tensor(sizes, dtype=torch.int64))


def _check_paths(side: FilePictures, column: Any) -> None:
    import pyarrow.compute as pc

    for wrong, message in (
        (pc.equal(pc.utf8_trim_whitespace(column), ""), f"the image, column {side.column!r}, is empty"),
        (pc.match_substring_regex(column, "^https?://"), "an address is no picture; download the pictures first"),
        (pc.match_substring(column, "\0"), "a path cannot hold the character of code 0"),
    ):
        if pc.any(wrong).as_py():
            raise UserError(f"{side.table.where(pc.index(wrong, True).as_py())}: {message}")


def first_of_each(numbers: Tensor) -> Tensor:
    """Return the first row of each number, in ascending order of the numbers; numbers are 0, 1, ... by appearance."""
    count = int(numbers.max()) + 1
    return torch.full((count,), len(numbers)).scatter_reduce(0, numbers, torch.arange(len(numbers)), "amin")


def _size(side: FilePictures, row: int) -> int:
    path: Path = side.place(row)
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise UserError(f"{side.table.where(row)}: there is no image {str(path)!r}") from error
    except OSError as error:
        raise UserError(f"{side.table.where(row)}: {str(path)!r}: {error.strerror}") from error


def _sizes(side: FilePictures, column: Any) -> list[int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if "size" in names:
            return list(pc.struct_field(column, "size").to_pylist())
        if "bytes" in names:
            lengths = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
            return [_size(side, row) if length is None else length for row, length in enumerate(lengths)]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(pc.binary_length(column).to_pylist())
    raise UserError(
        f"{side.table.source}: the column {side.column!r} must hold paths or bytes of pictures to be the image; got "
        f"{kind}"
    )


def _merged(side: FilePictures, numbers: Tensor, rows: Tensor, sizes: Tensor) -> tuple[Tensor, str]:
    """Give the same number to pictures of equal bytes; `rows` has a row of each number, with its size in bytes."""
    _, of_size, count = torch.unique(sizes, return_inverse=True, return_counts=True)
    alike = (count[of_size] > 1).nonzero()[:, 0]
    if len(alike) > MOST:
        return numbers, f"{len(rows):,} pictures, many of equal sizes: equal ones in two rows were not looked for"
    known: dict[bytes, int] = {}
    same = torch.arange(len(rows))
    for number in alike.tolist():
        same[number] = known.setdefault(_digest(side, int(rows[number])), number)
    return same[numbers], ""


def _digest(side: FilePictures, row: int) -> bytes:
    place = side.place(row)
    if isinstance(place, tuple):
        path, offset, size = place
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(size)
    else:
        content = place if isinstance(place, bytes) else place.read_bytes()
    return hashlib.sha256(content).digest()

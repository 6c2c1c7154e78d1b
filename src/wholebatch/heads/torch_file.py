"""Read files of torch.save by `torch.load(weights_only=True)`, whose interpreter constructs plain values and tensors.

Such a file is a zip archive: a pickle with the places of tensors, and the bytes of each storage, not compressed. Two
things are checked here: that the pickle names only what torch.save writes for dictionaries and tensors, because a
program may have allowed torch.load other classes; and the archive's checksums, which torch.load does not compare.
"""

from __future__ import annotations

import errno
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .._base.files import open_regular
from .._base.settings import shown

_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_NAMES = {
    *(f"torch {kind}Storage" for kind in _KINDS), "collections OrderedDict", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
}  # fmt: skip
_MOST_PICKLE_BYTES = 16 * 2**20
_CHUNK = 4 * 2**20


def read_torch_file(path: Path) -> tuple[Any, str]:
    """Return the saved value, whose tensors are mapped from the file, and the name under which it was saved.

    Raises:
        ValueError: with the file's name, if it is damaged or holds anything but plain values and tensors.
        OSError: if it cannot be opened or read.
    """
    with _opened(path) as archive:
        pickles = [record for record in archive.infolist() if re.fullmatch(r"[^/]*/data\.pkl", record.filename)]
        if len(pickles) != 1:
            raise ValueError("it holds no data.pkl; torch.save of torch 1.6 and later writes one")
        if pickles[0].file_size > _MOST_PICKLE_BYTES:
            raise ValueError(f"its pickle has {pickles[0].file_size} bytes, of which {_MOST_PICKLE_BYTES} are expected")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if opcode.name in ("GLOBAL", "INST") and argument not in _NAMES:
                name = shown(str(argument).replace(" ", "."))
                raise ValueError(f"its pickle names {name}, which is refused; nothing was executed")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content, pickles[0].filename.removesuffix("/data.pkl")


def check_bytes(path: Path) -> None:
    """Raise ValueError unless all bytes of the file are those written."""
    with _opened(path) as archive:
        for record in archive.infolist():
            with archive.open(record) as file:
                while file.read(_CHUNK):  # which compares the checksum at the end
                    pass


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive; an error that is raised inside, but for one of the system, becomes a ValueError."""
    with open_regular(path) as file:
        try:
            if file.read(4) != b"PK\3\4":
                raise ValueError("it is no zip archive; save it again with torch 1.6 or later")
            with zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    if record.flag_bits & 1 or record.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(f"{shown(record.filename)} is compressed or encrypted")
                if len({*archive.namelist()}) < len(archive.namelist()):
                    raise ValueError("two of its records have one name")
                yield archive
        except Exception as error:  # of zipfile, pickletools or torch, whatever the damage leads to
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is that of a place before the start
                raise
            why = str(error) if type(error) in (ValueError, zipfile.BadZipFile) else "torch.load does not read it"
            raise ValueError(f"{path} is damaged, or no file of tensors that torch.save has written: {why}") from error

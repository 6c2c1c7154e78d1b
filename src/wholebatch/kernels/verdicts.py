"""Verdicts of the check of kernels, with the times of sweeps, in files beside the kernels that Triton has compiled.

The second run of a program finds the verdicts of the first, and neither checks nor times. A file holds the verdict for
one form of call on one kind of card, with one driver, one version of each package and one state of the sources: with
any other, it is not found. It is never needed: a file that is damaged or cannot be read counts as none, and a folder
that cannot be written stays as it is.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from .. import __version__
from .._base.bounded_json import check_fields, sealed, unsealed
from .._base.files import read_bounded
from . import launch

_MOST_BYTES = 65536
_FIELDS = {"of": str, "passed": str, "milliseconds": float, "in PyTorch": float}
_SOURCES = ("kernels", "sweep", "nodes")  # packages that decide what is computed, and how long it takes
_DRIVER = Path("/proc/driver/nvidia/version")
_ignored: list[bool] = []


@contextmanager
def ignored() -> Iterator[None]:
    """Neither read nor write verdicts inside."""
    _ignored.append(True)
    try:
        yield
    finally:
        _ignored.pop()


def read(device: torch.device, form: str) -> dict[str, Any] | None:
    """Return the fields of a verdict: the kernels that passed, in one text, and two times; None if there is none."""
    if (folder := folder_of_verdicts()) is None:
        return None
    path, subject = _file(folder, device, form)
    try:
        verdict = check_fields(unsealed(read_bounded(path, _MOST_BYTES), str(path)), str(path), _FIELDS)
    except (OSError, ValueError):
        return None
    names = verdict["passed"].split()
    return verdict if verdict.pop("of") == subject and names and all(map(str.isidentifier, names)) else None


def write(device: torch.device, form: str, verdict: Mapping[str, Any]) -> None:
    """Keep a verdict, if the folder can be written; a process that reads at the same time finds all of it, or none."""
    if (folder := folder_of_verdicts()) is None:
        return
    path, subject = _file(folder, device, form)
    partial = path.with_suffix(f".{uuid4().hex}")  # ranks of one machine may write the same verdict
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(sealed({"of": subject, **verdict}))
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def folder_of_verdicts() -> Path | None:
    """Return the folder in Triton's cache; None if verdicts are not kept.

    They are not kept in the interpreter, which compiles nothing, and inside of :func:`wholebatch.kernels.using`.
    """
    if _ignored or launch.interpreted() or launch._chosen:
        return None
    from triton import knobs

    cache = knobs.cache.dir
    return Path(cache) / "wholebatch" if cache else None


def _file(folder: Path, device: torch.device, form: str) -> tuple[Path, str]:
    """Return the file of a verdict, and the text for which it holds."""
    subject = repr((form, *surroundings(device)))
    return folder / f"{hashlib.sha256(subject.encode()).hexdigest()}.json", subject


@functools.cache
def surroundings(device: torch.device) -> tuple[object, ...]:
    """Return all that a verdict depends on beside the form: the card, its driver, versions, and the sources."""
    import triton

    card: tuple[object, ...] = (device.type,)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        card = gpu.name, gpu.major, gpu.minor, gpu.total_memory, gpu.multi_processor_count, _driver()
    return *card, torch.__version__, torch.version.cuda, triton.__version__, __version__, _digest_of_sources()


def _driver() -> str:
    """Return the text by which Linux names the driver of NVIDIA; "" where there is none."""
    try:
        return _DRIVER.read_text(errors="replace").strip()
    except OSError:
        return ""


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(path for name in _SOURCES for path in (package / name).rglob("*.py")):
        digest.update(f"{path.relative_to(package)}".encode() + path.read_bytes())
    return digest.hexdigest()

"""extensions.json of a run folder: the steps after which `--until-step` extended the run, and until which step.

The file is sealed and replaced in one step. A checkpoint holds the digest of the extensions before its step, as it does
of the metrics: an extension that was just written, and has trained nothing yet, changes no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..._base.bounded_json import check_fields, sealed, unsealed
from ..._base.files import read_bounded, replacing
from ..._base.user_error import UserError
from .schedule import Extension

FILE = "extensions.json"
_MOST_BYTES = 2**20
_MOST_STEPS = 10**9


def read_extensions(folder: Path) -> tuple[Extension, ...]:
    """Return the extensions of the run in the folder, in order; none if the file does not exist.

    Raises:
        UserError: if the file is damaged.
    """
    file = folder / FILE
    if not file.exists() and not file.is_symlink():
        return ()
    try:
        found = check_fields(unsealed(read_bounded(file, _MOST_BYTES), str(file)), str(file), {"extensions": list})
        extensions = tuple(Extension(**check_fields(each, str(file), _FIELDS)) for each in found["extensions"])
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    places = [each.at for each in extensions]
    if sorted({*places}) != places or any(not 0 < each.at <= each.steps <= _MOST_STEPS for each in extensions):
        raise UserError(f"{file} must name later and later steps, each at most the new end of the run; was it edited?")
    return extensions


_FIELDS = {"at": int, "steps": int}


def write_extensions(folder: Path, extensions: tuple[Extension, ...]) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(folder / FILE) as file:
        file.write(sealed({"extensions": [each._asdict() for each in extensions]}))


def digest_of_extensions(folder: Path, step: int) -> str | None:
    """Return the digest of the extensions that changed steps before `step`; None if there are none."""
    before = [[*each] for each in read_extensions(folder) if each.at < step]
    return hashlib.sha256(json.dumps(before).encode()).hexdigest() if before else None

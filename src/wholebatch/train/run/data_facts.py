"""data.json of a run folder: the hash of the data that the run was started with. `--resume` refuses other data.

The file is sealed and never replaced. Checkpoints hold its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from ..._base.bounded_json import check_fields, sealed, unsealed
from ..._base.files import read_bounded, replacing
from ..._base.user_error import UserError

FILE = "data.json"
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class DataFacts:
    """The facts about the data that a run remembers."""

    source: str
    """`--data`."""
    what: str
    """Their numbers, in words."""
    digest: str
    """Their hash."""

    def __str__(self) -> str:
        return f"{self.what}, hash {self.digest[:12]}"


def write_data_facts(folder: Path, facts: DataFacts) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(folder / FILE) as file:
        file.write(sealed(asdict(facts)))


def check_same_data(folder: Path, now: DataFacts, *, has_checkpoint: bool) -> None:
    """Compare the data with those that the run was started with.

    A run that was killed between its first two files gets the second one now.

    Args:
        folder: the run folder.
        now: the facts of the data at present.
        has_checkpoint: whether the run has one, so that the file must be there.

    Raises:
        UserError: other data, a damaged file, or one that cannot be written.
    """
    file = folder / FILE
    try:
        if not has_checkpoint and not file.exists() and not file.is_symlink():
            write_data_facts(folder, now)
            return
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be written: {error.strerror or error}") from error
    before = read_data_facts(folder)
    if before.digest != now.digest:
        raise UserError(
            f"--resume continues with the data of the run: {before.source!r} held {before}, and holds {now} now. "
            "Restore the data, or start a new run"
        )


def read_data_facts(folder: Path) -> DataFacts:
    """Return the facts about the data that the run in the folder was started with.

    Raises:
        UserError: there is no such file, or a damaged one.
    """
    file = folder / FILE
    try:
        values = unsealed(read_bounded(file, _MOST_BYTES), str(file))
        return DataFacts(**check_fields(values, str(file), {"source": str, "what": str, "digest": str}))
    except FileNotFoundError as error:
        raise UserError(
            f"there is no {str(file)!r}, with the hash of the data that the run was started with; was it removed?"
        ) from error
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def digest_of_data_facts(folder: Path) -> str | None:
    """Return the digest of the file; None if it does not exist."""
    file = folder / FILE
    if not file.exists() and not file.is_symlink():
        return None
    return hashlib.sha256(read_bounded(file, _MOST_BYTES)).hexdigest()

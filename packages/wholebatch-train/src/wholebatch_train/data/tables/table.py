"""A table of examples: named columns in an Arrow file that is mapped into memory, so that all ranks share its pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholebatch.app import UserError, needs

if TYPE_CHECKING:
    import pyarrow

LINE = "\0line"
"""The column with the line of a text file that a row was read from. No column of a user's has this name."""
MEMBER = "\0member"
"""The column with the name of a row's picture in a folder, or with that of a tar file and of a member of it."""
REASON = "\0reason"
"""The column with the reason why a row has no text, or no values at all; null for others."""
ROW = "\0row"
"""The column with the number, from 1, of the row of several texts that a row with one of them comes from."""
UNUSABLE = b"unusable"
"""The key of a field's metadata under which stands why the column has no role."""


@dataclass(frozen=True)
class Table:
    """Rows by number."""

    source: Path
    """What the user named; messages begin with it."""
    arrow: pyarrow.Table
    folder: Path
    """Relative paths of pictures start here."""
    said: tuple[str, ...] = ()
    """Lines about how the data were understood."""
    files: tuple[Path, ...] = ()
    """The files that the rows come from; () for a folder, whose rows name them."""

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.arrow.num_rows)

    @property
    def names(self) -> list[str]:
        """The user's columns."""
        return [name for name in self.arrow.column_names if not name.startswith("\0")]

    def where(self, row: int) -> str:
        """Return the place of a row in words: "pairs.csv, line 17", "photos/7.png", "shards/000.tar, 7.png"."""
        if LINE in self.arrow.column_names:
            return f"{self.source}, line {self.arrow[LINE][row].as_py()}"
        if MEMBER in self.arrow.column_names:  # in a folder of pictures or of shards, or beside the shard that is named
            folder = self.source.parent if self.source.suffix == ".tar" else self.source
            return str(folder / self.arrow[MEMBER][row].as_py())
        number = self.arrow[ROW][row].as_py() if ROW in self.arrow.column_names else row + 1
        return f"{self.source}, row {number}"

    def why_empty(self, row: int, role: str, name: str) -> str:
        """Return why a row has no value in the column of a role."""
        noted = self.arrow[REASON][row].as_py() if REASON in self.arrow.column_names else None
        return noted or f"the {role}, column {name!r}, is empty"

    def check_usable(self, name: str) -> None:
        """Raise UserError if a column holds values that are neither texts nor lists of texts."""
        reason = (self.arrow.schema.field(name).metadata or {}).get(UNUSABLE)
        if reason is not None:
            raise UserError(
                f"{self.source}: the column {name!r} must hold a text in each line, or a list of texts in each line; "
                f"{reason.decode()}"
            )


def need_pyarrow() -> Any:
    """Return pyarrow; UserError with the command that installs it, if it is missing."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UserError(f"{needs('--data', 'pyarrow')} [{error}]") from error
    return pa

"""The options of `wholebatch embed`, `search`, `evaluate` and `export`, and mistakes that are found without torch.

This module imports no torch.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wholebatch.app import UserError, require

from ..data.paths import PICTURES, check_path, near_miss
from ..run.record import CONFIG

Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["auto", "final", "best", "checkpoint"]
SideName = Literal["image", "text", "query", "document"]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Data = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
Query = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="QUERY")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class _OfRun:
    """A run and its weights."""

    run: Run
    weights: Weights = "auto"
    """"final", "best" (of the best validation, which a run keeps unless --no-keep-best) or "checkpoint" (the last one).
    "auto": the final ones, or those of the last checkpoint while there are none."""
    trust: bool = False
    """Execute the Python file of an encoder FILE.py:FUNCTION, of which the run has a copy. Read it before if the run
    is not yours."""

    def check(self) -> None:
        """Raise UserError for a mistake."""
        if not self.run.exists():
            hint = near_miss(self.run) or "; expected the folder of a run, such as runs/NAME"
            raise UserError(f"RUN: there is no folder {str(self.run)!r}{hint}")
        if not (self.run / CONFIG).is_file():
            raise UserError(
                f"RUN: {str(self.run)!r} is no run folder, it has no {CONFIG}; `wholebatch train` writes one"
            )


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(_OfRun):
    """How rows are read and encoded."""

    skip_bad: bool = False
    """Leave out rows without a text or a readable picture. All pictures are read once to find them, and again when a
    file of theirs changes. A search of the run's own data does as the run does."""
    batch_size: int = 256
    """Rows that are encoded together."""
    workers: int = -1
    """Processes that read pictures ahead. -1: as many as there are cores, at most 8; 0: none."""
    device: Device = "auto"
    """Where to compute; "auto": on the GPU, if this machine has one."""

    def check(self) -> None:
        super().check()
        require(1 <= self.batch_size <= 2**20, "batch_size", f"from 1 to {2**20}", self.batch_size)
        require(-1 <= self.workers <= 256, "workers", "from -1 to 256", self.workers)


@dataclass(frozen=True)
class EmbedConfig(EncodingOptions):
    """Write the feature of each row of DATA, a unit row of float32, with the rows in their order.

    RUN is the folder of a run. DATA is whatever `wholebatch train --data` takes: a .csv, .tsv, .jsonl or .parquet file,
    a folder of pictures, tar shards, or a saved data set.
    """

    data: Data
    column: str = ""
    """The column to embed. Empty: the usual one, of images if there are some."""
    side: SideName | None = None
    """The encoder that reads it. None: as the column is."""
    out: Path = Path("features.parquet")
    """FILE.parquet: the columns of the data, and the column `features`; or FILE.npy: features alone, (n, d)."""

    def check(self) -> None:
        super().check()
        _check_data("DATA", self.data)
        _check_output("--out", self.out, ".parquet", ".npy")


@dataclass(frozen=True)
class SearchConfig(EncodingOptions):
    """Find the rows of data that are most similar to a text or a picture, by exact search.

    RUN is the folder of a run. QUERY is a text of one word or more, or the path of a picture.
    """

    words: Query = ()
    queries: str = ""
    """Instead of QUERY: a table of queries, such as a .csv or .jsonl file with the column query, text or image."""
    data: Annotated[str, tyro.conf.arg(name="in")] = ""
    """The rows to search: data as `wholebatch train --data` takes them, or a .parquet file that `wholebatch embed` has
    written. Empty: the data of the run. Features of data are kept in the folder features/ of the run."""
    column: str = ""
    """The column of these data to search. Empty: the usual one."""
    side: SideName | None = None
    """The side to search. None: the other one than the query's: pictures for a text, texts for a picture."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """Results of each query."""
    out: Path | None = None
    """FILE.jsonl: a line for each query. None: the results are printed."""
    sheet: Path | None = None
    """FILE.html: a page with the results that are pictures. None: search.html in the folder of the run.
    As all outputs, it replaces an earlier file of this name."""

    @property
    def query(self) -> str:
        """QUERY, without quotes around several words."""
        return " ".join(self.words)

    def check(self) -> None:
        if not self.run.exists() and self.query and _is_file(f"{self.query}/{CONFIG}"):
            raise UserError(f"RUN comes before QUERY: wholebatch search {shlex.join([self.query, str(self.run)])}")
        super().check()
        if bool(self.query.strip()) == bool(self.queries):
            got = "both" if self.queries else "an empty QUERY" if self.query else "none"
            raise UserError(
                f"give a QUERY, a text or the path of a picture, or a table of them with --queries; got {got}"
            )
        looks_like_a_path = Path(self.query).suffix.lower() in PICTURES and "\0" not in self.query
        if looks_like_a_path and not _is_file(self.query) and not self.query.count(" "):
            raise UserError(f"QUERY: there is no picture {self.query!r}")
        if self.queries:
            _check_data("--queries", self.queries)
        if self.data:
            _check_data("--in", self.data)
        if not 1 <= self.k <= 10_000:
            raise UserError(f"-k must be from 1 to 10000, got {self.k}")
        _check_output("--out", self.out, ".jsonl")
        _check_output("--sheet", self.sheet, ".html")

    @property
    def is_picture(self) -> bool:
        return Path(self.query).suffix.lower() in PICTURES and _is_file(self.query)


@dataclass(frozen=True)
class EvaluateConfig(EncodingOptions):
    """Measure retrieval both ways over all rows of DATA, or classification and verification, beside chance.

    RUN is the folder of a run. DATA is whatever `wholebatch train --data` takes. Texts, or pictures, that repeat count
    once, and rows that share a text or a picture are right answers of each other.
    """

    data: Data
    columns: str = ""
    """Columns of the data by their roles, "image=filepath,text=title". Empty: the run's, or the usual names."""
    out: Path | None = None
    """FILE.json for the figures."""

    def check(self) -> None:
        super().check()
        _check_data("DATA", self.data)
        _check_output("--out", self.out, ".json")


@dataclass(frozen=True)
class ExportConfig(_OfRun):
    """Write a run's encoders in the layout of another library, into FOLDER, which must be empty or new.

    RUN is the folder of a run.
    """

    folder: Folder
    to: Literal["sentence-transformers", "open_clip"]
    """"sentence-transformers": the text encoder, if it is one of transformers, with its pooling and projection.
    "open_clip": an image encoder of timm with a text encoder of transformers."""

    def check(self) -> None:
        super().check()
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"FOLDER must be a folder, {str(self.folder)!r} is a file; choose another name")
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"FOLDER must be empty or new, {str(self.folder)!r} is not empty; choose another name")
        _check_has_folder("FOLDER", self.folder)


def _check_output(name: str, path: Path | None, *endings: str) -> None:
    """Raise UserError if an output has none of the endings, is a folder, or has no folder to be written into."""
    if path is None:
        return
    if path.suffix not in endings:
        raise UserError(f"{name} must be a {' or '.join(endings)} file, got {str(path)!r}")
    if path.is_dir():
        raise UserError(f"{name} must be a file, {str(path)!r} is a folder")
    _check_has_folder(name, path)


def _check_has_folder(name: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"{name}: there is no folder {str(path.absolute().parent)!r} for {path.name!r}")


def _check_data(name: str, data: str) -> None:
    if data == "glyphs":
        return
    try:
        check_path(data)
    except UserError as error:
        raise renamed(error, name) from error


def renamed(error: UserError, name: str) -> UserError:
    """Return an error about `--data` as one about the argument of this name."""
    return UserError(str(error).replace("--data", name))


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # a long text, or one with the character of code 0
        return False

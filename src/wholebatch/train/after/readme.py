"""README.md of a run folder: the model, its figures, and the commands and the lines of Python that use it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..._base.files import replacing
from ..config import TrainConfig
from ..run.record import read_config
from .plain_module import FILE as MODULE
from .plain_module import write_module

FILE = "README.md"
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def write_readme(folder: Path, described: str, table: Table) -> None:
    """Write the file, and the module that its Python imports, at the end of a run.

    Args:
        folder: the run folder, with its final weights and encoders.
        described: lines about the data.
        table: the figures of the test: title, names of the columns, rows.
    """
    config = read_config(folder)
    path = folder.absolute()
    parts = [
        f"# {path.name}",
        _about(config, described),
        _table(table),
        "## Use it",
        "```sh\n" + "\n".join(_commands(config, path)) + "\n```",
        "DATA is another table, folder or set of shards: what `wholebatch train --data` takes. The folder may move; it "
        f"was {path} when this was written.",
        *_python(config, folder, path),
        "## Files",
        "`model.safetensors` has the weights, `encoders/` the sizes, tokenizers and preprocessing, `config.json` the "
        "options of the run, `report.html` its curves and examples, `report.json` the figures above.",
    ]
    with replacing(folder / FILE) as file:
        file.write(("\n\n".join(part for part in parts if part) + "\n").encode())


def _about(config: TrainConfig, described: str) -> str:
    kind = {
        "retrieve": f"A dual encoder, trained with the loss `{config.loss}` of the whole batch",
        "identify": "An encoder of images and a classifier, trained with PartialFC",
    }[config.task]
    encoders = f"encoder of images: {config.image_encoder}"
    if config.task == "retrieve":
        encoders += f"; of texts: {config.text_encoder}"
    said = "\n".join(f"* {line}" for line in (f"data: {config.data}", *described.splitlines(), encoders))
    return f"{kind}, by `wholebatch train`.\n\n{said}"


def _table(table: Table) -> str:
    title, columns, rows = table
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    return f"{title}:\n\n" + "\n".join(lines)


def _commands(config: TrainConfig, path: Path) -> list[str]:
    run = shlex.quote(str(path))
    queries = ['"a few words"'] * (config.task == "retrieve") + ["picture.png"] * (path / "encoders" / "image").is_dir()
    searches = [f"wholebatch search {run} {query}" for query in queries]
    return [*searches, f"wholebatch embed {run} DATA --out features.parquet", f"wholebatch evaluate {run} DATA"]


def _python(config: TrainConfig, folder: Path, path: Path) -> list[str]:
    used = write_module(folder, config.task, path)
    if used is None:
        return [
            "The encoders are of a kind that takes more than a few lines to build without wholebatch; `wholebatch "
            "embed` writes their features for any program."
        ]
    return [
        "## Without wholebatch",
        f"`{MODULE}` in this folder builds the encoders in plain PyTorch (`pip install {' '.join(used.packages)}`); "
        "nothing is unpickled:",
        "```python\n" + "\n".join(used.lines) + "\n```",
    ]

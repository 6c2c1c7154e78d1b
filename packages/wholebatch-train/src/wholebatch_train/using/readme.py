"""README.md of a run folder: the model, its figures, and the commands and the lines of Python that use it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wholebatch.app import replacing

from ..config import TrainConfig
from ..encoders.saved import FOLDER as ENCODERS
from ..run.record import read_config
from ..tasks.retrieval import PLURAL

FILE = "README.md"
MODULE = "model.py"
_SOURCES = {
    MODULE: "using/plain_model.py",
    f"{ENCODERS}/networks.py": "encoders/networks.py",
    f"{ENCODERS}/words.py": "encoders/words.py",
    f"{ENCODERS}/pictures.py": "data/pictures/reading.py",
}
_PACKAGES = {
    "small image": ("numpy", "pillow"), "small text 2": (), "timm image": ("timm", "numpy", "pillow"),
    "transformers text": ("transformers",),
}  # fmt: skip
_EXAMPLES = {"image": '"picture.png"', "text": '"a few words"', "query": '"a question"', "document": '"a few words"'}
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
        _summary(config, described),
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


def _summary(config: TrainConfig, described: str) -> str:
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
    """Write `model.py`, a copy of `plain_model`, and the short files that it imports; return how it is used.

    Where an encoder of the run is one that this module cannot build, nothing is written.
    """
    is_dual, encoders = config.task == "retrieve", folder / ENCODERS
    names = json.loads((encoders / "encoders.json").read_text())["sides"] if is_dual else {"image": "image"}
    forms = [form for name in names.values() if (form := _form(encoders / name)) is not None]
    if len(forms) < len(names):
        return [
            "The encoders are of a kind that takes more than a few lines to build without wholebatch; `wholebatch "
            "embed` writes their features for any program."
        ]
    for copy, source in _SOURCES.items():
        shutil.copyfile(Path(__file__).parents[1] / source, folder / copy)
    packages = dict.fromkeys(("torch", "safetensors", *(package for form in forms for package in _PACKAGES[form])))
    use = _similarities(*names) if is_dual else [f"print(model.classify([{_EXAMPLES['image']}]))"]
    lines = ["import sys", f"sys.path.insert(0, {str(path)!r})", "import model", *use]
    return [
        "## Without wholebatch",
        f"`{MODULE}` in this folder builds the encoders in plain PyTorch (`pip install {' '.join(packages)}`); nothing "
        "is unpickled:",
        "```python\n" + "\n".join(lines) + "\n```",
    ]


def _form(folder: Path) -> str | None:
    """Return the form of the encoder in a folder; None of one that the module cannot build."""
    values: dict[str, Any] = json.loads((folder / "encoder.json").read_text())
    if values["form"] == "transformers text":
        config = json.loads((folder / "config.json").read_text())
        if values["rule"] is None or "text_config" in config or config.get("is_encoder_decoder") or values["lower"]:
            return None
    return values["form"] if values["form"] in _PACKAGES else None


def _similarities(first: str, second: str) -> list[str]:
    rows, columns = PLURAL[first], PLURAL[second]
    calls = f"model.embed_{first}([{_EXAMPLES[first]}]), model.embed_{second}([{_EXAMPLES[second]}])"
    return [f"{rows}, {columns} = {calls}", f"print({rows} @ {columns}.T)  # similarities: a row for each {first}"]

"""`model.py` of a run folder: a module that embeds items with the run's weights, without this package.

It is a copy of `plain_model`, and the short files that it imports are copied into the folder of the encoders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ..encoders.saved import FOLDER
from ..tasks.pair_search import PLURAL

FILE = "model.py"
_SOURCES = {
    FILE: "after/plain_model.py",
    f"{FOLDER}/networks.py": "encoders/networks.py",
    f"{FOLDER}/words.py": "encoders/words.py",
    f"{FOLDER}/pictures.py": "data/pictures/reading.py",
}
_PACKAGES = {
    "small image": ("numpy", "pillow"), "small text 2": (), "timm image": ("timm", "numpy", "pillow"),
    "transformers text": ("transformers",),
}  # fmt: skip
_EXAMPLES = {"image": '"picture.png"', "text": '"a few words"', "query": '"a question"', "document": '"a few words"'}


class Plain(NamedTuple):
    """How the module is used."""

    lines: list[str]
    packages: tuple[str, ...]
    """Those that it needs, as pip names them."""


def write_module(run: Path, task: str, path: Path) -> Plain | None:
    """Write the module, and the files that it imports; return how it is used.

    Args:
        run: the folder of a run that has been finished.
        task: the task of the run.
        path: the folder as its user names it.

    Returns:
        None where an encoder of the run is one that the module cannot build. Then nothing is written.
    """
    is_dual = task == "retrieve"
    names = json.loads((run / FOLDER / "encoders.json").read_text())["sides"] if is_dual else {"image": "image"}
    forms = [_form(run / FOLDER / name) for name in names.values()]
    if None in forms:
        return None
    packages = ("torch", "safetensors", *(package for form in forms if form for package in _PACKAGES[form]))
    for copy, source in _SOURCES.items():
        shutil.copyfile(Path(__file__).parents[1] / source, run / copy)
    use = _similarities(*names) if is_dual else [f"print(model.classify([{_EXAMPLES['image']}]))"]
    lines = ["import sys", f"sys.path.insert(0, {str(path)!r})", "import model", *use]
    return Plain(lines, tuple(dict.fromkeys(packages)))


def _form(folder: Path) -> str | None:
    """Return the form of the encoder in a folder; None of one that the module cannot build."""
    values: dict[str, Any] = json.loads((folder / "encoder.json").read_text())
    if values["form"] == "transformers text":
        config = json.loads((folder / "config.json").read_text())
        if values["rule"] is None or "text_config" in config or config.get("is_encoder_decoder") or values["lower"]:
            return None
    return values["form"] if values["form"] in _PACKAGES else None


def _similarities(one: str, other: str) -> list[str]:
    ones, others = PLURAL[one], PLURAL[other]
    calls = f"model.embed_{one}([{_EXAMPLES[one]}]), model.embed_{other}([{_EXAMPLES[other]}])"
    return [f"{ones}, {others} = {calls}", f"print({ones} @ {others}.T)  # similarities: a row for each {one}"]

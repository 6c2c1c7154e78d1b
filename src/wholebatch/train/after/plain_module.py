"""`model.py` of a run folder: a module that embeds items with the run's weights, without this package.

It has a function for each side, `embed_image(paths)` and `embed_text(texts)`, or `classify(paths)` of a classifier. The
short files that it imports are copied into the folder of the encoders, so that it needs torch and safetensors, and what
the encoders need: numpy and Pillow for pictures, timm, transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..._base.files import replacing
from ..encoders.saved import FOLDER
from ..tasks.pair_search import PLURAL
from .plain_encoders import PlainEncoder, plain_encoder

FILE = "model.py"
_SOURCES = {
    "networks.py": "encoders/networks.py",
    "words.py": "encoders/words.py",
    "pictures.py": "data/pictures/reading.py",
}


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
        None where an encoder of the run is one that a few lines cannot build. Then nothing is written.
    """
    is_dual = task == "retrieve"
    names = json.loads((run / FOLDER / "encoders.json").read_text())["sides"] if is_dual else {"image": "image"}
    sides = {}
    for side, name in names.items():
        found = plain_encoder(run / FOLDER / name, name, f"{name}." if is_dual else "")
        if found is None:
            return None
        sides[side] = found if side == name else found._replace(load=[])  # one encoder may be that of both sides
    packages = tuple(dict.fromkeys(["torch", "safetensors", *(each for x in sides.values() for each in x.packages)]))
    with replacing(run / FILE) as file:
        file.write(("\n".join(_module(sides, names, _names(run), packages, is_dual=is_dual)) + "\n").encode())
    _copy_sources(run)
    use = _similarities(*sides) if is_dual else [f"print(model.classify([{_EXAMPLES['image']}]))"]
    return Plain(["import sys", f"sys.path.insert(0, {str(path)!r})", "import model", *use], packages)


def _similarities(one: str, other: str) -> list[str]:
    ones, others = PLURAL[one], PLURAL[other]
    calls = f"model.embed_{one}([{_EXAMPLES[one]}]), model.embed_{other}([{_EXAMPLES[other]}])"
    return [f"{ones}, {others} = {calls}", f"print({ones} @ {others}.T)  # similarities: a row for each {one}"]


_EXAMPLES = {"image": '"picture.png"', "text": '"a few words"', "query": '"a question"', "document": '"a few words"'}


def _copy_sources(run: Path) -> None:
    """Copy the files that need torch, numpy and Pillow alone into the folder of the encoders."""
    package = Path(__file__).parents[1]
    for name, source in _SOURCES.items():
        shutil.copyfile(package / source, run / FOLDER / name)


def _module(
    sides: Mapping[str, PlainEncoder],
    names: Mapping[str, str],
    tensors: set[str],
    packages: tuple[str, ...],
    *,
    is_dual: bool,
) -> list[str]:
    imports = dict.fromkeys(each for side in sides.values() for each in side.imports)
    lines = ['"""The encoders of this run, written by `wholebatch train`, which this module does not need.', ""]
    calls = [f"embed_{side}" for side in sides] + ([] if is_dual else ["classify"])
    lines += [f"It needs {', '.join(packages)}, and nothing is unpickled. Call {' or '.join(calls)}.", '"""', ""]
    lines += [*([] if is_dual else ["import json"]), "import sys", "from pathlib import Path", "", "import torch"]
    lines += [*([] if is_dual else ["from safetensors import safe_open"]), "from safetensors.torch import load_file"]
    lines += ["", "run = Path(__file__).parent"]
    lines += ['sys.path.insert(0, str(run / "encoders"))  # networks.py, pictures.py and words.py are there']
    lines += [*imports, "", f'weights = load_file(run / "{_WEIGHTS}")']
    lines += [line for side in sides.values() for line in side.load]
    lines += _IN_PARTS + (_OPENED if "image" in sides else [])
    for side, found in sides.items():
        of, name = ("pictures", "paths") if side == "image" else ("texts", "texts")
        lines += ["", "", "@in_parts", f"def embed_{side}({name}):"]
        lines += [f'    """Return the unit features of these {of}, a row for each."""']
        lines += [f"    {line}" for line in found.use]
        projection = f"projections.{names[side]}.weight"
        if projection in tensors:
            lines += [f"    features = features @ weights[{projection!r}].T"]
        lines += ["    return torch.nn.functional.normalize(features, dim=-1)"]
    return lines if is_dual else lines + _CLASSES


_WEIGHTS = "model.safetensors"
_PART = 256  # items that are embedded at a time
_IN_PARTS = f'''

def in_parts(embed):
    """Return a function that embeds {_PART} items at a time, or a single one."""

    @torch.no_grad()
    def embed_all(items):
        items = [items] if isinstance(items, (str, Path)) else [*items]
        return torch.cat([embed(items[at : at + {_PART}]) for at in range(0, len(items), {_PART})])

    return embed_all'''.splitlines()
_OPENED = '''

def opened(path, mode):
    """Read a picture; an error names it."""
    try:
        return open_picture(Path(path)).convert(mode)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error'''.splitlines()
_CLASSES = f'''

classes = json.loads(safe_open(run / "{_WEIGHTS}", "pt").metadata()["classes"])


def classify(paths):
    """Return the class of each of these pictures."""
    features = embed_image(paths)
    centers = weights["centers"].view(len(classes), -1, features.shape[1])  # a class may have several
    best = (torch.nn.functional.normalize(centers, dim=-1) @ features.T).amax(1).argmax(0)
    return [classes[number] for number in best.tolist()]'''.splitlines()


def _names(run: Path) -> set[str]:
    from ..._base.tensor_file import TensorFile

    with TensorFile(run / _WEIGHTS) as file:
        return set(file.entries)

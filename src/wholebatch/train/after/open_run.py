"""A run that a later program opens: its encoders with the final weights, or with those of the last checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._bounded_json import parse_json
from ..._tensor_file import TensorFile
from ..._user_error import UserError
from ..config import TrainConfig
from ..data.sides import Kind
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder
from ..encoders.inputs import Inputs
from ..encoders.make import make_dual_encoder, make_encoder
from ..encoders.saved import FOLDER as ENCODERS
from ..encoders.saved import open_dual_encoder, open_encoder
from ..run.best import FILE as BEST
from ..run.checkpoint import FILE as CHECKPOINT
from ..run.resume import read_config
from .options import Weights
from .reading import reading

FINAL = "model.safetensors"
_NAMES = {FINAL: "final", BEST: "best", CHECKPOINT: "checkpoint"}
_CENTERS = "centers"


@dataclass(frozen=True)
class OpenRun:
    """The encoders of a run, for inference."""

    folder: Path
    config: TrainConfig
    model: DualEncoder | Encoder
    """Both encoders, or the image encoder of --task identify; in evaluation mode."""
    weights: str
    """A hash of all weights."""
    device: torch.device
    kind_of_weights: str
    """"final", "best" or "checkpoint"."""
    classes: tuple[str, ...] = ()
    """Names of the classes of --task identify; () for a checkpoint, which does not have them."""
    centers: Tensor | None = None
    """Centers of these classes, (number of classes x sub-centers, width)."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the sides: image and text, query and document, or image alone."""
        return self.model.sides if isinstance(self.model, DualEncoder) else ("image",)

    @property
    def width(self) -> int:
        """Length of a feature."""
        return self.model.embedding_size if isinstance(self.model, DualEncoder) else self.model.width

    def encoder(self, side: str) -> Encoder:
        """Return the encoder of a side."""
        return self.model.encoder(side) if isinstance(self.model, DualEncoder) else self.model

    def kind(self, side: str) -> Kind:
        """Return the kind of the items of a side."""
        return self.encoder(side).kind

    @torch.no_grad()
    def features(self, side: str, inputs: Inputs) -> Tensor:
        """Map the inputs of b items, on the device of the run, to unit rows (b, width), float32 on the CPU."""
        if isinstance(self.model, DualEncoder):
            found = self.model.encode(side, inputs)
        else:
            found = F.normalize(self.model(inputs), dim=-1)
        return found.float().cpu()


def open_run(folder: Path, device: torch.device | None = None, weights: Weights = "auto") -> OpenRun:
    """Open the run of a folder. Nothing is unpickled; the encoder of a user's file runs the copy of that file.

    Args:
        folder: the run folder.
        device: where to compute. None: the CPU.
        weights: which weights; "auto": the final ones, or else those of the last checkpoint.

    Raises:
        UserError: no run folder, one of another version, a damaged file, or a run without these weights.
    """
    try:
        config = read_config(folder)
    except UserError as error:
        raise UserError(str(error).replace("--resume ", "RUN ")) from error
    device = device or torch.device("cpu")
    path = _file(folder, weights)
    kind = _NAMES[path.name]
    is_checkpoint = kind == "checkpoint"
    prefix = "" if not is_checkpoint else "model.encoder." if config.task == "retrieve" else "model."
    of_file = reading(path, "weights", (OSError,), named=(ValueError,))
    with of_file, TensorFile(path) as file:
        names = [name for name in file.entries if name.startswith(prefix)]
        model = _model(folder, config, {name.removeprefix(prefix) for name in names}, is_checkpoint=is_checkpoint)
        tensors = {name.removeprefix(prefix): file.read(name) for name in names}
        centers = tensors.pop(_CENTERS, None) if config.task == "identify" else None
        _check_fits(path, {name: x.shape for name, x in model.state_dict().items()}, tensors)
        digest = hashlib.sha256(json.dumps({name: file.entries[name].digest for name in names}).encode()).hexdigest()
        classes = _classes(file) if centers is not None else ()
    model.load_state_dict(tensors)
    model.to(device).eval().requires_grad_(False)
    return OpenRun(folder, config, model, digest, device, kind, classes, centers)


def _file(folder: Path, weights: Weights) -> Path:
    """Return the file with these weights."""
    files = {kind: folder / name for name, kind in _NAMES.items()}
    if weights == "auto":
        for kind in ("final", "checkpoint"):
            if files[kind].exists():
                return files[kind]
        raise UserError(f"RUN: {str(folder)!r} has neither {FINAL} nor {CHECKPOINT}: the run has had no checkpoint yet")
    if not files[weights].exists():
        there = [kind for kind, path in files.items() if path.exists()]
        raise UserError(
            f"--weights {weights}: the run has no {str(files[weights])!r}; it has {' and '.join(there) or 'none'}"
        )
    return files[weights]


def _model(folder: Path, config: TrainConfig, names: set[str], *, is_checkpoint: bool) -> DualEncoder | Encoder:
    """Build the encoders with random weights: from the files beside the final weights, or as a resumed run does."""
    encoders = folder / ENCODERS
    if not is_checkpoint and encoders.exists():
        return open_dual_encoder(encoders) if config.task == "retrieve" else open_encoder(encoders / "image")
    if not is_checkpoint:  # the best weights of a run that goes on; adapters are merged in them
        config = replace(config, image=replace(config.image, tune="full"), text=replace(config.text, tune="full"))
    if config.task == "identify":
        return make_encoder(config, "image")
    is_of_texts = any(name.startswith("query.") for name in names)
    of_texts: dict[str, Kind] = {"query": "text", "document": "text"}
    return make_dual_encoder(config, of_texts if is_of_texts else {"image": "image", "text": "text"})


def _check_fits(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    shapes = {name: x.shape for name, x in found.items()}
    if shapes != expected:
        differing = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise UserError(
            f"{path} does not fit the encoders of the run: {len(differing)} tensors are missing, unknown or of another "
            f"shape, {differing[0]} among them; was the run folder edited?"
        )


def _classes(file: TensorFile) -> tuple[str, ...]:
    names = parse_json(file.metadata.get("classes", "").encode(), f"the classes in {file.path}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file.path} has no names of classes; it is damaged, or was not written by this program")
    return tuple(names)


def device_of(name: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank, for `--device`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < ranks:
        raise UserError(f"--device cuda needs a GPU for each of {ranks} ranks, found {count}")
    if name == "cpu" or count < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)

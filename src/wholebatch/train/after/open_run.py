"""A run that a later program opens: its encoders with the final weights, or with those of the last checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._bounded_json import parse_json
from ..._tensor_file import TensorFile
from ..._user_error import UserError
from ..checkpoint import FILE as CHECKPOINT
from ..config import TrainConfig
from ..data.sides import Kind
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder
from ..encoders.inputs import Inputs
from ..encoders.make import make_dual_encoder, make_encoder
from ..encoders.saved import FOLDER as ENCODERS
from ..encoders.saved import open_dual_encoder, open_encoder
from ..resume import read_config

WEIGHTS = "model.safetensors"
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
    is_finished: bool
    """Whether the weights are the final ones; else they are those of the last checkpoint."""
    classes: tuple[str, ...] = ()
    """Names of the classes of --task identify; () if the run is not finished."""
    centers: Tensor | None = None
    """Centers of these classes, (number of classes x sub-centers, width)."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the sides: image and text, query and positive, or image alone."""
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


def open_run(folder: Path, device: torch.device | None = None) -> OpenRun:
    """Open the run of a folder. Nothing is unpickled; the encoder of a user's file runs the copy of that file.

    Raises:
        UserError: no run folder, one of another version, a damaged file, or a run without a checkpoint yet.
    """
    try:
        config = read_config(folder)
    except UserError as error:
        raise UserError(str(error).replace("--resume ", "RUN ")) from error
    device = device or torch.device("cpu")
    path = folder / WEIGHTS
    is_finished = path.exists()
    if not is_finished:
        path = folder / CHECKPOINT
    if not path.exists():
        raise UserError(
            f"RUN: {str(folder)!r} has neither {WEIGHTS} nor {CHECKPOINT}: the run ended before its first checkpoint"
        )
    with _reading(path), TensorFile(path) as file:
        prefix = "" if is_finished else "model.encoder." if config.task == "retrieve" else "model."
        names = [name for name in file.entries if name.startswith(prefix)]
        model = _model(folder, config, {name.removeprefix(prefix) for name in names}, is_finished=is_finished)
        expected = model.state_dict()
        tensors = {name.removeprefix(prefix): file.read(name) for name in names}
        centers = tensors.pop(_CENTERS, None) if config.task == "identify" else None
        _check_fits(path, {name: x.shape for name, x in expected.items()}, tensors)
        weights = hashlib.sha256(json.dumps({name: file.entries[name].digest for name in names}).encode()).hexdigest()
        classes = _classes(file) if is_finished and config.task == "identify" else ()
    model.load_state_dict(tensors)
    return OpenRun(folder, config, model.to(device).eval(), weights, device, is_finished, classes, centers)


def _model(folder: Path, config: TrainConfig, names: set[str], *, is_finished: bool) -> DualEncoder | Encoder:
    """Build the encoders with random weights: from the files beside the final weights, or as a resumed run does."""
    if is_finished:
        encoders = folder / ENCODERS
        return open_dual_encoder(encoders) if config.task == "retrieve" else open_encoder(encoders / "image")
    if config.task == "identify":
        return make_encoder(config, "image")
    kinds: dict[str, Kind] = {"query": "text", "positive": "text"}
    is_of_texts = any(name.startswith("query.") for name in names)
    return make_dual_encoder(config, kinds if is_of_texts else {"image": "image", "text": "text"})


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


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an error of a file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def device_of(name: str, rank: int, ranks: int) -> torch.device:
    """Return the device of a rank, for `--device`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < ranks:
        raise UserError(f"--device cuda needs a GPU for each of {ranks} ranks, found {count}")
    if name == "cpu" or count < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)

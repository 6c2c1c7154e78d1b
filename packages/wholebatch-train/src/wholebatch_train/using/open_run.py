"""A run that a later program opens: its encoders with the final weights, or with those of the last checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.app import UserError, parse_json
from wholebatch.app.tensors import TensorFile

from ..config import TrainConfig, files_of_encoders
from ..data.sides import Kind
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder, Inputs
from ..encoders.make import FOLDER as ENCODERS
from ..encoders.make import digest_of, make_dual_encoder, make_encoder, open_dual_encoder, open_encoder
from ..run.checkpoint import FILE as CHECKPOINT
from ..run.checkpoint import check_fits, check_is_of_run
from ..run.figures import FILE as BEST
from ..run.record import read_record
from .options import Weights
from .output import reading

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
    step: int | None = None
    """The step after which these weights were written. None: not known, or the final ones."""
    steps: int = 0
    """The steps of the run, extensions included."""
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
        return self.model.embedding_size if isinstance(self.model, DualEncoder) else self.model.width

    def encoder(self, side: str) -> Encoder:
        return self.model.encoder(side) if isinstance(self.model, DualEncoder) else self.model

    def kind(self, side: str) -> Kind:
        return self.encoder(side).kind

    @property
    def weights_line(self) -> str:
        """A line about the weights; "" for the final ones."""
        if self.kind_of_weights == "final":
            return ""
        which = "the checkpoint" if self.kind_of_weights == "checkpoint" else "those of the best validation"
        return f"weights: {which}" + ("" if self.step is None else f" after step {self.step:,} of {self.steps:,}")

    @torch.no_grad()
    def encode(self, side: str, inputs: Inputs) -> Tensor:
        """Map the inputs of b items to unit rows (b, width), all on the device of the run; float32."""
        if isinstance(self.model, DualEncoder):
            return self.model.encode(side, inputs).float()
        return F.normalize(self.model(inputs), dim=-1).float()

    def on(self, device: torch.device) -> OpenRun:
        """Return a copy of the run on another device."""
        return replace(self, model=deepcopy(self.model).to(device), device=device)

    def finite(self, x: Tensor) -> Tensor:
        """Return features or centers, unless weights have made them infinite or NaN."""
        if not bool(x.isfinite().all()):
            raise UserError(
                f"RUN: {str(self.folder)!r} gives numbers that are not finite, by its {self.kind_of_weights} weights; "
                "choose others by --weights, or train it again"
            )
        return x


def open_run(
    folder: Path, device: torch.device | None = None, weights: Weights = "auto", *, trust: bool = False
) -> OpenRun:
    """Open the run of a folder. Nothing is unpickled, and nothing is executed that is not trusted.

    Raises:
        UserError: no run folder, one of another version, a damaged file, a run without these weights, or with an
            encoder that is not trusted.
    """
    try:
        record = read_record(folder)
    except UserError as error:
        raise UserError(str(error).replace("--resume ", "RUN ")) from error
    config, extensions = record.config, record.extensions
    files = files_of_encoders(config)
    if files and not trust:
        raise UserError(
            f"RUN: {str(folder)!r} has {' and '.join(files)}, Python code that would be executed; read it, or its copy "
            "in the folder encoders/, and pass --trust"
        )
    device = device or torch.device("cpu")
    path = _file(folder, weights, config)
    kind = _NAMES[path.name]
    is_checkpoint = kind == "checkpoint"
    prefix = "" if not is_checkpoint else "model.encoder." if config.task == "retrieve" else "model."
    with _reading(path), TensorFile(path) as file:
        check_is_of_run(file, folder)
        names = [name for name in file.entries if name.startswith(prefix)]
        shapes = {name.removeprefix(prefix): file.entries[name].shape for name in names}
        if config.task == "identify":
            shapes.pop(_CENTERS, None)
        if _is_built_in(config):
            with torch.device("meta"):  # sizes that the weights do not have are refused before they take memory
                _check_fits(path, _make_model(config, shapes), shapes)
        model = _model(folder, config, shapes, is_checkpoint=is_checkpoint, trust=bool(files))
        _check_fits(path, model, shapes)
        tensors = {name.removeprefix(prefix): file.read(name) for name in names}
        centers = tensors.pop(_CENTERS, None) if config.task == "identify" else None
        digest = hashlib.sha256(json.dumps({name: file.entries[name].digest for name in names}).encode()).hexdigest()
        classes = _classes(file) if centers is not None else ()
        step = None if kind == "final" else _step(file)
    steps = extensions[-1].steps if extensions else config.steps
    model.load_state_dict(tensors)
    model.to(device).eval().requires_grad_(False)
    return OpenRun(folder, config, model, digest, device, kind, step, steps, classes, centers)


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "weights", (OSError,), named=(ValueError,))


def _step(file: TensorFile) -> int | None:
    """Return the step after which the best weights, or those of a checkpoint, were written; None if it is not there."""
    step: Any = file.metadata.get("step")
    if "facts" in file.metadata:
        facts = parse_json(file.metadata["facts"].encode(), f"the facts of {file.path}")
        step = facts.get("step") if isinstance(facts, dict) else None
    return int(step) if re.fullmatch(r"[0-9]{1,12}", str(step)) else None


def _file(folder: Path, weights: Weights, config: TrainConfig) -> Path:
    files = {kind: folder / name for name, kind in _NAMES.items()}
    if weights == "auto":
        for kind in ("final", "checkpoint"):
            if files[kind].exists():
                return files[kind]
        raise UserError(
            f"RUN: {str(folder)!r} has neither {FINAL} nor {CHECKPOINT}: the run has had no checkpoint yet; the first "
            f"comes after step {min(config.checkpoint_every, config.steps):,}, or when Ctrl-C stops the run"
        )
    if not files[weights].exists():
        existing = [kind for kind, path in files.items() if path.exists()]
        raise UserError(
            f"--weights {weights}: the run has no {str(files[weights])!r}; it has {' and '.join(existing) or 'none'}"
        )
    return files[weights]


def _check_encoders(folder: Path) -> None:
    """Raise UserError unless the files of the encoders are those of the final weights."""
    path = folder / FINAL
    with _reading(path), TensorFile(path) as file:
        check_is_of_run(file, folder)
        expected = file.metadata.get(ENCODERS)
    try:
        digest = digest_of(folder / ENCODERS)
    except (OSError, ValueError) as error:
        raise UserError(f"RUN: the encoders of the run cannot be read: {error}") from error
    if digest != expected:
        raise UserError(
            f"RUN: the files in {str(folder / ENCODERS)!r} are not those that {FINAL} was written with; the folder is "
            "damaged, or was edited"
        )


def _model(
    folder: Path, config: TrainConfig, names: Collection[str], *, is_checkpoint: bool, trust: bool
) -> DualEncoder | Encoder:
    """Build the encoders with random weights, by the files beside the final weights or by options that are checked."""
    encoders = folder / ENCODERS
    if not is_checkpoint and encoders.exists() and (folder / FINAL).exists():
        _check_encoders(folder)
        if not _is_built_in(config):
            if config.task == "retrieve":
                return open_dual_encoder(encoders, trust=trust)
            return open_encoder(encoders / "image", trust=trust)
    if not is_checkpoint:  # the best weights of a run that goes on; adapters are merged in them
        config = replace(config, image=replace(config.image, tune="full"), text=replace(config.text, tune="full"))
    return _make_model(config, names)


def _is_built_in(config: TrainConfig) -> bool:
    return config.image_encoder == config.text_encoder == "small"


def _make_model(config: TrainConfig, names: Collection[str]) -> DualEncoder | Encoder:
    if config.task == "identify":
        return make_encoder(config, "image")
    is_of_texts = any(name.startswith("query.") for name in names)
    text_kinds: dict[str, Kind] = {"query": "text", "document": "text"}
    return make_dual_encoder(config, text_kinds if is_of_texts else {"image": "image", "text": "text"})


def _check_fits(path: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    check_fits(path, "the encoders of the run", shapes, expected)


def _classes(file: TensorFile) -> tuple[str, ...]:
    names = parse_json(file.metadata.get("classes", "").encode(), f"the classes in {file.path}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file.path} has no names of classes; it is damaged, or was not written by this program")
    return tuple(names)

"""A run that a later program opens: its encoders with the final weights, or with those of the last checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from wholebatch.app import UserError, parse_json
from wholebatch.app.tensors import TensorFile

from ..config import Kind, TrainConfig, files_of_encoders
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
    weights_line: str = ""
    """A line about the weights; "" for the final ones."""
    classes: tuple[str, ...] = ()
    """Names of the classes of --task identify; () for a checkpoint, which does not have them."""
    centers: Tensor | None = None
    """Centers of these classes, (number of classes x sub-centers, width)."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the sides: image and text, query and document, or image alone."""
        return self.model.sides

    @property
    def width(self) -> int:
        return self.model.embedding_size

    def encoder(self, side: str) -> Encoder:
        return self.model.encoder(side)

    def kind(self, side: str) -> Kind:
        return self.encoder(side).kind

    @torch.no_grad()
    def encode(self, side: str, inputs: Inputs) -> Tensor:
        """Map the inputs of b items to unit rows (b, width), all on the device of the run; float32."""
        return self.model.encode(side, inputs).float()

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
    config, files = record.config, files_of_encoders(record.config)
    if files and not trust:
        raise UserError(
            f"RUN: {str(folder)!r} has {' and '.join(files)}, Python code that would be executed; read it, or its copy "
            "in the folder encoders/, and pass --trust"
        )
    device = device or torch.device("cpu")
    path = _file(folder, weights, config)
    kind, is_built_in = _NAMES[path.name], config.image_encoder == config.text_encoder == "small"
    prefix = "" if kind != "checkpoint" else "model.encoder." if config.task == "retrieve" else "model."
    with _reading(path), TensorFile(path) as file:
        facts = check_is_of_run(file, folder)
        names = [name for name in file.entries if name.startswith(prefix)]
        shapes = {name.removeprefix(prefix): file.entries[name].shape for name in names}
        if config.task == "identify":
            shapes.pop(_CENTERS, None)
        # On "meta", sizes that the weights do not have are refused before they take memory.
        with torch.device("meta") if is_built_in else nullcontext():
            model = _model(folder, config, shapes, kind, is_built_in=is_built_in, trust=bool(files))
        check_fits(path, "the encoders of the run", shapes, {n: tuple(x.shape) for n, x in model.state_dict().items()})
        tensors = {name.removeprefix(prefix): file.read(name) for name in names}
        centers = tensors.pop(_CENTERS, None) if config.task == "identify" else None
        digest = hashlib.sha256(json.dumps({name: file.entries[name].digest for name in names}).encode()).hexdigest()
        classes = _classes(file) if centers is not None else ()
    line, step = "", str(facts.get("step"))
    if kind != "final":
        after = f" after step {int(step):,} of {record.schedule.steps:,}" if re.fullmatch(r"[0-9]{1,12}", step) else ""
        line = f"weights: {'the checkpoint' if kind == 'checkpoint' else 'those of the best validation'}{after}"
    if is_built_in:
        model.to_empty(device="cpu")
    model.load_state_dict(tensors)
    model.to(device).eval().requires_grad_(False)
    return OpenRun(folder, config, model, digest, device, kind, line, classes, centers)


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "weights", (OSError,), named=(ValueError,))


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
        expected = check_is_of_run(file, folder).get(ENCODERS)
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
    folder: Path, config: TrainConfig, names: Collection[str], kind: str, *, is_built_in: bool, trust: bool
) -> DualEncoder | Encoder:
    """Build the encoders with any weights, by the files beside the final weights or by options that are checked."""
    encoders = folder / ENCODERS
    if kind != "checkpoint":
        if encoders.exists() and (folder / FINAL).exists():
            _check_encoders(folder)
            if not is_built_in:
                if config.task == "retrieve":
                    return open_dual_encoder(encoders, trust=trust)
                return open_encoder(encoders / "image", trust=trust)
        # else the best weights of a run that goes on; adapters are merged in them
        config = replace(config, image=replace(config.image, tune="full"), text=replace(config.text, tune="full"))
    if config.task == "identify":
        return make_encoder(config, "image")
    is_of_texts = any(name.startswith("query.") for name in names)
    text_kinds: dict[str, Kind] = {"query": "text", "document": "text"}
    return make_dual_encoder(config, text_kinds if is_of_texts else {"image": "image", "text": "text"})


def _classes(file: TensorFile) -> tuple[str, ...]:
    names = parse_json(file.metadata.get("classes", "").encode(), f"the classes in {file.path}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file.path} has no names of classes; it is damaged, or was not written by this program")
    return tuple(names)

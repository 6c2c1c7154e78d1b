"""An encoder of pictures from timm, without its classifier, with its own preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError, parse_json, read_bounded

from .encoder import FixedEncoder, Normalized
from .libraries import check_is_no_path, check_safe_weights, holds, nearest, needed

_WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
_OF_DATA = ("interpolation", "mean", "std", "crop_pct", "crop_mode")
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Transform:
    """Resize and crop pictures as timm does to evaluate this model: uint8, (b, channels, h, w)."""

    transform: Any
    mode: str

    def __call__(self, pictures: Sequence[Any]) -> Tensor:
        """Map pictures to pixels."""
        return torch.stack([torch.as_tensor(self.transform(picture.convert(self.mode))) for picture in pictures])


class TimmImage(FixedEncoder):
    """A model of timm, whose row is the one that its classifier would read."""

    kind = "image"
    form = "timm image"

    def __init__(self, name: str, value: str, *, pretrained: bool = True, saved: dict[str, Any] | None = None) -> None:
        super().__init__()
        timm = needed("timm", value)
        spec = saved or (
            _spec_of_folder(Path(name), value) if Path(name).is_dir() else _spec_of_name(timm, name, value)
        )
        arguments, overlay = dict(spec["arguments"]), dict(spec["data"])
        if pretrained and saved is None:
            overlay |= {"file": str(_weights(timm, name, value)), "source": "", "url": "", "hf_hub_id": None}
        if not timm.is_model(spec["model"]):
            raise UserError(f"{value}: timm has no model {spec['model']!r}{nearest(spec['model'], timm.list_models())}")
        try:
            self.model = timm.create_model(
                spec["model"], pretrained=pretrained and saved is None, pretrained_cfg_overlay=overlay, **arguments,
                num_classes=0,
            )  # fmt: skip
        except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{value}: timm cannot make it: {' '.join(str(error).split())[:400]}") from error
        data = timm.data.resolve_model_data_config(self.model)
        self._saved = {
            "model": spec["model"],
            "arguments": arguments,
            "data": {"input_size": data["input_size"], **{key: data[key] for key in _OF_DATA if key in data}},
        }
        self.channels = 1 if data["input_size"][0] == 1 else 3
        transform = timm.data.create_transform(**data, is_training=False, use_prefetcher=True)  # without the scale
        self.prepare = Transform(transform, "L" if self.channels == 1 else "RGB")
        self.normalize = Normalized(data["mean"], data["std"])
        self.eval()
        with torch.no_grad():
            rows = self(torch.zeros(2, *data["input_size"]))
        if rows.dim() != 2:
            raise UserError(f"{value}: the model gives {tuple(rows.shape)} for 2 pictures; expected one row for each")
        self.width = rows.shape[1]

    def forward(self, images: Tensor) -> Tensor:
        """Map pixels (b, channels, h, w), uint8 or float in [0, 1], to (b, width)."""
        rows: Tensor = self.model(self.normalize(images))
        return rows

    def save(self, folder: Path) -> dict[str, Any]:
        return self._saved


def _spec_of_name(timm: Any, name: str, value: str) -> dict[str, Any]:
    check_is_no_path(value, name)
    model, _, tag = name.partition(".")
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{model}.*")]
    if timm.is_model(model) and tag and tag not in tags:
        raise UserError(f"{value}: timm's {model} has no weights {tag!r}; it has {', '.join(tags) or 'none'}")
    if not timm.is_model(model):
        raise UserError(f"{value}: timm has no model {model!r}{nearest(model, timm.list_models())}")
    return {"model": name, "arguments": {}, "data": {}}


def _spec_of_folder(folder: Path, value: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = parse_json(read_bounded(path, _MOST_BYTES), str(path))
        arguments = {key: x for key, x in config.get("model_args", {}).items() if key != "num_classes"}
        data = {key: x for key, x in config["pretrained_cfg"].items() if key in (*_OF_DATA, "input_size")}
        return {"model": str(config["architecture"]), "arguments": arguments, "data": data}
    except FileNotFoundError as error:
        raise UserError(f"{value}: {str(folder)!r} has no config.json of a model; {holds(folder)}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{value}: {path} is not the configuration of a model of timm: {error}") from error


def _weights(timm: Any, name: str, value: str) -> Path:
    """Return the file of a model's weights on this machine."""
    if Path(name).is_dir():
        check_safe_weights(value, Path(name))
        return Path(name) / _WEIGHTS[0]
    config = timm.get_pretrained_cfg(name)
    hub = needed("huggingface_hub", value)
    source = getattr(config, "hf_hub_id", None)
    if source is None:
        raise UserError(
            f"{value} has no weights on the hub of Hugging Face; start from random ones: --image.no-pretrained"
        )
    for file in _WEIGHTS:
        path = hub.try_to_load_from_cache(source, file)
        if isinstance(path, str):
            return Path(path)
    raise UserError(
        f"{value} would need a download: {source} is not in the cache of Hugging Face ({hub.constants.HF_HUB_CACHE}). "
        f"Nothing is downloaded here. On a machine with network: hf download {source} --local-dir FOLDER; then give "
        "--image-encoder timm:FOLDER. Or start from random weights: --image.no-pretrained"
    )

"""An image encoder of timm and a text encoder of transformers as a folder of open_clip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError
from wholebatch.app.tensors import write_tensors

from ..encoders.dual import DualEncoder
from ..encoders.hugging_face import quiet
from ..encoders.libraries import needed
from ..encoders.timm_image import TimmImage
from ..encoders.transformer_text import TransformerText
from .open_run import OpenRun

TO = "open_clip"
_POOLING = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}
_RESIZE = {"center": "shortest", "squash": "squash", "border": "longest"}
_TYPES = ("roberta", "xlm-roberta", "bert")  # of open_clip's hf_configs.py, those that have only an encoder


def write_open_clip(run: OpenRun, folder: Path) -> str:
    """Write open_clip_config.json, open_clip_model.safetensors and the text model's configuration and tokenizer.

    Returns:
        The call that opens it, and how its preprocessing differs.
    """
    image, text = _towers(run)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(needed("transformers", f"--to {TO}")):
        text.model.config.save_pretrained(folder)
        text.prepare.tokenizer.save_pretrained(folder)
    assert isinstance(run.model, DualEncoder)
    saved = image.save(folder)
    data = saved["data"]
    config: dict[str, Any] = {
        "model_cfg": {
            "embed_dim": run.width,
            "vision_cfg": {
                "timm_model_name": saved["model"], "timm_model_pretrained": False, "timm_pool": "",
                "timm_proj": "linear", "image_size": list(data["input_size"][1:]),
            },
            "text_cfg": {
                "hf_model_name": str(folder.absolute()), "hf_tokenizer_name": str(folder.absolute()),
                "hf_model_pretrained": False, "hf_proj_type": "linear", "hf_pooler_type": _POOLING[str(text.rule)],
                "context_length": text.prepare.max_tokens,
            },
        },
        "preprocess_cfg": {
            "mean": list(data["mean"]), "std": list(data["std"]), "interpolation": data["interpolation"],
            "resize_mode": _RESIZE[data.get("crop_mode", "center")],
        },
    }  # fmt: skip
    scales = {"logit_scale": run.model.log_logit_scale}
    if run.model.logit_bias is not None:
        config["model_cfg"]["init_logit_bias"] = 0.0
        scales["logit_bias"] = run.model.logit_bias
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
    of_text = {name: x for name, x in text.model.state_dict().items() if not name.startswith("pooler.")}
    tensors: dict[str, Tensor] = {
        **{f"visual.trunk.{name}": x for name, x in image.model.state_dict().items()},
        "visual.head.proj.weight": _projection(run, "image", image.width),
        **{f"text.transformer.{name}": x for name, x in of_text.items()},
        "text.proj.weight": _projection(run, "text", text.width),
        **scales,
    }
    write_tensors(folder / "open_clip_model.safetensors", tensors, {"format": "pt"})
    opens = f"open_clip.create_model_and_transforms({'local-dir:' + str(folder)!r})"
    crop = data.get("crop_pct", 1.0)
    if crop == 1.0:
        return opens
    return (
        f"{opens}; from the same pixels its features are the same, but its preprocessing shows the whole shorter "
        f"side of a picture, where the run cropped {crop:g} of it: for the same pixels use timm's transform"
    )


def _projection(run: OpenRun, side: str, width: int) -> Tensor:
    assert isinstance(run.model, DualEncoder)
    projections = dict(run.model.projections.named_parameters())
    return projections.get(f"{side}.weight", torch.eye(width))


def _towers(run: OpenRun) -> tuple[TimmImage, TransformerText]:
    """Return both encoders, once it is certain that the configuration can express them."""
    encoders = {side: run.encoder(side) for side in run.sides}
    image, text = encoders.get("image"), encoders.get("text")
    if not (isinstance(image, TimmImage) and isinstance(text, TransformerText)):
        raise UserError(
            f"--to {TO} needs an image encoder of timm and a text encoder of transformers, as its configuration names "
            f"them; the run has --image-encoder {run.config.image_encoder} and --text-encoder {run.config.text_encoder}"
        )
    saved = image.save(Path())
    data = saved["data"]
    kind = getattr(text.model.config, "model_type", "")
    for is_wrong, reason in (
        (saved["arguments"], f"the image encoder has arguments, {', '.join(saved['arguments'])}"),
        (image.channels != 3, "the image encoder reads one channel"),
        (data.get("crop_mode", "center") not in _RESIZE, f"the image encoder's crop_mode is {data.get('crop_mode')}"),
        (kind not in _TYPES, f"the text encoder is of the type {kind!r}, and it knows {', '.join(_TYPES)}"),
        (text.rule not in _POOLING, "the text encoder does not pool by the mean or the first token"),
        (text.prepare.lower, "the text encoder lowers the case of its texts first"),
    ):
        if is_wrong:
            raise UserError(f"--to {TO}: its configuration cannot express this run: {reason}")
    return image, text

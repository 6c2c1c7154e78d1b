"""`wholebatch export`: a run's encoders in the folder layout of another library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.app import UserError, writing
from wholebatch.app.tensors import write_tensors

from ..encoders.dual import DualEncoder
from ..encoders.libraries import needed
from ..encoders.timm_image import TimmImage
from ..encoders.transformer import TransformerText, quiet
from .open_run import OpenRun, open_run
from .options import ExportConfig
from .output import say

_POOLERS = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}
_RESIZE = {"center": "shortest", "squash": "squash", "border": "longest"}
_TYPES = ("roberta", "xlm-roberta", "bert")  # of open_clip's hf_configs.py, those that have only an encoder
_POOLING = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def export(options: ExportConfig) -> None:
    run = open_run(options.run, weights=options.weights, trust=options.trust)
    with writing(f"FOLDER: {str(options.folder)!r}"):
        write = {"sentence-transformers": write_sentence_transformers, "open_clip": write_open_clip}[options.to]
        opens = write(run, options.folder)
    say(f"{options.folder}: {opens}")


def write_open_clip(run: OpenRun, folder: Path) -> str:
    """Write configuration, weights and tokenizer; return the call that opens them, and how preprocessing differs."""
    image, text = _towers(run)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(needed("transformers", "--to open_clip")):
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
                "hf_model_pretrained": False, "hf_proj_type": "linear", "hf_pooler_type": _POOLERS[str(text.rule)],
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
    text_state = {name: x for name, x in text.model.state_dict().items() if not name.startswith("pooler.")}
    tensors: dict[str, Tensor] = {
        **{f"visual.trunk.{name}": x for name, x in image.model.state_dict().items()},
        "visual.head.proj.weight": _projection(run, "image", image.width),
        **{f"text.transformer.{name}": x for name, x in text_state.items()},
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
            "--to open_clip needs an image encoder of timm and a text encoder of transformers, as its configuration "
            f"names them; the run has --image-encoder {run.config.image_encoder} and --text-encoder "
            f"{run.config.text_encoder}"
        )
    saved = image.save(Path())
    data = saved["data"]
    kind = getattr(text.model.config, "model_type", "")
    for is_wrong, reason in (
        (saved["arguments"], f"the image encoder has arguments, {', '.join(saved['arguments'])}"),
        (image.channels != 3, "the image encoder reads one channel"),
        (data.get("crop_mode", "center") not in _RESIZE, f"the image encoder's crop_mode is {data.get('crop_mode')}"),
        (kind not in _TYPES, f"the text encoder is of the type {kind!r}, and it knows {', '.join(_TYPES)}"),
        (text.rule not in _POOLERS, "the text encoder does not pool by the mean or the first token"),
        (text.prepare.lower, "the text encoder lowers the case of its texts first"),
    ):
        if is_wrong:
            raise UserError(f"--to open_clip: its configuration cannot express this run: {reason}")
    return image, text


def write_sentence_transformers(run: OpenRun, folder: Path) -> str:
    """Write the encoder of texts of a run, which both sides of a run of texts share; return the call that opens it."""
    side = next((side for side in run.sides if run.kind(side) == "text"), None)
    encoder = None if side is None else run.encoder(side)
    if side is None or not isinstance(encoder, TransformerText):
        got = "no encoder of texts" if side is None else f"--text-encoder {run.config.text_encoder}"
        raise UserError(
            "--to sentence-transformers needs a text encoder of transformers, --text-encoder transformers:NAME; the "
            f"run has {got}"
        )
    if encoder.rule is None:
        raise UserError(
            "--to sentence-transformers needs a text encoder that pools its tokens; the run has a tower with its own "
            "end, as CLIP has"
        )
    library = needed("sentence_transformers", "--to sentence-transformers")
    modules = library.sentence_transformer.modules
    assert isinstance(run.model, DualEncoder)
    with tempfile.TemporaryDirectory() as temporary, quiet(needed("transformers", "")):
        encoder.model.save_pretrained(temporary)
        encoder.prepare.tokenizer.save_pretrained(temporary)
        transformer = modules.Transformer(
            temporary, max_seq_length=encoder.prepare.max_tokens, do_lower_case=encoder.prepare.lower
        )
        parts: list[Any] = [transformer, modules.Pooling(encoder.width, _POOLING[encoder.rule])]
        if (name := run.model.name_of(side)) in run.model.projections:
            projection = run.model.projections[name]
            dense = modules.Dense(encoder.width, run.width, bias=False, activation_function=nn.Identity())
            with torch.no_grad():
                dense.linear.weight.copy_(projection.weight)
            parts.append(dense)
        parts.append(modules.Normalize())
        library.SentenceTransformer(modules=parts, device="cpu").save(str(folder), create_model_card=False)
    return f"SentenceTransformer({str(folder)!r})"

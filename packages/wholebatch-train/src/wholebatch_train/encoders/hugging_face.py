"""Models of the library transformers, of a folder or the local cache, without code of a model's own; their pooling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wholebatch.app import UserError, parse_json, read_bounded

from .libraries import check_safe_weights, holds, needed

_MOST_LAYERS = 10_000
Rule = Literal["cls", "mean", "last"]
_MOST_BYTES = 2**20
_MODES: dict[str, Rule] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}


def load_model(
    folder: Path, value: str, kind: Literal["image", "text"], *, pretrained: bool
) -> tuple[nn.Module, bool, list[str]]:
    """Return the network of items of this kind, in float32, whether it is one of two towers, and lines to show."""
    transformers = needed("transformers", value)
    config = _config(transformers, folder, value)
    if pretrained:
        check_safe_weights(value, folder)
    is_tower = hasattr(config, "text_config") and hasattr(config, "vision_config")
    auto = _auto_class(transformers, config, kind, value, is_tower=is_tower)
    missing: list[str] = []
    with quiet(transformers), mistakes(value, folder):
        if pretrained:
            model, info = auto.from_pretrained(
                folder, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False,
                dtype=torch.float32, output_loading_info=True,
            )  # fmt: skip
            missing = sorted(info["missing_keys"])
        else:
            model = auto.from_config(config, trust_remote_code=False, dtype=torch.float32)
    if not is_tower and getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        model = model.get_encoder()
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in missing if name in names and "pooler" not in name]
    notes = [f"{len(missing)} weights are in no file and start at random: {', '.join(missing[:4])}"] if missing else []
    return model, is_tower, notes


def _config(transformers: Any, folder: Path, value: str) -> Any:
    if not (folder / "config.json").exists():
        raise UserError(f"{value}: {str(folder)!r} has no config.json of a model; {holds(folder)}")
    with quiet(transformers), mistakes(value, folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_layers(config.to_dict())
        return config


def _check_layers(values: dict[str, Any]) -> None:
    """Raise ValueError if a configuration, or one inside of it, asks for layers without end."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_layers(value)
        elif isinstance(value, int) and "layer" in name and value > _MOST_LAYERS:
            raise ValueError(f"{name} must be at most {_MOST_LAYERS}, got {value}")


def _auto_class(transformers: Any, config: Any, kind: str, value: str, *, is_tower: bool) -> Any:
    mappings = transformers.models.auto.modeling_auto
    if is_tower:
        if type(config) not in mappings.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING:
            raise UserError(
                f"{value}: a model of the type {config.model_type!r} reads images and texts together; expected one "
                "of a single kind, or one with a tower for each, such as CLIP or SigLIP"
            )
        return transformers.AutoModel
    if type(config) not in transformers.MODEL_MAPPING:
        raise UserError(f"{value}: transformers has no plain model of the type {config.model_type!r}")
    reads_images = hasattr(config, "num_channels") or hasattr(config, "patch_size")
    if reads_images != (kind == "image"):
        other = "image" if reads_images else "text"
        raise UserError(f"{value}: a model of the type {config.model_type!r} reads {other}s; expected one of {kind}s")
    if kind == "text" and type(config) in mappings.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def without_other_tower(model: nn.Module, used: set[int]) -> None:
    """Remove the parts of a model of images and texts that have none of the used parameters."""
    for name, part in list(model.named_children()):
        if not any(id(p) in used for p in part.parameters()):
            setattr(model, name, None)
    for name, p in list(model.named_parameters(recurse=False)):
        if id(p) not in used:
            setattr(model, name, None)


@contextmanager
def mistakes(value: str, folder: Path) -> Iterator[None]:
    """Turn the errors of transformers about a folder into a UserError."""
    try:
        yield
    except Exception as error:  # of any kind, since a configuration may have any values
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{value}: transformers cannot load {str(folder)!r}: {reason[:400]}; {holds(folder)}"
        ) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Show neither bars nor reports of loading; what matters of these is among the notes."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def pool(tokens: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Return one row of each sequence, (b, d).

    Args:
        tokens: (b, T, d).
        mask: (b, T), not 0 for tokens that count; None: all.
        rule: which row; "cls" and "last" are those of the first and the last token that counts.

    >>> x = torch.arange(6.0).view(1, 3, 2)
    >>> pool(x, torch.tensor([[1, 1, 0]]), "mean").tolist(), pool(x, torch.tensor([[1, 1, 0]]), "last").tolist()
    ([[1.0, 2.0]], [[2.0, 3.0]])
    """
    if mask is None:
        return {"cls": tokens[:, 0], "last": tokens[:, -1], "mean": tokens.mean(1)}[rule]
    if rule == "mean":
        weights = mask.to(tokens.dtype)[..., None]
        return (tokens * weights).sum(1) / weights.sum(1).clamp_min(1e-9)
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device) * (mask != 0)
    index = place.argmax(1) if rule == "last" else (mask != 0).int().argmax(1)
    return tokens[torch.arange(len(tokens), device=tokens.device), index]


def rule_of_sentences(folder: Path, value: str) -> Rule | None:
    """Return the pooling that a model's modules.json of sentence-transformers says; None if there is no such file."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    modules = _json(path)
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    advice = "with an explicit pooling the model is built without: add --text.pooling cls, mean or last"
    if unknown:
        raise UserError(f"{value}: {path} lists {', '.join(unknown)}, which is not built here; {advice}")
    if "Pooling" not in kinds:
        return None
    config = _json(folder / modules[kinds.index("Pooling")]["path"] / "config.json")
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [
        _OLD.get(name, name) for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True
    ]  # fmt: skip
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UserError(f"{value}: {path} pools by {', '.join(map(str, modes))}, which is not built here; {advice}")
    return _MODES[modes[0]]


def sentence_settings(folder: Path) -> dict[str, Any]:
    """Return the values of sentence_bert_config.json; {} if there is no such file."""
    path = folder / "sentence_bert_config.json"
    return dict(_json(path)) if path.exists() else {}


def _json(path: Path) -> Any:
    try:
        return parse_json(read_bounded(path, _MOST_BYTES), str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error

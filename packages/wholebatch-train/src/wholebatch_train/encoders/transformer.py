"""Encoders from transformers: tokenizer or image processor, network, and one row of the tokens or patches.

The models are those of a folder or of the local cache, without code of a model's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wholebatch.app import UserError, parse_json, read_bounded

from ..config import Pooling
from .encoder import FixedEncoder, Inputs, Normalized, used_parameters
from .libraries import check_safe_weights, holds, needed

_UNBOUNDED = 10**6  # a tokenizer without a limit has 10 ** 30
_USUAL = 512
ImageRule = Literal["auto", "own", "cls", "mean"]
_MOST_LAYERS = 10_000
Rule = Literal["cls", "mean", "last"]
_MOST_BYTES = 2**20
_MODES: dict[str, Rule] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_OFF = {"do_rescale": False, "do_normalize": False}


@dataclass(frozen=True)
class Tokenize:
    """Tokenize texts, padded on the right to the longest of them."""

    tokenizer: Any
    max_tokens: int
    keys: tuple[str, ...]
    """The inputs of the network."""
    padding: str = "longest"
    lower: bool = False

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Map b texts to token ids and masks, (b, T) each."""
        texts = [text.lower() for text in texts] if self.lower else list(texts)
        tokens = self.tokenizer(
            texts, padding=self.padding, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        return {key: tokens[key] for key in self.keys}


class _Transformer(FixedEncoder):
    """A model of transformers, in `folder`; `value` is the option and its text, for errors."""

    def __init__(self, folder: Path, value: str, *, pretrained: bool) -> None:
        super().__init__()
        config = _config(folder, value)
        if pretrained:
            check_safe_weights(value, folder)
        self._is_tower = hasattr(config, "text_config") and hasattr(config, "vision_config")
        """Whether the model has one for images and one for texts."""
        auto = _auto_class(config, self.kind, value, is_tower=self._is_tower)
        missing: list[str] = []
        with _library(value, folder):
            if pretrained:
                model, info = auto.from_pretrained(
                    folder, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False,
                    dtype=torch.float32, output_loading_info=True,
                )  # fmt: skip
                missing = sorted(info["missing_keys"])
            else:
                model = auto.from_config(config, trust_remote_code=False, dtype=torch.float32)
        if not self._is_tower and getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
            model = model.get_encoder()
        names = {name for name, _ in model.named_parameters()}
        missing = [name for name in missing if name in names and "pooler" not in name]
        if missing:
            listed = ", ".join(missing[:4])
            self.notes = [f"{len(missing)} weights are in no file and start at random: {listed}"]
        self.model = model

    def _measure(self) -> None:
        """Find the width by an example; of a model of images and texts, remove the parts that this has not used."""
        self.eval()
        output = self(self.prepare([self.example()]))
        self.width = output.shape[1]
        if not self._is_tower:
            return
        used = used_parameters(output)
        for name, part in list(self.model.named_children()):
            if not any(id(p) in used for p in part.parameters()):
                setattr(self.model, name, None)
        for name, p in list(self.model.named_parameters(recurse=False)):
            if id(p) not in used:
                setattr(self.model, name, None)

    def _save(self, folder: Path, prepares: Any) -> None:
        """Write the configuration, and the tokenizer or the image processor."""
        with quiet(needed("transformers", "")):
            self.model.config.save_pretrained(folder)
            prepares.save_pretrained(folder)


class TransformerText(_Transformer):
    """A model that reads texts.

    The pooling "auto" is as modules.json of sentence-transformers says; else the tower's own for a model such as CLIP,
    the last token for a model that reads from left to right, and the mean for any other. Without `max_tokens` the limit
    is the model's.
    """

    prepare: Tokenize
    kind = "text"
    form = "transformers text"

    def __init__(
        self, folder: Path, value: str, *, pooling: Pooling = "auto", max_tokens: int | None = None, pretrained: bool
    ) -> None:
        # The tokenizer's threads do not survive the fork of a process that loads data, and there are several of these.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        rule: Rule | None = rule_of_sentences(folder, value) if pooling == "auto" else pooling
        super().__init__(folder, value, pretrained=pretrained)
        config = self.model.config
        for each in (config, getattr(config, "text_config", config)):
            if hasattr(each, "use_cache"):
                each.use_cache = False  # of keys and values, which only the next word of a generated text would need
        self.rule: Rule | None = rule or (None if self._is_tower else "last" if _is_causal(config) else "mean")
        self.prepare = self._tokenize(folder, value, config, max_tokens)
        self._measure()

    def _tokenize(self, folder: Path, value: str, config: Any, max_tokens: int | None) -> Tokenize:
        with _library(value, folder) as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, padding_side="right"
            )
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise UserError(f"{value}: the tokenizer of {str(folder)!r} has no token for padding")
            tokenizer.pad_token = tokenizer.eos_token
        settings = sentence_settings(folder)
        limits = [tokenizer.model_max_length, *_positions(self.model)]
        limit = min((each for each in limits if each < _UNBOUNDED), default=None)
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise UserError(f"--text.max-tokens must be at most {limit}, the limit of {value}, got {max_tokens}")
        usual = settings.get("max_seq_length") or limit or _USUAL
        keys = tuple(
            key for key in ("input_ids", "attention_mask", "token_type_ids") if key in tokenizer.model_input_names
        )
        is_fixed = str(getattr(config, "model_type", "")).startswith("siglip")  # trained with padding that it reads
        return Tokenize(
            tokenizer, max_tokens or min(usual, limit or usual), keys, "max_length" if is_fixed else "longest",
            bool(settings.get("do_lower_case", False)),
        )  # fmt: skip

    def forward(self, inputs: Inputs) -> Tensor:
        """Map token ids and masks, (b, T) each, to (b, width)."""
        output = (self.model.get_text_features if self._is_tower else self.model)(**inputs)
        if self.rule is None:
            row: Tensor = output if isinstance(output, Tensor) else output.pooler_output
            return row
        return pool(output.last_hidden_state, inputs.get("attention_mask"), self.rule)

    def save(self, folder: Path) -> dict[str, Any]:
        self._save(folder, self.prepare.tokenizer)
        return {"rule": self.rule, "max_tokens": self.prepare.max_tokens, "lower": self.prepare.lower}


def _positions(model: nn.Module) -> list[int]:
    """Return the tokens that a network has positions for: of its table, in which some start after the padding's row."""
    text_config = getattr(model.config, "text_config", model.config)
    limits = [getattr(text_config, "max_position_embeddings", None)]
    for name, m in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(m, nn.Embedding) and m.padding_idx is not None:
            limits.append(m.num_embeddings - m.padding_idx - 1)
    return [each for each in limits if each]


def _is_causal(config: Any) -> bool:
    """Return whether a model reads from left to right, so that only the last token has seen the whole text."""
    from transformers.models.auto import modeling_auto as mappings

    return (
        type(config) in mappings.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in mappings.MODEL_FOR_MASKED_LM_MAPPING
    )


@dataclass(frozen=True)
class Process:
    """Resize and crop pictures as the model's image processor does.

    The result is uint8 where the rest of the work, a scale and a shift of each channel, can be done by the network.
    """

    processor: Any
    is_raw: bool

    def __call__(self, pictures: Sequence[Any]) -> Inputs:
        """Map b pictures to pixels (b, 3, h, w), or to the tensors that the network names."""
        more = _OFF if self.is_raw else {}
        inputs = self.processor(images=[picture.convert("RGB") for picture in pictures], return_tensors="pt", **more)
        return inputs["pixel_values"] if set(inputs) == {"pixel_values"} else dict(inputs)


class TransformerImage(_Transformer):
    """A model that reads pictures.

    The pooling "auto" is the tower's own for a model such as CLIP; else the first token if it is one for the class, or
    the model's pooled row, or the mean of the patches.
    """

    prepare: Process
    kind = "image"
    form = "transformers image"

    def __init__(
        self, folder: Path, value: str, *, pooling: ImageRule | Pooling = "auto", pretrained: bool = True
    ) -> None:
        if pooling == "last":
            raise UserError("--image.pooling must be auto, cls or mean, because patches have no order, got last")
        super().__init__(folder, value, pretrained=pretrained)
        names = [name for name, _ in self.model.named_parameters()]
        has_class = any(name.endswith(("cls_token", "class_embedding", "class_token")) for name in names)
        self.rule: ImageRule = pooling if pooling != "auto" else "cls" if has_class and not self._is_tower else "own"
        with _library(value, folder) as transformers:
            processor = transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        pixels = _rescaling(processor, self.example())
        self.prepare = Process(processor, pixels is not None)
        self.normalize: nn.Module = nn.Identity() if pixels is None else pixels
        self._measure()

    def forward(self, inputs: Inputs) -> Tensor:
        """Map pixels (b, 3, h, w), uint8 or float in [0, 1], or the tensors of `prepare`, to (b, width)."""
        named = {"pixel_values": self.normalize(inputs)} if isinstance(inputs, Tensor) else inputs
        output = (self.model.get_image_features if self._is_tower else self.model)(**named)
        pooled = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
        if self.rule == "own" and pooled is not None:
            return pooled.flatten(1)
        tokens = output.last_hidden_state
        if tokens.dim() == 4:  # (b, d, h, w), of a convolutional network
            tokens = tokens.flatten(2).transpose(1, 2)
        return pool(tokens, None, "cls" if self.rule == "cls" else "mean")

    def save(self, folder: Path) -> dict[str, Any]:
        self._save(folder, self.prepare.processor)
        return {"rule": self.rule}


def _rescaling(processor: Any, picture: Any) -> Normalized | None:
    """Return the scale and shift of an image processor as a module; None if it does anything else to the pixels."""
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not (getattr(processor, "do_rescale", False) and processor.rescale_factor == 1 / 255):
        return None
    if not getattr(processor, "do_normalize", False):
        mean, std = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
    if mean is None or std is None:
        return None
    whole, raw = Process(processor, False)([picture]), Process(processor, True)([picture])
    if not (isinstance(raw, Tensor) and raw.dtype == torch.uint8 and isinstance(whole, Tensor)):
        return None
    scale = Normalized(mean, std)
    return scale if raw.shape == whole.shape and torch.allclose(scale(raw), whole, rtol=0, atol=1e-4) else None


def _config(folder: Path, value: str) -> Any:
    needed("transformers", value)
    if not (folder / "config.json").exists():
        raise UserError(f"{value}: {str(folder)!r} has no config.json of a model; {holds(folder)}")
    with _library(value, folder) as transformers:
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


def _auto_class(config: Any, kind: str, value: str, *, is_tower: bool) -> Any:
    transformers = needed("transformers", value)
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


@contextmanager
def _library(value: str, folder: Path) -> Iterator[Any]:
    """Yield transformers, which is quiet, and turn its errors about a folder into a UserError."""
    transformers = needed("transformers", value)
    try:
        with quiet(transformers):
            yield transformers
    except UserError:
        raise
    except Exception as error:  # of any kind, since a configuration may have any values
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

"""Encoders from transformers: tokenizer or image processor, network, and one row of the tokens or patches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wholebatch.app import UserError

from ..encoder_options import Pooling
from .encoder import FixedEncoder, Inputs, Normalized, used_parameters
from .hugging_face import (
    Rule,
    load_model,
    mistakes,
    pool,
    quiet,
    rule_of_sentences,
    sentence_settings,
    without_other_tower,
)
from .libraries import needed

_UNBOUNDED = 10**6  # a tokenizer without a limit has 10 ** 30
_USUAL = 512
ImageRule = Literal["auto", "own", "cls", "mean"]
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


class TransformerText(FixedEncoder):
    """A model of transformers that reads texts, in `folder`; `value` is the option and its text, for errors.

    The pooling "auto" is as modules.json of sentence-transformers says; else the tower's own for a model such as CLIP,
    the last token for a model that reads from left to right, and the mean for any other. Without `max_tokens` the limit
    is the model's.
    """

    prepare: Tokenize
    kind = "text"
    form = "transformers text"

    def __init__(
        self,
        folder: Path,
        value: str,
        *,
        pooling: Pooling = "auto",
        max_tokens: int | None = None,
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        # The tokenizer's threads do not survive the fork of a process that loads data, and there are several of these.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        rule: Rule | None = rule_of_sentences(folder, value) if pooling == "auto" else pooling
        self.model, self._is_tower, self.notes = load_model(folder, value, "text", pretrained=pretrained)
        config = self.model.config
        for each in (config, getattr(config, "text_config", config)):
            if hasattr(each, "use_cache"):
                each.use_cache = False  # of keys and values, which only the next word of a generated text would need
        self.rule: Rule | None = rule or (None if self._is_tower else "last" if _is_causal(config) else "mean")
        self.prepare = self._tokenize(folder, value, config, max_tokens)
        self.eval()
        output = self(self.prepare([self.example()]))
        self.width = output.shape[1]
        if self._is_tower:
            without_other_tower(self.model, used_parameters(output))

    def _tokenize(self, folder: Path, value: str, config: Any, max_tokens: int | None) -> Tokenize:
        transformers = needed("transformers", value)
        with quiet(transformers), mistakes(value, folder):
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
        with quiet(needed("transformers", "")):
            self.model.config.save_pretrained(folder)
            self.prepare.tokenizer.save_pretrained(folder)
        return {"rule": self.rule, "max_tokens": self.prepare.max_tokens, "lower": self.prepare.lower}


def _positions(model: nn.Module) -> list[int]:
    """Return the tokens that a network has positions for: of its table, in which some start after the padding's row."""
    of_config = getattr(model.config, "text_config", model.config)
    limits = [getattr(of_config, "max_position_embeddings", None)]
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


class TransformerImage(FixedEncoder):
    """A model of transformers that reads pictures, in `folder`; `value` is the option and its text, for errors.

    The pooling "auto" is the tower's own for a model such as CLIP; else the first token if it is one for the class, or
    the model's pooled row, or the mean of the patches.
    """

    prepare: Process
    kind = "image"
    form = "transformers image"

    def __init__(
        self, folder: Path, value: str, *, pooling: ImageRule | Pooling = "auto", pretrained: bool = True
    ) -> None:
        super().__init__()
        if pooling == "last":
            raise UserError("--image.pooling must be auto, cls or mean, because patches have no order, got last")
        self.model, self._is_tower, self.notes = load_model(folder, value, "image", pretrained=pretrained)
        names = [name for name, _ in self.model.named_parameters()]
        has_class = any(name.endswith(("cls_token", "class_embedding", "class_token")) for name in names)
        self.rule: ImageRule = pooling if pooling != "auto" else "cls" if has_class and not self._is_tower else "own"
        transformers = needed("transformers", value)
        with quiet(transformers), mistakes(value, folder):
            processor = transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        pixels = _rescaling(processor, self.example())
        self.prepare = Process(processor, pixels is not None)
        self.normalize: nn.Module = nn.Identity() if pixels is None else pixels
        self.eval()
        output = self(self.prepare([self.example()]))
        self.width = output.shape[1]
        if self._is_tower:
            without_other_tower(self.model, used_parameters(output))

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
        with quiet(needed("transformers", "")):
            self.model.config.save_pretrained(folder)
            self.prepare.processor.save_pretrained(folder)
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

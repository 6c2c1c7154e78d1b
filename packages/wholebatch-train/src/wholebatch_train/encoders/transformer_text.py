"""An encoder of texts from transformers: its tokenizer, its network, and one row of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wholebatch.app import UserError

from ..encoder_options import Pooling
from .encoder import Inputs
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
from .pretrained import FixedEncoder, used_parameters

_UNBOUNDED = 10**6  # a tokenizer without a limit has 10 ** 30
_USUAL = 512


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
    """A model of transformers that reads texts.

    Args:
        folder: the model's folder.
        value: the option and its text, for errors.
        pooling: "auto": as modules.json of sentence-transformers says; else the tower's own for a model such as CLIP,
            the last token for a model that reads from left to right, and the mean for any other.
        max_tokens: None: the limit of the model.
        pretrained: whether its weights are read; else they are random.
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
        """Write the configuration and the tokenizer."""
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

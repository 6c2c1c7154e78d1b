"""One row of each sequence: of its first token, the mean of its tokens, or of its last token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wholebatch.app import UserError, parse_json, read_bounded

Rule = Literal["cls", "mean", "last"]
_MOST_BYTES = 2**20
_MODES: dict[str, Rule] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}


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
    """Return the pooling that a model's modules.json of sentence-transformers says; None if there is no such file.

    Raises:
        UserError: a module, or a pooling, that is not built here.
    """
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

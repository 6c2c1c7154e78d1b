"""The options of the two encoders: `--image-encoder`, `--image.*`, `--text-encoder`, `--text.*`.

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from wholebatch.app import UserError, needs, require

Pooling = Literal["auto", "cls", "mean", "last"]
Tune = Literal["full", "frozen", "lora"]
FORMS = {
    "image": ("small", "timm:NAME", "transformers:NAME", "FILE.py:FUNCTION"),
    "text": ("small", "transformers:NAME", "FILE.py:FUNCTION"),
}


@dataclass(frozen=True)
class SideConfig:
    """How an encoder of images starts, pools and is tuned; --model has the sizes of "small"."""

    pretrained: bool = True
    """Start a model of a library from its pretrained weights, which must be on this machine. no: from random ones."""
    pooling: Pooling = "auto"
    """The row of a sequence: of its first token, the mean of its tokens, or of its last token.
    "auto": as the model's own files say, or else as this kind of model usually has it."""
    tune: Tune = "full"
    """The weights to train: all, none, or adapters of low rank beside the linear layers (LoRA, which needs peft)."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Factor of an adapter's product, divided by the rank."""
    lora_targets: str = "auto"
    """Layers with adapters: ends of their names, separated by commas. "auto": all linear layers."""
    learning_rate_factor: float | None = None
    """Factor of --learning-rate for this encoder. None: 0.01 for pretrained weights, 0.1 for adapters, else 1."""
    recompute: bool = False
    """Keep fewer activations, and compute them again in the backward pass (activation checkpointing)."""


@dataclass(frozen=True)
class TextSideConfig(SideConfig):
    """How an encoder of texts starts, pools, cuts off and is tuned; --model has the sizes of "small"."""

    max_tokens: int | None = None
    """Tokens of a text that are read; the rest is cut off. None: as many as the model reads."""


@dataclass(frozen=True)
class Named:
    """The parts of `--image-encoder` or `--text-encoder`: a form of `FORMS`, and what follows its name.

    >>> Named.parse("timm:resnet18"), Named.parse("mine.py:make")
    (Named(library='timm', name='resnet18', function=''), Named(library='file', name='mine.py', function='make'))
    """

    library: Literal["small", "timm", "transformers", "file", ""]
    """"": none of these."""
    name: str = ""
    function: str = ""

    @classmethod
    def parse(cls, text: str) -> Named:
        """Return the parts of the option's text."""
        before, _, function = text.rpartition(":")
        if before.endswith(".py") and function.isidentifier():
            return cls("file", before, function)
        library, _, name = text.partition(":")
        if library == "timm" and name.strip():
            return cls("timm", name)
        if library == "transformers" and name.strip():
            return cls("transformers", name)
        return cls("small" if text == "small" else "")


def absolute(encoder: str, base: Path) -> str:
    """Return the text of an option with an absolute path, of a file or of an existing folder, seen from `base`.

    >>> absolute("mine.py:make", Path("/home/me")), absolute("timm:resnet18", Path("/home/me"))
    ('/home/me/mine.py:make', 'timm:resnet18')
    """
    named = Named.parse(encoder)
    path = base.absolute() / named.name
    if named.library == "file":
        return f"{path}:{named.function}"
    is_folder = named.library in ("timm", "transformers") and path.is_dir()
    return f"{named.library}:{path}" if is_folder else encoder


def check_present(kind: Literal["image", "text"], encoder: str) -> None:
    """Refuse an encoder whose file or library is missing."""
    named = Named.parse(encoder)
    value = f"--{kind}-encoder {encoder}"
    if named.library == "file" and not Path(named.name).is_file():
        raise UserError(f"{value}: there is no file {named.name!r}")
    if named.library in ("timm", "transformers") and find_spec(named.library) is None:
        raise UserError(needs(value, named.library))


def check_encoder(kind: Literal["image", "text"], encoder: str, side: SideConfig) -> None:
    """Refuse options of one kind of encoder that make no sense, before any library is imported."""
    library = Named.parse(encoder).library
    forms = FORMS[kind]
    known = library and "\0" not in encoder and (library != "timm" or kind == "image")
    require(known, f"{kind}_encoder", f"one of {', '.join(forms)}", repr(encoder))
    no_adapters = library == "small" and side.tune == "lora"
    require(not no_adapters, f"{kind}.tune", "full or frozen with the built-in encoder", side.tune)
    require(1 <= side.lora_rank <= 2**16, f"{kind}.lora_rank", "in [1, 65536]", side.lora_rank)
    require(0 < side.lora_alpha <= 1e6, f"{kind}.lora_alpha", "in (0, 1e6]", side.lora_alpha)
    factor = side.learning_rate_factor
    require(factor is None or 0 < factor <= 1e6, f"{kind}.learning_rate_factor", "in (0, 1e6]", factor)
    tokens = getattr(side, "max_tokens", None)
    require(tokens is None or 1 <= tokens <= 2**20, f"{kind}.max_tokens", "in [1, 1048576]", tokens)
    for f in dataclasses.fields(side):
        reason, value = _reason_without_effect(f.name, kind, library, side.tune), getattr(side, f.name)
        require(not reason or value == f.default, f"{kind}.{f.name}", f"left out {reason}", value)


def _reason_without_effect(name: str, kind: str, library: str, tune: Tune) -> str:
    """Return why an option has no effect: the end of a message, or ""."""
    libraries = {"pretrained": ("timm", "transformers"), "pooling": ("transformers",), "max_tokens": ("transformers",),
                 "recompute": ("timm", "transformers", "file")}.get(name)  # fmt: skip
    if libraries is not None and library not in libraries:
        return f"with an encoder of this kind (it is for {', '.join(libraries)})"
    if name.startswith("lora_") and tune != "lora":
        return f"without --{kind}.tune lora"
    if name in ("learning_rate_factor", "recompute") and tune == "frozen":
        return f"with --{kind}.tune frozen"
    return ""

"""A text encoder of transformers as a folder of sentence-transformers: modules.json, pooling, projection, unit rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholebatch.app import UserError

from ..encoders.dual import DualEncoder
from ..encoders.hugging_face import quiet
from ..encoders.libraries import needed
from ..encoders.transformer_text import TransformerText
from .open_run import OpenRun

TO = "sentence-transformers"
_POOLING = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def write_sentence_transformers(run: OpenRun, folder: Path) -> str:
    """Write the encoder of texts of a run, which both sides of a run of texts share; return the call that opens it."""
    side = next((side for side in run.sides if run.kind(side) == "text"), None)
    encoder = None if side is None else run.encoder(side)
    if side is None or not isinstance(encoder, TransformerText):
        got = "no encoder of texts" if side is None else f"--text-encoder {run.config.text_encoder}"
        raise UserError(
            f"--to {TO} needs a text encoder of transformers, --text-encoder transformers:NAME; the run has {got}"
        )
    if encoder.rule is None:
        raise UserError(
            f"--to {TO} needs a text encoder that pools its tokens; the run has a tower with its own end, as CLIP has"
        )
    library = needed("sentence_transformers", f"--to {TO}")
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

"""The weights of an encoder that are trained, at which factor of the learning rate, and with which activations kept.

Adapters of low rank (LoRA) beside linear layers are those of peft; their products are merged into the saved weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.app import UserError

from ..config import SideConfig
from .encoder import Encoder, FixedEncoder, check_batch_norm, used_parameters
from .libraries import nearest, needed

_BASE = "base_layer."


def tune(encoder: FixedEncoder, side: SideConfig, value: str, *, is_pretrained: bool, is_file: bool) -> None:
    """Prepare an encoder of a library, or of a user, for training."""
    notes = [
        *encoder.notes,
        _size_of_pictures(encoder),
        check_batch_norm(encoder, value, pretrained=is_pretrained or is_file),
    ]
    if side.tune == "frozen":
        encoder.requires_grad_(False)
    else:
        used = _freeze_unused(encoder)
        if side.tune == "lora":
            add_adapters(encoder, side, used)
            _freeze_unused(encoder)
    if side.recompute:
        _recompute(encoder, value)
    encoder.learning_rate_factor = side.learning_rate_factor or (
        0.1 if side.tune == "lora" else 0.01 if is_pretrained else 1.0
    )
    encoder.notes = tuple(note for note in notes if note)


def _size_of_pictures(encoder: Encoder) -> str:
    """Return a line about the pictures that the encoder reads, or "" if its inputs are no pixels."""
    inputs = encoder.prepare([encoder.example()]) if encoder.kind == "image" else None
    if not (isinstance(inputs, Tensor) and inputs.dim() == 4):
        return ""
    height, width = inputs.shape[2:]
    colors = "gray" if inputs.shape[1] == 1 else "in color"
    return f"pictures become {height} x {width}, {colors}, as their encoder reads them"


def _freeze_unused(encoder: Encoder) -> set[int]:
    """Freeze parameters without effect, for whose gradients DDP would wait; return the ids of the others."""
    used = used_parameters(encoder(encoder.prepare([encoder.example()])))
    for p in encoder.parameters():
        if id(p) not in used:
            p.requires_grad_(False)
    return used


def _recompute(encoder: FixedEncoder, value: str) -> None:
    model = encoder.model
    try:
        # Not reentrant, for the inputs need no gradient.
        if hasattr(model, "activation_checkpointing_enable"):  # of transformers 5
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        elif hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif hasattr(model, "set_grad_checkpointing"):
            model.set_grad_checkpointing(True)
        else:
            raise ValueError("it has neither gradient_checkpointing_enable nor set_grad_checkpointing")
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--{encoder.kind}.recompute must be left out with {value}, which cannot compute activations again: {error}"
        ) from error
    encoder.train()


def add_adapters(encoder: Encoder, side: SideConfig, used: set[int]) -> None:
    """Freeze the encoder and add trainable adapters to its linear layers, in place."""
    option = f"--{encoder.kind}.lora-targets"
    peft = needed("peft", f"--{encoder.kind}.tune lora")
    linear = [name for name, m in encoder.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    if side.lora_targets == "auto":
        targets = [name for name in linear if id(encoder.get_submodule(name).weight) in used]
        if not targets:
            raise UserError(f"--{encoder.kind}.tune lora needs linear layers, and this encoder has none")
    else:
        asked = [each.strip() for each in side.lora_targets.split(",") if each.strip()]
        targets = [name for name in linear if any(name == end or name.endswith(f".{end}") for end in asked)]
        for end in asked:
            if not any(name == end or name.endswith(f".{end}") for name in targets):
                ends = sorted({name.rpartition(".")[2] for name in linear})
                raise UserError(
                    f"{option} must name linear layers of the encoder, got {end!r}; there are {', '.join(ends)}"
                    f"{nearest(end, ends)}"
                )
    config = peft.LoraConfig(
        r=side.lora_rank, lora_alpha=side.lora_alpha, target_modules=targets, lora_dropout=0.0, bias="none"
    )
    peft.inject_adapter_in_model(config, encoder)
    encoder.eval()


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module as if it had no adapters: each one's product is added to the weight beside it."""
    layers: dict[str, Any] = {name: m for name, m in module.named_modules() if hasattr(m, "get_delta_weight")}
    state = {}
    for name, x in module.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            state[name] = x
            continue
        inside = name[len(owner) + 1 :]
        if inside.startswith(_BASE):
            inside = inside.removeprefix(_BASE)
            with torch.no_grad():
                more = layers[owner].get_delta_weight("default") if inside == "weight" else 0
                state[f"{owner}.{inside}"] = x + more
    return state

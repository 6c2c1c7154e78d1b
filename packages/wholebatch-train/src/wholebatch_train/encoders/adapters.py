"""Adapters of low rank (LoRA) beside the linear layers of an encoder, by peft; and the weights with them merged in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.app import UserError

from ..encoder_options import SideConfig
from .encoder import Encoder
from .libraries import nearest, needed

_BASE = "base_layer."


def add_adapters(encoder: Encoder, side: SideConfig, used: set[int]) -> None:
    """Freeze the encoder and add trainable adapters to its linear layers, in place.

    Args:
        encoder: the encoder.
        side: the options of its side.
        used: ids of the parameters that its result depends on; "auto" adds adapters to their layers only.

    Raises:
        UserError: peft is missing, or no layer has one of the names.
    """
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

"""The weights of an encoder that are trained, at which factor of the learning rate, and with which activations kept."""

from __future__ import annotations

from torch import Tensor

from wholebatch.app import UserError

from ..encoder_options import SideConfig
from .adapters import add_adapters
from .encoder import Encoder
from .pretrained import FixedEncoder, check_batch_norm, used_parameters


def tune(encoder: FixedEncoder, side: SideConfig, value: str, *, is_pretrained: bool, is_file: bool) -> None:
    """Prepare an encoder of a library, or of a user, for training.

    Args:
        encoder: the encoder.
        side: the options of its side.
        value: `--image-encoder` or `--text-encoder` and its text, for errors.
        is_pretrained: whether the weights are pretrained ones of a library.
        is_file: whether the encoder is a user's, of which that is not known.
    """
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
    """Freeze the parameters that the result does not depend on, for DDP waits for the gradient of every other one.

    Returns:
        The ids of the parameters that it depends on.
    """
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

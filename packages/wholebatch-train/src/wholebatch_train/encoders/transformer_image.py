"""An encoder of pictures from transformers: its image processor, its network, and one row of its patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wholebatch.app import UserError

from ..encoder_options import Pooling
from .encoder import Inputs
from .hugging_face import load_model, mistakes, pool, quiet, without_other_tower
from .libraries import needed
from .pretrained import FixedEncoder, Normalized, used_parameters

Rule = Literal["auto", "own", "cls", "mean"]
_OFF = {"do_rescale": False, "do_normalize": False}


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
    """A model of transformers that reads pictures.

    Args:
        folder: the model's folder.
        value: the option and its text, for errors.
        pooling: "auto": the tower's own for a model such as CLIP; else the first token if it is one for the class, or
            the model's pooled row, or the mean of the patches.
        pretrained: whether its weights are read; else they are random.
    """

    prepare: Process
    kind = "image"
    form = "transformers image"

    def __init__(self, folder: Path, value: str, *, pooling: Rule | Pooling = "auto", pretrained: bool = True) -> None:
        super().__init__()
        if pooling == "last":
            raise UserError("--image.pooling must be auto, cls or mean, because patches have no order, got last")
        self.model, self._is_tower, self.notes = load_model(folder, value, "image", pretrained=pretrained)
        names = [name for name, _ in self.model.named_parameters()]
        has_class = any(name.endswith(("cls_token", "class_embedding", "class_token")) for name in names)
        self.rule: Rule = pooling if pooling != "auto" else "cls" if has_class and not self._is_tower else "own"
        processor = self._processor(folder, value)
        pixels = _rescaling(processor, self.example())
        self.prepare = Process(processor, pixels is not None)
        self.normalize: nn.Module = nn.Identity() if pixels is None else pixels
        self.eval()
        output = self(self.prepare([self.example()]))
        self.width = output.shape[1]
        if self._is_tower:
            without_other_tower(self.model, used_parameters(output))

    def _processor(self, folder: Path, value: str) -> Any:
        transformers = needed("transformers", value)
        with quiet(transformers), mistakes(value, folder):
            return transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )

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
        """Write the configuration and the image processor."""
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

"""Both encoders in one module, with the scale of similarities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.app.tensors import accumulation_dtype

from ..ranks.sharding import local_parts
from .encoder import Encoder, Inputs


class Unused(NamedTuple):
    """Inputs whose features have no rows: with sharded weights all ranks call an encoder equally often."""

    inputs: Inputs


class DualEncoder(nn.Module):
    """Both encoders, the learnable scale and an optional bias, in one module for an engine such as DDP to wrap.

    The names of the sides are attributes and begin the names of their weights. An encoder that both sides share has the
    first name only. An encoder whose width is not `embedding_size` gets a linear projection without bias.

    Args:
        sides: two encoders by name, in the order of the arguments of `forward`.
        embedding_size: d, the length of a feature.
        initial_logit_scale: scale of the similarities before the first step (1 / temperature).
        bias: whether the similarities have a learnable bias.
    """

    max_logit_scale = 100.0

    def __init__(
        self, sides: Mapping[str, Encoder], *, embedding_size: int, initial_logit_scale: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.sides, self.embedding_size = tuple(sides), embedding_size
        self._module_of: dict[str, str] = {}
        for side, encoder in sides.items():
            shared = next((name for name, other in self.named_children() if other is encoder), None)
            self._module_of[side] = shared or side
            if shared is None:
                setattr(self, side, encoder)
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(sides[name].width, embedding_size, bias=False)
                for name in dict.fromkeys(self._module_of.values())
                if sides[name].width != embedding_size
            }
        )
        # of shape (1,): FSDP2 takes no parameters of shape ()
        self.log_logit_scale = nn.Parameter(torch.tensor([initial_logit_scale]).log())
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if bias else None

    def forward(self, first: Inputs, second: Inputs, *negatives: Inputs | Unused | None) -> tuple[Tensor | None, ...]:
        """Return unit features of both sides, (b, d) each, the scale, the bias if there is one, and those of negatives.

        Negatives are further items of the second side; None if there are none, or Unused where the encoder is to be
        called nevertheless.
        """
        x, y = (self._attach_graph(self.encode(*each)) for each in zip(self.sides, (first, second), strict=True))
        others = [_take_no_rows(y) if inputs is None else self._encode_negatives(inputs) for inputs in negatives]
        bias = None if self.logit_bias is None else self.logit_bias.sum()
        return x, y, self.logit_scale, bias, *others

    def _encode_negatives(self, inputs: Inputs | Unused) -> Tensor:
        if isinstance(inputs, Unused):
            return self._attach_graph(_take_no_rows(self.encode(self.sides[1], inputs.inputs)))
        return self._attach_graph(self.encode(self.sides[1], inputs))

    def _attach_graph(self, features: Tensor) -> Tensor:
        """Return features with a graph, even those of a frozen encoder: gradient caching expects one of both sides."""
        has_none = torch.is_grad_enabled() and not features.requires_grad
        return features + 0 * self.log_logit_scale if has_none else features

    def encode(self, side: str, inputs: Inputs) -> Tensor:
        """Map the inputs of one side's b items to unit rows (b, d)."""
        name = self._module_of[side]
        features = getattr(self, name)(inputs)
        if name in self.projections:
            features = self.projections[name](features)
        return F.normalize(features.to(accumulation_dtype(features.dtype)), dim=-1)

    def name_of(self, side: str) -> str:
        """Return the attribute of a side's encoder: the side's name, or the first side's if they share it."""
        return self._module_of[side]

    def encoder(self, side: str) -> Encoder:
        encoder: Encoder = getattr(self, self._module_of[side])
        return encoder

    @property
    def logit_scale(self) -> Tensor:
        """The scale of similarities, (): exp of the parameter."""
        return self.log_logit_scale.exp().sum()  # of one entry; a view would make FSDP2 warn

    @torch.no_grad()
    def limit_logit_scale(self) -> None:
        """Clamp the scale to `max_logit_scale` after a step; a clamped forward pass would end its gradient for good."""
        for part in local_parts([self.log_logit_scale]):
            part.clamp_(max=math.log(self.max_logit_scale))


def _take_no_rows(x: Tensor) -> Tensor:
    """Return none of the rows, (0, d), with their graph; a copy, because FSDP2 warns of views."""
    return x.index_select(0, torch.empty(0, dtype=torch.int64, device=x.device))

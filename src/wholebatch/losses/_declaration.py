"""The declaration of a loss, beside its function and its module: how it is called, and how it sweeps over S.

A loss with one of these signatures has a line `DECLARATION = Declaration(function, module)` in its file; its kind
follows from the names of its parameters:

    towers     (image_features, text_features, logit_scale, ...)     also (queries, keys, *, logit_scale, ...)
    views      (z0, z1, ...)                                         with or without a temperature
    labeled    (features, labels, ...)                               with or without a temperature

With `sweep=Sweep(...)`, the planner and the benchmarks offer the loss. Losses with other required arguments (a queue, a
teacher, sums of earlier batches) declare nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["towers", "views", "labeled"]
_PASSED = {"logit_scale", "logit_bias"}  # required parameters that a call passes, beside the first two


@dataclass(frozen=True)
class Sweep:
    """The sweep of a loss over the similarity matrix S: the facts from which its work is counted."""

    # one_pass: the forward pass computes the gradient, too, so that S is computed once and no part of it is kept
    one_pass: bool = False


@dataclass(frozen=True)
class Declaration:
    """A loss of the library, and how it is called."""

    function: Callable[..., Tensor]  # in `wholebatch.functional`; the reference implementation has the same name
    module: Callable[..., nn.Module]  # with the function's settings
    sweep: Sweep | None = None  # how it goes over S; None: the planner and the benchmarks do not offer it
    # settings: required settings, given the embedding size; None: there are none
    settings: Callable[[int], Mapping[str, Any]] | None = None
    # scale: "learned": a trainer may learn logit scale or temperature. "fixed": the loss would gain by scaling alone,
    # so that they must be fixed. "none": the loss has neither, or its temperature does not divide similarities
    scale: Literal["learned", "fixed", "none"] = "learned"
    moments: bool = False  # the loss is one of moments of d features, which need more than d examples

    def __post_init__(self) -> None:
        required = {p.name for p in [*self._parameters.values()][2:] if p.default is p.empty}
        unknown = required - _PASSED - set(self.required_settings(8))
        if unknown:
            raise ValueError(
                f"{self.function.__name__} requires {', '.join(sorted(unknown))}, which no standard call passes: give "
                "settings=, or leave the loss out of the catalog"
            )

    @property
    def name(self) -> str:
        """Return the name of the loss: "clip" for `clip_loss`."""
        return self.function.__name__.removesuffix("_loss")

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @property
    def kind(self) -> Kind:
        """Return how the loss takes features: of two towers, of two views, or with labels."""
        if "labels" in self._parameters:
            return "labeled"
        return "towers" if "logit_scale" in self._parameters else "views"

    @property
    def symmetric(self) -> bool:
        """Return whether S holds features against themselves."""
        return self.kind != "towers"

    @property
    def inputs(self) -> int:
        """Return the number of feature matrices of a standard call."""
        return 1 if self.kind == "labeled" else 2

    @property
    def rows_per_example(self) -> int:
        """Return the rows of S for each example."""
        return 2 if self.kind == "views" else 1

    @property
    def scale_argument(self) -> Literal["logit_scale", "temperature"] | None:
        """Return the parameter that scales similarities."""
        if self.scale == "none":
            return None
        return "logit_scale" if self.kind == "towers" else "temperature" if "temperature" in self._parameters else None

    @property
    def needs_bias(self) -> bool:
        """Return whether a call must pass logit_bias."""
        bias = self._parameters.get("logit_bias")
        return bias is not None and bias.default is bias.empty

    def required_settings(self, embedding_size: int) -> Mapping[str, Any]:
        """Return the settings without a default, for embeddings of this size."""
        return {} if self.settings is None else self.settings(embedding_size)

    def call(
        self,
        functions: Any,  # a module with a function for each loss: wholebatch.functional or wholebatch.reference
        x: Tensor,
        y: Tensor | None = None,
        *,
        scale: Tensor | float,
        bias: Tensor | float | None = None,
        labels: Tensor | None = None,
        **settings: Any,  # of whatever type the function takes
    ) -> Tensor:
        """Return the loss, by a module that has a function for each: `wholebatch.functional` or `wholebatch.reference`.

        With labels, y are further examples of the same labels, or None; the scale is the inverse of a temperature.
        """
        arguments: dict[str, object] = {**self.required_settings(x.shape[-1]), **settings}
        if self.scale_argument == "logit_scale":
            arguments["logit_scale"] = scale
        elif self.scale_argument == "temperature":
            arguments["temperature"] = 1 / scale
        if self.needs_bias:
            arguments["logit_bias"] = bias
        if self.kind != "labeled":
            features: tuple[Tensor | None, ...] = (x, y)
        else:
            features = (x if y is None else torch.stack([x, y], dim=1), labels)
        loss: Tensor = getattr(functions, self.function.__name__)(*features, **arguments)
        return loss

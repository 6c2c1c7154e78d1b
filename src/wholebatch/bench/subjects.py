"""The benchmarked losses: their inputs, the call that is timed, and the reference that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.losses.catalog import CATALOG, Declaration
from wholebatch.planning.declared import call_of, is_declared, leaves_of, with_options
from wholebatch.planning.shapes import TokenShapes
from wholebatch.planning.sizes import MAX_SIM, WINNERS
from wholebatch.planning.subject import BIAS, SCALE
from wholebatch.sweep import default_side

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SUBJECTS: dict[str, Declaration] = {
    name: entry for name, entry in CATALOG.items() if entry.sweep is not None and entry.kind != "labeled"
}
Loss = Callable[..., Tensor]  # of a call's arguments, by their names
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Configuration:
    """The settings of a loss of this library."""

    keep: float = 0.0  # bytes for each entry of S, in addition to the two tiles of a flat sweep
    exchange: str = "auto"
    dtype: str = "float32"
    kernel: str = "auto"

    def label(self, ranks: int) -> str:
        """Return the settings that differ from the defaults, as text."""
        parts = [f"keep {self.keep:g} bytes/entry" if self.keep else "flat"]
        parts += [self.exchange] if ranks > 1 else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [self.kernel] if self.kernel != "auto" else []
        return " ".join(["wholebatch", *parts])

    def memory(self, entries: int, device: torch.device) -> int | str:
        """Return the value of `memory=` for a rank that computes so many entries of S."""
        if not self.keep:
            return "flat"
        tiles = 2 * DTYPES[self.dtype].itemsize * default_side(device) ** 2
        tiles *= 2 if DTYPES[self.dtype].itemsize == 2 else 1  # half precision is widened
        return tiles + math.ceil(self.keep * entries)


class Made(NamedTuple):
    """A loss and its inputs on one rank.

    Args:
        arguments: of a call; features and numbers of the loss are leaves with a gradient.
        leaves: those of the arguments, and the parameters of a declared loss.
        ours: this library's function, which takes options as well.
        reference: the dense one.
    """

    arguments: Mapping[str, Any]
    leaves: list[Tensor]
    ours: Loss
    reference: Loss


@dataclass(frozen=True)
class Subject:
    """A loss of two matrices of features; of two tensors of tokens; or a declared one, which makes its own inputs.

    Args:
        loss: its name, as `bench loss --losses` takes it.
        tokens: of a query, and of a document, in late interaction.
    """

    loss: str
    tokens: tuple[int, int] = (1, 1)

    @property
    def title(self) -> str:
        """Return the name of the loss in tables."""
        return "{}, {} x {} tokens".format(self.loss, *self.tokens) if self.loss == MAX_SIM else self.loss

    @property
    def rows_per_example(self) -> int:
        """Return the rows of S for each example."""
        return SUBJECTS[self.loss].rows_per_example if self.loss in SUBJECTS else 1

    def work_units(self, embedding_size: int) -> int:
        """Return a step's multiply-adds, in units of (rows of S) x (columns of S) x d, or of products of tokens."""
        if self.loss in SUBJECTS:
            return SUBJECTS[self.loss].work_units
        return 2 if self.loss == MAX_SIM or call_of(self.loss, 1, embedding_size)[0].declaration.symmetric else 4

    def options(
        self, configuration: Configuration, examples: int, embedding_size: int, ranks: int, device: torch.device
    ) -> dict[str, Any]:
        """Return the options of this library's function; a declared loss keeps nothing and has no kernels."""
        options: dict[str, Any] = {"exchange": configuration.exchange, "memory": "flat"}
        if is_declared(self.loss):
            return options
        if self.loss != MAX_SIM:
            entries = self.rows_per_example**2 * math.ceil(examples / ranks) * examples
            options["memory"] = configuration.memory(entries, device)
        elif configuration.keep:
            t, u = self.tokens
            form = self.loss, examples, embedding_size, ranks, DTYPES[configuration.dtype], device.type
            options["memory"] = TokenShapes(*form, query_tokens=t, document_tokens=u).memory_for(WINNERS)
        return {**options, "kernel": configuration.kernel}

    def make(self, rows: int, embedding_size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Made:
        """Return random inputs of a rank with so many examples, and the functions that take them."""
        if is_declared(self.loss):
            torch.manual_seed(seed)
            where: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
            loss_fn, arguments = call_of(self.loss, rows, embedding_size, **where)

            def ours(*, options: Mapping[str, Any], **arguments: Any) -> Tensor:
                return with_options(loss_fn, reduction="mean", **options)(**arguments)

            return Made(arguments, leaves_of(loss_fn, arguments), ours, loss_fn.reference)
        generator = torch.Generator().manual_seed(seed)
        features = [self._features(rows, each, embedding_size, generator) for each in self.tokens]
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in features]
        leaves += [torch.tensor(number, device=device, requires_grad=True) for number in (SCALE / self.tokens[0], BIAS)]
        arguments = dict(zip(("x", "y", "scale", "bias"), leaves, strict=True))
        return Made(arguments, leaves, partial(self.call, wb.functional), partial(self.call, wb.reference))

    def _features(self, rows: int, tokens: int, embedding_size: int, generator: torch.Generator) -> Tensor:
        if self.loss != MAX_SIM:
            return normalize(torch.randn(rows, embedding_size, generator=generator), dim=1)
        # With d = 16 products are exact, and rounding never decides which token wins.
        x = torch.randn(rows, tokens, embedding_size, generator=generator)
        return (8 * x).round().div(8 * embedding_size**0.5)

    def call(
        self,
        functions: Any,  # wholebatch.functional or wholebatch.reference
        *,
        x: Tensor,
        y: Tensor | None = None,
        scale: Tensor | float = SCALE,
        bias: Tensor | float = BIAS,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> Tensor:
        """Return the value of a loss that is not declared."""
        if self.loss == MAX_SIM:
            value: Tensor = functions.max_sim_loss(x, y, logit_scale=scale, **options)
            return value
        entry = SUBJECTS[self.loss]
        factor = scale if entry.scale_argument == "logit_scale" else SCALE
        return entry.call(functions, x, y, scale=factor, bias=bias, **options)

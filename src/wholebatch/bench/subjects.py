"""The benchmarked losses: their inputs, the call that is timed, and the reference that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch._base.precision import accumulation_dtype
from wholebatch.planning.declared import declared, is_declared
from wholebatch.planning.form import Form, built_in
from wholebatch.planning.shapes import TokenShapes
from wholebatch.planning.sizes import MAX_SIM, WINNERS
from wholebatch.planning.subject import BIAS, SCALE, Made, make_built_in, make_declared
from wholebatch.sweep import Products, default_side
from wholebatch.sweep.memory import bytes_of_an_entry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Configuration:
    """The settings of a loss of this library."""

    keep: float = 0.0  # bytes for each entry of S, in addition to the two tiles of a flat sweep
    exchange: str = "auto"
    dtype: str = "float32"
    kernel: str = "auto"

    def memory(self, entries: int, device: torch.device) -> int | str:
        """Return the value of `memory=` for a rank that computes so many entries of S."""
        if not self.keep:
            return "flat"
        tiles = default_side(device) ** 2 * bytes_of_an_entry(accumulation_dtype(DTYPES[self.dtype]), Products())
        return tiles + math.ceil(self.keep * entries)


@dataclass(frozen=True)
class Subject:
    """A loss of two matrices of features; of two tensors of tokens; or a declared one, which makes its own inputs."""

    loss: str  # its name, as `bench loss --losses` takes it
    tokens: tuple[int, int] = (1, 1)  # of a query, and of a document, in late interaction

    @property
    def title(self) -> str:
        """Return the name of the loss in tables."""
        return "{}, {} x {} tokens".format(self.loss, *self.tokens) if self.loss == MAX_SIM else self.loss

    def label(self, configuration: Configuration, ranks: int) -> str:
        """Return the settings that differ from the defaults, as text."""
        kept = "winners kept" if self.loss == MAX_SIM else f"keep {configuration.keep:g} bytes/entry"
        parts = ["declared" if is_declared(self.loss) else "wholebatch", kept if configuration.keep else "flat"]
        parts += [configuration.exchange] if ranks > 1 else []
        parts += [configuration.dtype] if configuration.dtype != "float32" else []
        parts += [configuration.kernel] if configuration.kernel != "auto" else []
        return " ".join(parts)

    @property
    def form(self) -> Form:
        """Return what the loss's work depends on; of a declared loss, steps of few rows run on the CPU."""
        return declared(self.loss, torch.float32) if is_declared(self.loss) else built_in(self.loss)

    def options(
        self, configuration: Configuration, examples: int, embedding_size: int, ranks: int, device: torch.device
    ) -> dict[str, Any]:
        """Return the options of this library's function; a declared loss keeps nothing and has no kernels."""
        options: dict[str, Any] = {"exchange": configuration.exchange, "memory": "flat"}
        if is_declared(self.loss):
            return options
        if self.loss != MAX_SIM:
            entries = self.form.rows_per_example**2 * math.ceil(examples / ranks) * examples
            options["memory"] = configuration.memory(entries, device)
        elif configuration.keep:
            t, u = self.tokens
            form = self.loss, examples, embedding_size, ranks, DTYPES[configuration.dtype], device.type
            options["memory"] = TokenShapes(*form, query_tokens=t, document_tokens=u).memory_for(WINNERS)
        return {**options, "kernel": configuration.kernel}

    def make(self, rows: int, embedding_size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Made:
        """Return random inputs of a rank with so many examples, and the functions that take them."""
        where: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
        if is_declared(self.loss):
            torch.manual_seed(seed)
            return make_declared(self.loss, rows, embedding_size, **where)
        if self.loss != MAX_SIM:
            return make_built_in(self.loss, rows, embedding_size, **where)
        generator = torch.Generator().manual_seed(seed)
        # With d = 16 products are exact, and rounding never decides which token wins.
        features = [
            (8 * torch.randn(rows, each, embedding_size, generator=generator)).round().div(8 * embedding_size**0.5)
            for each in self.tokens
        ]
        leaves = [x.to(device, dtype).requires_grad_() for x in features]
        leaves += [torch.tensor(number, device=device, requires_grad=True) for number in (SCALE / self.tokens[0], BIAS)]
        arguments = dict(zip(("x", "y", "scale", "bias"), leaves, strict=True))
        return Made(arguments, leaves, partial(_max_sim, wb.functional), partial(_max_sim, wb.reference))


def _max_sim(
    functions: ModuleType,  # wholebatch.functional or wholebatch.reference
    *,
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,  # which it has none of
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    value: Tensor = functions.max_sim_loss(x, y, logit_scale=scale, **(options or {}))
    return value

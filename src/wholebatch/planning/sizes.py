"""The arguments of a plan, and checks that they make sense together and fit the rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TypeGuard

import torch

from .._settings import shown
from .._user_error import UserError
from .given import DEVICES
from .rates import Rates
from .shapes import LOSSES, PARTIAL_FC, LossName, Shapes

_LIMIT = 2**63  # no computer counts to it
DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The arguments of :func:`wholebatch.plan`, as given; `activations` is `encoder_bytes` as a tuple."""

    batch_size: int
    embedding_size: int
    ranks: int
    loss: LossName
    dtype: torch.dtype | str
    device: str
    memory_limit: int | None
    model_bytes: int
    gradient_bytes: int
    activations: tuple[int, ...]
    encoder_flops: float
    chunk_size: int | None
    keep_graphs: int | None
    classes: int | None
    sample_rate: float | None
    bandwidth: float | None
    rates: Rates | None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype, which may be given by name."""
        return DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype

    def check(self) -> None:
        """Raise UserError for sizes that do not exist or do not go together."""
        self._check_numbers()
        self._check_encoders()
        self._check_classes()
        _require(isinstance(self.device, str) and self.device in DEVICES, "device", _one_of(DEVICES), self.device)
        known = self.rates is None or isinstance(self.rates, Rates)
        _require(known, "rates", "wholebatch.planning.Rates, or None", self.rates)

    def _check_numbers(self) -> None:
        for name in ("batch_size", "embedding_size", "ranks"):
            value = getattr(self, name)
            _require(_is_count(value, 1), name, "an integer of at least 1", value)
        _require(isinstance(self.loss, str) and self.loss in LOSSES, "loss", _one_of(LOSSES), self.loss)
        known = isinstance(self.dtype, torch.dtype) and self.dtype in DTYPES.values()
        known = known or (isinstance(self.dtype, str) and self.dtype in DTYPES)
        _require(known, "dtype", _one_of(DTYPES), self.dtype)
        if self.batch_size < self.ranks:
            raise UserError(
                f"batch_size is that of all ranks together: at least one example for each of {self.ranks} ranks, got "
                f"{self.batch_size}"
            )
        for name in ("memory_limit", "chunk_size", "classes"):
            value, example = getattr(self, name), ", as in 80 * 10**9" if name == "memory_limit" else ""
            _require(value is None or _is_count(value, 1), name, f"an integer of at least 1{example}", value)
        for name in ("model_bytes", "gradient_bytes"):
            value = getattr(self, name)
            _require(_is_count(value, 0), name, "an integer, a number of bytes", value)
        sound = all(_is_count(each, 0) for each in self.activations)
        got = self.activations[0] if len(self.activations) == 1 else self.activations
        _require(sound, "encoder_bytes", "an integer, a number of bytes, or one for each encoder", got)
        flops = self.encoder_flops
        _require(_is_number(flops) and flops >= 0, "encoder_flops", "at least 0, and finite", flops)
        wire = self.bandwidth
        _require(wire is None or (_is_number(wire) and wire > 0), "bandwidth", "above 0, in bytes per second", wire)

    def _check_encoders(self) -> None:
        shapes = Shapes(self.loss, self.batch_size, self.embedding_size, self.ranks)
        towers, rows = shapes.towers, shapes.rows
        if len(self.activations) not in (1, towers):
            raise UserError(
                f"encoder_bytes must be one number, or one for each of the {towers} encoder{'s' if towers > 1 else ''} "
                f"of {self.loss}; got {len(self.activations)}"
            )
        if self.chunk_size is not None and not any(self.activations):
            raise UserError("chunk_size needs encoder_bytes, the bytes that an encoder keeps of one row")
        if self.chunk_size is not None and self.chunk_size > rows:
            raise UserError(
                f"chunk_size must be at most the rows of a rank, {rows} = {self.batch_size} / {self.ranks}; got "
                f"{self.chunk_size}"
            )
        if self.keep_graphs is not None:
            if self.chunk_size is None:
                raise UserError("keep_graphs is a number of chunks: give chunk_size as well")
            chunks = towers * ceil(rows / self.chunk_size)
            known = _is_count(self.keep_graphs, 0) and self.keep_graphs <= chunks
            _require(known, "keep_graphs", f"at most the number of chunks, {chunks}", self.keep_graphs)

    def _check_classes(self) -> None:
        if (self.loss == PARTIAL_FC) != (self.classes is not None):
            raise UserError(
                "partial_fc needs classes, as in classes=1000000"
                if self.loss == PARTIAL_FC
                else f"classes belong to partial_fc; {self.loss} has none"
            )
        if self.classes is not None and self.classes < self.ranks:
            raise UserError(f"there must be a class for each of {self.ranks} ranks, got classes={self.classes}")
        if self.sample_rate is not None:
            if self.loss != PARTIAL_FC:
                raise UserError(f"sample_rate belongs to partial_fc, with classes; {self.loss} has none")
            sound = _is_number(self.sample_rate) and 0 <= self.sample_rate <= 1
            _require(sound, "sample_rate", "from 0 to 1", self.sample_rate)


def check_rates(rates: Rates, loss: LossName, dtype: torch.dtype, device: str, ranks: int) -> None:
    """Raise an error unless the rates were taken for this loss, dtype, device and number of ranks."""
    rates.check()
    named, kind = str(dtype).removeprefix("torch."), "cpu" if device == "cpu" else "cuda"
    for name, theirs, ours in (
        ("device", rates.device, kind),
        ("dtype", rates.dtype, named),
        ("ranks", rates.ranks, ranks),
    ):
        if theirs is not None and theirs != ours:
            raise UserError(
                f"these rates were measured for {name} {theirs}, and this is a plan for {ours}: measure again"
            )
    if loss not in rates.entry:
        raise UserError(f"these rates are of {', '.join(rates.entry)}: measure them with --loss {loss}")
    if ranks > 1 and rates.wire is None:
        raise UserError(f"these rates are of one rank, without a network: measure on {ranks} ranks, or give bandwidth")


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _LIMIT


def _is_number(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"{name} must be {expected}; got {shown(got)}")

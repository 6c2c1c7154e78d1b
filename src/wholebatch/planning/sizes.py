"""The arguments of a plan, and checks that they make sense together. This module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, TypeGuard

from .._base.settings import shown
from .._base.spelling import did_you_mean
from .._base.user_error import UserError
from .._cli.declared_names import LABELED_LOSSES, SWEPT_LOSSES
from .given import DEVICES

PARTIAL_FC = "partial_fc"  # a head, with classes instead of a second tower
MAX_SIM = "max_sim"  # late interaction, with tokens instead of rows
LOSSES = (*SWEPT_LOSSES, PARTIAL_FC, MAX_SIM)
LossName = str  # one of them
DTYPES = {
    **{name: name for name in ("float64", "float32", "bfloat16", "float16")},
    "fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16",
}  # fmt: skip
TOKENS = {"query_tokens": 32, "document_tokens": 180}  # of an example
TOKEN_SIZES = (*TOKENS, "documents_per_query")
WINNERS = 1  # the bytes of a kept entry where these are late interaction's winners
_MOST_TOKENS = 2**31  # of an item
_LIMIT = 2**63  # no computer counts to it


def num_towers(loss: LossName) -> int:
    """Return the number of feature matrices of a loss."""
    return 1 if loss == PARTIAL_FC or loss in LABELED_LOSSES else 2


@dataclass(frozen=True)
class Sizes:
    """The arguments of :func:`wholebatch.plan` that are no rates."""

    batch_size: int
    embedding_size: int
    ranks: int
    loss: LossName
    dtype: str  # its full name
    device: str
    memory_limit: int | None
    model_bytes: int
    gradient_bytes: int
    activations: tuple[Any, ...]  # `encoder_bytes`
    encoder_flops: float
    chunk_size: int | None
    keep_graphs: int | None
    classes: int | None
    sample_rate: float | None
    bandwidth: float | None
    query_tokens: float | None
    document_tokens: float | None
    documents_per_query: int | None
    source: Any = None  # a `DeclaredLoss` as the user gave it; `loss` is then its name in tables
    spelled: Callable[[str], str] = str  # how an error spells the name of an argument: `chunk_size`, or `--chunk-size`

    @classmethod
    def from_arguments(
        cls, *, loss: Any, dtype: Any, device: Any, encoder_bytes: object, classes: int | None, **others: Any
    ) -> Sizes:
        """Return the sizes from the arguments of :func:`wholebatch.plan`, of whatever types; `check` checks them."""
        return cls(
            loss=loss if loss is not None else PARTIAL_FC if classes is not None else "clip",
            dtype=DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype,
            device=device.lower() if isinstance(device, str) else device,
            activations=tuple(encoder_bytes) if isinstance(encoder_bytes, list | tuple) else (encoder_bytes,),
            classes=classes,
            **{"source": loss if isinstance(loss, str) and ":" in loss else None, **others},
        )

    def check(self) -> None:
        """Raise UserError for sizes that do not exist or do not go together; `check_encoders` for a declared loss."""
        self._check_numbers()
        if self.source is None:
            self.check_encoders(num_towers(self.loss))
        self._check_classes()
        self._check_tokens()
        self._check_name("device", DEVICES)

    def _check_numbers(self) -> None:
        for name in ("batch_size", "embedding_size", "ranks"):
            value = getattr(self, name)
            self._require(_is_count(value, 1), name, "an integer of at least 1", value)
        if self.source is None:
            self._check_name("loss", LOSSES, ", or a declared loss")
        self._check_name("dtype", DTYPES)
        if self.batch_size < self.ranks:
            raise UserError(
                f"{self.spelled('batch_size')} is that of all ranks together: at least one example for each of "
                f"{self.ranks} ranks, got {self.batch_size}"
            )
        for name in ("memory_limit", "chunk_size", "classes"):
            value, example = getattr(self, name), ", as in 80 * 10**9" if name == "memory_limit" else ""
            self._require(value is None or _is_count(value, 1), name, f"an integer of at least 1{example}", value)
        for name in ("model_bytes", "gradient_bytes"):
            value = getattr(self, name)
            self._require(_is_count(value, 0), name, "an integer, a number of bytes", value)
        sound = all(_is_count(each, 0) for each in self.activations)
        got = self.activations[0] if len(self.activations) == 1 else self.activations
        self._require(sound, "encoder_bytes", "an integer, a number of bytes, or one for each encoder", got)
        flops = self.encoder_flops
        self._require(_is_number(flops) and flops >= 0, "encoder_flops", "at least 0, and finite", flops)
        wire = self.bandwidth
        self._require(
            wire is None or (_is_number(wire) and wire > 0), "bandwidth", "above 0, in bytes per second", wire
        )

    def check_encoders(self, towers: int) -> None:
        """Raise UserError for sizes of encoders that do not go together, with so many feature matrices."""
        rows, spelled = ceil(self.batch_size / self.ranks), self.spelled
        if len(self.activations) not in (1, towers):
            raise UserError(
                f"{spelled('encoder_bytes')} must be one number, or one for each of the {towers} "
                f"encoder{'s' if towers > 1 else ''} of {self.loss}; got {len(self.activations)}"
            )
        if self.chunk_size is not None and not any(self.activations):
            raise UserError(
                f"{spelled('chunk_size')} needs {spelled('encoder_bytes')}, the bytes that an encoder keeps of one row"
            )
        if self.chunk_size is not None and self.chunk_size > rows:
            raise UserError(
                f"{spelled('chunk_size')} must be at most the rows of a rank, {rows} = {self.batch_size} / "
                f"{self.ranks}; got {self.chunk_size}"
            )
        if self.keep_graphs is not None:
            if self.chunk_size is None:
                raise UserError(f"{spelled('keep_graphs')} is a number of chunks: give {spelled('chunk_size')} as well")
            chunks = towers * ceil(rows / self.chunk_size)
            known = _is_count(self.keep_graphs, 0) and self.keep_graphs <= chunks
            self._require(known, "keep_graphs", f"from 0 to the number of chunks, {chunks}", self.keep_graphs)

    def _check_classes(self) -> None:
        classes = self.spelled("classes")
        if (self.loss == PARTIAL_FC) != (self.classes is not None):
            raise UserError(
                f"partial_fc needs {classes}, as in {classes}=1000000"
                if self.loss == PARTIAL_FC
                else f"{classes} belong to partial_fc; {self.loss} has none"
            )
        if self.classes is not None and self.classes < self.ranks:
            raise UserError(f"there must be a class for each of {self.ranks} ranks, got {classes}={self.classes}")
        if self.sample_rate is not None:
            if self.loss != PARTIAL_FC:
                raise UserError(
                    f"{self.spelled('sample_rate')} belongs to partial_fc, with {classes}; {self.loss} has none"
                )
            sound = _is_number(self.sample_rate) and 0 <= self.sample_rate <= 1
            self._require(sound, "sample_rate", "from 0 to 1", self.sample_rate)

    def _check_tokens(self) -> None:
        sizes = [name for name in TOKEN_SIZES if getattr(self, name) is not None]
        if self.loss != MAX_SIM and sizes:
            names = ", ".join(map(self.spelled, sizes))
            belong, them = ("belong", "them") if sizes[1:] else ("belongs", "it")
            plan = "--loss max_sim" if self.spelled("loss").startswith("--") else "loss='max_sim'"
            raise UserError(f"{names} {belong} to max_sim; {self.loss} has no tokens: leave {them} out, or plan {plan}")
        missing = [name for name in TOKEN_SIZES[:2] if name not in sizes]
        if self.loss == MAX_SIM and missing:
            examples = " and ".join(f"{self.spelled(name)}={TOKENS[name]}" for name in missing)
            raise UserError(
                f"max_sim needs {' and '.join(map(self.spelled, missing))}, the mean number of tokens without padding: "
                f"as in {examples}"
            )
        for name in sizes[: 2 - len(missing)]:
            value = getattr(self, name)
            sound = _is_number(value) and 1 <= value < _MOST_TOKENS
            self._require(sound, name, f"a mean number of tokens, from 1 to {_MOST_TOKENS - 1}", value)
        if self.documents_per_query is not None:
            sound = _is_count(self.documents_per_query, 1)
            self._require(sound, "documents_per_query", "an integer of at least 1", self.documents_per_query)

    def _check_name(self, field: str, names: Iterable[str], more: str = "") -> None:
        value = getattr(self, field)
        self._require(
            isinstance(value, str) and value in names, field, f"one of {', '.join(names)}{more}", value, names
        )

    def _require(self, condition: bool, name: str, expected: str, got: object, known: Iterable[str] = ()) -> None:
        if not condition:
            meant = did_you_mean(got, known) if isinstance(got, str) else ""
            raise UserError(f"{self.spelled(name)} must be {expected}; got {shown(got)}{meant}")


def _is_count(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value < _LIMIT


def _is_number(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False

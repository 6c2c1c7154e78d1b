"""The outcome of a plan: its options, and the same as a table in plain text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .._cli.text_table import format_rows
from ..sweep.memory import Memory
from .rates import Rates
from .sizes import WINNERS, LossName
from .units import amount, duration, operations

_COLUMNS = ("", "exchange", "similarities", "encoders", "peak", "sent", "FLOP", "time", "largest batch", "remark")
LEFT = ("exchange", "similarities", "encoders", "remark")  # columns of text
_PRECISIONS = {WINNERS: "winners", 2: "bf16", 4: "fp32", 8: "fp64"}
_CACHING = _COLUMNS.index("encoders")


@dataclass(frozen=True)
class Option:
    """A setting and its cost, on the rank with most.

    Args:
        exchange: "gather" or "ring"; "" on one rank, which exchanges nothing.
        memory: "flat" or bytes, as the loss takes it.
        kept: the part of exp(S), or of winners, that is kept, from 0 to 1.
        kept_size: bytes of a kept entry; 1 stands for winners.
        chunk_size: rows that are encoded at a time; None: all at once.
        kept_graphs: chunks that are not encoded again.
        encoded_again: the part of all chunks that is encoded twice, from 0 to 1.
        peak: bytes at the peak of a step.
        of_loss: the loss's part of `peak`, without features and their gradients.
        wire: bytes that a rank sends in a step.
        flops: of a step.
        seconds: of a step, by the plan's rates.
        fits: whether the peak is within the plan's limit.
        largest_batch: the largest global batch that fits; 0 if none does.
        auto: whether the library selects it by default.
        call: to paste.
        call_of_largest: to paste for the largest batch, which may need other bytes.
        one_pass: whether the loss computes similarities once, with their gradient.
    """

    exchange: str
    memory: Memory
    kept: float
    kept_size: int
    chunk_size: int | None
    kept_graphs: int
    encoded_again: float
    peak: int
    of_loss: int
    wire: float
    flops: float
    seconds: float
    fits: bool
    largest_batch: int
    auto: bool
    call: str
    call_of_largest: str
    one_pass: bool = False

    @property
    def similarities(self) -> str:
        """Return how often similarities are computed, or how they are kept."""
        if not self.kept:
            return "computed once" if self.one_pass else "computed twice"
        part = "kept" if self.kept > 0.995 else f"{self.kept:.0%} kept"
        return f"{part}, {_PRECISIONS[self.kept_size]}"


@dataclass(frozen=True)
class Plan:
    """The outcome of :func:`wholebatch.plan`; `str` of it is a table.

    Args:
        loss: its name.
        batch_size: B, over all ranks.
        embedding_size: d.
        ranks: W.
        dtype: of features.
        device: its name, as it was given.
        limit: bytes that a rank may take.
        rates: with which times are predicted.
        options: all of them; those without gradient caching first.
        chosen: the fastest that fits, or one within a tenth of it; None if none fits.
        encoders: whether times include the encoders'.
        query_tokens: of late interaction; else None.
        document_tokens: likewise.
        documents_per_query: likewise.
    """

    loss: LossName
    batch_size: int
    embedding_size: int
    ranks: int
    dtype: str
    device: str
    limit: int
    rates: Rates
    options: tuple[Option, ...]
    chosen: Option | None
    encoders: bool
    query_tokens: float | None = None
    document_tokens: float | None = None
    documents_per_query: int | None = None

    def to_dict(self) -> dict[str, Any]:  # values as JSON has them
        """Return the plan as JSON has it."""
        return {**asdict(self), "chosen": None if self.chosen is None else self.options.index(self.chosen)}

    def __str__(self) -> str:
        header, *rows = table(self)
        lines = [line for lines in format_rows(header, rows, left=LEFT) for line in lines]
        return "\n".join([headline(self), *lines, *remarks(self)])


def headline(plan: Plan) -> str:
    """Return the sizes of the plan in a line."""
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    tokens = ""
    if plan.query_tokens is not None and plan.document_tokens is not None:
        each = "" if plan.documents_per_query == 1 else f"{plan.documents_per_query} documents a query, "
        tokens = f"{plan.query_tokens:g} tokens a query, {plan.document_tokens:g} a document, {each}"
    return (
        f"{plan.loss}, batch size {plan.batch_size}, {tokens}embedding size {plan.embedding_size}, {plan.dtype}, "
        f"{ranks} of {plan.device}, at most {amount(plan.limit)} each"
    )


def table(plan: Plan) -> list[tuple[str, ...]]:
    """Return header and rows as text; a column for encoders only if there is gradient caching."""
    lines = [_COLUMNS, *(_row(plan, number, option) for number, option in enumerate(plan.options, 1))]
    if any(option.chunk_size is not None for option in plan.options):
        return lines
    return [line[:_CACHING] + line[_CACHING + 1 :] for line in lines]


def remarks(plan: Plan) -> list[str]:
    """Return the calls to paste, and the source of the rates, as lines."""
    lines = []
    best = max(plan.options, key=lambda option: (option.largest_batch, -option.seconds))
    if plan.chosen is None:
        lines.append(f"Nothing fits: the smallest peak is {amount(min(option.peak for option in plan.options))}.")
    else:
        lines.append(f"chosen: {plan.chosen.call}")
        if plan.chosen.kept_graphs and not plan.encoders:
            lines.append("  without --encoder-flops, the options that encode least twice count as fastest")
    if best.largest_batch:
        lines.append(f"largest batch that fits: {best.largest_batch}, with {best.call_of_largest}")
    else:
        lines.append("No batch fits: model and optimizer, with two tiles, take more than the limit")
    included = "loss and encoders" if plan.encoders else "the loss alone"
    lines.append(f"peak, sent and time are of a rank and a step; time is of {included}; rates {plan.rates.source}")
    return lines


def _row(plan: Plan, number: int, option: Option) -> tuple[str, ...]:
    marks = ["chosen"] if option is plan.chosen else []
    marks += ["auto"] if option.auto else []
    marks += [] if option.fits else ["too large"]
    again = f"{option.encoded_again:.0%}" if option.kept_graphs else "all"
    return (
        str(number),
        option.exchange or "-",
        option.similarities,
        "at once" if option.chunk_size is None else f"chunks of {option.chunk_size}, {again} twice",
        amount(option.peak),
        amount(option.wire),
        operations(option.flops),
        duration(option.seconds),
        str(option.largest_batch),
        ", ".join(marks),
    )

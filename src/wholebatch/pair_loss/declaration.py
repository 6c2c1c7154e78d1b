"""What a user has declared: the terms by name, the losses of rows and of columns, and the similarities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._checks import check_callable
from .._settings import shown
from .first_use import Reads
from .reductions import Mean, Partner, Term
from .running import rule_of
from .similarity import Similarity, kinds_of
from .sweep import Reduced


@dataclass
class Declaration:
    """A declared loss, without the tensors of a call.

    Attributes:
        terms: by name.
        row_loss, column_loss: the functions that combine terms, or None.
        kinds: of similarities, by name.
        reads: what the functions read, known after their first use.
    """

    terms: dict[str, Term]
    row_loss: Callable[..., Any] | None
    column_loss: Callable[..., Any] | None
    kinds: dict[str, str]
    reads: Reads = field(default_factory=Reads)

    @classmethod
    def of(
        cls,
        terms: object,
        row_loss: Callable[..., Any] | None,
        column_loss: Callable[..., Any] | None,
        similarity: Similarity,
    ) -> Declaration:
        """Return the declaration.

        Raises:
            ValueError: for terms that are none, names that cannot be attributes, and functions that are none.
        """
        if not isinstance(terms, Mapping) or not terms:
            raise ValueError(f"terms must be a mapping of names to terms such as LogSumExp, got {shown(terms)}")
        for name, term in terms.items():
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise ValueError(f"terms must have names like 'negatives', which row_loss reads as r.negatives; got {shown(name)}")
            if not isinstance(term, Term):
                raise ValueError(
                    f"terms[{name!r}] must be a LogSumExp, Sum, Mean, Count, Max, Min or Partner, got {shown(term)}"
                )
            if term.over == "both" and isinstance(term, Mean):
                raise ValueError(f"terms[{name!r}] must not be a Mean with over='both'; declare a Sum and a Count of each")
        if row_loss is None and column_loss is None:
            raise ValueError("row_loss must be a function of (r, x, p); it may be None only with a column_loss")
        for what, function in (("row_loss", row_loss), ("column_loss", column_loss)):
            if function is not None:
                check_callable(what, function)
        return cls(dict(terms), row_loss, column_loss, kinds_of(similarity))

    def reduced(self) -> list[Reduced]:
        """Return the terms that tiles compute, with the sides that read them."""
        return [
            Reduced(name, term, rule_of(term), name in self.reads.rows and term.over != "own", name in self.reads.cols)
            for name, term in self.terms.items()
            if not isinstance(term, Partner)
            and ((name in self.reads.rows and term.over != "own") or name in self.reads.cols)
        ]

    @property
    def functions(self) -> list[Any]:
        """Everything of which a fingerprint is made."""
        terms = [[name, type(term).__name__, term.over, term.functions] for name, term in self.terms.items()]
        return [terms, self.row_loss, self.column_loss, self.kinds]

    @property
    def unread(self) -> list[str]:
        """The terms that neither side reads."""
        return sorted(set(self.terms) - self.reads.rows - self.reads.cols)

    @property
    def wants_partners(self) -> bool:
        """Whether anything needs partners."""
        read = self.reads.rows | self.reads.cols
        return self.reads.partner or any(isinstance(self.terms[name], Partner) for name in read)

    @property
    def distances(self) -> list[str]:
        """The names of similarities that are distances."""
        return [name for name, kind in self.kinds.items() if kind == "neg_squared_distance"]


__all__ = ["Declaration", "Reads"]

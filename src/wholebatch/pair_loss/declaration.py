"""The declaration of a loss: the terms by name, the losses of rows and of columns, and the similarities."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .._base.checks import check_callable
from .._base.settings import shown
from .accumulators import rule_of
from .arguments import Arguments
from .compiled import Kernels
from .fingerprint import fingerprint_and_certainty
from .function_checks import Reads, first_use
from .reductions import Mean, Partner, Term
from .similarity import DISTANCE, Similarity, kinds_of
from .tile import Reduced

REMEMBERED = 256  # kinds of calls
_COMPILES_ON = {"cuda"}  # by default


@dataclass
class Declaration:
    """A declared loss, without the tensors of a call.

    Attributes:
        terms: by name.
        row_loss, column_loss: the functions that combine terms, or None.
        kinds: of similarities, by name.
        symmetric: whether the user says that scores and masks of (i, j) and (j, i) are equal.
        reads: what the functions read, known after their first use.
        compiles: whether compiled functions compute its tiles; "auto": on a GPU.
        kernels: these functions.
        fingerprint: of the functions at the latest call, and whether it shows all that they read.
        form: the kind of the latest call: of this fingerprint, and of everything that functions read.
        pending: by the kind of call, values of the functions on fixed numbers, to be compared between ranks.
    """

    terms: dict[str, Term]
    row_loss: Callable[..., Any] | None
    column_loss: Callable[..., Any] | None
    kinds: dict[str, str]
    symmetric: bool = False
    reads: Reads = field(default_factory=Reads)
    compiles: bool | str = False
    kernels: Kernels = field(default_factory=Kernels)
    fingerprint: tuple[str, bool] = ("", False)
    form: str = ""
    pending: dict[str, str] = field(default_factory=dict)
    _used: dict[str, Reads] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        terms: object,
        row_loss: Callable[..., Any] | None,
        column_loss: Callable[..., Any] | None,
        similarity: Similarity,
        *,
        symmetric: bool = False,
        compiles: bool | str = False,
    ) -> Declaration:
        """Return the declaration.

        Raises:
            ValueError: for terms that are none, names that cannot be attributes, and functions that are none.
        """
        if not isinstance(terms, Mapping) or not terms:
            raise ValueError(f"terms must be a mapping of names to terms such as LogSumExp, got {shown(terms)}")
        for name, term in terms.items():
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise ValueError(
                    f"terms must have names like 'negatives', which row_loss reads as r.negatives; got {shown(name)}"
                )
            if not isinstance(term, Term):
                raise ValueError(
                    f"terms[{name!r}] must be a LogSumExp, Sum, Mean, Count, Max, Min or Partner, got {shown(term)}"
                )
            if term.over == "both" and isinstance(term, Mean):
                raise ValueError(
                    f"terms[{name!r}] must not be a Mean with over='both'; declare a Sum and a Count of each"
                )
            if compiles is True and term.ties == "split":
                raise ValueError(
                    f"terms[{name!r}] must have ties='first' with compile_tiles=True: compiled functions may round a "
                    "score differently in the backward pass, and then none equals the maximum"
                )
        if row_loss is None and column_loss is None:
            raise ValueError("row_loss must be a function of (r, x, p); it may be None only with a column_loss")
        for name, function in (("row_loss", row_loss), ("column_loss", column_loss)):
            if function is not None:
                check_callable(name, function)
        if symmetric and column_loss is not None:
            raise ValueError("symmetric must be False with a column_loss: rows and columns are the same then")
        return cls(dict(terms), row_loss, column_loss, kinds_of(similarity), symmetric, compiles=compiles)

    def kernels_on(self, device: torch.device, *, certain: bool) -> Kernels | None:
        """Return the compiled functions of tiles on this device, which exist once they were used; None for plain tiles.

        Args:
            device: of the features.
            certain: whether the functions compute alike as long as their fingerprint is the same.
        """
        if self.compiles != "auto":
            return self.kernels if self.compiles else None
        by_default = certain and device.type in _COMPILES_ON
        return self.kernels if by_default and all(term.ties != "split" for term in self.terms.values()) else None

    def use(self, call: Arguments) -> None:
        """Look at the functions with data and parameters of these kinds, unless they were used with such before.

        Raises:
            ValueError: if a function cannot be computed in tiles, see `function_checks`.
        """
        self.fingerprint = fingerprint_and_certainty(*self.functions.values())
        self.form = repr((self.fingerprint, call.signature))
        if self.form in self._used:
            self.reads = self._used[self.form]
            return
        if self.symmetric and call.y is not None:
            raise ValueError("y must be left out with symmetric=True: the rows of x are the columns, too")
        y_numbers = call.x_data if call.y is None else call.y_data
        numbers = (call.x_data, y_numbers, None if call.candidates is None else call.candidate_data)
        declared = self.terms, (self.row_loss, self.column_loss), self.kinds
        self.reads = first_use(*declared, numbers, call.parameters, device=call.x.device, symmetric=self.symmetric)
        values = dict[str, list[float]]()
        with suppress(ValueError):  # a fixed number may be no index of a table; the functions before it are compared
            first_use(*declared, numbers, call.parameters, device=torch.device("cpu"), values=values)
        self.pending[self.form] = json.dumps(values)
        if call.candidates is not None and all(term.over == "batch" for term in self.terms.values()):
            raise ValueError(
                "candidates must be left out: no term has over='own' or over='both', so nothing would read them"
            )
        wrong = sorted(name for name in self.reads.cols if self.terms[name].over != "batch")
        if wrong:
            raise ValueError(f"column_loss must not read {wrong[0]!r}: own candidates belong to rows")
        if len(self._used) >= REMEMBERED:
            self._used.clear()
            self.pending = {self.form: self.pending[self.form]}
        self._used[self.form] = self.reads

    @property
    def values(self) -> str:
        """Values of the functions that ranks have not compared for the latest kind of call; "" if they have."""
        return self.pending.get(self.form, "")

    def agreed(self, reads: Reads) -> None:
        """Keep what all ranks' functions read, after their values were compared."""
        self.pending.pop(self.form, None)
        self.reads = reads

    def reduced(self) -> list[Reduced]:
        """Return the terms that tiles compute, with the sides that read them."""
        reduced = []
        for name, term in self.terms.items():
            rows = name in self.reads.rows and term.over != "own"
            cols = name in self.reads.cols or (rows and self.symmetric)
            if (rows or cols) and not isinstance(term, Partner):
                reduced.append(Reduced(name, term, rule_of(term), rows, cols))
        return reduced

    @cached_property
    def functions(self) -> dict[str, Any]:
        """Everything of which a fingerprint is made, by its name."""
        terms = [(name, type(term).__name__, term.settings) for name, term in self.terms.items()]
        term_functions = {
            f"{argument} of {name!r}": function
            for name, term in self.terms.items()
            for argument, function in term.functions.items()
        }
        settings = repr((terms, [*term_functions], self.kinds, self.symmetric))
        return {"terms": settings, **term_functions, "row_loss": self.row_loss, "column_loss": self.column_loss}

    @property
    def unread(self) -> list[str]:
        """The terms that neither side reads."""
        return sorted(set(self.terms) - self.reads.terms)

    @property
    def wants_partners(self) -> bool:
        """Whether anything needs partners."""
        return self.reads.partner or any(isinstance(self.terms[name], Partner) for name in self.reads.terms)

    @cached_property
    def multiplies_partners(self) -> bool:
        """Whether similarities are products of rows, and terms read those of partners."""
        has_partner_terms = any(isinstance(term, Partner) for term in self.terms.values())
        return has_partner_terms and list(self.kinds.values()) == ["dot"]

    @cached_property
    def distances(self) -> list[str]:
        """The names of similarities that are distances."""
        return [name for name, kind in self.kinds.items() if kind == DISTANCE]

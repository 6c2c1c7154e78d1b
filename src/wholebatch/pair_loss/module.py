"""The module that holds a declared loss, and computes it on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_flag
from .._precision import wide_dtype
from .._settings import shown
from ..comm import Group, select_communicator
from ..comm.select import check_group
from ..contract import Checks, Facts, Inputs, Options, Reduction, agree, entry, finish
from ..exchange import ExchangeName
from ..nodes import Layout, choose_route
from ..partition import Partition
from ..sweep import Memory, Precision
from ..sync import Sync, total
from .arguments import Arguments
from .declaration import Declaration
from .fields import fields
from .fingerprint import fingerprint
from .first_use import first_use, losses_and_weights
from .node import PairPlan, PairSums
from .own import OwnRows, combined
from .pairs import Pairs, Pairing, Tower, pairing, partner_numbers, winners
from .reductions import Max, Min, Partner, Term
from .reference import dense
from .similarity import SQUARES, Similarity, multiplied, squares
from .sweep import INDEX, SEPARATOR, nested

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_CALLER = "PairLoss"


class PairLoss(nn.Module):
    r"""A loss over all pairs of a batch that is given by its formula: terms, and how a row combines them.

    R_k(i) = reduction over candidates j of f_k(s_ij, x_i, y_j, p),    L = sum_i w_i F(R_1(i), ..., x_i, p) / sum_i w_i

    plus the same over columns with `column_loss`. Candidates are the rows of y on all ranks; S is never stored.

    Args:
        terms: reductions by name: :class:`wholebatch.LogSumExp`, `Sum`, `Mean`, `Count`, `Max`, `Min`, `Partner`. Their
            scores f(s, x, y, p) and masks where(x, y) or where(x, y, s) treat each pair by itself. `x.name` and `y.name`
            are data of its row and its column, `p.name` parameters. `x.index` and `y.index` number the rows of all
            ranks; `x.partner` (`y.partner`) is the similarity of a row (column) with its partner.
        row_loss: F(r, x, p) -> losses of rows, (b,), or (losses, weights); r.name are reductions. It does not mix rows.
        column_loss: likewise of columns, (r, y, p); None: there is none.
        similarity: s: "dot", "cosine", "neg_squared_distance", or a mapping of names to these. Then x and y are mappings
            with these names, and a score reads s.name.
        symmetric: whether S and all functions are symmetric, so that rows are columns; checked on a tile.
        reduction: "mean", "sum" (over sum_i w_i F_i), or "none": w_i F_i of this rank's rows, (b_r,).
        parameters: numbers, tensors, or modules such as :class:`wholebatch.Scale`, by name. A torch.nn.Parameter is
            learned; other tensors are buffers.
        group, sync, exchange, memory, precision: as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: for an argument that is no such thing.

    >>> import torch, wholebatch as wb
    >>> others = wb.LogSumExp(lambda s, x, y, p: p.scale * s)
    >>> own = wb.Partner(lambda s, x, y, p: p.scale * s)
    >>> loss_fn = wb.PairLoss({"all": others, "own": own}, lambda r, x, p: r.all - r.own, parameters={"scale": 10.0})
    >>> loss_fn(torch.eye(3), torch.eye(3))
    tensor(9.0796e-05)
    """

    def __init__(
        self,
        terms: Mapping[str, Term],
        row_loss: Callable[..., Any] | None,
        *,
        column_loss: Callable[..., Any] | None = None,
        similarity: Similarity = "dot",
        symmetric: bool = False,
        reduction: Reduction = "mean",
        parameters: Mapping[str, Any] = _NOTHING,
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        precision: Precision = "auto",
    ) -> None:
        super().__init__()
        self.declaration = Declaration.of(terms, row_loss, column_loss, similarity)
        check_group(group)
        self.options = Options(group, sync, exchange, memory, reduction, precision=precision)
        self.options.check()
        self.symmetric = check_flag("symmetric", symmetric)
        self.values, self._constants = nn.Module(), dict[str, Any]()
        if not isinstance(parameters, Mapping):
            raise ValueError(f"parameters must be a mapping such as {{'scale': 20.0}}, got {shown(parameters)}")
        for name, value in parameters.items():
            if isinstance(value, nn.Parameter):
                self.values.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.values.register_buffer(name, value)
            elif isinstance(value, nn.Module):
                self.values.add_module(name, value)
            else:
                self._constants[name] = value
        self._checked: list[Any] = []

    @entry
    def forward(
        self,
        x: Tensor | Mapping[str, Tensor],
        y: Tensor | Mapping[str, Tensor] | None = None,
        *,
        x_data: Mapping[str, Tensor] = _NOTHING,
        y_data: Mapping[str, Tensor] = _NOTHING,
        own: Tensor | Mapping[str, Tensor] | None = None,
        own_data: Mapping[str, Tensor] = _NOTHING,
        own_offsets: Tensor | None = None,
        parameters: Mapping[str, Any] = _NOTHING,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            x: (b_r, d), this rank's rows, as they are. b_r may differ between ranks and may be 0. float64, float32,
                bfloat16 or float16.
            y: (n_r, d), this rank's columns; None: the rows of x are the columns, too.
            x_data: numbers of rows by name, (b_r,) each, of any dtype. Floating ones may have a gradient.
            y_data: numbers of columns, (n_r,) each.
            own: (b_r, h, d), each row's own further candidates, for terms with over="own" or "both"; or (k, d) with
                `own_offsets`.
            own_data: numbers of own candidates, (b_r, h), or (k,).
            own_offsets: (b_r + 1,) integers: row i has the candidates from own_offsets[i] up to own_offsets[i + 1].
            parameters: as in the constructor, for this call; equal on all ranks.
            weights: (b_r,), >= 0, of rows; of columns as well, if there are as many on each rank.

        Collectives: forward 1 handshake, 1 all-gather of each number of y that is read, those of the exchange for Y, 3
        all-reduces of columns' numbers, and for each partner by `pair`, maximum or minimum 3 all-to-alls; backward 1
        handshake, those of the exchange, and 1 all-reduce of parameters. Memory beyond inputs and gradients: a few
        tiles, and O(B) numbers.

        Raises:
            ValueError: on every rank, whichever rank made the mistake.
            RuntimeError: if the gradient is differentiated again.
        """
        given = {**self._parameters_here(), **parameters} if isinstance(parameters, Mapping) else parameters
        call = self._prepared(x, y, (x_data, y_data, own_data), own, own_offsets, given)
        facts = agree(_CALLER, self.options, _inputs(call, weights), Checks(check=self._facts, must_match=("declaration",)))
        self._say_what_nobody_reads()
        return _Call(self.declaration, call, facts.widened()).loss()

    def reference(
        self,
        x: Tensor | Mapping[str, Tensor],
        y: Tensor | Mapping[str, Tensor] | None = None,
        *,
        x_data: Mapping[str, Tensor] = _NOTHING,
        y_data: Mapping[str, Tensor] = _NOTHING,
        own: Tensor | Mapping[str, Tensor] | None = None,
        own_data: Mapping[str, Tensor] = _NOTHING,
        own_offsets: Tensor | None = None,
        parameters: Mapping[str, Any] = _NOTHING,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L of the rows given, from one dense matrix, without communication; arguments as in `forward`."""
        given = {**self._parameters_here(), **parameters}
        call = self._checked_arguments(x, y, (x_data, y_data, own_data), own, own_offsets, given)
        kinds, sizes = self.declaration.kinds, list(call.widths.values())
        of_x, of_y, of_own = (
            None if one is None else dict(zip(kinds, one.split(sizes, dim=1), strict=True))
            for one in (call.x, call.x if call.y is None else call.y, call.own)
        )
        assert of_x is not None
        assert of_y is not None
        candidates = None if of_own is None else (of_own, call.own_data, call.owners)
        y_numbers = call.x_data if call.y is None else call.y_data
        return dense(
            self.declaration, of_x, of_y, call.x_data, y_numbers, candidates, call.parameters, weights, self.options.reduction
        )

    def _parameters_here(self) -> dict[str, Any]:
        own = {**dict(self.values.named_parameters(recurse=False)), **dict(self.values.named_buffers(recurse=False))}
        return {**self._constants, **own, **dict(self.values.named_children())}

    def _prepared(self, *arguments: Any) -> Arguments:
        """Return the arguments, or raise on all ranks, which are in the handshake of `agree`."""
        try:
            return self._checked_arguments(*arguments)
        except ValueError as error:
            mistake = error

        def state() -> dict[str, Any]:
            raise mistake

        select_communicator(self.options.group).handshake(state, caller=_CALLER)
        raise AssertionError("a handshake with an error raises")

    def _checked_arguments(self, x: Any, y: Any, data: Any, own: Any, own_offsets: Any, parameters: Any) -> Arguments:
        declared = self.declaration
        call = Arguments.of(declared.kinds, x, y, data, own, own_offsets, parameters)
        if not isinstance(call.x, Tensor) or not call.x.is_floating_point():
            return call  # `agree` refuses it
        dtypes = [[(name, str(one.dtype)) for name, one in of.items()] for of in (call.x_data, call.y_data, call.own_data)]
        shapes = [(name, tuple(one.shape) if isinstance(one, Tensor) else 0) for name, one in call.parameters.items()]
        signature = [dtypes, shapes, call.y is None, call.own is None, str(call.x.dtype), str(call.x.device)]
        if signature not in self._checked:
            y_numbers = call.x_data if call.y is None else call.y_data
            numbers = (call.x_data, y_numbers, None if call.own is None else call.own_data)
            for name, one in (*call.x_data.items(), *y_numbers.items()):
                if one.dim() != 1:
                    raise ValueError(f"data named {name!r} must be a vector with a number for each row, got {tuple(one.shape)}")
            declared.reads = first_use(
                declared.terms, declared.row_loss, declared.column_loss, declared.kinds, numbers, call.parameters, torch.float64
            )
            wrong = sorted(name for name in declared.reads.cols if declared.terms[name].over != "batch")
            if wrong:
                raise ValueError(f"column_loss must not read {wrong[0]!r}: own candidates belong to rows")
            self._checked.append(signature)
        return call

    def _facts(self) -> dict[str, Any]:
        return {"declaration": fingerprint(*self.declaration.functions, self.symmetric)}

    def _say_what_nobody_reads(self) -> None:
        if self.declaration.unread and "said" not in self._checked:
            self._checked.append("said")
            warnings.warn(
                f"PairLoss computes no term that is never read: {', '.join(self.declaration.unread)}", stacklevel=4
            )

    def extra_repr(self) -> str:
        terms = ", ".join(f"{name}={term!r}" for name, term in self.declaration.terms.items())
        options = f"reduction={self.options.reduction!r}, sync={self.options.sync!r}"
        return f"{terms}, similarity={self.declaration.kinds!r}, {options}"


def _inputs(call: Arguments, weights: Tensor | None) -> Inputs:
    """Return the inputs of a call under the names of its arguments."""
    features = {"x": call.x}
    if call.y is not None:
        features["y"] = call.y
    if call.own is not None:
        features["own"] = call.own
    data = {f"x_data[{name!r}]": (one, "x") for name, one in call.x_data.items()}
    data |= {f"y_data[{name!r}]": (one, "y") for name, one in call.y_data.items()}
    data |= {f"own_data[{name!r}]": (one, "own") for name, one in call.own_data.items()}
    return Inputs(
        features=features,
        weights=(weights, "x"),
        data=data,
        parameters={f"parameters[{name!r}]": value for name, value in call.parameters.items()},
    )


class _Call:
    """One call, after all ranks have agreed on it.

    Args:
        declaration: of the loss.
        call: its arguments.
        facts: the facts of all ranks.
    """

    def __init__(self, declaration: Declaration, call: Arguments, facts: Facts) -> None:
        self.declared, self.call, self.facts = declaration, call, facts
        self.wide = wide_dtype(facts.device)
        self.rows = facts.rows["x"]
        self.cols = facts.rows["x" if call.y is None else "y"]
        self.parameters = {name: facts.inputs[f"parameters[{name!r}]"] for name in call.parameters}
        self.x = self._tower("x", "x_data", call.x_data, self.rows)
        self.y = self.x if call.y is None else self._tower("y", "y_data", call.y_data, self.cols)
        self.pairing: Pairing | None = None
        if declaration.wants_partners:
            self.pairing = pairing(facts, self.x, self.y)
        self.partners = [self._partners(rows=True), self._partners(rows=False)] if self.pairing is not None else [{}, {}]

    def loss(self) -> Tensor:
        """Return L."""
        sides = []
        of_rows, of_cols = self._reduced()
        if self.declared.row_loss is not None:
            sides.append(self._side("row_loss", self.declared.row_loss, of_rows, self.x, self.partners[0]))
        if self.declared.column_loss is not None:
            sides.append(self._side("column_loss", self.declared.column_loss, of_cols, self.y, self.partners[1]))
        if self.facts.options.reduction == "none":
            losses = [loss for loss, _ in sides]
            if len({len(loss) for loss in losses}) > 1 or (len(sides) > 1 and self.rows.counts != self.cols.counts):
                raise ValueError(
                    f"{_CALLER}: reduction='none' adds the losses of rows and columns, and needs as many of both on each "
                    f"rank, got {self.rows.counts} and {self.cols.counts}"
                )
            return finish(self.facts, sum(losses[1:], start=losses[0]), one_loss=False)
        totals = [self._total(*side) for side in sides]
        return finish(self.facts, sum(totals[1:], start=totals[0]))

    def _tower(self, name: str, of_data: str, data: Mapping[str, Tensor], rows: Partition) -> Tower:
        """Return one side: its features as products take them, and its numbers."""
        kinds, x = self.declared.kinds, self.facts.inputs[name]
        parts = dict(zip(kinds, x.split(list(self.call.widths.values()), dim=1), strict=True))
        shifts = self._shifts() if self.declared.distances else {}
        features = {of: multiplied(part, kinds[of], shifts.get(of)) for of, part in parts.items()}
        numbers = {key: self.facts.inputs.get(f"{of_data}[{key!r}]", one) for key, one in data.items()}
        return Tower(features, numbers, rows)

    def _shifts(self) -> dict[str, Tensor]:
        """Return the mean of the rows of x, for similarities that are distances. Collective: one all-reduce."""
        x = self.facts.inputs["x"].detach()
        mean = self.facts.comm.all_reduce(x.sum(0), check=False) / max(self.rows.total, 1)
        parts = dict(zip(self.declared.kinds, mean.split(list(self.call.widths.values())), strict=True))
        return {name: parts[name] for name in self.declared.distances}

    def _partners(self, *, rows: bool) -> dict[str, Tensor]:
        """Return the similarities of rows, or of columns, with their partners, by the names of numbers."""
        return partner_numbers(self._pairs(rows=rows).similarities())

    def _pairs(self, *, rows: bool) -> Pairs:
        """Return the pairs of partners."""
        assert self.pairing is not None
        local, other = (self.x, self.y) if rows else (self.y, self.x)
        index = self.pairing.of_rows if rows else self.pairing.of_cols
        return Pairs(self.facts, self.declared.kinds, local, other, index, rows_are_local=rows)

    def _reduced(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the reductions of rows and of columns, (b,) and (n_r,) each, by the names of terms."""
        of_rows, of_cols = self._swept()
        for found, names, rows in ((of_rows, self.declared.reads.rows, True), (of_cols, self.declared.reads.cols, False)):
            for name, term in self.declared.terms.items():  # the same order on all ranks
                if name not in names:
                    continue
                if isinstance(term, Partner):
                    found[name] = self._with_partners(self._pairs(rows=rows), rows=rows).scores(term, self.parameters)
                elif isinstance(term, Max | Min) and term.over != "own":
                    found[name] = self._winners(term, found[name], rows=rows)
                if rows and term.over != "batch":
                    own = self._own(term)
                    found[name] = own if term.over == "own" else combined(term, found[name], own)
        return of_rows, of_cols

    def _with_partners(self, pairs: Pairs, *, rows: bool) -> Pairs:
        """Return pairs of partners whose rows and columns know the similarity with their partner."""
        mine = self.partners[0 if rows else 1]
        pairs.x_numbers.update(mine)
        pairs.y_numbers.update(mine)
        return pairs

    def _winners(self, term: Term, index: Tensor, *, rows: bool) -> Tensor:
        x, y = (
            Tower(tower.features, {**tower.numbers, **partners}, tower.rows)
            for tower, partners in zip((self.x, self.y), self.partners, strict=True)
        )
        towers = (x, y) if rows else (y, x)
        return winners(self.facts, self.declared.kinds, towers, term, index, self.parameters, rows_are_local=rows)

    def _own(self, term: Term) -> Tensor:
        """Return a term over each row's own candidates, (b,)."""
        kinds = self.declared.kinds
        parts = dict(zip(kinds, self.facts.inputs["own"].split(list(self.call.widths.values()), dim=1), strict=True))
        shifts = self._shifts() if self.declared.distances else {}
        features = {of: multiplied(part, kinds[of], shifts.get(of)) for of, part in parts.items()}
        numbers = {key: self.facts.inputs.get(f"own_data[{key!r}]", one) for key, one in self.call.own_data.items()}
        own = OwnRows(features, numbers, self.call.owners, self.rows.counts[self.facts.rank])
        x_numbers = {**self.x.numbers, **self.partners[0], INDEX: self._index(self.rows)}
        return own.reduce(term, kinds, self.x.features, x_numbers, self.parameters, self.wide)

    def _swept(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what tiles compute: reductions by name, and of a maximum or minimum the index of the winner."""
        reduced = self.declared.reduced()
        if not reduced:
            return {}, {}
        kinds, facts = self.declared.kinds, self.facts
        x, y = (torch.cat([*tower.features.values()], dim=1) for tower in (self.x, self.y))
        x_numbers, y_numbers = (self._numbers(tower, at) for at, tower in enumerate((self.x, self.y)))
        x_learned, y_learned = ([name for name, one in of.items() if one.requires_grad] for of in (x_numbers, y_numbers))
        p_learned = [n for n, one in self.parameters.items() if isinstance(one, Tensor) and one.requires_grad]
        plan = PairPlan(
            facts,
            choose_route(facts, Layout(self.rows, self.cols), keep=False, dtype=facts.dtype),
            kinds,
            self.call.widths,
            reduced,
            self.rows,
            self.cols,
            {name: one for name, one in x_numbers.items() if name not in x_learned},
            {
                name: facts.all_gather(_as_integers(one), self.cols).to(one.dtype)
                for name, one in y_numbers.items()
                if name not in y_learned
            },
            x_learned,
            y_learned,
            p_learned,
            self.parameters,
        )
        learned = [
            *[x_numbers[name] for name in x_learned],
            *[y_numbers[name] for name in y_learned],
            *[self.parameters[name] for name in p_learned],
        ]
        of_rows, of_cols = PairSums.apply(plan, x, y, *learned)
        return (
            dict(zip([of.name for of in plan.of_rows], of_rows, strict=True)),
            dict(zip([of.name for of in plan.of_cols], of_cols, strict=True)),
        )

    def _numbers(self, tower: Tower, at: int) -> dict[str, Tensor]:
        """Return the numbers of one side that tiles need, those of this library in the precision of tiles."""
        own = self.partners[at] if self.declared.reads.partner else {}
        found = {**tower.numbers, **{name: one.to(self.facts.dtype) for name, one in own.items()}}
        read = self.declared.reads.x | self.declared.reads.y
        found = {name: one for name, one in found.items() if name.split(SEPARATOR)[0] in read}
        for name in self.declared.distances:
            found[f"{SQUARES}{SEPARATOR}{name}"] = squares(tower.features[name], self.facts.dtype)
        return found

    def _index(self, rows: Partition) -> Tensor:
        first, count = rows.offsets[self.facts.rank], rows.counts[self.facts.rank]
        return torch.arange(first, first + count, device=self.facts.device)

    def _side(
        self, what: str, function: Callable[..., Any], reduced: dict[str, Tensor], tower: Tower, partners: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted losses of this rank's rows or columns, and their weights, or None if all are 1."""
        numbers = nested({**tower.numbers, **partners, INDEX: self._index(tower.rows)})[0]
        letter = "x" if what == "row_loss" else "y"
        found = function(fields("r", reduced), fields(letter, numbers), fields("p", self.parameters))
        loss, *own_weights = losses_and_weights(f"{_CALLER}: {what}", found, tower.rows.counts[self.facts.rank])
        weights = self.facts.inputs["weights"]
        if weights is not None and tower is not self.x and self.rows.counts != self.cols.counts:
            raise ValueError(
                f"{_CALLER}: weights are those of rows, and of columns where there are as many on each rank, got "
                f"{self.rows.counts} and {self.cols.counts}; return (losses, weights) from column_loss instead"
            )
        each = [one.to(self.wide) for one in (*own_weights, *([] if weights is None else [weights]))]
        weight = None
        for one in each:
            weight = one if weight is None else weight * one
        loss = loss.to(self.wide)
        return (loss if weight is None else weight * loss), weight

    def _total(self, losses: Tensor, weights: Tensor | None) -> Tensor:
        """Return the mean or the sum over all ranks. Collective: one all-reduce, two with weights."""
        found = total(self.facts.comm, losses.sum())
        if self.facts.options.reduction == "sum":
            return found
        if weights is None:
            count = self.facts.comm.all_reduce(losses.new_full((), float(len(losses))), check=False)
            return found / count.clamp(min=1)
        weight = total(self.facts.comm, weights.sum())
        return torch.where(weight > 0, found / weight.clamp(min=torch.finfo(found.dtype).tiny), found * 0)


def _as_integers(x: Tensor) -> Tensor:
    """Return booleans as integers, which every transport can send."""
    return x.to(torch.uint8) if x.dtype == torch.bool else x

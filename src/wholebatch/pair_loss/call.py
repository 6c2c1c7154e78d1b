"""One call of a declared loss, after all ranks have agreed on its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..contract import Facts, finish
from ..contract.options import report
from ..nodes import Layout, Route, Vectors, choose_route, choose_token_route, items_of_ranks
from ..nodes.matrix import Matrix, fits
from ..nodes.rehearsals import tokens_in_kernels_or_not
from ..partition import Partition, Ragged
from ..sync import total
from .affine import losses_and_certainty
from .arguments import Arguments
from .candidates import OwnRows, combined
from .compiled import Kernels
from .declaration import Declaration
from .failure import Failure
from .function_checks import losses_and_weights, weighted
from .lowered_terms import reduce
from .lowering import Lowered
from .matrix import Tied, reduced_matrix
from .node import PairPlan, PairSums
from .pairs import Pairing, Pairs, Tower, as_integers, indices, pairing, partner_numbers, winners
from .reductions import Max, Min, Partner, Term
from .row_data import INDEX, ROUNDING, SEPARATOR, SQUARES, Fields, nested
from .sigmoid_sums import is_known
from .similarity import LATE, ONE, multiplied, squares
from .statistics import TermStatistics
from .tile import Affine, Leaves, Reduced

CALLER = "PairLoss"


class Call:
    """One call, after all ranks have agreed on it.

    Args:
        declaration: of the loss.
        call: its arguments.
        facts: the facts of all ranks.
        tiles: how many times two tiles a step holds at a time, the same on all ranks.
        signature: the fingerprint of the declaration, by which compiled functions are kept.
        kernels: compiled functions of tiles; None: there are none.
        has_kernels: whether the caller chooses between kernels and plain PyTorch.
        constant: the names of similarities whose features have no gradient on any rank.
        passes: the terms as passes over S, and the factor of each; None: tiles of any terms compute them.
        affine: which scores are affine, by the numbers of their terms, if an earlier call has found it.
    """

    def __init__(
        self,
        declaration: Declaration,
        call: Arguments,
        facts: Facts,
        *,
        tiles: int,
        signature: str = "",
        kernels: Kernels | None = None,
        has_kernels: bool = False,
        constant: frozenset[str] = frozenset(),
        passes: tuple[Lowered, Sequence[float]] | None = None,
        affine: Affine | None = None,
    ) -> None:
        self.declared, self.call, self.facts, self.tiles, self.signature = declaration, call, facts, tiles, signature
        self.kernels, self.has_kernels, self.constant, self.passes = kernels, has_kernels, constant, passes
        self.affine = {} if affine is None else affine
        self.failure = Failure(facts.comm, CALLER)
        self.share: Tensor | None = None  # see `lowered_terms.Call`
        self.wide = wide_dtype(facts.device)
        self.rows = facts.rows["x"]
        self.cols = facts.rows["x" if call.y is None else "y"]
        self.vectors = self._vectors() if declaration.kinds.get(ONE) in LATE else None
        self.shifts = self._shifts() if declaration.distances else {}
        self.parameters = {name: facts.inputs[f"parameters[{name!r}]"] for name in call.parameters}
        vectors = (None, None) if self.vectors is None else (self.vectors.rows, self.vectors.cols)
        self.x = self._tower("x", "x_data", call.x_data, self.rows, vectors[0])
        self.y = self.x if call.y is None else self._tower("y", "y_data", call.y_data, self.cols, vectors[1])
        self.pairing: Pairing | None = None
        if declaration.wants_partners:
            self.pairing = pairing(facts, self.x, self.y)
        # Before the sweep: the backward pass comes to the later nodes first, and one matrix at a time.
        self.pairs: list[Pairs] = []
        self.partners: list[dict[str, Tensor]] = [{}, {}]
        swept = {} if passes is None else passes[0].partners
        apart = {n for n in declaration.reads.terms if isinstance(declaration.terms[n], Partner) and n not in swept}
        if self.pairing is not None and (declaration.reads.partner or apart):
            row_pairs = self._pairs(rows=True)
            # Partners in the same place are the same pairs, seen from either side.
            self.pairs = [row_pairs, row_pairs if self.pairing.col_partners is None else self._pairs(rows=False)]
            self.partners = [self._partners(row_pairs, rows=True), self._partners(self.pairs[1], rows=False)]

    def loss(self) -> Tensor:
        """Return L. With statistics, if the caller has requested them: one more all-reduce."""
        sides = []
        row_reductions, col_reductions = self.reduced()
        if self.facts.statistics:
            report(self._statistics(row_reductions, col_reductions))
        for name, function, reductions, tower, partners in (
            ("row_loss", self.declared.row_loss, row_reductions, self.x, self.partners[0]),
            ("column_loss", self.declared.column_loss, col_reductions, self.y, self.partners[1]),
        ):
            if function is not None:
                side = partial(self._side, name, function, reductions, tower, partners)
                sides.append(self.failure.guard(side, partial(self._no_losses, tower)))
        if self.facts.options.reduction == "none":
            losses = [loss for loss, _ in sides]
            self.failure.report()
            if len({len(loss) for loss in losses}) > 1 or (len(sides) > 1 and self.rows.counts != self.cols.counts):
                raise ValueError(
                    f"{CALLER}: reduction='none' adds the losses of rows and columns, and needs as many of both on "
                    f"each rank, got {self.rows.counts} and {self.cols.counts}"
                )
            return finish(self.facts, sum(losses[1:], start=losses[0]), one_loss=False)
        counts = [self.rows.total] * (self.declared.row_loss is not None) + [self.cols.total]
        loss = self._total(sides, counts)
        self.failure.report()
        return finish(self.facts, loss)

    def slopes(self, name: str, value: Tensor, known: Mapping[str, Tensor], sums: Tensor) -> Tensor:
        """Return d (sum_i w_i F_i) / d sums, (b,), of a row loss that adds its terms up.

        Args:
            name: of the term that is computed from these sums.
            value: the term at these sums, (b,).
            known: counted terms by name, (b,) each.
            sums: (b,), a leaf.
        """
        row_loss = self.declared.row_loss
        assert row_loss is not None
        terms = {other: self._zeros(self.x) for other in self.declared.reads.rows} | {name: value}
        terms |= {other: x for other, x in known.items() if is_known(self.declared.terms[other])}
        summed = [x for other, x in terms.items() if not is_known(self.declared.terms[other])]

        def added_up(*arguments: Any) -> Any:
            result, certain = losses_and_certainty(lambda: row_loss(*arguments), summed)
            if not certain:
                raise ValueError(f"{CALLER}: row_loss must add its terms up in every call, as it did before")
            return result

        def compute() -> Tensor:
            with torch.enable_grad():
                losses, weights = self._side("row_loss", added_up, terms, self.x, self.partners[0])
                none = self._zeros(self.x)
                if not losses.requires_grad:
                    return none
                (slopes,) = torch.autograd.grad(losses.sum(), sums, allow_unused=True)
                slopes = none if slopes is None else slopes
                return slopes if weights is None else torch.where(weights == 0, none, slopes)

        return self.failure.guard(compute, lambda: self._zeros(self.x))

    def _vectors(self) -> Vectors:
        """Return the vectors that rows and columns consist of. Collective: two all-gathers of integers."""
        assert self.call.x_lengths is not None
        assert self.call.y_lengths is not None
        rows = items_of_ranks(self.facts, self.call.x_lengths, self.rows)
        cols = items_of_ranks(self.facts, self.call.y_lengths, self.cols)
        return Vectors(rows, cols, LATE[self.declared.kinds[ONE]])

    def _tower(
        self, name: str, data_name: str, data: Mapping[str, Tensor], rows: Partition, vectors: Ragged | None = None
    ) -> Tower:
        """Return one side: its features as products take them, and its numbers."""
        kinds, x = self.declared.kinds, self.facts.inputs[name]
        widths = [*self.call.widths.values()]
        parts = dict(zip(kinds, [x] if len(widths) == 1 else x.split(widths, dim=1), strict=True))
        features = {key: multiplied(part, kinds[key], self.shifts.get(key)) for key, part in parts.items()}
        numbers = {key: self.facts.inputs.get(f"{data_name}[{key!r}]", value) for key, value in data.items()}
        return Tower(features, numbers, rows, vectors)

    @torch.no_grad()
    def _shifts(self) -> dict[str, Tensor]:
        """Return the mean of the rows of x, for similarities that are distances. Collective: one all-reduce."""
        x = self.facts.inputs["x"].detach()
        mean = self.facts.comm.all_reduce(x.sum(0), check=False) / max(self.rows.total, 1)
        parts = dict(zip(self.declared.kinds, mean.split(list(self.call.widths.values())), strict=True))
        return {name: parts[name] for name in self.declared.distances}

    def _partners(self, pairs: Pairs, *, rows: bool) -> dict[str, Tensor]:
        """Return the similarities of rows, or of columns, with their partners, by the names of numbers."""
        numbers = partner_numbers(pairs.similarities)
        if ("x" if rows else "y") in self.declared.reads.ties:
            numbers |= partner_numbers(pairs.rounding(self.facts.dtype, self.facts.products.error), ROUNDING)
        if not rows and self.pairing is not None and not self.pairing.all_cols:
            (index,) = self._with_partner().nonzero(as_tuple=True)
            none = torch.zeros(self.cols.counts[self.facts.rank], dtype=self.wide, device=self.facts.device)
            numbers = {name: none.index_put((index,), s) for name, s in numbers.items()}
        return numbers

    def _with_partner(self) -> Tensor:
        """Return whether each local column has a partner."""
        assert self.pairing is not None
        assert self.pairing.col_partners is not None
        return self.pairing.col_partners >= 0

    def _pairs(self, *, rows: bool) -> Pairs:
        """Return the pairs of partners, without the columns that have none."""
        assert self.pairing is not None
        local, other, places = self.x, self.y, None
        index = self.pairing.row_partners
        if not rows:
            local, other, index = self.y, self.x, self.pairing.col_partners
            if not self.pairing.all_cols:
                assert index is not None
                (places,) = self._with_partner().nonzero(as_tuple=True)
                index = index[places]
        return Pairs(self.facts, self.declared.kinds, local, other, index, places=places, rows_are_local=rows)

    def reduced(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the reductions of rows and of columns, (b,) and (n_r,) each, by the names of terms."""
        row_reductions, col_reductions = self._swept()
        for values, names, rows in (
            (row_reductions, self.declared.reads.rows, True),
            (col_reductions, self.declared.reads.cols, False),
        ):
            for name, term in self.declared.terms.items():  # the same order on all ranks
                partner = isinstance(term, Partner)
                if name not in names or (partner and name in values):
                    continue
                if partner and not rows and self.pairing is not None and not self.pairing.all_cols:
                    raise ValueError(
                        f"{CALLER}: column_loss must not read the Partner {name!r} where rows of y have a negative "
                        "'pair' and so no partner; leave it to row_loss"
                    )
                if partner:
                    side = 0 if rows else 1
                    scores = partial(self.pairs[side].scores, term, self.parameters, self.partners[side])
                    values[name] = self.failure.guard(scores, partial(self._zeros, (self.x, self.y)[side]))
                elif isinstance(term, Max | Min) and term.over != "own" and term.ties == "first":
                    values[name] = self._winners(term, values[name], rows=rows)
                if rows and term.over != "batch":
                    own = self.failure.guard(partial(self._own_reduction, term), partial(self._zeros, self.x))
                    values[name] = own if term.over == "own" else combined(term, values[name], own)
        return row_reductions, col_reductions

    def _winners(self, term: Term, index: Tensor, *, rows: bool) -> Tensor:
        x, y = (
            Tower(tower.features, {**tower.numbers, **partners}, tower.rows, tower.vectors)
            for tower, partners in zip((self.x, self.y), self.partners, strict=True)
        )
        towers = (x, y) if rows else (y, x)
        return winners(self.facts, self.declared.kinds, towers, term, index, self.parameters, rows_are_local=rows)

    def _no_losses(self, tower: Tower) -> tuple[Tensor, None]:
        """Return the losses of local rows, and no weights, after an error."""
        return self._zeros(tower), None

    def _zeros(self, tower: Tower) -> Tensor:
        """Return a number for each local row of a tower, after an error."""
        return torch.zeros(tower.rows.counts[self.facts.rank], dtype=self.wide, device=self.facts.device)

    def _own_reduction(self, term: Term) -> Tensor:
        """Return a term over each row's own candidates, (b,)."""
        tower = self._tower("candidates", "candidate_data", self.call.candidate_data, self.facts.rows["candidates"])
        own = OwnRows(tower.features, tower.numbers, self.call.owners, self.rows.counts[self.facts.rank])
        x_numbers = {**self.x.numbers, **self.partners[0], INDEX: self.x.index(self.facts)}
        return own.reduce(term, self.declared.kinds, self.x.features, x_numbers, self.parameters, self.wide)

    def _swept(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what tiles compute: reductions by name, and of a maximum or minimum the index of the winner."""
        reduced = self.declared.reduced()
        if not reduced:
            return {}, {}
        if self.passes is not None:
            return reduce(*self.passes, self, reduced)
        kinds, facts = self.declared.kinds, self.facts
        if self._is_matrix(reduced):
            return self._in_a_matrix(reduced)
        route = self._route(symmetric=self.declared.symmetric)
        x, y = (_side_by_side([*tower.features.values()]) for tower in (self.x, self.y))
        x_numbers, y_numbers = (self._numbers(tower, side) for side, tower in enumerate((self.x, self.y)))
        x_learned, y_learned = (
            [name for name, value in numbers.items() if value.requires_grad] for numbers in (x_numbers, y_numbers)
        )
        p_learned = [n for n, value in self.parameters.items() if isinstance(value, Tensor) and value.requires_grad]
        all_y = {name: self._gather_columns(name, value) for name, value in y_numbers.items() if name not in y_learned}
        plan = PairPlan(
            facts,
            route,
            kinds,
            self.call.widths,
            reduced,
            self.rows,
            self.cols,
            {name: value for name, value in x_numbers.items() if name not in x_learned},
            all_y,
            x_learned,
            y_learned,
            p_learned,
            self.parameters,
            self.declared.symmetric,
            self.kernels,
            self.signature,
            self.vectors,
            self.affine,
            self.constant,
            failure=self.failure,
        )
        learned = [
            *[x_numbers[name] for name in x_learned],
            *[y_numbers[name] for name in y_learned],
            *[self.parameters[name] for name in p_learned],
        ]
        if facts.products.half is None:
            x, y = (z.to(facts.dtype) for z in (x, y))  # once, and not in each tile
        row_results, col_results = PairSums.apply(plan, x, y, *learned)
        return (
            dict(zip([term.name for term in plan.row_terms], row_results, strict=True)),
            dict(zip([term.name for term in plan.col_terms], col_results, strict=not plan.symmetric)),
        )

    def _is_matrix(self, reduced: Sequence[Reduced]) -> bool:
        """Return whether all of S is computed at once: the same on all ranks."""
        rows, cols, facts = self.rows.counts, self.cols.total, self.facts
        if self.kernels is not None or not fits(facts.device, max(rows), cols) or min(rows) == 0:
            return False
        # On several ranks, columns are reduced block by block, and a user's derivative may raise on one of them.
        user_loss = self.declared.row_loss or self.declared.column_loss
        alone = facts.comm.size == 1 or not (user_loss or any(each.cols for each in reduced))
        return alone and set(facts.of_ranks("memory")) == {"auto"}

    def _in_a_matrix(self, reduced: Sequence[Reduced]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the reductions by name, from all of S at once."""
        facts, route = self.facts, self._route(symmetric=False)
        shape = self.rows.counts[facts.rank], self.cols.total
        widen = self.vectors is None and facts.products.half is None
        products, inputs = dict[str, Tensor](), list[Any]()
        for name in self.declared.kinds:
            x, y = (tower.features[name] for tower in (self.x, self.y))
            if name in self.constant:
                x, y = x.detach(), y.detach()
            x, y = (z.to(facts.dtype) if widen else z for z in (x, y))
            products[name] = Matrix.apply(route, self.vectors, shape, x, y)
            inputs += [x, y]
        x_numbers, y_numbers = (self._numbers(tower, side) for side, tower in enumerate((self.x, self.y)))
        row_numbers = {name: x.unsqueeze(1) for name, x in x_numbers.items()}
        col_numbers = {
            name: (y if y.requires_grad else self._gather_columns(name, y)).unsqueeze(0)
            for name, y in y_numbers.items()
        }
        parameters = {
            name: x.to(self.wide) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in self.parameters.items()
        }
        if self.declared.symmetric:
            reduced = [replace(each, cols=False) for each in reduced]
        leaves = Leaves(self.declared.kinds, products, row_numbers, col_numbers, parameters)
        sides = reduced_matrix(leaves, reduced, finite=self.has_kernels)
        inputs += [*x_numbers.values(), *y_numbers.values(), *self.parameters.values()]
        learned = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if learned and not self.has_kernels:
            named = [(side, name) for side in sides for name, x in side.items() if x.is_floating_point()]
            tied = Tied.apply(len(named), *(side[name] for side, name in named), *{id(x): x for x in learned}.values())
            for (side, name), x in zip(named, tied, strict=True):
                side[name] = x
        return sides

    def _route(self, *, symmetric: bool) -> Route:
        if self.vectors is not None:
            route = choose_token_route(self.facts, self.vectors)
            return tokens_in_kernels_or_not(self.facts, route, self.vectors) if self.has_kernels else route
        layout = Layout(self.rows, self.cols, symmetric=symmetric)
        return choose_route(self.facts, layout, exact=True, dtype=self.facts.dtype, times=self.tiles)

    def _gather_columns(self, name: str, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks' columns, (B,). Collective: one all-gather, except for their index."""
        if name == INDEX:
            return indices(self.facts, 0, self.cols.total)
        return self.facts.all_gather(as_integers(numbers), self.cols).to(numbers.dtype)

    def _numbers(self, tower: Tower, side: int) -> dict[str, Tensor]:
        """Return the numbers of one side that tiles need, those of this library in the precision of tiles."""
        numbers = {name: x.to(self.facts.dtype) for name, x in self.partners[side].items()}
        numbers |= {**tower.numbers, INDEX: tower.index(self.facts)}
        for name in self.declared.distances:
            numbers[f"{SQUARES}{SEPARATOR}{name}"] = squares(tower.features[name], self.facts.dtype)
        return numbers

    @torch.no_grad()
    def _statistics(self, *sides: dict[str, Tensor]) -> TermStatistics:
        """Return the mean of each term over the rows where it is finite. Collective: one all-reduce."""
        sums = [torch.zeros(2, dtype=self.wide, device=self.facts.device)]  # a rank may have nothing else
        for term in (x.to(self.wide) for side in sides for x in side.values()):
            finite = ~term.isinf()
            sums.append(torch.stack([torch.where(finite, term, 0.0).sum(), finite.sum().to(self.wide)]))
        totals = iter(self.facts.comm.all_reduce(torch.stack(sums), check=False)[1:])
        rows, cols = ({name: a / b for name, (a, b) in zip(side, totals, strict=False)} for side in sides)
        return TermStatistics(rows, cols)

    def _side(
        self,
        name: str,
        function: Callable[..., Any],
        reduced: dict[str, Tensor],
        tower: Tower,
        partners: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted losses of this rank's rows or columns, and their weights, or None if all are 1."""
        numbers = nested({**tower.numbers, **partners, INDEX: tower.index(self.facts)})[0]
        letter = "x" if name == "row_loss" else "y"
        result = function(Fields("r", reduced), Fields(letter, numbers), Fields("p", self.parameters))
        loss, *own_weights = losses_and_weights(name, result, tower.rows.counts[self.facts.rank], caller=f"{CALLER}: ")
        weights = self.facts.inputs["weights"]
        if weights is not None and tower is not self.x and self.rows.counts != self.cols.counts:
            raise ValueError(
                f"{CALLER}: weights are those of rows, and of columns where there are as many on each rank, got "
                f"{self.rows.counts} and {self.cols.counts}; return (losses, weights) from column_loss instead"
            )
        each = [x.to(loss.device, self.wide) for x in (*own_weights, *([] if weights is None else [weights]))]
        weight = None
        for x in each:
            weight = x if weight is None else weight * x
        loss = loss.to(self.wide)
        return (loss if weight is None else weighted(loss, weight)), weight

    def _total(self, sides: Sequence[tuple[Tensor, Tensor | None]], counts: Sequence[int]) -> Tensor:
        """Return the sum of the sides' means, or of their sums, over all ranks. Collective: one all-reduce."""
        comm, sums = self.facts.comm, [losses.sum() for losses, _ in sides]
        if self.share is not None:
            sums[0] = sums[0] + self.share
        weights = [None if weight is None else weight.sum() for _, weight in sides]
        if comm.size > 1:  # a function may return weights on some ranks alone: the rows of the others have weight 1
            weight_sums = [
                losses.new_full((), len(losses)) if weight is None else weight
                for (losses, _), weight in zip(sides, weights, strict=True)
            ]
            numbers = total(comm, torch.stack([*sums, *weight_sums])).unbind()
            sums, weights = [*numbers[: len(sums)]], [*numbers[len(sums) :]]
        totals = list[Tensor]()
        for summed, weight, count in zip(sums, weights, counts, strict=False):
            if self.facts.options.reduction == "sum":
                totals.append(summed)
            elif weight is None:
                totals.append(summed / max(count, 1))
            else:
                tiny = torch.finfo(summed.dtype).tiny
                totals.append(torch.where(weight > 0, summed / weight.clamp(min=tiny), summed * 0))
        return sum(totals[1:], start=totals[0])


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

"""Terms that the softmax sweep computes: sums of exponentials, and of scores, that are affine in one similarity.

    f = a s + b        a: of parameters alone;  b: likewise, and affine in the similarity of the row's partner

    LogSumExp    b + logsumexp_j a s_ij              over the candidates
    Sum, Mean    n b + sum_j a s_ij, and this / n    over the same candidates, or over positives
    Count        n                                   from the numbers of equal integers

So a declared loss takes the way of the built-in ones: one exponential for each entry, kept where memory allows, half of
the tiles of rows among themselves, and kernels. Candidates are all pairs, all but the row itself, or those of another
class, and positives are the row itself, or rows of its class (see `masks`). A `Partner` with the same score is a sum
over the row itself. A pass over S serves the terms with one score and one set of candidates. Without kernels, several
passes take longer than tiles of any terms, which compute S once for all of them: these compute whatever is not lowered.

Sums of softplus(f) take the sigmoid sweep: see `sigmoid_sums`.

The ranks agree beforehand on the passes, and on their factors a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..sweep import Over
from .accumulators import rule_of
from .affine import is_affine, is_linear, may_be_affine
from .arguments import Arguments
from .declaration import Declaration
from .fingerprint import fingerprint_and_certainty
from .function_checks import fixed_tile
from .masks import ITSELF, OTHER, Condition, condition_of
from .pairs import PAIR
from .reductions import Count, LogSumExp, Mean, Partner, Sum, Term
from .row_data import INDEX, PARTNER
from .sigmoid_sums import adds_up, inside_softplus
from .similarity import LATE, ONE
from .tile import Reduced
from .tile_entries import Entries

_KINDS = (LogSumExp, Sum, Mean, Count)


@dataclass(frozen=True)
class Pass:
    """A pass over S: the terms that it computes, and their pairs."""

    terms: Mapping[str, Condition]  # the names of scored terms, each with its pairs
    score: Term  # any of them: they have the same score
    over: Over  # as in `Selection`, with the next two
    positive: Condition | None
    excluded: Condition | None
    linear: bool = False  # whether the score is 0 where s is 0

    @property
    def kind(self) -> str:
        """The kind of sweep, in words."""
        return self.over

    @property
    def adds_own(self) -> bool:
        """Whether the candidates are all columns, and the row itself is known apart from them."""
        return self.over == "all" and self.positive == ITSELF and self.excluded is None


@dataclass(frozen=True)
class SigmoidPass(Pass):
    """A pass of the sigmoid sweep, for one term: a sum, or a mean, of softplus of its score."""

    adds_up: bool = False  # whether the row loss adds its terms up

    @property
    def kind(self) -> str:
        """The kind of sweep, in words."""
        return "softplus, added up" if self.adds_up else "softplus"


@dataclass(frozen=True)
class Lowered:
    """The terms of a declaration as passes over S, and the pairs that are counted."""

    passes: Sequence[Pass]
    counted: Mapping[str, Condition]
    partners: Mapping[str, Reduced] = field(default_factory=dict)  # Partner terms, as sums over the row itself

    @property
    def sweep(self) -> str:
        """The sweep that computes them, in words."""
        return "sigmoid sweep" if isinstance(self.passes[0], SigmoidPass) else "softmax sweep"

    @cached_property
    def facts(self) -> list[Any]:
        """The facts that all ranks must have alike."""
        counted, partners = _in_words(self.counted), [[x.name, x.rows, x.cols] for x in self.partners.values()]
        return [[_in_words(each.terms), each.kind, each.linear, counted, partners] for each in self.passes]


def _in_words(conditions: Mapping[str, Condition]) -> list[Any]:
    return [[name, sorted(map(list, condition))] for name, condition in sorted(conditions.items())]


def lowered(declared: Declaration, call: Arguments) -> Lowered | None:
    """Return the terms as passes over S, or None; ranks with the same functions and kinds of numbers get the same."""
    terms = declared.reduced()
    if declared.compiles is True or list(declared.kinds) != [ONE] or declared.kinds[ONE] in LATE or not terms:
        return None
    alone = call.y is None
    numbers = call.x_data, call.x_data if alone else call.y_data
    parameters = {name: x for name, x in call.parameters.items() if not isinstance(x, Tensor) or x.numel() == 1}
    entries = fixed_tile(declared.kinds, numbers, parameters)
    softplus = inside_softplus(terms, entries, double=call.x.dtype == torch.float64)
    if softplus is not None:
        terms = [softplus if each.name == softplus.name else each for each in terms]
    conditions, by_score = dict[str, Condition](), dict[str, list[Reduced]]()
    for reduced in terms:
        condition = _pairs_of(reduced, entries, partners=reduced is not softplus)
        condition = condition if condition is None or not alone else _among_themselves(condition)
        if condition is None or not _is_known(condition, alone=alone):
            return None
        conditions[reduced.name] = condition
        if reduced.term.scored:  # only the same function has the same factor, and the same gradient of it
            by_score.setdefault(_key(reduced.term), []).append(reduced)
    counted = {each.name: conditions[each.name] for each in terms if not each.term.scored}
    if softplus is not None:
        return _softplus_pass(softplus, conditions[softplus.name], counted, declared, entries)
    passes, partners = list[Pass | None](), dict[str, Reduced]()
    partners_by_score = dict[str, dict[str, Reduced]]()
    for each in _partners(declared, call):
        partners_by_score.setdefault(_key(each.term), {})[each.name] = each
    for score, score_terms in by_score.items():
        candidates = dict.fromkeys(conditions[each.name] for each in score_terms if isinstance(each.term, LogSumExp))
        rest = {each.name: conditions[each.name] for each in score_terms if not isinstance(each.term, LogSumExp)}
        if not candidates:
            return None
        for pass_condition in candidates:
            named = {each.name: pass_condition for each in score_terms if conditions[each.name] == pass_condition}
            own = dict.fromkeys(partners_by_score.get(score, ()), ITSELF)
            with_own = _pass({**rest, **named, **own}, score_terms[0].term, pass_condition)
            partners |= {} if with_own is None else partners_by_score.pop(score, {})
            passes.append(with_own or _pass({**rest, **named}, score_terms[0].term, pass_condition))
            rest = {}
    if None in passes or not passes:
        return None
    made = [replace(each, linear=is_linear(each.score, entries)) for each in passes if each is not None]
    return Lowered(made, counted, partners)


def _key(term: Term) -> str:
    """Return a text that terms share only if their scores compute alike."""
    text, certain = fingerprint_and_certainty(term.score)
    return text if certain else f"{text} {id(term.score)}"


def _partners(declared: Declaration, call: Arguments) -> list[Reduced]:
    """Return Partner terms as sums over the row itself, if partners are rows with the same index."""
    if call.y is None or declared.reads.partner or (PAIR in call.x_data and PAIR in call.y_data):
        return []
    reduced = list[Reduced]()
    for name in sorted(declared.reads.terms):
        if isinstance(declared.terms[name], Partner):
            term = Sum(declared.terms[name].score)
            rows, cols = name in declared.reads.rows, name in declared.reads.cols
            reduced.append(Reduced(name, term, rule_of(term), rows, cols))
    return reduced


def _softplus_pass(
    reduced: Reduced, pairs: Condition, counted: Mapping[str, Condition], declared: Declaration, entries: Entries
) -> Lowered | None:
    """Return the pass of a term of softplus; None if the sweep does not compute it."""
    if any(compared.equal for compared in pairs) or (reduced.cols and not declared.symmetric):
        return None
    excluded = frozenset(compared.negated for compared in pairs)
    adding = adds_up(declared, entries)
    return Lowered(
        [SigmoidPass({reduced.name: pairs}, reduced.term, "all", None, excluded or None, adds_up=adding)], counted
    )


def _pairs_of(reduced: Reduced, entries: Entries, *, partners: bool) -> Condition | None:
    """Return the pairs of a term; None if they are no condition, or if the sweep does not compute its score.

    Args:
        reduced: the term.
        entries: a few of them, of numbers that are the same on all ranks.
        partners: whether the score may read partners.
    """
    term, reads = reduced.term, {letter: set[str]() for letter in "xyp"}
    if type(term) not in _KINDS or (term.scored and not may_be_affine(term, entries.kinds)):
        return None
    try:
        pairs = condition_of(term, entries)
        if pairs is None or (term.scored and not is_affine(term, replace(entries, reads=reads), beside=PARTNER)):
            return None
        if term.scored and not is_affine(term, entries):  # it depends on partners alone
            return None
    except Exception:  # fixed numbers may be no indices of a table, and tables are left out: tiles compute such terms
        return None
    allowed = [{PARTNER} if partners and not others else set() for others in (reduced.cols, reduced.rows)]
    return pairs if reads["x"] <= allowed[0] and reads["y"] <= allowed[1] else None


def _among_themselves(condition: Condition) -> Condition:
    """Return a condition of rows among themselves: a row of another class is another row."""
    differs = any(compared.name != INDEX and not compared.equal for compared in condition)
    return condition - OTHER if differs else condition


def _is_known(condition: Condition, *, alone: bool) -> bool:
    """Return whether the engine describes and counts such pairs: by one comparison, or the others of the same class."""
    others_of_class = alone and len(condition) == 2 and condition > OTHER and all(c.equal for c in condition - OTHER)
    return len(condition) <= 1 or others_of_class


def _pass(terms: Mapping[str, Condition], score: Term, candidates: Condition) -> Pass | None:
    """Return the pass of terms with these candidates; None if no selection has their other sums."""
    further = {*terms.values()} - {candidates}
    if len(further) > 1:
        return None
    positive = next(iter(further), None)
    negated = frozenset(compared.negated for compared in candidates)
    can_exclude = not any(compared.equal for compared in candidates)
    if positive is None and candidates == OTHER:
        return Pass(terms, score, "negatives", ITSELF, None)
    if positive is None:
        return Pass(terms, score, *(("all", None, negated or None) if can_exclude else ("positives", candidates, None)))
    if not can_exclude or not any(compared.equal for compared in positive):
        return None
    if candidates <= positive:
        return Pass(terms, score, "all", positive, negated or None)
    if negated <= positive:
        return Pass(terms, score, "negatives", positive, ITSELF if positive - negated else None)
    return None


def may_be_lowered(passes_of_ranks: Sequence[list[Any]], pass_factors: Sequence[float], *, in_kernels: bool) -> bool:
    """Return whether all ranks have the same passes, and whether these are faster than tiles of any terms.

    Args:
        passes_of_ranks: the facts of their passes.
        pass_factors: the factor of each pass; further ones are 0.
        in_kernels: whether kernels may compute tiles.
    """
    passes = passes_of_ranks[0]
    alike = len(passes) > 0 and all(each == passes for each in passes_of_ranks)
    scaled = all(pass_factors[: len(passes)])
    return alike and scaled and (in_kernels or (len(passes) == 1 and passes[0][1] != "positives"))

"""One handshake at the entry of a loss: every rank's arguments are valid and fit together, or every rank raises.

1. each rank checks shapes, types and settings          no device is read
2. each rank computes the numbers that values need      norms, scalars: they stay on the device
3. all ranks send facts and numbers in one handshake    the host waits once, for the numbers of all ranks
4. each rank checks the numbers and facts of all ranks  the same numbers, hence the same decision, on all;
                                                        with checks="deferred" at the next call, see `deferred`
5. the inputs enter the graph of the loss               see `gradients`

A call of a form that was valid before looks up 1, and of 3 and 4 all but the numbers (see `forms`).

If a number of any rank looks wrong in step 4 (NaN, an infinite norm, a negative weight), or ranks differ in a fact that
must match, all ranks make a second handshake. For this each checks its own values, and reads whatever its error message
needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import autocast_around
from .._base.checks import on_host
from .._base.precision import accumulation_dtype, tf32_is_allowed
from ..comm import Communicator, select_communicator
from ..comm.handshake import (
    GRAD_ENABLED,
    NEEDS_GRAD,
    different_facts,
    exchange,
    exchange_unread,
    on_all_ranks,
)
from ..comm.join_context import refuse_join_context
from ..comm.records import FactsByRank, OnDevice, as_unread
from ..kernels import RowNumbers, check_kernel, choice, chooses, interpreted, missing
from ..partition import Partition
from ..sweep import Products, select_products
from .canaries import CANARIES, EARLIER
from .deferred import (
    TOLERANCE,
    Assumption,
    Deferred,
    Seen,
    Values,
    bounds_of,
    capturing,
    read_earlier,
    stacked,
    with_rows,
)
from .facts import Facts
from .forms import Agreement, Form, keep
from .gradients import check_inference, enter, gradient_facts, join
from .group import CALL, GroupState, latest_call, state_of
from .inputs import MIN_PAIR_PRODUCT, SUM_OF_WEIGHTS, Checks, Inputs, norm_of
from .options import Options, statistics_requested

NUMBERS = "numbers"  # the fact with the numbers of a rank
PRECISION = "precision of products"  # the one that was chosen
LEFT_OUT = "rows left out"  # how many have the label ignore_index
_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
_NO_KERNELS, _CHOOSES = "kernels are missing", "auto chooses kernels"  # why, or ""; on the device of this rank
_CHOICES = "choices of kernels"  # a digest of them
_MUST_MATCH = (
    _ARGUMENTS,
    "embedding size",
    "dtype",
    "device type",
    "sync",
    "exchange",
    "reduction",
    "checks",
    "kernel",
    PRECISION,
    "statistics",
)
_DERIVED = "derived"  # the fact that follows from the numbers of a rank


def agree(caller: str, options: Options, inputs: Inputs, checks: Checks | None = None) -> Facts:
    """Return the facts on which the ranks agree, or raise on every rank. Collective: one handshake."""
    checks, comm = checks or Checks(), select_communicator(options.group)
    transport, alone = comm.transport, comm.size == 1
    group, deferred = state_of(transport), options.deferred
    call = _Call(caller, options, inputs, checks, comm, group)
    key = call.form() if alone else None
    if group.unread:
        read_earlier(group.unread, call.kind(key) if deferred else None, alone=alone)
    if not alone:  # reading may end a difference between ranks, which is part of a form
        key = call.form()
    form = group.forms.get(key)
    if deferred and form is not None and (facts := call.without_reading(form, key)) is not None:
        return facts
    if capturing():
        raise RuntimeError(
            f"{caller}: in a CUDA graph a loss needs checks='deferred', and just before a call of the same shapes and "
            "settings, whose norms and scale allow that (docs/performance.md); make a few steps, then capture one"
        )
    numbers, row_numbers = (None, None) if form is None else call.valid_numbers(in_kernels=form.in_kernels)
    agreement = mistake = None
    if form is None or numbers is None:
        by_rank, form = call.first_handshake()
    elif not alone:
        by_rank = call.handshake_again(form, numbers)
        agreement = form.agreement(by_rank)
    else:
        agreement = form.alone
        by_rank = agreement.by_rank
        columns: dict[str, list[float]] | None = {name: [float(number)] for name, number in numbers.items()}
        latest = [latest_call()]
    if agreement is None or not alone:
        columns, latest = by_rank.columns_of_mapping(NUMBERS), by_rank.column(CALL)
        if by_rank.differing(_CHOICES) is not None:  # a rank was started again, or was in another group of this name
            choice.forget(transport.group_name)
        if by_rank.unread():
            return call.beside(by_rank)
    if agreement is None:
        group.canaries.check(columns)
        mistake = call.other_settings(by_rank)
    derived = None if mistake is not None else _values_of_all(columns, comm.rank, inputs, checks)
    if derived is None:
        local_numbers = call.numbers()
        checked = comm.handshake(lambda: call.checked_values(local_numbers), caller=caller)
        if mistake is not None:
            raise on_all_ranks(mistake, transport)
        columns, derived = checked.columns_of_mapping(NUMBERS), _by_name(checked.column(_DERIVED))
    assert columns is not None
    group.canaries.differed = None  # this call has read it
    if agreement is None:
        agreement = call.agreement(by_rank)
        if key is not None and form.agree(by_rank, agreement):
            keep(group.forms, key, form)
    if not alone:
        _check_equal(caller, {name: columns[name] for name in inputs.compared})
    if not any(columns.get(SUM_OF_WEIGHTS, (1.0,))):
        raise ValueError(
            f"{caller}: weights must not be 0 for every example of every rank; give at least one a positive weight"
        )
    number, assumption = group.number_call(latest), None
    if deferred and key is not None:
        assumption = call.assume(key, form, agreement, by_rank, columns)
    values = Values(
        scalars={name: columns[name][0] for name in (*inputs.compared, *checks.from_first)},
        norms={name: max(columns[norm_of(name)]) for name in inputs.given_features},
        min_pair_product=min(columns.get(MIN_PAIR_PRODUCT, [-math.inf])),
    )
    return call.facts(agreement, number, values, row_numbers, derived=derived, assumption=assumption)


@dataclass(eq=False)
class _Call:
    """The arguments of one call, and the ranks that make it."""

    caller: str
    options: Options
    inputs: Inputs
    checks: Checks
    comm: Communicator
    group: GroupState  # of these ranks
    statistics: bool = field(default_factory=statistics_requested)

    def form(self) -> Hashable | None:
        """Return the form of this rank's call; None if it has to state all facts."""
        options, settings, canaries = self.options, self.checks.settings, self.group.canaries
        if settings is None or canaries.kernel_numbers:
            return None
        device = self.inputs.device
        cuda = None if device is None or device.type != "cuda" else (autocast_around(device), tf32_is_allowed())
        key = (
            self.caller, options.sync, options.exchange, options.memory, options.memory.__class__, options.reduction,
            options.kernel, options.precision, options.checks, settings, tuple(map(type, settings)), self.inputs.form(),
            torch.is_grad_enabled(), cuda, choice.switched_off(), canaries.differed is not None, self.statistics,
        )  # fmt: skip
        try:
            hash(key)
        except TypeError:  # an argument of a wrong type, which the checks refuse
            return None
        return key

    def numbers(self) -> dict[str, Tensor | float]:
        """Return the numbers that the checks of values need, those of tensors on their device."""
        return {**self.inputs.numbers(), **self.further_numbers()}

    def further_numbers(self) -> dict[str, Tensor | float]:
        """Return the numbers beside those of the inputs."""
        return {**self.checks.read_back(), **self.group.canaries.numbers()}

    def valid_numbers(
        self, *, in_kernels: bool, read: bool = True
    ) -> tuple[dict[str, Tensor | float] | None, RowNumbers | None]:
        """Return `numbers`, which one process may `read`, and those of each row in kernels; None if one is wrong."""
        try:
            if self.comm.transport.size > 1:
                refuse_join_context()
            self.checks.in_kernels = in_kernels
            alone, row_numbers = read and self.comm.transport.size == 1, None
            if in_kernels and self.inputs.may_be_fused():
                others = self.further_numbers()
                reads = alone and not others and self.inputs.weights[0] is None
                numbers, row_numbers = self.inputs.fused_numbers(read=reads)
                if reads:
                    return numbers, row_numbers
                numbers |= others
            else:
                numbers = self.numbers()
            return {**on_host(numbers)} if alone else numbers, row_numbers
        except Exception:  # raised again, on all ranks, by the first handshake of a form
            return None, None

    def first_handshake(self) -> tuple[FactsByRank, Form]:
        """Return the facts of all ranks, and this rank's form; all of its arguments are checked."""
        by_rank = self.comm.handshake(self.local_facts, caller=self.caller)
        return by_rank, Form(by_rank.statement, varying=2 + len(by_rank.texts[self.comm.rank].facts[NUMBERS]))

    def local_facts(self) -> dict[str, Any]:
        """Return this rank's facts, if its arguments are valid."""
        options, inputs, checks = self.options, self.inputs, self.checks
        options.check()
        if options.deferred and (checks.settings is None or checks.derive is not None or checks.reads):
            why = checks.reads or "its settings or tensors ask for some"
            raise ValueError(
                f"checks='deferred' needs a loss for which the host reads no values: here {why}; pass checks='entry'"
            )
        inputs.check_features()
        first = inputs.first[1]
        self.comm.transport.use_device(first.device)
        check_kernel(options.kernel, first.device)
        products = select_products(options.precision, first.dtype, first.device, autocast_around(first.device))
        loss_facts = checks.check()
        inputs.check_rest()
        # On other devices nobody expects kernels.
        expected = options.kernel == "auto" and (first.device.type == "cuda" or interpreted())
        return {
            CALL: latest_call(),  # this, the next and the numbers change from call to call, so they come first
            _CHOICES: choice.digest(self.comm.transport.group_name),
            NUMBERS: {name: OnDevice(x) if isinstance(x, Tensor) else x for name, x in self.numbers().items()},
            _ARGUMENTS: inputs.names,
            "rows": inputs.counts,
            "embedding size": first.shape[1],
            "dtype": str(first.dtype),
            "device type": first.device.type,
            "sync": options.sync,
            "exchange": options.exchange,
            "memory": options.memory,
            "reduction": options.reduction,
            "checks": options.checks,
            "kernel": options.kernel,
            PRECISION: products.precision,
            _NO_KERNELS: (missing(first.device) if expected else "") or "",
            _CHOOSES: chooses(first.device),
            **loss_facts,
            **gradient_facts([*inputs.differentiable.values()]),
            "statistics": self.statistics,
        }

    def handshake_again(self, form: Form, numbers: Mapping[str, Tensor | float]) -> FactsByRank:
        """Return the facts of all ranks, of which this rank states its numbers alone."""
        transport = self.comm.transport
        host = [number for number in numbers.values() if not isinstance(number, Tensor)]
        varying = [latest_call(), choice.digest(transport.group_name), *host]
        on_device = [OnDevice(number) for number in numbers.values() if isinstance(number, Tensor)]
        return exchange(transport, form.statement.again(varying, on_device))

    def other_settings(self, by_rank: FactsByRank) -> Exception | None:
        """Return the error about a fact that must match and does not."""
        return different_facts(self.caller, by_rank, (*_MUST_MATCH, *self.checks.must_match, GRAD_ENABLED))

    def checked_values(self, numbers: Mapping[str, Tensor | float]) -> dict[str, Any]:
        """Return this rank's numbers, and facts that follow from them; ValueError for a value that is wrong."""
        values = on_host(numbers)
        self.group.canaries.check_differed(values.pop(EARLIER, 0.0))
        derive = self.checks.derive
        return {NUMBERS: self.inputs.check_values(values), _DERIVED: {} if derive is None else derive(values)}

    def without_reading(self, form: Form, key: Hashable) -> Facts | None:
        """Return the facts of a call that is like the one before; None if the host has to read its numbers."""
        seen = self.group.seen.get(self.kind(key))
        assumption = None if seen is None or seen.underflowed else seen.assumption
        if assumption is None or assumption.form is not form:
            return None
        numbers, row_numbers = self.valid_numbers(in_kernels=form.in_kernels, read=False)
        if numbers is None:
            return None
        on_device = {name: x for name, x in numbers.items() if isinstance(x, Tensor)}
        host = {name: x for name, x in numbers.items() if name not in on_device}
        if host != assumption.host or [*on_device] != [*assumption.limits]:
            return None
        self.group.canaries.differed = None  # its number is judged on the device
        judged = stacked([*on_device.values()], assumption.bounds)
        if assumption.records is not None:
            own = assumption.records[self.comm.rank][None]
            judged = exchange_unread(self.comm.transport, form.statement, own, judged)
        return self._assumed_facts(assumption, judged, row_numbers)

    def beside(self, by_rank: FactsByRank) -> Facts:
        """Return the facts of a call for which other ranks have read nothing, because theirs is like the one before.

        An error, of other settings or of a rank that took no part in that one, is raised on this rank alone.
        """
        if (mistake := self.other_settings(by_rank)) is not None:
            raise mistake
        others = by_rank.unread()
        for assumption in [seen.assumption for seen in self.group.seen.values()]:
            if assumption is None or assumption.caller != self.caller:
                continue
            judged = by_rank.words.to(assumption.bounds.device)
            if all(assumption.like(judged)[others].tolist()):
                counts = {name: rows.counts[self.comm.rank] for name, rows in assumption.agreement.rows.items()}
                return replace(self, inputs=with_rows(self.inputs, counts))._assumed_facts(assumption, judged, None)
        raise ValueError(
            f"{self.caller}: with checks='deferred', rank {others[0]} goes on as in an earlier call, in which rank "
            f"{self.comm.rank} had other settings; pass the same on all ranks, or checks='entry'"
        )

    def _assumed_facts(self, assumption: Assumption, judged: Tensor, row_numbers: RowNumbers | None) -> Facts:
        deferred = Deferred(assumption, judged, self.inputs.first[1].device)
        number = self.group.number_next_call()
        return self.facts(assumption.agreement, number, assumption.values, row_numbers, deferred=deferred)

    def kind(self, key: Hashable) -> Hashable:
        """Return what calls have in common of which all ranks keep the latest alone: on one process, all of a form."""
        if self.comm.size == 1:
            return key
        return self.caller, getattr(self.inputs.first[1], "shape", ())[1:], torch.is_grad_enabled()

    def assume(
        self,
        key: Hashable,
        form: Form,
        agreement: Agreement,
        by_rank: FactsByRank,
        columns: Mapping[str, Sequence[float]],
    ) -> Assumption | None:
        """Return what later calls of this form may assume after this one has read its numbers; None: nothing."""
        group, kind, first = self.group, self.kind(key), self.inputs.first[1]
        on_device = [name for name in columns if isinstance(self.inputs.compared.get(name, first), Tensor)]
        scalars = {name: columns[name][0] for name in self.inputs.compared}
        alone, device = self.comm.size == 1, first.device
        if (seen := group.seen.get(kind)) is None:
            keep(group.seen, kind, seen := Seen())
        seen.add(self.inputs, columns)
        bounds = bounds_of(self.inputs, on_device, scalars, seen, alone=alone)
        seen.assumption = None
        if bounds is None or not by_rank.has_one_text:
            return None
        if not alone and not self.comm.transport.stays_on_device(first):
            device = torch.device("cpu")
        host = {name: x for name, x in scalars.items() if name not in on_device}
        words = None if alone else as_unread(by_rank.words, 1 + len(on_device)).to(device)
        seen.assumption = Assumption(
            self.caller, kind, form, agreement, host, *bounds, device, words, self.inputs.positive, seen,
            group.unread, group.canaries,
        )  # fmt: skip
        return seen.assumption

    def agreement(self, by_rank: FactsByRank) -> Agreement:
        """Return what the ranks agree on, if one has rows and the inputs of all can have gradients."""
        inputs, options = self.inputs, self.options
        rows = _partitions({name: tuple(by_rank.column("rows", name)) for name in inputs.given_features})
        if rows[inputs.first[0]].total == 0:
            left_out = sum(facts.get(LEFT_OUT, 0) for facts in by_rank)
            why = f"all {left_out} rows have the label ignore_index" if left_out else "every rank passed 0 rows"
            raise ValueError(f"{self.caller}: the global batch is empty, {why}; skip the step on all ranks")
        check_inference(by_rank)
        return Agreement(
            by_rank,
            rows,
            [any(needed) for needed in zip(*by_rank.column(NEEDS_GRAD), strict=True)],
            Products(by_rank.column(PRECISION)[0], named=options.precision != "auto"),
            _may_use_kernels(self.comm, options, by_rank),
            inputs.first[1].shape[1],
            inputs.first[1].dtype,
            accumulation_dtype(inputs.first[1].dtype),
        )

    def facts(
        self,
        agreement: Agreement,
        number: int,
        values: Values,
        row_numbers: RowNumbers | None,
        *,
        derived: Mapping[str, Sequence[Any]] | None = None,
        deferred: Deferred | None = None,
        assumption: Assumption | None = None,
    ) -> Facts:
        """Return the facts of the call; its inputs enter the graph of the loss."""
        first, differentiable = self.inputs.first[1], self.inputs.differentiable
        entered = enter(join(differentiable, agreement.needs_grad), self.inputs, self.comm, self.options)
        if deferred is not None:
            entered = deferred.admit(entered)
        facts = Facts(
            **vars(agreement),
            **vars(values),
            caller=self.caller,
            call=number,
            options=self.options,
            comm=self.comm,
            rank=self.comm.rank,
            statistics=self.statistics,
            inputs=entered,
            vectors=self.inputs.given_ids,
            features_dtype=first.dtype,
            device=first.device,
            row_numbers=row_numbers,
            deferred=deferred,
            assumption=assumption,
        )
        if derived:
            facts.by_rank = facts.by_rank.plus(derived)
        return facts.in_range()


def _partitions(counts: Mapping[str, tuple[int, ...]]) -> dict[str, Partition]:
    """Return the partition of each name; equal ones are one object."""
    partitions = {rank_counts: Partition(rank_counts) for rank_counts in set(counts.values())}
    return {name: partitions[rank_counts] for name, rank_counts in counts.items()}


def _may_use_kernels(comm: Communicator, options: Options, by_rank: FactsByRank) -> bool:
    """Return whether kernels may compute tiles, the same on all ranks."""
    if options.kernel != "auto":
        return options.kernel == "triton"
    if not any(by_rank.column(_CHOOSES)):  # as on CPUs; where GPUs differ, the ranks still choose together
        return False
    why = by_rank.column(_NO_KERNELS)
    first = next((rank for rank, reason in enumerate(why) if reason), None)
    if first is not None and comm.rank == 0:
        choice.warn(f"kernel='triton' {why[first]} (rank {first})")
    return first is None


def _values_of_all(
    columns: Mapping[str, Sequence[float]] | None, rank: int, inputs: Inputs, checks: Checks
) -> dict[str, list[Any]] | None:
    """Return the facts that a loss derives from all ranks' numbers; None, on every rank, if one may be wrong."""
    if columns is None or any(columns.get(EARLIER, ())):
        return None
    for name, column in columns.items():
        if name != MIN_PAIR_PRODUCT and name not in CANARIES and not math.isfinite(sum(column)):
            return None
    if not inputs.accepts(columns):
        return None
    if checks.derive is None:
        return {}
    derived: list[Mapping[str, Any]] = [{}] * len(columns[norm_of(inputs.first[0])])
    try:
        for r in sorted(range(len(derived)), key=lambda r: r == rank):  # this rank's last: it may keep numbers
            derived[r] = checks.derive({name: column[r] for name, column in columns.items()})
    except (ValueError, IndexError):  # raised again, with this rank's values in its message, by `_check_values`
        return None
    return _by_name(derived)


def _by_name(rank_facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [facts[name] for facts in rank_facts] for name in rank_facts[0]}


def _check_equal(caller: str, scalars: Mapping[str, Sequence[float]]) -> None:
    """Raise ValueError unless each scalar is the same on all ranks, as far as engines keep parameters equal."""
    for name, values in scalars.items():
        if max(values) - min(values) > TOLERANCE * abs(values[0]):
            raise ValueError(
                f"{caller}: {name} must be the same on all ranks, got {values}; give all ranks the same initial "
                "parameters, and let the engine average its gradient like any other's"
            )

"""The numbers that a loss needs of each row and each column of S, as one autograd node.

    A_i = logsumexp_j S_ij over row i's candidates,   T_i = sum_j S_ij over its positives,   and likewise for columns

Losses are made of these vectors in plain PyTorch; S itself is never stored. A row's numbers are whole on the row's
rank; a column's are partial until the exchange has merged them. A loss says which entries are positive and which are
candidates, and which numbers it wants; the rest is here.

Backward, with N a number of the size of the batch, U = N dS Y and V = N dS^T X (see `sweep.softmax` for dS),

    d/dX     = scale / N U
    d/dY     = scale / N V, summed over the ranks, whose rows each see all of Y
    d/dscale = 1 / N sum_ij N dS_ij x_i . y_j = 1 / N <X, U> = 1 / N <Y, V>, to be summed over the ranks
    d/doffset_i = 1 / N sum_j N dS_ij, where rows have offsets

Of a symmetric S, N (dS + dS^T) Z takes the place of U and V together, and <Z, that> is twice d/dscale. What the node is
given are the derivatives by this rank's rows' and columns' numbers of one scalar, and what it returns is their adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .._autograd import once_differentiable
from .._normalize import divisors
from .._precision import accumulation_dtype, vector, wide_dtype
from ..comm import Communicator, LocalCommunicator
from ..exchange import Exchange
from ..kernels import in_triton
from ..logsumexp import cannot_underflow, count_underflowed, log_sum_exp, passes_underflow_check, shared_shift
from ..partition import Partition
from ..sweep import (
    LARGEST,
    Block,
    Budget,
    Driver,
    KeptTiles,
    KernelSoftmaxSweep,
    Selection,
    SoftmaxSweep,
    Sums,
    Weights,
)
from ._door import Agreement
from ._towers import Towers, inner, no_autocast

_DIFFERENTIABLE = ("logsumexp", "target", "logits")  # what of a row has a gradient: A, T and M


@dataclass(frozen=True)
class SoftmaxPlan:
    """What forward and backward of one call have in common.

    Args:
        comm: the ranks.
        exchange: how Y's rows travel.
        towers: how features become X and Y.
        selection: what is positive, what is a candidate.
        scale: of S.
        bound: no logit is larger.
        terms: the most candidates of a row or column.
        size: N, the size of the batch.
        rows, cols: the numbers wanted (see `sweep.softmax`), "sum" the first; empty for none. Of a symmetric S, `cols`.
        budget: of tiles.
        differentiable: whether a backward pass may follow.
        beside_target: f, where the loss adds exp(f T_i) to a row's sum, which need not be exact far below that; or 0.
        least: no logit of a pair is smaller, where each sum in the loss has one in it; None: that is not known.
        guide: this rank's rows of the guide's features of Y, if the selection has a guide.
        in_kernels: whether kernels in Triton do what they know.
        dtype: in which features are multiplied; None: in their own.
    """

    comm: Communicator
    exchange: Exchange
    towers: Towers
    selection: Selection
    scale: float
    bound: float
    terms: int
    size: int
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    budget: Budget
    differentiable: bool
    beside_target: float = 0.0
    least: float | None = None
    guide: Tensor | None = None
    in_kernels: bool = False
    dtype: torch.dtype | None = None

    @property
    def symmetric(self) -> bool:
        """Whether the columns of S are its rows: their numbers are then the rows' as well."""
        return self.exchange.symmetric

    @property
    def keep(self) -> bool:
        """Whether exp(S) is kept for the backward pass."""
        return self.differentiable and self.budget.kept > 0

    def sweep(self, data: _Data, kept: Tensor | None = None) -> SoftmaxSweep:
        """A sweep of X's rows."""
        group = self.selection.best_of
        driver = Driver(
            data.x,
            self.scale,
            side=max(1, self.budget.side // group) * group,  # no group in two tiles
            largest=self.exchange.largest_block,
            norms=data.norms,
            col_norms=data.col_norms,
        )
        memory = None if kept is None else KeptTiles(kept)
        if self.in_kernels:
            return KernelSoftmaxSweep(driver, self.selection, self.exchange.columns.total, kept=memory)
        return SoftmaxSweep(driver, self.selection, kept=memory)


@dataclass(frozen=True)
class _Data:
    """What passes are made of: this rank's rows of X, what it holds of Y, and what the sweep divides both by."""

    x: Tensor
    held: Tensor
    norms: Tensor | None  # (b, 1)
    col_norms: Tensor | None  # (B, 1), of all columns


@dataclass(frozen=True)
class Numbers:
    """What is known of this rank's rows, or of its columns: each (n,), in float64; None where it was not asked for."""

    logsumexp: Tensor
    target: Tensor | None = None
    logits: Tensor | None = None
    count: Tensor | None = None
    largest: Tensor | None = None
    effective: Tensor | None = None  # (sum E)^2 / sum E^2 over the negatives: as many equal ones would weigh the same

    def first(self, rows: int) -> Numbers:
        """Those of the first rows."""
        cut: dict[str, Any] = {}
        for field in fields(self):
            x = getattr(self, field.name)
            cut[field.name] = None if x is None else x[:rows]
        return Numbers(**cut)


def softmax_numbers(
    agreed: Agreement,
    scale: tuple[float, Any],
    features: Sequence[Tensor],
    *,
    towers: Towers,
    stays: Partition,
    travels: Partition,
    selection: Selection,
    bound: float,
    rows: tuple[str, ...] = (),
    cols: tuple[str, ...] = (),
    symmetric: bool = False,
    beside_target: float = 0.0,
    least: float | None = None,
    guide: Tensor | None = None,
    everywhere: bool = False,
    largest_offset: float = 0.0,
    narrow: bool = False,
) -> tuple[Numbers | None, Numbers | None]:
    """The numbers of this rank's rows, and of its columns.

    Args:
        agreed: what the ranks agreed on.
        scale: of S, as a number; and as what may need a gradient.
        features: which `towers` takes apart.
        towers: how features become X and Y.
        stays: who owns X's rows.
        travels: who owns Y's rows.
        selection: what is positive, what is a candidate.
        bound: no similarity's absolute value is larger.
        rows: the numbers of rows that are wanted, see `wanted`; empty for none.
        cols: those of columns; of a symmetric S none, whose columns are its rows.
        symmetric: Y is X.
        beside_target: as in :class:`SoftmaxPlan`; not where statistics ask for the negatives alone.
        least: no similarity of a pair is smaller, of which each sum in the loss has one; nor then.
        guide: as there.
        everywhere: every rank holds all of Y, as `travels`, a partition of one part, says. Numbers are then of this
            rank's rows alone, and nothing is communicated.
        largest_offset: no offset of the selection is larger, nor its negative.
        narrow: features are `agreed.widened()`, and are multiplied in the dtype that they had: nothing is lost.
    """
    if symmetric:
        rows, cols = (), rows
    offsets = selection.offsets
    if offsets is not None:
        selection = replace(selection, offsets=offsets.detach())
    asked = {*rows, *cols}
    exact = selection.over != "negatives"
    keep = "logits" not in asked and selection.bend is None
    exchange, budget = agreed.exchange(
        stays, travels, symmetric=symmetric, keep=keep, exact=exact, everywhere=everywhere
    )
    in_kernels = in_triton(agreed.options.kernel) and asked <= KernelSoftmaxSweep.fields
    dtype = agreed.features_dtype if narrow else features[0].dtype
    if in_kernels and dtype == torch.bfloat16:
        towers = replace(towers, late=towers.normalize)  # kernels multiply in the precision that features have
    plan = SoftmaxPlan(
        LocalCommunicator() if everywhere else agreed.comm,
        exchange,
        towers,
        selection,
        scale[0],
        bound=abs(scale[0]) * bound + largest_offset,
        terms=max(stays.total, travels.total),
        size=(stays if rows or symmetric else travels).total,
        rows=rows,
        cols=cols,
        budget=budget,
        differentiable=agreed.differentiable,
        beside_target=0.0 if "squares" in asked else beside_target,
        least=None if "squares" in asked or scale[0] < 0 or least is None else (beside_target or 1) * scale[0] * least,
        guide=guide,
        in_kernels=in_kernels,
        dtype=dtype if narrow else None,
    )
    # No entries, but a way back to the features, which are not all saved: by it a second derivative is refused.
    anchor = torch.cat([feature[:0].flatten() for feature in features])
    outputs = list(_Softmax.apply(plan, anchor, scale[1], offsets, *features))
    sides: list[Numbers | None] = []
    for names in (_names(rows), _names(cols)):
        of_side, outputs = outputs[: len(names)], outputs[len(names) :]
        sides.append(Numbers(**dict(zip(names, of_side, strict=True))) if names else None)
    return (sides[1], None) if symmetric else (sides[0], sides[1])


def wanted(*, target: bool = True, mean_logit: bool = False, statistics: bool = False) -> tuple[str, ...]:
    """Names of the numbers of a side: always A; T; M and the candidates' number; what statistics are made of."""
    names = ["sum", *(["target"] if target else []), *(["logits", "count"] if mean_logit else [])]
    return (*names, *(["largest", "negatives", "squares"] if statistics else []))


class _Softmax(torch.autograd.Function):
    @staticmethod
    @no_autocast
    def forward(
        ctx: Any, plan: SoftmaxPlan, anchor: Tensor, scale: Any, offsets: Any, *features: Tensor
    ) -> tuple[Tensor, ...]:
        x, y, norms = plan.towers.join([z if plan.dtype is None else z.to(plan.dtype) for z in features])
        travels = y if plan.guide is None else torch.cat([y.to(plan.guide.dtype), plan.guide], dim=1)
        col_norms = plan.towers.travel_norms
        if plan.towers.late and norms is not None:
            col_norms = plan.comm.all_gather(norms, counts=plan.exchange.columns.counts, check=False)
        data = _Data(x, plan.exchange.fetch(travels), *_by_sweep(plan, norms, col_norms))
        rows, cols, kept = _statistics(plan, data)

        ctx.plan, ctx.shifts = plan, [side.shift for side in (rows, cols)]
        ctx.offsets_dtype = None if offsets is None else offsets.dtype
        ctx.features = [(len(feature), feature.dtype) for feature in features]
        shifts = [side.shift if isinstance(side.shift, Tensor) else None for side in (rows, cols)]
        sums = [side.fields.get("sum") for side in (rows, cols)]
        scale = scale if isinstance(scale, Tensor) else None
        ctx.save_for_backward(anchor, scale, x, y, norms, data.held, col_norms, kept, *sums, *shifts)
        outputs = [_outputs(side) for side in (rows, cols)]
        constant = [x for side in outputs for name, x in side.items() if name not in _DIFFERENTIABLE]
        ctx.mark_non_differentiable(*constant)
        return tuple(x for side in outputs for x in side.values())

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: SoftmaxPlan = ctx.plan
        _, scale, x, y, norms, held, col_norms, kept, row_sums, col_sums, row_shifts, col_shifts = ctx.saved_tensors
        _, _, want_scale, want_offsets, *want_features = ctx.needs_input_grad
        want_x, want_y = plan.towers.wanted(want_features)
        if want_scale and not want_x and not want_y:
            want_y = plan.symmetric or norms is not None
            want_x = not want_y
        u = v = of_offsets = None
        if want_offsets:
            of_offsets = torch.zeros(len(x), dtype=accumulation_dtype(x.dtype), device=x.device)
        if want_x or want_y or want_offsets:
            if (unit := _unit(plan, x.dtype, grads)) is not None:
                grads = tuple(grad / unit for grad in grads)
            of_rows, of_cols = grads[: len(_names(plan.rows))], grads[len(_names(plan.rows)) :]
            rows = _weights(plan, plan.rows, of_rows, row_sums, ctx.shifts[0] if row_shifts is None else row_shifts)
            cols = _weights(plan, plan.cols, of_cols, col_sums, ctx.shifts[1] if col_shifts is None else col_shifts)
            data = _Data(x, held, *_by_sweep(plan, norms, col_norms))
            u, v = _products(plan, data, kept, rows, cols, want_x, want_y, of_offsets)
            if unit is not None:
                u, v, of_offsets = (None if of is None else of.mul_(unit) for of in (u, v, of_offsets))

        grad_scale = None
        if want_scale:
            late = divisors(norms) if plan.towers.late and norms is not None else None
            share = inner(y, v, late) if v is not None else inner(x, u)
            grad_scale = (share / (plan.size * (2 if plan.symmetric else 1))).to(scale).view_as(scale)
        if of_offsets is not None:
            of_offsets = of_offsets.div_(plan.size).to(ctx.offsets_dtype)
        factor = plan.scale / plan.size
        dx, dy = (None if gradient is None else gradient.mul_(factor) for gradient in (u, v))
        wanted = [(want, *of) for want, of in zip(want_features, ctx.features, strict=True)]
        return None, None, grad_scale, of_offsets, *plan.towers.split(dx, dy, x, y, norms, wanted)


def _unit(plan: SoftmaxPlan, dtype: torch.dtype, grads: Sequence[Tensor]) -> Tensor | None:
    """What brings dS into the range of float16, shape (), the same on all ranks; None where nothing has to.

    |dS_ij| is at most the sum of what i and j weigh, and that is multiplied by a scale for the loss, perhaps.
    """
    if dtype != torch.float16 or not plan.in_kernels:
        return None
    largest = torch.stack([grad.abs().amax() if len(grad) else grad.new_zeros(()) for grad in grads]).sum()
    largest = plan.comm.all_reduce(largest * (plan.size * (2 if plan.symmetric else 1)), "max", check=False)
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def _by_sweep(plan: SoftmaxPlan, norms: Tensor | None, col_norms: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What the sweep divides X's rows and Y's by, where it is the sweep that does."""
    of_rows = norms if plan.towers.late else plan.towers.stay_norms
    return (None if of_rows is None else divisors(of_rows), None if col_norms is None else divisors(col_norms))


def _names(fields: tuple[str, ...]) -> list[str]:
    """What of a side goes out."""
    return [{"sum": "logsumexp", "squares": "effective"}.get(name, name) for name in fields if name != "negatives"]


def _outputs(side: Sums) -> dict[str, Tensor]:
    """The numbers of a side, from its fields."""
    made = {}
    for name, field in side.fields.items():
        if name == "sum":
            made["logsumexp"] = log_sum_exp(side.shift, field)
        elif name == "squares":
            made["effective"] = torch.where(field > 0, side.fields["negatives"].square() / field, 0.0)
        elif name != "negatives":
            made[name] = field.clone()
    return made


def _statistics(plan: SoftmaxPlan, data: _Data) -> tuple[Sums, Sums, Tensor | None]:
    """All sums of this rank's rows and columns: under one shift if that is certain to do, else each with its own."""
    dtype = accumulation_dtype(data.x.dtype)
    shift = shared_shift(plan.bound, plan.terms, dtype)
    if shift is not None:
        kept = data.x.new_empty(plan.budget.kept, dtype=plan.budget.kept_dtype) if plan.keep else None
        rows, cols = _sums(plan, data, shift, shift, kept)
        if _known_to_do(plan, shift, dtype) or certified(plan.comm, _in_loss(plan, rows, cols), plan.terms, dtype):
            return rows, cols, kept
        del rows, cols, kept
    row_max, col_max = _maxima(plan, data)
    return *_sums(plan, data, row_max, col_max, None), None


def _known_to_do(plan: SoftmaxPlan, shift: float, dtype: torch.dtype) -> bool:
    """Whether one shift is certain to do, without a look at sums: no GPU has to be waited for."""
    if cannot_underflow(plan.bound, shift, dtype):
        return True
    return plan.least is not None and passes_underflow_check(plan.least, shift, plan.terms, dtype)


def certified(comm: Communicator, sums: Sequence[Tensor], terms: int, dtype: torch.dtype) -> bool:
    """Whether all of these sums of all ranks are exact to rounding. Collective: one all-reduce of a number."""
    bad = torch.stack([count_underflowed(of_side, terms, dtype) for of_side in sums]).sum()
    return not comm.all_reduce(bad.to(wide_dtype(bad.device)), check=False).item()


def _in_loss(plan: SoftmaxPlan, rows: Sums, cols: Sums) -> list[Tensor]:
    """The sums as the loss has them: with the pair's own exponential, if it adds that."""
    sums = []
    for side, other in ((rows, cols), (cols, rows)):
        if side.fields:
            of_side = side.fields["sum"]
            if plan.beside_target:  # a pair's logit is that of its row and of its column
                target = side.fields["target"] if "target" in side.fields else other.fields["target"]
                of_side = of_side + (plan.beside_target * target - side.shift).exp()
            sums.append(of_side)
    return sums


def _maxima(plan: SoftmaxPlan, data: _Data) -> tuple[Tensor | None, Tensor | None]:
    """The largest logit of each row, and of each column kept, where they are wanted; 0 without candidates."""
    x = data.x
    nothing = x.new_full((1, 1), float("-inf"), dtype=accumulation_dtype(x.dtype))
    row_max = nothing[0].repeat(len(x)) if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(data)

    def visit(block: Block, _carried: Tensor | None, into: Tensor | None, local: Tensor | None) -> None:
        rows = local if plan.symmetric else row_max
        sweep.maxima(block, None if rows is None else rows.view(-1), None if into is None else into[:, 0])

    col_max = plan.exchange.accumulate(data.held, visit, initial=nothing if plan.cols else None, op="max")
    if col_max is not None:
        col_max = plan.exchange.reduce(col_max, "max")[:, 0]
    row_max, col_max = (None if m is None else m.masked_fill(m.isneginf(), 0.0) for m in (row_max, col_max))
    return row_max, col_max


def _sums(
    plan: SoftmaxPlan,
    data: _Data,
    row_shift: Tensor | float | None,
    col_shift: Tensor | float | None,
    kept: Tensor | None,
) -> tuple[Sums, Sums]:
    """The fields of this rank's rows and columns, relative to one shift, or to (b,) and (columns kept,) of them."""
    x, wide, local_cols = data.x, wide_dtype(data.x.device), plan.exchange.kept_local
    row_fields = _initial(plan.rows, x, wide).repeat(len(x), 1) if plan.rows and not plan.symmetric else None
    sweep = plan.sweep(data, kept)
    ops = tuple("max" if name == "largest" else "sum" for name in plan.cols)
    carried = col_shift[None] if isinstance(col_shift, Tensor) else None
    if plan.symmetric and isinstance(col_shift, Tensor):
        row_shift = col_shift[local_cols]

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, local: Tensor | None) -> None:
        rows = _named(row_shift, plan.cols, local) if plan.symmetric else _named(row_shift, plan.rows, row_fields)
        sweep.sums(block, rows, _named(col_shift if carried is None else carried[0], plan.cols, into))

    collected = plan.exchange.accumulate(
        data.held,
        visit,
        carried=carried,
        initial=_initial(plan.cols, x, wide) if plan.cols else None,
        op=ops,
    )
    if collected is not None:
        collected = plan.exchange.reduce(collected, ops)[local_cols].clone()
        col_shift = col_shift[local_cols] if isinstance(col_shift, Tensor) else col_shift
    nothing = Sums(0.0, {})
    return _named(row_shift, plan.rows, row_fields) or nothing, _named(col_shift, plan.cols, collected) or nothing


def _initial(fields: tuple[str, ...], x: Tensor, dtype: torch.dtype) -> Tensor:
    """What each of the fields begins with, (1, k)."""
    return vector([float("-inf") if name == "largest" else 0.0 for name in fields], dtype, x.device)[None]


def _named(shift: Tensor | float | None, names: tuple[str, ...], fields: Tensor | None) -> Sums | None:
    """Numbers (n, k) under their names."""
    if fields is None:
        return None
    assert shift is not None
    return Sums(shift, dict(zip(names, fields.unbind(1), strict=True)))


def _weights(
    plan: SoftmaxPlan,
    fields: tuple[str, ...],
    grads: Sequence[Tensor],
    sums: Tensor | None,
    shift: Tensor | float,
) -> Weights | None:
    """N times the derivatives by a side's numbers, in the form in which a sweep takes them."""
    if sums is None:
        return None
    of = {name: plan.size * grad for name, grad in zip(_names(fields), grads, strict=True)}
    per_exponential = torch.where(of["logsumexp"] == 0, 0.0, of["logsumexp"] / sums)
    return Weights(shift, per_exponential, of.get("target"), of.get("logits"))


def _products(
    plan: SoftmaxPlan,
    data: _Data,
    kept: Tensor | None,
    rows: Weights | None,
    cols: Weights | None,
    want_x: bool,
    want_y: bool,
    of_offsets: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """U, and V at home; of a symmetric S, both in one, in the place of V. N times the offsets' gradient is added up."""
    x, dtype = data.x, accumulation_dtype(data.x.dtype)
    u = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want_x else None
    sweep = plan.sweep(data, kept)
    if plan.symmetric:
        rows = cols
    carried = None if cols is None else plan.exchange.distribute(cols.stacked())

    def visit(block: Block, carried: Tensor | None, into: Tensor | None, local: Tensor | None) -> None:
        of_block = None if cols is None or carried is None else cols.unstacked(carried)
        sweep.gradients(block, rows, of_block, u=local if plan.symmetric else u, v=into, of_offsets=of_offsets)

    initial = x.new_zeros(1, x.shape[1], dtype=dtype) if want_y else None
    return u, plan.exchange.accumulate(data.held, visit, carried=carried, initial=initial, to_owner=True)

"""The module that holds a declared loss, and computes it on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from .._base.checks import check_flag, on_host
from .._base.settings import shown
from .._base.spelling import did_you_mean
from .._base.warnings import warn
from ..comm import Group
from ..comm.modules import built
from ..comm.select import check_group
from ..contract import Checking, Checks, Facts, Options, Reduction, agree, entry, prepared
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..sweep import Memory, Precision
from ..sync import Sync
from ..tokens import Tokens
from .arguments import NOTHING, Arguments, check_parameters
from .call import CALLER, Call
from .declaration import REMEMBERED, Declaration
from .fingerprint import fingerprint
from .function_checks import Reads, check_same_values
from .lowered_terms import factors, names_of_factors
from .lowering import Lowered, lowered, may_be_lowered
from .reductions import Term
from .reference import Dense, OwnCandidates
from .similarity import Similarity
from .step_counts import tiles_held

_READS = "names that functions read"
_FINGERPRINT = "the fingerprint of the declared functions, with the values that they capture,"
_VALUES = "values of the functions on fixed numbers"
_NOT_COMPILED = "why tiles are not compiled"
_CONSTANT = "similarities without a gradient"
_DTYPES = "names and dtypes of x_data, y_data and candidate_data"
_TILES = "how many times two tiles a step holds"
_PASSES = "passes over S"


@dataclass(frozen=True)
class _Agreed:
    """The facts that follow from those of all ranks: `passes` and `not_compiled` of each rank."""

    reads: Reads
    passes: Sequence[list[Any]]
    tiles: int
    constant: frozenset[str]
    not_compiled: Sequence[str]

    @classmethod
    def of(cls, facts: Facts) -> _Agreed:
        """Return them, or raise ValueError, on all ranks, if the functions have other values on a rank."""
        check_same_values(CALLER, facts.of_ranks(_VALUES))
        return cls(
            Reads.union(facts.of_ranks(_READS)),
            facts.of_ranks(_PASSES),
            max(facts.of_ranks(_TILES)),
            frozenset.intersection(*map(frozenset, facts.of_ranks(_CONSTANT))),
            facts.of_ranks(_NOT_COMPILED),
        )


class PairLoss(nn.Module):
    r"""A loss over all pairs of a batch that is given by its formula: terms, and how a row combines them.

    R_k(i) = reduction over candidates j of f_k(s_ij, x_i, y_j, p),    L = sum_i w_i F(R_1(i), ..., x_i, p) / sum_i w_i

    plus the same over columns with `column_loss`. Candidates are the rows of y on all ranks; S is never stored.

    Args:
        terms: reductions by name: :class:`wholebatch.terms.LogSumExp`, `Sum`, `Mean`, `Count`, `Max`, `Min`, `Partner`.
            Their scores f(s, x, y, p) and masks where(x, y), (x, y, s) or (x, y, s, p) treat each pair by itself:
            x.name and y.name are data of its row and its column, p.name are parameters. x.index and y.index number the
            rows of all ranks. x.partner (y.partner) is the similarity of a row (column) with its partner.
        row_loss: F(r, x, p) -> losses of rows, (b,), or (losses, weights); r.name are reductions. It mixes no rows.
        column_loss: likewise of columns, (r, y, p); None: there is none.
        similarity: s: "dot", "cosine", "neg_squared_distance", or a mapping of names to these. Then x and y are
            mappings with these names, and a score reads s.name. Or "max_sim", late interaction: x and y have several
            vectors in each row, and s_ij = sum_t max_u x_it . y_ju.
        symmetric: whether S and all functions are symmetric, so that rows are columns; checked on a tile.
        reduction: "mean", "sum" (over sum_i w_i F_i), or "none": w_i F_i of this rank's rows, (b_r,).
        parameters: numbers, tensors, or modules such as :class:`wholebatch.Scale`, by name. A torch.nn.Parameter is
            learned; other tensors are buffers. In a call, they and data are moved to the device of the features.
        compile_tiles: whether torch.compile fuses the functions of a tile; "auto": on a GPU, for terms that have no
            faster way. The first step takes seconds longer, and needs a compiler. Without one, a warning says so, and
            the loss is computed as without this option.
        group, sync, exchange, memory, precision: as in :func:`wholebatch.functional.clip_loss`.
        kernel: likewise; kernels compute terms that take the softmax sweep, docs/pair_losses_cost.md says which.
        checks: "entry"; "deferred" is refused by the call, which compares functions between ranks.

    Attributes:
        computed_by: after a call, what has computed its terms: "softmax sweep", "sigmoid sweep", "compiled tiles" or
            "tiles". docs/pair_losses_cost.md says which terms take which.

    Raises:
        ValueError: for an argument that is no such thing.

    >>> import torch, wholebatch as wb
    >>> others = wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s)
    >>> own = wb.terms.Partner(lambda s, x, y, p: p.scale * s)
    >>> loss_fn = wb.PairLoss({"all": others, "own": own}, lambda r, x, p: r.all - r.own, parameters={"scale": 1.0})
    >>> loss_fn(torch.eye(3), torch.eye(3))
    tensor(0.5514)
    >>> loss_fn.computed_by
    'softmax sweep'
    """

    def __init__(
        self,
        terms: Mapping[str, Term],
        row_loss: Callable[..., Any] | None,  # losses, or (losses, weights)
        *,
        column_loss: Callable[..., Any] | None = None,  # likewise
        similarity: Similarity = "dot",
        symmetric: bool = False,
        reduction: Reduction = "mean",
        parameters: Mapping[str, Any] = NOTHING,  # numbers, tensors or modules
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        kernel: Kernel = "auto",
        precision: Precision = "auto",
        checks: Checking = "entry",
        compile_tiles: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        symmetric = check_flag("symmetric", symmetric)
        if not isinstance(compile_tiles, bool) and (not isinstance(compile_tiles, str) or compile_tiles != "auto"):
            raise ValueError(f"compile_tiles must be True, False or 'auto', got {shown(compile_tiles)}")
        self.declaration = Declaration.of(
            terms, row_loss, column_loss, similarity, symmetric=symmetric, compiles=compile_tiles
        )
        check_group(group)
        self.options = Options(group, sync, exchange, memory, reduction, kernel, precision, checks)
        self.options.check()
        self.values, self._constants, self._number = nn.Module(), dict[str, Any](), next(built)
        check_parameters(parameters)
        for name, value in parameters.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise ValueError(
                    f"parameters[{name!r}] must be a number, a leaf or a module in the constructor, got a computed "
                    "tensor with a graph, which lasts for one backward pass; pass it in each call"
                )
            if isinstance(value, Tensor | nn.Module) and hasattr(self.values, str(name)):
                raise ValueError(f"parameters must not have the name {name!r}, which every torch.nn.Module has")
            if isinstance(value, nn.Parameter):
                self.values.register_parameter(name, value)
            elif isinstance(value, Tensor):
                self.values.register_buffer(name, value)
            elif isinstance(value, nn.Module):
                self.values.add_module(name, value)
            else:
                self._constants[name] = value
        self._said, self._said_reason, self.computed_by = False, False, ""
        self._tiles: dict[str, int] = {}
        self._lowered: dict[str, Lowered | None] = {}  # by the kind of call

    @entry
    def forward(
        self,
        x: Tensor | Tokens | Mapping[str, Tensor],
        y: Tensor | Tokens | Mapping[str, Tensor] | None = None,
        *,
        x_data: Mapping[str, Tensor] = NOTHING,
        y_data: Mapping[str, Tensor] = NOTHING,
        candidates: Tensor | Mapping[str, Tensor] | None = None,
        candidate_data: Mapping[str, Tensor] = NOTHING,
        candidate_offsets: Tensor | None = None,
        parameters: Mapping[str, Any] = NOTHING,  # numbers, tensors or modules
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            x: (b_r, d), this rank's rows, as they are. b_r may differ between ranks and may be 0. float64, float32,
                bfloat16 or float16.
            y: (n_r, d), this rank's columns; None: the rows of x are the columns, too. With similarity="max_sim" x and
                y are (b_r, t, d) and (n_r, u, d), or :class:`wholebatch.Tokens` with a mask or packed.
            x_data: numbers of rows by name, (b_r,) each, of any dtype. Floating ones may have a gradient.
            y_data: numbers of columns, (n_r,) each.
            candidates: (b_r, h, d), each row's own further candidates, for terms with over="own" or "both"; or (k, d)
                with `candidate_offsets`.
            candidate_data: numbers of own candidates, (b_r, h), or (k,).
            candidate_offsets: (b_r + 1,) integers: row i has the candidates from its offset up to the
                next.
            parameters: as in the constructor, for this call; equal on all ranks.
            weights: (b_r,), >= 0, of rows; of columns as well, if there are as many on each rank.

        Collectives: forward 1 handshake, and 3 all-to-alls for each partner by `pair`. Terms that take the softmax
        sweep: those of :func:`wholebatch.functional.clip_loss` for each pass, 1 all-gather of each integer that a mask
        compares. Else 1 all-gather of each number of y, those of the exchange for Y, 3 all-reduces of columns' numbers,
        3 all-to-alls for each maximum or minimum; backward 1 handshake, those of the exchange, 1 reduce-scatter of
        learned numbers of columns, partners in scores among them, and 1 all-reduce of parameters. Memory beyond inputs
        and gradients: a few tiles, O(b_r d), and O(B) numbers.

        Raises:
            ValueError: on every rank, whichever rank made the mistake.
            RuntimeError: if the gradient is differentiated again.
        """
        data = {"x_data": x_data, "y_data": y_data, "candidate_data": candidate_data}
        own = {"candidates": candidates, "candidate_offsets": candidate_offsets}
        call, passes, (functions, certain) = prepared(
            CALLER, self.options.group, lambda: self._prepared(x, y, **data, **own, parameters=parameters)
        )
        names = names_of_factors(len(self.declaration.terms)) if functions else []
        checks = Checks(
            check=lambda: self._facts(call, passes),
            read_back=lambda: factors(passes, names, call, call.x.device) if names else {},
            from_first=names,
            must_match=(_FINGERPRINT, _DTYPES),
            settings=self._settings(call, passes) if functions else None,
            reads="its functions are compared between ranks",
        )
        inputs = call.inputs(weights, matching=self.declaration.multiplies_partners)
        facts = agree(CALLER, self.options, inputs, checks)
        agreed = facts.once("declared", lambda: _Agreed.of(facts))
        self.declaration.agreed(agreed.reads)
        self._warn_of_unread_terms()
        self._stop_compiling(agreed.not_compiled)
        pass_factors, lowered_as = [facts.scalars[name] for name in names], None
        if passes is not None and may_be_lowered(agreed.passes, pass_factors, in_kernels=facts.kernels):
            lowered_as = passes, pass_factors
        kernels = self.declaration.kernels_on(facts.device, certain=certain)
        loss = Call(
            self.declaration,
            call,
            facts.widened(),
            tiles=agreed.tiles,
            signature=functions,
            kernels=kernels,
            constant=agreed.constant,
            passes=lowered_as,
        ).loss()
        tiles = "tiles" if kernels is None or kernels.failure else "compiled tiles"
        self.computed_by = tiles if lowered_as is None else lowered_as[0].sweep
        if facts.comm.size == 1:  # several ranks say it together at their next call: under -W error all raise
            self._stop_compiling([self._not_compiled])
        return loss

    def reference(
        self,
        x: Tensor | Tokens | Mapping[str, Tensor],
        y: Tensor | Tokens | Mapping[str, Tensor] | None = None,
        *,
        x_data: Mapping[str, Tensor] = NOTHING,
        y_data: Mapping[str, Tensor] = NOTHING,
        candidates: Tensor | Mapping[str, Tensor] | None = None,
        candidate_data: Mapping[str, Tensor] = NOTHING,
        candidate_offsets: Tensor | None = None,
        parameters: Mapping[str, Any] = NOTHING,  # numbers, tensors or modules
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L of the rows given, from one dense matrix, without communication; arguments as in `forward`.

        Raises:
            ValueError: as in `forward`.
        """
        data = {"x_data": x_data, "y_data": y_data, "candidate_data": candidate_data}
        own = {"candidates": candidates, "candidate_offsets": candidate_offsets}
        call = arguments_of(self, x, y, **data, **own, parameters=parameters)
        inputs = call.inputs(weights)
        inputs.check_features()
        inputs.check_rest()
        inputs.check_values(on_host(inputs.numbers()))
        kinds, sizes = self.declaration.kinds, list(call.widths.values())
        x_parts, y_parts, own_parts = (
            None if features is None else dict(zip(kinds, features.split(sizes, dim=1), strict=True))
            for features in (call.x, call.x if call.y is None else call.y, call.candidates)
        )
        assert x_parts is not None
        assert y_parts is not None
        own_candidates = None if own_parts is None else OwnCandidates(own_parts, call.candidate_data, call.owners)
        y_data = call.x_data if call.y is None else call.y_data
        lengths = None if call.x_lengths is None or call.y_lengths is None else (call.x_lengths, call.y_lengths)
        whole = Dense(self.declaration, x_parts, y_parts, call.x_data, y_data, own_candidates, call.parameters, lengths)
        return whole.loss(weights, self.options.reduction)

    def _current_parameters(self) -> dict[str, Any]:
        values = self.values
        return {**self._constants, **values._parameters, **values._buffers, **values._modules}

    def _prepared(self, *features: Any, **call_arguments: Any) -> tuple[Arguments, Lowered | None, tuple[str, bool]]:
        """Return the arguments, the terms as passes over S, and the fingerprint of the functions with its certainty."""
        call = arguments_of(self, *features, **call_arguments)
        if not _has_features(call):  # `agree` refuses it
            return call, None, ("", False)
        functions, certain = self.declaration.fingerprint
        form = self.declaration.form
        if form not in self._lowered or not certain:  # a fingerprint may not see all that a function reads
            if len(self._lowered) >= REMEMBERED:
                self._lowered.clear()
            self._lowered[form] = lowered(self.declaration, call)
        return call, self._lowered[form], (functions, certain)

    def _settings(self, call: Arguments, passes: Lowered | None) -> tuple[Hashable, ...]:
        """Return all that this rank's facts depend on, but for the kinds of tensors."""
        kinds = self.declaration.form, repr(None if passes is None else passes.facts)
        return self._number, *kinds, self._not_compiled, self._tiles_of(call), call.constant

    def _facts(self, call: Arguments, passes: Lowered | None) -> dict[str, Any]:
        return {
            _FINGERPRINT: {name: fingerprint(function) for name, function in self.declaration.functions.items()},
            _VALUES: self.declaration.values,
            _READS: self.declaration.reads.names,
            _NOT_COMPILED: self._not_compiled,
            _TILES: self._tiles_of(call),
            _PASSES: [] if passes is None else passes.facts,
            _DTYPES: call.signature[0],
            _CONSTANT: sorted(call.constant),
        }

    @property
    def _not_compiled(self) -> str:
        return self.declaration.kernels.failure

    def _stop_compiling(self, reasons: Sequence[str]) -> None:
        """Stop compiling on all ranks if one of them could not."""
        reason = next(filter(None, reasons), "")
        if reason and not self._said_reason:
            self.declaration.kernels.give_up(reason)
            self._said_reason = True
            warn(f"PairLoss computes without compiled functions from now on. {reason}")

    def _tiles_of(self, call: Arguments) -> int:
        """Return how many times two tiles a step holds; only a number of bytes as `memory` asks for it."""
        if not isinstance(self.options.memory, int):
            return 1
        kind = repr([*call.signature[:1], *call.signature[2:], call.learned, [*call.parameters]])
        if kind not in self._tiles:
            self._tiles[kind] = tiles_held(self.declaration, call)
        return self._tiles[kind]

    def _warn_of_unread_terms(self) -> None:
        if self.declaration.unread and not self._said:
            self._said = True
            names = ", ".join(self.declaration.unread)
            warn(f"PairLoss does not compute terms that neither side reads: {names}")

    def _check_names(self, parameters: Any, known: Mapping[str, Any]) -> None:
        """Raise ValueError for a parameter of a call that nothing reads, and whose name is nearly that of another."""
        for name in parameters:
            if name not in known and name not in self.declaration.reads.p:
                meant = did_you_mean(name, {*known, *self.declaration.reads.p}, cutoff=0.75)
                if meant:
                    raise ValueError(f"parameters[{name!r}] is read by no function of this loss{meant}")

    def extra_repr(self) -> str:
        terms = ", ".join(f"{name}={term!r}" for name, term in self.declaration.terms.items())
        options = f"reduction={self.options.reduction!r}, sync={self.options.sync!r}"
        return f"{terms}, similarity={self.declaration.kinds!r}, {options}"


def _has_features(call: Arguments) -> bool:
    return isinstance(call.x, Tensor) and call.x.is_floating_point() and not call.x.is_meta


def arguments_of(loss_fn: PairLoss, *features: Any, parameters: Any = NOTHING, **rest: Any) -> Arguments:
    """Return the checked arguments of a call, without weights; those of `forward`, without communication."""
    known = loss_fn._current_parameters()
    if isinstance(parameters, Mapping):  # `Arguments.of` refuses others
        parameters = {**known, **parameters}
    call = Arguments.of(loss_fn.declaration.kinds, *features, parameters=parameters, **rest)
    if _has_features(call):  # else `agree` refuses it
        loss_fn.declaration.use(call)
        loss_fn._check_names(parameters, known)
    return call

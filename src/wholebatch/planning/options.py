"""What fits, and what it costs: every exchange, memory mode and caching of a step, and which of them to take.

A rank's memory at the peak of a step:

    model + features + max(activations + loss, gradients)         all rows encoded at once
    model + features + representations + max(kept graphs + max(loss, a chunk's activations),
                               gradients + max(a chunk's activations, other kept graphs))        GradCache

(Gradients of parameters appear in the backward pass. GradCache has representations once more, as leaves.)
A step's time: the loss's, and of the encoders 3 forward passes' multiply-adds (1 forward, 2 backward), 4 where a chunk
is encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from typing import Any, TypeGuard

import torch

from .._meter import free_memory
from .._user_error import UserError
from ..sweep.memory import Memory
from .rates import DEVICES, Rates, given
from .work import LOSSES, ExchangeUsed, LossName, Shapes, Work, work_of

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_MODULES: dict[LossName, str] = {
    "clip": "wb.CLIPLoss", "info_nce": "wb.InfoNCELoss", "siglip": "wb.SigLIPLoss", "nt_xent": "wb.NTXentLoss",
    "sup_con": "wb.SupConLoss", "partial_fc": "wb.PartialFC",
}  # fmt: skip
_USABLE = 0.9  # of a device's memory; the rest is CUDA's, NCCL's and what an allocator cannot give out again
_LEAST_KEPT = 0.1  # of S, below which keeping a part is not worth a line
_LARGEST = 2**40
_ALIKE = 0.05  # of the chunks
_NEARLY = 1.1  # times the fastest: rates are not known better than that


@dataclass(frozen=True)
class Step:
    """What is planned, beside the settings that are chosen.

    Args:
        shapes: of the loss.
        model: bytes of parameters, optimiser and what else is there throughout.
        gradients: bytes of the parameters' gradients, which appear in the backward pass.
        activations: bytes that each encoder keeps of a row for its backward pass; empty: not known.
        forward: flops of encoding an example, all towers.
    """

    shapes: Shapes
    model: int
    gradients: int
    activations: tuple[int, ...]
    forward: float

    def of_batch(self, batch: int) -> Step:
        """The same with another batch."""
        return replace(self, shapes=replace(self.shapes, batch=batch))


@dataclass(frozen=True)
class Setting:
    """What one may choose.

    Args:
        exchange: how features travel.
        kept_size: bytes of each entry of exp(S) that is kept; 0: "flat".
        kept_bytes: of all that is kept, where that is a part.
        chunk: rows that are encoded at a time; None: all.
        kept_graphs: chunks that are not encoded again.
    """

    exchange: ExchangeUsed
    kept_size: int = 0
    kept_bytes: int | None = None
    chunk: int | None = None
    kept_graphs: int = 0

    def memory(self, shapes: Shapes) -> Memory:
        """As the loss takes it."""
        if not self.kept_size:
            return "flat"
        return shapes.memory_for(self.kept_size) if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class Option:
    """A setting and what it takes, on the rank with most.

    Args:
        exchange: "gather" or "ring"; "" on one rank, where nothing travels.
        memory: "flat" or bytes, as the loss takes it.
        kept: the part of exp(S) that is kept, from 0 to 1.
        kept_size: bytes of each of its entries.
        chunk: rows that are encoded at a time; None: all at once.
        kept_graphs: chunks that are not encoded again.
        encoded_again: the part of all chunks that is, from 0 to 1.
        peak: bytes at the peak of a step.
        of_loss: of them, the loss's, beside features and gradients.
        wire: bytes that a rank sends in a step.
        flops: of a step.
        seconds: of a step, by the plan's rates.
        fits: whether the peak is within the plan's limit.
        largest_batch: over all ranks, with which it fits; 0: with none.
        auto: whether the library takes it by itself.
        call: to paste.
        call_of_largest: to paste for the largest batch, whose bytes differ.
    """

    exchange: str
    memory: Memory
    kept: float
    kept_size: int
    chunk: int | None
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


@dataclass(frozen=True)
class Plan:
    """The outcome of :func:`wholebatch.plan`.

    Args:
        loss: its name.
        batch: B.
        dim: d.
        ranks: W.
        dtype: of features.
        device: as it was named.
        limit: bytes that a rank may take.
        rates: with which times are predicted.
        options: all of them; first without caching.
        chosen: the fastest that fits, or one within a tenth of it; None: none fits.
        encoders: whether times are with the encoders'.
    """

    loss: LossName
    batch: int
    dim: int
    ranks: int
    dtype: str
    device: str
    limit: int
    rates: Rates
    options: tuple[Option, ...]
    chosen: Option | None
    encoders: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "chosen": None if self.chosen is None else self.options.index(self.chosen)}

    def __str__(self) -> str:
        from .table import text

        return text(self)


def plan(
    *,
    batch: int,
    dim: int,
    ranks: int = 1,
    loss: LossName | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    memory_limit: int | None = None,
    model_bytes: int = 0,
    gradient_bytes: int = 0,
    encoder_bytes: int | Sequence[int] = 0,
    encoder_flops: float = 0.0,
    chunk: int | None = None,
    keep_graphs: int | None = None,
    classes: int | None = None,
    sample_rate: float | None = None,
    bandwidth: float | None = None,
    rates: Rates | None = None,
) -> Plan:
    r"""What each way to compute a loss takes on each rank, what fits, and the largest batch that does.

    peak = model + features + max(activations + loss, gradients),    or with gradient caching as `planning.options` says

    Nothing is run: shapes in; bytes, flops and seconds out. `exchange="auto"` and `memory="auto"` of a loss are decided
    by the same functions, on torch.distributed's gloo and NCCL.

    Args:
        batch: B, examples on all ranks: pairs; images of SupCon and of classes.
        dim: d, numbers of a feature.
        ranks: W.
        loss: "clip", "info_nce", "siglip", "nt_xent", "sup_con" or "partial_fc"; None: "partial_fc" with classes, else
            "clip".
        dtype: of the features, a torch.dtype or its name ("float32", "bf16", ...).
        device: "cpu", "cuda" (the GPU here), or a card: "t4", "v100", "l4", "rtx4090", "a100", "h100", "h200", "b200".
        memory_limit: bytes that a rank may take; None: nine tenths of a named card's memory, what is free on the GPU
            here, or what is free here, divided among the ranks.
        model_bytes: of parameters, optimiser and all else that a rank holds throughout.
        gradient_bytes: of the parameters' gradients, which appear in the backward pass (`zero_grad`'s default).
        encoder_bytes: of the activations that an encoder keeps of one row for its backward pass; one number for all
            encoders, or one for each. With it, gradient caching is planned as well.
        encoder_flops: of the forward pass of one example through all encoders.
        chunk: rows of a chunk of :class:`wholebatch.GradCache`; None: so many that four fit.
        keep_graphs: of these chunks, how many are not encoded again; None: none, and as many as fit.
        classes: C, on all ranks, of :class:`wholebatch.PartialFC`.
        sample_rate: of :class:`wholebatch.PartialFC`; 1 if not given.
        bandwidth: bytes per second that a rank sends, in the place of the device's.
        rates: measured ones, of `wholebatch.planning.calibrate`; None: given ones.

    Returns:
        A :class:`wholebatch.planning.Plan`; `str` of it is a table.

    Raises:
        ValueError: for sizes that contradict each other or are missing, and an unknown device, dtype or loss; for rates
            that are of something else; where there is no GPU, or none that is known; where the system does not say how
            much memory is free.

    Source: the counts are derived in `wholebatch.planning.work`.

    >>> import wholebatch as wb
    >>> found = wb.plan(batch=65536, dim=768, ranks=8, dtype="bf16", device="h200")
    >>> found.chosen.fits, found.chosen.call
    (True, 'wb.CLIPLoss(memory=1207959552)')
    """
    name: Any = loss if loss is not None else "partial_fc" if classes is not None else "clip"
    number = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    one = isinstance(encoder_bytes, int) or not isinstance(encoder_bytes, Sequence) or isinstance(encoder_bytes, str)
    activations: tuple[Any, ...] = (encoder_bytes,) if one else tuple(encoder_bytes)  # type: ignore[arg-type]
    _check(
        batch=batch, dim=dim, ranks=ranks, loss=name, dtype=dtype, number=number, device=device,
        memory_limit=memory_limit, model_bytes=model_bytes, gradient_bytes=gradient_bytes, activations=activations,
        encoder_flops=encoder_flops, chunk=chunk, keep_graphs=keep_graphs, classes=classes, sample_rate=sample_rate,
        bandwidth=bandwidth, rates=rates,
    )  # fmt: skip
    assert number is not None
    rates = (given(device, number) if rates is None else rates).with_wire(bandwidth)
    _check_rates(rates, name, number, device, ranks)
    shapes = Shapes(
        name, batch, dim, ranks, number, rates.device, classes or 0, 1.0 if sample_rate is None else sample_rate
    )
    of_towers = activations * shapes.towers if len(activations) == 1 else activations
    step = Step(shapes, model_bytes, gradient_bytes, of_towers if any(of_towers) else (), encoder_flops)
    limit = _limit(device, number, ranks) if memory_limit is None else memory_limit
    settings = _settings(step, limit, chunk, keep_graphs)
    options = [_option(step, setting, limit, rates) for setting in settings]
    encoders = bool(encoder_flops)
    chosen = _choice([option for option in options if option.fits], encoders=encoders)
    named = str(number).removeprefix("torch.")
    return Plan(name, batch, dim, ranks, named, device, limit, rates, tuple(options), chosen, encoders)


def _choice(fitting: Sequence[Option], *, encoders: bool) -> Option | None:
    """The fastest; of those that are nearly as fast, what the library takes by itself, or what takes least memory.

    Where an encoder's time is not known, it is taken to be longer than any loss's: what encodes least again is fastest.
    """
    least = 0.0 if encoders else min((option.encoded_again for option in fitting), default=0.0)
    alike = [option for option in fitting if encoders or option.encoded_again <= least + _ALIKE]
    fastest = min((option.seconds for option in alike), default=0.0)
    near = [option for option in alike if option.seconds <= _NEARLY * fastest]
    return min(near, key=lambda option: (not option.auto, option.peak), default=None)


def _limit(device: str, dtype: torch.dtype, ranks: int) -> int:
    if device not in ("cpu", "cuda"):
        return int(_USABLE * (given(device, dtype).capacity or 0))
    free = free_memory(torch.device(device))
    if free is None:
        raise UserError("this system does not say how much memory is free; give memory_limit, in bytes")
    return free if device == "cuda" else free // ranks


def _settings(step: Step, limit: int, chunk: int | None, keep_graphs: int | None) -> list[Setting]:
    """All that are worth a line."""
    shapes = step.shapes
    exchanges: tuple[ExchangeUsed, ...] = ("gather",)
    if shapes.ranks > 1 and shapes.loss != "partial_fc":
        exchanges = ("gather", "ring") if shapes.device == "cpu" else ("gather",)
    found = []
    for chunked in (False, True) if step.activations else (False,):
        for exchange in exchanges:
            for kept_size in (0, *shapes.kept_sizes()):
                setting = Setting(exchange, kept_size)
                if chunked:
                    setting = replace(setting, chunk=_chunk(step, setting, limit) if chunk is None else chunk)
                    setting = replace(setting, kept_graphs=keep_graphs or 0)
                found.append(setting)
                if kept_size == min(shapes.kept_sizes(), default=0) and _peak(step, setting) > limit:
                    found += _partly(step, setting, limit)
                graphs = _graphs_that_fit(step, setting, limit) if keep_graphs is None else 0
                if graphs:
                    found.append(replace(setting, kept_graphs=graphs))
    return found


def _partly(step: Step, setting: Setting, limit: int) -> list[Setting]:
    """With as much of exp(S) as fits, where all of it does not, or nothing."""
    flat = replace(setting, kept_size=0)
    room = limit - _peak(step, flat)
    whole = step.shapes.entries * setting.kept_size
    if room < _LEAST_KEPT * whole:
        return []
    tiles = step.shapes.memory_for(0)
    found = replace(setting, kept_bytes=tiles + room)
    return [found] if _peak(step, found) <= limit else []


def _chunk(step: Step, setting: Setting, limit: int) -> int:
    """The largest power of two of which four fit."""
    most, rows = max(step.activations), step.shapes.rows
    room = limit - _peak(step, replace(setting, chunk=1)) + most
    fits = max(1, min(room // (4 * most), ceil(rows / 2)))
    return 1 << (int(fits).bit_length() - 1)


def _chunks(step: Step, setting: Setting) -> int:
    """Of one encoder."""
    assert setting.chunk is not None
    return ceil(step.shapes.rows / setting.chunk)


def _graphs_that_fit(step: Step, setting: Setting, limit: int) -> int:
    """How many chunks' graphs may be kept, not all."""
    if setting.chunk is None:
        return 0
    chunks = len(step.activations) * _chunks(step, setting)
    low, high = 0, chunks - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = _peak(step, replace(setting, kept_graphs=middle)) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _peak(step: Step, setting: Setting) -> int:
    """Bytes."""
    work = work_of(step.shapes, setting.exchange, setting.memory(step.shapes))
    return _peak_of(step, setting, work)


def _peak_of(step: Step, setting: Setting, work: Work) -> int:
    there = step.model + work.features
    if setting.chunk is None:
        return there + max(step.shapes.rows * sum(step.activations) + work.loss, step.gradients)
    rows = min(setting.chunk, step.shapes.rows)
    kept, first, chunks, left = 0, 0, _chunks(step, setting), setting.kept_graphs
    for of in step.activations:
        kept += min(left, chunks) * rows * of
        first = first or min(left, 1) * rows * of
        left -= min(left, chunks)
    of_chunk = rows * max(step.activations)
    leaves = step.shapes.towers * step.shapes.rows * step.shapes.dim * step.shapes.dtype.itemsize
    return there + leaves + max(kept + max(work.loss, of_chunk), step.gradients + max(of_chunk, kept - first))


def _option(step: Step, setting: Setting, limit: int, rates: Rates) -> Option:
    shapes = step.shapes
    memory = setting.memory(shapes)
    work = work_of(shapes, setting.exchange, memory)
    peak = _peak_of(step, setting, work)
    again = 0.0
    if setting.chunk is not None:
        again = 1 - setting.kept_graphs / (len(step.activations) * _chunks(step, setting))
    encoding = (3 + again) * step.forward * shapes.rows
    largest = _largest(step, setting, limit)
    return Option(
        exchange=setting.exchange if shapes.ranks > 1 else "",
        memory=memory,
        kept=work.kept / work.entries if work.entries else 0.0,
        kept_size=work.kept_size if work.kept else 0,
        chunk=setting.chunk,
        kept_graphs=setting.kept_graphs,
        encoded_again=again,
        peak=peak,
        of_loss=work.loss,
        wire=work.wire,
        flops=work.flops + encoding,
        seconds=rates.seconds(shapes.loss, shapes.dim, work) + encoding / rates.encoders,
        fits=peak <= limit,
        largest_batch=largest,
        auto=all(_auto(shapes, setting)) and setting.chunk is None,
        call=_call(shapes, setting),
        call_of_largest=_call(replace(shapes, batch=largest), setting) if largest else "",
    )


def _largest(step: Step, setting: Setting, limit: int) -> int:
    """The largest batch with which it fits, a multiple of the ranks."""
    ranks = step.shapes.ranks

    def fits(rows: int) -> bool:
        return _peak(step.of_batch(rows * ranks), setting) <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * ranks


def _auto(shapes: Shapes, setting: Setting) -> tuple[bool, bool]:
    """Whether exchange and memory are what "auto" is."""
    exchange = shapes.ranks == 1 or setting.exchange == shapes.exchange()
    return exchange, shapes.budget(setting.memory(shapes)) == shapes.budget("auto")


def _call(shapes: Shapes, setting: Setting) -> str:
    arguments = []
    exchange, memory = _auto(shapes, setting)
    if shapes.loss == "partial_fc":
        arguments += [str(shapes.dim), str(shapes.classes)]
        arguments += [f"sample_rate={shapes.sample_rate!r}"] if shapes.sample_rate < 1 else []
        arguments += [f"dtype={shapes.dtype}"] if shapes.dtype != torch.float32 else []
        arguments += ['device="cuda"'] if shapes.device == "cuda" else []
    elif not exchange:
        arguments.append(f'exchange="{setting.exchange}"')
    if not memory:
        bytes_ = setting.memory(shapes)
        arguments.append('memory="flat"' if bytes_ == "flat" else f"memory={bytes_}")
    loss = f"{_MODULES[shapes.loss]}({', '.join(arguments)})"
    if setting.chunk is None:
        return loss
    models = "[encoder]" if shapes.towers == 1 else "[encoder_a, encoder_b]"
    kept = f", keep_graphs={setting.kept_graphs}" if setting.kept_graphs else ""
    return f"wb.GradCache({models}, {setting.chunk}, {loss}{kept})"


def _check(
    *,
    batch: object,
    dim: object,
    ranks: object,
    loss: object,
    dtype: object,
    number: object,
    memory_limit: object,
    model_bytes: object,
    gradient_bytes: object,
    activations: tuple[object, ...],
    encoder_flops: object,
    chunk: object,
    keep_graphs: object,
    classes: object,
    sample_rate: object,
    bandwidth: object,
    device: object,
    rates: object,
) -> None:
    """Sizes exist, and go together."""
    for name, value in (("batch", batch), ("dim", dim), ("ranks", ranks)):
        _require(type(value) is int and value >= 1, name, "an integer of at least 1", value)
    assert isinstance(batch, int)
    assert isinstance(ranks, int)
    _require(loss in LOSSES, "loss", f"one of {', '.join(LOSSES)}", loss)
    _require(
        isinstance(number, torch.dtype) and number in DTYPES.values(), "dtype", f"one of {', '.join(DTYPES)}", dtype
    )
    if batch < ranks:
        raise UserError(f"batch is of all ranks together: at least one example for each of {ranks} ranks, got {batch}")
    for name, value in (("memory_limit", memory_limit), ("chunk", chunk), ("classes", classes)):
        what = "an integer of at least 1" + (", as in 80 * 10**9" if name == "memory_limit" else "")
        _require(value is None or (type(value) is int and value >= 1), name, what, value)
    for name, value in (("model_bytes", model_bytes), ("gradient_bytes", gradient_bytes)):
        _require(type(value) is int and value >= 0, name, "an integer, a number of bytes", value)
    sound = all(type(of) is int and of >= 0 for of in activations)
    got = activations[0] if len(activations) == 1 else activations
    _require(sound, "encoder_bytes", "an integer, a number of bytes, or one for each encoder", got)
    _require(_is_number(encoder_flops) and encoder_flops >= 0, "encoder_flops", "at least 0, and finite", encoder_flops)
    if bandwidth is not None:
        _require(_is_number(bandwidth) and bandwidth > 0, "bandwidth", "above 0, in bytes per second", bandwidth)
    towers = 1 if loss in ("sup_con", "partial_fc") else 2
    if len(activations) not in (1, towers):
        raise UserError(
            f"encoder_bytes must be one number, or one for each of the {towers} encoder{'s' if towers > 1 else ''} of "
            f"{loss}; got {len(activations)}"
        )
    if chunk is not None and not any(activations):
        raise UserError("chunk is of gradient caching, which takes encoder_bytes: what an encoder keeps of one row")
    rows = ceil(batch / ranks)
    if isinstance(chunk, int) and chunk > rows:
        raise UserError(f"chunk must be at most the rows of a rank, {rows} = {batch} / {ranks}; got {chunk}")
    if keep_graphs is not None:
        if not isinstance(chunk, int):
            raise UserError("keep_graphs is a number of chunks: give chunk as well")
        chunks = towers * ceil(rows / chunk)
        known = type(keep_graphs) is int and 0 <= keep_graphs <= chunks
        _require(known, "keep_graphs", f"at most the {chunks} chunks that there are", keep_graphs)
    if (loss == "partial_fc") != (classes is not None):
        raise UserError(
            "partial_fc needs classes, as in classes=1000000"
            if loss == "partial_fc"
            else f"classes are of partial_fc; {loss} has none"
        )
    if isinstance(classes, int) and classes < ranks:
        raise UserError(f"there must be a class for each of {ranks} ranks, got classes={classes}")
    if sample_rate is not None:
        if loss != "partial_fc":
            raise UserError(f"sample_rate is of partial_fc, with classes; {loss} has none")
        _require(_is_number(sample_rate) and 0 <= sample_rate <= 1, "sample_rate", "from 0 to 1", sample_rate)
    _require(device in DEVICES, "device", f"one of {', '.join(DEVICES)}", device)
    _require(rates is None or isinstance(rates, Rates), "rates", "wholebatch.planning.Rates, or None", rates)


def _check_rates(rates: Rates, loss: LossName, dtype: torch.dtype, device: str, ranks: int) -> None:
    """They are of what is planned."""
    rates.check()
    named, kind = str(dtype).removeprefix("torch."), "cpu" if device == "cpu" else "cuda"
    for what, theirs, ours in (
        ("device", rates.device, kind),
        ("dtype", rates.dtype, named),
        ("ranks", rates.ranks, ranks),
    ):
        if theirs is not None and theirs != ours:
            raise UserError(
                f"these rates were measured for {what} {theirs}, and this is a plan for {ours}: measure again"
            )
    if loss not in rates.entry:
        raise UserError(f"these rates are of {', '.join(rates.entry)}: measure them with --loss {loss}")
    if ranks > 1 and rates.wire is None:
        raise UserError(f"these rates are of one rank, and of no network: measure them on {ranks}, or give bandwidth")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"{name} must be {expected}; got {got!r}")

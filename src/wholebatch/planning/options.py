"""Each exchange, memory mode and caching of a step: what it takes, whether it fits, what to choose, what to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .._measure import free_memory
from .._user_error import UserError
from ..sweep.memory import Memory
from .given import given
from .rates import Rates
from .sizes import DTYPES, check_rates, check_sizes
from .step import Setting, Step, largest_batch, num_chunks, peak_with, worth_a_line
from .work import LossName, Shapes, work_of

_MODULES: dict[LossName, str] = {
    "clip": "wb.CLIPLoss", "info_nce": "wb.InfoNCELoss", "siglip": "wb.SigLIPLoss", "nt_xent": "wb.NTXentLoss",
    "sup_con": "wb.SupConLoss", "partial_fc": "wb.PartialFC",
}  # fmt: skip
_USABLE = 0.9  # of a device's memory; the rest is CUDA's, NCCL's and what an allocator cannot give out again
_ALIKE = 0.05  # of the chunks
_NEARLY = 1.1  # times the fastest: rates are not known better than that


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

    peak = model + features + max(activations + loss, gradients),    or with gradient caching as `planning.step` says

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
        model_bytes: of parameters, optimizer and all else that a rank holds throughout.
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
    device = device.lower() if isinstance(device, str) else device
    name: Any = loss if loss is not None else "partial_fc" if classes is not None else "clip"
    number = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    one = isinstance(encoder_bytes, int) or not isinstance(encoder_bytes, Sequence) or isinstance(encoder_bytes, str)
    activations: tuple[Any, ...] = (encoder_bytes,) if one else tuple(encoder_bytes)  # type: ignore[arg-type]
    check_sizes(
        batch=batch, dim=dim, ranks=ranks, loss=name, dtype=dtype, number=number, device=device,
        memory_limit=memory_limit, model_bytes=model_bytes, gradient_bytes=gradient_bytes, activations=activations,
        encoder_flops=encoder_flops, chunk=chunk, keep_graphs=keep_graphs, classes=classes, sample_rate=sample_rate,
        bandwidth=bandwidth, rates=rates,
    )  # fmt: skip
    assert number is not None
    rates = (given(device, number) if rates is None else rates).with_wire(bandwidth)
    check_rates(rates, name, number, device, ranks)
    shapes = Shapes(
        name, batch, dim, ranks, number, rates.device, classes or 0, 1.0 if sample_rate is None else sample_rate
    )
    of_towers = activations * shapes.towers if len(activations) == 1 else activations
    step = Step(shapes, model_bytes, gradient_bytes, of_towers if any(of_towers) else (), encoder_flops)
    limit = _limit(device, number, ranks) if memory_limit is None else memory_limit
    settings = worth_a_line(step, limit, chunk, keep_graphs)
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


def _option(step: Step, setting: Setting, limit: int, rates: Rates) -> Option:
    shapes = step.shapes
    memory = setting.memory(shapes)
    work = work_of(shapes, setting.exchange, memory)
    peak = peak_with(step, setting, work)
    again = 0.0
    if setting.chunk is not None:
        again = 1 - setting.kept_graphs / (len(step.activations) * num_chunks(step, setting))
    encoding = (3 + again) * step.forward * shapes.rows
    largest = largest_batch(step, setting, limit)
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

"""Plan a step: for each exchange, memory mode and gradient caching its cost, whether it fits, and the call to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .._base.precision import accumulation_dtype
from .._base.settings import shown
from .._base.user_error import UserError
from .._measure import free_memory
from ..losses.catalog import CATALOG
from .counted import forget
from .declared import DeclaredLoss, declared, is_declared, name_of
from .given import given
from .rates import Rates, check_rates
from .report import Option, Plan
from .shapes import Shapes, TokenShapes
from .sizes import LossName, Sizes
from .step import Setting, Step, largest_batch, worthwhile_settings

_USABLE = 0.9  # of a device's memory; the rest is CUDA's, NCCL's and fragments that an allocator cannot reuse
_SIMILAR = 0.05  # of the chunks
_NEARLY = 1.1  # times the fastest: rates are not known better than that


def plan(
    *,
    batch_size: int,
    embedding_size: int,
    ranks: int = 1,
    loss: LossName | DeclaredLoss | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    memory_limit: int | None = None,
    model_bytes: int = 0,
    gradient_bytes: int = 0,
    encoder_bytes: int | Sequence[int] = 0,
    encoder_flops: float = 0.0,
    chunk_size: int | None = None,
    keep_graphs: int | None = None,
    classes: int | None = None,
    sample_rate: float | None = None,
    query_tokens: float | None = None,
    document_tokens: float | None = None,
    documents_per_query: int | None = None,
    bandwidth: float | None = None,
    rates: Rates | None = None,
) -> Plan:
    r"""Predict memory, time and bytes sent for each configuration of a loss, which of them fit, and the largest batch.

    peak = model + features + max(activations + loss, gradients),    or with gradient caching as `planning.step` says

    Shapes in; bytes, flops and seconds out. Only steps of a few rows are run, on the CPU, and counted. The
    functions that decide `exchange="auto"` and `memory="auto"` are the library's own, for gloo and NCCL of
    torch.distributed.

    Args:
        batch_size: B, examples on all ranks: pairs; images for SupCon and for classes; queries for max_sim.
        embedding_size: d, numbers of a feature, or of a token.
        ranks: W.
        loss: "clip", "info_nce", "siglip", "nt_xent", "sup_con", "partial_fc" or "max_sim"; None: "partial_fc" with
            classes, else "clip". Or a declared loss: a :class:`wholebatch.PairLoss`; a function of (rows,
            embedding_size) that returns one and the further arguments of its call (x_data, parameters, ...; y=None
            without a second matrix); or the name of either, "losses.py:make". Features are random; several similarities
            share d.
        dtype: of the features, a torch.dtype or its name ("float32", "bf16", ...).
        device: "cpu", "cuda" (the GPU here), or a card: "t4", "v100", "l4", "rtx4090", "a100", "h100", "h200", "b200".
        memory_limit: bytes that a rank may take; None: nine tenths of a named card's memory, the free memory of the GPU
            here, or the free memory here, divided among the ranks.
        model_bytes: of parameters, optimizer and all else that a rank holds throughout.
        gradient_bytes: of the parameters' gradients, which appear in the backward pass (`zero_grad`'s default).
        encoder_bytes: of the activations that an encoder keeps of one row for its backward pass; one number for all
            encoders, or one for each. With it, gradient caching is planned as well.
        encoder_flops: of the forward pass of one example through all encoders.
        chunk_size: rows of a chunk of :class:`wholebatch.GradCache`; None: small enough that four chunks fit.
        keep_graphs: the number of these chunks that are not encoded again; None: none, and as many as fit.
        classes: C, on all ranks, of :class:`wholebatch.PartialFC`.
        sample_rate: of :class:`wholebatch.PartialFC`; None: 1.
        query_tokens: of :class:`wholebatch.MaxSimLoss`, the mean number of tokens of a query, without padding.
        document_tokens: likewise, of a document.
        documents_per_query: likewise; None: 1. An example then has so many documents: `encoder_bytes` are of one.
        bandwidth: bytes per second that a rank sends, instead of the device's.
        rates: measured by `wholebatch.planning.calibrate`; None: given ones.

    Returns:
        A :class:`wholebatch.planning.Plan`; `str` of it is a table.

    Raises:
        ValueError: for sizes that contradict each other or are missing; for an unknown device, dtype or loss; for rates
            of another device or dtype; for "cuda" without a GPU, or with an unknown one; where the system does
            not report its free memory.

    Source: how a step is counted is in `wholebatch.planning.counted`.

    >>> import wholebatch as wb
    >>> found = wb.plan(batch_size=65536, embedding_size=768, ranks=8, dtype="bf16", device="h200")
    >>> found.chosen.fits, found.chosen.call
    (True, 'wb.CLIPLoss(memory=1241513984)')
    """
    arguments = {name: value for name, value in locals().items() if name != "rates"}
    if isinstance(dtype, torch.dtype):
        arguments["dtype"] = str(dtype).removeprefix("torch.")
    if is_declared(loss):
        arguments |= {"loss": name_of(loss), "source": loss}
    sizes = Sizes.from_arguments(**arguments)
    sizes.check()
    if not isinstance(rates, Rates | None):
        raise UserError(f"rates must be wholebatch.planning.Rates, or None; got {shown(rates)}")
    return plan_sizes(sizes, rates)


def plan_sizes(sizes: Sizes, rates: Rates | None) -> Plan:
    """Return the plan of checked sizes; see `plan`."""
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    rates = (given(sizes.device, dtype) if rates is None else rates).with_wire(sizes.bandwidth)
    check_rates(rates, sizes.dtype, sizes.device, sizes.ranks)
    shapes = shapes_of(sizes)
    if shapes.declared is not None and sizes.loss not in rates.tiles:
        note = f"time of the functions of {sizes.loss} by the bytes that they move, not measured"
        rates = replace(rates, source=f"{rates.source}; {note}")
    step = Step(shapes, sizes)
    limit = _limit(sizes.device, dtype, sizes.ranks) if sizes.memory_limit is None else sizes.memory_limit
    options = [_option(step, setting, limit, rates) for setting in worthwhile_settings(step, limit)]
    encoders = bool(sizes.encoder_flops)
    return Plan(
        loss=sizes.loss,
        batch_size=sizes.batch_size,
        embedding_size=sizes.embedding_size,
        ranks=sizes.ranks,
        dtype=sizes.dtype,
        device=sizes.device,
        limit=limit,
        rates=rates,
        options=tuple(options),
        chosen=_choice([option for option in options if option.fits], encoders=encoders),
        encoders=encoders,
        query_tokens=sizes.query_tokens,
        document_tokens=sizes.document_tokens,
        documents_per_query=shapes.documents_per_query if isinstance(shapes, TokenShapes) else None,
    )


def shapes_of(sizes: Sizes) -> Shapes:
    """Return the shapes of a step of checked sizes.

    Raises:
        UserError: for a declared loss that cannot be planned with these sizes.
    """
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    device = "cpu" if sizes.device == "cpu" else "cuda"
    common_sizes = sizes.loss, sizes.batch_size, sizes.embedding_size, sizes.ranks, dtype, device
    if sizes.query_tokens is not None and sizes.document_tokens is not None:
        return TokenShapes(
            *common_sizes,
            query_tokens=sizes.query_tokens,
            document_tokens=sizes.document_tokens,
            documents_per_query=sizes.documents_per_query or 1,
        )
    form = None
    if sizes.source is not None:
        forget()
        form = declared(sizes.source, accumulation_dtype(dtype))
        sizes.check_encoders(form.towers)
        if sizes.embedding_size < form.similarities:
            raise UserError(
                f"embedding_size is that of all similarities together, at least {form.similarities}; got "
                f"{sizes.embedding_size}"
            )
    rate = 1.0 if sizes.sample_rate is None else sizes.sample_rate
    return Shapes(*common_sizes, classes=sizes.classes or 0, sample_rate=rate, declared=form)


def _choice(fitting: Sequence[Option], *, encoders: bool) -> Option | None:
    """Return the fastest option; of those nearly as fast, the library's default, or the one with least memory.

    If the encoders' time is not known, it counts as longer than any loss's: the option that encodes least again is
    fastest.
    """
    least = 0.0 if encoders else min((option.encoded_again for option in fitting), default=0.0)
    similar = [option for option in fitting if encoders or option.encoded_again <= least + _SIMILAR]
    fastest = min((option.seconds for option in similar), default=0.0)
    near = [option for option in similar if option.seconds <= _NEARLY * fastest]
    return min(near, key=lambda option: (not option.auto, option.peak), default=None)


def _limit(device: str, dtype: torch.dtype, ranks: int) -> int:
    if device not in ("cpu", "cuda"):
        return int(_USABLE * (given(device, dtype).capacity or 0))
    free = free_memory(torch.device(device))
    if free is None:
        raise UserError("this system does not report its free memory; give memory_limit, in bytes")
    return free if device == "cuda" else free // ranks


def _option(step: Step, setting: Setting, limit: int, rates: Rates) -> Option:
    shapes, work, peak = step.shapes, step.work(setting), step.peak(setting)
    again = 1 - setting.kept_graphs / step.num_chunks(setting) if setting.chunk_size is not None else 0.0
    encoding = (3 + again) * step.sizes.encoder_flops * shapes.rows
    largest = largest_batch(step, setting, limit)
    return Option(
        exchange=setting.exchange if shapes.ranks > 1 else "",
        memory=setting.memory(shapes),
        kept=work.kept,
        kept_size=work.kept_size,
        chunk_size=setting.chunk_size,
        kept_graphs=setting.kept_graphs,
        encoded_again=again,
        peak=peak,
        of_loss=work.loss,
        wire=work.wire,
        flops=work.flops + encoding,
        seconds=rates.seconds(shapes.loss, shapes.embedding_size, work) + encoding / rates.encoders,
        fits=peak <= limit,
        largest_batch=largest,
        auto=all(_matches_auto(shapes, setting)) and setting.chunk_size is None,
        call=_call(shapes, setting),
        call_of_largest=_call(replace(shapes, batch_size=largest), setting) if largest else "",
        one_pass=shapes.form.one_pass,
    )


def _matches_auto(shapes: Shapes, setting: Setting) -> tuple[bool, bool]:
    """Return whether exchange and memory are those that "auto" selects."""
    exchange = shapes.ranks == 1 or setting.exchange == shapes.exchange()
    return exchange, shapes.budget(setting.memory(shapes)) == shapes.budget("auto")


def _call(shapes: Shapes, setting: Setting) -> str:
    exchange, memory = _matches_auto(shapes, setting)
    if shapes.declared is not None:
        module, arguments = "PairLoss", ["..."]
    elif isinstance(shapes, TokenShapes):
        module, arguments = "MaxSimLoss", []
    elif shapes.has_classes:
        module, arguments = "PartialFC", [str(shapes.embedding_size), str(shapes.classes)]
        arguments += [f"sample_rate={shapes.sample_rate!r}"] if shapes.sample_rate < 1 else []
        arguments += [f"dtype={shapes.dtype}"] if shapes.dtype != torch.float32 else []
        arguments += ['device="cuda"'] if shapes.device == "cuda" else []
    else:
        entry = CATALOG[shapes.loss]
        settings = entry.required_settings(shapes.embedding_size)
        module, arguments = entry.module.__name__, [f"{name}={value!r}" for name, value in settings.items()]
    arguments += [] if exchange else [f'exchange="{setting.exchange}"']
    if not memory:
        bytes_ = setting.memory(shapes)
        arguments.append('memory="flat"' if bytes_ == "flat" else f"memory={bytes_}")
    loss = f"wb.{module}({', '.join(arguments)})"
    if setting.chunk_size is None:
        return loss
    models = "[encoder]" if shapes.form.towers == 1 else "[encoder_a, encoder_b]"
    kept = f", keep_graphs={setting.kept_graphs}" if setting.kept_graphs else ""
    chunk_sizes = [setting.chunk_size * items for items in shapes.items_per_example]
    chunks = chunk_sizes[0] if len(set(chunk_sizes)) == 1 else chunk_sizes
    return f"wb.GradCache({models}, {chunks}, {loss}{kept})"

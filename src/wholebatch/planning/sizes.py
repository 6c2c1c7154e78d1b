"""The sizes that a plan is made of: they exist, go together, and rates are of them."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any, TypeGuard

import torch

from .._settings import shown
from .._user_error import UserError
from .given import DEVICES
from .rates import Rates
from .work import LOSSES, LossName, Shapes

_MOST = 2**63  # what no computer counts to
DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


def check_sizes(
    *,
    batch: object,
    dim: object,
    ranks: object,
    loss: Any,
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
        _require(type(value) is int and 1 <= value < _MOST, name, "an integer of at least 1", value)
    assert isinstance(batch, int)
    assert isinstance(dim, int)
    assert isinstance(ranks, int)
    _require(isinstance(loss, str) and loss in LOSSES, "loss", f"one of {', '.join(LOSSES)}", loss)
    _require(
        isinstance(number, torch.dtype) and number in DTYPES.values(), "dtype", f"one of {', '.join(DTYPES)}", dtype
    )
    if batch < ranks:
        raise UserError(f"batch is of all ranks together: at least one example for each of {ranks} ranks, got {batch}")
    for name, value in (("memory_limit", memory_limit), ("chunk", chunk), ("classes", classes)):
        what = "an integer of at least 1" + (", as in 80 * 10**9" if name == "memory_limit" else "")
        _require(value is None or (type(value) is int and 1 <= value < _MOST), name, what, value)
    for name, value in (("model_bytes", model_bytes), ("gradient_bytes", gradient_bytes)):
        _require(type(value) is int and 0 <= value < _MOST, name, "an integer, a number of bytes", value)
    sound = all(type(of) is int and 0 <= of < _MOST for of in activations)
    got = activations[0] if len(activations) == 1 else activations
    _require(sound, "encoder_bytes", "an integer, a number of bytes, or one for each encoder", got)
    _require(_is_number(encoder_flops) and encoder_flops >= 0, "encoder_flops", "at least 0, and finite", encoder_flops)
    if bandwidth is not None:
        _require(_is_number(bandwidth) and bandwidth > 0, "bandwidth", "above 0, in bytes per second", bandwidth)
    shapes = Shapes(loss, batch, dim, ranks)
    towers, rows = shapes.towers, shapes.rows
    if len(activations) not in (1, towers):
        raise UserError(
            f"encoder_bytes must be one number, or one for each of the {towers} encoder{'s' if towers > 1 else ''} of "
            f"{loss}; got {len(activations)}"
        )
    if chunk is not None and not any(activations):
        raise UserError("chunk is of gradient caching, which takes encoder_bytes: what an encoder keeps of one row")
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
    _require(isinstance(device, str) and device in DEVICES, "device", f"one of {', '.join(DEVICES)}", device)
    _require(rates is None or isinstance(rates, Rates), "rates", "wholebatch.planning.Rates, or None", rates)


def check_rates(rates: Rates, loss: LossName, dtype: torch.dtype, device: str, ranks: int) -> None:
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
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"{name} must be {expected}; got {shown(got)}")

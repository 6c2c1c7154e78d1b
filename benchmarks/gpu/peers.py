"""Losses of other libraries under autocast, beside this library's default: each in a process of its own.

A peer that raises, hangs or breaks the device's context leaves a row that says so. Its value is compared with the dense
float64 reference before it is timed; a peer with another value is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch._processes import run_processes
from wholebatch._third_party import version
from wholebatch.bench.peers import PEERS, PairLoss, Peer
from wholebatch.bench.subjects import SUBJECTS
from wholebatch.planning.subject import BIAS, SCALE
from wholebatch.testing import RankError

from .device import DEVICE, GPU, Row, first_line, peak_bytes, seconds, under_autocast, unit_rows

_LIMIT_S = 90.0  # of one process
_FEW = 8  # rows; with few, values of similar losses differ
_CLOSE = 2e-2  # of a value that autocast has rounded to bfloat16
_SIZES = (16384, 512) if GPU else (128, 64)


def peers(
    libraries: Mapping[str, Sequence[Peer]] = PEERS,
    *,
    rows: int = _SIZES[0],
    size: int = _SIZES[1],
    limit_s: float = _LIMIT_S,
) -> Iterator[Row]:
    """Yield the figures of each loss in this library and in others, for float32 features and for bfloat16's.

    Args:
        libraries: the peers of each loss.
        rows: of the batch.
        size: of an embedding.
        limit_s: seconds of one process.
    """
    for name, theirs in libraries.items():
        for peer in (None, *theirs):
            row: Row = {"loss": name, "library": "wholebatch" if peer is None else peer.label, "batch_size": rows}
            why = None if peer is None else _why_not(peer, size)
            if why is not None:
                yield row | {"skipped": why}
                continue
            for features in ("float32", "bfloat16"):
                try:
                    (found,) = run_processes(measure, 1, name, peer, features, rows, size, timeout_s=limit_s)
                except RankError as error:  # it died or hung
                    print(error)
                    lines = [line for line in str(error).splitlines() if line.strip()]
                    found = {"error": next((line for line in lines if "died silently" in line), lines[0])}
                yield row | {"features": features} | found


def _why_not(peer: Peer, size: int) -> str | None:
    """Return why a peer is not measured; None if it is."""
    if version(peer.package) is None:
        return "not installed"
    if not (GPU or peer.on_cpu):
        return "needs a GPU"
    return f"needs an embedding size that {peer.multiple} divides" if size % peer.multiple else None


def measure(name: str, peer: Peer | None, features: str, rows: int, size: int) -> Row:
    """Return the version, time, memory and error of one loss, or why there are none."""
    found: Row = {} if peer is None else {"version": version(peer.package)}
    try:
        loss = under_autocast(_ours(name) if peer is None else peer.build(wb.comm.LocalCommunicator(), SCALE))
        torch.manual_seed(0)
        scale, bias = (torch.tensor(value, device=DEVICE) for value in (SCALE, BIAS))
        few = [unit_rows(_FEW, size, getattr(torch, features)) for _ in range(2)]
        value, true = loss(*few, scale, bias).item(), _call(name, wb.reference, few, scale, bias).item()
        if not abs(value - true) <= _CLOSE * abs(true):
            return found | {"error": f"wrong value: {value:.6g}, the reference's is {true:.6g}"}
        x, y = (unit_rows(rows, size, getattr(torch, features)).requires_grad_() for _ in range(2))

        def step() -> None:
            x.grad = y.grad = None
            loss(x, y, scale, bias).backward()

        return found | {
            "error_of_loss": abs(value / true - 1), "seconds": seconds(step), "peak_bytes": peak_bytes(step),
        }  # fmt: skip
    except ImportError as error:
        return found | {"skipped": str(error)}
    except Exception as error:  # another library's code raises whatever it likes; the row says so
        return found | {"error": first_line(error)}


def _ours(name: str) -> PairLoss:
    return lambda x, y, scale, bias: _call(name, wb.functional, [x, y], scale, bias)


def _call(name: str, functions: object, towers: Sequence[Tensor], scale: Tensor, bias: Tensor) -> Tensor:
    """Return a loss of this library, or its reference in float64."""
    entry = SUBJECTS[name]
    call: Callable[..., Tensor] = entry.call
    x, y = (z.double() for z in towers) if functions is wb.reference else towers
    return call(functions, x, y, scale=scale if entry.scale_argument == "logit_scale" else SCALE, bias=bias)

"""The features of rows that are not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..data.loader import prepared
from ..data.sides import Side
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder, to_device
from .batches import Reader, RowInputs

_ROWS = 512  # that are encoded at a time, or fewer with a smaller `--chunk-size`


@torch.no_grad()
def features_of_rows(
    model: DualEncoder | Encoder,
    name: str,
    side: Side,
    rows: Tensor,
    device: torch.device,
    *,
    workers: int = 0,
    chunk_size: int = 0,
    ranks: int = 1,
) -> Tensor:
    """Return the unit features of these rows of a side, (n, d), on the CPU, without augmentation.

    With several ranks each encodes a part, and only rank 0 gets the features; the others get (0, d). Rows are encoded
    in the same parts on any number of ranks: part i by rank i mod W. After each turn the features go to rank 0, so that
    no rank waits longer than for one part. In the last turn a rank without a part encodes the last one again, and
    its features are dropped.

    Args:
        model: both encoders, or one.
        name: the side's name in the model.
        side: its pictures or texts.
        rows: (n,).
        device: where the model is.
        workers: processes that read the rows.
        chunk_size: the most rows that are encoded at a time. 0: 512.
        ranks: W, the ranks that share the work; with 1 this one does all of it, whatever others do.
    """
    parts = rows.split(min(_ROWS, chunk_size or _ROWS))
    if ranks == 1:
        return torch.cat([x.cpu() for x in _encoded(model, name, side, parts, device, workers)])
    rank = dist.get_rank()
    turns = [[min(first + r, len(parts) - 1) for r in range(ranks)] for first in range(0, len(parts), ranks)]
    local = [parts[turn[rank]] for turn in turns]
    encoded: list[Tensor] = []
    for turn, features in zip(turns, _encoded(model, name, side, local, device, workers), strict=True):
        longest = max(len(parts[part]) for part in turn)
        padded = F.pad(features, (0, 0, 0, longest - len(features))).contiguous()
        gathered = [torch.empty_like(padded) for _ in range(ranks)] if rank == 0 else None
        dist.gather(padded, gathered, dst=0)
        for part, x in zip(dict.fromkeys(turn), gathered or [padded[:0]] * ranks, strict=False):
            encoded.append(x[: len(parts[part])].cpu())
    return torch.cat(encoded)


def _encoded(
    model: DualEncoder | Encoder,
    name: str,
    side: Side,
    parts: Sequence[Tensor],
    device: torch.device,
    workers: int,
) -> Iterator[Tensor]:
    """Yield the features of each part, on the device."""
    encoder = model.encoder(name) if isinstance(model, DualEncoder) else model
    for inputs in prepared(RowInputs(side, Reader.of(encoder)), [*parts], workers=workers):
        moved = to_device(inputs, device)
        features = model.encode(name, moved) if isinstance(model, DualEncoder) else F.normalize(model(moved), dim=-1)
        yield features.float()

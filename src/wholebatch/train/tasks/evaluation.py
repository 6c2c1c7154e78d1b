"""The features of rows that are not trained on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.feed import prepared
from ..data.sides import Side
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder
from ..encoders.inputs import to_device
from .batches import Reader, RowInputs

_ROWS = 512


@torch.no_grad()
def features_of_rows(
    model: DualEncoder | Encoder, name: str, side: Side, rows: Tensor, device: torch.device, *, workers: int = 0
) -> Tensor:
    """Return the unit features of these rows of a side, (n, d), on the CPU, without augmentation.

    Args:
        model: both encoders, or one.
        name: the side's name in the model.
        side: its pictures or texts.
        rows: (n,).
        device: where the model is.
        workers: processes that read the rows.
    """
    encoder = model.encoder(name) if isinstance(model, DualEncoder) else model
    found = []
    for inputs in prepared(RowInputs(side, Reader.of(encoder)), [*rows.split(_ROWS)], workers=workers):
        moved = to_device(inputs, device)
        made = model.encode(name, moved) if isinstance(model, DualEncoder) else F.normalize(model(moved), dim=-1)
        found.append(made.float().cpu())
    return torch.cat(found)

"""The choice of an exchange, from the argument `exchange=` of a loss."""

from __future__ import annotations

from typing import Literal

import torch

from ..comm import Communicator
from ..partition import Partition, Ragged
from .exchange import Exchange
from .gather import GatherExchange
from .ring import RingExchange

ExchangeUsed = Literal["gather", "ring"]
ExchangeName = Literal["auto"] | ExchangeUsed
_CLASSES: dict[ExchangeUsed, type[Exchange]] = {"gather": GatherExchange, "ring": RingExchange}
USED_EXCHANGES: tuple[ExchangeUsed, ...] = tuple(_CLASSES)
EXCHANGES: tuple[ExchangeName, ...] = ("auto", *USED_EXCHANGES)
_GATHER_BYTES = 2**30  # Y, its gradient, and a buffer of the reduce-scatter


def select_exchange(
    name: ExchangeName,
    comm: Communicator,
    rows: int,
    columns: Partition,
    *,
    row_bytes: int,
    symmetric: bool = False,
    chunk: int = 1,
    ragged: Ragged | None = None,
) -> Exchange:
    """Return the :class:`Exchange` called `name`. "auto": "gather" up to 1 GiB per rank, else "ring".

    `row_bytes` are those of one of Y's rows, in the accumulation dtype.
    """
    if name == "auto":
        name = automatic((columns if ragged is None else ragged.vectors).total, row_bytes)
    return _CLASSES[name](comm, rows, columns, symmetric=symmetric, chunk=chunk, ragged=ragged)


def columns_of_a_chunk(total: int, columns: int, device: torch.device) -> int:
    """Return the least columns of one transfer: those of a tile; on a CPU all, because transfers use its cores.

    (Two processes on two cores: CLIP at 8192 rows takes 3 % longer in chunks.)
    """
    return total if device.type == "cpu" else columns


def automatic(total: int, row_bytes: int) -> ExchangeUsed:
    """Return the exchange that "auto" stands for.

    Args:
        total: number of Y's rows on all ranks.
        row_bytes: bytes of one row, in the accumulation dtype.

    >>> automatic(65536, 4 * 512), automatic(262144, 4 * 1024)
    ('gather', 'ring')
    """
    return "gather" if 3 * total * row_bytes <= _GATHER_BYTES else "ring"

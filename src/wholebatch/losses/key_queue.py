"""A queue of the last keys of all ranks, with data of each: MoCo's negatives, and the columns of a cross-batch memory.

It is a ring buffer, rank 0's keys first, the same on every rank and for any number of ranks: a checkpoint of one rank
holds all of it, and DistributedDataParallel, which makes buffers the same on all ranks, changes nothing. MoCo reads all
keys on each rank. As columns of a loss over pairs each rank passes a part of them, so that every key counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._base.checks import (
    allocated,
    check_alike,
    check_count,
    check_features,
    check_finite,
    check_floating_dtype,
    is_dense,
)
from .._base.settings import shown
from ..comm import Group, select_communicator
from ..comm.modules import built
from ..comm.select import check_group
from ..contract import entry
from ..partition import Partition

_NO_DATA: Mapping[str, Tensor] = MappingProxyType({})
_NO_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({})


class KeyQueue(nn.Module):
    """A queue of the last keys of all ranks, rank 0's first: the same buffers on every rank, saved with the model.

    Args:
        size: the number of keys that it holds, at least a global batch of them.
        embedding_size: the number of features of a key.
        data: the dtypes of numbers that belong to each key, by name, such as `{"label": torch.int64}`.
        dtype: of the keys.
        group: ranks whose keys go in, as in :func:`wholebatch.functional.clip_loss`.

    Attributes:
        keys: (n, d), the keys in the queue; n = size once it is full.
        data: (n,) numbers of these keys, by name.

    Raises:
        ValueError: if size or embedding_size is not a positive integer, or data are no dtypes by name.

    >>> import torch, wholebatch as wb
    >>> queue = wb.KeyQueue(3, 1, data={"label": torch.int64})
    >>> for key in (1.0, 2.0):
    ...     queue.enqueue(torch.tensor([[key], [10 * key]]), {"label": torch.tensor([1, 10])})
    >>> queue.keys.flatten(), queue.data["label"]
    (tensor([20., 10.,  2.]), tensor([10, 10,  1]))
    """

    ring: Tensor
    enqueued: Tensor

    def __init__(
        self,
        size: int,
        embedding_size: int,
        *,
        data: Mapping[str, torch.dtype] = _NO_DTYPES,
        dtype: torch.dtype = torch.float32,
        group: Group = None,
    ) -> None:
        super().__init__()
        check_count("size", size, "the number of keys that the queue holds")
        check_count("embedding_size", embedding_size, "the number of features of a key")
        check_floating_dtype("dtype", dtype)
        check_group(group)
        if not isinstance(data, Mapping) or not all(
            isinstance(name, str) and name.isidentifier() and isinstance(kind, torch.dtype)
            for name, kind in data.items()
        ):
            raise ValueError(f"data must be dtypes by name such as {{'label': torch.int64}}, got {shown(data)}")
        self.group, self._number, self._names = group, next(built), tuple(data)
        self.register_buffer("ring", allocated("size and embedding_size", (size, embedding_size), dtype=dtype).zero_())
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))
        for name, kind in data.items():
            self.register_buffer(f"ring_{name}", torch.zeros(size, dtype=kind))

    @property
    def keys(self) -> Tensor:
        return self.ring[: min(int(self.enqueued), len(self.ring))]

    @property
    def data(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"ring_{name}")[: len(self.keys)] for name in self._names}

    def columns(
        self, features: Tensor, data: Mapping[str, Tensor] = _NO_DATA, *, group: Group = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's rows followed by its part of the queue, (b_r + m_r, d), and their data, (b_r + m_r,) each.

        They are columns of a loss over pairs, y and y_data: on all ranks together, the batch and each key once. Keys
        have no gradient. Nothing is sent, and a mistake raises on this rank alone.

        Args:
            features: (b_r, d).
            data: (b_r,) numbers by the names of the queue's data.
            group: ranks that divide the keys among themselves; None: those whose keys go in.

        Raises:
            ValueError: for features or data that do not fit the queue.
        """
        self._check("features", features, data)
        comm = select_communicator(self.group if group is None else group)
        part = Partition.even(len(self.keys), comm.size).rows(comm.rank)
        keys = self.keys[part].to(features)
        check_alike("features", features, "the queue", keys, rows=False)
        data_of_columns = {name: torch.cat([x, self.data[name][part].to(x)]) for name, x in data.items()}
        return torch.cat([features, keys]), data_of_columns

    @entry
    @torch.inference_mode(False)
    @torch.no_grad()
    def enqueue(self, keys: Tensor, data: Mapping[str, Tensor] = _NO_DATA) -> None:
        """Append the keys of all ranks, (b_r, d) each, and drop the oldest. Collective: a handshake, all-gathers.

        The backward pass of an earlier loss still gets the queue as it was.

        Args:
            keys: (b_r, d).
            data: (b_r,) numbers by the names of the queue's data.

        Raises:
            ValueError: on every rank: for keys of another embedding size or dtype, that are not finite, or more than
                the queue holds; for data of other names, shapes or dtypes; for queues that differ between ranks.
        """

        def check() -> dict[str, Any]:
            self._check("keys", keys, data)
            check_alike("keys", keys, "the queue", self.ring, rows=False)
            check_finite("keys", keys)
            kinds = {name: str(x.dtype) for name, x in self.data.items()}
            ring = [len(self.ring), self.ring.shape[1], str(self.ring.dtype), kinds]
            return {"rows": len(keys), "size, embedding_size, dtype": ring, "keys enqueued": self.enqueued.item()}

        comm = select_communicator(self.group)
        everyone = comm.handshake(
            check, caller="KeyQueue.enqueue", must_match=("size, embedding_size, dtype", "keys enqueued")
        )
        counts = tuple(facts["rows"] for facts in everyone)
        if sum(counts) > len(self.ring):
            raise ValueError(
                f"KeyQueue.enqueue: the ranks' {sum(counts)} keys do not fit into a queue of {len(self.ring)}: some "
                "would be lost before they were used; make the queue longer, or the global batch smaller"
            )
        slots = (int(self.enqueued) + torch.arange(sum(counts), device=keys.device)) % len(self.ring)
        for buffer, rows in (("ring", keys), *((f"ring_{name}", data[name]) for name in self._names)):
            new = comm.all_gather(rows.to(keys.device), counts=counts, check=False)
            setattr(self, buffer, self.get_buffer(buffer).index_copy(0, slots, new))
        self.enqueued = self.enqueued + sum(counts)

    def _check(self, name: str, features: Tensor, data: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are features, and their data those of this queue."""
        check_features(name, features)
        if not isinstance(data, Mapping) or set(data) != set(self._names):
            names = sorted(map(str, data)) if isinstance(data, Mapping) else shown(data)
            raise ValueError(f"data must have the names of the queue's data, {sorted(self._names)}, got {names}")
        for key, stored in self.data.items():
            x = data[key]
            if not is_dense(x) or tuple(x.shape) != (len(features),) or x.dtype != stored.dtype:
                got = f"{tuple(x.shape)}, {x.dtype}" if is_dense(x) else shown(x)
                raise ValueError(
                    f"data[{key!r}] must be a vector of {stored.dtype} with a number for each of {len(features)} "
                    f"{name}, got {got}"
                )

    def extra_repr(self) -> str:
        return f"size={len(self.ring)}, embedding_size={self.ring.shape[1]}"

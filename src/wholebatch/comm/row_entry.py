"""Enter a collective that joins or distributes rows: find how many rows each rank sends and receives.

If the caller gives no counts, they are even, or a handshake finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import OPS, checked_counts, checked_dim, checked_op, parts, without
from .entry import CallEntry, Counts, Entry
from .facts_by_rank import Facts

_Fixed = tuple[int, ...]  # counts, one for each rank


class RowEntry(CallEntry):
    """Validate the entry of collectives over rows along a dimension."""

    def _enter_rows(
        self, operation: str, x: Tensor, counts: Counts, dim: int, check: bool | None, **options: Any
    ) -> tuple[Entry, _Fixed]:
        """Enter a collective to which each rank passes its rows; return how many each of them passes."""

        def state() -> Facts:
            for name, value in options.items():
                self._checked_rank(name, value)
            rows = checked_dim(x, dim)
            if counts is not None:
                checked_counts(counts, self.size, x.shape[rows], x, rank=self.rank)
            listed = None if counts is None else list(counts)
            return {
                **options,
                "dim": rows,
                "rows": x.shape[rows],
                "trailing shape": without(x.shape, rows),
                "counts": listed,
            }

        names = ("dtype", "dim", "trailing shape", "counts", *options)
        entry = self._enter(operation, x, state, check, names, counts={"counts": counts})
        if counts is None:
            assert entry.everyone is not None
            counts = [facts["rows"] for facts in entry.everyone]
        return entry, tuple(counts)

    def _enter_parts(
        self,
        operation: str,
        x: Tensor,
        op: str,
        counts: Counts,
        dim: int,
        check: bool | None,
        ops: tuple[str, ...] = OPS,
    ) -> tuple[Entry, _Fixed]:
        """Enter a collective that distributes the sum of the ranks' tensors; return how much each rank receives."""
        asked: Sequence[int] = ()

        def state() -> Facts:
            nonlocal asked
            rows = checked_dim(x, dim)
            asked = parts(counts, self.size, x, rows)
            return {"op": checked_op(op, x, ops), "counts": list(asked), "dim": rows}

        entry = self._enter(operation, x, state, check, ("dtype", "shape", "op", "counts", "dim"))
        return entry, tuple(asked)

    def _enter_scatter(
        self, x: Tensor | None, root: int, counts: Counts, dim: int, check: bool | None
    ) -> tuple[Entry, Tensor, _Fixed]:
        """Enter a scatter; return this rank's tensor, one without rows where it passed none, and the root's counts."""
        checking = self._begins_with_handshake("scatter", check, {"counts": counts})

        def state() -> Facts:
            self._checked_rank("root", root)
            if x is None and not checking:
                raise ValueError("without checking, every rank passes a tensor: here for example like.new_empty(0, d)")
            if self.rank == root:
                if x is None:
                    raise ValueError("rank `root` must pass the tensor to scatter, got None")
                rows = checked_dim(x, dim)
                asked = parts(counts, self.size, x, rows)
                others = without(x.shape, rows)
                return {"root": root, "counts": list(asked), "dtype": str(x.dtype), "others": others, "dim": rows}
            if x is None:
                return {"root": root}
            rows = checked_dim(x, dim)
            return {"root": root, "dtype": str(x.dtype), "others": without(x.shape, rows), "dim": rows}

        entry = self._enter("scatter", x, state, check, ("root",), counts={"counts": counts}, optional=True)
        if entry.everyone is not None:
            root_facts = _facts_of_root(entry.everyone, root)
            counts = root_facts["counts"]
            if x is None:
                shape = [*root_facts["others"]]
                shape.insert(root_facts["dim"], 0)
                x = torch.empty(shape, dtype=getattr(torch, root_facts["dtype"].removeprefix("torch.")))
        assert x is not None
        assert counts is not None
        return entry, x, tuple(counts)

    def _enter_all_to_all(
        self, x: Tensor, send_counts: Counts, receive_counts: Counts, dim: int, check: bool | None
    ) -> tuple[Entry, _Fixed, _Fixed]:
        """Enter an all_to_all; return how much this rank sends to each rank, and receives from it."""

        def state() -> Facts:
            rows = checked_dim(x, dim)
            asked = parts(send_counts, self.size, x, rows, "send_counts")
            if receive_counts is not None:
                checked_counts(receive_counts, self.size, None, x, "receive_counts")
            return {
                "dtype": str(x.dtype),
                "dim": rows,
                "other dimensions": without(x.shape, rows),
                "sends": list(asked),
                "expects": None if receive_counts is None else list(receive_counts),
            }

        both_counts = {"send_counts": send_counts, "receive_counts": receive_counts}
        entry = self._enter("all_to_all", x, state, check, ("dtype", "dim", "other dimensions"), counts=both_counts)
        if entry.everyone is not None:
            _check_both_ends(entry.everyone)
            send_counts = entry.everyone[self.rank]["sends"]
            receive_counts = [facts["sends"][self.rank] for facts in entry.everyone]
        assert send_counts is not None
        assert receive_counts is not None
        return entry, tuple(send_counts), tuple(receive_counts)


def _facts_of_root(everyone: Sequence[Facts], root: int) -> Facts:
    """Return the root's facts, which those of the other ranks must not contradict."""
    truth = everyone[root]
    for rank, facts in enumerate(everyone):
        for name in ("dtype", "dim", "others"):
            if name in facts and facts[name] != truth[name]:
                item = "other dimensions" if name == "others" else name
                raise ValueError(
                    f"scatter: {item} must be those of the root, rank {root}: {truth[name]}; rank {rank}: {facts[name]}"
                )
    return truth


def _check_both_ends(everyone: Sequence[Facts]) -> None:
    """Raise ValueError if a rank expects other counts than the ranks send it."""
    for rank, facts in enumerate(everyone):
        comes = [other["sends"][rank] for other in everyone]
        if facts["expects"] is not None and facts["expects"] != comes:
            raise ValueError(
                f"all_to_all: rank {rank} has receive_counts {facts['expects']}, but the ranks send it {comes}"
            )

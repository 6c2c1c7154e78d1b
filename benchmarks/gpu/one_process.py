"""Collectives, losses, PartialFC and gradient caching in one process, without a group and in one of one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from .cases import (
    Case,
    cases_of_caching,
    cases_of_communication,
    cases_of_losses,
    cases_of_partial_fc,
    cases_of_tiles,
)
from .device import GPU, Row

_ROWS = 70


def correctness() -> Iterator[Row]:
    """Yield the errors of communicator, losses, PartialFC and gradient caching without a process group."""
    yield from _rows([*_cases_of_one_rank(), *cases_of_tiles(), *cases_of_caching(_ROWS)])


def nccl() -> Iterator[Row]:
    """Yield the errors of communicator, losses and PartialFC in a group of one rank: over NCCL, on a CPU over gloo."""
    backend = "nccl" if GPU else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            yield from ({"backend": backend} | row for row in _rows(_cases_of_one_rank()))
        finally:
            dist.destroy_process_group()


def _cases_of_one_rank() -> list[Case]:
    return [*cases_of_communication(_ROWS), *cases_of_losses(_ROWS), *cases_of_partial_fc(_ROWS)]


def _rows(cases: Iterable[Case]) -> Iterator[Row]:
    """Yield the row of each case; raise after the last if one is wrong."""
    wrong = []
    for case in cases:
        row = case.row([case.run_rank()])
        yield row
        wrong += [row] if "error" in row else []
    if wrong:
        raise AssertionError(f"{len(wrong)} cases are wrong; the first: {wrong[0]}")

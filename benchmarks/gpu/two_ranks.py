"""The cases on two ranks: over NCCL where it allows two ranks on one card, else over gloo, with the same tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from wholebatch.testing import RankError, run_ranks

from .cases import Case, Part, cases_of_communication, cases_of_losses, cases_of_partial_fc
from .device import DEVICE, GPU, Row

_LIMIT_S = 90.0  # of one group of cases, its processes' start included
_REFUSAL = "Duplicate GPU detected"


def two_ranks(limit_s: float = _LIMIT_S) -> Iterator[Row]:
    """Yield the errors of each case on two ranks with equal numbers of rows, and with different ones."""
    backend, wrong = "gloo", []
    if GPU:
        refused = refusal_of_nccl(limit_s)
        backend = "gloo" if refused else "nccl"
        yield {"case": "NCCL with two ranks on one card", **(refused or {"backend": "nccl"})}
    for counts in ((35, 35), (44, 26)):
        for cases in (cases_of_communication(*counts), cases_of_losses(*counts), cases_of_partial_fc(*counts)):
            for row in group_of_cases(cases, backend, limit_s):
                yield {"backend": backend, "device": DEVICE.type} | row
                wrong += [row] if "error" in row else []
    if wrong:
        raise AssertionError(f"{len(wrong)} cases are wrong; the first: {wrong[0]}")


def group_of_cases(cases: Sequence[Case], backend: str, limit_s: float) -> list[Row]:
    """Return the rows of cases that two processes run one after the other; one row if a process fails or hangs."""
    try:
        ranks = run_ranks(run_cases, 2, cases, backend=backend, timeout_s=limit_s)
    except RankError as error:
        print(error)  # with every rank's traceback
        return [{"case": cases[0].name, "ranks": 2, "rows": list(cases[0].counts), "error": _reason(error)}]
    return [case.row([rank[number] for rank in ranks]) for number, case in enumerate(cases)]


def run_cases(cases: Sequence[Case]) -> list[Part]:
    """Return this rank's halves of all cases."""
    if GPU:
        torch.cuda.set_device(0)
    return [case.run_rank() for case in cases]


def refusal_of_nccl(limit_s: float) -> Row | None:
    """Return why NCCL does not take two ranks on one card: "skipped" if it says so, "error" if it fails otherwise."""
    try:
        run_ranks(_sum_over_ranks, 2, backend="nccl", timeout_s=limit_s)
    except RankError as error:
        print(error)
        if _REFUSAL in str(error):
            return {"skipped": f"NCCL refuses it ({_REFUSAL}); these cases ran over gloo, with CUDA tensors"}
        return {"error": f"{_reason(error)}; these cases ran over gloo, with CUDA tensors"}
    return None


def _sum_over_ranks() -> None:
    x = torch.ones(3, device=torch.device("cuda", 0))
    dist.all_reduce(x)
    if x.tolist() != [2.0] * 3:
        raise AssertionError(f"NCCL added two ones to {x.tolist()}")


def _reason(error: RankError) -> str:
    """Return the last line of the first traceback, which names the error; how long it took, if it hung."""
    if isinstance(error, TimeoutError):
        return str(error).splitlines()[0]
    lines = [line for line in str(error).split("\n--- ")[1].splitlines() if line.strip()]
    return lines[-1].strip()

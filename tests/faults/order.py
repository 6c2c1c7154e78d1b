"""Backward passes that differ between ranks: in another order, skipped, or after one more forward pass.

    python tests/faults/order.py --seed 0 --count 60

Every configuration is a loss, an exchange, 2 or 3 ranks and a fault on one of them. The outcomes are

    same error     every rank raises the same error, and the group continues: the next step is right on all ranks
    right          the fault has no effect, and every gradient is that of the dense float64 reference
    late error     a rank raises, another waits for it until its timeout                                 (forbidden)
    silent wrong   a rank ends with another gradient, and no rank raises                                 (forbidden)
    lost           a process is aborted, or does not end                                                 (forbidden)

A backward pass that does not communicate (`WholeBatch(strategy="replicate")`) cannot detect the fault: these cases are
counted separately, as "does not communicate".
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from loss_cases import EVERY, dense, options_of, rows_of, whole_batch

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.testing import RankError, run_ranks

FAULTS = (
    "another order",  # of the backward passes of two losses
    "another order of one loss",  # of two calls of the same loss
    "skipped backward",
    "another forward",  # one more than on the other ranks
    "another gradient",  # dF/dL differs
    "nothing",
)
WHOLE_BATCH = ("WholeBatch, gather", "WholeBatch, root", "WholeBatch, replicate")
SILENT = "WholeBatch, replicate"  # no communication in backward
PARTIAL_FC = "partial_fc"
SCALE, BIAS = 9.0, -2.5


class Problem:
    """One loss on this rank's rows: `loss()` computes it again from the same leaves."""

    def __init__(self, name: str, exchange: str, seed: int) -> None:
        self.name, self.exchange = name, exchange
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.counts = ((4, 3), (3, 2, 4))[self.size - 2]
        self.case = EVERY.get(name, EVERY["clip"])
        self.whole = whole_batch(self.case, self.counts, seed=seed)
        rows = rows_of(self.case, self.counts, self.rank)
        self.leaves = [z[at].clone() for z, at in zip(self.whole, rows, strict=True)]
        # For replicated tensors, each rank has a share of the gradient, which no reference gives.
        self.compared = [at for at in self.case.differentiable if not self.case.inputs[at].replicated]
        self.differentiated = [self.leaves[at].requires_grad_() for at in self.compared]
        self.scale = torch.tensor(SCALE, dtype=torch.float64)
        self.bias = torch.tensor(BIAS, dtype=torch.float64)
        if name == PARTIAL_FC:
            self.head = wb.PartialFC(6, 9, sync=None).double()
            self.labels = torch.arange(len(self.leaves[0])) % 9
            self.differentiated = [self.leaves[0]]
        self.whole_batch = (
            wb.WholeBatch(lambda x, y: wb.reference.clip_loss(x, y, SCALE), sync=None, strategy=name.rpartition(" ")[2])
            if name in WHOLE_BATCH
            else None
        )

    def loss(self) -> torch.Tensor:
        if self.name == PARTIAL_FC:
            return self.head(self.leaves[0], self.labels)
        if self.whole_batch is not None:
            return self.whole_batch(*self.leaves)
        options = options_of(self.case, exchange=self.exchange, sync=None)
        loss: torch.Tensor = self.case.call(wb.functional, *self.leaves, self.scale, self.bias, **options)
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Return the leaves' gradients, and clear them."""
        found = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in self.differentiated]
        for x in self.differentiated:
            x.grad = None
        return found

    def right(self) -> list[torch.Tensor]:
        """Return this rank's rows of the reference's gradients; for PartialFC, those of a step without a fault."""
        if self.name == PARTIAL_FC:
            self.loss().backward()
            return self.gradients()
        expected = dict(zip(self.case.differentiable, dense(self.case, self.whole, SCALE)[1:], strict=False))
        rows = rows_of(self.case, self.counts, self.rank)
        return [expected[at][rows[at]] for at in self.compared]


def step(problem: Problem, other: Problem, fault: str, culprit: bool) -> None:
    """Make a training step with one fault: two forward and two backward passes."""
    first, second = problem.loss(), other.loss()
    if fault == "another forward" and culprit:
        problem.loss()
    if fault == "another gradient" and culprit:
        first = 3 * first
    losses = [first, second]
    if fault.startswith("another order") and culprit:
        losses.reverse()
    if fault == "skipped backward" and culprit:
        losses.pop(0)
    for loss in losses:
        loss.backward()
    problem.loss()  # the next step's


def outcome(problem: Problem, other: Problem, fault: str, culprit: bool) -> tuple[str, str]:
    """Return the outcome on this rank: "error" and its text, "right" or "wrong"."""
    expected = problem.right()
    try:
        step(problem, other, fault, culprit)
    except (ValueError, wb.comm.CommunicationError) as error:
        problem.gradients()
        other.gradients()
        return type(error).__name__, str(error)
    found = problem.gradients()
    other.gradients()
    errors = [(a - b).norm() / b.norm().clamp(min=1e-12) for a, b in zip(found, expected, strict=True)]
    worst = torch.stack(errors).max().item()
    return ("right", "") if worst < 1e-8 else ("wrong", f"relative error {worst:.1e}")


def one_of(configurations: list[tuple[str, str, str, int, int]]) -> list[Any]:
    """Run these configurations one after the other in the same group; return this rank's outcomes."""
    found = []
    for name, exchange, fault, culprit, seed in configurations:
        problem = Problem(name, exchange, seed)
        another = name if fault == "another order of one loss" else ("clip" if name == "siglip" else "siglip")
        other = Problem(another, exchange, seed + 1)
        result = outcome(problem, other, fault, dist.get_rank() == culprit)
        dist.barrier()
        after = outcome(problem, other, "nothing", False)
        found.append((*result, after[0]))
    return found


def classified(ranks: list[tuple[str, str, str]], name: str) -> str:
    """Return the class of a configuration, from the outcome on each rank."""
    kinds = {kind for kind, _, _ in ranks}
    if any(after != "right" for _, _, after in ranks):
        return "group lost"
    if kinds == {"right"}:
        return "right"
    if "wrong" in kinds:
        return "does not communicate" if name == SILENT else "silent wrong"
    if kinds == {"ValueError"} and len({text for _, text, _ in ranks}) == 1:
        return "same error"
    return "late error"


FORBIDDEN = ("late error", "silent wrong", "group lost", "lost")


def configurations(seed: int, count: int) -> list[tuple[int, tuple[str, str, str, int, int]]]:
    """Return (ranks, (loss, exchange, fault, culprit, seed)): every loss in turn, each fault as often as the others."""
    generator = random.Random(seed)
    names = [*EVERY, *WHOLE_BATCH, PARTIAL_FC]
    generator.shuffle(names)
    found = []
    for index in range(count):
        name, size = names[index % len(names)], 2 + index % 2
        exchange = generator.choice(USED_EXCHANGES)
        fault = FAULTS[(index + index // len(names)) % len(FAULTS)]
        found.append((size, (name, exchange, fault, generator.randrange(size), index)))
    return found


def campaign(seed: int, count: int, *, one_by_one: bool = False) -> list[dict[str, Any]]:
    """Return a record with the class of every configuration."""
    chosen = configurations(seed, count)
    records: list[dict[str, Any]] = []
    for size in (2, 3):
        of_size = [configuration for ranks, configuration in chosen if ranks == size]
        groups = [[one] for one in of_size] if one_by_one else [of_size]
        for group in groups:
            try:
                results = run_ranks(one_of, size, group, timeout_s=60 if one_by_one else 300)
            except RankError as error:
                if not one_by_one and len(group) > 1:  # a process was lost: find the configuration
                    return campaign(seed, count, one_by_one=True)
                results = None
                text = str(error)
            for at, configuration in enumerate(group):
                record = dict(zip(("loss", "exchange", "fault", "culprit", "seed"), configuration, strict=True))
                record["ranks"] = size
                if results is None:
                    record |= {"class": "lost", "text": text}
                else:
                    ranks = [of_rank[at] for of_rank in results]
                    record |= {"class": classified(ranks, record["loss"]), "text": " | ".join(r[1] for r in ranks)}
                records.append(record)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records = campaign(given.seed, given.count)
    counts = Counter((record["fault"], record["class"]) for record in records)
    for (fault, kind), number in sorted(counts.items()):
        print(f"{fault:28} {kind:22} {number:4}")
    bad = [record for record in records if record["class"] in FORBIDDEN]
    for record in bad:
        print(json.dumps(record)[:600])
    print(f"{len(records)} configurations, {len(bad)} forbidden")
    if given.json:
        facts = {"seed": given.seed, "torch": torch.__version__, "records": records}
        given.json.write_text(json.dumps(facts, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random faults in calls of every public entry point, on two and three processes, and their outcome on all ranks.

    python tests/faults/calls.py --seed 0 --count 300 [--json FILE] [--only INDEX ...] [--entry NAME] [--mpi mpich]

Each case is a right call (compared with a dense computation in float64), the same call with one thing wrong on one
rank, and the right call again, which must give the same bits as before.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import public_names
from case import ENTRIES, PLANTED
from common import Outcome, finish, options, show_table
from rank_processes import HANG_S, TIMEOUT_S, Lost, Ranks, RanksOverMPI

CLASSES = {
    "same error": "the same on all ranks; state is unchanged, and the group continues with the same bits",
    "own error": "the user's function raised; all ranks raise its error, and the group continues with the same bits",
    "refused alone": "refused by code that does not communicate (a constructor); the group continues",
    "error and timeout": "an error or nothing on this rank, a CommunicationError within the timeout on others",
    "right": "accepted, with the value and gradients of the dense computation",
    "wrong": "accepted, with another value or gradient",
    "different errors": "errors on all ranks that differ",
    "error here only": "the other ranks returned a result",
    "other type": "an error other than ValueError, TypeError, CommunicationError or that of the user's function",
    "not as before": "the same error on all ranks, but state changed, or the group does not continue",
    "legal call refused": "an error for a call without a fault",
    "hang": "no answer long after the timeout",
    "process lost": "a process ended",
    "no right call": "the right call failed before the fault",
}
ALLOWED = {
    "mistake": {"same error", "own error", "right", "refused alone"},
    "legal": {"right"},
    "user": {"own error", "same error", "right"},  # right if the call did not reach the function
    "absent": {"same error", "error and timeout", "right", "refused alone"},
}


@dataclass(frozen=True)
class Planned:
    """A case, before it has run."""

    index: int
    seed: str
    entry: str
    size: int


def plan(seed: int, count: int, entries: list[str]) -> list[Planned]:
    """Return cases of every entry point in turn, in a random order, on two and three ranks."""
    rng = random.Random(seed)
    planned: list[Planned] = []
    while len(planned) < count:
        for name in rng.sample(entries, len(entries)):
            index = len(planned)
            planned.append(Planned(index, f"{seed}:{index}", name, rng.choice([2, 3])))
    return planned[:count]


def classify(facts: dict[str, Any], made: list[Any], called: list[Any] | None, after: list[Any]) -> tuple[str, str]:
    """Return the class of a case, and a summary of the ranks' answers."""
    for answers in (made, called or [], after):
        lost = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Lost)}
        if any(not answer.hangs for answer in lost.values()):
            return "process lost", f"{lost}; {_summary(answers)}"
        if lost:
            return "hang", f"{lost}; {_summary(answers)}"
    if called is None:
        return _continues(facts, "refused alone", _summary(made), after)
    concerned = [called[rank] for rank in facts["ranks"]]
    errors = [answer for answer in concerned if answer["error"]]
    text = _summary(called)
    if any(not answer["allowed"] for answer in errors):
        return "other type", text
    if not errors:
        right = any(all(answer["right"][at] for answer in concerned if len(answer["right"]) > 1) for at in (0, 1))
        return (("right" if right and all(answer["right"] for answer in concerned) else "wrong"), text)
    if any(answer["transport"] for answer in errors):
        return "error and timeout", text
    if len(errors) < len(concerned):
        return "error here only", text
    if facts["kind"] == "legal":
        return "legal call refused", text
    local = [answer for answer in errors if answer["user"]]
    if local and all(local[0]["text"] in answer["text"] for answer in errors):
        return _continues(facts, "own error", text, after, called)
    alike = len({(answer["error"], answer["text"]) for answer in errors}) == 1
    return _continues(facts, "same error", text, after, called) if alike else ("different errors", text)


def _continues(facts: dict[str, Any], name: str, text: str, after: list[Any], called: Any = ()) -> tuple[str, str]:
    if not all(answer.get("untouched", True) for answer in called):
        return "not as before", f"state was changed; {text}"
    if not all(answer.get("same bits") for answer in after):
        return "not as before", f"afterward {_summary(after)}; before that {text}"
    return name, text


def _summary(answers: list[Any]) -> str:
    """Return a summary of each rank's answer."""
    parts = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, Lost):
            continue
        error = f"{answer['error']}: {answer['text'][:300]}" if answer.get("error") else None
        parts.append(f"rank {rank}: {error or {k: v for k, v in answer.items() if k != 'bits'}}")
    return " || ".join(parts)


class Lane:
    """Run cases one after the other, on the same processes until one of these is lost.

    Args:
        timeout_s: the timeout of the process groups.
        hang_s: the seconds that a faulty call may take.
        mpi: an environment with MPI, "mpich" or "openmpi"; "" is gloo.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, hang_s: float = HANG_S, mpi: str = "") -> None:
        self.timeout_s, self.hang_s, self.mpi = timeout_s, hang_s, mpi
        self.ranks: Ranks | None = None
        self.size = 0
        self.before: int | None = None  # the previous case of the same processes

    def run(self, case: Planned) -> Outcome:
        """Run one case."""
        if self.ranks is None or self.size != case.size or not self.ranks.alive:
            self.close()
            started = (
                RanksOverMPI(case.size, self.timeout_s, self.mpi) if self.mpi else Ranks(case.size, self.timeout_s)
            )
            self.ranks, self.size = started, case.size
            self.ranks.ask("ready")
        facts, (name, text) = self._classified(case, self.ranks)
        if name == "no right call" and self.before is not None:
            text += f"; the previous case of these processes: {self.before}"
        self.before = case.index
        if name not in ("same error", "own error", "right", "refused alone"):
            self.close()
        kind = facts["kind"]
        return Outcome(
            name,
            f"[{case.index}] {case.entry} on {case.size} ranks, rank {facts['culprit']}: {facts['text']} ({kind})",
            text,
            f"python tests/faults/calls.py --seed {case.seed.split(':')[0]} --only {case.index}"
            + f" --mpi {self.mpi}" * bool(self.mpi),
            name in ALLOWED[kind],
        )

    def _classified(self, case: Planned, ranks: Ranks) -> tuple[dict[str, Any], tuple[str, str]]:
        begun = ranks.ask("begin", case.seed, case.entry)
        if not ranks.alive:
            return {"culprit": None, "text": "", "kind": "legal"}, ("no right call", str(begun))
        facts = begun[0]
        before = ranks.ask("healthy")
        if not ranks.alive or not all(answer.get("right") for answer in before):
            return facts, ("no right call", _summary(before) or str(before))
        made = ranks.ask("construct")
        if not ranks.alive:
            return facts, classify(facts, made, None, [])
        called = None
        if not any(answer["error"] for answer in made):
            called = ranks.ask("call", within_s=self.hang_s)
            if not ranks.alive or any(answer.get("transport") for answer in called):
                return facts, classify(facts, made, called, [])
        after = ranks.ask("healthy")
        if ranks.alive:
            for one, two in zip(before, after, strict=True):
                two["same bits"] = two.get("bits") == one["bits"]
        return facts, classify(facts, made, called, after)

    def close(self) -> None:
        """End the processes."""
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = self.before = None


def run(planned: list[Planned], lanes: int = 2, timeout_s: float = TIMEOUT_S, mpi: str = "") -> list[Outcome]:
    """Run all cases; each lane takes those with its number of ranks, so that processes serve many cases."""
    by_size = sorted(planned, key=lambda case: case.size)
    share = [by_size[i * len(by_size) // lanes : (i + 1) * len(by_size) // lanes] for i in range(lanes)]

    def run_share(cases: list[Planned]) -> list[tuple[int, Outcome]]:
        lane = Lane(timeout_s, 4 * timeout_s, mpi)
        try:
            return [(case.index, lane.run(case)) for case in cases]
        finally:
            lane.close()

    with ThreadPoolExecutor(lanes) as pool:
        return [outcome for _, outcome in sorted(pair for of in pool.map(run_share, share) for pair in of)]


def main(arguments: argparse.Namespace) -> int:
    """Run the campaign."""
    began = time.monotonic()
    public_names.check(ENTRIES)
    entries = [name for name in sorted({**ENTRIES, **PLANTED}) if arguments.entry and arguments.entry in name]
    entries = entries or sorted(ENTRIES)
    only = arguments.only
    planned = plan(arguments.seed, max(arguments.count, 1 + max(only, default=0)), entries)
    planned = [case for case in planned if case.index in only] if only else planned
    outcomes = run(planned, arguments.lanes, arguments.timeout, arguments.mpi)
    per_entry = Counter(case.entry for case in planned)
    if not only:
        show_table("cases of each entry point", ("entry point", "cases"), sorted(per_entry.items()))
    return finish(
        "calls", CLASSES, outcomes, arguments, began, transport=arguments.mpi or "gloo", entries=dict(per_entry)
    )


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = options(__doc__, count=300)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="the indices of single cases")
    parser.add_argument("--entry", help="only entry points whose name contains this")
    parser.add_argument("--lanes", type=int, default=2, help="sets of processes that run in parallel")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="timeout of the process groups in seconds")
    parser.add_argument("--mpi", default="", choices=("mpich", "openmpi"), help="run over MPI instead of gloo")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parsed()))

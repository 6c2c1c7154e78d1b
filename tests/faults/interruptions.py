"""One run on a user's own pictures that is interrupted again and again, and resumed on other ranks and workers.

    python tests/faults/interruptions.py --interruptions 20 --seed 0

Each interruption comes at a random moment: SIGKILL to the process that was started, to a rank, to a worker that reads
pictures, or to all of them; SIGTERM or SIGINT to the first, to a rank, or to all of them with their workers, as a
terminal sends it. Each time the run is resumed on another number of ranks (1, 2, 3) with another number of workers for
each (0, 1, 2). In the end it finishes. Its metrics must have every step once, with the numbers of a run that nobody
has disturbed, up to the order of summation of float32 on other ranks.

Programs start as forks of this one, as in kills.py. The exit code is 1 if an outcome is forbidden.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
from glyph_files import SMALL, write_pairs
from kills import PLANTS, Program, Wrong, _rank_server, _recorded
from train_runs import MEASURED

TOLERANCE = 1e-4  # of a loss of about 3, after a thousand steps in float32
GONE_S = 30
KILLS, STOPS = ("launcher", "rank", "worker", "everyone"), ("launcher", "rank", "everyone")


def options(data: Path, run: Path, steps: int) -> list[str]:
    return [
        "--data", str(data), "--run-folder", str(run), "--steps", str(steps), "--validate-every", "10",
        "--checkpoint-every", "3", *SMALL, "--no-audit", "--no-tensorboard", "--loss", "global_contrastive",
    ]  # fmt: skip


def workers_of(pids: list[int]) -> list[int]:
    """Return the process ids of the processes that these ranks have started."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


class Interruptions:
    """The run, and what has happened to it."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments
        self.data = write_pairs(folder / "data")
        self.run, self.whole = folder / "run", folder / "whole"
        self.rng = random.Random(arguments.seed)
        self.ranks, self.workers = 1, 0
        self.lines: list[dict[str, Any]] = []

    def start(self, arguments: list[str], plant: str = "") -> Program:
        return Program(arguments, self.folder, spawn=self.arguments.spawn, plant=plant)

    def undisturbed(self) -> None:
        """Make the run to compare with, on one process without workers."""
        program = self.start([*options(self.data, self.whole, self.arguments.steps), "--workers", "0"])
        if program.wait() != 0:
            raise Wrong("wrong exit", program.output())

    def next_start(self) -> Program:
        """Start or resume the run on other ranks, with other workers."""
        self.ranks = self.rng.choice([n for n in (1, 2, 3) if n != self.ranks])
        self.workers = self.rng.choice([n for n in (0, 1, 2) if n != self.workers])
        on = ["--ranks", str(self.ranks), "--workers", str(self.workers)]
        if (self.run / "config.json").exists():
            return self.start(["--resume", str(self.run), *on], self.arguments.plant)
        return self.start([*options(self.data, self.run, self.arguments.steps), *on], self.arguments.plant)

    def interrupt(self) -> bool:
        """Start the run and interrupt it; return whether it was still running then."""
        before = _recorded(self.run)
        program = self.next_start()
        self.wait_for_a_moment(program, before)
        started = program.ranks()
        ranks = started or [program.pid]
        workers = workers_of(ranks)
        number = self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        whom = self.rng.choice(KILLS if number == signal.SIGKILL else STOPS)
        whom = "rank" if whom == "worker" and not workers else whom
        whom = "launcher" if whom == "rank" and not started else whom
        targets = {
            "launcher": [program.pid], "everyone": [program.pid, *ranks, *workers], "rank": [self.rng.choice(ranks)],
            "worker": [self.rng.choice(workers or [0])],
        }[whom]  # fmt: skip
        hit = [program.send(pid, number) for pid in dict.fromkeys(targets)]
        code = program.wait()
        line = {
            "ranks": self.ranks, "workers": self.workers, "signal": number.name, "to": whom, "code": code,
            "steps before": before, "steps after": _recorded(self.run),
        }  # fmt: skip
        print(" | ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        self.check_exit(program, number, whom, code, any(hit))
        self.check_gone([*ranks, *workers, *workers_of(ranks)])
        if code != 0:
            self.lines.append(line)
        return code != 0

    def wait_for_a_moment(self, program: Program, before: int) -> None:
        if self.rng.random() < 0.25:
            deadline = time.monotonic() + self.rng.uniform(0, 3)
            while time.monotonic() < deadline and program.poll() is None:
                time.sleep(0.002)
            return
        new = self.rng.randint(1, 4)
        while not self.has_resumed(program, before, new) and program.poll() is None:
            time.sleep(0.002)
        time.sleep(self.rng.uniform(0, 0.05))

    def has_resumed(self, program: Program, before: int, new: int) -> bool:
        """Return whether the run has made so many steps since this start."""
        found = re.search(r"resuming after step (\d+)", program.out.read_text())
        since = int(found[1]) if found else 0
        started = found is not None or "the first step took" in program.out.read_text()
        return started and "the first step took" in program.out.read_text() and _recorded(self.run) >= since + new

    def check_exit(self, program: Program, number: int, whom: str, code: int, hit: bool) -> None:
        """Raise unless the run has ended as documented."""
        errors = program.err.read_text()
        if "Traceback" in errors:
            raise Wrong("wrong exit", f"a traceback\n{program.output()}")
        if code == 0 or not hit:
            return
        if number == signal.SIGKILL:
            alone = self.ranks == 1
            right = (
                code == -signal.SIGKILL if whom in ("launcher", "everyone") or (whom == "rank" and alone) else code == 1
            )
            if whom == "worker":
                right = code == 1 and "a process that reads the data for rank" in errors
        else:
            right = code in (-number, 128 + number)
        if not right or errors.count("wholebatch train: error: ") > 1:
            raise Wrong("wrong exit", f"{signal.Signals(number).name} to {whom}: exit code {code}\n{program.output()}")

    def check_gone(self, pids: list[int]) -> None:
        """Raise unless all processes of the run end."""
        deadline = time.monotonic() + GONE_S
        while left := [pid for pid in pids if is_alive(pid)]:
            if time.monotonic() > deadline:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise Wrong("hang", f"{len(left)} processes still ran {GONE_S} s after the run had ended")
            time.sleep(0.01)

    def finish(self) -> None:
        """Let the run end by itself."""
        program = self.next_start()
        if program.wait() != 0:
            raise Wrong("not resumed", program.output())

    def compare(self) -> dict[str, float]:
        """Return the largest differences from the undisturbed run; raise if they are no rounding."""
        mine, theirs = (rows_of(path) for path in (self.run, self.whole))
        if [row["step"] for row in mine] != [*range(1, self.arguments.steps + 1)]:
            raise Wrong("other numbers", f"the steps of metrics.jsonl are {[row['step'] for row in mine]}")
        found = {
            name: max(abs(a[name] - b[name]) for a, b in zip(mine, theirs, strict=True))
            for name in ("loss", "grad_norm")
        }
        held_out = json.loads((self.whole / "report.json").read_text())["test_texts"]
        reports = [json.loads((path / "report.json").read_text()) for path in (self.run, self.whole)]
        found["recall@10"] = abs(reports[0]["image_to_text"]["recall@10"] - reports[1]["image_to_text"]["recall@10"])
        if found["loss"] > TOLERANCE or found["recall@10"] > 1.5 / held_out:
            raise Wrong("other numbers", f"differences from the undisturbed run: {found}")
        return found


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


def main() -> int:
    """Run the campaign; return 1 if an outcome is forbidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interruptions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--spawn", action="store_true", help="start programs as users do")
    parser.add_argument("--plant", choices=PLANTS, default="", help="a planted defect, which should be found")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    arguments = parser.parse_args()
    began, outcome, detail, differences = time.monotonic(), "same numbers", "", {}
    with tempfile.TemporaryDirectory(prefix="wholebatch-interruptions-") as folder, _rank_server():
        campaign = Interruptions(Path(folder), arguments)
        try:
            campaign.undisturbed()
            while len(campaign.lines) < arguments.interruptions:
                if not campaign.interrupt():
                    raise Wrong("too short", f"the run ended after {len(campaign.lines)} interruptions; more --steps")
            campaign.finish()
            differences = campaign.compare()
        except Wrong as wrong:
            outcome, detail = wrong.outcome, wrong.detail
    kinds = Counter(f"{line['signal']} to {line['to']}" for line in campaign.lines)
    print(f"\n{len(campaign.lines)} interruptions: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}")
    print(f"{outcome}; largest differences {differences}; {time.monotonic() - began:.0f} s\n{detail}")
    if arguments.json:
        facts = {"seed": arguments.seed, "outcome": outcome, "detail": detail, "differences": differences}
        about = common.versions()
        arguments.json.write_text(json.dumps({**facts, **about, "interruptions": campaign.lines}, indent=1) + "\n")
    return int(outcome != "same numbers")


if __name__ == "__main__":
    sys.exit(main())

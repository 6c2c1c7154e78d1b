"""Runs of `wholebatch train` that are killed, or asked to stop, at random moments: the final bits must be the same.

    python tests/faults/kills.py --kills 40 --terms 20 --seed 0

Both tasks run on one process and on two. A kill is SIGKILL, to the process that was started or to a rank; the run is
resumed, and perhaps killed again. A request to stop is SIGTERM or SIGINT, to the process that was started, to a rank,
or to all of them as a scheduler sends it; the run is resumed. In the end the run finishes, and its weights, metrics and
report (except times) are compared, byte by byte, with those of an undisturbed run.

Programs start as forks of this one, which has imported everything; with --spawn they start as users start them, which
takes much longer. The exit code is 1 if any outcome is forbidden.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from glyph_files import SMALL, write_pairs
from train_runs import MEASURED

STEPS = 24
TIMEOUT_S = 240
FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif-Bold")
ALLOWED = {
    "same bits": "the final weights, metrics and report are those of an undisturbed run",
}
FORBIDDEN = {
    "other bits": "some of them differ from those of an undisturbed run",
    "not resumed": "a run that has started could not be resumed",
    "wrong exit": "the exit code, the lines on stderr or the checkpoint's step are not as documented",
    "hang": f"a process still ran after {TIMEOUT_S} s",
}


@dataclass
class Case:
    """One run, and the kills or signals that it gets."""

    number: int
    kind: str  # "kill" or "term"
    task: str
    processes: int
    faults: list[str] = field(default_factory=list)
    outcome: str = ""
    detail: str = ""


class Wrong(Exception):  # noqa: N818  an outcome
    """A forbidden outcome."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(outcome, detail)
        self.outcome, self.detail = outcome, detail


# Start a program as a fork of this one, or as a new program.


class _RecordedProcess(ForkServerProcess):
    """A rank that writes to the output of the process that started it, and whose process id this program can find."""

    def start(self) -> None:
        self.folder = os.environ["KILLS_FOLDER"]
        super().start()
        with Path(self.folder, "pids.txt").open("a") as file:
            file.write(f"{self.pid}\n")

    def run(self) -> None:
        _redirect(Path(self.folder))
        super().run()


def _redirect(folder: Path) -> None:
    for stream, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), stream)


class _Context:
    """Like `multiprocessing.get_context("spawn")`, but ranks are forks of a server that has imported everything."""

    Pipe = staticmethod(multiprocessing.Pipe)
    Process = _RecordedProcess


class Program:
    """`wholebatch train` with these arguments, in a new process group."""

    def __init__(self, arguments: list[str], folder: Path, *, spawn: bool, plant: str) -> None:
        self.out, self.err, self._pids = (folder / name for name in ("out.txt", "err.txt", "pids.txt"))
        for path in (self.out, self.err, self._pids):
            path.write_text("")
        self._code: int | None = None
        self._spawned: subprocess.Popen[bytes] | None = None
        if spawn:
            command = [sys.executable, "-W", "error", "-m", "wholebatch", "train", *arguments]
            with self.out.open("wb") as out, self.err.open("wb") as err:
                self._spawned = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
            self.pid = self._spawned.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                _redirect(folder)
                os.environ["KILLS_FOLDER"] = str(folder)
                from wholebatch.__main__ import main
                from wholebatch_train.ranks import local_ranks

                local_ranks.multiprocessing = _Multiprocessing  # type: ignore[attr-defined]
                forkserver._forkserver.ensure_running = lambda: None  # it runs, though not as a child of this fork
                PLANTS[plant]()
                code = main(["train", *arguments])
            except SystemExit as leave:
                code = leave.code if isinstance(leave.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def ranks(self) -> list[int]:
        """Return the process ids of all ranks that have been started."""
        if self._spawned is not None:
            with suppress(OSError):
                children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
                found = [int(pid) for pid in children]
                return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            return []
        return [int(pid) for pid in self._pids.read_text().split()]

    def send(self, pid: int, number: int) -> bool:
        """Send a signal to this program or to one of its ranks; return whether the process was there."""
        if pid == self.pid and self.poll() is not None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def poll(self) -> int | None:
        """Return the exit code, or minus a signal, or None while it runs, as in `subprocess`."""
        if self._spawned is not None:
            self._code = self._spawned.poll()
        elif self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        """Wait for the program and return its exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.poll() is None:
            if time.monotonic() > deadline:
                for pid in (self.pid, *self.ranks()):
                    self.send(pid, signal.SIGKILL)
                raise Wrong("hang", self.output())
            time.sleep(0.005)
        assert self._code is not None
        return self._code

    def output(self) -> str:
        """Return the program's output so far."""
        return f"stdout: {self.out.read_text()[-1500:]}\nstderr: {self.err.read_text()[-3000:]}"


class _Multiprocessing:
    @staticmethod
    def get_context(method: str) -> Any:
        assert method == "spawn"
        return _Context


def _forgets_the_optimizer() -> None:
    """Plant a defect: a resumed run has the weights, but starts Adam's averages again."""
    import torch

    torch.optim.AdamW.load_state_dict = lambda self, state: None  # type: ignore[assignment, method-assign]


def _saves_at_the_end_alone() -> None:
    """Plant a defect: a signal stops the run, but no checkpoint is written."""
    from wholebatch_train.tasks.retrieve import Retrieve

    save: Callable[..., None] = Retrieve.save

    def sometimes(self: Any, folder: Path, state: Any, *, step: int, **more: Any) -> None:
        if step == STEPS:
            save(self, folder, state, step=step, **more)

    Retrieve.save = sometimes  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "forgets-optimizer": _forgets_the_optimizer,
    "no-checkpoint": _saves_at_the_end_alone,
}


# The campaign.


class Campaign:
    """The data, undisturbed runs and cases of a campaign."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._data = {
            "retrieve": write_pairs(folder / "one"),
            "identify": write_pairs(folder / "five", faces=FACES),
        }
        self._whole: dict[tuple[str, int], tuple[Path, float]] = {}

    def _options(self, case: Case, run: Path) -> list[str]:
        more = ["--task", "identify", "--head.margin", "adaface", "--head.sample-rate", "0.4"]
        return [
            "--data", str(self._data[case.task]), "--run-folder", str(run), "--steps", str(STEPS),
            "--validate-every", "6", "--checkpoint-every", "5", *SMALL, "--no-audit",
            "--ranks", str(case.processes),
            *(more if case.task == "identify" else ["--loss", "global_contrastive"]),
        ]  # fmt: skip

    def _start(self, arguments: list[str], *, plant: str | None = None) -> Program:
        plant = self._arguments.plant if plant is None else plant
        return Program(arguments, self._folder, spawn=self._arguments.spawn, plant=plant)

    def undisturbed(self, case: Case) -> tuple[Path, float]:
        """Return a run that ends by itself, and its duration."""
        key = case.task, case.processes
        if key not in self._whole:
            run = self._folder / f"whole-{case.task}-{case.processes}"
            began = time.monotonic()
            program = self._start(self._options(case, run), plant="")
            if program.wait() != 0:
                raise Wrong("wrong exit", f"an undisturbed run\n{program.output()}")
            self._whole[key] = run, time.monotonic() - began
        return self._whole[key]

    def run(self, case: Case, most: int) -> None:
        """Disturb the case's run by at most this many faults, then let it end and compare it."""
        rng = random.Random(f"{self._arguments.seed} {case.kind} {case.number}")
        run = self._folder / f"run-{case.kind}-{case.number}"
        try:
            whole, lasts = self.undisturbed(case)
            faults = min(most, rng.randint(1, 3)) if case.kind == "kill" else 1
            resumed = False
            while faults:
                program = self._resumed(run, resumed) if resumed else self._start(self._options(case, run))
                when = _wait_for_a_moment(program, run, rng, lasts, self._arguments.steps)
                hit = _disturb(program, case, run, rng, when)
                resumed = (run / "config.json").exists()
                if hit:
                    faults -= 1
                    case.faults.append(hit)
                elif (run / "report.json").exists():  # it ended before the fault: start again
                    shutil.rmtree(run)
                    resumed = False
            recorded = _recorded(run)
            program = self._resumed(run, resumed) if resumed else self._start(self._options(case, run))
            if program.wait() != 0:
                raise Wrong("not resumed", program.output())
            if case.kind == "term" and resumed:
                _went_on_after(program, recorded)
            _compare(run, whole)
            case.outcome = "same bits"
        except Wrong as wrong:
            case.outcome, case.detail = wrong.outcome, wrong.detail
        finally:
            shutil.rmtree(run, ignore_errors=True)

    def _resumed(self, run: Path, resumed: bool) -> Program:
        """Resume once the ranks of a killed program have noticed it and left the folder."""
        deadline = time.monotonic() + 60
        while True:
            program = self._start(["--resume", str(run)])
            time.sleep(0.3)
            while program.poll() is None and not program.out.read_text():
                time.sleep(0.005)
            if program.poll() != 2 or "is written by process" not in program.err.read_text():
                return program
            if time.monotonic() > deadline:
                raise Wrong("not resumed", program.output())


def _recorded(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_for_a_moment(
    program: Program, run: Path, rng: random.Random, lasts: float, steps: tuple[int, int] | None
) -> str:
    """Wait for a random moment of the run, or for one between two random steps, which take a small part of the run."""
    if steps is None and rng.random() < 0.4:
        delay = rng.uniform(0, 1.1 * lasts)
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and program.poll() is None:
            time.sleep(0.002)
        return f"after {delay:.2f} s"
    first, last = steps or (_recorded(run) + 1, STEPS + 1)
    step, more = rng.randint(first, last), rng.uniform(0, 0.05)
    while _recorded(run) < step and program.poll() is None and not (run / "model.safetensors").exists():
        time.sleep(0.001)
    time.sleep(more)
    return f"{more * 1000:.0f} ms after step {min(step, STEPS)}"


def _disturb(program: Program, case: Case, run: Path, rng: random.Random, when: str) -> str:
    """Send the case's signal and check that the run ends as documented; return "" if it had ended before."""
    number = signal.SIGKILL if case.kind == "kill" else rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
    whom = rng.choice(["launcher", "rank", "rank"] if case.kind == "kill" else ["launcher", "rank", "everyone"])
    ranks = program.ranks()
    if case.processes == 1 or not ranks:
        whom = "launcher"
    targets = {"launcher": [program.pid], "everyone": [program.pid, *ranks], "rank": [rng.choice(ranks or [0])]}[whom]
    rank = ranks.index(targets[0]) if whom == "rank" else None
    reached = [program.send(pid, number) for pid in targets]
    code = program.wait()
    what = f"{number.name} to {whom if rank is None else f'rank {rank}'} {when}, {_recorded(run)} steps"
    stderr = program.err.read_text()
    if not any(reached) and code:
        raise Wrong("wrong exit", f"{what}: the run had ended by itself with exit code {code}\n{program.output()}")
    if code == 0 or not any(reached):
        return ""
    if "Traceback" in stderr:
        raise Wrong("wrong exit", f"{what}: a traceback\n{program.output()}")
    if case.kind == "kill":
        if whom == "launcher":
            right = code == -signal.SIGKILL
        else:
            line = (
                rf"wholebatch train: error: rank {rank} of 2 was killed by SIGKILL .*; the other ranks were ended.*\n"
            )
            right = code == 1 and re.fullmatch(line, stderr) is not None
        if not right:
            raise Wrong("wrong exit", f"{what}: exit code {code}\n{program.output()}")
        return what
    if code not in (-number, 128 + number):
        raise Wrong("wrong exit", f"{what}: exit code {code}\n{program.output()}")
    stopped = re.search(r"stopped after step (\d+), which has a checkpoint; resume with: ", program.out.read_text())
    finished = "the run was finished" in program.out.read_text() + stderr
    early = _recorded(run) == 0 or "before the first step" in stderr or not program.out.read_text()
    if not (early or finished or (stopped and int(stopped[1]) == _recorded(run))):
        raise Wrong("wrong exit", f"{what}: no checkpoint of its last step\n{program.output()}")
    return what


def _went_on_after(program: Program, recorded: int) -> None:
    """Raise unless the resumed run reports the checkpoint of the last line of metrics.jsonl."""
    found = re.search(r"resuming after step (\d+)", program.out.read_text())
    if (int(found[1]) if found else 0) != recorded:
        raise Wrong("wrong exit", f"{recorded} steps in its metrics, but resumed elsewhere\n{program.output()}")


def _compare(run: Path, whole: Path) -> None:
    for name in ("model.safetensors", "metrics.jsonl", "report.json"):
        mine, theirs = (_without_time(path / name) for path in (run, whole))
        if mine != theirs:
            raise Wrong("other bits", f"{name} is another")


def _without_time(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else None
    rows = [json.loads(path.read_text())] if rows is None else rows
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


@contextmanager
def _rank_server() -> Iterator[None]:
    """Run the process that ranks are forks of."""
    import wholebatch_train.cli
    import wholebatch_train.launch  # noqa: F401  before the first fork

    tasks = [
        "wholebatch_train.tasks.identify",
        "wholebatch_train.tasks.retrieve",
        "wholebatch.gradcache",
        "wholebatch.heads",
    ]
    installed = ["torch._dynamo", "matplotlib.figure", "safetensors.torch"]  # optimizers import the first, for 2 s
    multiprocessing.set_forkserver_preload(["wholebatch_train.launch", *tasks, *installed])
    forkserver.ensure_running()
    yield


def main() -> int:
    """Run the campaign; return 1 if an outcome is forbidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=40, help="number of SIGKILLs")
    parser.add_argument("--terms", type=int, default=20, help="number of SIGTERMs or SIGINTs")
    parser.add_argument("--first", type=int, default=0, help="number of the first run of each kind")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", nargs="+", default=["retrieve", "identify"])
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"), help="disturb after these steps only")
    parser.add_argument("--spawn", action="store_true", help="start programs as users do")
    parser.add_argument("--plant", choices=PLANTS, default="", help="a planted defect, which should be found")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    arguments = parser.parse_args()
    began = time.monotonic()
    cases: list[Case] = []
    kinds = [(task, processes) for processes in arguments.processes for task in arguments.tasks]
    with tempfile.TemporaryDirectory(prefix="wholebatch-kills-") as folder, _rank_server():
        campaign = Campaign(Path(folder), arguments)
        for kind, count in (("kill", arguments.kills), ("term", arguments.terms)):
            done = 0
            while done < count:
                number = arguments.first + sum(case.kind == kind for case in cases)
                case = Case(number, kind, *kinds[number % len(kinds)])
                campaign.run(case, count - done)
                cases.append(case)
                done += max(1, len(case.faults))
                print(
                    f"{kind} {number}: {case.task} on {case.processes}: {case.outcome} | {'; '.join(case.faults)}",
                    flush=True,
                )
    return _report(cases, arguments, time.monotonic() - began)


def _report(cases: list[Case], arguments: argparse.Namespace, seconds: float) -> int:
    counts = Counter(case.outcome for case in cases)
    faults = Counter(case.kind for case in cases for _ in case.faults)
    print(f"\n{faults['kill']} kills and {faults['term']} requests to stop in {len(cases)} runs, {seconds:.0f} s")
    for name, meaning in (ALLOWED | FORBIDDEN).items():
        print(f"  {name:12} {counts[name]:4}  {meaning}")
    offending = [case for case in cases if case.outcome not in ALLOWED]
    for case in offending:
        print(f"\nFORBIDDEN, {case.outcome}: {case.kind} {case.number} ({case.task}, {case.processes} processes)")
        repeat = f"--first {case.number} --kills {int(case.kind == 'kill')} --terms {int(case.kind == 'term')}"
        repeat = f"--seed {arguments.seed} --tasks {case.task} --processes {case.processes} {repeat}"
        print(f"  {'; '.join(case.faults)}\n  {case.detail}\n  repeat: {sys.argv[0]} {repeat}")
    if arguments.json:
        facts = {
            "seed": arguments.seed,
            "faults": faults,
            "outcomes": counts,
            "cases": [asdict(case) for case in cases],
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(bool(offending))


if __name__ == "__main__":
    sys.exit(main())

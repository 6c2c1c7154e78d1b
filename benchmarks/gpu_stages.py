"""All checks and figures of one GPU, stage by stage, on a bare machine with torch alone: `make gpu`.

    PYTHONPATH=src python benchmarks/gpu_stages.py --out FOLDER [--only STAGE ...]

Each stage is a process of its own with a time limit, so that a failure, a hang or an illegal access costs that stage
alone. Correctness comes first; a stage of figures is skipped if a stage that checks them failed. FOLDER gets
STAGE.json and STAGE.log of each stage, and report.md. Without a GPU all stages run on the CPU at small sizes, to check
this program; they say so, and their times mean nothing. The stages themselves are in the package `gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "src")]  # the source beside this file

from gpu import figures, kernels, late_interaction, one_process, peers, plan, precision, report, two_ranks, versions  # noqa: E402
from gpu.device import DEVICE, GPU, Row, SkippedError, interprets  # noqa: E402

LIMIT_S, TOTAL_S = 480.0, 1500.0


@dataclass(frozen=True)
class Stage:
    """A stage.

    Args:
        rows: yields its results.
        after: the stages that must not have failed.
        in_interpreter: whether, without a GPU, it runs in Triton's interpreter.
        of_errors: whether its rows are errors, of which the report has the largest ones.
    """

    rows: Callable[[], Iterator[Row]]
    after: tuple[str, ...] = ()
    in_interpreter: bool = False
    of_errors: bool = False


STAGES = {
    "about": Stage(versions.about),
    "self_check": Stage(kernels.self_check, in_interpreter=True),
    "precision": Stage(precision.precision, of_errors=True),
    "correctness": Stage(one_process.correctness, of_errors=True),
    "nccl": Stage(one_process.nccl, of_errors=True),
    "two_ranks": Stage(two_ranks.two_ranks, of_errors=True),
    "tests_of_kernels": Stage(kernels.tests_of_kernels),
    "sanitizer": Stage(kernels.sanitizer),
    "floors": Stage(figures.floors, ("precision",)),
    "losses": Stage(figures.losses, ("precision", "correctness")),
    "peers": Stage(peers.peers, ("precision", "correctness")),
    "late_interaction": Stage(late_interaction.late_interaction, ("self_check", "correctness"), in_interpreter=True),
    "rectangle": Stage(figures.rectangle, ("precision", "correctness")),
    "partial_fc": Stage(figures.partial_fc, ("correctness",)),
    "million": Stage(figures.million, ("precision", "correctness")),
    "gradient_caching": Stage(figures.gradient_caching, ("correctness",)),
    "plan": Stage(plan.plan, ("precision", "correctness")),
    "blocks": Stage(kernels.blocks, ("self_check",), in_interpreter=True),
}


def run_stage(name: str, folder: Path) -> None:
    """Run one stage in this process, and write its JSON after each row."""
    start, found = time.perf_counter(), list[Row]()
    record: Row = {"stage": name, "device": str(DEVICE), "results": found}

    def write() -> None:
        record["wall_seconds"] = time.perf_counter() - start
        part = folder / f"{name}.part"
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(folder / f"{name}.json")  # at once: the process may be ended at any time

    write()
    try:
        for row in STAGES[name].rows():
            found.append(row)
            write()
    except SkippedError as reason:
        record["skipped"] = str(reason)
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write()


def run_all(names: Sequence[str], folder: Path, limit_s: float, total_s: float) -> bool:
    """Run stages in processes of their own, and return whether none failed; write a report.

    Args:
        names: of the stages, in their order.
        folder: of the results, which exists.
        limit_s: seconds of a stage.
        total_s: seconds of all; stages that have no time left are skipped.
    """
    begin, failed = time.perf_counter(), set[str]()
    lines = ["# One GPU, stage by stage", "", "| stage | outcome | seconds |", "|---|---|---|"]
    tables: list[str] = []
    for name in names:
        record = folder / f"{name}.json"
        record.unlink(missing_ok=True)
        start = time.perf_counter()
        left = total_s - (start - begin)
        if missing := [check for check in STAGES[name].after if check in failed]:
            outcome = f"skipped: {', '.join(missing)} did not pass"
        elif left <= 0:
            outcome = f"skipped: the {total_s:g} s of all stages are used up; --total changes that"
        else:
            log = folder / f"{name}.log"
            code = _in_process(name, folder, log, min(limit_s, left))
            found = json.loads(record.read_text()) if record.exists() else {}
            outcome = report.outcome(code, found, log.read_text(errors="replace"))
            if found.get("results"):
                shown = report.summary if STAGES[name].of_errors else report.table
                tables += ["", f"## {name}", "", *shown(found["results"])]
        failed |= {name} if outcome.startswith("FAILED") else set()
        lines.append(f"| {name} | {outcome} | {time.perf_counter() - start:.1f} |")
        print(lines[-1], flush=True)
        remark = ["", "All rows of each stage are in its JSON."]
        remark += [] if GPU else ["", "There was no GPU: sizes were small, on the CPU, and times mean nothing."]
        (folder / "report.md").write_text("\n".join([*lines, *remark, *tables]) + "\n")
    return not failed


def _in_process(name: str, folder: Path, log: Path, limit_s: float) -> int | str:
    """Run a stage with the processes that it starts, end all of them after `limit_s`; return how it ended."""
    command = [sys.executable, __file__, "--out", str(folder), "--stage", name]
    interpreter = {"TRITON_INTERPRET": "1"} if STAGES[name].in_interpreter and interprets() else {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | interpreter, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"longer than {limit_s:.0f} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[*STAGES], default=[*STAGES], help="stages to run")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a stage, at most")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds of all stages together, at most")
    parser.add_argument("--stage", choices=[*STAGES], help=argparse.SUPPRESS)
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        kernels.step_of_kernels()
    elif given.stage:
        run_stage(given.stage, given.out)
    else:
        try:
            given.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out must be a folder that can be made: {error}")
        sys.exit(not run_all(given.only, given.out, given.limit, given.total))


if __name__ == "__main__":
    main()

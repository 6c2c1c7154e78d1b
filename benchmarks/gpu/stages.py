"""All checks and figures of one GPU, into one file of JSON: `make gpu`.

    PYTHONPATH=src:tests:benchmarks python -m gpu.stages [--only STAGE ...] [--out FOLDER] [--total SECONDS]

Each stage is a process of its own with a time limit, so that a failure, a hang or an illegal access costs that stage
alone, and its rows so far are kept. Stages for which no time is left are skipped, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from .compiled import compiled
from .device import GPU, ROOT, Row, SkippedError, about, message, name_of
from .libraries import libraries
from .peers import peers
from .sanitized import sanitizer
from .steps import steps
from .suite import suite

_TOTAL_S = 530.0
_MARGIN_S = 8.0  # before the limit of a stage, from which on its own rows say that no time is left
Left = Callable[[], float]  # returns the seconds that are left


@dataclass(frozen=True)
class Stage:
    """A stage: its rows, and its limit in seconds."""

    rows: Callable[[Left], Iterator[Row]]
    limit_s: float


_OF_LIBRARIES = {"wholebatch": 90.0, "torch": 75.0}  # limits in seconds; those of others are 40
STAGES = {
    "compile": Stage(lambda left: compiled(), 90.0),
    "tests": Stage(lambda left: suite(), 150.0),
    **{f"peers {name}": Stage(partial(peers, name), _OF_LIBRARIES.get(name, 40.0)) for name in libraries()},
    "steps": Stage(steps, 60.0),
    "sanitizer": Stage(lambda left: sanitizer(), 60.0),
}


def run_stage(name: str, record: Path, limit_s: float) -> None:
    """Run one stage in this process, and append each row and then the outcome to its record, a line of JSON each."""
    end = time.perf_counter() + limit_s - _MARGIN_S
    outcome = "passed"
    with record.open("w") as lines:
        try:
            for row in STAGES[name].rows(lambda: end - time.perf_counter()):
                print(json.dumps(row), file=lines, flush=True)
        except SkippedError as reason:
            outcome = f"skipped: {reason}"
        except Exception as error:
            outcome = f"FAILED: {message(error)}"
            raise
        finally:
            print(json.dumps({"outcome": outcome}), file=lines)


def run_all(names: Sequence[str], path: Path, total_s: float, limit_s: float = float("inf")) -> bool:
    """Run stages in processes of their own, keep all results in one file, and return whether none failed.

    Args:
        names: of the stages, in their order.
        path: of the file; its folder exists.
        total_s: seconds of all stages; a stage that has none left is skipped.
        limit_s: seconds of a stage, if fewer than its own.
    """
    begin, results = time.perf_counter(), {"about": about(), "stages": dict[str, Row]()}
    for name in names:
        start = time.perf_counter()
        left = min(total_s - (start - begin), limit_s, STAGES[name].limit_s)
        if left <= 0:
            stage: Row = {"outcome": f"skipped: the {total_s:g} s of all stages are used up; --total changes that"}
        else:
            stage = _in_process(name, left)
        results["stages"][name] = stage | {"seconds": round(time.perf_counter() - start, 1)}
        text = json.dumps(results, indent=1)
        path.write_text(re.sub(r"\n( {5,}|    (?=}))", "", text) + "\n")  # a row is one line
        rows = stage.get("rows", ())
        errors, skipped = (sum(kind in row for row in rows) for kind in ("error", "skipped"))
        remark = f" ({len(rows)} rows, {errors} errors, {skipped} skipped)" if rows else ""
        print(f"{name}: {stage['outcome']}{remark}, {results['stages'][name]['seconds']} s", flush=True)
    print(path)
    return not any(of["outcome"].startswith("FAILED") for of in results["stages"].values())


def _in_process(name: str, limit_s: float) -> Row:
    """Run a stage with the processes that it starts, end all of them after the limit; return its outcome and rows."""
    interpreter = {} if GPU else {"TRITON_INTERPRET": "1"}
    with TemporaryDirectory() as folder:
        record, log = Path(folder) / "rows", Path(folder) / "log"
        command = [sys.executable, "-m", "gpu.stages", "--stage", name, "--record", record, "--total", str(limit_s)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | interpreter, start_new_session=True
            )
            try:
                ended = f"with {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                ended = f"by the limit of {limit_s:.0f} s"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        stage: Row = {"outcome": f"FAILED: ended {ended}"}  # unless it came to its end
        if rows and set(rows[-1]) == {"outcome"}:
            stage = rows.pop()
        stage["rows"] = rows
        if stage["outcome"].startswith("FAILED"):
            stage["log"] = log.read_text(errors="replace").splitlines()[-40:]
        return stage


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[*STAGES], default=[*STAGES], help="stages to run")
    parser.add_argument("--total", type=float, default=_TOTAL_S, help="seconds of all stages together, at most")
    parser.add_argument("--stage", choices=[*STAGES], help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.stage:
        run_stage(given.stage, given.record, given.total)
        return
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be made: {error}")
    sys.exit(not run_all(given.only, given.out / f"gpu_{name_of(about())}.json", given.total))


if __name__ == "__main__":
    main()

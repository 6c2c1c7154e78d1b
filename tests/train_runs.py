"""Helpers that start, end, kill and read runs of `wholebatch train`."""

import json
import os
import signal
import subprocess
import sys
import time

from glyph_files import SMALL

from wholebatch_train.run.figures import MEASURED

TRAIN = [sys.executable, "-W", "error", "-m", "wholebatch", "train"]


def options(data, run, *more, steps=12):
    every = ["--validate-every", "6", "--checkpoint-every", "5"]
    return ["--data", str(data), "--run-folder", str(run), "--steps", str(steps), *every, *SMALL, *more]


def finish(command, expect=0):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


def losses(run):
    return [row["loss"] for row in metrics(run)]


def difference(run, other):
    """Return the largest difference between two runs' losses."""
    return max(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True))


def killed(command, when, kill=signal.SIGKILL):
    """Start a run, and end it by a signal to all its processes as soon as `when()` is true."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not when():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        os.killpg(process.pid, kill)
        process.wait(timeout=60)


def recorded(run):
    """Return the steps in the run's metrics."""
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0

"""A few runs of the campaign of kills, and planted defects that it must detect."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "faults" / "kills.py"


def campaign(tmp_path, *options):
    """Return the exit code and the number of runs with each outcome."""
    command = [sys.executable, str(PROGRAM), "--json", str(tmp_path / "found.json"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    found = json.loads((tmp_path / "found.json").read_text()) if (tmp_path / "found.json").exists() else None
    assert found is not None, done.stdout + done.stderr
    return done.returncode, found["outcomes"], done.stdout


def test_killed_and_stopped_runs_have_the_same_bits(tmp_path):
    code, outcomes, text = campaign(tmp_path, "--tasks", "identify", "--kills", "2", "--terms", "1", "--processes", "2")
    assert (code, set(outcomes)) == (0, {"same bits"}), text


@pytest.mark.parametrize(("plant", "kills"), [("forgets-optimizer", 1), ("no-checkpoint", 0)])
def test_planted_defects_of_resuming_are_detected(tmp_path, plant, kills):
    """Kills come after step 6, when there is a checkpoint to resume from and many steps are left."""
    where = ["--tasks", "retrieve", "--processes", "1", "--steps", "6", "8"]
    code, outcomes, text = campaign(
        tmp_path, *where, "--plant", plant, "--kills", str(kills), "--terms", str(1 - kills)
    )
    assert (code, "same bits" in outcomes) == (1, False), text

"""A run on own pictures with workers: interrupted, resumed on other ranks and with other workers, the same numbers."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "faults" / "interruptions.py"


def campaign(tmp_path, *options):
    command = [sys.executable, str(PROGRAM), "--json", str(tmp_path / "found.json"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert (tmp_path / "found.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((tmp_path / "found.json").read_text()), done.stdout


def test_an_interrupted_run_has_the_numbers_of_one_that_was_not(tmp_path):
    code, found, text = campaign(tmp_path, "--interruptions", "3", "--steps", "24", "--seed", "3")
    assert (code, found["outcome"], len(found["interruptions"])) == (0, "same numbers", 3), text
    assert found["differences"]["loss"] < 1e-4


def test_a_planted_defect_is_found(tmp_path):
    """A run that forgets Adam's averages when it resumes has other losses."""
    code, found, text = campaign(
        tmp_path, "--interruptions", "2", "--steps", "24", "--plant", "forgets-optimizer", "--seed", "3"
    )
    assert (code, found["outcome"]) == (1, "other numbers"), text

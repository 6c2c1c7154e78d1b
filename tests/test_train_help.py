"""`wholebatch --help`, `wholebatch train --help` and mistakes in options need no torch, so they answer quickly."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from wholebatch.__main__ import main
{extra}
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def run(*argv, extra=""):
    """Return the command's exit code, output and error output, and the packages that it has imported."""
    program = [sys.executable, "-W", "error", "-c", PROGRAM.format(extra=extra), *argv]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    *errors, imported = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(errors), imported


@pytest.mark.parametrize(
    ("argv", "text"), [(["--help"], "wholebatch COMMAND"), (["train", "--help"], "--batch-size")], ids=["all", "train"]
)
def test_help_imports_no_torch(argv, text):
    code, output, errors, imported = run(*argv)
    assert (code, errors, imported) == (0, "", "[]")
    assert text in output


def test_the_check_above_can_fail():
    assert run("--help", extra="import numpy")[3] != "[]"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes", "3"], "Perhaps you meant"),
        (["--steps", "x"], "Error parsing --steps"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--ranks", "4", "--batch-size", "3"], "--batch-size must be at least the number of ranks, 4; got 3"),
        (["--data", "none.csv"], "there is no file"),
        (["--data", "pairs.txt"], "--data must be 'glyphs' or a .jsonl or .csv file"),
        (["--resume", "nowhere"], "that is no run folder"),
        (["--run-folder", "/"], "is not empty and no run"),
    ],
)
def test_mistakes_import_no_torch(argv, message):
    code, output, errors, imported = run("train", *argv)
    assert (code, output, imported) == (2, "", "[]")
    assert message in errors


def test_missing_packages_are_named_with_the_command_that_installs_them():
    code, _, errors, _ = run("train", "--help", extra="sys.modules['matplotlib'] = None; sys.modules['PIL'] = None")
    assert code == 2
    assert errors == (
        "wholebatch train: error: this command needs matplotlib, PIL: pip install 'wholebatch[train]', or in a "
        "checkout pip install -e '.[train]'"
    )

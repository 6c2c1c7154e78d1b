"""Full signatures reach a user's editor: arguments of functions and modules complete, and mistakes are underlined."""

import re
from pathlib import Path

import pytest

USER = Path(__file__).parent / "typed" / "user.py"


def test_mypy_finds_the_mistakes_of_a_user_and_no_others(tmp_path):
    api = pytest.importorskip("mypy.api")
    options = ["--strict", "--cache-dir", str(tmp_path), "--follow-imports", "silent", "--no-error-summary"]
    report, _, _ = api.run([*options, str(USER)])
    found = {int(line) for line in re.findall(r"user\.py:(\d+): error", report)}
    lines = USER.read_text().splitlines()
    assert found == {number for number, line in enumerate(lines, 1) if line.endswith("# error")}, report

"""The tests that docs/exactness.md names for its claims exist, and so do those of tests/quick.txt (`make quick`)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`((?:tests|src)/[\w/]+\.py)(?:::(\w+))?`")


def missing(file, name):
    """Return whether the file does not exist or does not define the test."""
    path = ROOT / file
    if not path.is_file():
        return True
    tree = ast.parse(path.read_text())
    return bool(name) and name not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def section():
    page = (ROOT / "docs" / "exactness.md").read_text()
    return page.split("\n## Which test holds which claim\n")[1].split("\n## ")[0]


def test_every_claim_names_a_test_that_exists():
    rows = [line for line in section().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = NAMED.findall(row)
        assert named, f"this claim names no test: {row}"
        assert not [pair for pair in named if missing(*pair)], row


def test_every_line_of_quick_names_a_test_that_exists():
    for line in (ROOT / "tests" / "quick.txt").read_text().splitlines():
        file, _, name = line.partition("[")[0].partition("::")
        assert not missing(file, name), line


@pytest.mark.planted
@pytest.mark.parametrize(
    ("file", "name"), [("tests/test_nothing.py", ""), ("tests/test_claims.py", "test_no_such_claim")]
)
def test_a_stale_name_is_found(file, name):
    assert missing(file, name)

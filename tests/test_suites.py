"""Each test is in one suite of continuous integration, which runs when what it tests changes."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from suites import ALL, SUITES, arguments, changed

ROOT = Path(__file__).parent.parent
FILES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py")]


def test_each_file_is_in_one_suite():
    for suite in SUITES.values():
        for pattern in suite.tests:
            assert [*ROOT.glob(pattern)], f"{pattern} names no file"
    ignored = [argument.removeprefix("--ignore-glob=") for argument in arguments("core")]
    for file in FILES:
        suites = [name for name, suite in SUITES.items() if any(fnmatch(file, pattern) for pattern in suite.tests)]
        assert len(suites) + (not any(fnmatch(str(ROOT / file), pattern) for pattern in ignored)) == 1, (file, suites)


@pytest.mark.parametrize(
    ("file", "others"),
    [
        ("tests/test_losses.py", []),
        ("tests/test_audit.py", ["audit"]),
        ("docs/losses.md", []),
        ("packages/wholebatch-train/src/wholebatch_train/loop.py", ["train"]),
        ("packages/wholebatch-train/README.md", ["train"]),
        ("src/wholebatch/jax/clip.py", ["jax"]),
        ("src/wholebatch/planning/step.py", ["train"]),
        ("src/wholebatch/integrations/open_clip/cli.py", ["train", "integrations", "audit"]),
        ("src/wholebatch/comm/mpi.py", ["train", "integrations", "audit", "mpi"]),
        ("src/wholebatch/_base/checks.py", [*SUITES]),
        ("src/wholebatch/partition.py", [*SUITES]),
        ("tests/loss_cases.py", [*SUITES]),
        ("pyproject.toml", [*SUITES]),
        (".github/workflows/ci.yml", [*SUITES]),
    ],
)
def test_a_change_runs_the_suites_that_it_concerns(file, others):
    assert changed([file]) == ["core", *others]
    assert changed([file, "README.md"]) == ["core", *others]


def test_the_workflow_runs_every_suite():
    """All of them where it cannot say what has changed, and where a change arrives on the main branch."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"suites='(\[.*\])'", workflow) == ["[" + ", ".join(f'"{name}"' for name in ALL) + "]"]

"""The Python in README and docs is executed: what is not run will lie."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
]


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path):
    if "torchrun" in block:
        # Without the interpreter's teardown, in which gloo's threads abort any DDP program now and then (torch 2.13).
        (tmp_path / "block.py").write_text(block + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
        torchrun = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        run = subprocess.run([*torchrun, str(tmp_path / "block.py")], capture_output=True, text=True, check=True)
        losses = re.findall(r"rank \d: (\d+\.\d{6})", run.stdout)
        assert len(losses) == 2
        assert losses[0] == losses[1]
        return
    exec(compile(block, "documentation", "exec"), {"__name__": "__main__"})


def test_links_and_pictures_exist():
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"

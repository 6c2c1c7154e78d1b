"""The Python in README and docs is executed: what is not run will lie."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpi import available, mpiexec

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
]


def test_there_is_something_to_run():
    assert len(BLOCKS) >= 3


def same_on_both(printed):
    """Two ranks have printed the same number."""
    losses = re.findall(r"rank \d: (\d+\.\d{6})", printed)
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path):
    if "import jax" in block:
        pytest.importorskip("jax")  # JAX needs Python 3.11
    if "# mpiexec" in block:
        file = tmp_path / "block.py"
        file.write_text(block)
        for implementation in available():
            run = mpiexec(implementation, 2, str(file))
            assert run.returncode == 0, run.stderr
            same_on_both(run.stdout)
        return
    if "# torchrun" in block:
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
        same_on_both(run.stdout)
        return
    exec(compile(block, "documentation", "exec"), {"__name__": "__main__"})


def test_links_and_pictures_exist():
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"

"""The programs of docs/integrations/lightning.md run on two processes, and go on with three and with one.

make ecosystem
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations" / "lightning.md").read_text()
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```py\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))


def printed(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(loss) for _, loss in sorted(re.findall(r"rank (\d): (\d+\.\d+)", run.stdout))]


@pytest.mark.parametrize("name", ["Lightning", "Fabric"])
def test_a_program_goes_on_with_another_number_of_processes(name, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    before = None
    for epoch, ranks in enumerate((2, 3, 1), 1):
        losses = printed(tmp_path, str(ranks), *([str(epoch)] if name == "Lightning" else []))
        assert len(losses) == ranks
        assert len({*losses}) == 1, "the loss of the whole batch, on each rank"
        assert before is None or losses[0] < before
        before = losses[0]

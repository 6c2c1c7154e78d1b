"""Importing the package warns of nothing and drags in nothing that only some users have."""

import subprocess
import sys

OPTIONAL = ["jax", "mpi4py", "tyro", "rich", "safetensors", "matplotlib", "PIL", "cloudpickle"]
# Without Triton, which torch imports by itself where it is installed.
PROGRAM = """
import sys
sys.modules["triton"] = None
{extra}
import wholebatch
print([m for m in {optional} if m in sys.modules])
"""


def loaded(extra=""):
    program = PROGRAM.format(extra=extra, optional=OPTIONAL)
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_core_imports_no_extra_and_warns_of_nothing():
    assert loaded() == "[]"


def test_the_check_above_can_fail():
    assert loaded("import rich") == "['rich']"

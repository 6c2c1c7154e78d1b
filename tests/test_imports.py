"""Importing the package raises no warning and imports no optional dependency."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

OPTIONAL = ["jax", "mpi4py", "tyro", "rich", "safetensors", "matplotlib", "PIL", "cloudpickle"]
# Without Triton, which torch imports if it is installed.
PROGRAM = """
import sys
sys.modules["triton"] = None
{extra}
from wholebatch import *
print([m for m in {optional} if m in sys.modules])
"""


def loaded(extra=""):
    program = PROGRAM.format(extra=extra, optional=OPTIONAL)
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_core_imports_no_extra_and_raises_no_warning():
    assert loaded() == "[]"


@pytest.mark.planted
def test_the_check_above_can_fail():
    assert loaded("import rich") == "['rich']"


# Dynamo costs 1.5 s and 80 MB, and only programs that compile need it.
WORK = """
import sys
import torch
import torch.distributed as dist
import wholebatch as wb

x, y, scale = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True), torch.tensor(5.0)
wb.CLIPLoss()(x, y, scale.requires_grad_()).backward()
wb.PartialFC(4, 10, sample_rate=0.5)(x, torch.arange(6)).backward()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = wb.comm.TorchCommunicator()
comm.backward(comm.all_gather(x).sum())
comm.iall_reduce(x.detach()).wait()
wb.CLIPLoss(group=comm)(x, y, scale).backward()
for memory in ("auto", 2**16):
    terms = {{"all": wb.terms.LogSumExp(lambda s, x, y, p: 10 * s), "own": wb.terms.Partner(), "hard": wb.terms.Max()}}
    wb.PairLoss(terms, lambda r, x, p: r.all - r.own + r.hard, memory=memory)(x, y).backward()
dist.destroy_process_group()
{extra}
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    ("extra", "there"),
    [
        pytest.param("", False, id="eager"),
        pytest.param(
            "torch.compile(wb.CLIPLoss(), backend='eager')(x.detach(), y.detach(), 1.0)",
            True,
            id="the check can fail",
            marks=pytest.mark.planted,
        ),
    ],
)
def test_common_work_does_not_import_dynamo(extra, there):
    program = WORK.format(extra=extra)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(there)


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX needs Python 3.11")
def test_jax_without_torch():
    program = "import sys; sys.modules['torch'] = None; import wholebatch as wb; print(wb.jax.clip_loss.__name__)"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "clip_loss\n"), run.stderr


@pytest.mark.parametrize(
    ("missing", "name", "message"),
    [("jax", "jax", "wholebatch.jax needs JAX: pip install jax"), ("torch", "CLIPLoss", "torch")],
)
def test_errors_name_the_missing_dependency(missing, name, message):
    program = f"import sys; sys.modules[{missing!r}] = None; import wholebatch as wb; wb.{name}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]

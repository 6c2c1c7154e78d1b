"""The promise: no B x B, forward or backward. Peak memory is that of a process of its own, as the system counts it."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, sys
from pathlib import Path
import torch
import wholebatch as wb

loss_fn, rows, width = getattr(wb, sys.argv[1]).clip_loss, int(sys.argv[2]), 256
torch.set_num_threads(2)

def memory_bytes(field):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))

def rise_of_peak(rows):
    x, y = (torch.nn.functional.normalize(torch.randn(rows, width), dim=-1).requires_grad_() for _ in range(2))
    for leaf in (x, y):
        leaf.grad = torch.zeros_like(leaf)  # the gradients' own memory is not the loss's
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = memory_bytes("VmRSS")
    loss_fn(x, y, torch.tensor(14.3, requires_grad=True)).backward()
    return memory_bytes("VmHWM") - before

rise_of_peak(1100)  # libraries load, threads start
print(json.dumps(rise_of_peak(rows)))
"""


def rise_of_peak(module, rows):
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module, str(rows)], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_transient_memory_is_tiles_and_gradients():
    """B = 16384, d = 256: S would be 1 GiB; dX and dY before they are added to .grad are 2 x 16 MiB of the 60 MB."""
    assert rise_of_peak("functional", 16384) <= 60e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_measurement_sees_a_stored_matrix():
    """The dense twin at B = 4096 stores at least two 64 MiB matrices at a time: the same program reports them."""
    assert rise_of_peak("reference", 4096) >= 130e6

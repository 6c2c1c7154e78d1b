"""Nothing of size B x B is ever stored: the rise of the process's peak memory, measured from outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.testing import run_ranks

_PROGRAM = """
import json, sys
from test_memory import rise_of_peak

module, name, rows, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rise_of_peak(module, name, 1100, width)  # libraries load, threads start
print(json.dumps(rise_of_peak(module, name, rows, width)))
"""


def memory_bytes(field):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def call(module, name, x, y, **options):
    scale, bias = (torch.tensor(value, requires_grad=True) for value in (14.3, -10.0))
    loss = getattr(getattr(wb, module), name)
    arguments = {
        "clip_loss": {"logit_scale": scale},
        "info_nce_loss": {"logit_scale": scale},
        "nt_xent_loss": {},
        "siglip_loss": {"logit_scale": scale, "logit_bias": bias},
    }[name]
    return loss(x, y, **arguments, **options)


def rise_of_peak(module, name, rows, width, **options):
    """Of forward and backward, dX and dY included while they are added to `.grad`."""
    torch.set_num_threads(2)
    x, y = (normalize(torch.randn(rows, width), dim=-1).requires_grad_() for _ in range(2))
    for leaf in (x, y):
        leaf.grad = torch.ones_like(leaf)  # the gradients' own memory, in use already, is not the loss's
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = memory_bytes("VmRSS")
    call(module, name, x, y, **options).backward()
    return memory_bytes("VmHWM") - before


def measured(module, name, rows, width):
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module, name, str(rows), str(width)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(run.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize(
    ("name", "rows"), [("clip_loss", 8192), ("info_nce_loss", 8192), ("siglip_loss", 8192), ("nt_xent_loss", 4096)]
)
def test_transient_memory_is_tiles_and_gradients(name, rows):
    """S would be 256 MiB, of 8192 rows and columns each time; d = 256.

    dX and dY are 17 MB, before they are added to .grad; or, for NT-Xent, dZ 8 MB, and as much for Z. Tiles are 5 MB.
    """
    assert measured("functional", name, rows, 256) <= 27e6


@linux
@pytest.mark.parametrize("name", ["clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss"])
def test_the_measurement_sees_a_stored_matrix(name):
    """The dense twins at 4096 rows and columns store at least two matrices of 64 MiB: the same program reports them."""
    assert measured("reference", name, 2048 if name == "nt_xent_loss" else 4096, 256) >= 130e6


def of_an_exchange(exchange, rows, width):
    rise_of_peak("functional", "clip_loss", 64, width, exchange=exchange)
    return rise_of_peak("functional", "clip_loss", rows, width, exchange=exchange)


@linux
def test_a_ring_does_not_hold_the_batch():
    """4 ranks, 4 MiB of Y each: "gather" holds 3 times the 16 MiB of all, "ring" about 5 blocks; both dX and tiles."""
    gather, ring = (
        max(run_ranks(of_an_exchange, 4, exchange, 1024, 1024, timeout_s=120)) for exchange in ("gather", "ring")
    )
    block = 4 * 1024 * 1024
    assert gather >= 8 * block + 2 * block
    assert ring <= 6 * block + 2 * block + 8e6

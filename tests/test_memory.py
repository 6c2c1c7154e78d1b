"""No tensor of size B x B is ever stored, by the most bytes that tensors hold at a time in forward and backward."""

import pytest
import torch
from live_bytes import peak_of
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.testing import run_ranks

BLOCK = 4 * 1024 * 1024  # of Y on each of 4 ranks


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


def held(module, name, rows, width, **options):
    """Return the bytes that forward and backward hold, with dX and dY while they are added to `.grad`."""
    torch.set_num_threads(1)
    x, y = (normalize(torch.randn(rows, width), dim=-1).requires_grad_() for _ in range(2))
    for leaf in (x, y):
        leaf.grad = torch.ones_like(leaf)  # memory of gradients is already in use and not counted
    return peak_of(lambda: call(module, name, x, y, **options).backward())


@pytest.mark.parametrize(
    ("name", "rows"), [("clip_loss", 8192), ("info_nce_loss", 8192), ("siglip_loss", 8192), ("nt_xent_loss", 4096)]
)
def test_transient_memory_is_tiles_and_gradients(name, rows):
    """S would take 256 MiB: all losses have 8192 rows and columns, with d = 256.

    dX and dY take 17 MB before they are added to .grad; for NT-Xent, dZ takes 8 MB and Z as much. Tiles take 4 MB.
    """
    assert held("functional", name, rows, 256) <= 23e6


@pytest.mark.planted
@pytest.mark.parametrize("name", ["clip_loss", "info_nce_loss", "siglip_loss", "nt_xent_loss"])
def test_the_count_sees_a_stored_matrix(name):
    """The dense references at 4096 rows and columns store at least two matrices of 64 MiB, and the count shows it."""
    assert held("reference", name, 2048 if name == "nt_xent_loss" else 4096, 256) >= 130e6


def of_an_exchange(exchange):
    return held("functional", "clip_loss", 1024, 1024, exchange=exchange)


def test_a_ring_does_not_hold_the_batch():
    """With 4 MiB of Y on each of 4 ranks, "gather" holds 3 times all 16 MiB, and "ring" about 5 blocks.

    Both hold dX and tiles, too. gloo's threads free a block shortly after it has arrived, so one more may be counted.
    """
    gather, ring = (run_ranks(of_an_exchange, 4, exchange, timeout_s=120) for exchange in ("gather", "ring"))
    assert min(gather) >= 12 * BLOCK + 2 * BLOCK
    assert max(ring) <= 6 * BLOCK + 2 * BLOCK

"""What is said of a step before it runs is what the library then does."""

import pytest
import torch

from wholebatch.comm import LocalCommunicator
from wholebatch.exchange import GatherExchange, RingExchange, select_exchange
from wholebatch.partition import Partition
from wholebatch.planning.work import LOSSES, Shapes, work_of
from wholebatch.sweep import default_side


@pytest.mark.parametrize("rows", [64, 87_381, 87_382, 10**6])
def test_auto_is_the_same_exchange(rows):
    said = Shapes("clip", rows, 1024, 1).exchange()
    made = select_exchange("auto", LocalCommunicator(), rows, Partition((rows,)), row_bytes=4 * 1024)
    assert isinstance(made, {"gather": GatherExchange, "ring": RingExchange}[said])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_entries_add_up_to_the_matrix(loss, ranks):
    """Of what ranks compute; a symmetric one by half, and by the diagonal's tiles."""
    shapes = Shapes(loss, 4800, 8, ranks)
    whole = 4800**2 if loss != "nt_xent" else 9600**2 / 2
    assert whole / ranks <= shapes.entries <= 1.2 * whole / ranks


def test_units():
    for loss, units in (("clip", 4), ("info_nce", 4), ("siglip", 3)):
        work = work_of(Shapes(loss, 1024, 64, 1), "gather", "flat")
        assert work.flops == 2 * units * 1024**2 * 64
    kept = work_of(Shapes("clip", 1024, 64, 1), "gather", 2**28)
    assert kept.flops == 2 * 3 * 1024**2 * 64
    assert work_of(Shapes("siglip", 1024, 64, 1), "gather", 2**28).again == 0


def test_the_budget_is_the_one_that_a_sweep_gets():
    for memory in ("flat", "auto", 2**22, 2**26):
        said = Shapes("clip", 600, 16, 1).budget(memory)
        assert said.side == default_side(torch.device("cpu"))
        assert (said.kept > 0) == (memory != "flat")

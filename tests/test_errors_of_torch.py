"""The messages of PyTorch that docs/errors.md quotes are those that a user sees."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wholebatch as wb
from wholebatch.testing import run_ranks

CLIPS_NO_SPARSE_GRADIENTS = torch.__version__ < (2, 15)
PAGE = Path(__file__).parent.parent / "docs" / "errors.md"


def messages_body():
    """Make each mistake of the table, in its order; return the messages of those that this torch refuses."""
    head, encoder, mesh = wb.PartialFC(4, 10, sample_rate=0.5), nn.Linear(4, 4), init_device_mesh("cpu", (1,))
    head(torch.randn(4, 4), torch.arange(4)).backward()
    sharded, replicated, scalar = fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4), nn.Module()
    (sharded(torch.randn(2, 4)).sum() + replicated(torch.randn(2, 4)).sum()).backward()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    cached = wb.GradCache([encoder, encoder], 2, lambda x, y: wb.functional.clip_loss(x, y, 0.1))
    found = []
    for mistake in (
        (cached(torch.randn(4, 4), torch.randn(4, 4)) / 2).backward,
        torch.optim.AdamW(head.parameters()).step,
        torch.optim.SGD(head.parameters(), weight_decay=0.1).step,
        *[lambda: nn.utils.clip_grad_norm_(head.parameters(), 1.0)] * CLIPS_NO_SPARSE_GRADIENTS,
        lambda: nn.utils.clip_grad_norm_([*sharded.parameters(), *replicated.parameters()], 1.0),
        lambda: fully_shard(scalar, mesh=mesh),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            mistake()
        found.append(str(caught.value))
    return found


def test_the_catalog_quotes_messages_of_torch():
    section = PAGE.read_text().partition("## Messages of PyTorch")[2].partition("\n## ")[0]
    cells = re.findall(r'^\| ("[^|]*)\|', section, flags=re.MULTILINE)
    quotes = [text for cell in cells for text in re.findall('"([^"]+)"', cell)]
    if not CLIPS_NO_SPARSE_GRADIENTS:
        quotes = [text for text in quotes if "linalg_vector_norm" not in text]
    (found,) = run_ranks(messages_body, 1, timeout_s=60)
    assert len(quotes) == len(found)
    for quote, text in zip(quotes, found, strict=True):
        assert quote in text

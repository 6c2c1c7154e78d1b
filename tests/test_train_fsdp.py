"""Training with sharded weights (`--fsdp`): the numbers of replicated ones, and checkpoints that either continues."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from glyph_files import write_pairs
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train.audited import audit_start
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.tasks import chunking
from wholebatch_train.tasks.chunking import with_chunk_size
from wholebatch_train.tasks.make import make_task
from wholebatch_train.tasks.retrieve import Retrieve

MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_layers=2, text_buckets=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), faces=faces))


def configured(data, **more):
    options = {"batch_size": 24, "image_size": 16, "validation_texts": 2, "test_texts": 8, "workers": 0, "steps": 20}
    return TrainConfig(data=data, model=MODEL, **(options | more))


def stepped(config, folder, *, resumes=False):
    """Make three steps, or three after the checkpoint's; return losses, norms, weights, a validation and units."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config, found = load_data(config, size)
    task = make_task(config, found, torch.device("cpu"), rank=rank, size=size)
    sharded = [isinstance(p, DTensor) for p in task.module.parameters()]
    assert all(sharded) if config.fsdp and size > 1 else not any(sharded)
    start = task.load(folder)["step"] if resumes else 0
    losses = []
    for step in range(start, start + 3):
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        losses.append((task.add_gradients(step).item(), task.grad_norm()))
        for optimizer in task.optimizers:
            optimizer.step()
        task.after_step()
    if not resumes:
        task.save(folder, task.pass_state(), step=3, seconds=0.0)
    validation = task.validate()
    units = [name for name, module in task.module.named_modules() if isinstance(module, FSDPModule)]
    return torch.tensor(losses), task.weights(), validation if rank == 0 else {}, units


def compared(config, tmp_path, *, resumes=False):
    """Compare losses, norms, weights and checkpoints of sharded weights with those of one process.

    Returns:
        The names of the modules whose weights are sharded by themselves.
    """
    sharded = replace(config, fsdp=True)
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    ours.mkdir()
    theirs.mkdir()
    expected = stepped(config, theirs)
    on_two = run_ranks(stepped, 2, sharded, ours)
    for rank, found in enumerate(on_two):
        assert_same(found[0], expected[0], relative=1e-4)
        assert rank or found[1].keys() == expected[1].keys()
        for name, x in found[1].items():
            assert_same(x, expected[1][name], relative=1e-3)
    if resumes:
        continued = stepped(config, theirs, resumes=True)
        assert_same(stepped(config, ours, resumes=True)[0], continued[0], relative=1e-4)  # one rank, replicated
        on_three = run_ranks(lambda: stepped(sharded, ours, resumes=True)[0], 3)
        assert_same(on_three[0], continued[0], relative=1e-4)
        assert not torch.allclose(continued[0], expected[0], rtol=1e-3), "other steps have other losses"
    return on_two[0][3]


UNEVEN = {"batch_size": 25, "chunk_size": 4}  # on two ranks 13 and 12 rows, in chunks of at most 4


@pytest.mark.parametrize(
    "more",
    [{}, UNEVEN, {**UNEVEN, "task": "identify"}, {"loss": "siglip", "batch_size": 5, "chunk_size": 1}],
    ids=str,
)
def test_sharded_weights_give_the_same_numbers_and_checkpoints(data, tmp_path, more):
    compared(configured(data, **more), tmp_path, resumes="chunk_size" not in more or "task" in more)


@pytest.mark.parametrize("more", [{}, {"chunk_size": 3}], ids=str)
def test_mined_negatives_of_which_a_rank_has_none(tmp_path, more):
    """In most chunks and on most ranks no row has one, and the encoder is called for nothing."""
    rows = range(40)
    lines = [{"query": f"query {i}", "positive": f"text {i * i}", "negatives": ["a"] * (not i % 9)} for i in rows]
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    compared(configured(str(path), batch_size=7, loss="info_nce", **more), tmp_path)


BLOCKS = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    def forward(self, x):
        return x + self.feed(x)

class InSequence(nn.Module):
    channels = 1
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 8, stride=8)
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    def preprocess(self, picture):
        import numpy as np, torch
        return torch.from_numpy(np.asarray(picture.resize((16, 16))).copy())[None]
    def forward(self, pixels):
        x = self.embed(pixels.float() / 255).flatten(2).transpose(1, 2)
        return self.stages(x)[:, 0]
"""


def test_blocks_of_a_sequence_are_sharded_one_by_one(data, tmp_path):
    """As in timm's models; the row is a view, of which FSDP2 would warn, and a warning is an error here."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    config = configured(data, image_encoder=f"{tmp_path}/blocks.py:InSequence", chunk_size=5)
    units = compared(config, tmp_path)
    inside = [name.removeprefix("image.model.") for name in units if name.startswith("image.model.")]
    assert inside == ["stages.0.0", "stages.0.1", "stages.1.0"]


def audited(config, *, wrong=False):
    """Audit on the ranks of this call; with a gradient twice as large, if it is to be wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    actual = Retrieve.add_gradients

    def doubled(task, step):
        loss = actual(task, step)
        for p in task.module.parameters() if task._is_sharded else ():
            p.grad.mul_(2)
        return loss

    if wrong:
        Retrieve.add_gradients = doubled
    try:
        return str(audit_start(*load_data(config, size), torch.device("cpu"), rank=rank, size=size))
    except UserError as error:
        return f"refused: {error}"


def test_the_audit_compares_sharded_weights_with_whole_ones(data):
    config = configured(data, fsdp=True, chunk_size=5)
    for task in ("retrieve", "identify"):
        line = run_ranks(audited, 2, replace(config, task=task))[1]
        assert line.startswith("audit: on 2 processes the gradient of 24 examples is that of the dense loss on one")
        assert float(line.rpartition(" ")[2]) < 1e-4
    for line in run_ranks(lambda: audited(config, wrong=True), 2):
        assert "refused: " in line
        assert "relative error 1. Nothing was trained" in line


def automatic(config, budget_of_rows):
    """Return the automatic chunk size where this many rows have room, and one measurement for each number of rows."""
    size, device, rank = dist.get_world_size(), torch.device("cpu"), dist.get_rank()
    config, found = load_data(config, size)
    task = make_task(replace(config, chunk_size=0), found, device, rank=rank, size=size)
    measured = [chunking.memory_of_graph(task, n, device) for n in (1, 2, 4, 8)]
    weights = sum(p.nbytes for p in task.module.parameters())
    local = sum(p.to_local().nbytes for p in task.module.parameters())
    slope = (measured[3] - measured[2]) / 4
    free = 2 * (measured[3] + (budget_of_rows - 8) * slope) + weights + 3 * local
    chunking.free_memory = lambda _: int(size * free) if rank else 2**40  # of the cores' machine, shared by the ranks
    return with_chunk_size(config, found, device, rank=rank, size=size).chunk_size, measured


def test_automatic_chunks_are_measured_with_sharded_weights(data):
    config = configured(data, batch_size=40, chunk_size="auto", fsdp=True, ranks=2)
    (chunk, measured), (other, _) = run_ranks(automatic, 2, config, 12)
    assert (chunk, other) == (8, 8), "the rank with the least memory decides for all"
    assert 1.5 < (measured[3] - measured[2]) / (measured[2] - measured[1]) < 2.5, "it grows with the rows"
    whole = replace(config, fsdp=False, chunk_size=0)
    task = make_task(*load_data(whole, 1), torch.device("cpu"), rank=0, size=1)
    expected = chunking.memory_of_graph(task, 8, torch.device("cpu"))
    assert measured[3] < 1.5 * expected, "the whole weights of a block, which FSDP2 frees, are not counted"

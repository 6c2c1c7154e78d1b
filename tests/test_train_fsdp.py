"""Training with sharded weights (`--fsdp`): the numbers of replicated ones, and checkpoints that either continues."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from glyph_files import write_pairs
from torch.distributed.tensor import DTensor

from wholebatch.testing import run_ranks
from wholebatch.train.config import ModelConfig, TrainConfig
from wholebatch.train.data.load import load_data
from wholebatch.train.tasks.make import make_task

MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_layers=2, text_buckets=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), faces=faces))


def configured(data, **more):
    options = {"batch_size": 24, "image_size": 16, "validation_texts": 2, "test_texts": 8, "workers": 0, "steps": 20}
    return TrainConfig(data=data, model=MODEL, **(options | more))


def stepped(config, folder, *, resumes=False):
    """Make three steps, or three after those of the checkpoint; return losses, norms, weights and a validation."""
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
    return torch.tensor(losses), task.weights(), validation if rank == 0 else {}


@pytest.mark.parametrize("more", [{}, {"chunk_size": 5}, {"task": "identify"}, {"loss": "siglip"}], ids=str)
def test_sharded_weights_give_the_same_numbers_and_checkpoints(data, tmp_path, more):
    config = configured(data, **more)
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    ours.mkdir()
    theirs.mkdir()
    expected = stepped(config, theirs)
    sharded = configured(data, **more, fsdp=True)
    for rank, found in enumerate(run_ranks(stepped, 2, sharded, ours)):
        assert_same(found[0], expected[0], relative=1e-4)
        assert rank or found[1].keys() == expected[1].keys()
        for name, x in found[1].items():
            assert_same(x, expected[1][name], relative=1e-3)
    continued = stepped(config, theirs, resumes=True)
    assert_same(stepped(config, ours, resumes=True)[0], continued[0], relative=1e-4)  # one rank, replicated
    on_three = run_ranks(lambda: stepped(sharded, ours, resumes=True)[0], 3)
    assert_same(on_three[0], continued[0], relative=1e-4)
    assert not torch.allclose(continued[0], expected[0], rtol=1e-3), "other steps have other losses"

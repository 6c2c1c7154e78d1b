"""Gradient caching holds one chunk's activations, and the graphs that fit into its budget."""

import copy
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from gradcache_models import Clip, assert_all_same, batch, good_loss, gradients_of, gradients_of_kept, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


class Counted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x):
        self.calls += 1
        return self.model(x)


@pytest.mark.parametrize(
    ("keep", "budget", "passes"),
    [(0, None, 16), (3, None, 13), (0.5, None, 12), (1.0, None, 8), (100, None, 8), ("auto", None, 8), ("auto", 0, 16)],
)
def test_kept_graphs_need_no_second_pass(keep, budget, passes):
    model, (x, y) = Counted(mlp(0)), batch(8)
    wb.GradCache([model, model], 2, Clip(), keep_graphs=keep, memory_budget=budget)(x, y)
    assert model.calls == passes


def test_a_budget_keeps_what_fits_and_leaves_room_for_one_more():
    """A chunk's graph holds tanh's output: 2 rows of 8 numbers of 8 bytes. The input exists anyway."""
    model, (x, y) = Counted(mlp(0)), batch(8)
    each = 2 * 8 * 8
    for room in range(1, 6):
        model.calls = 0
        wb.GradCache([model, model], 2, Clip(), keep_graphs="auto", memory_budget=room * each)(x, y)
        assert 16 - model.calls == room - 1


def test_out_of_memory_in_a_kept_graph_keeps_fewer():
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(12)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    calls = []

    def encode(z):
        calls.append(torch.is_grad_enabled())
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(z)

    with pytest.warns(RuntimeWarning, match="out of memory with 4 kept graphs; going on with 2") as caught:
        wb.GradCache([encode, encode], 2, loss_fn, keep_graphs=1.0)(x, y)
    assert len(caught) == 1
    first_of_the_second_model = [True]
    assert calls[5:13] == [False] * 2 + first_of_the_second_model + [False] * 5, "the chunk that failed, and later ones"
    assert len(calls) == 5 + 8 + 10
    assert_all_same(gradients_of(model, loss_fn), true)


def test_out_of_memory_does_not_change_running_averages():
    model, loss_fn, (x, y) = mlp(0, nn.BatchNorm1d(8)), Clip(), batch(12)
    plain, held, calls = copy.deepcopy(model), dict(model.named_buffers()), [0]
    loss_fn(*(torch.cat([plain(part) for part in z.split(4)]) for z in (x, y))).backward()
    true = gradients_of(plain)

    def encode(z):
        calls[0] += 1
        found = model(z)
        if calls[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    with pytest.warns(RuntimeWarning, match="out of memory"):
        wb.GradCache([encode, encode], 4, loss_fn, keep_graphs=1.0)(x, y)
    assert_all_same(gradients_of(model), true)
    for name, buffer in model.named_buffers():
        assert buffer is held[name]
        assert torch.equal(plain.get_buffer(name), buffer), name


def out_of_memory_body():
    """Run out of memory in the second model on one rank, after the first has kept graphs: all ranks stay in step."""
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    plain, alone = [mlp(0), mlp(1)], [mlp(0), mlp(1)]
    wb.reference.clip_loss(alone[0](x), alone[1](y), 1.0).backward()
    models, calls = [DistributedDataParallel(model) for model in plain], [0]

    def second(z):
        calls[0] += 1
        if rank == 0 and calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return models[1](z)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wb.GradCache([models[0], second], 2, good_loss, keep_graphs=1.0)(x[rows], y[rows])
    assert_all_same(gradients_of_kept(*plain), gradients_of_kept(*alone))


def test_out_of_memory_on_one_rank_keeps_ranks_in_step():
    run_ranks(out_of_memory_body, 2, timeout_s=60)


def test_one_chunk_of_activations_is_alive_at_a_time():
    """One chunk is the limit for any batch, in both passes and while the loss is computed."""
    model, states, most = mlp(0), [], [0]

    def alive():
        most[0] = max(most[0], sum(state() is not None for state in states))

    model[2].register_forward_pre_hook(lambda _module, args: alive() or states.append(weakref.ref(args[0])))

    def loss_fn(a, b):
        alive()
        return good_loss(a, b)

    for rows in (8, 32, 128):
        x, y = batch(rows)
        most[0] = 0
        wb.GradCache([model, model], 4, loss_fn)(x, y)
        assert most == [0], "activations of earlier chunks, when the next one starts"
        assert len(states) == 2 * 2 * rows // 4
        states.clear()
    wb.GradCache([model, model], 4, loss_fn, keep_graphs=3)(x, y)
    assert most == [3]

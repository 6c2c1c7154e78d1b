"""Encoders on different devices: graphs are counted where they lie, and places of rows lie beside the rows.

There is no second device here: two GPUs are names, whose memory a fake counts.
"""

from contextlib import contextmanager

import pytest
import torch
from gradcache_models import Clip, batch, gradients_of, mlp
from torch import nn

import wholebatch as wb
from wholebatch.gradcache import kept_graphs
from wholebatch.gradcache.inputs.parts import Part
from wholebatch.gradcache.join import _places
from wholebatch.gradcache.kept_graphs import devices_of

FIRST, SECOND, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Placed(nn.Module):
    """A module whose parameters say that they are on these devices."""

    def __init__(self, *devices):
        super().__init__()
        for number, device in enumerate(devices):
            p = torch.empty(0, device="meta") if device == "meta" else _With(torch.empty(0), torch.device(device))
            self._parameters[str(number)] = p


class _With:
    def __init__(self, p, device):
        self.p, self.device = p, device


@pytest.mark.parametrize(
    ("modules", "given", "expected"),
    [
        ([Placed("cuda:1")], None, [SECOND]),
        ([Placed("cuda:0", "cuda:1", "cuda:0")], None, [FIRST, SECOND]),
        ([Placed("cuda:1"), Placed("cpu")], None, [SECOND, CPU]),
        ([Placed("meta", "cpu")], None, [CPU]),
        ([], {"x": [torch.ones(2)]}, [CPU]),
        ([Placed()], torch.ones(2), [CPU]),
        ([], "text", [CPU]),
        ([Placed("cuda:1")], torch.ones(2), [SECOND]),
    ],
    ids=str,
)
def test_the_devices_of_an_encoder(modules, given, expected):
    assert [*devices_of(modules, given)] == expected


@pytest.fixture
def memory(monkeypatch):
    """Return what graphs take on each device, which the test sets before each chunk."""
    costs = {}

    @contextmanager
    def graph_memory(devices, existing):
        held = dict.fromkeys(devices, 0)
        yield held
        held.update({device: costs.get(device, 0) for device in devices})

    monkeypatch.setattr(kept_graphs, "_graph_memory", graph_memory)
    free = {FIRST: 1000, SECOND: 125, CPU: 10**9}  # of which 80 % are used
    monkeypatch.setattr(kept_graphs, "free_memory", free.get)
    return costs


def kept_by(keeper, memory, models, costs):
    """Return whether each next chunk, of these models, is kept."""
    found = []
    for model in models:
        memory.clear()
        memory.update(costs[model])
        wanted = keeper.wants(model)
        if wanted:
            with keeper.measured(model, []):
                pass
        found.append(wanted and keeper.kept(model))
    return found


COSTS = [{FIRST: 100}, {SECOND: 30}]


def test_graphs_fill_the_memory_of_their_own_device(memory):
    """800 bytes are for graphs of 100 and one replayed chunk: 7 are kept; 100 bytes for graphs of 30: 2."""
    keeper = kept_graphs.Keeper("auto", 20, None, [[FIRST], [SECOND]])
    assert kept_by(keeper, memory, [0] * 9, COSTS) == [True] * 7 + [False] * 2
    assert kept_by(keeper, memory, [1] * 4, COSTS) == [True] * 2 + [False] * 2


@pytest.mark.planted
def test_counting_on_one_device_would_keep_too_many(memory):
    """Both models as if they were on the first device, where the second's graphs take nothing: all would be kept."""
    keeper = kept_graphs.Keeper("auto", 20, None, [[FIRST], [FIRST]])
    assert kept_by(keeper, memory, [1] * 10, COSTS) == [True] * 10


def test_a_model_spread_over_devices_needs_room_on_all_of_them(memory):
    keeper = kept_graphs.Keeper("auto", 20, None, [[FIRST, SECOND], [FIRST]])
    costs = [{FIRST: 100, SECOND: 30}, {FIRST: 100}]
    assert kept_by(keeper, memory, [0] * 4, costs) == [True, True, False, False]
    assert kept_by(keeper, memory, [1] * 6, costs) == [True] * 5 + [False]


def test_a_budget_is_for_all_devices_together(memory):
    keeper = kept_graphs.Keeper("auto", 20, 330, [[FIRST], [SECOND]])
    assert kept_by(keeper, memory, [0, 0, 0, 1, 1], COSTS) == [True, True, False, True, False]


def test_graphs_of_the_cpu_are_counted_beside_a_gpu(monkeypatch):
    """CUDA's allocations are asked for; tensors of other devices are counted when they are saved."""
    allocated = iter([500, 740])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    x, p = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    with kept_graphs._graph_memory([CPU, SECOND], [x, p]) as held:
        found = (x @ p).tanh()
    assert found.requires_grad
    assert held == {CPU: 4 * 8 * 4, SECOND: 240}, "the output of tanh; input and parameter exist anyway"


class OfChunk:
    def __init__(self, rows):
        self.chunk_input = Part(None, rows)


def test_places_of_rows_lie_where_the_rows_lie():
    parts = [torch.empty(2, 3, device="meta"), torch.empty(1, 3, device="meta")]
    first, second = _places([OfChunk((0, 2)), OfChunk((1,))], parts, None)
    assert first.device.type == "meta"
    assert second == slice(1, 2)
    whole = torch.empty(3, 3, device="meta")
    whole[first] = parts[0]
    assert whole[first].shape == (2, 3)


def test_chunks_of_one_model_on_two_devices_are_refused():
    model, (x, _) = mlp(0), batch(4)

    def encode(z):
        found = model(z)
        return found if z[0, 0] == x[0, 0] else found.to("meta")

    with pytest.raises(ValueError, match=r"must have the same shape in all chunks.* and the same dtype and device"):
        wb.GradCache([encode], 2, lambda z: z.sum())(x)


def test_a_function_around_a_module_counts_on_the_modules_device(monkeypatch):
    """The input may still lie on the CPU when the function gets it."""
    seen = []
    monkeypatch.setattr(
        "wholebatch.gradcache.grad_cache.devices_of", lambda modules, _x: seen.append([*modules]) or (CPU,)
    )
    model, other, loss_fn, (x, y) = mlp(0), mlp(1), Clip(), batch(4)
    wb.GradCache([lambda z: model(z) + 0, other], 2, loss_fn)(x, y)
    assert [model in of_model for of_model in seen] == [True, False]
    assert seen[1] == [other]
    assert all(p is not None for p in gradients_of(model))

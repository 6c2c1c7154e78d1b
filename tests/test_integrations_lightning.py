"""The strategies for Lightning and Fabric, without these, and the state of all classes."""

import io
import subprocess
import sys
import types
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.heads import all_classes
from wholebatch.integrations import lightning
from wholebatch.integrations._framework import FrameworkError
from wholebatch.integrations.lightning import ShardedHeads, clip_by_value
from wholebatch.testing import run_ranks


def test_importing_the_adapter_imports_no_framework():
    names = ["lightning", "lightning.fabric", "pytorch_lightning"]
    program = f"import sys; import wholebatch.integrations.lightning; print([x for x in {names} if x in sys.modules])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


@pytest.mark.parametrize("make", [lightning.ddp_strategy, lightning.fabric_ddp_strategy])
def test_a_missing_or_old_framework_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(FrameworkError, match=r"lightning cannot be imported .* tested with lightning 2\.6\.6: pip"):
        make()
    old = types.ModuleType("lightning")
    old.__version__ = "1.9.5"
    monkeypatch.setitem(sys.modules, "lightning", old)
    with pytest.raises(FrameworkError, match=r"lightning 1\.9\.5 is too old; this adapter was tested with 2\.6\.6"):
        make()


class Model(nn.Module):
    """A backbone, and a head under two names."""

    def __init__(self, classes=7, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(3, 4)
        self.head = self.again = wb.PartialFC(4, classes, bias=True, margin=wb.AdaFace(8.0, 0.2), **settings)

    def forward(self, x, y):
        return self.head(self.backbone(x), y)


def early(**settings):
    """Return a model whose head was created with all classes, before there were other ranks."""
    model = Model(group=wb.comm.LocalCommunicator(), **settings)
    model.head.options = wb.PartialFC(4, 7).options
    return model


def whole_body(state, optimizer_state):
    """Train one step from the state of one process; return the state of all classes on rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = early()
    optimizer = wb.SparseAdamW(model.parameters(), lr=0.1)
    all_classes.keep_local_classes(model.head)
    all_classes.keep_local_classes(model.head)
    model.load_state_dict(state)
    model.head.check_local()
    heads = all_classes.heads_of(model)
    assert [*heads] == ["head", "again"]
    optimizer.load_state_dict(all_classes.local_optimizer_state(optimizer_state, optimizer, heads))
    local = model.head.local_classes
    assert torch.equal(model.head.weight, state["head.weight"][local])
    assert torch.equal(model.head.bias, state["head.bias"][local])
    if world > 1:
        with pytest.raises(ValueError, match=r"a row for each of 7 classes, got .* the checkpoint holds one rank's"):
            all_classes.local_optimizer_state(optimizer.state_dict(), optimizer, heads)
        with pytest.raises(ValueError, match="has classes 0 to 9 of 9, and this rank"):
            early().load_state_dict(Model(9, group=wb.comm.LocalCommunicator()).state_dict())
    model._ddp_params_and_buffers_to_ignore = all_classes.names_in(model)
    step(DistributedDataParallel(model), optimizer, slice(rank * 6 // world, (rank + 1) * 6 // world))
    whole = all_classes.whole_state_dict(model.state_dict(), heads)
    whole_optimizer = all_classes.whole_optimizer_state(optimizer.state_dict(), optimizer, heads)
    assert ("head.weight" in whole) == (rank == 0)
    assert world == 1 or len(model.head.weight) < 7, "the head itself keeps its part"
    return whole, whole_optimizer


def step(model, optimizer, rows):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 3, generator=generator), torch.tensor([0, 6, 3, 3, 5, 1])
    model(x[rows], y[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_state_of_one_process_goes_through_any_number_and_back():
    model = Model()
    optimizer = wb.SparseAdamW(model.parameters(), lr=0.1)
    step(model, optimizer, slice(None))
    before = {name: x.clone() for name, x in model.state_dict().items()}, optimizer.state_dict()
    state = model.state_dict()
    for name, x in before[0].items():
        state[name] = x
    saved = torch.load(_file(before[1]), weights_only=True)
    step(model, optimizer, slice(None))
    true, true_optimizer = model.state_dict(), optimizer.state_dict()
    for world in (1, 2, 3):
        whole, whole_optimizer = run_ranks(whole_body, world, state, deepcopy(saved), timeout_s=60)[0]
        assert whole.keys() == true.keys()
        assert whole._metadata["head"]["classes"] == [0, 7, 7]
        for name, x in true.items():
            assert torch.allclose(whole[name].double(), x.double(), rtol=0, atol=1e-6), (world, name)
        for key, of_one in true_optimizer["state"].items():
            for name, x in of_one.items():
                assert torch.allclose(whole_optimizer["state"][key][name], x, rtol=0, atol=1e-6), (world, name)


def _file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def few_body():
    with pytest.raises(ValueError, match="a class for each of the 2 ranks, got num_classes=1"):
        all_classes.keep_local_classes(_with_all(1))
    head = wb.PartialFC(4, 7)
    head.local_classes = slice(1, 3)
    with pytest.raises(ValueError, match=r"a head with classes 1 to 3 of 7 cannot become that of rank . of 2"):
        all_classes.keep_local_classes(head)


def _with_all(classes):
    head = wb.PartialFC(4, classes, group=wb.comm.LocalCommunicator())
    head.options = wb.PartialFC(4, 7).options
    return head


def test_heads_that_cannot_be_cut_raise():
    run_ranks(few_body, 2, timeout_s=60)


def test_a_head_under_a_launcher_waits_for_the_process_group(monkeypatch):
    """Its creation is allowed; its first use without a process group is not."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    head = wb.PartialFC(4, 7)
    assert len(head.weight) == 7
    with pytest.raises(ValueError, match="a launcher has started 2 processes"):
        head(torch.randn(2, 4), torch.tensor([0, 1]))


def test_values_of_sparse_gradients_are_clipped():
    head, other = wb.PartialFC(4, 50, sample_rate=0.2), nn.Parameter(torch.zeros(2))
    head(5 * torch.randn(8, 4), torch.arange(8)).backward()
    other.grad = torch.tensor([3.0, -0.001])
    true = head.weight.grad.to_dense().clamp(-0.01, 0.01)
    clip_by_value([*head.parameters(), other, nn.Parameter(torch.zeros(1))], 0.01)
    assert head.weight.grad.is_sparse
    assert torch.equal(head.weight.grad.to_dense(), true)
    assert torch.equal(other.grad, torch.tensor([0.01, -0.001]))


def resumed_in_bfloat16_body():
    """The strategies take the local rows of a state, and SparseAdamW the counts as they were saved."""
    counts = torch.arange(7.0) + 297
    head = wb.PartialFC(4, 7, margin=wb.ArcFace(8.0, 0.2), dtype=torch.bfloat16)
    backbone = nn.Linear(3, 4).bfloat16()
    optimizer = wb.SparseAdamW([*backbone.parameters(), *head.parameters()])
    strategy, module = ShardedHeads(), nn.ModuleDict({"backbone": backbone, "head": head})
    strategy._keep_apart(module, dist.get_world_size())
    strategy._watch_optimizer(optimizer)
    state, shapes = {}, [*((len(p), p.shape) for p in backbone.parameters()), (7, (7, 4))]
    for key, (rows, shape) in enumerate(shapes):
        of_rows = counts[:rows] if key == 2 else torch.full((rows,), 301.0)
        averages = {name: torch.ones(shape, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
        state[key] = {**averages, "steps": of_rows}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return [optimizer.state[p]["steps"] for p in (backbone.weight, head.weight)]


def test_counts_of_steps_in_bfloat16_are_resumed_as_they_were_saved():
    found = run_ranks(resumed_in_bfloat16_body, 2, timeout_s=60)
    assert torch.equal(torch.cat([counts for _, counts in found]), torch.arange(7.0) + 297)
    assert all(torch.equal(counts, torch.full((4,), 301.0)) for counts, _ in found)
    assert not torch.equal((torch.arange(7.0) + 297).bfloat16().float(), torch.arange(7.0) + 297)

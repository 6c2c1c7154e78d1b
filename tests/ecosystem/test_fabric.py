"""Fabric with a head of sharded classes, on two and three processes: the weights of one process.

make ecosystem
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from dual import as_launched, free_port
from head_runs import CLASSES, OPTIMIZERS, STEPS, Model, distance, local_batches, true_weights, whole_vector

import wholebatch as wb
from wholebatch.integrations.lightning import fabric_ddp_strategy
from wholebatch.testing import run_ranks

fabric_of_lightning = pytest.importorskip("lightning.fabric")
pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order


def fabric_of(strategy=None):
    world = dist.get_world_size()
    if strategy is None:
        strategy = fabric_ddp_strategy()
    fabric = fabric_of_lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def made(fabric, optimizer="SGD", rate=1.0, early=False):
    """Return a model and an optimizer that Fabric has set up."""
    model = Model(rate)
    if early:  # as it is made before the ranks exist
        model.head = wb.PartialFC(
            4, CLASSES, margin=model.head.margin, sample_rate=rate, group=wb.comm.LocalCommunicator(),
            dtype=torch.float64, seed=5,
        )  # fmt: skip
        model.head.options = wb.PartialFC(4, CLASSES).options
    return fabric.setup(model, OPTIMIZERS[optimizer](model.parameters()))


def train(fabric, model, optimizer, steps, micro_steps=1, clip=None, by_value=False):
    batches = local_batches(micro_steps) * 2
    for step in steps:
        for k, (x, y) in enumerate(batches[step * micro_steps :][:micro_steps]):
            with fabric.no_backward_sync(model, enabled=k < micro_steps - 1):
                fabric.backward(model(x, y) / micro_steps)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, **{"clip_val" if by_value else "max_norm": clip})
        optimizer.step()
        optimizer.zero_grad()
    return whole_vector(model)


JOBS = [
    {},
    {"early": True},
    {"micro_steps": 3, "clip": 0.1},
    {"clip": 0.01, "by_value": True},
    {"rate": 0.4, "optimizer": "SparseSGD", "clip": 0.1},
]
HALF = STEPS // 2
SAVED = {"SGD": 1.0, "AdamW": 1.0, "SparseSGD": 0.4, "SparseAdamW": 0.4}  # optimizer: rate of samples


def body(port, folder):
    as_launched(port)
    found = []
    for job in JOBS:
        fabric = fabric_of()
        model, optimizer = made(fabric, **{k: job[k] for k in ("optimizer", "rate", "early") if k in job})
        settings = {k: job[k] for k in ("micro_steps", "clip", "by_value") if k in job}
        found.append(train(fabric, model, optimizer, range(STEPS), **settings))
    for name, rate in SAVED.items():
        model, optimizer = made(fabric, name, rate)
        train(fabric, model, optimizer, range(HALF))
        fabric.save(folder / f"{name}.ckpt", {"model": model, "optimizer": optimizer, "step": HALF})
    return found


def resume_body(port, folder, plain=False):
    as_launched(port)
    fabric = fabric_of("auto" if plain else None)
    found = {}
    for name, rate in SAVED.items():
        model, optimizer = made(fabric, name, rate)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(folder / f"{name}.ckpt", state)
        found[name] = train(fabric, model, optimizer, range(state["step"], STEPS))
    return found


@pytest.fixture(scope="module", params=[2, 3])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, [*zip(*run_ranks(partial(body, free_port(), folder), request.param, timeout_s=400), strict=True)]


@pytest.mark.parametrize("number", range(len(JOBS)), ids=lambda number: str(JOBS[number]))
def test_several_processes_end_with_the_weights_of_one(run, number):
    true = true_weights(**{name: value for name, value in JOBS[number].items() if name != "early"})
    for of_rank in run[1][number]:
        assert distance(of_rank, true) < ROUNDING


@pytest.mark.parametrize(("world", "plain"), [(1, True), (1, False), (2, False), (3, False)])
def test_any_number_of_processes_goes_on(run, world, plain):
    """`plain`: the default strategy of Fabric on one process, without this library's."""
    for of_rank in run_ranks(partial(resume_body, free_port(), run[0], plain), world, timeout_s=240):
        for name, rate in SAVED.items():
            assert distance(of_rank[name], true_weights(name, rate)) < ROUNDING, name


def mistakes_body(port, folder):
    as_launched(port)
    fabric = fabric_of("ddp")
    model, optimizer = fabric.setup(Model(classes=8), torch.optim.SGD(Model(classes=8).parameters(), lr=0.1))
    x, y = local_batches()[0]
    with pytest.raises(ValueError, match=r"has wrapped the head.* fabric_ddp_strategy\(\)"):
        model(x, y)
    fabric = fabric_of()
    model, optimizer = made(fabric)
    fabric.backward(model(x, y))
    with pytest.raises(ValueError, match="norm_type must be 2 for an optimizer with a head's parameters, got inf"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf"))
    model.head.weight.grad[0, 0] = float("nan") if dist.get_rank() else 1.0
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan; pass error_if_nonfinite=False"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    plain = fabric_of("ddp")  # its file holds rank 0's part
    model = Model()
    model._ddp_params_and_buffers_to_ignore = [f"head.{name}" for name in model.head.state_dict()]
    plain.save(folder / "part.ckpt", {"model": plain.setup_module(model)})
    with pytest.raises(ValueError, match="a state_dict holds one rank's part of a head"):
        fabric.load(folder / "part.ckpt", {"model": made(fabric)[0]})


def test_mistakes_raise_on_all_ranks(tmp_path):
    run_ranks(partial(mistakes_body, free_port(), tmp_path), 2, timeout_s=120)

"""`--precision`: the scale of the loss, its overflows, and its place in a checkpoint; all on the CPU."""

import pytest
import torch
from compare import assert_same
from glyph_files import write_pairs
from safetensors.torch import load_file
from torch import nn
from torch.amp import GradScaler
from train_runs import metrics, options

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train import launch
from wholebatch_train.config import HeadConfig, ModelConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.run.checkpoint import FILE, read_checkpoint, save_checkpoint
from wholebatch_train.tasks import identify, retrieve
from wholebatch_train.tasks import task as common
from wholebatch_train.tasks.make import make_task
from wholebatch_train.tasks.precision import Precision

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process
MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_buckets=256)
SIZES = {"batch_size": 24, "image_size": 16, "validation_texts": 2, "test_texts": 2, "workers": 0, "model": MODEL}
FIRST, LARGEST = 2.0**24, 2.0**20  # scales: of the first try, and above which a gradient overflows


class OfFloat16(GradScaler):
    """A scale that overflows above the largest, as it does where gradients are in float16."""

    def scale(self, outputs):
        return super().scale(outputs) * (1.0 if self.get_scale() <= LARGEST else 2.0**120)


class ScaledOnCPU(Precision):
    """--precision fp16 in float32, with a scale that overflows in the first step, and whenever it has grown."""

    def __init__(self, name, device):
        super().__init__("fp32", device)
        if name == "fp16":
            self.scaler = OfFloat16("cpu", init_scale=FIRST, growth_interval=4)


@pytest.fixture
def _scaled_on_the_cpu(monkeypatch):
    for module in (common, launch):
        monkeypatch.setattr(module, "Precision", ScaledOnCPU)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), faces=faces))


def test_a_gradient_that_overflows_is_computed_again_with_a_smaller_scale():
    precision = Precision("fp32", CPU)
    precision.scaler = GradScaler("cpu", init_scale=2.0**127)
    p = nn.Parameter(torch.tensor([3.0, 5.0]))
    optimizer = torch.optim.SGD([p])
    calls = []

    def compute():
        calls.append(1)
        return precision.backward((100 * p).sum())

    loss = precision.add_gradients(compute, [optimizer], nn.Module())
    assert loss.item() == 800.0
    assert 1 < len(calls) < 20
    assert p.grad.tolist() == [100.0, 100.0], "unscaled, and of one pass"


def test_a_gradient_that_is_not_finite_at_any_scale_ends():
    precision = Precision("fp32", CPU)
    precision.scaler = GradScaler("cpu", init_scale=4.0)
    p = nn.Parameter(torch.tensor([0.0]))
    precision.add_gradients(lambda: precision.backward(p.sqrt().sum()), [torch.optim.SGD([p])], nn.Module())
    assert not p.grad.isfinite().all(), "the training loop sees it and ends the run"


@pytest.mark.parametrize("name", ["tf32", "fp16"])
def test_precisions_of_gpus_are_refused_on_a_cpu(name):
    with pytest.raises(UserError, match=f"--precision {name} needs a GPU, and the run is on the CPU"):
        Precision(name, CPU)


def stepped(config, steps):
    """Return the task after so many steps."""
    task = make_task(*load_data(config, 1), CPU, rank=0, size=1)
    for step in range(steps):
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        task.add_gradients(step)
        for optimizer in task.optimizers:
            optimizer.step()
        task.after_step()
    return task


STATEFUL = [
    {"loss": "global_contrastive"},
    {"loss": "global_contrastive", "chunk_size": 7},
    {"task": "identify", "head": HeadConfig(margin="curricularface", sample_rate=0.5)},
    {"task": "identify", "head": HeadConfig(margin="adaface"), "chunk_size": 7},
]


@pytest.mark.usefixtures("_scaled_on_the_cpu")
@pytest.mark.parametrize("more", STATEFUL, ids=str)
def test_an_overflow_leaves_the_state_of_a_loss_as_if_it_had_not_been(data, more):
    """A power of two as the scale changes no bit of the gradient, so the run without a scale is the truth.

    There are overflows in the steps 1, 5 and 9, and from the sixth step on the rows come again.
    """
    expected = stepped(TrainConfig(data=data, **SIZES, **more), steps=10)
    found = stepped(TrainConfig(data=data, precision="fp16", **SIZES, **more), steps=10)
    assert found.precision.scaler.get_scale() == LARGEST, "there were overflows"
    state = expected.loss_state()
    assert found.loss_state().keys() == state.keys() != set()
    for name, x in state.items():
        torch.testing.assert_close(found.loss_state()[name], x, rtol=1e-4, atol=1e-5)  # -inf where no row has been
    for name, x in expected.weights().items():
        assert_same(found.weights()[name], x, relative=1e-4, what=name)


class Stopped(Exception):  # noqa: N818
    """The end of a run that is killed."""


@pytest.mark.usefixtures("_scaled_on_the_cpu")
@pytest.mark.parametrize(
    "more",
    [
        ["--loss", "global_contrastive"],
        ["--task", "identify", "--head.margin", "curricularface", "--validation-texts", "3"],
    ],
    ids=str,
)
def test_a_resumed_run_continues_with_the_scale_of_its_checkpoint(data, tmp_path, monkeypatch, more):
    quick = ["--precision", "fp16", "--no-audit", "--no-tensorboard", "--workers", "0", *more]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["train", *options(data, whole, *quick)]) == 0

    steps = iter(range(8))

    def stop(task):
        if next(steps) == 7:
            raise Stopped
        after_step(task)

    kind = retrieve.Retrieve if "--loss" in more else identify.Identify
    after_step = kind.after_step
    with monkeypatch.context() as patched:
        patched.setattr(kind, "after_step", stop)
        with pytest.raises(Stopped):
            main(["train", *options(data, broken, *quick)])
    saved = load_file(broken / FILE)
    assert saved["scaler.scale"] == LARGEST
    assert saved["scaler.growth_tracker"] == 1
    assert main(["train", "--resume", str(broken)]) == 0
    assert metrics(broken) == metrics(whole)
    ours, theirs = (load_file(run / FILE) for run in (broken, whole))
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(ours[name], x), name
    assert theirs["scaler.scale"] == 2 * LARGEST, "it has grown since, and overflowed between"


def test_a_checkpoint_without_the_whole_loss_scale_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scaler = {"scale": torch.tensor(4.0), "growth_tracker": torch.tensor(1)}
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0)
    with pytest.raises(UserError, match=r"2 tensors are missing, .* scaler.growth_tracker among them; was the run"):
        read_checkpoint(tmp_path, model, optimizer, steps=1, scaler=scaler)
    half = {"scale": torch.tensor(4.0)}
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0, scaler=half)
    with pytest.raises(UserError, match=r"1 tensors are missing, .* scaler.growth_tracker among them; was the run"):
        read_checkpoint(tmp_path, model, optimizer, steps=1, scaler=scaler)


def test_a_checkpoint_with_an_impossible_scale_changes_nothing(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    right = {"scale": torch.tensor(4.0), "growth_tracker": torch.tensor(1)}
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0, scaler=right)
    found = read_checkpoint(tmp_path, model, optimizer, steps=1, scaler=right)
    assert {name: x.item() for name, x in found.scaler.items()} == {"scale": 4.0, "growth_tracker": 1}
    with pytest.raises(UserError, match="does not fit this configuration's model: 2 tensors are missing, unknown"):
        read_checkpoint(tmp_path, model, optimizer, steps=1)
    for wrong in (
        {"scale": torch.tensor(0.0)},
        {"scale": torch.tensor(float("nan"))},
        {"growth_tracker": torch.tensor(-1)},
    ):
        save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0, scaler=right | wrong)
        with pytest.raises(UserError, match="has no state of a loss scale"):
            read_checkpoint(tmp_path, model, optimizer, steps=1, scaler=right)

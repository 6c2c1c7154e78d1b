"""Adapters to other trainers: what they do without the framework. `make ecosystem` runs them inside it."""

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import loss_cases
import pytest
import torch
import torch.distributed as dist
import version_table
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations import open_clip
from wholebatch.integrations._framework import Framework, FrameworkError
from wholebatch.integrations._options import AdaptedLoss
from wholebatch.integrations.transformers import own_leaves
from wholebatch.testing import run_ranks

WIDTH, LENGTH, VOCABULARY = 4, 6, 9
ROWS = {2: (5, 2), 3: (3, 0, 4)}
FRAMEWORKS = ["open_clip", "torchvision", "timm"]


def test_importing_the_adapters_imports_no_framework():
    program = (
        "import sys; import wholebatch.integrations.open_clip; "
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


# Losses with open_clip's signatures.


def batch():
    """Return the arguments of all losses for all rows, and the scalars; captions have different lengths."""
    generator = torch.Generator().manual_seed(0)
    total = 7
    x, y, u, v = F.normalize(torch.randn(4, total, WIDTH, generator=generator, dtype=torch.float64), dim=-1)
    logits = torch.randn(total, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, VOCABULARY, (total, LENGTH), generator=generator)
    for row in range(total):
        labels[row, 1 + row % LENGTH :] = 0
    rows = {"image_features": x, "text_features": y}
    rows |= {"dist_image_features": u, "dist_text_features": v, "logits": logits, "labels": labels}
    scalars = {"logit_scale": torch.tensor(9.0, dtype=torch.float64), "dist_logit_scale": torch.tensor(4.0)}
    return rows, scalars | {"logit_bias": torch.tensor(-3.0, dtype=torch.float64)}


def dense_clip(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def dense_siglip(image_features, text_features, logit_scale, logit_bias):
    logits = logit_scale * image_features @ text_features.T + logit_bias
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


def dense_coca(image_features, text_features, logits, labels, logit_scale):
    caption = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)
    return 3 * dense_clip(image_features, text_features, logit_scale) + 2 * caption


def dense_distill(
    image_features, text_features, logit_scale, dist_image_features, dist_text_features, dist_logit_scale
):
    student = logit_scale * image_features @ text_features.T
    teacher = dist_logit_scale * dist_image_features @ dist_text_features.T
    sides = [(student, teacher), (student.T, teacher.T)]
    distill = -sum((t.softmax(1) * s.log_softmax(1)).sum(1).mean() for s, t in sides) / 2
    return dense_clip(image_features, text_features, logit_scale) + distill


CASES = {
    "ClipLoss": (dense_clip, lambda **ranks: open_clip.ClipLoss(local_loss=True, **ranks)),
    "SigLipLoss": (dense_siglip, lambda **ranks: open_clip.SigLipLoss(dist_impl="shift", chunk_size=2, **ranks)),
    "CoCaLoss": (dense_coca, lambda **ranks: open_clip.CoCaLoss(2.0, 3.0, **ranks)),
    "DistillClipLoss": (dense_distill, open_clip.DistillClipLoss),
}
NAMES = {
    name: dense.__code__.co_varnames[: dense.__code__.co_argcount] for name, (dense, _) in CASES.items()
}  # the arguments


def gradients(loss, inputs):
    loss.backward()
    return {name: x.grad for name, x in inputs.items() if x.grad is not None}


def leaves(rows, scalars, name, part=slice(None)):
    chosen = {key: x[part] for key, x in rows.items()} | scalars
    found = {key: chosen[key].clone() for key in NAMES[name]}
    return {key: x.requires_grad_(x.is_floating_point() and not key.startswith("dist")) for key, x in found.items()}


def of_rank(name):
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, scalars = batch()
    first = sum(ROWS[world][:rank])
    inputs = leaves(rows, scalars, name, slice(first, first + ROWS[world][rank]))
    loss_fn = CASES[name][1](rank=rank, world_size=world)
    losses = loss_fn(**inputs, output_dict=True)
    assert set(losses) <= {"contrastive_loss", "caption_loss", "distill_loss"}
    total = sum(losses.values())
    return total.detach(), gradients(total, inputs)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_whole_batch(name, world):
    """Features hold W times their gradient, for the averaging of the engine; scalars hold theirs on every rank."""
    inputs = leaves(*batch(), name)
    loss = CASES[name][0](**inputs)
    true = gradients(loss, inputs)
    found = run_ranks(of_rank, world, name)
    for value, _ in found:
        assert torch.allclose(value, loss.detach(), rtol=0, atol=1e-12)
    for key, gradient in true.items():
        ours = [of_one[key] for _, of_one in found]
        if gradient.ndim:
            assert torch.allclose(torch.cat(ours) / world, gradient, rtol=0, atol=1e-12), key
        else:
            assert all(torch.allclose(one, gradient, rtol=0, atol=1e-12) for one in ours), key


def test_losses_without_dictionaries():
    rows, scalars = batch()
    for name, (dense, build) in CASES.items():
        inputs = leaves(rows, scalars, name)
        found = build()(**inputs)
        value = found if isinstance(found, torch.Tensor) else sum(found)
        assert isinstance(found, torch.Tensor) == (name in ("ClipLoss", "SigLipLoss"))
        assert torch.allclose(value, dense(**inputs), rtol=0, atol=1e-12)


def test_a_weight_of_zero_leaves_the_contrastive_loss_out():
    inputs = leaves(*batch(), "CoCaLoss")
    contrastive, caption = open_clip.CoCaLoss(1.0, 0.0)(**inputs)
    assert contrastive == 0
    caption.backward()
    assert inputs["image_features"].grad is None


def test_contradicting_arguments_are_refused():
    inputs = leaves(*batch(), "ClipLoss")
    with pytest.raises(ValueError, match="use_horovod must be False"):
        open_clip.ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="dist_impl must be one of"):
        open_clip.SigLipLoss(dist_impl="tree")
    with pytest.raises(
        ValueError, match=r"must be those of the process group, 0 and 1, got 1 and 4; leave them out, or"
    ):
        open_clip.ClipLoss(rank=1, world_size=4)(**inputs)
    open_clip.ClipLoss(group=wb.comm.LocalCommunicator())(**inputs)


def forgotten_rank():
    rows, scalars = batch()
    try:
        open_clip.ClipLoss(rank=0, world_size=2)(**leaves(rows, scalars, "ClipLoss"))
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrong_rank_is_an_error_on_all_ranks():
    for message in run_ranks(forgotten_rank, 2, timeout_s=60):
        assert "must be those of the process group, 1 and 2, got 0 and 2" in message


# The factory, with stand-ins for open_clip's losses.


class ClipLoss(torch.nn.Module):
    """Stands for open_clip's class of this name."""

    rank, world_size = 0, 1

    def forward(self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False):
        raise NotImplementedError


@pytest.mark.parametrize("steps", [1, 4])
def test_micro_steps_share_the_gradient_of_the_scale(steps):
    loss_fn = open_clip.counterpart_of(ClipLoss(), SimpleNamespace(rank=0, accum_freq=steps))
    inputs = leaves(*batch(), "ClipLoss")
    true = gradients(dense_clip(**inputs), inputs)
    again = leaves(*batch(), "ClipLoss")
    loss = sum(loss_fn(**again, output_dict=True).values())
    found = gradients(loss, again)
    assert loss == dense_clip(**again) or torch.allclose(loss, dense_clip(**again), rtol=0, atol=1e-12)
    assert torch.allclose(found["logit_scale"] * steps, true["logit_scale"], rtol=0, atol=1e-12)
    assert torch.allclose(found["image_features"], true["image_features"], rtol=0, atol=1e-12)


def test_a_loss_without_a_counterpart_is_refused():
    class GenLipLoss(ClipLoss):
        pass

    for theirs, found in ((GenLipLoss(), "has GenLipLoss and"), (None, "has a loss inside the model and")):
        with pytest.raises(ValueError, match=found):
            open_clip.counterpart_of(theirs, SimpleNamespace())


def test_the_model_in_chunks_has_the_gradient_of_the_whole_batch():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.image, self.text = torch.nn.Linear(3, WIDTH), torch.nn.Linear(2, WIDTH)
            self.logit_scale = torch.nn.Parameter(torch.tensor([2.0]))  # as FSDP makes it

        def forward(self, image, text):
            x, y = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            return {"image_features": x, "text_features": y, "logit_scale": self.logit_scale.exp()}

    images, texts = torch.randn(10, 3), torch.randn(10, 2)
    grads = []
    for wrap in (lambda model: model, lambda model: open_clip.ChunkedModel(model, 4)):
        model = Model()
        called = wrap(model)
        for out in (called(images, texts), called(image=images, text=texts)):
            dense_clip(**out).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(*grads, strict=True))
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert open_clip.ChunkedModel(wrapped, 4).module is model


def test_a_task_has_its_model_in_chunks_during_an_epoch_alone():
    """Evaluation and checkpoints of open_clip 4 find the model itself, after an error as well."""
    step, model = SimpleNamespace(task=torch.nn.Module()), torch.nn.Linear(1, 1)
    step.task.trainable_module = model

    def train(first, outcome):
        chunked = first.task.trainable_module
        assert isinstance(chunked, open_clip.ChunkedModel)
        assert (chunked.model, chunked.chunk_size) == (model, 4)
        if outcome == "error":
            raise RuntimeError(outcome)
        return outcome

    in_chunks = open_clip._train_in_chunks(train, 4, has_task=True)
    assert in_chunks(step, "loss") == "loss"
    assert step.task.trainable_module is model
    with pytest.raises(RuntimeError, match="error"):
        in_chunks(step, "error")
    assert step.task.trainable_module is model


# Declared arguments.


class Base(AdaptedLoss):
    """Takes a and b, and the options."""

    a: int
    b: int = 2
    kind: ClassVar[str] = "no argument"

    def prepare(self):
        self.total = self.a + self.b


class Reordered(Base, positional="a c", options=("group",)):
    """Takes a and c by position, and b by keyword alone."""

    c: int = 3


class Same(Reordered):
    """Takes what its base class takes."""


class WithoutB(Reordered, fixed={"b": 5}):
    """Takes no b."""

    d: int = 4


class Own(Base):
    """Has a constructor of its own."""

    factor: int = 10

    def __init__(self, c):
        super().__init__(c * self.factor)


def test_a_subclass_may_have_a_constructor_of_its_own():
    assert (Own(3).a, Own(3).total, str(inspect.signature(Own))) == (30, 32, "(c)")


OPTIONS = "group=None, exchange='auto', memory='auto', precision='auto'"


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (Base, f"(a, b=2, *, {OPTIONS})"),
        (Reordered, "(a, c=3, *, b=2, group=None)"),
        (Same, "(a, c=3, *, b=2, group=None)"),
        (WithoutB, "(a, c=3, d=4, *, group=None)"),
    ],
)
def test_a_class_takes_the_arguments_that_it_declares(cls, arguments):
    assert str(inspect.signature(cls)) == arguments
    assert cls.kind == "no argument"
    with pytest.raises(TypeError, match=f"{cls.__name__}.* got an unexpected keyword argument 'e'; it takes a, "):
        cls(1, e=2)
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        cls()


def test_arguments_become_attributes_before_they_are_prepared():
    loss = Base(1, memory="flat")
    assert (loss.a, loss.b, loss.total) == (1, 2, 3)
    assert loss.options == {"group": None, "exchange": "auto", "memory": "flat", "precision": "auto"}
    fixed = WithoutB(1)
    assert (fixed.b, fixed.total, fixed.options) == (5, 6, {"group": None})


def test_a_derived_loss_of_open_clip_has_the_order_of_its_base_class():
    clip, distill = (inspect.signature(x).parameters for x in (open_clip.ClipLoss, open_clip.DistillClipLoss))
    assert [*clip][:6] == [*distill][:6]
    assert next(iter(clip)) == "local_loss"


# A loss's own parameters.


def leaves_beside_features(call, inputs):
    """Return the leaves of a loss's graph beside its inputs, which are computed, as a model's features are."""
    features = [x.requires_grad_() * 1.0 if x.is_floating_point() else x for x in inputs]
    return own_leaves(call(*features), features)


@pytest.mark.parametrize("name", loss_cases.LOSSES)
def test_no_loss_of_the_library_has_leaves_of_its_own(name):
    """A Trainer's adapter would refuse it."""
    case = loss_cases.LOSSES[name]
    inputs = [*loss_cases.whole_batch(case, (6,)), torch.tensor(5.0), torch.tensor(-2.5)]
    differentiable = [x.differentiable for x in case.inputs] + [True, True]

    def call(*features):
        kept = [x if learned else x.detach() for x, learned in zip(features, differentiable, strict=True)]
        result = case.call(wb.functional, *kept)
        return result[0] if isinstance(result, tuple) else result

    assert leaves_beside_features(call, inputs) == []


def test_a_loss_of_ones_own_has_no_leaves_but_its_parameters():
    scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    inputs = list(torch.randn(2, 5, 4, dtype=torch.float64))
    for strategy in ("gather", "replicate", "root"):
        whole = wb.WholeBatch(lambda x, y: dense_clip(x, y, 3.0), strategy=strategy)
        assert leaves_beside_features(whole, inputs) == []
    assert leaves_beside_features(wb.CLIPLoss(logit_scale=scale), inputs) == [scale]


# Frameworks.


def test_a_missing_framework_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(
        FrameworkError, match=r"adapter was tested with open_clip 3\.3\.0 and .*: pip install 'open_clip_"
    ):
        open_clip.create_loss(SimpleNamespace())


def test_the_command_without_a_framework_is_one_line():
    program = "import sys, runpy; sys.modules['open_clip'] = None; sys.argv[1:] = ['--siglip']; "
    program += "runpy.run_module('wholebatch.integrations.open_clip', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "error: open_clip cannot be imported (" in run.stderr


def test_a_framework_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace(__version__="2.9.3"))
    with pytest.raises(FrameworkError, match=r"open_clip 2\.9\.3 is too old; this adapter was tested with 3\.3\.0"):
        open_clip.create_loss(SimpleNamespace())


def test_a_newer_framework_is_used_while_it_has_the_name_that_is_replaced(monkeypatch):
    newer = SimpleNamespace(__name__="open_clip", __version__="9.0", create_loss=lambda _args: ClipLoss())
    monkeypatch.setitem(sys.modules, "open_clip", newer)
    assert isinstance(open_clip.create_loss(SimpleNamespace()), open_clip.ClipLoss)
    with pytest.raises(FrameworkError, match=r"open_clip of open_clip 9\.0 has no create_task, where this adapter"):
        open_clip.create_task(SimpleNamespace(), None)


def test_the_page_has_the_versions_of_all_frameworks():
    """If this fails: python tests/version_table.py."""
    assert version_table.PAGE.read_text() == version_table.page_with_table()


def test_a_version_that_was_not_tested_is_used_with_a_line(monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    for release, lines in (("1.1", 1), ("1.1", 1), ("1.2.0", 1), ("3.0", 2)):
        monkeypatch.setitem(sys.modules, "odd", SimpleNamespace(__name__="odd", __version__=release))
        Framework("odd", ("1.0", "1.2.0"), "pip install odd").load("odd")
        assert len(caplog.messages) == lines
    assert caplog.messages[1].startswith("odd 3.0 is used, but this adapter was tested with 1.0 and 1.2.0: check")


def test_a_version_without_numbers_counts_as_new(monkeypatch):
    monkeypatch.setitem(sys.modules, "strange", SimpleNamespace(__name__="strange"))
    assert Framework("strange", ("1.0",), "pip install strange").load("strange")

"""Logit scale and bias in the constructor of a loss: the numbers of the call, trained with the module, overridden."""

import copy
import inspect
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import batch, mlp, sharded
from loss_cases import BIAS, LOSSES, gradients, rows_of, whole_batch
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

MODULES = {
    "clip_loss": wb.CLIPLoss,
    "distillation_loss": wb.DistillationLoss,
    "info_nce_loss": wb.InfoNCELoss,
    "matryoshka_loss": wb.MatryoshkaLoss,
    "max_sim_loss": wb.MaxSimLoss,
    "moco_loss": wb.MoCoLoss,
    "siglip_loss": wb.SigLIPLoss,
}
SETTINGS = {"matryoshka_loss": {"dims": (2, 3, 5)}}
DEFAULTS = {name: ("logit_scale", "logit_bias")[: 1 + (name in ("clip_loss", "siglip_loss"))] for name in MODULES}
COUNTS = [(6,), (5, 2), (4, 0, 3)]


class Modules:
    """The functions of the losses, computed by a new module whose constructor gets the scale and the bias.

    With other defaults for the constructor, the call gets the scale and the bias.
    """

    def __init__(self, **defaults):
        self.defaults, self.made = defaults, None

    def __getattr__(self, name):
        def call(*args, **kwargs):
            given = inspect.signature(getattr(wb.functional, name)).bind(*args, **kwargs).arguments
            in_constructor = {*inspect.signature(MODULES[name]).parameters} - {*self.defaults}
            settings = {k: given.pop(k) for k in in_constructor if k in given}
            self.made = MODULES[name](**settings, **self.defaults)
            return self.made(**given)

        return call


class Names:
    """The functions of the losses, which return their names."""

    def __getattr__(self, name):
        return lambda *_args, **_kwargs: (name,)


def function_of(case):
    return case.call(Names(), *case.inputs, torch.ones(()), torch.ones(()))[0]


CASES = {name: case for name, case in LOSSES.items() if function_of(case) in MODULES}
ONE_OF_EACH = {function_of(case): case for case in reversed(CASES.values())}


def test_all_modules_whose_call_takes_a_scale_are_here():
    assert {*ONE_OF_EACH} == {*MODULES}
    for name in [name for name in wb.__all__ if name.endswith("Loss")]:
        in_call = {"logit_scale", "logit_bias"} & {*inspect.signature(getattr(wb, name).forward).parameters}
        assert in_call == {
            *dict(zip((m.__name__ for m in MODULES.values()), DEFAULTS.values(), strict=True)).get(name, ())
        }


@pytest.mark.parametrize("name", CASES)
def test_a_default_gives_the_bits_of_an_argument_of_the_call(name):
    case, scale = CASES[name], torch.tensor(7.0, dtype=torch.float64)
    whole = whole_batch(case, (7,))
    expected = gradients(case, wb.functional, whole, scale)
    for found, true in zip(gradients(case, Modules(), whole, scale), expected, strict=True):
        assert torch.equal(found, true)
    assert not torch.equal(gradients(case, Modules(), whole, scale + 1)[0], expected[0])
    number = case.call(Modules(), *whole, 7.0, BIAS)
    assert torch.equal(number, expected[0])


def learned(kind, value):
    """Return a learned scale in float64: a parameter, or a wb.Scale, which has one."""
    if kind == "parameter":
        return nn.Parameter(torch.tensor([value], dtype=torch.float64))
    scale = wb.Scale(value).double()
    nn.init.constant_(scale.log_scale, math.log(value))
    return scale


def trained_body(counts, name):
    """A learned default is a parameter of the module, and gets its full gradient on every rank."""
    case = ONE_OF_EACH[name]
    whole = whole_batch(case, counts)
    local = [x[rows] for x, rows in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
    for kind in ("parameter", "scale"):
        scale, bias = learned(kind, 7.0), learned("parameter", BIAS)
        value = scale if kind == "parameter" else scale()
        true = case.call(wb.reference, *whole, value, bias)
        true.backward()
        modules = Modules()
        found = case.call(modules, *local, copy.deepcopy(scale), copy.deepcopy(bias))
        for p in modules.made.parameters():
            p.grad = None  # copied with the scale
        found.backward()
        assert_same(found, true, relative=1e-12)
        expected = {"logit_scale" if kind == "parameter" else "logit_scale.log_scale": scale, "logit_bias": bias}
        parameters = dict(modules.made.named_parameters())
        assert {*parameters} == {*[*expected][: len(DEFAULTS[name])]}
        for at, p in parameters.items():
            of = expected[at]
            grad = (of.log_scale if isinstance(of, wb.Scale) else of).grad
            absolute = 1e-14 if name == "clip_loss" and at == "logit_bias" else 0.0  # zero: a bias shifts all logits
            assert_same(p.grad, grad, relative=1e-10, absolute=absolute, what=f"{name}, {at}")
            if not absolute:
                with pytest.raises(AssertionError, match="actual is about"):
                    assert_same(p.grad / 2, grad, relative=1e-10)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_learned_default_gets_its_full_gradient(name, counts):
    run_ranks(trained_body, len(counts), counts, name)


@pytest.mark.parametrize("name", MODULES)
def test_the_call_overrides(name):
    case = ONE_OF_EACH[name]
    inputs = whole_batch(case, (5,))
    modules = Modules(**dict(zip(DEFAULTS[name], (learned("scale", 3.0), learned("parameter", 1.0)), strict=False)))
    leaf = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    found = case.call(modules, *inputs, leaf, 2 * leaf)
    assert torch.equal(found, case.call(wb.functional, *inputs, leaf, 2 * leaf))
    found.backward()
    assert leaf.grad is not None
    assert len([*modules.made.parameters()]) == len(DEFAULTS[name])
    assert all(p.grad is None for p in modules.made.parameters())


@pytest.mark.parametrize("call", [wb.CLIPLoss(), wb.CLIPLoss(logit_scale=2.0), wb.functional.clip_loss])
def test_a_call_takes_the_value_of_a_scale(call):
    x, scale = torch.eye(3), wb.Scale(3.0)
    assert call(x, x, scale()) == wb.functional.clip_loss(x, x, scale().item())
    with pytest.raises(ValueError, match="logit_scale must be a number or a tensor of one element, got Scale"):
        call(x, x, scale)


class Counted(wb.Scale):
    """A scale that counts its calls."""

    calls = 0

    def forward(self):
        self.calls += 1
        return super().forward()


def test_a_scale_is_called_once_in_each_forward():
    x, scale = torch.eye(3), Counted(10.0)
    loss = wb.CLIPLoss(logit_scale=scale)
    for calls in (1, 2):
        loss(x, x)
        assert scale.calls == calls
    loss(x, x, 5.0)
    assert scale.calls == 2


def missing_body():
    """Rank 1 gives the scale neither in the constructor nor in the call; the others give it in either."""
    group, rank = dist.new_group(), dist.get_rank()
    texts = []
    for name, module in MODULES.items():
        case = ONE_OF_EACH[name]
        x = whole_batch(case, (2,))
        settings = {"group": group, **SETTINGS.get(name, {})}
        given = dict(zip(DEFAULTS[name], (7.0, BIAS), strict=False))
        loss = module(**settings) if rank == 1 else module(**settings, **given)
        with pytest.raises(TypeError) as caught:
            loss(*x[:3]) if name == "moco_loss" else loss(*x[:2], **teacher(name, x))
        texts.append((name, str(caught.value)))
    x = torch.eye(2)
    with pytest.raises(TypeError, match=r"logit_bias=\.\.\.\)"):
        wb.SigLIPLoss(logit_scale=3.0, logit_bias=None if rank == 0 else 1.0)(x, x)
    with pytest.raises(
        TypeError, match=r"rank 2: .*missing required arguments: 'teacher_image_features', .* in the call; the sig"
    ):
        wb.DistillationLoss(logit_scale=2.0)(x, x, **({} if rank == 2 else teacher("distillation_loss", [x, x, x, x])))
    assert wb.CLIPLoss(logit_scale=3.0)(x, x).isfinite(), "the group continues"
    return texts


def teacher(name, x):
    """Return the arguments of a call that are the teacher's."""
    if name != "distillation_loss":
        return {}
    return {"teacher_image_features": x[2], "teacher_text_features": x[3], "teacher_logit_scale": 3.0}


def test_a_scale_that_is_missing_on_one_rank_raises_on_all():
    of_ranks = run_ranks(missing_body, 3, timeout_s=60)
    assert [name for name, _ in of_ranks[0]] == [*MODULES]
    assert all(texts == of_ranks[0] for texts in of_ranks)
    for name, text in of_ranks[0]:
        module = MODULES[name].__name__
        missing = (
            "required arguments: 'logit_scale', 'logit_bias'"
            if name == "siglip_loss"
            else "a required argument: 'logit_scale'"
        )
        assert f"rank 1: {module}.forward: missing {missing}; pass " in text
        assert f"in the call, or to the constructor: {module}(logit_scale=..." in text
        assert "the signature is (" in text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.Linear(2, 3), "must be a number, a tensor of shape .* an nn.Parameter, or a wb.Scale, got Linear"),
        (torch.ones(1, requires_grad=True).exp(), "got a computed tensor with a graph, .*; pass it in each call"),
        (torch.ones(2), r"got shape \(2,\)"),
        (float("nan"), "must be finite"),
        ("14.3", "must be a number or a tensor of one element, got '14.3'"),
        (True, "must be a number"),
    ],
)
@pytest.mark.parametrize("name", ["logit_scale", "logit_bias"])
def test_mistakes_in_the_constructor(name, value, message):
    with pytest.raises(ValueError, match=f"{name} {message}" if message.startswith("must") else f"{name}.*{message}"):
        wb.SigLIPLoss(**{name: value})


@pytest.mark.parametrize("name", MODULES)
def test_state_copies_and_text(name):
    make = lambda **given: MODULES[name](**SETTINGS.get(name, {}), **given)  # noqa: E731
    assert make(logit_scale=14.25).state_dict() == {}
    assert "logit_scale=14.25" in repr(make(logit_scale=14.25))
    assert "logit_scale=14.25" in repr(make(logit_scale=nn.Parameter(torch.tensor([14.25]))))
    assert "logit_scale=14.25" in repr(make(logit_scale=torch.tensor(14.25)))
    assert "(logit_scale): Scale(max=100)" in repr(make(logit_scale=wb.Scale(14.25)))
    assert repr(make(logit_scale=wb.Scale(14.25))).count("Scale(") == 1
    assert list(make(logit_scale=torch.tensor(14.25)).state_dict()) == ["logit_scale"]
    loss = make(logit_scale=wb.Scale(14.25))
    assert list(loss.state_dict()) == ["logit_scale.log_scale"]
    other = copy.deepcopy(loss)
    nn.init.zeros_(other.logit_scale.log_scale)
    assert loss.logit_scale().item() == pytest.approx(14.25)
    loss.load_state_dict(other.state_dict())
    assert loss.logit_scale().item() == 1.0


def test_statistics_of_a_loss_with_a_default():
    x = normalize(torch.randn(5, 3, dtype=torch.float64), dim=1)
    found = wb.with_statistics(wb.CLIPLoss(logit_scale=8.0))(x, x)
    assert found == wb.with_statistics(wb.CLIPLoss())(x, x, 8.0)
    assert found.statistics.temperature == 1 / 8


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(0), mlp(1)

    def forward(self, x, y):
        return normalize(self.image(x), dim=1), normalize(self.text(y), dim=1)


class Whole(nn.Module):
    """Two encoders and their loss, which holds the scale."""

    def __init__(self, value):
        super().__init__()
        self.encoders = Encoders()
        self.loss = wb.CLIPLoss(logit_scale=wb.Scale(min(value, 20.0), 20.0).double())
        nn.init.constant_(self.loss.logit_scale.log_scale, math.log(value))

    def forward(self, x, y):
        return self.loss(*self.encoders(x, y))


def engines_body(engine, counts):
    """Below and at the limit, the gradients under an engine are those of the whole batch, the scale's included."""
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    wrap = DistributedDataParallel if engine == "ddp" else sharded
    for value, cached in ((7.0, False), (20.0, False), (7.0, True), (20.0, True)):
        dense, plain = Whole(value), Whole(value)
        wb.reference.clip_loss(*dense.encoders(x, y), dense.loss.logit_scale()).backward()
        if cached:
            model, loss = wrap(plain.encoders), wrap(plain.loss)
            wb.GradCache([model], 2, lambda parts, loss=loss: loss(*parts))([x[rows], y[rows]])
        else:
            loss = wrap(plain)
            loss(x[rows], y[rows]).backward()
        assert dense.loss.logit_scale.log_scale.grad.abs() > 1e-6
        for (name, p), q in zip(plain.named_parameters(), dense.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_same(grad, q.grad, relative=1e-10, absolute=1e-14, what=f"{name}, {value=}, {cached=}")
    if dist.get_rank() == 0:
        assert "Scale(max=20)" in repr(loss), "without the other ranks"


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_engines_take_a_loss_with_a_scale(engine, counts):
    run_ranks(engines_body, len(counts), engine, counts)


def sharded_text_body():
    """Rank 0 alone prints a loss whose parameter is sharded: nothing waits for the other ranks."""
    loss = sharded(wb.CLIPLoss(logit_scale=nn.Parameter(torch.tensor([14.25]))))
    return repr(loss) if dist.get_rank() == 0 else ""


def test_one_rank_prints_a_sharded_loss():
    assert "logit_scale=DTensor of shape (1,)" in run_ranks(sharded_text_body, 2, timeout_s=30)[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: wb.functional.clip_loss(x, x, wb.Scale(10.0)),
            r"logit_scale .* got Scale.*: scale\(\) as a",
        ),
        (
            lambda x: wb.NTXentLoss(temperature=wb.Scale(10.0)),
            r"temperature .* got Scale.* 1 / scale\(\) as a",
        ),
        (
            lambda x: wb.NTXentLoss(temperature=nn.Parameter(torch.tensor(-0.1)))(x, x),
            r"temperature must be positive, got -0\.1.* that stays positive, pass 1 / scale\(\) of a scale",
        ),
    ],
    ids=["scale", "temperature", "negative"],
)
def test_a_module_or_a_negative_temperature_names_the_value_of_a_scale(call, message):
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=message):
        call(x)
    scale = wb.Scale(10.0)
    wb.functional.nt_xent_loss(x, x + 1, temperature=1 / scale()).backward()
    assert scale.log_scale.grad is not None


def test_a_scale_for_a_loss_with_a_temperature_says_so():
    x = torch.randn(4, 8)
    with pytest.raises(TypeError, match=r"settings are .*temperature.*; pass temperature=1 / logit_scale"):
        wb.NTXentLoss(logit_scale=20.0)
    for call in (wb.NTXentLoss(), wb.functional.nt_xent_loss):
        with pytest.raises(TypeError, match="this loss has a temperature instead, 1 / logit_scale"):
            call(x, x, logit_scale=20.0)
    with pytest.raises(TypeError) as error:
        wb.functional.vicreg_loss(x, x, logit_scale=20.0)
    assert "temperature" not in str(error.value)

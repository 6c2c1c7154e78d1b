"""wb.Scale: the value, its gradient below and at the limit, and the engines that take its parameter."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import batch, mlp, sharded
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def at(value, limit=100.0):
    """Return a Scale in float64 whose parameter is log(value), which may lie above the limit."""
    scale = wb.Scale(min(value, limit), limit).double()
    with torch.no_grad():
        scale.log_scale.fill_(math.log(value))
    return scale


def test_scale_is_the_exponential_of_one_parameter():
    scale = wb.Scale(1 / 0.07)
    assert [name for name, _ in scale.named_parameters()] == ["log_scale"]
    assert scale.log_scale.shape == (1,)
    assert scale().shape == ()
    assert scale().item() == pytest.approx(1 / 0.07, rel=1e-6)
    assert repr(scale) == "Scale(max=100)"


@pytest.mark.parametrize("value", [1e-6, 1.0, 14.3, 99.9])
def test_gradient_below_the_limit_is_that_of_the_exponential(value):
    scale = at(value)
    torch.autograd.gradcheck(lambda w: torch.func.functional_call(scale, {"log_scale": w}, ()), (scale.log_scale,))
    torch.autograd.gradgradcheck(
        lambda w: torch.func.functional_call(scale, {"log_scale": w}, ()).square(), (scale.log_scale,)
    )


@pytest.mark.parametrize("value", [100.0, 250.0])
def test_at_the_limit_a_gradient_lowers_the_scale_and_does_not_raise_it(value):
    for grad, expected in ((0.3, 30.0), (-0.3, 0.0)):
        scale = at(value)
        assert scale().item() == pytest.approx(100.0, rel=1e-12)
        scale().backward(torch.tensor(grad, dtype=torch.float64))
        assert scale.log_scale.grad.item() == pytest.approx(expected, rel=1e-12)
    clamped = torch.tensor(math.log(250.0), requires_grad=True)  # the plausible wrong answer: it stays there for ever
    (0.3 * clamped.exp().clamp(max=100.0)).backward()
    assert clamped.grad.item() == 0.0


def test_a_gradient_that_is_not_a_number_is_not_hidden():
    scale = at(100.0)
    scale().backward(torch.tensor(float("nan"), dtype=torch.float64))
    assert scale.log_scale.grad.isnan().all()


def test_large_steps_keep_the_scale_between_zero_and_its_limit():
    generator = torch.Generator().manual_seed(0)
    scale, seen = wb.Scale(20.0, max=50.0), []
    optimizer = torch.optim.SGD(scale.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        (torch.randn((), generator=generator) * scale()).backward()
        optimizer.step()
        seen.append(scale().item())
    assert min(seen) > 0
    assert max(seen) <= 50.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_rounding_lifts_the_scale_above_its_limit(dtype):
    assert wb.Scale(100.0).to(dtype)().item() <= 100.0


def test_without_a_limit():
    scale = wb.Scale(1e4, max=math.inf)
    scale().backward(torch.tensor(-1.0))
    assert scale.log_scale.grad.item() == pytest.approx(-1e4, rel=1e-5)


def test_state_is_one_entry_and_copies_are_apart():
    scale, other = wb.Scale(14.3), wb.Scale(1.0)
    other.load_state_dict(scale.state_dict())
    assert other().item() == scale().item()
    model = nn.ModuleDict({"scale": other})
    state = {"scale.log_scale": torch.tensor(math.log(7.0))}
    model.load_state_dict(state)
    assert other().item() == pytest.approx(7.0, rel=1e-6), "of shape (), as CLIP's is"
    assert other.log_scale.shape == (1,)
    assert state["scale.log_scale"].shape == (), "the caller's is not changed"
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({"log_scale": torch.zeros(2)})
    twin = copy.deepcopy(scale)
    with torch.no_grad():
        twin.log_scale.zero_()
    assert scale().item() == pytest.approx(14.3, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "init must be positive, got 0.0; it is a scale, such as 1 / 0.07, not its logarithm"),
        ((-1.0,), "init must be positive"),
        ((float("nan"),), "init must be"),
        (("14",), "init must be"),
        ((True,), "init must be"),
        ((200.0,), "init must be at most max, got init=200.0 and max=100.0"),
        ((1.0, 0.0), "max must be positive"),
        ((1.0, None), "max must be"),
        ((1.0, float("nan")), "max must be"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        wb.Scale(*arguments)


class Joint(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.image, self.text, self.scale = mlp(0), mlp(1), at(value, 20.0)

    def forward(self, x, y):
        return normalize(self.image(x), dim=1), normalize(self.text(y), dim=1), self.scale()


def clip(parts):
    return wb.functional.clip_loss(*parts)


def engines_body(engine, counts):
    """Below and at the limit, uncached and cached, the gradient under an engine is that of the whole batch."""
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    for value in (7.0, 20.0):
        dense = Joint(value)
        wb.reference.clip_loss(*dense(x, y)).backward()
        for cached in (False, True):
            plain = Joint(value)
            model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain)
            if cached:
                wb.GradCache([model], 2, clip)([x[rows], y[rows]])
            else:
                clip(model(x[rows], y[rows])).backward()
            for (name, p), q in zip(plain.named_parameters(), dense.parameters(), strict=True):
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                assert_same(grad, q.grad, relative=1e-10, absolute=1e-14, what=f"{name}, {value=}, {cached=}")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("counts", [(6,), (5, 2), (4, 0, 3)], ids=str)
def test_engines_take_its_parameter(engine, counts):
    run_ranks(engines_body, len(counts), engine, counts)

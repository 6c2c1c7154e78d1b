"""Every loss inside a training step: accumulation, checkpointing, autocast, torch.compile."""

import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import BIAS, CORE, LOSSES, dense, rows_of, whole_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch._base.autograd import no_autocast
from wholebatch.testing import run_ranks

GRADIENT = 1e-10
SCALE = 14.3


def leaves(name, counts=(6,)):
    """Return a function of the features, features that require a gradient, and the first one's dense gradient."""
    case = LOSSES[name]
    whole = whole_batch(case, counts)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = [z[at].clone().requires_grad_() for z, at in zip(whole, rows_of(case, counts, rank), strict=True)]
    expected = dense(case, whole, SCALE)
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (SCALE, BIAS))

    def loss(*features, **options):
        return case.call(wb.functional, *(features or local), scale, bias, **options)

    return loss, local, expected, scale


@pytest.mark.parametrize("name", CORE)
def test_accumulation_and_repeated_backward_passes_are_exact(name):
    loss, (x, *_), (_, dx, *_), _ = leaves(name)
    for _ in range(2):
        (loss() / 2).backward()
    assert_same(x.grad, dx, relative=GRADIENT, what="gradient accumulation")
    x.grad = None
    (loss() + 2 * loss(memory="flat")).backward()
    assert_same(x.grad, 3 * dx, relative=GRADIENT, what="twice in one graph")
    x.grad = None
    for memory in ("flat", 2**25):
        once = loss(memory=memory)
        once.backward(retain_graph=True)
        once.backward(retain_graph=True)
        (3 * once).backward()
        assert_same(x.grad, 5 * dx, relative=GRADIENT, what="the same graph three times")
        x.grad = None


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_exact(name, reentrant):
    loss, local, (_, dx, *_), scale = leaves(name)
    checkpoint(lambda *z: loss(*(2 * zz / 2 for zz in z)), *local, use_reentrant=reentrant).backward()
    assert_same(local[0].grad, dx, relative=GRADIENT)
    assert scale.grad is not None


def test_autocast_is_off_on_every_device_of_the_arguments():
    """The last tensor may be a scale on another device than the features."""

    @no_autocast
    def inside(*_tensors):
        return torch.is_autocast_enabled("cpu")

    features, scale = torch.ones(2, 2), torch.ones((), device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not inside(features, scale)
        assert not inside(scale, features)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", CORE)
def test_autocast_changes_nothing(name):
    def everything():
        loss, local, _, _ = leaves(name)
        halves = [z.detach().float().requires_grad_() for z in local]
        value = loss(*halves)
        return value, *torch.autograd.grad(value, halves)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = everything()
    assert all(torch.equal(a, b) for a, b in zip(inside, everything(), strict=True))


@pytest.mark.parametrize("name", CORE)
def test_the_gradient_cannot_be_differentiated_again(name):
    """It raises even beside another term with a gradient, which would hide the missing one."""
    loss, local, _, scale = leaves(name)
    for first in (local[0], local[1], scale):
        for second in (local[0], local[1], scale):
            (gradient,) = torch.autograd.grad(loss(), first, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiated once"):
                (gradient.sum() + second.sum()).backward()


@pytest.mark.parametrize("name", CORE)
def test_one_input_alone_may_require_a_gradient(name):
    case = LOSSES[name]
    whole = whole_batch(case, (5,))
    _, *expected = dense(case, whole, SCALE)
    inputs = [*whole, torch.tensor(SCALE, dtype=torch.float64), torch.tensor(BIAS, dtype=torch.float64)]
    for position, whole_gradient in enumerate(expected):
        some = [z.clone().requires_grad_(i == position) for i, z in enumerate(inputs)]
        for memory in ("flat", "auto"):
            (gradient,) = torch.autograd.grad(case.call(wb.functional, *some, memory=memory), some[position])
            assert_same(gradient, whole_gradient, relative=GRADIENT, absolute=1e-13, what=f"{name} {position}")


def test_without_gradients_siglip_computes_no_products():
    """Without gradients SigLIP makes no products, and nothing is kept."""
    x, y = whole_batch(LOSSES["siglip"], (5,))
    with torch.no_grad():
        loss = wb.functional.siglip_loss(x.requires_grad_(), y, SCALE, BIAS)
    assert not loss.requires_grad
    assert_same(loss, wb.reference.siglip_loss(x, y, SCALE, BIAS), relative=1e-12)


def compiled_steps_body():
    """Compile a whole training step: encoder, loss and optimizer."""
    # dynamo itself looks at .grad of a tensor that is no leaf, in a frame that a graph break has cut (torch 2.13)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")  # torch's own, in dynamo
    inputs = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, case in CORE.items():
        results = []
        for compiling in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
            scale = nn.Parameter(torch.tensor(5.0))
            optimizer = torch.optim.SGD([*encoder.parameters(), scale], lr=0.1)

            def step(encoder=encoder, scale=scale, case=case, optimizer=optimizer):
                features = [nn.functional.normalize(encoder(z), dim=1) for z in inputs]
                extra = [features[0].detach()[:2]] if len(case.inputs) > 2 else []
                loss = case.call(wb.functional, *features, *extra, scale, BIAS)
                loss.backward()
                for parameter in (*encoder.parameters(), scale):
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            run = torch.compile(step, backend="aot_eager") if compiling else step
            results.append([run() for _ in range(2)])
        for plain, compiled in zip(*results, strict=True):
            assert_same(compiled, plain, relative=1e-5, what=name)
        assert results[0][1] < results[0][0], "the step trains"


def test_compiled_training_steps_are_exact():
    run_ranks(compiled_steps_body, 2, timeout_s=240)

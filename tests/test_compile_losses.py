"""Losses inside compiled graphs: with fullgraph=True values and gradients are those of eager calls, bit for bit."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from compare import assert_same
from loss_cases import BIAS, EVERY, rows_of, whole_batch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch._base.autograd import autocast_around
from wholebatch.contract import entry, in_graph
from wholebatch.testing import run_ranks

ONE_EACH = {call.split(",")[0]: name for name, call in reversed([(name, name) for name in EVERY])}
NAMES = [*ONE_EACH.values(), "clip, ids, weights", "info_nce, hard negatives, margin, hardness, weights"]
NAMES.remove("global contrastive")  # its function returns a tuple; the module is below
NAMES.remove("cross-batch memory")  # a queue is filled between steps, not in a graph
COUNTS = {1: [(7,), (5,)], 2: [(4, 4), (5, 2)]}


def compiled(step, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(step, backend=backend, fullgraph=True, **options)


def results_of(step, arguments, leaves):
    """Return the value of a step and the gradients of its leaves."""
    for x in leaves:
        x.grad = None
    value = step(*arguments)
    value.backward()
    return [value.detach(), *(x.grad for x in leaves)]


def assert_equal(results, expected, what):
    for position, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert x.dtype == y.dtype, what
        assert torch.equal(x, y), f"{what}: {position}: {(x - y).abs().max():.3g}"


def functions_body(names):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        case = EVERY[name]

        def step(tensors, scale, bias, case=case):
            tensors = [1.5 * x if x.is_floating_point() else x for x in tensors]  # so that features are no leaves
            return 2.0 * case.call(wb.functional, *tensors, scale, bias)

        run = compiled(step)
        for counts in COUNTS[world]:  # a second call has other numbers of rows
            inputs = whole_batch(case, counts)
            mine = [x[rows] for x, rows in zip(inputs, rows_of(case, counts, rank), strict=True)]
            leaves = [mine[position].requires_grad_() for position in case.differentiable]
            scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (5.0, BIAS))
            leaves += [scale] * case.has_scale + [bias] * case.has_bias
            expected = results_of(step, [mine, scale, bias], leaves)
            assert_equal(results_of(run, [mine, scale, bias], leaves), expected, f"{name}, {counts}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("names", [NAMES[0::3], NAMES[1::3], NAMES[2::3]], ids=lambda names: names[0])
def test_functions_are_exact(world, names):
    run_ranks(functions_body, world, names, timeout_s=300)


class Model(nn.Module):
    """An encoder and losses with and without parameters and state of their own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.scale = nn.Linear(4, 6), wb.Scale(5.0)
        self.clip, self.siglip = (
            wb.CLIPLoss(),
            wb.SigLIPLoss(logit_scale=wb.Scale(3.0), logit_bias=nn.Parameter(torch.tensor(-2.0))),
        )
        self.contrastive = wb.GlobalContrastiveLoss(20)
        self.head = wb.PartialFC(6, 10, margin=wb.ArcFace(16.0, 0.3))
        self.head_with_state = wb.PartialFC(6, 10, margin=wb.AdaFace())
        self.pairs = wb.PairLoss(
            {
                "all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s + y.bias),
                "own": wb.terms.Partner(lambda s, x, y, p: p.scale * s + y.bias),
            },
            lambda r, x, p: r.all - r.own,
            parameters={"scale": wb.Scale(4.0)},
        )

    def forward(self, x, y, bias, labels):
        x, y = (nn.functional.normalize(self.encoder(z), dim=1) for z in (x, y))
        return torch.stack(
            [
                self.clip(x, y, self.scale(), ids=labels),
                self.siglip(x, y),
                self.contrastive(x, y, labels),
                self.head(x, labels),
                self.head_with_state(y, labels),
                self.pairs(x, y, y_data={"bias": bias}),
                wb.functional.nt_xent_loss(x, y, temperature=0.2, sync="sum"),
                wb.functional.clip_loss(x, y, 7.0, reduction="none").square().sum(),
            ]
        )


def modules_body(dtype):
    world = dist.get_world_size()
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    run = compiled(models[1], dynamic=None)
    weights = torch.linspace(0.5, 2.0, 8)
    torch.manual_seed(dist.get_rank())
    for rows in (4, 4, 5, 3):
        x, y, bias = torch.randn(rows, 4), torch.randn(rows, 4), torch.randn(rows)
        labels = torch.randperm(10)[:rows]
        results = []
        for model, step in zip(models, (models[0], run), strict=True):
            leaf = bias.clone().requires_grad_()
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                values = step(x, y, leaf, labels)
            total, *gradients = results_of(torch.dot, [values, weights], [*model.parameters(), leaf])
            results.append([values.detach(), total, *gradients[2:], *model.buffers(), *gradients[:2]])
        for actual, expected in zip(results[1][-2:], results[0][-2:], strict=True):
            # of the encoder, whose own derivative the compiler writes in another way
            assert_same(actual, expected, relative=1e-2 if dtype else 1e-5, what=f"{world}, {rows}")
        assert_equal(results[1][:-2], results[0][:-2], f"{world}, {rows}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_modules_are_exact(world, dtype):
    run_ranks(modules_body, world, dtype, timeout_s=300)


def features(rows=5, seed=0):
    """Return normalized features of images and texts, which are leaves."""
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.functional.normalize(torch.randn(rows, 4, generator=generator), dim=1).requires_grad_() for _ in range(2)
    ]


def clip_step(x, y, scale=5.0):
    return wb.functional.clip_loss(1.5 * x, 1.5 * y, scale)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, in inductor
def test_inductor_keeps_the_memory_of_a_loss():
    """The memory of features without gradient is free after the loss, and inductor writes other results into it."""

    def step(x, y):
        first = wb.functional.clip_loss(1.5 * x, (1.5 * y).detach(), 5.0)
        return first + wb.functional.clip_loss(x, (y + first).detach(), 5.0)

    x, y = features()
    expected = results_of(step, [x, y], [x])
    run = compiled(step, backend="inductor")
    for actual, reference in zip(results_of(run, [x, y], [x]), expected, strict=True):
        assert_same(actual, reference, relative=1e-6)


def test_numbers_may_differ_between_calls():
    run = compiled(clip_step)
    values = set()
    for scale in (5.0, 6.0, 7.0, 8.0):
        inputs = features(seed=int(scale))
        assert_equal(
            results_of(run, [*inputs, scale], inputs),
            results_of(clip_step, [*inputs, scale], inputs),
            scale,
        )
        values.add(run(*inputs, scale).item())
    assert len(values) == 4


def test_two_calls_before_their_backward_passes():
    """Each call has its own graph; the graph of the last call would give both the same gradient."""
    run, batches = compiled(clip_step), [features(seed=1), features(seed=2)]
    expected = [results_of(clip_step, batch, batch)[1:] for batch in batches]
    for x in (x for batch in batches for x in batch):
        x.grad = None
    (run(*batches[0]) + run(*batches[1])).backward()
    for batch, gradients in zip(batches, expected, strict=True):
        assert_equal([x.grad for x in batch], gradients, "gradients")


def test_a_second_backward_pass_and_a_second_derivative():
    run, batch = compiled(clip_step), features()
    loss = run(*batch)
    first = torch.autograd.grad(loss, batch, retain_graph=True)
    kept = [x.clone() for x in first]
    first[0].zero_()  # as an optimizer may
    assert_equal(torch.autograd.grad(loss, batch), kept, "the second pass")
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, batch)
    (gradient, _) = torch.autograd.grad(run(*batch), batch, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):  # the second on torch 2.11
        gradient.sum().backward()


def test_without_gradients_nothing_is_kept():
    run, batch = compiled(clip_step), features()
    with torch.no_grad():
        loss = run(*batch)
    assert not loss.requires_grad
    assert torch.equal(loss, clip_step(*batch).detach())
    assert len(in_graph._graphs) == 0


def test_a_graph_lives_as_long_as_its_loss():
    run, batch = compiled(clip_step), features()
    loss = run(*batch)
    (graph,) = in_graph._graphs.values()
    graph, leaf = weakref.ref(graph), weakref.ref(graph.leaves[0])
    del loss  # its backward pass never comes
    gc.collect()
    assert graph() is None
    assert leaf() is None
    losses = [run(*batch) for _ in range(3)]
    assert len(in_graph._graphs) == 3
    losses.pop().backward()
    assert len(in_graph._graphs) == 2


def test_modules_are_not_kept_alive():
    heads = [wb.PartialFC(4, 6)]
    compiled(lambda x: heads[0](x, torch.arange(5)))(features()[0]).backward()
    found = weakref.ref(heads.pop())
    torch._dynamo.reset()
    gc.collect()
    assert found() is None


def mistakes_body():
    rank = dist.get_rank()
    run = compiled(clip_step)
    x, y = features(seed=rank)
    run(x, y).backward()
    with torch.no_grad():
        y[0, 0] = torch.nan if rank == 1 else 0.0
    with pytest.raises(ValueError, match=r"rank 1.*text_features") as eager:
        clip_step(x, y)
    with pytest.raises(ValueError, match=r"rank 1.*text_features") as error:
        run(x, y)
    assert str(error.value) == str(eager.value)
    run(*features(seed=rank)).backward()  # the group is in order


def test_mistakes_raise_when_the_graph_runs_on_all_ranks():
    run_ranks(mistakes_body, 2, timeout_s=120)


def test_autocast_around_a_loss():
    seen = []

    @entry
    def probe(x: Tensor) -> Tensor:
        seen.append((autocast_around(x.device), torch.is_autocast_enabled("cpu")))
        return x.sum()

    def step(x):
        with torch.autocast("cpu", torch.float16):
            first = probe(x)
            with torch.autocast("cpu", enabled=False):
                return first + probe(x)

    for ambient in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with ambient:
            compiled(step)(features()[0]).backward()
    assert seen == [(torch.float16, False), (None, False)] * 2


def test_an_object_made_in_the_graph_is_not_taken_for_its_defaults():
    def step(x):
        return wb.functional.partial_fc_loss(x, torch.arange(5), x, margin=wb.CosFace(3.0, 0.1))

    x = features()[0]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(step)(x)
    torch._dynamo.reset()
    expected = results_of(step, [x], [x])
    assert_equal(results_of(torch.compile(step, backend="aot_eager"), [x], [x]), expected, "outside of the graph")


def test_sparse_gradients_stay_outside_of_the_graph():
    head, x = wb.PartialFC(4, 60, sample_rate=0.1), features()[0]
    step = lambda x: head(x, torch.arange(5))  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparse gradients"):
        compiled(step)(x)
    torch._dynamo.reset()
    torch.compile(step, backend="aot_eager")(x).backward()
    assert head.weight.grad.is_sparse
    head.eval()
    compiled(step)(x).backward()


def test_hooks_that_would_run_twice_raise():
    head, x = wb.PartialFC(4, 6), features()[0]
    head.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="hook"):
        compiled(lambda x: head(x, torch.arange(5)))(x)


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, seen):
        ctx.seen, ctx.name = seen, f"backward of {name}"
        seen.append(name)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.name)
        return grad.expand(5, 4), None, None


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_losses_run_in_the_order_of_the_program_even_if_unused(backend):
    """Each communicates, and the other ranks wait for it."""
    seen = []

    @entry
    def probe(x: Tensor, name: str) -> Tensor:
        return Seen.apply(x, name, seen)

    def step(x, y):
        probe(x.exp(), "unused")
        first = probe(1.5 * x, "first")
        return first + probe(x, "second") * probe((y + first).detach(), "third")

    compiled(step, backend)(*features()).backward()
    assert seen == ["unused", "first", "second", "third", "backward of second", "backward of first"]


def test_losses_of_rows():
    terms = {"all": wb.terms.LogSumExp(lambda s, x, y, p: s), "own": wb.terms.Partner(lambda s, x, y, p: s)}
    pairs = wb.PairLoss(terms, lambda r, x, p: r.all - r.own, reduction="none")
    for loss in (wb.CLIPLoss(logit_scale=1.0, reduction="none"), pairs):
        step = lambda x, y, loss=loss: loss(x, y).square().sum()  # noqa: E731
        batch = features()
        assert_equal(results_of(compiled(step), batch, batch), results_of(step, batch, batch), type(loss).__name__)
    head, x = wb.PartialFC(4, 6), features()[0]
    with pytest.raises(RuntimeError, match=r"must be torch.float64 of shape \(\).*got torch.float32"):
        compiled(lambda x: head(x.double(), torch.arange(5)))(x)

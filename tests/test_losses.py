"""Every loss x exchange x memory x ranks equals its float64 reference: value 1e-12, every gradient 1e-10.

In float64 both sides are exact to about 1e-15; the tolerances allow for the order of summation alone. If all pairs are
solved, dS_ii is a difference of numbers near 1 or 2: reference and sweep both have it to a few eps, hence the absolute
floor `noise`.
"""

import gc
import random
import weakref
from itertools import cycle, product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import QUICK, SCALES, SHARDS, SYNCS
from compare import assert_same
from loss_cases import BIAS, CORE, EVERY, dense, gradients, rows_of, whole_batch
from torch.nn import functional as F
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.nodes import route
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

VALUE, GRADIENT = 1e-12, 1e-10
TINY_TILES = 2 * 2 * 2 * 8  # two tiles of 2 x 2 in float64
KEEP_ALL = 2**25
MEMORIES = ["auto", "flat", TINY_TILES, KEEP_ALL]


def noise(scale, factor=1.0):
    """Return the rounding error of 1 - P_ii in a feature's gradient."""
    return 8 * torch.finfo(torch.float64).eps * scale * factor


def same_bits_everywhere(value):
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach())
    return all(torch.equal(value, values[0]) for value in values)


def assert_gradients(name, counts, actual, expected, scale, sync, what):
    """Raise unless the loss and the gradients of inputs and scalars are those of the contract for this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = EVERY[name]
    factor = size if sync == "mean" else 1
    scale = scale if case.has_scale else 100.0
    assert_same(actual[0], expected[0], relative=VALUE, absolute=VALUE, what=what)
    rows = rows_of(case, counts, rank)
    for place, position in enumerate(case.differentiable, start=1):
        got, whole = actual[place], factor * expected[place]
        if case.inputs[position].replicated:  # the engine reduces the ranks' gradients
            dist.all_reduce(got := got.clone())
        part = whole[rows[position]]
        size_of_all = whole.abs().max().item() if whole.numel() else 0.0
        near = GRADIENT * size_of_all + noise(scale, factor)
        assert_same(got, part, relative=0, absolute=near, what=f"{what}: input {position}")
    scalars = 1 + len(case.differentiable)
    for gradient, whole in zip(actual[scalars:], expected[scalars:], strict=True):
        total = gradient.clone()
        if sync != "mean":
            dist.all_reduce(total)
        absolute = noise(1) * (1 + expected[0].abs().item())
        assert_same(total.reshape(()), whole, relative=GRADIENT, absolute=absolute, what=f"{what}: scalar")


def exactness_body(counts):
    for name, case in (CORE if QUICK else EVERY).items():
        if sum(counts) >= case.at_least:
            exactness_of(name, counts)


def exactness_of(name, counts):
    """Compare for scales x memories, each with the next exchange and `sync` in turn, whose factor is applied last.

    The turns differ between splits of rows on equally many ranks, of which there are at least three: both exchanges run
    with each scale and memory. One process, and `make quick`, run all combinations on each split. A row that is an
    option of a core loss runs with one scale, and with one exchange and memory in turn.
    """
    case, split = EVERY[name], [*SHARDS, counts].index(counts)
    turn = split + [*EVERY].index(name)
    syncs = cycle(SYNCS[turn % 3 :] + SYNCS[: turn % 3])
    whole = whole_batch(case, counts)
    local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
    for position, scale in enumerate(SCALES if case.core else SCALES[1:2]):
        expected = dense(case, whole, scale)
        if len(counts) == 1 or QUICK:
            ways = [*product(USED_EXCHANGES, MEMORIES if case.core else MEMORIES[1:])]
        elif case.core:
            ways = [(USED_EXCHANGES[(turn + position + at) % 2], memory) for at, memory in enumerate(MEMORIES)]
        else:
            ways = [(USED_EXCHANGES[turn % 2], MEMORIES[1 + turn % 3])]
        for exchange, memory in ways:
            sync, memory = next(syncs), case.tile_bytes if memory == TINY_TILES else memory
            scalar = torch.full(() if sync else (1,), scale, dtype=torch.float64)
            options = {"exchange": exchange, "memory": memory, "sync": sync}
            actual = gradients(case, wb.functional, local, scalar, **options)
            assert same_bits_everywhere(actual[0])
            assert_gradients(name, counts, actual, expected, scale, sync, f"{name} {counts} {scale} {options}")


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_every_loss_equals_its_dense_reference(counts):
    run_ranks(exactness_body, len(counts), counts, timeout_s=300)


def fallback_body(counts):
    """Use logits for which one shift underflows in float64: maxima, and sums relative to them, by both exchanges."""
    for name in [*CORE, "clip, ids, weights", "sup_con", "matryoshka", "distillation", "info_nce, all directions, ids"]:
        case = EVERY[name]
        whole = whole_batch(case, counts)
        local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        expected = dense(case, whole, 1e4)
        for exchange in USED_EXCHANGES:
            for memory in ("flat", TINY_TILES, KEEP_ALL):
                options = {"exchange": exchange, "memory": memory}
                actual = gradients(case, wb.functional, local, torch.tensor(1e4, dtype=torch.float64), **options)
                assert_gradients(name, counts, actual, expected, 1e4, "mean", f"{name} {counts} {options}")


@pytest.mark.parametrize("counts", [(7,), (5, 2), (5, 0, 6), (4, 1, 2, 0)], ids=str)
def test_losses_are_exact_where_one_shift_underflows(counts):
    run_ranks(fallback_body, len(counts), counts, timeout_s=120)


def some_gradients_body(counts):
    """Any inputs may be constants on any ranks: every rank still enters every collective, in repeated passes, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(0)  # the same on all ranks
    for name, case in CORE.items():
        whole = whole_batch(case, counts)
        rows = rows_of(case, counts, rank)
        _, *expected = dense(case, whole, 14.3)
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (14.3, BIAS)]
        for exchange in USED_EXCHANGES:
            for trial in range(6):
                wants = [[draw.random() < 0.4 for _ in range(len(rows) + 2)] for _ in range(size)][rank]
                leaves = [z[at].clone() for z, at in zip(whole, rows, strict=True)] + [z.clone() for z in scalars]
                leaves = [z.requires_grad_(want) for z, want in zip(leaves, wants, strict=True)]
                options = {"exchange": exchange, "memory": [KEEP_ALL, "flat"][trial % 2]}
                loss = case.call(wb.functional, *leaves, **options)
                if not loss.requires_grad:
                    continue
                loss.backward(retain_graph=True)
                loss.backward()
                for position, (leaf, true) in enumerate(zip(leaves, expected, strict=False)):
                    assert (leaf.grad is not None) == leaf.requires_grad
                    if leaf.requires_grad:
                        mine = 2 * size * true[rows[position]] if position < len(rows) else 2 * true
                        near = GRADIENT * 2 * size * (true.abs().max().item() if true.numel() else 0) + 1e-13
                        assert_same(leaf.grad, mine, relative=0, absolute=near, what=f"{name} {options} {wants}")


@pytest.mark.parametrize("counts", [(4,), (3, 2), (3, 0, 2)], ids=str)
def test_any_inputs_may_be_constant_on_any_ranks(counts):
    run_ranks(some_gradients_body, len(counts), counts, timeout_s=60)


def constants_body(counts):
    """Without an input that needs a gradient, on any rank, a loss keeps no graph."""
    for name, case in EVERY.items():
        whole = whole_batch(case, counts)
        leaves = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (14.3, BIAS)]
        assert not case.call(wb.functional, *leaves, *scalars).requires_grad, name


@pytest.mark.parametrize("counts", [(4,), (3, 2)], ids=str)
def test_a_loss_of_constants_has_no_graph(counts):
    run_ranks(constants_body, len(counts), counts, timeout_s=60)


def inference_body():
    """Tensors of inference mode cannot join a backward pass: all ranks raise if one needs it."""
    rank = dist.get_rank()
    with torch.inference_mode(rank == 1):
        x, y = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"tensors of rank 1 were made under torch\.inference_mode"):
        wb.functional.clip_loss(x.requires_grad_(rank == 0) if rank == 0 else x, y, 10.0)
    assert wb.functional.clip_loss(x.detach(), y, 10.0).isfinite()


def test_inference_mode_on_one_rank_raises_on_all():
    run_ranks(inference_body, 2, timeout_s=30)


def planted_body(counts):
    """The comparator rejects plausible wrong answers: a factor of 1/W or W, and local rows only."""
    size = dist.get_world_size()
    for name, case in EVERY.items():
        if case.inputs[-1].replicated:
            continue  # its other operand is on every rank
        whole = whole_batch(case, counts)
        expected = dense(case, whole, 14.3)
        local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        scale = torch.tensor(14.3, dtype=torch.float64)
        right = gradients(case, wb.functional, local, scale)
        assert_gradients(name, counts, right, expected, 14.3, "mean", "right")
        for factor in (1 / size, size):
            wrong = [right[0], *(factor * g for g in right[1:])]
            with pytest.raises(AssertionError, match=r"planted: .*largest error"):
                assert_gradients(name, counts, wrong, expected, 14.3, "mean", "planted")
        own_rows_only = gradients(case, wb.functional, local, scale, group=wb.comm.LocalCommunicator())
        with pytest.raises(AssertionError, match="largest error"):
            assert_gradients(name, counts, own_rows_only, expected, 14.3, "mean", "planted")
        with pytest.raises(AssertionError, match="planted: input"):
            assert_gradients(name, counts, [right[0], *own_rows_only[1:]], expected, 14.3, "mean", "planted")


@pytest.mark.planted
def test_plausible_wrong_answers_are_rejected():
    run_ranks(planted_body, 2, (4, 3))


def many_tiles_body(counts):
    """1000 rows: shards end inside a tile, positives cross tiles, and the budget keeps some tiles."""
    side, scale = 200, torch.tensor(30.0, dtype=torch.float64)
    for name in ("clip", "info_nce, few negatives", "nt_xent", "siglip"):
        case = EVERY[name]
        whole = whole_batch(case, counts, d=8)
        local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        expected = dense(case, whole, 30.0)
        for exchange in USED_EXCHANGES:
            for memory in ("flat", 2 * side * side * 8 + 7 * side * side * 8):
                with patch.object(route, "default_side", lambda _device: side):
                    actual = gradients(case, wb.functional, local, scale, exchange=exchange, memory=memory, sync="sum")
                assert_gradients(name, counts, actual, expected, 30.0, "sum", f"{name} {counts} {exchange} {memory}")


@pytest.mark.parametrize("counts", [(1000,), (610, 390), (1, 950, 49)], ids=str)
def test_many_tiles_are_exact(counts):
    run_ranks(many_tiles_body, len(counts), counts, timeout_s=120)


def surplus_keys_body():
    """If keys outnumber queries, rows from b_r on are negatives, like rows that are passed as negatives."""
    counts, rank = (3, 2), dist.get_rank()
    case = EVERY["info_nce, few negatives"]
    whole = whole_batch(case, counts)
    queries, keys, negatives = (z[at] for z, at in zip(whole, rows_of(case, counts, rank), strict=True))
    expected = wb.reference.info_nce_loss(whole[0], whole[1], logit_scale=14.3, negatives=whole[2])
    together = torch.cat([keys, negatives])
    assert_same(wb.functional.info_nce_loss(queries, together, logit_scale=14.3), expected, relative=VALUE)


def test_keys_may_outnumber_queries():
    run_ranks(surplus_keys_body, 2)


def scalar_of(case, functions, inputs, scalars, reduction, weighs, **options):
    """Return the results of `gradients` for a summed loss, or for weighted losses of rows."""
    leaves = [z.clone() for z in (*inputs, *scalars)]
    chosen = [leaves[i] for i in case.differentiable] + [leaves[-2]] * case.has_scale + [leaves[-1]] * case.has_bias
    for leaf in chosen:
        leaf.requires_grad_()
    loss = case.call(functions, *leaves, reduction=reduction, **options)
    if reduction == "none":
        loss = (loss * weighs).sum()
    return [loss.detach(), *torch.autograd.grad(loss, chosen)]


def reduction_body(counts):
    """Test reduction="sum", and "none": each rank makes a scalar of its rows' losses; their sum has the gradient."""
    rank, weighs = dist.get_rank(), torch.arange(1.0, 1 + sum(counts), dtype=torch.float64)
    for name, case in EVERY.items():
        if "reduction" not in case.choices or sum(counts) < case.at_least:
            continue
        whole = whole_batch(case, counts)
        rows = rows_of(case, counts, rank)
        local = [z[at] for z, at in zip(whole, rows, strict=True)]
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (14.3, BIAS)]
        for reduction, sync in (("sum", "mean"), ("none", "mean"), ("none", "sum")):
            expected = scalar_of(case, wb.reference, whole, scalars, reduction, weighs)
            here = weighs[Partition(counts).rows(rank)]
            actual = scalar_of(case, wb.functional, local, scalars, reduction, here, sync=sync)
            if reduction == "none":
                dist.all_reduce(actual[0])
            assert_gradients(
                name, counts, actual, expected, 14.3, sync if reduction == "sum" else None, f"{name} {reduction}"
            )


@pytest.mark.parametrize("counts", [(5,), (4, 3), (5, 0, 6)], ids=str)
def test_sums_and_losses_of_rows_have_the_dense_gradient(counts):
    run_ranks(reduction_body, len(counts), counts, timeout_s=120)


def learned_temperature_body():
    """A learned temperature of the loss module has the right gradient under a sum of shares and under the mean."""
    counts = (3, 2)
    case = EVERY["nt_xent"]
    z0, z1 = whole_batch(case, counts)
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    wb.reference.nt_xent_loss(z0, z1, temperature=temperature).backward()
    rows = Partition(counts).rows(dist.get_rank())
    loss = wb.NTXentLoss(temperature=torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64)))
    assert len(list(loss.parameters())) == 1
    loss(z0[rows], z1[rows]).backward()
    assert_same(loss.temperature.grad, temperature.grad, relative=GRADIENT)


def test_a_learned_temperature_has_the_right_gradient():
    run_ranks(learned_temperature_body, 2)


# Inputs for which one shift underflows, and inputs for which it does not. All in float64 and float32.
def antipodal(rows, d, generator):
    """Return two narrow cones on opposite sides: every similarity is near -1."""
    axis = torch.zeros(d, dtype=torch.float64)
    axis[0] = 1.0
    spread = 0.2 * torch.randn(2, rows, d, dtype=torch.float64, generator=generator) / d**0.5
    return normalize(spread[0] + axis, dim=-1), normalize(spread[1] - axis, dim=-1)


def features(kind, rows=96, d=16):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, d, dtype=torch.float64, generator=generator)
    y = x + 1.5 * torch.randn(rows, d, dtype=torch.float64, generator=generator)
    if kind == "unit":
        return normalize(x, dim=-1), normalize(y, dim=-1)
    if kind == "unnormalized":
        return x, y
    if kind == "duplicated":
        return tuple(normalize(z[: rows // 4], dim=-1).repeat(4, 1) for z in (x, y))
    if kind == "solved":
        return normalize(x, dim=-1), normalize(x + 0.05 * y, dim=-1)
    return antipodal(rows, d, generator)


KINDS = ["unit", "unnormalized", "duplicated", "solved", "antipodal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name, case in CORE.items() if len(case.inputs) == 2])
def test_extreme_logits_are_exact(name, kind):
    case = EVERY[name]
    whole = list(features(kind, rows=36))
    for scale in (1.0, 14.3, 100.0, 1e4):
        expected = dense(case, whole, scale)
        for memory in ("flat", TINY_TILES, KEEP_ALL):
            actual = gradients(case, wb.functional, whole, torch.tensor(scale, dtype=torch.float64), memory=memory)
            assert_same(actual[0], expected[0], relative=VALUE, absolute=VALUE * scale)
            for got, true in zip(actual[1:], expected[1:], strict=True):
                assert_same(got, true, relative=GRADIENT, absolute=noise(scale), what=f"{name} {kind} {scale} {memory}")


def distance(actual, expected):
    """Return |actual - expected| / |expected| in the Euclidean norm."""
    difference, size = (actual.double() - expected).norm().item(), expected.norm().item()
    return difference / size if size else difference


def canceled(name, whole, scale, gradient):
    """Return the ratio of NT-Xent's gradient before and after normalizing removes its part along the row, in float64.

    Rounding errors are relative to the gradient before. If pairs are nearly solved, the ratio is 12.
    """
    if name != "nt_xent":
        return 1.0
    units = [normalize(z.double(), dim=1).requires_grad_() for z in whole]
    z, rows = torch.cat(units), len(units[0])
    logits = (scale * z @ z.T).masked_fill(torch.eye(2 * rows, dtype=torch.bool), float("-inf"))
    F.cross_entropy(logits, torch.arange(2 * rows).roll(rows)).backward()
    return ((units[0].grad / whole[0].double().norm(dim=1, keepdim=True)).norm() / gradient.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name, case in CORE.items() if len(case.inputs) == 2])
def test_float32(name, kind):
    """Errors are at most 3e-6 against float64, or 1.5 times plain float32 PyTorch's for ill-conditioned problems.

    Or 5 eps times the terms that cancel in NT-Xent: 2.4 and 3 have been observed, since the order of summation depends
    on the machine. A scalar's gradient is an inner product, <X, dL/dX> / scale; its error is relative to the size of
    the factors.
    """
    case = EVERY[name]
    whole = [z.float() for z in features(kind, rows=512, d=64)]
    for scale in (1.0, 16.0, 100.0):
        expected = dense(case, whole, scale)
        plain = gradients(case, wb.reference, whole, torch.tensor(scale))
        ours = gradients(case, wb.functional, whole, torch.tensor(scale), memory="flat")
        factors = (whole[0].norm() * expected[1].norm() / scale).item()
        rounding = 5 * torch.finfo(torch.float32).eps * canceled(name, whole, scale, expected[1])
        if expected[0] < 1e-6:  # all pairs solved: nothing to learn, and nothing to measure against but rounding
            assert all(got.abs().max() <= 1e-7 * scale for got in ours)
            continue
        for position, (got, other, true) in enumerate(zip(ours, plain, expected, strict=True)):
            is_scalar_gradient = position > 0 and got.dim() == 0
            size = max(true.norm().item(), factors) if is_scalar_gradient else true.norm().item()
            error, plain_error = ((z.double() - true).norm().item() / size for z in (got, other))
            assert error <= max(3e-6, rounding, 1.5 * plain_error), (name, kind, scale, position, error, plain_error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CORE.items() if len(case.inputs) == 2])
def test_half_precision_is_no_worse_than_plain_pytorch(name, dtype):
    case = EVERY[name]
    whole = [z.to(dtype) for z in features("unit", rows=300, d=32)]
    for scale in (1.0, 16.0, 100.0):  # exact in every dtype
        expected = dense(case, whole, scale)
        plain = gradients(case, wb.reference, whole, torch.tensor(scale, dtype=dtype))
        ours = gradients(case, wb.functional, whole, torch.tensor(scale, dtype=dtype))
        assert ours[0].dtype == torch.float32
        assert ours[1].dtype == dtype
        for got, other, true in zip(ours, plain, expected, strict=True):
            assert distance(got, true) <= distance(other, true) + torch.finfo(dtype).eps, (name, scale)


@pytest.mark.parametrize("name", ["clip", "info_nce", "nt_xent"])
def test_a_budget_in_half_precision_costs_one_rounding(name):
    """The error of a kept weight is at most 2^-8, and so is the gradient's. The loss has the bits of the flat one."""
    case = EVERY[name]
    whole = [z.float() for z in features("unit", rows=1800, d=64)]
    scale = torch.tensor(16.0)
    expected = dense(case, whole, 16.0)
    flat = gradients(case, wb.functional, whole, scale, memory="flat")
    kept = gradients(case, wb.functional, whole, scale, memory=2**23 + 2 * 1800 * 1800)
    assert torch.equal(flat[0], kept[0])
    for got, exact, true in zip(kept[1:], flat[1:], expected[1:], strict=True):
        assert distance(got, true) <= 2**-8
        assert distance(exact, true) <= 3e-6
        assert distance(got, true) > 2 * distance(exact, true), "nothing was kept"


def test_a_full_budget_in_float32_changes_no_bit():
    """With 4 or more bytes per entry float32 is kept unrounded, and the gradient has the bits of the flat one."""
    case = EVERY["clip"]
    whole = [z.float() for z in features("unit", rows=900, d=32)]
    flat, kept = (
        gradients(case, wb.functional, whole, torch.tensor(16.0), memory=memory) for memory in ("flat", 2**26)
    )
    assert all(torch.equal(a, b) for a, b in zip(flat, kept, strict=True))


def same_bits_body(exchange):
    results = []
    for case in CORE.values():
        counts = (350, 0, 300)
        whole = [z.float() for z in whole_batch(case, counts)]
        local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        results += gradients(case, wb.functional, local, torch.tensor(14.3), exchange=exchange)
    return results


@pytest.mark.parametrize("exchange", USED_EXCHANGES)
def test_the_same_bits_on_every_run(exchange):
    for once, again in zip(*(run_ranks(same_bits_body, 3, exchange) for _ in range(2)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_reciprocals_of_sums_are_not_denormal():
    """On hardware that flushes denormals: equal rows, a loss that is minimal, sums near the largest float."""
    try:
        assert torch.set_flush_denormal(True)
        x = normalize(torch.ones(64, 8), dim=-1)
        for scale in (40.0, 70.0, 75.0, 80.0, 85.2, 100.0, 150.0):
            (gradient,) = torch.autograd.grad(wb.functional.clip_loss(x.requires_grad_(), x.detach(), scale), x)
            assert gradient.abs().max() < 1e-5, scale
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CORE.items() if len(case.inputs) == 2])
def test_a_loss_that_is_dropped_frees_its_features(name, dtype):
    """Reference counts alone free them; a cycle would hold them until the garbage collector runs."""
    x, y = (z.to(dtype).requires_grad_() for z in features("unit", rows=8))
    gc.collect()
    gc.disable()
    try:
        hidden = x * 1
        loss = EVERY[name].call(wb.functional, hidden, y, torch.tensor(10.0), BIAS)
        freed = weakref.ref(hidden)
        del hidden, loss
        assert freed() is None
    finally:
        gc.enable()


def test_hardness_far_beyond_the_scale_is_exact():
    """A pair's exponential in the loss has the scale, and does not bound a sum of exponentials with more hardness."""
    generator = torch.Generator().manual_seed(0)
    common = normalize(torch.randn(1, 64, generator=generator, dtype=torch.float64), dim=1)
    x = normalize(common + 0.15 * torch.randn(16, 64, generator=generator, dtype=torch.float64), dim=1)
    y = normalize(x + 0.05 * torch.randn(16, 64, generator=generator, dtype=torch.float64), dim=1)
    for scale, hardness in ((20.0, 300.0), (100.0, 400.0)):
        options = {"logit_scale": scale, "hardness": hardness}
        expected = wb.reference.info_nce_loss(x, y, **options)
        found = wb.functional.info_nce_loss(x.float(), y.float(), **options)
        assert expected > 0
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)

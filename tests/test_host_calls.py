"""The work of the host: bounds for a call, and no growth with the number of ranks; counted, not timed."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from counting import counted
from torch.nn.functional import normalize
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholebatch as wb
from wholebatch.comm import records
from wholebatch.kernels import launch
from wholebatch.losses import clip
from wholebatch.testing import run_ranks


@pytest.fixture
def entry_calls(monkeypatch):
    """Return a function of W: the numbers of Python's calls, and of parsed texts, at the entry of CLIP on W ranks."""
    calls = parsed = 0
    agree, with_slots = clip.agree, records.with_slots

    def count(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"

    def counting(*args):
        sys.setprofile(count)
        try:
            return agree(*args)
        finally:
            sys.setprofile(None)

    def counting_texts(text):
        nonlocal parsed
        parsed += 1
        return with_slots(text)

    def on(size):
        nonlocal calls, parsed
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            x, scale = torch.eye(3).requires_grad_(), torch.tensor(2.0, requires_grad=True)
            wb.functional.clip_loss(x, x, scale)
            calls = parsed = 0
            wb.functional.clip_loss(x, x, scale)
        finally:
            dist.destroy_process_group()
        return calls, parsed

    monkeypatch.setattr(clip, "agree", counting)
    monkeypatch.setattr("wholebatch.comm.records.with_slots", counting_texts)
    return on


def test_python_makes_as_many_calls_on_2_ranks_as_on_512(entry_calls):
    (few, no_texts), (many, still_none) = entry_calls(2), entry_calls(512)
    assert few > 100, "the calls are counted"
    assert many < 1.1 * few + 50
    assert no_texts == still_none == 0


@pytest.mark.planted
def test_a_loop_over_ranks_would_be_seen(entry_calls, monkeypatch):
    agree = import_module("wholebatch.contract.agree")  # the package has a function of this name
    (good, _), accepted = entry_calls(512), agree._values_of_all

    def reading_all(columns, *of_call):
        assert all([isinstance(number, float) for number in column] for column in columns.values())
        return accepted({name: [(lambda x: x)(x) for x in column] for name, column in columns.items()}, *of_call)

    monkeypatch.setattr(agree, "_values_of_all", reading_all)
    assert entry_calls(512)[0] > 2 * good


def step(name, memory="auto", kernel="triton", dtype=torch.bfloat16, rows=256):
    """Return a function that computes a loss, forward and backward; its first call was made."""
    torch.manual_seed(0)
    x, y = (normalize(torch.randn(rows, 64), dim=1).to(dtype).requires_grad_() for _ in range(2))
    scale, bias, temperature = (torch.tensor(number, requires_grad=True) for number in (10.0, -5.0, 0.1))
    loss = {
        "clip": lambda f, more: f.clip_loss(x, y, scale, **more),
        "info_nce": lambda f, more: f.info_nce_loss(x, y, logit_scale=scale, **more),
        "nt_xent": lambda f, more: f.nt_xent_loss(x, y, temperature=temperature, **more),
        "siglip": lambda f, more: f.siglip_loss(x, y, scale, bias, **more),
    }[name]

    def call():
        for leaf in (x, y, scale, bias, temperature):
            leaf.grad = None
        loss(wb.functional, {"kernel": kernel, "memory": memory}).backward()

    call()  # what later calls of the form look up
    return call


IN_KERNELS = {  # at most so many operations that compute something, and calls of Python's
    "clip": (18, 700),
    "info_nce": (18, 700),
    "nt_xent": (30, 700),
    "siglip": (30, 600),
}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")


@interpreted
@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_step_in_kernels_is_little_work_for_the_host(name):
    found = counted(step(name, rows=128))
    assert all(0.5 * most < of <= most for of, most in zip(found, IN_KERNELS[name], strict=True)), found


@interpreted
@pytest.mark.parametrize("name", ["clip", "info_nce", "siglip"])
def test_a_further_tile_is_one_launch_and_two_products(name, monkeypatch):
    """One of the same rows, or of further rows."""
    run, started = launch.run, []
    monkeypatch.setattr(launch, "run", lambda kernel, *of, **more: (started.append(kernel), run(kernel, *of, **more)))
    found = []
    for memory in ("auto", 14_000, 8_500):  # 1 tile, 2 of all rows, and 4 of half the rows
        call = step(name, memory, rows=96)
        started.clear()
        operations, _ = counted(call)
        found.append((operations, sum("sums" not in kernel.fn.__name__ for kernel in started) // 2))
    (operations, launches), *others = found
    assert [(of - operations, n - launches) for of, n in others] == [(2, 1), (6, 3)]


@pytest.fixture
def launched(monkeypatch):
    """Return the names of the kernels that were started."""
    run, names = launch.run, []
    monkeypatch.setattr(
        launch, "run", lambda kernel, *of, **more: (names.append(kernel.fn.__name__), run(kernel, *of, **more))
    )
    return names


def operations_and_launches(call, launched):
    """Return how often a call has the device compute something, and the kernels that it starts among these."""
    launched.clear()
    operations, _ = counted(call)
    started = launched[: len(launched) // 2]  # `counted` makes the call twice
    return operations + len(started), started


def late_interaction(rows, memory):
    torch.manual_seed(0)
    q, d = (normalize(torch.randn(rows, n, 64), dim=-1).bfloat16().requires_grad_() for n in (4, 9))
    scale = torch.tensor(5.0, requires_grad=True)

    def call():
        q.grad = d.grad = scale.grad = None
        wb.functional.max_sim_loss(q, d, logit_scale=scale, kernel="triton", memory=memory).backward()

    call()  # what later calls of the form look up
    return call


@interpreted
@pytest.mark.parametrize(("memory", "maxima", "most"), [("auto", 1, 39), ("flat", 2, 133)])
def test_late_interaction_starts_one_kernel_for_each_result(launched, memory, maxima, most):
    """Nothing is sorted or added up at places, and more queries and documents take no more operations.

    Of the operations on tiles, 36 look at values, on a CPU alone. One matrix needs none of these.
    """
    (few, started), (many, _) = (operations_and_launches(late_interaction(rows, memory), launched) for rows in (5, 12))
    assert sorted(started) == sorted(
        ["row_numbers", "query_gradient", "document_gradient", *["token_maxima"] * maxima, *["token_sums"] * maxima]
    )
    assert many == few
    assert most // 2 < few <= most


def classes(memory):
    torch.manual_seed(0)
    x, centers = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (64, 256))
    labels = torch.randint(0, 256, (64,))

    def call():
        x.grad = centers.grad = None
        wb.functional.partial_fc_loss(x, labels, centers, kernel="triton", memory=memory).backward()

    call()
    return call


@interpreted
def test_a_further_tile_of_classes_is_at_most_three_operations(launched):
    """Its kernel and two products, or the sums of its rows; no pass over the tile, and no copy of features."""
    found = [operations_and_launches(classes(memory), launched) for memory in ("auto", 20_000, 8_000)]
    tiles = [sum(name.startswith("tile_") for name in started) for _, started in found]
    assert 40 < found[0][0] <= 55
    assert tiles[0] == 2 < tiles[1] < tiles[2]
    for (many, _), n in zip(found[1:], tiles[1:], strict=True):
        assert many - found[0][0] <= 3 * (n - tiles[0])


@interpreted
@pytest.mark.parametrize("memory", ["auto", 14_000, 8_500])
def test_a_step_of_two_views_is_at_most_three_operations_for_a_tile_and_forty(launched, memory):
    found, started = operations_and_launches(step("nt_xent", memory, rows=96), launched)
    tiles = sum(name.startswith("tile_") for name in started)
    assert tiles >= (2 if memory == "auto" else 12)
    assert found <= 3 * tiles + 40


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 600), (torch.bfloat16, 900)])
def test_python_makes_few_calls_in_a_step_on_a_cpu(dtype, most):
    _, calls = counted(step("clip", kernel="torch", dtype=dtype))
    assert 0.3 * most < calls <= most


def test_a_small_batch_is_little_work():
    """S is one tile, kept in float32."""
    operations, calls = counted(step("clip", kernel="torch", dtype=torch.float32, rows=32))
    assert 30 < operations <= 54
    assert 300 < calls <= 500


@pytest.mark.parametrize(
    ("kernel", "rows", "most"),
    [("torch", 32, 86), pytest.param("triton", 256, 76, marks=interpreted)],
)
def test_a_declared_loss_is_looked_up_like_a_built_in_one(kernel, rows, most):
    """CLIP in two terms: the node of the built-in loss, and at most twice its calls. What ranks agreed on is kept."""
    dtype = torch.float32 if kernel == "torch" else torch.bfloat16
    x, y = (normalize(torch.randn(rows, 64), dim=1).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)
    terms = {
        "all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s),
        "own": wb.terms.Partner(lambda s, x, y, p: p.scale * s),
    }
    cross_entropy = lambda r, side, p: r.all - r.own  # noqa: E731  # as a declaration has it
    loss = wb.PairLoss(terms, cross_entropy, column_loss=cross_entropy, kernel=kernel)

    def call():
        x.grad = y.grad = scale.grad = None
        loss(x, y, parameters={"scale": scale}).backward()

    call()  # what later calls of the form look up
    operations, calls = counted(call)
    of_built_in = counted(step("clip", kernel=kernel, dtype=dtype, rows=rows))[1]
    assert 0.7 * most < operations <= most
    assert of_built_in < calls <= 2 * of_built_in


def ranks_body(kernel, dtype):
    return counted(step("clip", kernel=kernel, dtype=getattr(torch, dtype)))[1]


@interpreted
@pytest.mark.parametrize(("kernel", "dtype", "most"), [("torch", "float32", 1500), ("triton", "bfloat16", 1600)])
def test_python_makes_few_calls_in_a_step_of_two_ranks(kernel, dtype, most):
    for calls in run_ranks(ranks_body, 2, kernel, dtype, timeout_s=120):
        assert 0.5 * most < calls <= most


def test_work_of_the_host_is_counted():
    def work():
        sorted(torch.zeros(2).add_(1).view(2, 1).exp().tolist(), key=lambda x: x)

    # zeros, add_, exp; of Python: work, sorted, two calls of its key, five functions of tensors, and the count's end
    assert counted(work) == (3, 10)

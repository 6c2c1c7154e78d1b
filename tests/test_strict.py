"""Communicators, losses, heads and gradient caching on a transport with NCCL's manners; see `strict_transport`.

`make strict` runs every case on 1, 2 and 3 ranks; otherwise a part of them runs.
"""

import os

import pytest
import test_gradcache_engines as engines
import test_gradcache_functional as caching
import test_max_sim as late
import test_partial_fc as heads
import test_partial_fc_training as training
import test_whole_batch as whole_batches
import torch
import torch.distributed as dist
from comm_cases import CASES, run_case
from loss_cases import CORE, LOSSES, dense, gradients, rows_of, whole_batch
from partial_fc_data import SPLITS, adamw, sgd
from strict_transport import strict
from test_losses import assert_gradients

import wholebatch as wb
from wholebatch.exchange import EXCHANGES
from wholebatch.testing import run_ranks

ALL = os.environ.get("WHOLEBATCH_TEST_STRICT") == "all"

NOT_ON_NCCL = {
    "messages_of_another_size": "both ends raise, but the message is on its way: NCCL has nothing that takes it back",
    "messages_with_a_mistake_at_one_end": "the same",
    "a_tag_wears_out": "there are no tags",
    "losses_differentiated_in_another_order": "ranks compare on the device, and learn of it in their next call",
    "parts_give_back_what_they_hold": "counts descriptors, of which the store that compares the calls takes some",
    "what_moves_in_the_backward_pass": "counts handshakes that read the host, which a device does without",
}
STRICT_CASES = [name for name in CASES if name not in NOT_ON_NCCL]
SOME_CASES = (
    "dot_test_in_parts", "planted_mistakes_are_rejected", "double_backward", "dropped_handles", "graphs_are_freed",
    "losses_of_this_library", "mistakes_on_all_ranks", "chain_of_messages", "messages_without_gradient",
    "waits_in_another_order_than_starts", "graphs_that_branch", "mistakes_in_backward", "values",
)  # fmt: skip


def strictly(body, *args):
    """Run a function of a rank on a transport with NCCL's manners, once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        return body(*args)


if ALL:

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("name", STRICT_CASES)
    def test_communicators(name, size):
        run_ranks(strictly, size, case_body, name, timeout_s=60)


def case_body(name):
    run_case(name, wb.comm.TorchCommunicator())


def some_cases_body():
    for name in SOME_CASES:
        case_body(name)


@pytest.mark.parametrize("size", [2, 3])
def test_some_cases_of_communicators(size):
    run_ranks(strictly, size, some_cases_body, timeout_s=40)


def test_what_is_not_on_nccl_is_a_case():
    assert {*NOT_ON_NCCL, *SOME_CASES} <= {*CASES}


def losses_body(counts, names, chunks):
    for name in names:
        case = LOSSES[name]
        if sum(counts) < case.at_least:
            continue
        whole = whole_batch(case, counts)
        local = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
        expected = dense(case, whole, 10.0)
        for chunk in chunks:  # the default of a GPU, for few rows one transfer; and a transfer for each rank
            for exchange in EXCHANGES if "exchange" in case.choices else EXCHANGES[:1]:
                options = {"exchange": exchange, "sync": "sum"}
                scale = torch.tensor(10.0, dtype=torch.float64)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("wholebatch.nodes.route.columns_of_a_chunk", lambda *_, chunk=chunk: chunk)
                    actual = gradients(case, wb.functional, local, scale, **options)
                what = f"{name} {counts} {options} chunk {chunk}"
                assert_gradients(name, counts, actual, expected, 10.0, "sum", what)


SHARDS = [(5,), (4, 4), (5, 2), (0, 6), (3, 3, 3), (5, 0, 6), (1, 4, 2)]


@pytest.mark.parametrize("counts", SHARDS if ALL else [(5, 2), (3, 3, 3)], ids=str)
def test_losses(counts):
    names, chunks = ([*LOSSES], (10**6, 1)) if ALL else ([*CORE], (1,))
    run_ranks(strictly, len(counts), losses_body, counts, names, chunks, timeout_s=300 if ALL else 30)


@pytest.mark.parametrize("counts", [(6,), (4, 2), (0, 4, 2)] if ALL else [(0, 4, 2)], ids=str)
def test_late_interaction(counts):
    forms = [late.FORMS[name] for name in (late.FORMS if ALL else ["both directions"])]
    jobs = [(seed, (5, 9), form, options) for seed, form in enumerate(forms) for options in late.OPTIONS]
    found = run_ranks(strictly, len(counts), late.of_rank, jobs, counts, timeout_s=120 if ALL else 30)
    for at, (seed, longest, form, options) in enumerate(jobs):
        whole = late.batch(seed, sum(counts), longest=longest, **late.of_form(form))
        of_ranks = [of[at] for of in found]
        value, gradient = late.distance(of_ranks, whole, counts, form, options.get("sync", "mean"))
        assert value < 1e-12 * 50, (form, options, value)
        assert gradient < 1e-10, (form, options, gradient)


def of_heads():
    for rows, classes in SPLITS[:3] if ALL else SPLITS[1:2]:
        world = len(rows)
        yield "exact", world, heads.exact_body, (rows, classes)
        if ALL:
            yield "several labels", world, heads.several_body, (rows, classes)
            yield "forms", world, heads.forms_body, (rows, classes)
            for rate in (1.0, 0.3):
                yield f"sampled, {rate}", world, training.sampled_body, (rows, rate)
                yield f"cached, {rate}", world, heads.cached_body, (rows, rate)
            yield "clipped", world, training.clipped_body, ()
            yield "trained, adamw", world, training.trained_body, (rows, 0.3, adamw, False)
        yield "trained", world, training.trained_body, (rows, 0.3, sgd, True)
    for rows in ((5,), (4, 3), (4, 0, 3)) if ALL else ():
        yield "top classes", len(rows), heads.top_body, (rows, heads.CLASSES)
    yield "mistakes in clipping", 2, training.wrong_clips_body, ()


def of_caching():
    counts = [(7,), (7, 2), (5, 0, 4)]
    for rows in counts if ALL else ():
        yield "one synchronization", len(rows), engines.ddp_body, (rows, (2,), 1)
        yield "functional", len(rows), caching.functional_body, (rows, 2)
        yield "gathered", len(rows), caching.gathered_body, (rows,)
        yield "parameters in the loss", len(rows), whole_batches.body, (rows,)
    for rows in counts if ALL else [(7, 2)]:
        yield "training", len(rows), engines.training_body, (rows, (2,), 0.5, "ddp")
    if ALL:
        yield "accumulated", 2, engines.accumulated_body, ((4, 4), True)
        for rows in ((4, 4), (5, 4)):
            yield "training, fsdp2", 2, engines.training_body, (rows, (2,), 0, "fsdp2")
            yield "fsdp2", 2, engines.fsdp_body, (rows, 1)


def name_of(value):
    return str(value) if isinstance(value, str | int) else "-".join(getattr(x, "__name__", str(x)) for x in value)


@pytest.mark.parametrize(
    ("name", "size", "body", "args"), [*of_heads()], ids=lambda x: "" if callable(x) else name_of(x)
)
def test_partial_fc(name, size, body, args):
    run_ranks(strictly, size, body, *args, timeout_s=120 if ALL else 30)


@pytest.mark.parametrize(
    ("name", "size", "body", "args"), [*of_caching()], ids=lambda x: "" if callable(x) else name_of(x)
)
def test_gradient_caching(name, size, body, args):
    run_ranks(strictly, size, body, *args, timeout_s=120 if ALL else 30)


def padded_body(counts):
    comm, rank = wb.comm.TorchCommunicator(), dist.get_rank()
    whole = torch.randn(sum(counts), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    local = whole.split(counts)[rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholebatch.comm.torch_distributed.MOST_PARTS", 1)  # as if there were many ranks
        calls = comm.transport.__class__._padded_all_gather
        padded = []
        patch.setattr(
            comm.transport.__class__,
            "_padded_all_gather",
            lambda self, *args: (padded.append(1), calls(self, *args))[1],
        )
        assert torch.equal(comm.all_gather(local, counts=counts), whole)
        return len(padded)


@pytest.mark.parametrize(
    ("counts", "padded"), [((5, 2, 6), 1), ((5, 0, 4), 1), ((9, 1, 1), 0), ((3, 3, 3), 0)], ids=str
)
def test_uneven_rows_of_many_ranks_are_padded_where_that_costs_little(counts, padded):
    assert run_ranks(strictly, 3, padded_body, counts, timeout_s=30) == [padded] * 3

"""The number of collectives of a step, counted in the transport."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import CORE, rows_of, whole_batch

import wholebatch as wb
from wholebatch.comm.torch_distributed import TorchTransport
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.sweep import Driver
from wholebatch.testing import run_ranks

OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send"]
OPERATIONS.append("all_gather_statements")


def counted(comm):
    """Count the operations of `comm`'s transport and the numbers that they reduce, without operations inside others."""
    comm.handshake(dict, caller="versions")  # which the first one of a group compares
    counts, inside = Counter(), []

    def wrap(name):
        operation = getattr(comm.transport, name)

        def call(x, *args):
            if not inside:
                counts["handshake" if name == "all_gather_statements" else name] += 1
                if name == "all_reduce":
                    counts["numbers reduced"] += x.numel()
            inside.append(name)
            try:
                return operation(x, *args)
            finally:
                inside.pop()

        setattr(comm.transport, name, call)

    for name in OPERATIONS:
        wrap(name)
    return counts


def step(name, exchange, counts):
    """Return the collectives of the forward pass, and of the backward pass."""
    comm = wb.comm.TorchCommunicator()
    seen = counted(comm)
    case = CORE[name]
    whole = whole_batch(case, counts)
    local = [z[at].requires_grad_() for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (10.0, -3.0))
    loss = case.call(wb.functional, *local, scale, bias, exchange=exchange, group=comm)
    forward = dict(seen)
    seen.clear()
    loss.backward()
    return forward, dict(seen)


def body(counts):
    return {(name, exchange): step(name, exchange, counts) for name in CORE for exchange in USED_EXCHANGES}


@pytest.mark.parametrize("counts", [(4, 4, 4), (5, 0, 6)], ids=str)
def test_collectives_of_a_step(counts):
    total, one_number = sum(counts), {"all_reduce": 1, "numbers reduced": 1}
    scale_and_bias = {"all_reduce": 1, "numbers reduced": 2}
    for seen in run_ranks(body, 3, counts):
        # Forward, the columns' sums, and the loss; backward, what weighs these sums, and the gradient.
        forward, backward = seen["clip", "gather"]
        assert forward == {"handshake": 1, "all_gather": 1, "all_reduce": 2, "numbers reduced": total + 1}
        assert backward == {"handshake": 1, "all_gather": 1, "reduce_scatter": 1, **scale_and_bias}
        forward, backward = seen["nt_xent", "gather"]  # a positive's logit beside each sum
        assert forward == {"handshake": 1, "all_gather": 1, "all_reduce": 2, "numbers reduced": 2 * 2 * total + 1}
        assert backward == {"handshake": 1, "all_gather": 1, "reduce_scatter": 1, **one_number}
        forward, backward = seen["siglip", "gather"]
        assert forward == {"handshake": 1, "all_gather": 1, "reduce_scatter": 1, **one_number}
        assert backward == {"handshake": 1, **scale_and_bias}
        # Messages of a rank: W - 1 blocks of Y to the next rank; W messages about blocks; backward, the columns'
        # weights beside Y. NT-Xent goes half around the ring.
        forward, backward = seen["clip", "ring"]
        assert forward == {"handshake": 1, "send": 2 + 3, **one_number}
        assert backward == {"handshake": 1, "send": 2 + 2 + 3, **scale_and_bias}
        forward, backward = seen["nt_xent", "ring"]
        assert forward == {"handshake": 1, "send": 1 + 2, **one_number}
        assert backward == {"handshake": 1, "send": 1 + 1 + 2, **one_number}
        forward, backward = seen["siglip", "ring"]
        assert forward == {"handshake": 1, "send": 2 + 3, **one_number}
        assert backward == {"handshake": 1, **scale_and_bias}
        # The keys travel to the queries: no column has a softmax.
        forward, backward = seen["info_nce", "gather"]
        assert forward == {"handshake": 1, "all_gather": 1, **one_number}
        assert backward == {"handshake": 1, "reduce_scatter": 1, **one_number}
        forward, backward = seen["info_nce", "ring"]
        assert forward == {"handshake": 1, "send": 2, **one_number}


def fallback_body():
    """Return the all-reduces of a forward pass in which one shift underflows."""
    comm = wb.comm.TorchCommunicator()
    x, y = torch.randn(2, 4, 6, dtype=torch.float64)
    seen = counted(comm)
    for exchange in ("gather", "ring"):
        wb.functional.clip_loss(x, y, 1e4, group=comm, exchange=exchange)
    return dict(seen)


def test_collectives_where_one_shift_underflows():
    """Three reductions instead of one: sums that underflow, maxima, sums; and one number that detects the underflow."""
    (seen, _) = run_ranks(fallback_body, 2)
    # ring: 1 block, and 2 messages about blocks, each time; the third time a block's maxima travel beside it
    assert seen.pop("numbers reduced") == (8 + 1 + 8 + 8 + 1) + (1 + 1)
    assert seen == {"handshake": 2, "all_gather": 1, "all_reduce": 5 + 2, "send": 3 * (1 + 2) + 1}


def smaller_tower_body(rows, negatives):
    """Return the number of entries that the all-gather moves from this rank."""
    comm = wb.comm.TorchCommunicator()
    moved = []
    all_gather = comm.transport.all_gather
    comm.transport.all_gather = lambda x, counts: (moved.append(x.shape), all_gather(x, counts))[1]
    queries, keys = torch.randn(2, rows, 4)
    extra = torch.randn(negatives, 4)
    wb.functional.info_nce_loss(queries, keys, logit_scale=1.0, negatives=extra, group=comm, exchange="gather")
    return [shape for shape in moved if shape[1:] == (4,)]


@pytest.mark.parametrize("negatives", [0, 1, 50])
def test_the_smaller_tower_travels(negatives):
    assert run_ranks(smaller_tower_body, 2, 3, negatives) == [[(3, 4)]] * 2


def chunks_body(counts):
    """Compare loss and gradients by a gather in chunks with those by one gather; record the order of events."""
    comm = wb.comm.TorchCommunicator()
    rank, events = dist.get_rank(), []
    gather, reduce, visit = comm.transport.all_gather_by_rank, comm.transport.reduce_, Driver.tiles

    def gathering(x, counts):
        out, arriving = gather(x, counts)

        def named(root, finish):
            return lambda: (events.append(f"wait for {root}"), finish())[1]

        return out, [named(root, finish) for root, finish in enumerate(arriving)]

    comm.transport.all_gather_by_rank = gathering
    comm.transport.reduce_ = lambda x, root: (events.append(f"reduced to {root}"), reduce(x, root))[1]
    grads = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "tiles", lambda self, block: (events.append("tiles"), visit(self, block))[1])
        for name, case in CORE.items():
            for side in (1, 10**6):
                patch.setattr("wholebatch.nodes.route.columns_of_a_chunk", lambda *_, side=side: side)
                comm.transport.kept.clear()  # the plan of the other size
                events.clear()
                whole = whole_batch(case, counts)
                local = [z[at].requires_grad_() for z, at in zip(whole, rows_of(case, counts, rank), strict=True)]
                views = [z.T.contiguous().T for z in local]  # columns are contiguous
                loss = case.call(wb.functional, *views, 10.0, -3.0, exchange="gather", memory="flat", group=comm)
                loss.backward()
                grads[side] = [loss.detach(), *(z.grad for z in local)]
                if name == "clip":
                    grads["events", side] = events.copy()
            for one, other in zip(grads[1], grads[10**6], strict=True):
                assert_same(one, other, relative=1e-12, absolute=1e-15)
    return grads["events", 1], grads["events", 10**6]


@pytest.mark.parametrize("counts", [(3, 2), (2, 0, 3)])
def test_a_gather_in_chunks_overlaps_transfers_and_tiles(counts):
    """Compute the first rank's tiles before waiting for the second's, and reduce them before computing the next."""
    for chunked, at_once in run_ranks(chunks_body, len(counts), counts):
        if counts == (3, 2):
            arriving = ["wait for 0", "tiles", "wait for 1", "tiles", "wait for 0", "wait for 1"]
            assert chunked == [*arriving, "tiles", "reduced to 0", "tiles", "reduced to 1"]
        assert sum(event == "tiles" for event in chunked) > sum(event == "tiles" for event in at_once)
        assert set(at_once) == {"tiles"}


class InOrder(TorchTransport):
    """A transport that moves messages as NCCL does: in the order of the calls, for any tags, one swap at a time."""

    def __init__(self):
        super().__init__(None)
        self._stream = ThreadPoolExecutor(max_workers=1)

    def swap(self, sends, receives):
        def run():
            works = [dist.isend(of.x, group_dst=of.rank, tag=7) for of in sends if of.x.numel()]
            works += [dist.irecv(of.x, group_src=of.rank, tag=7) for of in receives if of.x.numel()]
            for work in works:
                work.wait()
            return [of.x for of in receives]

        return self._stream.submit(run).result


def in_order_body(counts):
    comm = wb.comm.TorchCommunicator()
    comm.transport = InOrder()
    for case in CORE.values():
        grads = []
        for group in (comm, None):
            whole = whole_batch(case, counts)
            local = [
                z[at].requires_grad_() for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)
            ]
            loss = case.call(wb.functional, *local, 10.0, -3.0, exchange="ring", group=group)
            loss.backward()
            grads.append([loss.detach(), *(z.grad for z in local)])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("counts", [(3, 2), (2, 0, 3), (2, 1, 3, 2)])
def test_a_ring_works_on_transports_without_tags(counts):
    """The loss has the same bits, and no two ranks wait for each other."""
    run_ranks(in_order_body, len(counts), counts)

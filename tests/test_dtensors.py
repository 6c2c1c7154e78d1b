"""A DTensor instead of a rank's rows is refused on all ranks, before an operation on it communicates."""

import pytest
import torch
import torch.distributed as dist
from loss_cases import BIAS, EVERY, KEYS, rows_of, whole_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import wholebatch as wb
from wholebatch.testing import run_ranks

REFUSED = r"got a DTensor; pass x\.to_local\(\)"
COUNTS = (3, 5)


def as_dtensor(x):
    return DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def losses_body():
    """Each input of each loss, on one rank and on both, after a call of the same form."""
    rank, refused = dist.get_rank(), 0
    for name, case in EVERY.items():
        given = [x[rows] for x, rows in zip(whole_batch(case, COUNTS), rows_of(case, COUNTS, rank), strict=True)]
        given += [torch.tensor([value], dtype=torch.float64) for value in (2.0, BIAS)]
        true = case.call(wb.functional, *given)
        for position in range(len(case.inputs) + case.has_scale + case.has_bias):
            if case.inputs[position : position + 1] == (KEYS,):
                continue  # those of a queue, which is filled before the call
            wrong = [as_dtensor(x) if at == position else x for at, x in enumerate(given)]
            for ranks in ((1,), (0, 1)):
                with pytest.raises(ValueError, match=REFUSED):
                    case.call(wb.functional, *(wrong if rank in ranks else given))
                refused += 1
        assert torch.equal(case.call(wb.functional, *given), true), name
    return refused


def test_each_input_of_each_loss():
    assert all(count > 2 * len(EVERY) for count in run_ranks(losses_body, 2, timeout_s=200))


def pair_loss(score):
    return wb.PairLoss({"all": wb.terms.LogSumExp(score)}, lambda r, x, p: r.all)


def others_body():
    """Modules, communicators, and tensors that lie deeper in the arguments."""
    comm, head, sampled = wb.comm.TorchCommunicator(), wb.PartialFC(4, 10), wb.PartialFC(4, 10, sample_rate=0.5)
    x, ids, tokens, centers = torch.randn(4, 4), torch.arange(4), torch.randn(4, 2, 4), torch.randn(5, 4)
    plain, masked = pair_loss(lambda s, x, y, p: s), pair_loss(lambda s, x, y, p: s * (x.k == y.k))
    max_sim, of_classes, of_rows = wb.MaxSimLoss(), wb.functional.partial_fc_loss, torch.ones(4)
    calls = {
        "data": lambda d: masked(x, x, x_data={"k": d(ids)}, y_data={"k": ids}),
        "weights": lambda d: plain(x, x, weights=d(of_rows)),
        "candidates": lambda d: plain(x, x, candidates=d(tokens)),
        "offsets": lambda d: plain(x, x, candidates=x, candidate_offsets=d(torch.arange(5))),
        "mask": lambda d: max_sim(tokens, tokens, logit_scale=2.0, query_mask=d(torch.ones(4, 2, dtype=torch.bool))),
        "documents per query": lambda d: max_sim(tokens, tokens, logit_scale=2.0, documents_per_query=d(ids + 1)),
        "embeddings": lambda d: of_classes(d(x), ids, centers),
        "labels": lambda d: of_classes(x, d(ids), centers),
        "centers": lambda d: of_classes(x, ids, d(centers)),
        "bias": lambda d: of_classes(x, ids, centers, bias=d(torch.zeros(5))),
        "class ids": lambda d: of_classes(x, ids, centers, class_ids=d(torch.arange(5))),
        "a head": lambda d: head(d(x), ids),
        "a sample": lambda d: sampled(x, d(ids)),
        "top classes": lambda d: head.top_classes(d(x)),
        "any loss": lambda d: wb.WholeBatch(lambda z: z.square().sum())(d(x)),
        "chunks": lambda d: wb.GradCache([nn.Linear(4, 4)], 2, lambda z: wb.functional.nt_xent_loss(z, z))(d(x)),
        "a collective": lambda d: comm.all_gather(d(x)),
        "a message": lambda d: comm.send(d(x), 1 - comm.rank),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=REFUSED):
            call(as_dtensor)


def test_other_arguments():
    run_ranks(others_body, 2, timeout_s=60)

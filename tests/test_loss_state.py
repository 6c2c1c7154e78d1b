"""Queues and running averages of losses are the same on all ranks and on one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from loss_cases import LOSSES, dense, whole_batch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def queue_body(size):
    """Push uneven batches around the ring: keys are in the same places as on one process."""
    queue, alone = wb.KeyQueue(7, 2), wb.KeyQueue(7, 2, group=wb.comm.LocalCommunicator())
    pushed = []
    for step, counts in enumerate([(2, 1, 0), (0, 3, 2), (1, 1, 1), (4, 0, 3)]):
        counts = counts[:size]
        keys = torch.arange(2.0 * sum(counts)).view(-1, 2) + 100 * step
        before = queue.keys
        copy = before.clone()
        queue.enqueue(keys[Partition(counts).rows(dist.get_rank())])
        alone.enqueue(keys)
        pushed.append(keys)
        assert torch.equal(queue.ring, alone.ring)
        assert torch.equal(before, copy), "a loss may still need it"
        last = torch.cat(pushed)[-7:]
        assert sorted(queue.keys.tolist()) == sorted(last.tolist())
    again = wb.KeyQueue(7, 2)
    again.load_state_dict(queue.state_dict())
    assert torch.equal(again.keys, queue.keys)
    for wrong, message in (
        (torch.zeros(8, 2), r"do not fit into a queue of 7"),
        (torch.zeros(1, 3), "same embedding size, got 3 and 2"),
        (torch.zeros(1, 2).double(), "same dtype"),
        (torch.full((1, 2), torch.nan), "keys must be finite"),
        ("keys", "must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            queue.enqueue(wrong if dist.get_rank() == 0 else torch.zeros(1, 2))
    assert torch.equal(again.keys, queue.keys)
    if size > 1:
        rank = dist.get_rank()
        for differing, message in ((wb.KeyQueue(7 + rank, 2), "size, embedding_size, dtype"), (queue, "keys enqueued")):
            queue.enqueued += rank
            with pytest.raises(ValueError, match=f"{message} must be the same on all ranks"):
                differing.enqueue(torch.zeros(1, 2))
            queue.enqueued -= rank
        x = torch.eye(2)
        with pytest.raises(ValueError, match="examples must be the same on all ranks"):
            wb.GlobalContrastiveLoss(9 + rank)(x, x, torch.arange(2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_queue_is_the_same_on_all_ranks(world_size):
    run_ranks(queue_body, world_size, world_size, timeout_s=60)


def columns_body(counts):
    """The columns of all ranks are the batch, rank by rank, and each key of the queue once, with its data."""
    rows = Partition(counts).rows(dist.get_rank())
    queue = wb.KeyQueue(5, 1, data={"label": torch.int64, "weight": torch.float32})
    numbers = torch.arange(12)
    for batch in numbers[:8].split(4):
        at = torch.tensor_split(batch, len(counts))[dist.get_rank()]
        queue.enqueue(at[:, None].float(), {"label": at, "weight": at / 2})
    again = wb.KeyQueue(5, 1, data={"label": torch.int64, "weight": torch.float32})
    again.load_state_dict(queue.state_dict())
    features = numbers[8:][rows, None].double().requires_grad_()
    data = {"label": numbers[8:][rows], "weight": numbers[8:][rows] / 2}
    columns, of_columns = again.columns(features, data)
    (gradient,) = torch.autograd.grad(columns.sum(), features)
    assert (gradient == 1).all()
    return columns.detach()[:, 0], of_columns


@pytest.mark.parametrize("counts", [(4,), (1, 3), (2, 0, 2)], ids=str)
def test_columns_hold_each_key_of_a_queue_once(counts):
    found = run_ranks(columns_body, len(counts), counts)
    columns = torch.cat([features for features, _ in found])
    assert sorted(columns.tolist()) == [*range(3, 12)]
    assert torch.equal(torch.cat([data["label"] for _, data in found]), columns.long())
    assert torch.equal(torch.cat([data["weight"] for _, data in found]), columns.float() / 2)
    first = 8
    for count, (features, _) in zip(counts, found, strict=True):
        assert features[:count].tolist() == [*range(first, first + count)]
        first += count


@pytest.mark.parametrize(
    ("features", "data", "message"),
    [
        (torch.ones(2, 3), {"label": torch.ones(2)}, "must have the same embedding size, got 3 and 1"),
        (torch.ones(2), {"label": torch.ones(2)}, r"must have shape \(rows, embedding size\)"),
        (torch.ones(2, 1), {"labels": torch.ones(2)}, r"must have the names of the queue's data, \['label'\]"),
        (torch.ones(2, 1), {"label": torch.ones(3)}, "a number for each of 2"),
        (torch.ones(2, 1), {"label": torch.ones(2, dtype=torch.int64)}, "must be a vector of torch.float32"),
        (torch.ones(2, 1), None, r"must have the names of the queue's data, \['label'\]"),
    ],
)
def test_rows_that_do_not_fit_a_queue(features, data, message):
    queue = wb.KeyQueue(3, 1, data={"label": torch.float32})
    for call in (queue.enqueue, queue.columns):
        with pytest.raises(ValueError, match=message):
            call(features, data)
    assert len(queue.keys) == 0


@pytest.mark.parametrize("data", [["label"], {"label": "int64"}, {"the label": torch.int64}, {1: torch.int64}])
def test_data_of_a_queue_are_dtypes_by_name(data):
    with pytest.raises(ValueError, match="data must be dtypes by name such as"):
        wb.KeyQueue(3, 1, data=data)


def averages_body(counts):
    """Run three steps of SogCLR with uneven rows: loss, gradient and the whole state are those of one process."""
    together = wb.GlobalContrastiveLoss(20, temperature=0.2, dtype=torch.float64)
    alone = wb.GlobalContrastiveLoss(20, temperature=0.2, dtype=torch.float64, group=wb.comm.LocalCommunicator())
    rows = Partition(counts).rows(dist.get_rank())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (
            F.normalize(torch.randn(sum(counts), 4, dtype=torch.float64, generator=generator), dim=1).requires_grad_()
            for _ in range(2)
        )
        indices = torch.randperm(20, generator=generator)[: sum(counts)]
        results = []
        for loss, at in ((together, rows), (alone, slice(None))):
            value = loss(x[at], y[at], indices[at])
            results.append((value.detach(), *(g[rows] for g in torch.autograd.grad(value, (x, y)))))
        (value, *got), (expected, *true) = results
        assert_same(value, expected, relative=1e-12)
        for ours, theirs in zip(got, true, strict=True):
            assert_same(ours, len(counts) * theirs, relative=1e-9, absolute=1e-14)
        for name in ("image_log_averages", "text_log_averages"):
            both = [getattr(loss, name) for loss in (together, alone)]
            assert torch.equal(both[0].isneginf(), both[1].isneginf())
            assert_same(*(averages.nan_to_num(neginf=0.0) for averages in both), relative=1e-12)
    state = {name: value.clone() for name, value in together.state_dict().items()}
    together.eval()
    together(x[rows], y[rows], indices[rows])
    together.train()
    with torch.no_grad():
        together(x[rows], y[rows], indices[rows])
    assert all(torch.equal(together.state_dict()[name], value) for name, value in state.items())
    for wrong, message in (
        (indices[rows].float(), "indices must be a tensor of integers"),
        (indices[rows] + 20, "between 0 and 19"),
        (torch.cat([indices[rows], indices[:1]]), "one integer for each row"),
    ):
        if len(x[rows]):
            with pytest.raises(ValueError, match=message):
                together(x[rows], y[rows], wrong)


@pytest.mark.parametrize("counts", [(6,), (4, 2), (3, 1, 2)], ids=str)
def test_averages_are_those_of_one_process(counts):
    run_ranks(averages_body, len(counts), counts, timeout_s=60)


@pytest.mark.planted
def test_a_gradient_through_the_average_is_rejected():
    """Plain differentiation of u has gamma in the gradient, which is then 0.9 times the reference's."""
    case = LOSSES["global contrastive"]
    whole = whole_batch(case, (6,))
    right = dense(case, whole, 5.0)
    x, y, u, v = whole
    x.requires_grad_()
    g = ((x @ y.T - (x * y).sum(1, keepdim=True)) * 5.0).exp().masked_fill(torch.eye(6, dtype=torch.bool), 0).sum(1) / 5
    h = ((y @ x.T - (x * y).sum(1, keepdim=True)) * 5.0).exp().masked_fill(torch.eye(6, dtype=torch.bool), 0).sum(1) / 5
    averages = [0.1 * old.exp() + 0.9 * new for old, new in ((u, g), (v, h))]
    value = sum((1e-14 + average).log().mean() for average in averages) / 2 / 5.0
    (wrong,) = torch.autograd.grad(value, x)
    assert_same(value, right[0], relative=1e-12)
    assert_same(wrong, 0.9 * right[1], relative=1e-9)


def test_a_queue_can_be_filled_in_inference_mode():
    queue = wb.KeyQueue(4, 3)
    with torch.inference_mode():
        queue.enqueue(torch.randn(2, 3))
    x = torch.randn(2, 3, requires_grad=True)
    wb.functional.moco_loss(x, x.detach(), queue.keys, logit_scale=5.0).backward()
    assert x.grad.isfinite().all()


def test_losses_with_state_leave_a_compiled_graph():
    queue, loss, x = wb.KeyQueue(4, 3), wb.GlobalContrastiveLoss(5), torch.eye(3, requires_grad=True)

    @torch.compile(backend="eager")
    def step(x):
        value = loss(2 * x, x, torch.arange(3))
        queue.enqueue(x.detach())
        return 2 * value

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x).backward()
    assert not [str(one.message) for one in caught if "Dynamo" in str(one.message)]
    assert x.grad.isfinite().all()
    assert len(queue.keys) == 3


def test_ids_may_have_any_strides():
    x, y, ids = *whole_batch(LOSSES["clip"], (6,)), torch.arange(12).view(6, 2) // 4
    assert torch.equal(
        wb.functional.clip_loss(x, y, 5.0, ids=ids[:, 0]), wb.functional.clip_loss(x, y, 5.0, ids=ids[:, 0].clone())
    )


def test_the_last_of_equal_indices_stays():
    loss = wb.GlobalContrastiveLoss(5, dtype=torch.float64, gamma=1.0)
    x, y = whole_batch(LOSSES["clip"], (3,))
    loss(x, y, torch.tensor([2, 2, 4]))
    alone = wb.GlobalContrastiveLoss(5, dtype=torch.float64, gamma=1.0)
    alone(x, y, torch.tensor([0, 2, 4]))
    assert torch.equal(loss.image_log_averages[[2, 4]], alone.image_log_averages[[2, 4]])

"""Labels of no class: negative ones are refused by every loss of labels, or named as ignore_index, and left out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.losses.catalog import CATALOG
from wholebatch.testing import run_ranks

LOSSES = {entry.function.__name__: entry.module for entry in CATALOG.values() if entry.kind == "labeled"}
LABELS = torch.tensor([0, -1, 1, 0, -1, -1, -1, 1, 2, 0, 1, -1])
COUNTS = [(12,), (4, 3, 5)]  # the second of three ranks has one class, and with (4, 2, 6) none


def rows_of(views):
    torch.manual_seed(0)
    shape = (len(LABELS), views, 6) if views else (len(LABELS), 6)
    return torch.randn(shape, dtype=torch.float64), torch.rand(len(LABELS), dtype=torch.float64) + 0.5


def of_rank(counts, *tensors):
    first = sum(counts[: dist.get_rank()])
    return [x[first : first + counts[dist.get_rank()]].clone() for x in tensors]


def body(name, counts, views, reduction):
    features, labels, weights = of_rank(counts, rows_of(views)[0], LABELS, rows_of(views)[1])
    features.requires_grad_()
    loss = getattr(wb.functional, name)(
        features, labels, ignore_index=-1, weights=weights, reduction=reduction, sync="sum"
    )
    loss.sum().backward()
    return loss.detach(), features.grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("views", [0, 2])
@pytest.mark.parametrize("counts", [*COUNTS, (4, 2, 6)], ids=str)
def test_rows_of_the_ignored_label_are_not_in_the_batch(counts, views, reduction):
    features, weights = rows_of(views)
    kept = LABELS != -1
    for name in LOSSES:
        of_kept = features[kept].requires_grad_()
        reference = getattr(wb.reference, name)
        expected = reference(of_kept, LABELS[kept], weights=weights[kept], reduction=reduction)
        expected.sum().backward()
        losses, grads = zip(*run_ranks(body, len(counts), name, counts, views, reduction, timeout_s=60), strict=True)
        grad = torch.cat(grads)
        assert torch.allclose(grad[kept], of_kept.grad)
        assert not grad[~kept].any()
        if reduction == "mean":
            assert all(torch.allclose(loss, expected.detach()) for loss in losses)
        else:
            each = torch.cat(losses)
            assert each.shape == features.shape[:-1]
            assert torch.allclose(each[kept].flatten(), expected.detach())
            assert not each[~kept].any()


@pytest.mark.planted
def test_rows_of_no_class_would_be_one():
    """The wrong answers: as a class of their own, and as negatives, which zero weights would make of them."""
    features, _ = rows_of(0)
    right = wb.functional.sup_con_loss(features, LABELS, ignore_index=-1)
    as_class = wb.functional.sup_con_loss(features, LABELS.where(LABELS >= 0, 3))
    as_negatives = wb.functional.sup_con_loss(features, LABELS.where(LABELS >= 0, 3 + torch.arange(12)))
    assert torch.allclose(right, wb.reference.sup_con_loss(features[LABELS >= 0], LABELS[LABELS >= 0]))
    assert abs(as_class - right) > 0.1
    assert abs(as_negatives - right) > 0.1


def errors_body(settings_of_ranks):
    """Return the errors of all losses, whose last rank alone has a negative label."""
    rank, settings = dist.get_rank(), settings_of_ranks[dist.get_rank()]
    labels = torch.tensor([0, 0, 1, -1 if rank == 1 else 1])
    features, found = torch.randn(4, 6, requires_grad=True), {}
    for name in LOSSES:
        try:
            getattr(wb.functional, name)(features, labels, **settings)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_negative_labels_are_refused_on_all_ranks():
    for found in run_ranks(errors_body, 2, [{}, {}], timeout_s=40):
        assert {*found} == {*LOSSES}
        assert all("labels must not be negative, got -1; name it as ignore_index=" in of for of in found.values())
    with pytest.raises(ValueError, match="labels must not be negative, got -1"):
        wb.reference.triplet_loss(torch.randn(3, 6), torch.tensor([0, 0, -1]))


def test_another_label_is_ignored_on_one_rank():
    for found in run_ranks(errors_body, 2, [{}, {"ignore_index": -1}], timeout_s=40):
        assert {*found} == {*LOSSES}
        assert all("ignore_index must be the same on all ranks" in message for message in found.values())
    for found in run_ranks(errors_body, 2, [{"ignore_index": 0.5}, {}], timeout_s=40):
        assert all("ignore_index must be an integer" in message for message in found.values())


def empty_body(rows):
    """Return the error of each loss on a rank with so many rows, all of the ignored label."""
    features, labels, found = torch.randn(rows[dist.get_rank()], 6), torch.full((rows[dist.get_rank()],), -1), {}
    for name in LOSSES:
        with pytest.raises(ValueError, match="the global batch is empty") as error:
            getattr(wb.functional, name)(features, labels, ignore_index=-1)
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize(
    ("rows", "why"), [((3, 0), "all 3 rows have the label ignore_index"), ((0, 0), "every rank passed 0 rows")]
)
def test_a_batch_of_ignored_labels_alone_is_refused(rows, why):
    for found in run_ranks(empty_body, 2, rows, timeout_s=60):
        assert found == {
            name: f"{name}: the global batch is empty, {why}; skip the step on all ranks" for name in LOSSES
        }


WRONG = {  # what rank 1 passes with ignore_index=-1, and the error of all ranks
    "weights": ({"weights": [1.0] * 3}, "weights must be a floating-point tensor"),
    "a large number": ({"ignore_index": 2**70}, "ignore_index must be"),
}


def mistaken_body(name):
    more = {"ignore_index": -1, "weights": torch.ones(3), **(WRONG[name][0] if dist.get_rank() else {})}
    with pytest.raises(ValueError, match=WRONG[name][1]):
        wb.functional.sup_con_loss(torch.eye(3), torch.tensor([0, 0, -1]), **more)
    wb.functional.sup_con_loss(torch.eye(3), torch.tensor([0, 0, -1]), ignore_index=-1)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_beside_an_ignored_label_raises_on_all_ranks(name):
    run_ranks(mistaken_body, 2, name, timeout_s=60)


def test_labels_in_a_byte_are_not_taken_for_negative_ones():
    x, labels = torch.eye(4), torch.tensor([255, 255, 1, 1], dtype=torch.uint8)
    all_count = wb.functional.sup_con_loss(x, labels)
    assert wb.functional.sup_con_loss(x, labels, ignore_index=-1) == all_count
    assert wb.functional.sup_con_loss(x, labels, ignore_index=255) != all_count
    centers, settings = torch.randn(256, 4), {"margin": wb.NormFace(4.0), "ignore_index": -1}
    for loss in (wb.functional.partial_fc_loss, wb.reference.partial_fc_loss):
        found, expected = (loss(x, each, centers, **settings) for each in (labels, labels.long()))
        assert torch.allclose(found, expected)


def test_a_module_leaves_rows_out():
    features, _ = rows_of(0)
    for name, module in LOSSES.items():
        expected = getattr(wb.functional, name)(features, LABELS, ignore_index=-1)
        assert torch.equal(module(ignore_index=-1)(features, LABELS), expected)


def deferred_body():
    """Return what each call gives: two good ones, one with a negative label on the last rank, and a good one."""
    loss_fn, found = wb.SupConLoss(checks="deferred"), []
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 6, requires_grad=True)
    for step in range(4):
        labels = torch.tensor([0, 0, 1, -1 if step == 2 and dist.get_rank() else 1])
        try:
            loss = loss_fn(x, labels)
            x.grad = None
            loss.backward()
            found.append((float(loss.detach()), float(x.grad.abs().sum())))
        except ValueError as error:
            found.append(str(error))
    return found


def test_deferred_checks_judge_labels_later():
    for first, second, wrong, late in run_ranks(deferred_body, 2, timeout_s=40):
        assert first == second
        assert wrong[0] != wrong[0]
        assert wrong[1] == 0
        assert "in an earlier call with checks='deferred', labels must not be negative, got -1" in late
    with pytest.raises(ValueError, match="pass checks='entry'"):
        wb.functional.sup_con_loss(torch.randn(2, 3), torch.tensor([0, -1]), ignore_index=-1, checks="deferred")

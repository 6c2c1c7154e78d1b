"""All ranks are in the backward pass of the same call, with the same incoming gradient, or all ranks raise."""

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent / "faults"))

import order

import wholebatch as wb
from wholebatch.comm import CommunicationError
from wholebatch.comm.torch_distributed import TorchTransport
from wholebatch.contract import latest_call, reduction
from wholebatch.testing import RankError, run_ranks


@pytest.mark.planted
def test_faults_raise_on_all_ranks_or_have_no_effect():
    records = order.campaign(seed=1, count=12)
    assert {record["fault"] for record in records} == set(order.FAULTS)
    assert not [record for record in records if record["class"] in order.FORBIDDEN]
    assert {record["class"] for record in records if record["fault"] == "nothing"} == {"right"}


def uncompared_body(configurations):
    """Run the same faults with losses whose backward passes compare nothing."""
    reduction.together = lambda loss, *_args, **_options: loss
    return order.one_of(configurations)


@pytest.mark.planted
@pytest.mark.parametrize("fault", ["another gradient", "another order of one loss"])
def test_without_the_comparison_gradients_are_silently_wrong(fault):
    configuration = ("clip", "gather", fault, 0, 0)
    ranks = [outcomes[0] for outcomes in run_ranks(uncompared_body, 2, [configuration], timeout_s=20)]
    assert order.classified(ranks, "clip") in order.FORBIDDEN


@pytest.mark.planted
def test_without_the_comparison_a_skipped_backward_leaves_a_rank_waiting():
    configuration = ("clip", "gather", "skipped backward", 0, 0)
    with pytest.raises(RankError):
        run_ranks(uncompared_body, 2, [configuration], timeout_s=5)


def on_the_device_body():
    """Differences on GPUs, where the host does not wait, give NaN at once and an error at the next call."""
    TorchTransport.stays_on_device = lambda _self, _x: True
    x = torch.randn(3, 4, requires_grad=True)

    def gradient(factor, loss=wb.functional.siglip_loss):
        return torch.autograd.grad(factor * loss(x, x, 2.0, 0.0), x)[0]

    assert gradient(3.0).isfinite().all()
    assert gradient(1.0 + dist.get_rank()).isnan().all(), "incoming gradients differ"
    with pytest.raises(ValueError, match=r"siglip_loss: an earlier backward .*agree_on_overflow"):
        gradient(1.0)
    assert gradient(1.0).isfinite().all(), "reported once"
    assert torch.autograd.grad((wb.functional.siglip_loss(x, x, 2.0, 0.0, reduction="none") * torch.rand(3)).sum(), x)
    first, second = wb.functional.clip_loss(x, x, 2.0), wb.functional.clip_loss(x, x.roll(1, 0), 2.0)
    losses = (first, second) if dist.get_rank() else (second, first)
    assert all(torch.autograd.grad(loss, x)[0].isnan().all() for loss in losses), "in another order"
    with pytest.raises(ValueError, match="in the backward passes of different losses or calls"):
        wb.functional.clip_loss(x, x, 2.0)


@pytest.mark.parametrize("size", [2, 3])
def test_differences_are_reported_without_a_wait_of_the_host(size):
    run_ranks(on_the_device_body, size)


def whole_batch_on_the_device_body():
    """A program whose only loss is WholeBatch raises, too."""
    TorchTransport.stays_on_device = lambda _self, _x: True
    x = torch.randn(3, 4, requires_grad=True)
    loss_fn = wb.WholeBatch(lambda z: z.square().sum())
    (loss_fn(x) * (1.0 + dist.get_rank())).backward()
    assert x.grad.isnan().all()
    with pytest.raises(ValueError, match=r"WholeBatch: an earlier backward pass was not the same on all ranks"):
        loss_fn(x)
    assert loss_fn(x).isfinite()


def test_whole_batch_reports_differences_without_a_wait_of_the_host():
    run_ranks(whole_batch_on_the_device_body, 2)


def weights_of_rows_body():
    """Differences are allowed with reduction "none", for which each rank makes a scalar of its local losses."""
    x = torch.randn(3, 4, requires_grad=True)
    (wb.functional.clip_loss(x, x.roll(1, 0), 2.0, reduction="none") * (1 + dist.get_rank())).sum().backward()
    loss = wb.functional.clip_loss(x, x.roll(1, 0), 2.0)
    (loss * float("nan")).backward()  # a loss scaler overflows on all ranks
    (wb.functional.clip_loss(x, x.roll(1, 0), 2.0) * (1 + 1e-8 * dist.get_rank())).backward()
    loss = wb.functional.clip_loss(x, x.roll(1, 0), 2.0)
    for _ in range(2):
        loss.backward(retain_graph=True)


def test_allowed_differences_do_not_raise():
    run_ranks(weights_of_rows_body, 2)


def call_number_body():
    """Return the number of a call after rank 0 has made further calls in another group."""
    x = torch.randn(3, 4, requires_grad=True)
    if dist.get_rank() == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        for _ in range(3):
            wb.functional.clip_loss(x, x, 2.0, group=alone).backward()
    wb.functional.clip_loss(x, x, 2.0).backward()
    return latest_call()


def test_calls_have_the_same_number_on_all_ranks():
    assert len({*run_ranks(call_number_body, 2)}) == 1


CALLS = {
    "missing": (lambda x: wb.functional.clip_loss(x, x), r"rank 1: missing a required argument"),
    "unknown": (lambda x: wb.functional.siglip_loss(x, x, 1.0, 0.0, bias=2), r"unexpected keyword argument 'bias'"),
    "module, missing": (lambda x: wb.CLIPLoss()(x, x), r"missing a required argument: 'logit_scale'.*\(image_feat"),
    "module, unknown": (lambda x: wb.NTXentLoss()(x, x, labels=1), r"unexpected keyword argument 'labels'"),
    "temperature": (
        lambda x: wb.InfoNCELoss()(x, x, temperature=0.1),
        r"unexpected keyword argument 'temperature'; .*; pass logit_scale=1 / temperature$",
    ),
    "temperature of a function": (
        lambda x: wb.functional.clip_loss(x, x, temperature=0.1),
        r"missing a required argument: 'logit_scale'; .*; pass logit_scale=1 / temperature$",
    ),
    "open_clip's keyword": (
        lambda x: wb.CLIPLoss()(x, x, 1.0, output_dict=True),
        r"unexpected keyword argument 'output_dict'; .*; the losses in wholebatch\.integrations\.open_clip have",
    ),
    "head": (lambda x: wb.PartialFC(4, len(x) + 5)(x), r"missing a required argument: 'labels'"),
    "communicator": (
        lambda x: wb.comm.TorchCommunicator().all_gather(x, axis=1),
        r"unexpected keyword argument 'axis'",
    ),
    "split": (lambda _x: wb.comm.TorchCommunicator().split(colour=1), r"missing a required argument: 'color'"),
    "handshake": (
        lambda _x: wb.comm.TorchCommunicator().handshake(dict),
        r"missing a required (keyword-only )?argument: 'caller'",
    ),
    "queue": (lambda _x: wb.KeyQueue(8, 4).enqueue(), r"missing a required argument: 'keys'"),
}


def wrong_call_body(name):
    call, _ = CALLS[name]
    x = torch.randn(3, 4)
    right = lambda x: wb.functional.clip_loss(x, x, 1.0)  # noqa: E731
    with pytest.raises(TypeError) as caught:
        (call if dist.get_rank() == 1 else right)(x)
    assert wb.functional.clip_loss(x, x, 1.0).isfinite(), "the group continues"
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_do_not_fit_raise_on_all_ranks(name):
    texts = run_ranks(wrong_call_body, 2, name, timeout_s=30)
    for text in texts:
        assert re.search(CALLS[name][1], text), text
    assert texts[0].partition(": rank 1: ")[2] == texts[1].partition(": rank 1: ")[2]


def test_arguments_that_do_not_fit_on_one_process():
    with pytest.raises(TypeError, match=r"clip_loss: missing a required argument: 'logit_scale'; the signature is \("):
        wb.functional.clip_loss(torch.eye(2), torch.eye(2))


def test_facts_may_have_any_name():
    """The fields of a handshake do not mix with the facts that it carries."""
    comm, facts = wb.comm.LocalCommunicator(), {"complaint": "x", "caller": 3, "length": 5, "kind of complaint": 1}
    assert comm.handshake(lambda: facts, caller="test") == [facts]
    assert comm.handshake(lambda: {"x": float("nan")}, caller="test", must_match=["x"])


def data_body():
    """Gather data on rank 1 by the collective that a handshake uses, while rank 0 calls a loss."""
    x = torch.randn(3, 4)
    if dist.get_rank():
        dist.all_gather(list(torch.empty(2, 512, dtype=torch.uint8)), torch.full((512,), 7, dtype=torch.uint8))
        return ""
    with pytest.raises(CommunicationError) as caught:
        wb.functional.clip_loss(x, x, 1.0)
    return str(caught.value)


def test_data_instead_of_a_statement_raises():
    text = run_ranks(data_body, 2)[0]
    assert "in clip_loss: rank 1 sent 512 bytes that are no statement" in text
    assert "in another collective of the same group" in text


def absent_body():
    group = dist.new_group(timeout=timedelta(seconds=2))
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError) as caught:
            wb.functional.clip_loss(torch.eye(3), torch.eye(3), 1.0, group=group)
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_timeout_in_a_loss_does_not_advise_to_enable_checking():
    text = run_ranks(absent_body, 2)[0]
    assert "rank 0 of 2, in clip_loss" in text
    assert "one rank did not come here" in text
    assert "WHOLEBATCH_CHECK" not in text

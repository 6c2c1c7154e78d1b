"""Backward passes on a thread of their own, as CUDA's are: the same numbers, and what held in the forward pass holds.

With features on a GPU, autograd's engine runs the backward pass in a thread of that device. There, context variables,
autocast and other settings of the caller's thread have their initial values. Here another thread calls `backward`, so
that nodes of the CPU find the same.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
import torch
import torch.distributed as dist
from loss_cases import EVERY, options_of, rows_of, whole_batch
from strict_transport import strict
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.exchange import EXCHANGES
from wholebatch.kernels import Blocks, launch, missing, using
from wholebatch.testing import run_ranks


def on_another_thread(act):
    """Call a function on another thread, and raise what it raises."""
    raised = []

    def run():
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def here(act):
    act()


def gradients(call, given, backward_on):
    """Return the loss and the gradients of what is given and floating, differentiated by `backward_on`."""
    leaves = [z.detach().clone().requires_grad_(z.is_floating_point()) for z in given]
    loss = call(*leaves)
    backward_on(loss.backward)
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def assert_same_bits(call, given):
    both = [gradients(call, given, backward_on) for backward_on in (here, on_another_thread)]
    for one, other in zip(*both, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def losses_body(counts):
    """Compare every loss on a transport with NCCL's rules: adjoints and their handshakes run on the other thread."""
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        patch.setattr("wholebatch.nodes.route.columns_of_a_chunk", lambda *_: 1)  # a transfer for each rank
        for case in EVERY.values():
            whole = whole_batch(case, counts)
            given = [z[at] for z, at in zip(whole, rows_of(case, counts, dist.get_rank()), strict=True)]
            scale = torch.tensor(10.0, dtype=torch.float64)
            for exchange in EXCHANGES if "exchange" in case.choices else EXCHANGES[:1]:
                options = options_of(case, exchange=exchange)
                assert_same_bits(
                    lambda *z, case=case, options=options: case.call(wb.functional, *z[:-1], z[-1], z[-1], **options),
                    [*given, scale],
                )


@pytest.mark.parametrize("counts", [(6,), (4, 3), (3, 2, 4)], ids=str)
def test_losses(counts):
    run_ranks(losses_body, len(counts), counts, timeout_s=60)


CALLS = {
    "clip": lambda x, y: wb.functional.clip_loss(x, y, 20.0, kernel="triton"),
    "nt_xent": lambda x, y: wb.functional.nt_xent_loss(x, y, kernel="triton"),
    "matryoshka": lambda x, y: wb.functional.matryoshka_loss(x, y, logit_scale=20.0, dims=(8, 16), kernel="triton"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_the_backward_pass_take_the_blocks_that_are_in_use(name, dtype, monkeypatch):
    if missing(torch.device("cpu")) is not None:
        pytest.skip("kernels cannot run here")
    x, y = F.normalize(torch.randn(2, 40, 16), dim=-1).to(dtype)
    gradients(CALLS[name], [x, y], here)  # kernels have been checked
    run, started = launch.run, []

    def recorded(kernel, programs, *given, **constants):
        if "BN" in constants:  # kernels of rows have blocks of their own
            started.append((threading.get_ident(), (constants["BM"], constants["BN"])))
        run(kernel, programs, *given, **constants)

    monkeypatch.setattr(launch, "run", recorded)
    with using(Blocks(16, 32, 16, 2, 1, 1)):
        assert_same_bits(CALLS[name], [x, y])
    assert {blocks for _, blocks in started} == {(16, 32)}
    assert len({thread for thread, _ in started}) == 2


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_of_the_callers_thread(precision):
    x, y = F.normalize(torch.randn(2, 40, 16), dim=-1)

    def call(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return wb.functional.clip_loss(x, y, 20.0, precision=precision)

    assert_same_bits(call, [x, y])


_SETTING = ContextVar("a setting", default=1.0)


class ReadsASetting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * _SETTING.get()


@pytest.mark.planted
def test_a_setting_that_is_lost_on_the_way_is_noticed():
    x = torch.ones(3)
    token = _SETTING.set(2.0)
    try:
        with pytest.raises(AssertionError):
            assert_same_bits(lambda x: ReadsASetting.apply(x).sum(), [x])
    finally:
        _SETTING.reset(token)

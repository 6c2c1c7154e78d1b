"""Waits of the host: a loss reads its inputs back once, at its entry, and nothing afterward.

Each read of a tensor's values waits until a GPU has finished all its work, and cannot be part of a CUDA graph. Without
a GPU, the test counts calls that read a tensor into Python, or make one whose size depends on values.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from kernel_losses import CANARIES, PASSED, REHEARSE, losses
from strict_transport import strict
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.testing import run_ranks

# Late interaction reads how many tokens each item has, and so do declared losses, of which it is one.
NAMES = tuple(of for of in losses(*[torch.zeros(1, 1)] * 2, torch.zeros(1))[0] if not of.startswith("max_sim"))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
OF_TENSORS = (
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "is_nonzero"),
    *("nonzero", "argwhere", "equal", "allclose", "masked_select", "unique", "unique_consecutive", "new_tensor"),
)
OF_TORCH = ("nonzero", "argwhere", "equal", "allclose", "masked_select", "unique", "unique_consecutive", "bincount")


@contextmanager
def counted():
    """Yield a list of the reads inside the context."""
    if not CUDA:
        with pytest.MonkeyPatch.context() as patch:
            yield reads_of(patch)
        return
    found = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        seen.clear()  # of a warning that the mode itself is a prototype
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(of.message) for of in seen if "synchroniz" in str(of.message)]


def reads_of(patch):
    """Return a list that grows with each reading call of tensors and of torch from now on."""
    found = []

    def counting(name, function):
        def call(*args, **more):
            if name != "__getitem__" or any(isinstance(at, torch.Tensor) and at.dtype == torch.bool for at in args[1:]):
                found.append(name)
            return function(*args, **more)

        return call

    tensor = torch.tensor

    def to_device(*args, **more):  # the host waits until its numbers are copied
        found.extend(["tensor"] * ("device" in more))
        return tensor(*args, **more)

    patch.setattr(torch, "tensor", to_device)
    for of, names in ((torch.Tensor, (*OF_TENSORS, "__getitem__")), (torch, OF_TORCH)):
        for name in names:
            patch.setattr(of, name, counting(name, getattr(of, name)))
    return found


def reads(name, scale, kernel, *, matching=True):
    """Return the number of reads in forward and in backward."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks have other rows
    x = normalize(torch.randn(40, 24, device=DEVICE), dim=1)
    y = normalize((x if matching else -x) + 0.1 * torch.randn_like(x), dim=1)
    x.requires_grad_(), y.requires_grad_()
    made, _ = losses(x, y, torch.randint(0, 30, (40,), device=DEVICE), scale)
    with counted() as forward:
        loss = made[name](wb.functional, {"kernel": kernel, "memory": "flat"})
    with counted() as backward:
        loss.backward()
    return len(forward), len(backward)


@pytest.fixture(autouse=True)
def _kernels_passed_their_check(monkeypatch):
    """The first call of a form checks its kernels, and waits for that."""
    monkeypatch.setattr(REHEARSE, lambda *_, **more: PASSED)


def does_nothing(kernel, _programs, *arguments, **_constants):
    """Start no kernel; places that it would write are places."""
    for name, argument in zip(kernel.arg_names, arguments, strict=False):
        if name == "pair_targets":
            argument.zero_()


@pytest.fixture(params=["torch", "triton"])
def kernel(request, monkeypatch):
    """Return the kernel; without a GPU, Triton's kernels do nothing, because its interpreter reads tensors."""
    if request.param == "triton" and not CUDA:
        pytest.importorskip("triton")

        monkeypatch.setattr("wholebatch.kernels.launch.run", does_nothing)
        monkeypatch.setattr(CANARIES, lambda *_: None)
    return request.param


@pytest.mark.parametrize("scale", [14.3, 100.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_reads_its_inputs_once_at_entry(name, scale, kernel):
    """Plain PyTorch waits once more for each tile with equal ids or with an example's class: it lists the entries."""
    assert reads(name, scale, kernel) == expected_reads(name, kernel)


def expected_reads(name, kernel="torch"):
    """Return the number of reads in forward and in backward, for one tile."""
    of_classes = name.startswith("partial_fc")
    listed = kernel == "torch" and (of_classes or "ids" in name or name == "sup_con")
    in_backward = listed and not name.startswith("siglip")  # siglip's gradient is computed by then
    return 1 + listed, int(in_backward)


def ranks_body(names):
    """Return the reads of forward and backward of each loss, on ranks that send tensors of the CPU as NCCL would."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        for name in names:
            found[name] = reads(name, 14.3, "torch")
        comm = wb.comm.TorchCommunicator()
        with counted() as of_host:  # a handshake about facts on the host waits for these alone
            comm.handshake(lambda: {"rows": 3}, caller="test")
        found["mistake"] = reads_of_a_mistake()
    return found, len(of_host)


def reads_of_a_mistake():
    x = torch.randn(4, 3)
    if torch.distributed.get_rank():
        x[0, 0] = torch.nan
    with counted() as found, pytest.raises(ValueError, match="image_features must be finite") as caught:
        wb.functional.clip_loss(x, x, 1.0)
    assert "rank 1: " in str(caught.value)
    return len(found)


@pytest.mark.skipif(CUDA, reason="tensors of the CPU stand for those of a GPU")
def test_on_several_ranks_the_host_waits_once_too():
    """The numbers of all ranks are read together, after the all-gather; the others' numbers cost no further wait."""
    for found, of_host in run_ranks(ranks_body, 2, NAMES, timeout_s=120):
        mistake = found.pop("mistake")
        assert mistake > 1, "the test counts the reads that the message needs"
        assert of_host <= 1
        for name, seen in found.items():
            expected = expected_reads(name)
            if name in ("nt_xent, ids", "sup_con"):  # two tiles, of the local rows and of the other rank's
                expected = (3, 2)
            assert seen == expected, name


def test_nearly_opposite_pairs_need_a_second_read(kernel):
    """At scale 100 and opposite features, the loss checks afterward whether one shift underflowed."""
    assert reads("clip", 100.0, kernel, matching=False) == (2, 0)
    assert reads("clip", 14.3, kernel, matching=False) == (1, 0)


def test_a_running_average_stays_on_the_device():
    """CurricularFace transforms negatives by the average of the targets' cosines, which changes in each call."""
    torch.manual_seed(0)
    x = torch.randn(40, 24, device=DEVICE)
    labels = torch.randint(0, 30, (40,), device=DEVICE)
    found = []
    for margin in (wb.CurricularFace(4.0), wb.ArcFace(4.0)):
        head = wb.PartialFC(24, 30, margin=margin, memory="flat", device=DEVICE)
        head(x, labels)
        with counted() as reads_of_call:
            head(x, labels)
        found.append(len(reads_of_call))
    assert found[0] == found[1]


def test_a_planted_read_is_counted():
    x = torch.arange(3.0, device=DEVICE)
    for read in (
        lambda: x.sum().item(),
        lambda: bool(x[0]),
        lambda: x[x > 1],
        lambda: torch.nonzero(x),
        lambda: x.max().cpu(),
    ):
        with counted() as found:
            read()
        assert found
    with counted() as found:
        x.mul_(2).where(x > 1, 0.0)
    assert not found

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    with counted() as found:
        Reading.apply(x.requires_grad_()).sum().backward()
    assert found


def test_on_a_gpu_torchs_warnings_are_counted(monkeypatch):
    """But not the one that the mode itself is a prototype."""

    def set_mode(mode):
        if mode == "warn":
            warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=2)

    monkeypatch.setattr(f"{__name__}.CUDA", True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with counted() as found:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    assert found == ["called a synchronizing CUDA operation"]


@pytest.mark.skipif(not CUDA, reason="CUDA graphs are for GPUs")
def test_a_loss_runs_between_cuda_graphs():
    """The towers' forward and backward passes are CUDA graphs; the loss runs between them."""
    x, y = (torch.randn(64, 32, device=DEVICE) for _ in range(2))
    grads = []
    for graphed in (False, True):
        torch.manual_seed(0)
        towers = [torch.nn.Linear(32, 16, device=DEVICE) for _ in range(2)]
        called = [
            torch.cuda.make_graphed_callables(t, (z,)) if graphed else t for t, z in zip(towers, (x, y), strict=True)
        ]
        for _ in range(3):
            features = [normalize(tower(z), dim=1) for tower, z in zip(called, (x, y), strict=True)]
            wb.functional.clip_loss(*features, 20.0).backward()
        grads.append([of.grad for tower in towers for of in tower.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

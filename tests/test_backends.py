"""The backends of a process group are found by device, whatever the group's single name is."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from strict_transport import RefusedError, accepted, strict
from torch._subclasses import FakeTensorMode

import wholebatch as wb
from wholebatch._base.precision import tf32_is_allowed
from wholebatch._launch.processes import run_processes
from wholebatch.comm import maps, torch_distributed
from wholebatch.comm.backends import Backends
from wholebatch.comm.torch_distributed import TorchTransport
from wholebatch.comm.transport import Message
from wholebatch.testing import RankError, run_ranks

CONFIGS = {  # whether CUDA tensors travel as they are, the CPU's do, and gloo is there
    "cpu:gloo": (False, True, True),
    "cpu:gloo,cuda:gloo": (False, True, True),
    "cpu:gloo,cuda:nccl": (True, True, True),  # of init_process_group() without a backend, too
    "cuda:nccl": (True, False, False),
    "cpu:mpi,cuda:mpi": (False, True, False),
    "cpu:gloo,xpu:xccl": (False, True, True),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_device_has_its_backend(config, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    found = Backends.of(None)
    assert (found.take("cuda"), found.take("cpu"), found.may_abort) == CONFIGS[config]
    assert found.take("xpu") == ("xpu" in config)


@pytest.fixture
def pretended(monkeypatch):
    """Let FakeTensorMode make tensors of GPUs that a machine with one GPU does not have."""
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)


def transport(config, bound=None):
    """Return a transport without a group, over these backends."""
    made = TorchTransport.__new__(TorchTransport)
    made._backends = Backends(dict(pair.split(":") for pair in config.split(",")))
    made._device, made._group = None, Mock(bound_device_id=bound)
    made.size_classes = 192
    return made


@pytest.mark.parametrize(
    ("config", "given", "wire"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),  # the old rule copied this one to the host
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),  # the old rule copied this one to the current GPU
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:2"),
    ],
)
def test_a_tensor_travels_on_its_own_device_where_a_backend_takes_it(pretended, config, given, wire):
    with FakeTensorMode():
        ours = transport(config, bound=torch.device("cuda:2"))
        x = torch.empty(2, 3, device=given)
        assert ours._wire(x).device == torch.device(wire)
        assert ours.stays_on_device(x) == (given == wire != "cpu")
        assert ours.keeps_tags(x) == (wire == "cpu")


def test_numbers_from_the_host_travel_on_the_features_device(pretended):
    """Not on the current GPU, which is the first one on all ranks of a program that sets none."""
    with FakeTensorMode():
        ours = transport("cuda:nccl")
        assert ours._wire_device(torch.empty(2)) == torch.device("cuda")
        ours.use_device(torch.device("cpu"))
        ours.use_device(torch.device("cuda:3"))
        assert ours._wire(torch.empty(2)).device == torch.device("cuda:3")


def default_backend_body(body, *args):
    """Run in a group that `init_process_group()` makes without a backend."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    assert dist.get_backend() == "undefined"
    return body(*args)


def too_long_body():
    comm = wb.comm.TorchCommunicator()
    with pytest.raises(ValueError, match="same dtype and shape"):
        comm.send(torch.zeros(1000), 1) if comm.rank == 0 else comm.recv(torch.zeros(2), 0)
    x = torch.eye(3)[comm.rank :][:1]
    return wb.functional.clip_loss(x, x, 2.0, exchange="ring").item()


def test_a_message_that_is_too_long_ends_no_process_of_a_group_without_a_named_backend():
    """Gloo aborts a process that gets more bytes than it expects: the library knows that gloo is below."""
    results = run_ranks(default_backend_body, 2, too_long_body)
    x = torch.eye(3)[:2]
    assert results == pytest.approx([wb.reference.clip_loss(x, x, 2.0).item()] * 2)


def tf32_body(setting):
    before = tf32_is_allowed()
    if setting == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        setattr(torch.backends.cuda.matmul, setting, {"fp32_precision": "tf32", "allow_tf32": True}[setting])
    return before, tf32_is_allowed()


@pytest.mark.parametrize("setting", ["fp32_precision", "allow_tf32", "set_float32_matmul_precision"])
def test_each_of_torchs_settings_allows_tf32(setting):
    """After the first of them, torch.get_float32_matmul_precision() raises."""
    assert run_processes(tf32_body, 1, setting) == [(False, True)]


def strictly(body, *args):
    """Run on a transport with NCCL's manners."""
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        return body(wb.comm.TorchCommunicator(), *args)


def message_body(comm):
    if comm.rank == 0:
        comm.send(torch.arange(3.0), 1)
        return []
    return comm.recv(torch.empty(3), 0).tolist()


def head_on_body(comm):
    other = 1 - comm.rank
    handles = [comm.isend(torch.ones(2), other), comm.irecv(torch.empty(2), other)]
    return [handle.wait() for handle in handles]


def test_both_ends_of_a_message_state_it_at_once():
    """Without tags, statements one by one would wait for each other: both ends would send first."""
    assert run_ranks(strictly, 2, message_body, timeout_s=20) == [[], [0.0, 1.0, 2.0]]


def other_calls_body(comm):
    comm.check = False
    x = torch.ones(2, 3)
    return comm.all_gather(x, counts=(2, 2)) if comm.rank else comm.all_reduce(x)


def tagged_body(comm):
    with pytest.raises(ValueError, match="tag must be 0 for tensors on cpu, got 3"):
        comm.send(torch.ones(2), 1, tag=3) if comm.rank == 0 else comm.recv(torch.empty(2), 0, tag=3)


def foreign_dtype_body(comm):
    comm.transport.broadcast(torch.ones(2, dtype=torch.int16), 0)()


def not_contiguous_body(comm):
    comm.transport.send(torch.ones(2, 3).T, 1, 0, 0)() if comm.rank == 0 else None


def bits_body(comm, dtype):
    bits = torch.arange(-4, 4, dtype=torch.int8).repeat(2)
    x = bits.view(dtype)
    assert torch.equal(comm.broadcast(x, 0).view(torch.int8), bits)
    assert torch.equal(comm.all_gather(x[:2]).view(torch.int8), bits[: 2 * x.itemsize].repeat(comm.size))


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.uint16, torch.float8_e5m2], ids=str)
def test_dtypes_that_nccl_does_not_know_arrive_bit_for_bit(dtype):
    if dtype == torch.bool:
        run_ranks(strictly, 2, bools_body, timeout_s=20)
    else:
        run_ranks(strictly, 2, bits_body, dtype, timeout_s=20)


def bools_body(comm):
    x = torch.tensor([True, False, True])
    assert torch.equal(comm.broadcast(x, 0), x)


class FakeWork:
    """A handle of c10d."""

    def wait(self):
        return True


class DeviceOnly:
    """The functions of `torch.distributed` that move tensors: they refuse tensors of the host, and move nothing."""

    def __init__(self):
        self.moved = 0

    def __getattr__(self, name):
        if name in ("get_rank", "get_world_size", "ReduceOp"):
            return getattr(dist, name)

        def move(*tensors, **_):
            for x in tensors:
                if isinstance(x, torch.Tensor):
                    accepted(x, "cuda")
                    self.moved += 1
            return FakeWork()

        return move

    def P2POp(self, operation, x, **_):  # noqa: N802  # torch's name
        return operation(x)

    def batch_isend_irecv(self, operations):
        return operations


OPERATIONS = {
    "all_gather": lambda ours, x: ours.all_gather(x, (4, 4)),
    "all_gather_statements": lambda ours, x: ours.all_gather_statements(x),
    "reduce_scatter": lambda ours, x: ours.reduce_scatter(x, (2, 2)),
    "uneven reduce_scatter": lambda ours, x: ours.reduce_scatter(x, (3, 1)),
    "all_reduce": lambda ours, x: ours.all_reduce(x, "sum"),
    "broadcast": lambda ours, x: ours.broadcast(x, 1),
    "reduce": lambda ours, x: ours.reduce(x, 1),
    "gather": lambda ours, x: maps.gather(ours, (4, 4), 0).start(x),
    "scatter": lambda ours, x: maps.scatter(ours, (2, 2), 0).start(x),
    "send": lambda ours, x: ours.send(x, 1, 0, 0),
    "recv": lambda ours, x: ours.recv(x, 1, 0, 0),
    "swap": lambda ours, x: ours.swap([Message(x, 1, 0, 0)], [Message(x.clone(), 1, 0, 0)]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("given", ["cuda:1", "cpu"])
def test_nccl_gets_no_tensor_of_the_host(pretended, operation, given, monkeypatch):
    calls = DeviceOnly()
    monkeypatch.setattr(torch_distributed, "dist", calls)
    monkeypatch.setattr(torch_distributed, "_c10d", calls)
    ours = transport("cuda:nccl", bound=torch.device("cuda:1"))
    ours.rank, ours.size = 0, 2
    with FakeTensorMode():
        OPERATIONS[operation](ours, torch.empty(4, 3, device=given))()
    assert calls.moved


def test_a_tensor_of_the_host_is_refused():
    with pytest.raises(RefusedError, match="takes tensors of the device only, got one on cpu"):
        DeviceOnly().broadcast(torch.ones(2))


def test_a_tag_is_an_error_at_both_ends_where_messages_have_none():
    run_ranks(strictly, 2, tagged_body, timeout_s=20)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (head_on_body, "did not finish"),
        (other_calls_body, "waits forever or mixes data: rank . calls"),
        (foreign_dtype_body, "does not know torch.int16"),
        (not_contiguous_body, "takes contiguous tensors only"),
    ],
)
def test_the_strict_transport_refuses_what_nccl_refuses(body, refusal):
    """Over gloo, without it, each of these works or fails otherwise."""
    with pytest.raises(RankError, match=refusal):
        run_ranks(strictly, 2, body, timeout_s=8)

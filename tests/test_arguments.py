"""Arguments that are not tensors: flags, numbers, names and functions of the wrong type or value are refused."""

import math
import warnings
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch._base import settings
from wholebatch.testing import run_ranks


class Unshowable:
    def __repr__(self):
        raise ArithmeticError("cannot be shown")

    def __bool__(self):
        raise ArithmeticError("neither true nor false")

    def __eq__(self, other):
        raise ArithmeticError("cannot be compared")

    __hash__ = object.__hash__


NONSENSE = [None, "no", b"mean", [], {}, 1j, Unshowable(), object, torch.ones(3), torch.tensor(True), Decimal(1), ...]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: type(value).__name__)
def test_other_types_are_refused_as_flags_and_numbers(value):
    """Only a bool is a flag, only an int an integer, only an int or a float a number, for any methods of a value."""
    for check in (
        lambda: settings.check_flag("it", value),
        lambda: settings.check_integer("it", value),
        lambda: settings.check_count("it", value, "of things"),
        lambda: settings.check_number("it", value),
        lambda: settings.check_fraction("it", value),
        lambda: settings.check_choice("it", value, ("mean", "sum")),
    ):
        with pytest.raises(ValueError, match="it must be"):
            check()


def test_a_bool_is_not_a_number_and_a_number_is_not_a_bool():
    for check in (settings.check_integer, settings.check_number, settings.check_fraction):
        assert check("it", 1) == 1
        with pytest.raises(ValueError, match="it must be"):
            check("it", True)
    for value in (0, 1, 2, 1.0):
        with pytest.raises(ValueError, match="it must be True or False"):
            settings.check_flag("it", value)
    for value in (10**400, -(10**400), math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="it must be finite"):
            settings.check_number("it", value)
    assert settings.check_number("it", 10**30) == 1e30
    for value in (10**300, 1e300, -1e300):
        with pytest.raises(ValueError, match="it must be within the range of float32"):
            settings.check_number("it", value)
    with pytest.raises(ValueError, match=r"it must be a number, got Fraction\(1, 2\) \(Fraction\)"):
        settings.check_number("it", Fraction(1, 2))


def test_errors_for_numpy_scalars_name_the_conversion():
    np = pytest.importorskip("numpy")
    assert settings.check_number("it", np.float64(0.5)) == 0.5
    for value in (np.float32(0.5), np.int64(3), np.bool_(True)):
        with pytest.raises(ValueError, match=r"it must be a number, got \w+; pass float\(\.\.\.\) of it"):
            settings.check_number("it", value)
    with pytest.raises(ValueError, match=r"pass int\(\.\.\.\) of it"):
        settings.check_count("it", np.int64(3), "of things")


def _parameter():
    return nn.Parameter(torch.ones(2, 3))


OPTIMIZERS = [
    (wb.SparseAdamW, {"betas": (1.0, 0.9)}, r"betas must lie in \[0, 1\), got 1.0"),
    (wb.SparseAdamW, {"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\), got 1.0"),
    (wb.SparseAdamW, {"betas": (0.9, math.nan)}, "betas must be finite, got nan"),
    (wb.SparseAdamW, {"betas": 0.9}, "betas must be a list or tuple of two numbers"),
    (wb.SparseAdamW, {"betas": (0.9,)}, "betas must be two numbers"),
    (wb.SparseAdamW, {"eps": -1e-8}, "eps must not be negative"),
    (wb.SparseAdamW, {"lr": "0.1"}, r"lr must be a number, got '0.1' \(str\)"),
    (wb.SparseSGD, {"lr": -0.1}, "lr must not be negative, got -0.1"),
    (wb.SparseSGD, {"momentum": True}, r"momentum must be a number, got True \(bool\)"),
    (wb.SparseSGD, {"nesterov": 2, "momentum": 0.9}, "nesterov must be True or False, got 2"),
    (wb.SparseSGD, {"nesterov": True}, "needs momentum above 0"),
]


@pytest.mark.parametrize(("make", "options", "message"), OPTIMIZERS)
def test_a_wrong_setting_of_an_optimizer_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make([_parameter()], **options)
    with pytest.raises(ValueError, match=message):  # settings of a group of parameters, too
        make([{"params": [_parameter()], **options}])
    if "nesterov" not in options:
        optimizer = make([_parameter()])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [_parameter()], **options})


MARGINS = [
    (wb.MagFace, {"weight": -math.inf}, "weight must be finite, got -inf"),
    (wb.MagFace, {"weight": math.nan}, "weight must be finite, got nan"),
    (wb.MagFace, {"weight": -1.0}, "weight must not be negative"),
    (wb.MagFace, {"s": 0.0}, "s must be positive"),
    (wb.MagFace, {"norms": (10.0, math.inf)}, "norms must be finite"),
    (wb.MagFace, {"norms": {}}, "norms must be a list or tuple"),
    (wb.MagFace, {"margins": (0.1, 0.2, 0.3)}, "margins must be two numbers"),
    (wb.AdaFace, {"s": -1.0}, "s must be positive"),
    (wb.AdaFace, {"t_alpha": 2.0}, r"t_alpha must lie in \[0, 1\]"),
    (wb.AdaFace, {"m": -0.1}, "m must not be negative"),
    (wb.CurricularFace, {"alpha": -0.1}, r"alpha must lie in \[0, 1\]"),
    (wb.CurricularFace, {"s": 10**400}, "s must be finite"),
    (wb.ArcFace, {"m": True}, r"m2 must be a number, got True \(bool\)"),
]


@pytest.mark.parametrize(("make", "options", "message"), MARGINS)
def test_a_wrong_setting_of_a_margin_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_margins_refuse_wrong_targets():
    for margin in (wb.ArcFace(), wb.MagFace(), wb.AdaFace(), wb.CurricularFace()):
        with pytest.raises(ValueError, match=r"targets must be wholebatch\.heads\.Targets"):
            margin(torch.ones(3, 1))


def test_wrong_arguments_of_gradient_caching_are_refused():
    model, loss = nn.Linear(3, 2), lambda x: x.square().mean()
    for arguments, message in (
        ({"scaler": "x"}, "scaler must be a torch.amp.GradScaler"),
        ({"scaler": torch.amp.GradScaler}, "scaler must be a torch.amp.GradScaler"),
        ({"fp16": "no"}, "fp16 must be True or False, got 'no'"),
        ({"models": 3}, "models must be a list of modules or functions, got 3"),
        ({"models": {"a": model}}, "models must be a list"),
        ({"chunk_sizes": True}, "chunk_sizes must be a positive integer"),
        ({"chunk_sizes": "8"}, "chunk_sizes must be a positive integer"),
        ({"keep_graphs": torch.ones(3)}, "keep_graphs must be a number of chunks"),
        ({"group": "world"}, "group must be"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.GradCache(**{"models": [model], "chunk_sizes": 2, "loss_fn": loss} | arguments)
    step = wb.GradCache([model], 2, loss)
    with pytest.raises(ValueError, match="no_sync_except_last must be True or False"):
        step(torch.ones(4, 3), no_sync_except_last="no")
    for decorator in (wb.gradcache.cached, wb.gradcache.cat_input_tensor, wb.gradcache.gather_input_tensor(axis=0)):
        with pytest.raises(ValueError, match="func must be callable, got None"):
            decorator(None)
    with pytest.raises(ValueError, match="axis must be an integer"):
        wb.gradcache.gather_input_tensor(lambda x: x, axis="0")
    with pytest.raises(ValueError, match="control must be a SyncControl, got None"):
        wb.gradcache.register_sync_control(None)
    with pytest.raises(ValueError, match="hold must be callable"):
        wb.gradcache.SyncControl(lambda module: False, "no_sync")
    with pytest.raises(ValueError, match="hold or coalesce must be given, one of them, got neither"):
        wb.gradcache.SyncControl(lambda module: False)
    with pytest.raises(ValueError, match="hold or coalesce must be given, one of them, got both"):
        wb.gradcache.SyncControl(lambda module: False, lambda module: None, coalesce=lambda module: None)
    with pytest.raises(ValueError, match="decides must be one of"):
        wb.gradcache.SyncControl(lambda module: False, lambda module: None, decides="later")
    assert step(torch.ones(4, 3)).isfinite(), "no engine was registered by mistake"


def test_wrong_numbers_of_processes_and_seconds_are_refused():
    for arguments, message in (
        ((dist.get_world_size, 2.0), "world_size must be an integer"),
        ((dist.get_world_size, True), "world_size must be an integer"),
        ((dist.get_world_size, 10**6), "world_size must be an integer from 1 to 1024"),
        ((None, 2), "fn must be callable"),
    ):
        with pytest.raises(ValueError, match=message):
            run_ranks(*arguments)
    for backend in ("nonsense", "", None, "cpu:nonsense"):
        with pytest.raises(ValueError, match="backend must be one that this torch has, such as 'gloo' or 'nccl'; got"):
            run_ranks(dist.get_world_size, 1, backend=backend)
    for timeout_s in (0, -1, math.nan, "60"):
        with pytest.raises(ValueError, match="timeout_s must be"):
            run_ranks(dist.get_world_size, 2, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="modules must be names of modules"):
        wb.testing.preload(torch.ones(3))


def nested():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        return torch.nested.nested_tensor([torch.ones(2, 3)])


def collectives_body():
    """Pass a wrong argument on rank 1: all ranks raise, and the group continues."""
    comm, x = wb.comm.TorchCommunicator(), torch.ones(2, 3)
    wrong_here = comm.rank == comm.size - 1

    def one(wrong, right):
        return wrong if wrong_here else right

    for call, message in (
        (lambda: comm.broadcast(one(None, x)), "x must be a tensor, got NoneType"),
        (lambda: comm.all_reduce(one(x.to(torch.float8_e4m3fn), x)), "torch.float8_e4m3fn has no sums here"),
        (lambda: comm.broadcast(x, one(False, 0)), "root must be a rank of this communicator"),
        (lambda: comm.reduce(x, root=one(10**400, 0)), "root must be a rank of this communicator"),
        (lambda: comm.all_gather(x, dim=one(False, 0)), "dim must be from -2 to 1"),
        (lambda: comm.all_gather(x, check=one("yes", None)), "check must be True or False, got 'yes'"),
        (lambda: comm.all_reduce(x, check=one(1, None)), "check must be True or False, got 1"),
        (lambda: comm.all_gather(x, counts=one(3, (2,) * comm.size)), "counts must be a list or tuple"),
        (lambda: comm.all_gather(x, counts=(one(True, 2),) * comm.size), "counts must have one entry per rank"),
        (lambda: comm.scatter(x, 0, check=one(0, None)), "check must be True or False, got 0"),
        (lambda: comm.split(one("red", 0)), "color must be an integer .* or None; got 'red'"),
        (lambda: comm.backward(one("loss", None)), "loss must be a tensor, got str"),
        (lambda: comm.backward(retain_graph=one("yes", False)), "retain_graph must be True or False, got 'yes'"),
        (lambda: comm.all_reduce(one(nested(), x)), "x must be a dense tensor with data, got a nested tensor"),
        (lambda: comm.all_reduce(one(x.to_sparse(), x)), "x must be a dense tensor with data, got layout"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        if comm.size > 1:
            assert f"rank {comm.size - 1}: " in str(caught.value)
        assert comm.all_reduce(torch.ones(1)).item() == comm.size, "the group continues"
    for tag in (True, 1.0, -1, 2**40):
        with pytest.raises(ValueError, match="tag must be an integer from 0 to"):
            comm.isend(x, 0, tag=tag)
    for options in ({"check": "yes"}, {"trace": 1}):
        with pytest.raises(ValueError, match="must be True or False"):
            wb.comm.LocalCommunicator(**options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_wrong_arguments_of_collectives_are_refused_on_all_ranks(world_size):
    run_ranks(collectives_body, world_size, timeout_s=60)


def heads_body(folder):
    comm = wb.comm.select_communicator(None)
    p = _parameter()
    p.grad = torch.ones(2, 3)

    def one(wrong, right):
        return wrong if comm.rank == comm.size - 1 else right

    for call, message in (
        (lambda: wb.heads.clip_grad_norm_(one("x", [p]), [], 1.0), "replicated must be a list of parameters, got 'x'"),
        (lambda: wb.heads.clip_grad_norm_([p], one([None], []), 1.0), "sharded must be parameters.* got None"),
        (lambda: wb.heads.clip_grad_norm_([p], [], one(math.nan, 1.0)), "max_norm must be at least 0, got nan"),
        (lambda: wb.heads.clip_grad_norm_([p], [], one("1", 1.0)), r"max_norm must be a number, got '1' \(str\)"),
        (lambda: wb.heads.agree_on_overflow(one("x", torch.amp.GradScaler("cpu"))), "scaler must be a torch.amp"),
        (lambda: wb.heads.load_head(one(3, folder), wb.PartialFC(3, 6)), "folder must be a path"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert comm.all_reduce(torch.ones(1)).item() == comm.size, "the group continues"
    for call in (wb.heads.load_head, wb.heads.save_head, wb.heads.load_insightface):
        with pytest.raises(ValueError, match=r"head must be a wholebatch.PartialFC, got Linear"):
            call(folder, nn.Linear(3, 6))
    assert wb.heads.clip_grad_norm_([p], [], math.inf).item() == pytest.approx(6**0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_of_heads_and_checkpoints_are_refused_on_all_ranks(world_size, tmp_path):
    run_ranks(heads_body, world_size, str(tmp_path), timeout_s=60)


def loss_of_the_users_body(strategy):
    """A loss that is not finite, on one rank or on all, gives the same error on all ranks, which names the rank."""
    x = torch.randn(2, 3, requires_grad=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    last = 0 if strategy == "root" else size - 1
    for value in (math.nan, math.inf, -math.inf):
        for wrong in ({last}, set(range(size))):

            def loss_fn(x, value=value, wrong=wrong):
                return x.square().mean() * (value if rank in wrong else 1.0)

            with pytest.raises(ValueError, match=f"loss_fn must return a finite number, got {value}") as caught:
                wb.WholeBatch(loss_fn, strategy=strategy)(x)
            if size > 1 and wrong == {last}:
                assert f"rank {last}: loss_fn must return" in str(caught.value)
    for wrong, message in ((lambda x: x.sum().long(), "floating-point number, got torch.int64"), (len, "got int")):
        with pytest.raises(ValueError, match=message):
            wb.WholeBatch(wrong, strategy=strategy)(x)
    loss = wb.WholeBatch(lambda x: x.square().mean(), strategy=strategy)(x)
    loss.backward()
    assert x.grad.isfinite().all(), "the group continues"
    return loss.item()


@pytest.mark.parametrize("strategy", ["gather", "replicate", "root"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_finite(strategy, world_size):
    run_ranks(loss_of_the_users_body, world_size, strategy, timeout_s=60)

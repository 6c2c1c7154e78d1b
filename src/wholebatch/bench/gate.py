"""Check a loss before it is timed: the library's value and gradients, and a peer's value, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.declared import call_of, leaves_of, with_options
from wholebatch.planning.subject import BIAS, SCALE

from .peers import PairLoss
from .subjects import DTYPES, SUBJECTS, Configuration

GATE_SIZE = 16  # embedding size
_GATE_ROWS = {"cpu": 1000, "cuda": 9000}  # more than a tile
_GATE_ITEMS, _GATE_TOKENS = {"cpu": 250, "cuda": 1500}, (16, 6)  # likewise
_PEER_ROWS = 5  # with few rows, values of similar losses differ
_CPU = torch.device("cpu")


def check(
    comm: Communicator,
    name: str,
    configuration: Configuration,
    device: torch.device = _CPU,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check loss and gradients against the dense float64 reference, on a small batch of several tiles.

    Raises:
        AssertionError: if they are wrong.
    """
    dtype, entry = DTYPES[configuration.dtype], SUBJECTS[name]
    each = _GATE_ROWS[device.type]
    local, rows = slice(each * comm.rank, each * (comm.rank + 1)), each * comm.size
    whole = [x.to(device, dtype) for x in _features(rows, embedding_size)]

    def run(functions: object, towers: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
        leaves = [z.clone().requires_grad_() for z in towers]
        scale, bias = (torch.tensor(value, dtype=torch.float64, device=device) for value in (SCALE, BIAS))
        learned = [scale.requires_grad_()] if entry.scale_argument == "logit_scale" else []
        loss = entry.call(functions, *leaves, scale=scale if learned else SCALE, bias=bias.requires_grad_(), **options)
        return loss.detach(), *torch.autograd.grad(loss, [*leaves, *learned])

    expected = run(wb.reference, [z.double() for z in whole])
    options = configuration.options(entry.rows_per_example**2 * each * rows, device)
    actual = run(wb.functional, [z[local] for z in whole], group=comm, sync="mean", **options)
    # float32 rounds at 1e-7; a gradient in half precision, and a kept weight in bfloat16, at 4e-3
    close = 2e-2 if dtype.itemsize == 2 or configuration.keep else 1e-5
    _compare(comm, actual, expected, local, close)


def check_tokens(
    comm: Communicator,
    configuration: Configuration,
    options: Callable[[int, int, int, int], Mapping[str, Any]],
    device: torch.device = _CPU,
) -> None:
    """Check late interaction, its loss and its gradients, against the dense float64 reference.

    Numbers are multiples of 1/32, so that products are exact, and rounding never decides which token wins.

    Args:
        comm: the ranks.
        configuration: to check.
        options: of the loss, given the number of items, d, and the tokens of a query and of a document.
        device: of the features.

    Raises:
        AssertionError: if they are wrong.
    """
    dtype, (t, u) = DTYPES[configuration.dtype], _GATE_TOKENS
    counts = Partition.even(_GATE_ITEMS[device.type], comm.size)
    local, generator = counts.rows(comm.rank), torch.Generator().manual_seed(0)
    whole = [
        (8 * torch.randn(counts.total, each, GATE_SIZE, generator=generator)).round().div(32).to(device, dtype)
        for each in (t, u)
    ]

    def run(functions: Any, towers: Sequence[Tensor], **more: Any) -> tuple[Tensor, ...]:
        scale = torch.tensor(SCALE / t, dtype=torch.float64, device=device, requires_grad=True)
        leaves = [*(z.clone().requires_grad_() for z in towers), scale]
        loss = functions.max_sim_loss(*leaves[:2], logit_scale=scale, **more)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    expected = run(wb.reference, [z.double() for z in whole])
    actual = run(
        wb.functional, [z[local] for z in whole], group=comm, sync="mean", **options(counts.total, GATE_SIZE, t, u)
    )
    _compare(comm, actual, expected, local, 2e-2 if dtype.itemsize == 2 else 1e-5)


def check_peer_of_tokens(loss: PairLoss, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> None:
    """Check that a peer on one rank has the value of late interaction.

    Raises:
        AssertionError: if it computes another loss.
    """
    generator = torch.Generator().manual_seed(0)
    q, d = (torch.randn(_PEER_ROWS, each, GATE_SIZE, generator=generator) for each in _GATE_TOKENS)
    q, d, scale = q.to(device, dtype), d.to(device, dtype), torch.tensor(0.1, device=device)
    expected = wb.reference.max_sim_loss(q.double(), d.double(), logit_scale=scale.double())
    close = 1e-4 if dtype.itemsize >= 4 else 2e-2
    torch.testing.assert_close(loss(q, d, scale, scale).double(), expected, rtol=close, atol=close)


def _compare(
    comm: Communicator, actual: Sequence[Tensor], expected: Sequence[Tensor], local: slice, close: float
) -> None:
    """Compare a loss and its gradients, first those of two towers; of the true ones, ranks have their rows."""
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for position, (got, true) in enumerate(zip(actual[1:], expected[1:], strict=True)):
        of_rank = comm.size * true[local] if position < 2 else true
        torch.testing.assert_close(got.double(), of_rank, rtol=0, atol=close * of_rank.abs().max().item())


def check_declared(
    comm: Communicator, name: str, configuration: Configuration, device: torch.device = _CPU, beside: str | None = None
) -> None:
    """Check a declared loss and its gradients against its dense float64 reference, on a small batch of several tiles.

    Each rank has its own data of the batch; the reference gets all ranks', one after the other. With `beside` the value
    is also compared with that loss of this library.

    Raises:
        AssertionError: if they are wrong.
    """
    torch.manual_seed(comm.rank)
    made, arguments = call_of(name, _GATE_ROWS[device.type], 2 * GATE_SIZE, device=device, seed=comm.rank)
    loss_fn = with_options(made, group=comm, sync=None, reduction="mean", **configuration.exchange_only)
    rows = [key for key in arguments if key != "parameters"]  # these are the same on all ranks
    local = {key: _leaves(arguments[key], DTYPES[configuration.dtype]) for key in rows}
    whole = {key: _gathered(comm, local[key]) for key in rows}
    shared = {"parameters": arguments["parameters"]} if "parameters" in arguments else {}
    loss = loss_fn(**local, **shared)
    expected = made.reference(**whole, **shared)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-5)
    learned = leaves_of(made, shared)
    pairs = [(a, b) for key in rows for a, b in zip(_tensors(local[key]), _tensors(whole[key]), strict=True)]
    pairs = [(a, b) for a, b in pairs if a.requires_grad]
    found = torch.autograd.grad(loss, [*(a for a, _ in pairs), *learned])
    true = torch.autograd.grad(expected, [*(b for _, b in pairs), *learned])
    close = 2e-2 if DTYPES[configuration.dtype].itemsize == 2 else 1e-4
    for at, (got, of) in enumerate(zip(found, true, strict=True)):
        if at < len(pairs):
            of = of[len(got) * comm.rank : len(got) * (comm.rank + 1)]
        else:  # with sync=None each rank has its share
            got = comm.all_reduce(got.clone(), check=False)
        torch.testing.assert_close(got.double(), of.double(), rtol=0, atol=close * of.abs().max().item() + 1e-12)
    if beside is not None:
        _check_beside(name, beside)


def _check_beside(name: str, beside: str) -> None:
    """Raise AssertionError unless a declared loss has the value of a loss of this library, on few rows."""
    made, arguments = call_of(name, _PEER_ROWS, GATE_SIZE, dtype=torch.float64)
    features = [arguments[key] for key in ("x", "y") if key in arguments]
    bias = torch.tensor(BIAS, dtype=torch.float64)
    expected = SUBJECTS[beside].call(wb.reference, *features, scale=SCALE, bias=bias)
    torch.testing.assert_close(made.reference(**arguments).double(), expected.double(), rtol=1e-4, atol=1e-4)


def _tensors(of: Any) -> list[Tensor]:
    return [*of.values()] if isinstance(of, Mapping) else [of]


def _leaves(of: Any, dtype: torch.dtype) -> Any:
    """Return features or data of a call as new leaves; features have a dtype, data keep theirs."""
    if isinstance(of, Mapping):
        return {name: _leaves(x, dtype if x.dim() > 1 else x.dtype) for name, x in of.items()}
    found: Tensor = of.detach()
    found = found.to(dtype) if found.dim() > 1 and found.is_floating_point() else found.clone()
    return found.clone().requires_grad_(of.requires_grad)


def _gathered(comm: Communicator, of: Any) -> Any:
    """Return all ranks' rows, in float64, as leaves."""
    if isinstance(of, Mapping):
        return {name: _gathered(comm, x) for name, x in of.items()}
    every = comm.all_gather(of.detach(), check=False)
    found: Tensor = every.double() if every.is_floating_point() else every
    return found.requires_grad_(of.requires_grad)


def check_peer(
    comm: Communicator,
    name: str,
    loss: PairLoss,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    embedding_size: int = GATE_SIZE,
) -> None:
    """Check that a peer computes the same loss: the mean over ranks is the reference's value.

    Raises:
        AssertionError: if it computes another loss.
    """
    x, y = (z.to(device, dtype) for z in _features(_PEER_ROWS * comm.size, embedding_size))
    scale, bias = (torch.tensor(value, device=device) for value in (SCALE, BIAS))
    local = slice(_PEER_ROWS * comm.rank, _PEER_ROWS * (comm.rank + 1))
    value = comm.all_reduce(loss(x[local], y[local], scale, bias).detach().double(), "avg", check=False)
    entry = SUBJECTS[name]
    same = scale if entry.scale_argument == "logit_scale" else SCALE
    expected = entry.call(wb.reference, x.double(), y.double(), scale=same, bias=bias)
    close = 1e-4 if dtype.itemsize >= 4 else 1e-2
    torch.testing.assert_close(value, expected, rtol=close, atol=close)


def _features(rows: int, embedding_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [normalize(torch.randn(rows, embedding_size, generator=generator), dim=1) for _ in range(2)]

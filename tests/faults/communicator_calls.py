"""Right calls of every operation of a communicator, each with its backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from good_calls import ENTRIES, Arguments, Good, Results, World
from torch import Tensor

import wholebatch as wb
from wholebatch.partition import Partition

Dense = Callable[[list[Tensor], Arguments], list[Tensor]]  # all ranks' x and the options -> all ranks' results
OPERATIONS = [
    name
    for name, of in vars(wb.comm.Communicator).items()
    if not name.startswith("_") and inspect.isfunction(of) and name not in ("close", "handshake")
]
MESSAGES = ("send", "recv", "isend", "irecv")


def _all_gather(xs: list[Tensor], of: Arguments) -> list[Tensor]:
    return [torch.cat(xs, of.get("dim", 0))] * len(xs)


def _parts(x: Tensor, size: int, of: Arguments) -> list[Tensor]:
    dim = of.get("dim", 0)
    return list(x.split(tuple(of.get("counts") or Partition.even(x.shape[dim], size).counts), dim))


def _total(xs: list[Tensor], of: Arguments) -> Tensor:
    stacked, op = torch.stack(xs), of.get("op", "sum")
    reduced = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin, "prod": stacked.prod}
    return reduced[op](0)


def _at_root(xs: list[Tensor], of: Arguments, whole: Tensor, elsewhere: Tensor) -> list[Tensor]:
    return [whole if rank == of.get("root", 0) else elsewhere for rank in range(len(xs))]


def _gather(xs: list[Tensor], of: Arguments) -> list[Tensor]:
    whole = _all_gather(xs, of)[0]
    return _at_root(xs, of, whole, whole.narrow(of.get("dim", 0), 0, 0))


def _reduce(xs: list[Tensor], of: Arguments) -> list[Tensor]:
    whole = _total(xs, of)
    return _at_root(xs, of, whole, torch.zeros_like(whole))


def _all_to_all(xs: list[Tensor], of: Arguments) -> list[Tensor]:
    sent = [_parts(x, len(xs), of) for x in xs]
    return [torch.cat([parts[rank] for parts in sent], of.get("dim", 0)) for rank in range(len(xs))]


DENSE: dict[str, Dense] = {
    "all_gather": _all_gather,
    "reduce_scatter": lambda xs, of: _parts(_total(xs, of), len(xs), of),
    "all_reduce": lambda xs, of: [_total(xs, of)] * len(xs),
    "broadcast": lambda xs, of: [xs[of.get("root", 0)]] * len(xs),
    "reduce": _reduce,
    "gather": _gather,
    "scatter": lambda xs, of: _parts(xs[of.get("root", 0)], len(xs), of),
    "all_to_all": _all_to_all,
    "split": lambda xs, of: [torch.stack(xs).sum(0)] * len(xs),
}
DENSE |= {f"i{name}": DENSE[name] for name in ("all_gather", "reduce_scatter", "all_reduce")}
DENSE |= {"wait": DENSE["all_reduce"], "backward": DENSE["all_reduce"]}
ALIKE = ("reduce_scatter", "ireduce_scatter", "all_reduce", "iall_reduce", "broadcast", "reduce", "wait", "backward")


def make_collective(name: str, world: World) -> Good:
    """Return a right call of one collective, with comm.backward of the result."""
    rng = world.choices
    method = getattr(wb.comm.Communicator, name)
    parameters = {k: p for k, p in inspect.signature(method).parameters.items() if k != "self"}
    options: Arguments = {}
    for key, values in (("op", ["sum", "avg"]), ("root", range(world.size)), ("dim", [0, 1])):
        if key in parameters and rng.random() < 0.6:
            options[key] = rng.choice(list(values))
    if name == "split":
        options["color"] = 0
    even = name in (*ALIKE, "split", "scatter", "all_to_all")
    shapes = [(4, 3) if even else (n, 3) if not options.get("dim") else (3, n) for n in world.rows]
    arguments = [{**options, "x": world.normal(f"x {rank}", *shape)} for rank, shape in enumerate(shapes)]

    def forward(comm: wb.comm.Communicator, given: Arguments) -> Tensor:
        if name == "split":
            x = given.pop("x")
            part = comm.split(**given)
            return torch.zeros_like(x) if part is None else part.all_reduce(x)
        if name == "wait":
            x = given.pop("x", None)
            handle = comm.iall_reduce(x)
            return comm.wait(**{"handle": handle, **given})  # type: ignore[return-value]
        if name == "backward":
            return comm.all_reduce(given["x"])
        result = getattr(comm, name)(**given)
        return result.wait() if isinstance(result, wb.comm.Handle) else result

    def call(comm: Any, given: Arguments, backward: bool) -> Results:
        given = dict(given)
        x = given.get("x")
        if isinstance(x, Tensor) and x.is_floating_point() and not getattr(x, "frozen", False):
            given["x"] = x = x.detach().clone().requires_grad_()
        y = forward(comm, dict(given))
        value = {"value": y.detach().clone()}
        if not backward:
            return value
        loss = (y * _weights(y, world.rank)).sum()
        comm.backward(**({"loss": loss} | {k: v for k, v in given.items() if name == "backward" and k != "x"}))
        if isinstance(x, Tensor) and x.requires_grad:
            value["gradient of x"] = torch.zeros_like(x) if x.grad is None else x.grad
        return value

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        xs = [of["x"].detach().double().requires_grad_() for of in of_ranks]
        ys = DENSE[name](xs, of_ranks[settings_of])
        if name == "split":  # the sum over the ranks of the same color
            colors = [of["color"] for of in of_ranks]
            ys = [sum((x for x, c in zip(xs, colors, strict=True) if c == local), 0 * xs[0]) for local in colors]
        total = torch.stack([(y * _weights(y, rank)).sum() for rank, y in enumerate(ys)]).sum()
        gradients = torch.autograd.grad(total, xs, allow_unused=True)
        return [
            {"value": y.detach(), "gradient of x": torch.zeros_like(x) if g is None else g}
            for x, y, g in zip(xs, ys, gradients, strict=True)
        ]

    return Good(
        arguments,
        {**parameters, "x": None},
        call,
        expected,
        lambda _given: world.communicator(),
        unsafe=frozenset({"group", "check", *(["x"] if name in ("split", "wait", "backward") else [])}),
        alone=frozenset({"handle", *(["nonsense"] if name == "wait" else [])}),  # other ranks wait for this rank
        has_backward=True,
    )


def _weights(y: Tensor, rank: int) -> Tensor:
    """Return the weights of y's entries in this rank's loss."""
    return torch.linspace(1.0, 2.0, y.numel(), dtype=torch.float64, device=y.device).view(y.shape) + rank


def make_message(name: str, world: World) -> Good:
    """Return a message from a rank to the next, by this operation at its end and the matching one at the other end."""
    source = world.choices.randrange(world.size)
    dest = (source + 1) % world.size
    sends = name.endswith("send")
    method = getattr(wb.comm.Communicator, name)
    x = world.normal("x", 4, 3)
    mine, other = (source, dest) if sends else (dest, source)
    arguments: list[Arguments] = [{} for _ in range(world.size)]
    arguments[source] = {"x": x, "dest": dest, "tag": 3}
    arguments[dest] = {"like": torch.zeros_like(x), "source": source, "tag": 3}
    nonblocking = name.startswith("i")

    def call(comm: Any, given: Arguments, _backward: bool) -> Results:
        value = torch.zeros(1, device="cpu")
        if world.rank == source:
            sent = comm.isend(**given).wait() if nonblocking else comm.send(**given)
            assert sent is None
        elif world.rank == dest:
            value = comm.irecv(**given).wait() if nonblocking else comm.recv(**given)
        return {"value": value.clone()}

    def expected(of_ranks: list[Arguments], _settings_of: int) -> list[Results]:
        return [{"value": of_ranks[source]["x"] if rank == dest else torch.zeros(1)} for rank in range(world.size)]

    return Good(
        arguments,
        {k: p for k, p in inspect.signature(method).parameters.items() if k != "self"},
        call,
        expected,
        lambda _given: world.communicator(),
        takes_part=(mine, other),
        culprits=(mine,),
        binds_alone=True,
        alone=frozenset({"dest", "source", "tag"}),
    )


def register() -> None:
    """Register all operations."""
    for name in OPERATIONS:
        if name in MESSAGES:
            ENTRIES[f"comm.{name}"] = partial(make_message, name)
        elif name in DENSE:
            ENTRIES[f"comm.{name}"] = partial(make_collective, name)


register()

"""Random faults: mistakes of one rank in a call that is right on all others."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from good_calls import Arguments, Good, Raises, World
from torch import Tensor

from wholebatch.exchange import USED_EXCHANGES

Kind = Literal["mistake", "legal", "absent", "user"]
Act = Literal["call", "skip", "no_grad", "inference_mode", "another call", "no backward"]
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Fault:
    """A fault on one rank.

    Attributes:
        kind: "mistake": a wrong argument, for which all ranks must raise; "legal": nothing is wrong, and the result
            must be right; "absent": the rank does not make the call of the others, which the library cannot prevent;
            "user": the user's function raises.
        text: a description.
        culprit: the rank with the fault.
        arguments: the arguments of all ranks.
        act: the culprit's action.
        world: the world of the call, if it has other rows.
    """

    kind: Kind
    text: str
    culprit: int
    arguments: list[Arguments] = field(repr=False)
    act: Act = "call"
    world: World | None = field(default=None, repr=False)


def _drop_last(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _set_first(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = value
    return x


# Each change, with the tensors that it applies to. A change that is legal for one entry point may be wrong for another
# (an empty shard).
TENSOR_FAULTS: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Any]]] = {
    "in float32": (lambda x: x.dtype == torch.float64, lambda x: x.float()),
    "in float16": (lambda x: x.is_floating_point(), lambda x: x.half()),
    "in bfloat16": (lambda x: x.is_floating_point(), lambda x: x.bfloat16()),
    "as integers": (lambda x: x.is_floating_point(), lambda x: x.long()),
    "as floats": (lambda x: not x.is_floating_point(), lambda x: x.double()),
    "as booleans": (lambda x: True, lambda x: x > 0),
    "complex": (lambda x: x.is_floating_point(), lambda x: x + 0j),
    "in float8": (lambda x: x.is_floating_point(), lambda x: x.to(torch.float8_e4m3fn)),
    "a column short": (lambda x: x.dim() == 2 and x.shape[1] > 1, lambda x: _drop_last(x, 1)),
    "a row short": (lambda x: x.dim() > 0 and len(x) > 0, lambda x: _drop_last(x, 0)),
    "a row more": (lambda x: x.dim() > 0, lambda x: torch.cat([x, x.new_ones(1, *x.shape[1:])])),
    "transposed": (lambda x: x.dim() == 2 and x.shape[0] != x.shape[1], lambda x: x.T),
    "with one dimension more": (lambda x: True, lambda x: x.unsqueeze(-1)),
    "flattened": (lambda x: x.dim() > 1, lambda x: x.flatten()),
    "without dimensions": (lambda x: x.numel() > 1, lambda x: x.view(-1)[0]),
    "without columns": (lambda x: x.dim() == 2, lambda x: x[:, :0]),
    "on device meta": (lambda x: True, lambda x: x.to("meta")),
    "sparse": (lambda x: x.dim() > 0, lambda x: x.to_sparse()),
    "sparse by rows": (lambda x: x.dim() == 2, lambda x: x.to_sparse_csr()),
    "nested": (lambda x: x.dim() > 1 and len(x) > 0, lambda x: torch.nested.as_nested_tensor([*x])),
    "with a NaN": (lambda x: x.is_floating_point() and x.numel() > 0, lambda x: _set_first(x, NAN)),
    "with an infinity": (lambda x: x.is_floating_point() and x.numel() > 0, lambda x: _set_first(x, INF)),
    "all NaN": (lambda x: x.is_floating_point() and x.numel() > 0, lambda x: x * NAN),
    "below its range": (lambda x: x.dtype == torch.int64 and x.numel() > 0, lambda x: _set_first(x, -7)),
    "above its range": (lambda x: x.dtype == torch.int64 and x.numel() > 0, lambda x: _set_first(x, 2**40)),
}
NOT_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "a list": lambda x: x.tolist(),
    "a string": lambda x: "features",
    "a number": lambda x: 1.5,
    "a dictionary": lambda x: {"x": x},
    "a type": lambda x: Tensor,
}
NONSENSE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'nonsense'": lambda: "nonsense",
    "-1": lambda: -1,
    "-1.5": lambda: -1.5,
    "99": lambda: 99,
    "nan": lambda: NAN,
    "inf": lambda: INF,
    "10**400": lambda: 10**400,
    "True": lambda: True,
    "[]": list,
    "{'a': 1}": lambda: {"a": 1},
    "object()": object,
    "a tensor of 2": lambda: torch.ones(2),
    "a tensor with a NaN": lambda: torch.tensor(NAN),
    "b'x'": lambda: b"x",
    "1j": lambda: 1j,
    "a type": lambda: int,
    "[[]]": lambda: [[]],
}


def draw(rng: random.Random, make: Callable[[World], Good], good: Good, world: World) -> Fault:
    """Draw a random fault in a right call."""
    culprit = rng.choice(list(good.culprits or range(world.size)))
    local = good.arguments[culprit]
    tensors = [k for k, x in local.items() if isinstance(x, Tensor) and k not in good.unsafe]
    settings = [k for k, x in local.items() if not isinstance(x, Tensor) and k not in {*good.unsafe, *good.user}]
    not_given = [k for k in good.parameters if k not in local and k not in {*good.unsafe, *good.user, "loss_fn"}]
    not_given = [k for k in not_given if good.parameters[k] is not None and not _variadic(good.parameters[k])]

    passed = [k for k in local if k not in {*good.unsafe, *good.user, *good.settings}]

    def changed(kind: Kind, text: str, act: Act = "call", without: str = "", **values: Any) -> Fault:
        arguments = [dict(of) for of in good.arguments]
        arguments[culprit].update(values)
        arguments[culprit].pop(without, None)
        unbound = without or values.keys() - good.parameters.keys()
        if (good.binds_alone and unbound) or good.alone & {without, *values}:
            kind = "absent"
        return Fault(kind, text, culprit, arguments, act)

    def of_tensor() -> Fault:
        name = rng.choice(tensors)
        x = local[name]
        fitting = [what for what, (fits, _) in TENSOR_FAULTS.items() if fits(x)]
        what = rng.choice([*fitting, *fitting, *NOT_TENSORS])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that some layouts are prototypes
            value = TENSOR_FAULTS[what][1](x) if what in TENSOR_FAULTS else NOT_TENSORS[what](x)
        return changed("mistake", f"{name} {'is ' * (what in NOT_TENSORS)}{what}", **{name: value})

    def of_setting() -> Fault:
        name = rng.choice([*settings, *not_given])
        other = _others(name, local.get(name), good.parameters.get(name))
        if other and rng.random() < 0.5:
            value = rng.choice(other)
            return changed("mistake", f"{name}={value!r}, unlike on other ranks", **{name: value})
        what = rng.choice([*NONSENSE])
        return changed("mistake", f"{name}={what}", **{name: NONSENSE[what]()})

    def missing() -> Fault:
        name = rng.choice(passed)
        return changed("mistake", f"without {name}", without=name)

    counts = list(world.rows)
    counts[culprit] += rng.choice([1, 2, 3] if counts[culprit] < 2 else [1, 2, -1])
    elsewhere = replace(world, counts=tuple(counts))
    of_other_rows = make(elsewhere).arguments
    has_rows = _shapes(of_other_rows[culprit]) != _shapes(local)

    def row_control() -> Fault:
        return Fault("legal", f"with {counts[culprit]} rows", culprit, of_other_rows, world=elsewhere)

    def frozen() -> Fault:
        name = rng.choice([k for k in tensors if local[k].is_floating_point()])
        x = local[name].clone()
        x.frozen = True  # type: ignore[attr-defined]
        kind: Kind = "mistake" if name == "centers" else "legal"  # centers are learned on all ranks, or on none
        return changed(kind, f"{name} needs no gradient", **{name: x})

    def raising() -> Fault:
        name = rng.choice([k for k in ("encoder", "loss_fn") if k in local])
        at = rng.randint(0, 6) if name == "encoder" else 0  # the first pass, or the second
        return changed("user", f"{name} raises in its call {at}", **{name: Raises(at)})

    def other_group() -> Fault:
        from wholebatch.comm import LocalCommunicator

        value = rng.choice([LocalCommunicator(), "world", 3])
        return changed("absent", f"group={type(value).__name__}", group=value)

    families: list[tuple[float, bool, Callable[[], Fault]]] = [
        (6, bool(tensors), of_tensor),
        (5, bool(settings or not_given), of_setting),
        (1.5, bool(passed), missing),
        (1.5, True, lambda: changed("mistake", "an unknown keyword", nonsense=1)),
        (1, bool(good.has_backward), lambda: changed("mistake", "under torch.no_grad()", "no_grad")),
        (0.5, bool(good.has_backward), lambda: changed("mistake", "under inference_mode", "inference_mode")),
        (1, not good.binds_alone, lambda: changed("mistake", "another call", "another call")),
        (1.5, has_rows, row_control),
        (0.7, bool(good.has_backward and any(local[k].is_floating_point() for k in tensors)), frozen),
        (4, any(k in local for k in ("encoder", "loss_fn")), raising),
        (0.35, True, lambda: changed("absent", "the call is skipped", "skip")),
        (0.35, "group" in local, other_group),
        (0.35, bool(good.has_backward), lambda: changed("absent", "the backward pass is skipped", "no backward")),
    ]
    possible = [(weight, of) for weight, can, of in families if can]
    (family,) = rng.choices([of for _, of in possible], [weight for weight, _ in possible])
    return family()


def _shapes(arguments: Arguments) -> dict[str, torch.Size]:
    return {k: x.shape for k, x in arguments.items() if isinstance(x, Tensor)}


def _variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _others(name: str, value: Any, parameter: inspect.Parameter | None) -> list[Any]:
    """Return values of the same type with another meaning."""
    if value is None and parameter is not None and parameter.default is not inspect.Parameter.empty:
        value = parameter.default
    annotation = "" if parameter is None else str(parameter.annotation)
    if name in CHOICES:
        return [x for x in CHOICES[name] if x != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value + 2]
    if isinstance(value, float) or "float" in annotation:
        return [0.37, (value or 0.0) + 0.1]
    if isinstance(value, tuple):
        return [value[:-1]]
    if "int" in annotation:
        return [1, 2]
    return []


CHOICES: dict[str, list[Any]] = {
    "sync": ["mean", "sum", None],
    "exchange": [*USED_EXCHANGES],
    "memory": ["auto", "flat", 10**7],
    "reduction": ["mean", "sum", "none"],
    "kernel": ["torch"],
    "equal_ids": ["positive", "excluded"],
    "directions": [("query_to_key",), ("query_to_key", "key_to_query")],
    "partition": ["joint", "per_direction"],
    "distance": ["euclidean", "squared", "cosine"],
    "normalize": ["both", "centers", "none", True, False],
    "margin_grad": ["exact", "straight_through"],
    "strategy": ["gather", "replicate", "root"],
    "op": ["sum", "avg", "max"],
    "dtype": [torch.float32, torch.float64],
    "color": [0, 1, None],
}

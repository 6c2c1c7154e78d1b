"""A right call of a public entry point: this rank's arguments, and the expected result by a dense computation.

All of it follows from a seed, so that every rank knows the arguments of all ranks and the result that each must get.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

D = 6  # width of features
Arguments = dict[str, Any]
Results = dict[str, Tensor]  # by name: the value, and gradients


@dataclass(frozen=True)
class World:
    """The ranks of a call, and the seed of its arguments."""

    seed: str
    rank: int
    size: int
    group: Any  # None, or a communicator
    folder: str  # for files; shared by all ranks
    counts: tuple[int, ...] = ()  # rows of each rank; drawn by default

    @property
    def choices(self) -> random.Random:
        """Return a generator that gives the same numbers each time, for any counts."""
        return random.Random(f"{self.seed} choices")

    @property
    def rows(self) -> tuple[int, ...]:
        """Return each rank's rows: even, uneven or with an empty rank; at least four in all."""
        rng = random.Random(f"{self.seed} rows")
        drawn = [rng.randint(0, 4) for _ in range(self.size)]
        return self.counts or (tuple(drawn) if sum(drawn) >= 4 else (3,) * self.size)

    def generator(self, name: str) -> torch.Generator:
        """Return the generator for the tensor of that name."""
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {name}").getrandbits(60))

    def normal(self, name: str, *shape: int) -> Tensor:
        """Return normal numbers in float64."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator(name))

    def integers(self, name: str, below: int, *shape: int) -> Tensor:
        """Return integers from 0."""
        return torch.randint(0, below, shape, generator=self.generator(name))

    def communicator(self) -> wb.comm.Communicator:
        """Return the communicator of `group`."""
        return wb.comm.select_communicator(self.group)


@dataclass
class Good:
    """A right call on all ranks.

    Attributes:
        arguments: the arguments of each rank, by keyword.
        parameters: the parameters of the entry point, with annotations; a fault may pass one that the good call omits.
        call: makes the call on this rank, runs backward if asked to, and returns value and gradients.
        expected: returns the same for each rank by a dense computation in float64, from the arguments of all ranks and
            one rank's settings.
        construct: the part of the call that is not collective, such as making the module; its result goes to `call`.
        modules: returns the modules whose state an error must not change, from the result of `construct`.
        user: arguments that are functions of the user.
        takes_part: the ranks that the call concerns.
        settings: arguments of `construct`.
        unsafe: arguments that no fault changes.
        culprits: the ranks that may have the fault; None means all.
        binds_alone: whether a call that does not fit the signature raises on this rank alone (a message, or user code).
        alone: arguments that a rank needs to find the ranks to report a mistake to.
        has_backward: whether a backward pass follows.
    """

    arguments: list[Arguments]
    parameters: Mapping[str, Any]
    call: Callable[[Any, Arguments, bool], Results]
    expected: Callable[[list[Arguments], int], list[Results]]
    construct: Callable[[Arguments], Any] = lambda arguments: None
    modules: Callable[[Any], Sequence[nn.Module]] = lambda made: ()
    user: tuple[str, ...] = ()
    takes_part: Sequence[int] | None = None
    settings: frozenset[str] = frozenset()
    unsafe: frozenset[str] = frozenset({"group", "check"})
    culprits: Sequence[int] | None = None
    binds_alone: bool = False
    alone: frozenset[str] = frozenset()
    has_backward: bool = False


Make = Callable[[World], Good]
ENTRIES: dict[str, Make] = {}
PLANTED: dict[str, Make] = {}  # defects that the campaign must detect


def entry(name: str) -> Callable[[Make], Make]:
    """Return a decorator that registers a function that makes right calls of the public name."""

    def register(make: Make) -> Make:
        ENTRIES[name] = make
        return make

    return register


class UserError(Exception):
    """The error that a user's function raises."""


@dataclass
class Raises:
    """A user's function that raises once it has been called `at` times."""

    at: int = 0
    calls: int = 0

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self.calls += 1
        if self.calls > self.at:
            raise UserError("the user's function failed")


def with_gradients(arguments: Arguments, names: Sequence[str]) -> Arguments:
    """Return the arguments with these tensors as leaves that require a gradient."""
    given = dict(arguments)
    for name in names:
        x = given.get(name)
        if isinstance(x, Tensor) and x.is_floating_point() and not getattr(x, "frozen", False):
            given[name] = x.detach().clone().requires_grad_()
    return given


def gradients_of(given: Arguments, names: Sequence[str]) -> Results:
    """Return the gradients of these arguments."""
    found = {}
    for name in names:
        x = given.get(name)
        if isinstance(x, Tensor) and x.requires_grad:
            found[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad.to_dense()
    return found


def same(actual: Results, expected: Results, tolerance: float = 1e-9) -> bool:
    """Return whether both results are equal, to a tolerance that rounding in float64 meets and no mistake does.

    Results in half precision, such as the gradient of a half-precision tensor, get the tolerance of their rounding.
    """
    for name in actual.keys() & expected.keys():
        x, y = actual[name].detach(), expected[name].detach()
        if x.shape != y.shape and not x.numel() == y.numel() == 1:
            return False
        half = x.is_floating_point() and x.dtype.itemsize < 4
        relative = max(tolerance, 4 * torch.finfo(x.dtype).eps) if half else tolerance
        x, y = x.double().flatten(), y.double().flatten()
        finite = y[y.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        if not torch.allclose(x, y, rtol=0.0, atol=relative * (1.0 + size), equal_nan=True):
            return False
    return bool(actual.keys() & expected.keys())

"""A right call of a public entry point: this rank's arguments, and what a dense computation says of the result.

All of it follows from a seed, so that every rank knows the arguments of all ranks, and can say what each must get.
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
    """Where a call is made, and the seed of all that it consists of."""

    seed: str
    rank: int
    size: int
    group: Any  # None, or a communicator
    folder: str  # for files; every rank sees it
    counts: tuple[int, ...] = ()  # rows of each rank; by default drawn

    @property
    def choices(self) -> random.Random:
        """The same numbers each time, whatever the counts are."""
        return random.Random(f"{self.seed} choices")

    @property
    def rows(self) -> tuple[int, ...]:
        """Even, uneven or with an empty rank; never fewer than four in all."""
        rng = random.Random(f"{self.seed} rows")
        drawn = [rng.randint(0, 4) for _ in range(self.size)]
        return self.counts or (tuple(drawn) if sum(drawn) >= 4 else (3,) * self.size)

    def generator(self, name: str) -> torch.Generator:
        """For the tensor of that name."""
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {name}").getrandbits(60))

    def normal(self, name: str, *shape: int) -> Tensor:
        """Normal numbers in float64."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator(name))

    def integers(self, name: str, below: int, *shape: int) -> Tensor:
        """Integers from 0."""
        return torch.randint(0, below, shape, generator=self.generator(name))

    def communicator(self) -> wb.comm.Communicator:
        """The one that `group` stands for."""
        return wb.comm.select_communicator(self.group)


@dataclass
class Good:
    """A right call on all ranks.

    Attributes:
        arguments: of each rank, by keyword.
        parameters: what the entry point takes, with its annotations: a fault may give what the good call does not.
        call: this rank's part: makes the call with its arguments, goes backward if told to, and returns value and
            gradients.
        expected: the same of each rank, from the arguments of all and from one rank's settings: dense, in float64.
        construct: the part of the call that is not collective, such as making the module: its result goes to `call`.
        modules: whose state an error must leave alone, given what `construct` made.
        user: arguments that are the user's own functions.
        takes_part: the ranks that the call concerns.
        settings: arguments of `construct`.
        unsafe: arguments that no fault touches.
        culprits: the ranks that a fault may be on; None: all.
        binds_alone: whether a call that does not fit the signature is this rank's alone: of a message, or of user code.
        alone: arguments without which a rank cannot know whom to tell of a mistake in them.
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
PLANTED: dict[str, Make] = {}  # defects, for the test that the campaign sees them


def entry(name: str) -> Callable[[Make], Make]:
    """Decorator: how to build a right call of the public name."""

    def register(make: Make) -> Make:
        ENTRIES[name] = make
        return make

    return register


class UserError(Exception):
    """What a user's own function raises."""


@dataclass
class Raises:
    """A user's function that raises once it has been called `at` times."""

    at: int = 0
    calls: int = 0

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self.calls += 1
        if self.calls > self.at:
            raise UserError("the user's own function failed")


def with_gradients(arguments: Arguments, names: Sequence[str]) -> Arguments:
    """The same, with these tensors as leaves that require a gradient."""
    given = dict(arguments)
    for name in names:
        x = given.get(name)
        if isinstance(x, Tensor) and x.is_floating_point() and not getattr(x, "frozen", False):
            given[name] = x.detach().clone().requires_grad_()
    return given


def gradients_of(given: Arguments, names: Sequence[str]) -> Results:
    """What a backward pass has left in them."""
    found = {}
    for name in names:
        x = given.get(name)
        if isinstance(x, Tensor) and x.requires_grad:
            found[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad.to_dense()
    return found


def same(actual: Results, expected: Results, tolerance: float = 1e-9) -> bool:
    """Whether what both have is the same, to a tolerance that rounding in float64 meets and no mistake does.

    What is in half precision, such as the gradient of a tensor in it, is compared with its own rounding.
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

"""One rank's part of a case: the right call, the call with the fault, the right call again; each on request."""

from __future__ import annotations

import copy
import random
import traceback
from contextlib import nullcontext
from typing import Any

import communicator_calls  # noqa: F401  # these four register how each public name is called
import heads_calls  # noqa: F401
import losses_calls  # noqa: F401
import pair_calls  # noqa: F401
import planted  # noqa: F401
import steps_calls  # noqa: F401
import torch
from good_calls import ENTRIES, PLANTED, Arguments, Good, Raises, Results, UserError, World, same
from mistakes import Fault, draw
from torch import Tensor, nn

import wholebatch as wb

ALLOWED = (ValueError, TypeError, wb.comm.CommunicationError, UserError)


class Case:
    """One fault in one call, on this rank.

    Args:
        seed: the seed of the whole case, the same on all ranks.
        name: the name of the entry point.
        rank, size, group, folder: the ranks and the folder of the call.
    """

    def __init__(self, seed: str, name: str, rank: int, size: int, group: Any, folder: str) -> None:
        self.world = World(seed, rank, size, group, folder)
        make = {**ENTRIES, **PLANTED}[name]
        self.good = make(self.world)
        self.fault: Fault = draw(random.Random(f"{seed} fault"), make, self.good, self.world)
        self.faulty: Good = make(self.fault.world) if self.fault.world is not None else self.good
        self.wrong_here = self.fault.culprit == rank
        self.made: Any = None
        self._constructed: Arguments = {}

    def facts(self) -> dict[str, Any]:
        """Return the facts that classify the case."""
        take_part = list(self.good.takes_part or range(self.world.size))
        return {"kind": self.fault.kind, "text": self.fault.text, "culprit": self.fault.culprit, "ranks": take_part}

    def healthy(self) -> dict[str, Any]:
        """Make the right call; return whether it equals the dense computation, and its bits."""
        arguments = self.good.arguments[self.world.rank]

        def act() -> dict[str, Any]:
            results = self.good.call(self.good.construct(_copied(arguments)), _copied(arguments), True)
            expected = self.good.expected(self.good.arguments, 0)[self.world.rank]
            return {"right": same(results, expected), "bits": _bits(results)}

        return _outcome(act)

    def construct(self) -> dict[str, Any]:
        """Run the part of the faulty call that is not collective and comes first."""

        def act() -> dict[str, Any]:
            self._constructed = self._arguments()
            self.made = self.faulty.construct(self._constructed)
            return {}

        return _outcome(act)

    def call(self) -> dict[str, Any]:
        """Make the faulty call; return whether the result is right by any rank's settings, or whether state changed."""
        act = self.fault.act if self.wrong_here else "call"
        before = _state(self.faulty.modules(self.made))

        def run() -> dict[str, Any]:
            if act == "skip":
                return {"right": [True], "skipped": True}
            if act == "another call":
                self.world.communicator().all_reduce(torch.ones(5))
                return {"right": []}
            context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(act, nullcontext)
            with context():
                results = self.faulty.call(self.made, self._arguments(), act != "no backward")
            if act == "no backward":
                results = {"value": results["value"]}
            right = not self._raised()
            return {"right": [right and self._is_right(results, of) for of in (self._other, self.fault.culprit)]}

        outcome = _outcome(run)
        outcome["untouched"] = _alike(before, _state(self.faulty.modules(self.made)))
        return outcome

    @property
    def _other(self) -> int:
        return (self.fault.culprit + 1) % self.world.size

    def _arguments(self) -> Arguments:
        return _copied(self.fault.arguments[self.world.rank])

    def _raised(self) -> bool:
        """Return whether the user's function raised in a call that still returned a result."""
        return any(isinstance(x, Raises) and x.calls > x.at for x in self._constructed.values())

    def _is_right(self, results: Results, settings_of: int) -> bool:
        """Return whether these equal the dense computation's results, if it accepts the arguments."""
        try:
            expected = self.faulty.expected(self.fault.arguments, settings_of)
        except Exception:
            return False
        return same(results, expected[self.world.rank])


def _copied(arguments: Arguments) -> Arguments:
    """Return the arguments with new copies of the user's functions, which count their calls."""
    return {k: copy.copy(x) if isinstance(x, Raises) else x for k, x in arguments.items()}


def _outcome(act: Any) -> dict[str, Any]:
    try:
        return {"error": None, **act()}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "allowed": isinstance(error, ALLOWED),
            "transport": isinstance(error, wb.comm.CommunicationError),
            "user": isinstance(error, UserError),
            "trace": traceback.format_exc(),
        }


def _bits(results: Results) -> str:
    return repr({k: x.detach().contiguous().flatten().view(torch.uint8).tolist() for k, x in sorted(results.items())})


def _state(modules: Any) -> list[Tensor | None]:
    """Return parameters, their gradients and buffers."""
    found: list[Tensor | None] = []
    for module in modules:
        if isinstance(module, nn.Module):
            found += [x.detach().clone() for x in (*module.parameters(), *module.buffers())]
            found += [None if p.grad is None else p.grad.to_dense().clone() for p in module.parameters()]
    return found


def _alike(before: list[Tensor | None], after: list[Tensor | None]) -> bool:
    return len(before) == len(after) and all(
        (x is None) == (y is None) and (x is None or y is None or torch.equal(x, y))
        for x, y in zip(before, after, strict=True)
    )

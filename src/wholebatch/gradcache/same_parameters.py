"""Parameters are the same in both passes of a step, and those that ranks hold copies of are the same on all ranks.

If one changes between the two passes of a chunk, the gradient would be that of neither. autograd counts the changes of
a tensor in place (`_version`), such as an optimizer's step. It does not see changes through `.data`, which some engines
make; these have a `state`. The comparison of both passes' representations sees the effect of others. That comparison
also guards the parameters that a model changes itself in each forward pass, such as a temperature that it clamps.

A step cannot know whether its gradients will be reduced: the loss is right, and the caller may reduce them later. But
after an optimizer step with unreduced gradients, ranks hold different parameters. Some steps compare these by

    checksum     64 bits for a parameter; another bit, sign or order of entries gives another number
    digest       one text for all checksums of a rank, sent in a handshake that the step makes anyway

If digests differ, the ranks send all checksums in a second handshake, to find the first parameter that differs.

A parameter that not all ranks have used (a function may call other modules on other ranks) is not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._base import not_reduced
from .._base.checksum import checksum
from .._base.modules import parameters_in
from .._base.sharded import is_sharded
from .chunks import Encoder
from .engines.ddp import parameters_of_ddp
from .engines.known import Synchronized, control_of
from .observe import modules_of, versions_of


class Versions:
    """The versions of the parameters of encoders, at the end of the first pass."""

    def __init__(self, encoders: Iterable[Encoder]) -> None:
        self._then: dict[int, tuple[str, Tensor, int]] = {}
        self._states: list[tuple[str, Synchronized, object]] = []
        for encoder in encoders:
            self._states += [(encoder.name, engine, engine.state()) for engine in encoder.calls.engines.values()]
            held = parameters_in(*encoder.calls.modules.values())
            if not any(engine.control.sharded for engine in encoder.calls.engines.values()):
                held += encoder.leaves  # of modules that were not observed; a shard's whole parameter comes and goes
            now = versions_of(held)
            still = [p for p in held if encoder.calls.versions.get(id(p), now[id(p)]) == now[id(p)]]
            self._then = {id(p): (encoder.name, p, now[id(p)]) for p in still} | self._then

    def check(self) -> None:
        """Raise ValueError if one has changed since."""
        now = versions_of(p for _, p, _ in self._then.values())
        for key, (name, p, version) in self._then.items():
            if now[key] != version:
                raise _change_error(f"a parameter of {name}, of shape {tuple(p.shape)}, has")
        for name, engine, state in self._states:
            if engine.state() != state:
                raise _change_error(f"parameters of {name}, which {type(engine.module).__name__} holds, have")


def _change_error(start: str) -> ValueError:
    return ValueError(
        f"{start} been changed since the forward pass of this loss (by an optimizer's step?), so that the second pass "
        "would not repeat the first: go backward first, then change parameters"
    )


STATES, EVERY = 3, 100  # steps compare until they have seen so many states of the parameters, and then one in so many

_comparing = [True]


@dataclass
class History:
    """The steps of a cache, and what their comparisons have seen.

    Micro-steps of one optimizer step find the same parameters. So states are counted, not steps.
    """

    steps: int = 0  # that all ranks have made
    ways: set[frozenset[int]] = field(default_factory=set)  # modules that a model called, where no engine was passed by
    _states: int = 0  # of the parameters, each compared once or more
    _sums: dict[str, int] = field(default_factory=dict)  # the latest checksums, by name

    def due(self) -> bool:
        """Return whether the next step compares parameters."""
        return _comparing[0] and ((self._states < STATES and self.steps < EVERY) or (self.steps + 1) % EVERY == 0)

    def compared(self, sums: Mapping[str, int]) -> None:
        """Note that the ranks have compared parameters with these checksums, and that they are the same."""
        self._states += not self._sums or any(self._sums.get(name, new) != new for name, new in sums.items())
        self._sums |= sums


@contextmanager
def without_comparison() -> Iterator[None]:
    """Let ranks hold different parameters inside: the audit moves those of one rank."""
    before, _comparing[0] = _comparing[0], False
    try:
        yield
    finally:
        _comparing[0] = before


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of 64 bits of each tensor, by name; this waits once for a GPU.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, float("nan")])
    >>> same, negative, moved = checksums({"same": x.clone(), "negative": -x, "moved": x.flip(0)}).values()
    >>> checksums({"x": x})["x"] == same, len({same, negative, moved})
    (True, 3)
    """
    by_name: dict[str, int] = {}
    for device in dict.fromkeys(x.device for x in tensors.values()):  # in the same order on every rank
        on_device = {name: x for name, x in tensors.items() if x.device == device}
        sums = [checksum(x.detach()) for x in on_device.values()]
        by_name.update(zip(on_device, torch.stack(sums).tolist(), strict=True))
    return by_name


def digest(sums: Mapping[str, int]) -> str:
    """Return one text for all checksums and their names."""
    return hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()


def check_same(everyone: Sequence[Mapping[str, int]], *, steps: int) -> None:
    """Raise ValueError, naming the first parameter that differs, if the checksums of two ranks do not agree.

    Parameters that a rank does not have are left out. `steps` is the number of steps so far.
    """
    for name, ours in everyone[0].items():
        ranks = [rank for rank, rank_sums in enumerate(everyone) if rank_sums.get(name, ours) != ours]
        if not ranks or any(name not in rank_sums for rank_sums in everyone):
            continue
        if not steps:
            why = (
                "they differ before the first step of this GradCache. Make models from the same seed on each rank, or "
                "broadcast their parameters, as DistributedDataParallel does; if an optimizer has made steps before, "
                f"its gradients were not reduced ({not_reduced.FIX})"
            )
        else:
            why = (
                "an optimizer step has driven them apart, since its gradients were not reduced, or not alike (scaled "
                f"by each rank's own norm?): {not_reduced.TITLE}. {not_reduced.FIX}; without an engine, reduce "
                "gradients of all ranks before the optimizer's step. Or a GradScaler has found an overflow on one rank "
                "alone and skipped the step there: call wholebatch.heads.agree_on_overflow after scaler.unscale_"
            )
        raise ValueError(
            f"GradCache: parameters must be the same on all ranks, and rank 0 and rank {ranks[0]} have different "
            f"values of {name}: {why}. Parameters that differ between ranks on purpose (experts, tensor parallel) go "
            "into unchecked="
        )


def replicated(
    encoders: Sequence[Encoder], loss_fn: object, loss_leaves: Sequence[Tensor], unchecked: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Return the parameters that a step trains and every rank has a copy of, by names that all ranks share.

    Those of the loss are leaves of its graph, `loss_leaves`; those in `unchecked` are left out.
    """
    done, parameters = {id(p) for p in unchecked}, dict[str, Tensor]()

    def add(owner: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, p in named:
            if id(p) not in done and _is_comparable(p):
                done.add(id(p))
                parameters[f"{name!r} of {owner} {tuple(p.shape)}"] = p

    for encoder in encoders:
        called = {id(p) for _, p in _named_of(encoder.calls.modules.values())}
        add(encoder.name, ((name, p) for name, p in _named_of(encoder.visible) if id(p) in called))
        add(encoder.name, _named_of(encoder.calls.modules.values(), "hidden "))
        if not any(engine.control.sharded for engine in encoder.calls.engines.values()):
            add(encoder.name, _unnamed_parameters(encoder.leaves))
    in_loss = {id(p) for p in loss_leaves}
    add("loss_fn", ((name, p) for name, p in _named_of(modules_of(loss_fn)) if id(p) in in_loss))
    add("loss_fn", _unnamed_parameters(loss_leaves))
    return parameters


def _named_of(modules: Iterable[nn.Module], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for index, module in enumerate(modules):
        number = f"[{index}]." if index else ""
        for name, p in _replicated_parameters(module):
            yield f"{prefix}{number}{name}", p


def _replicated_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters by name, without those that an engine shards over the ranks."""
    control = control_of(module)
    if control is not None and control.sharded:
        return
    if isinstance(module, DistributedDataParallel):
        yield from ((f"{prefix}module.{name}", p) for name, p in parameters_of_ddp(module))
        return
    for name, p in module.named_parameters(recurse=False):
        yield prefix + name, p
    for name, child in module.named_children():
        yield from _replicated_parameters(child, f"{prefix}{name}.")


def _unnamed_parameters(leaves: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return parameters of no known module, numbered in their order."""
    return ((f"parameter {number}", p) for number, p in enumerate(leaves) if isinstance(p, nn.Parameter))


def _is_comparable(p: Tensor) -> bool:
    """Return whether a parameter is trained, has its entries here, and is a copy of other ranks' parameter."""
    if not p.requires_grad or is_sharded(p) or p.layout is not torch.strided or p.device.type == "meta":
        return False
    return p.untyped_storage().nbytes() >= p.numel() * p.element_size()  # an engine may have freed it

"""The entry of a step: inputs become chunks, all ranks agree that their calls are valid, and the first pass is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..comm import Group, select_communicator
from .agreement import agree
from .chunks import Chunk, facts_of, filled_up
from .engines.known import synchronized
from .kept_graphs import Keeper, devices_of
from .same_parameters import History
from .step import Step

_GRAD_ENABLED = "torch.is_grad_enabled()"
_latest = 0  # number of this rank's latest call


def first_passes(
    name: str,
    make_cache: Callable[[], Any],  # a GradCache, whose module imports this one
    inputs: Sequence[Any],
    *,
    group: Group,
    history: History,
    deferred: bool,
) -> Step:
    """Return a step after its first pass.

    Collective: two handshakes, and the passes of engines whose passes are collective.

    Args:
        name: of the caller, for messages.
        make_cache: returns the GradCache with the caller's options; its errors raise on all ranks.
        inputs: one for each model.
        group: the caller's.
        history: the steps that were made before.
        deferred: whether autograd makes the second passes; without it, gradients must be enabled.
    """
    global _latest  # noqa: PLW0603
    comm = select_communicator(group)
    caches: list[Any] = []
    chunks: list[Chunk] = []

    def split() -> dict[str, Any]:
        if not deferred and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise ValueError(
                "a step of GradCache is forward and backward, and must not be under torch.no_grad() or "
                "inference_mode; for the loss alone give GradCache deferred=True, or call the models, and loss_fn of "
                "their representations"
            )
        caches.append(make_cache())
        chunks.extend(caches[0]._chunks(inputs))
        visible = synchronized(module for chunk in chunks if chunk.first for module in chunk.encoder.visible)
        return {
            **facts_of(chunks, len(inputs)),
            "keep_graphs": caches[0].keep_graphs,
            "collective": comm.size > 1 and any(engine.control.collective for engine in visible),
            "latest call": _latest,
            _GRAD_ENABLED: torch.is_grad_enabled(),
        }

    everyone = agree(comm, split, caller=name)
    (cache,) = caches
    _latest = 1 + max(facts.pop("latest call") for facts in everyone)
    enabled = [facts[_GRAD_ENABLED] for facts in everyone]
    if any(other != enabled[0] for other in enabled):
        raise ValueError(
            f"{name}: {_GRAD_ENABLED} must be the same on all ranks, got {enabled}: evaluate under torch.no_grad() on "
            "all ranks, or pass group=wb.comm.LocalCommunicator() to evaluate on one"
        )
    if any(facts["collective"] for facts in everyone):
        chunks = filled_up(chunks, everyone)
    alike = all(facts == everyone[0] for facts in everyone) and cache.keep_graphs != "auto"
    devices = [devices_of(c.encoder.visible, inputs[c.encoder.index]) for c in chunks if c.first]
    step = Step(comm, chunks, cache.unchecked, history, call_number=_latest, name=name, deferred=deferred)
    kinds = {device.type for of_model in devices for device in of_model}
    step.autocast = partial(_autocast, kinds if cache.fp16 else ())
    keeper = Keeper(cache.keep_graphs, len(chunks), cache.memory_budget, devices)
    with step.autocast():
        step.encode(keeper, may_be_collective=alike or everyone[0]["collective"])
    return step


@contextmanager
def _autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Cast to float16 on these kinds of devices inside."""
    with ExitStack() as stack:
        for kind in sorted(kinds):
            stack.enter_context(torch.autocast(kind, torch.float16))
        yield

"""A step over chunks of a batch: two passes, and the gradient of representations between them.

    first pass     r_c = encode(x_c), chunk by chunk, without a graph (or with one that is kept)
    loss           L(r), g = dL/dr, of all representations at once
    second pass    r_c once more, with its graph, and its backward pass from g_c

    dL/dtheta = sum_c (dr_c/dtheta)^T g_c

At no time is there more than one chunk's graph, besides those that are kept. The sum is that of autograd over the whole
batch, so nothing is approximated; the second r_c must equal the first (see `replay`), and a step checks that it does.

A step is the first pass, the checks, and the gradients g once they have arrived. `second_passes` makes the second
passes of one step, or of all that one backward pass has reached. Who calls it is another matter: see `step_loss`.

Engines synchronize in the last backward pass of their module, and these come in the order of the models on every rank,
whatever each rank keeps: kept graphs have theirs before, and where an engine decides in the forward pass, no graph of a
model's last chunk is kept, since between that forward pass and its backward pass there must be no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .._base.modules import parameters_in
from ..comm import Communicator
from .agreement import Gradients, agree, raise_error
from .chunks import Chunk, Encoder
from .engines.ddp import DDP
from .engines.known import Synchronized
from .engines.lost_gradients import HOW_TO_REGISTER, check_not_passed_by, live_engines
from .join import joined
from .kept_graphs import Keeper
from .observe import Observer
from .outer_engine import Enclosing, enclosed_by, hooks_of_others
from .passes import coalesced, first_pass, second_pass
from .replay import Buffers
from .same_parameters import History, Versions, check_same, checksums, digest, replicated

_WAYS = 100  # to call modules, of which each is checked once


@dataclass(eq=False)
class Step:
    """One step."""

    comm: Communicator  # the ranks that make it together
    chunks: Sequence[Chunk]  # this rank's, of all models, in order
    unchecked: Sequence[Tensor]  # parameters that are not compared between ranks
    history: History  # the steps that were made before
    call_number: int  # among all calls, the same on all ranks
    name: str  # of the function that was called, for messages
    deferred: bool  # whether autograd makes the second passes; otherwise the caller makes them
    autocast: Callable[[], AbstractContextManager[Any]]  # of the first passes and of the loss
    buffers: Buffers = field(default_factory=Buffers)
    loss_fn: object = None
    loss_leaves: list[Tensor] = field(default_factory=list)  # the leaves of the loss's graph
    done: bool = False  # whether the second passes have begun
    counted: bool = False  # and added the gradient

    def __post_init__(self) -> None:
        self._steps_before = self.history.steps  # steps that one backward pass reaches are counted as one
        self._sums: dict[str, int] = {}  # checksums of parameters, if this step compares them

    def encode(self, keeper: Keeper, *, may_be_collective: bool) -> None:
        """Make the first pass; if it fails on one rank, raise on all.

        `may_be_collective` says whether a call may turn out to use an engine whose passes are collective.
        """
        trained = agree(self.comm, partial(self._encode, keeper, may_be_collective), caller=self.name)
        if any(other != trained[0] for other in trained):
            raise ValueError(
                f"{self.name}: the same representations must have a gradient on all ranks, got {trained}: freeze the "
                "same parameters on all ranks"
            )

    def _encode(self, keeper: Keeper, may_be_collective: bool) -> list[list[bool]]:
        """Make the first pass, join the chunks, and return which representations of each model have a gradient."""
        first_pass(self.chunks, keeper, Observer(self.buffers, may_be_collective=may_be_collective))
        if torch.is_grad_enabled():
            live = cache(live_engines)
            for encoder in self.encoders():
                self._check(encoder, live)
        for encoder in self.encoders():
            encoder.leaves_of_all_chunks = joined(self._chunks_of(encoder))
        self._versions = Versions(self.encoders())
        self._as_encoded = [x._version for x in self.leaves()] if not torch.is_inference_mode_enabled() else []
        return [encoder.trained for encoder in self.encoders()]

    def _check(self, encoder: Encoder, live: Callable[[], Sequence[nn.Module]]) -> None:
        """Raise ValueError if gradients of the encoder's parameters would not be reduced, or used too early."""
        chunks = self._chunks_of(encoder)
        outer = enclosed_by(encoder) if self.deferred else None
        if outer is not None:
            encoder.calls.engines[id(outer.module)] = outer
            for chunk in chunks:
                chunk.engines = [*(e for e in chunk.engines if e.module is not outer.module), outer]
        _check_hooks(chunks[-1])
        way = frozenset(encoder.calls.modules)
        if way not in self.history.ways and len(self.history.ways) < _WAYS:
            seen, engines = encoder.calls.seen.values(), encoder.calls.engines.values()
            check_not_passed_by(encoder.name, encoder.leaves, seen, engines, live, self.unchecked)
            self.history.ways.add(way)

    def encoders(self) -> list[Encoder]:
        """Return the encoders, in order."""
        return [chunk.encoder for chunk in self.chunks if chunk.first]

    def engines(self) -> list[Synchronized]:
        """Return the engines that the first pass has called."""
        return [*{id(e.module): e for chunk in self.chunks for e in chunk.engines}.values()]

    def _chunks_of(self, encoder: Encoder) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.encoder is encoder]

    def leaves(self) -> list[Tensor]:
        """Return all models' representations, without graphs; those that have a gradient require it."""
        return [x for encoder in self.encoders() for x in encoder.leaves_of_all_chunks]

    def formed(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return each model's representations in its form, from the tensors that stand for `leaves`."""
        left = iter(tensors)
        return [encoder.form([*islice(left, len(encoder.leaves_of_all_chunks))]) for encoder in self.encoders()]

    def remember(self, gradients: Gradients) -> None:
        """Remember the gradients that the step is going to change."""
        known = [p for encoder in self.encoders() for p in encoder.parameters.values()]
        if not all(p.is_leaf for p in known):  # FSDP1, during its forward pass, has views in place of its parameters
            known = parameters_in(*(engine.module for engine in self.engines()))
        gradients.remember(known, self.engines())

    def begin(self, error: Exception | None) -> None:
        """Agree on the second passes, before anything has changed; raise on all ranks if these may not be made.

        So does an error of this rank. A second backward pass raises on the ranks that make it.
        """
        if self.done:
            gradient = "its gradient is counted" if self.counted else "it has failed"
            raise ValueError(
                f"this call of {self.name} has had its backward pass, and {gradient}: call {self.name} again for "
                "another backward pass"
            )

        def state() -> str:
            raise_error(error)
            self._versions.check()
            return self.digest()

        self.compare(agree(self.comm, state, caller=f"backward of {self.name} #{self.call_number}"))

    def digest(self) -> str:
        """Return one text for the checksums of parameters that all ranks hold, if this step compares them."""
        compares = self.comm.size > 1 and self.history.due()
        tensors = replicated(self.encoders(), self.loss_fn, self.loss_leaves, self.unchecked) if compares else {}
        self._sums = checksums(tensors)
        return digest(self._sums)

    def compare(self, digests: Sequence[str]) -> None:
        """Raise ValueError on all ranks if the ranks' digests differ, and name the parameter."""
        if any(other != digests[0] for other in digests):
            check_same(agree(self.comm, lambda: self._sums, caller=self.name), steps=self._steps_before)
        if self._sums:
            self.history.compared(self._sums)

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of the representations, in the order of `leaves`."""
        left = iter(gradients)
        for encoder in self.encoders():
            encoder.gradients = [*islice(left, len(encoder.leaves_of_all_chunks))]

    def settle_engines(self) -> None:
        """Find out which enclosing engines wait for the second passes; those that do not are engines like others.

        An engine does not wait if its caller has not prepared it. One that has not waited, but should have, is a
        ValueError on all ranks.
        """
        enclosing = [(m, e) for m in self.encoders() for e in m.calls.engines.values() if isinstance(e, Enclosing)]

        def state() -> None:
            for encoder, engine in enclosing:
                if engine.waits():
                    engine.check(encoder.name)
                    continue
                engine.unwatch()
                for chunk in self._chunks_of(encoder):
                    chunk.engines = [engine.inner if e is engine and engine.inner else e for e in chunk.engines]

        if enclosing:
            agree(self.comm, state, caller=self.name)

    def mistake(self) -> ValueError | None:
        """Return an error if a representation has no gradient, or has been changed in place."""
        versions = iter(self._as_encoded)
        for encoder in self.encoders():
            grads = encoder.gradients or [None] * len(encoder.leaves_of_all_chunks)
            for number, (x, grad) in enumerate(zip(encoder.leaves_of_all_chunks, grads, strict=True)):
                if x._version != next(versions):
                    return ValueError(
                        f"representation {number} of {encoder.name} was changed in place after the first pass, which "
                        "is compared with the second: change a copy, as in x.clone().div_(2)"
                    )
                if x.requires_grad and x.dim() and grad is None:
                    return ValueError(
                        f"the loss does not depend on representation {number} of {encoder.name}; leave out models that "
                        "it does not train"
                    )
        return None

    def count(self) -> None:
        """Count the step, which all ranks have made, and free its chunks, whatever still refers to it."""
        self.counted = True
        self.history.steps = self._steps_before + 1
        self.buffers, self.chunks, self._versions = Buffers(), (), Versions(())


def second_passes(steps: Sequence[Step], gradients: Gradients, error: Exception | None = None) -> None:
    """Make the second passes of these steps, in this order; afterward all ranks raise, or none does.

    Each engine synchronizes once, in its last pass. Buffers keep the values that they have now. A rank with an error
    makes the passes nevertheless, since other ranks do not know yet.
    """
    for step in steps:
        step.settle_engines()
    for step in steps:
        step.done = True
    error = error or next((e for e in (step.mistake() for step in steps) if e is not None), None)
    first = {id(chunk) for step in steps if not step._steps_before for chunk in step.chunks}
    chunks = [chunk for step in steps for chunk in step.chunks]
    with coalesced(chunks):
        with ExitStack() as stack:
            for step in steps:
                stack.enter_context(step.buffers.kept())
            failed = second_pass(chunks, gradients.remember, watch=lambda chunk: id(chunk) in first)
        _end_together(steps, error or failed)
    for step in steps:
        step.count()


def _end_together(steps: Sequence[Step], error: Exception | None) -> None:
    """Raise if a rank has an error, on all ranks of all steps; the steps may have different groups of ranks."""
    for step in steps:
        try:
            agree(step.comm, partial(raise_error, error), caller=step.name)
        except Exception as mistake:
            error = error or mistake
    raise_error(error)


def _check_hooks(chunk: Chunk) -> None:
    """Raise ValueError if a hook runs whenever a gradient is accumulated, which each chunk does.

    Engines may have such hooks. DDP has none, so those of its parameters are the caller's; where its engine must not
    see the other passes, they run in the last one only.
    """
    engines = [e for e in chunk.engines if e.control is not DDP or e.hides]
    owned = {id(p) for p in parameters_in(*(engine.module for engine in engines))}
    for p in chunk.encoder.parameters.values():
        if id(p) not in owned and hooks_of_others(p):
            raise ValueError(
                f"a parameter of {chunk.encoder.name}, of shape {tuple(p.shape)}, has a hook for "
                "when its gradient is accumulated, which is in every chunk. An optimizer in the backward pass? Step it "
                f"after the cached step. An engine that gradient caching does not know? {HOW_TO_REGISTER}"
            )

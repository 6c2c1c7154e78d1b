"""A step over chunks of a batch: two passes, and the gradient of representations between them.

    first pass     r_c = encode(x_c), chunk by chunk, without a graph (or with one that is kept)
    loss           L(r), g = dL/dr, of all representations at once
    second pass    r_c once more, with its graph, and its backward pass from g_c

    dL/dtheta = sum_c (dr_c/dtheta)^T g_c

At no time is there more than one chunk's graph, besides those that are kept. The sum is that of autograd over the whole
batch, so nothing is approximated; the second r_c must equal the first (see `replay`), and a step checks that it does.

Engines synchronize in the last backward pass of their module, and these come in the order of the models on every rank,
whatever each rank keeps: kept graphs have theirs before, and where an engine decides in the forward pass, no graph of a
model's last chunk is kept, since between that forward pass and its backward pass there must be no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from .._graph import checked_loss, leaves_of
from ..comm import Communicator
from .agreement import agree, agree_after, end_together
from .chunks import Chunk, Encoder, joined
from .first_pass import first_pass
from .keep import Keeper
from .observe import Observer
from .passed_by import check_not_passed_by
from .replay import Buffers
from .replicas import check_same, checksums, digest, due, replicated
from .rollback import Remember, gradients_restored, moved_once
from .second_pass import Pairs, second_pass


class Scaler(Protocol):
    """Scales a loss, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Return the loss times the scale."""
        ...


@dataclass(eq=False)
class Step:
    """One step.

    Args:
        comm: the ranks that make it together.
        chunks: this rank's chunks of all models, in order.
        compute_loss: the loss of all representations.
        scaler: scales the loss before its gradient is taken, or None.
        unchecked: parameters that are not compared between ranks.
        number: how many steps were made before.
    """

    comm: Communicator
    chunks: Sequence[Chunk]
    compute_loss: Callable[..., Tensor]
    scaler: Scaler | None
    unchecked: Sequence[Tensor]
    number: int
    buffers: Buffers = field(default_factory=Buffers)
    found: list[list[Tensor]] = field(default_factory=list)  # each model's representations, as leaves
    of_loss: list[Tensor] = field(default_factory=list)  # the leaves of the loss's graph

    def run(self, keeper: Keeper, loss_kwargs: Mapping[str, Any], *, may_be_collective: bool) -> Tensor:
        """Add the gradients, and return the loss.

        Args:
            keeper: decides which graphs are kept.
            loss_kwargs: passed on to the loss.
            may_be_collective: whether a call may turn out to use an engine whose passes are collective.
        """
        with gradients_restored() as remember, moved_once(self.buffers) as state:
            agree(self.comm, partial(self._encode, keeper, may_be_collective))
            engines = {id(e.module): e for chunk in self.chunks for e in chunk.engines}
            remember((p for encoder in self._encoders() for p in encoder.parameters.values()), engines.values())
            owned = {id(p) for engine in engines.values() for p in engine.module.parameters()}
            sums: dict[str, int] = {}
            (loss, gradients, extra), digests = agree_after(
                self.comm, partial(self._differentiate, loss_kwargs, owned, remember), partial(self._digest, sums)
            )
            if any(other != digests[0] for other in digests):
                check_same(agree(self.comm, lambda: sums), steps=self.number)
            state.extend(self.buffers.now())
            error = second_pass(self.chunks, gradients, extra, self.buffers, remember, watch=not self.number)
            end_together(self.comm, error)
        return loss

    def _encoders(self) -> Iterator[Encoder]:
        return (chunk.encoder for chunk in self.chunks if chunk.first)

    def _encode(self, keeper: Keeper, may_be_collective: bool) -> None:
        """Make the first pass, check its models, and join the chunks' representations."""
        first_pass(self.chunks, keeper, Observer(self.buffers, may_be_collective=may_be_collective))
        for chunk in self.chunks:
            if chunk.last:
                _check_hooks(chunk)
            if chunk.first and not self.number:
                of = chunk.encoder
                check_not_passed_by(of.name, of.leaves, of.seen.values(), of.synchronized.values(), self.unchecked)
        for encoder in self._encoders():
            self.found.append(joined([chunk for chunk in self.chunks if chunk.encoder is encoder]))

    def _differentiate(
        self, loss_kwargs: Mapping[str, Any], owned: set[int], remember: Remember
    ) -> tuple[Tensor, list[list[Tensor | None]], Pairs]:
        """Return the loss, the gradients of each model's representations, and those of engines' parameters."""
        reps = [encoder.form(x) for encoder, x in zip(self._encoders(), self.found, strict=True)]
        loss = checked_loss(self._loss(reps, loss_kwargs)).reshape(())
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: loss_fn must not detach representations, or run under no_grad")
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        self.of_loss.extend(leaves_of([scaled]))
        remember(self.of_loss)
        return loss.detach(), *_gradients(scaled, self.found, owned)

    def _loss(self, reps: list[Any], loss_kwargs: Mapping[str, Any]) -> Any:
        """Call the loss; if it refuses the arguments, a note says what they are."""
        try:
            return self.compute_loss(*reps, **loss_kwargs)
        except TypeError as error:
            if len(reps) == 1 and not isinstance(reps[0], Tensor) and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    f"GradCache: one model is one argument of loss_fn, here a {type(reps[0]).__name__}; to pass its "
                    "parts as arguments: loss_fn=lambda out: your_loss(*out)"
                )
            raise

    def _digest(self, sums: dict[str, int]) -> str:
        """Return one text for the checksums of parameters that all ranks hold, and put these into `sums`."""
        if self.comm.size > 1 and due(self.number):
            sums |= checksums(replicated([*self._encoders()], self.compute_loss, self.of_loss, self.unchecked))
        return digest(sums)


def _check_hooks(chunk: Chunk) -> None:
    """Raise ValueError if an optimizer steps in the backward pass, of which each chunk makes one."""
    owned = {id(p) for engine in chunk.engines for p in engine.module.parameters()}
    for p in chunk.encoder.parameters.values():
        if id(p) not in owned and getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a parameter of {chunk.encoder.name}, of shape {tuple(p.shape)}, has a hook for "
                "when its gradient is accumulated (an optimizer in the backward pass?), which is in every chunk. Step "
                "the optimizer after the cached step"
            )


def _gradients(
    loss: Tensor, found: Sequence[Sequence[Tensor]], owned: set[int]
) -> tuple[list[list[Tensor | None]], Pairs]:
    """Go backward from the loss; return the gradients of representations, and of parameters in `owned`.

    `owned` has the parameters of engines, some of which the loss may use directly. Others get their gradients here.
    """
    taken = [p for p in leaves_of([loss]) if id(p) in owned]
    before = [p.grad for p in taken]
    for p in taken:
        p.grad = None
    loss.backward()
    extra = [(p, p.grad) for p in taken if p.grad is not None]
    for p, grad in zip(taken, before, strict=True):
        p.grad = grad
    for model, of_model in enumerate(found):
        for number, x in enumerate(of_model):
            if x.requires_grad and x.dim() and x.grad is None:
                raise ValueError(
                    f"the loss does not depend on representation {number} of model {model}; leave out models that it "
                    "does not train"
                )
    return [[x.grad for x in of_model] for of_model in found], extra

"""The loss of a step, whose gradient the step takes itself, or the backward pass of a caller brings.

    forward     x_c -> r_c, without graphs;  r = all r_c, whose node stands for the encoders;  L(r), with its graph
    backward    node of L      check, before any gradient has changed, that these passes may be made
                graph of L     s dL/dr, times whatever gradient s comes in
                node of r      keep that gradient
                at the end     forward again and backward, chunk by chunk, for all steps of this backward pass

In a backward pass of the caller the second passes are made in a callback that autograd calls after all nodes, as the
engines of DDP and FSDP do with their last work. So all steps that one backward pass reaches (several caches in one
loss, several forward passes before one backward pass) are known by then, and an engine synchronizes once. Engines that
have been called without caching in the same loss have finished their own reductions: a callback that installs another
one is followed by it.

A step belongs to the graph. If its backward pass never comes, it is freed with the loss.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from .._base.graph import leaves_of
from .agreement import Gradients, agree_after
from .engines.fsdp import keep_accumulated_of_fsdp1
from .step import Step, second_passes

_LOCK = threading.Lock()  # nodes of several devices run in several threads


class BackwardPass:
    """A backward pass of the caller, and the steps whose losses or representations it has reached."""

    def __init__(self) -> None:
        self.gradients = Gradients()
        self._error: Exception | None = _error_of_this_backward_pass()
        self._others_know = False
        self._begun: dict[Step, bool] = {}

    def begin(self, step: Step) -> None:
        """Add a step at its loss, before the loss's graph, in which ranks may communicate.

        An error is raised here by all ranks of the step. If these are one, another step may have to tell others.
        """
        self.gradients.remember(step.loss_leaves)  # none of which has changed yet
        with _LOCK:
            self._begun[step] = True
        self._agree(step)
        if self._error is not None and self._others_know:
            raise self._error

    def add(self, step: Step) -> None:
        """Add a step at its representations."""
        with _LOCK:
            self._begun.setdefault(step, False)

    def _agree(self, step: Step) -> None:
        try:
            step.begin(self._error)
        except Exception as error:
            self._error = self._error or error
            self._others_know = self._others_know or (step.comm.size > 1 and not step.done)

    def after_all_nodes(self) -> None:
        """Let autograd call `finish` after the callbacks that other engines have installed by now."""
        _call_at_the_end(self.finish)

    def finish(self) -> None:
        """Make the second passes of all steps, in the order of their calls."""
        steps = sorted(self._begun, key=lambda step: step.call_number)
        with self.gradients.restored_after_an_error():
            for step in steps:
                if not self._begun[step]:  # no loss has begun it
                    self._agree(step)
            alone = all(step.comm.size == 1 or step.done for step in steps)
            if self._error is not None and (alone or self._others_know):
                raise self._error
            for step in steps:
                step.remember(self.gradients)
            second_passes([step for step in steps if not step.done], self.gradients, self._error)


_CURRENT: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()  # by autograd's number


def _current_pass() -> BackwardPass:
    """Return the backward pass that calls this."""
    number = torch._C._current_graph_task_id()
    with _LOCK:
        backward_pass = _CURRENT.get(number)
        if backward_pass is None:
            backward_pass = _CURRENT[number] = BackwardPass()
            _call_at_the_end(backward_pass.after_all_nodes)  # autograd keeps it alive until then, or until an error
    return backward_pass


def _call_at_the_end(callback: Any) -> None:
    Variable._execution_engine.queue_callback(callback)


def with_second_passes(step: Step) -> list[Tensor]:
    """Return a step's representations, whose backward pass gives the step their gradients."""
    leaves = step.leaves()
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in leaves):
        return [x.detach() for x in leaves]
    trigger = torch.zeros((), device="cpu", requires_grad=True)
    return list(_Representations.apply(trigger, step))


def deferred_loss(step: Step, loss_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the loss of a step's representations, whose backward pass makes the second passes.

    Collective: a handshake; then that of the backward pass at its beginning, and one at its end.
    """
    loss, _ = agree_after(step.comm, lambda: loss_of(with_second_passes(step)), lambda: None, caller=step.name)
    if not loss.requires_grad:
        return loss
    step.loss_leaves = leaves_of([loss])
    deferred: Tensor = _Loss.apply(loss, step)
    return deferred


class _Representations(Function):
    """From the encoders, for which it stands, to the representations of all chunks."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, step: Step) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        leaves = step.leaves()
        outputs = tuple(x.detach() for x in leaves)
        ctx.mark_non_differentiable(*(x for x, leaf in zip(outputs, leaves, strict=True) if not leaf.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        step: Step = ctx.step
        if step.deferred:
            _current_pass().add(step)
        for engine in step.engines():
            keep_accumulated_of_fsdp1(engine.module)
        step.receive(grads)
        return None, None


class _Loss(Function):
    """From a loss to itself: the first node of its backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, step: Step) -> Tensor:
        ctx.step = step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _current_pass().begin(ctx.step)
        return grad, None


def _error_of_this_backward_pass() -> ValueError | None:
    """Return what is wrong about the manner in which autograd was called, if anything."""
    if not torch.autograd._is_checkpoint_valid():
        return ValueError(
            "the gradient of a cached step goes to the .grad of parameters, and torch.autograd.grad or "
            "backward(inputs=...) ask for it elsewhere: call loss.backward()"
        )
    if torch.is_grad_enabled():
        return ValueError("the gradient of a cached step cannot be differentiated again: leave out create_graph=True")
    return None


class Scaler(Protocol):
    """Scales a loss, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Return the loss times the scale."""
        ...


def add_gradients(step: Step, loss_of: Callable[[list[Tensor]], Tensor], scaler: Scaler | None) -> Tensor:
    """Differentiate the loss of a step's representations and make its second passes; return the loss, detached."""
    gradients = Gradients()

    def differentiate() -> Tensor:
        loss = loss_of(with_second_passes(step))
        scaled = loss if scaler is None else scaler.scale(loss)
        step.loss_leaves = leaves_of([scaled])
        gradients.remember(step.loss_leaves)
        scaled.backward()
        mistake = step.mistake()
        if mistake is not None:
            raise mistake
        return _replace_backward(loss.detach())

    step.remember(gradients)
    with gradients.restored_after_an_error():
        loss, digests = agree_after(step.comm, differentiate, step.digest, caller=step.name)
        step.compare(digests)
        second_passes([step], gradients)
    return loss


def _replace_backward(loss: Tensor) -> Tensor:
    """Return a detached loss whose `backward` says that the step has made the backward pass.

    Only the method of this one object is replaced. Whatever is computed from it, and its copies in files, are plain
    tensors.
    """
    patched: Any = loss
    patched.backward = _refuse
    patched.__getstate__ = dict  # torch.save would write the attribute, which torch.load refuses to read
    return loss


def _refuse(*_arguments: object, **_keywords: object) -> NoReturn:
    raise ValueError(
        "this loss has no graph, because GradCache has made the backward pass: the gradients are in the .grad of the "
        "parameters. Leave backward() out; or, where a trainer calls it, pass deferred=True to GradCache"
    )

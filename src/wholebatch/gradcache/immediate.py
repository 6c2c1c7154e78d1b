"""A step that makes its own backward pass: it adds the gradients and returns the loss's value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import Tensor

from .._base.graph import leaves_of
from .agreement import agree_after
from .deferred import with_second_passes
from .rollback import Gradients
from .step import Step, second_passes


class Scaler(Protocol):
    """Scales a loss, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor, /) -> Tensor:
        """Return the loss times the scale."""
        ...


def add_gradients(step: Step, loss_of: Callable[[list[Tensor]], Tensor], scaler: Scaler | None) -> Tensor:
    """Differentiate the loss of a step's representations and make its second passes; return the loss, detached.

    Args:
        step: after its first pass.
        loss_of: representations, in the order of `step.leaves()` -> L.
        scaler: scales the loss before its gradient is taken, or None.
    """
    gradients, sums = Gradients(), dict[str, int]()

    def differentiate() -> Tensor:
        loss = loss_of(with_second_passes(step))
        scaled = loss if scaler is None else scaler.scale(loss)
        step.of_loss = leaves_of([scaled])
        gradients.remember(step.of_loss)
        scaled.backward()
        mistake = step.mistake()
        if mistake is not None:
            raise mistake
        return _replace_backward(loss.detach())

    step.remember(gradients)
    with gradients.restored_after_an_error():
        loss, digests = agree_after(step.comm, differentiate, lambda: step.digest(sums), caller=step.name)
        step.compare(digests, sums)
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

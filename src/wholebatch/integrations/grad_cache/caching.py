"""GradCache, PLGradCache and RandContext with the constructors, calls and methods of the package grad_cache's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import wholebatch as wb

from ..._base.checks import check_callable
from ...gradcache.grad_cache import ChunkSize
from ...gradcache.immediate import Scaler
from ...gradcache.replay import Replay

_GONE = {
    "forward_no_grad": "override model_call and get_reps, which both passes use",
    "build_cache": "override compute_loss; for a backward pass of your own use wb.GradCache(..., deferred=True)",
    "forward_backward": "for a backward pass of your own use wb.GradCache(..., deferred=True)",
}


class GradCache(wb.GradCache):
    r"""Their `GradCache`, by :class:`wholebatch.GradCache`.

    A subclass may override `split_inputs`, `model_call`, `get_reps` and `compute_loss`. `get_input_tensors` is not
    called: the states of all devices' random numbers are kept.

    Args:
        models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16: those of :class:`wholebatch.GradCache`.
        scaler: scales the loss if fp16 is True, and has no effect otherwise.
        options: those of :class:`wholebatch.GradCache`, by keyword.

    Raises:
        ValueError: if an argument is invalid.
        TypeError: for a subclass that overrides `forward_no_grad`, `build_cache` or `forward_backward`.
    """

    def __init__(
        self,
        models: Sequence[Callable[..., object]] | nn.ModuleList,
        chunk_sizes: ChunkSize | Sequence[ChunkSize],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, Any], Sequence[object]] | None = None,  # takes whatever the models take
        get_rep_fn: Callable[[Any], object] | None = None,  # takes whatever the models return
        fp16: bool = False,
        scaler: Scaler | None = None,
        **options: Any,  # of wb.GradCache
    ) -> None:
        used = scaler if fp16 else None
        super().__init__(models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16, used, **options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, instead in _GONE.items():
            if hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which wholebatch's GradCache does not call: {instead}"
                )

    def __getattr__(self, name: str) -> Any:
        if name in _GONE:
            raise AttributeError(f"wholebatch's GradCache has no {name}: {_GONE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class PLGradCache(GradCache):
    """Their `PLGradCache`, for a LightningModule with manual optimization: `backward_fn` goes backward, once a step.

    Args:
        models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16: as in :class:`GradCache`.
        scaler: without effect: Lightning's `manual_backward` scales the loss.
        backward_fn: `self.manual_backward` of the LightningModule.
        options: those of :class:`wholebatch.GradCache` except `deferred`, by keyword.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(
        self,
        models: Sequence[Callable[..., object]] | nn.ModuleList,
        chunk_sizes: ChunkSize | Sequence[ChunkSize],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, Any], Sequence[object]] | None = None,  # takes whatever the models take
        get_rep_fn: Callable[[Any], object] | None = None,  # takes whatever the models return
        fp16: bool = False,
        scaler: Scaler | None = None,
        backward_fn: Callable[[Tensor], object] | None = None,
        **options: Any,  # of wb.GradCache
    ) -> None:
        self.backward_fn = check_callable("backward_fn", backward_fn)
        super().__init__(models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16, None, deferred=True, **options)

    def cache_step(self, *model_inputs: object, no_sync_except_last: bool = True, **loss_kwargs: object) -> Tensor:
        """Make a step, and return its loss, detached."""
        loss = super().cache_step(*model_inputs, no_sync_except_last=no_sync_except_last, **loss_kwargs)
        self.backward_fn(loss)
        return loss.detach()


class RandContext:
    """A context in which random numbers are those that came after its construction.

    Afterward the generators continue where they were before the context.

    Args:
        tensors: without effect: generators of all devices, of Python and of NumPy are recorded.

    >>> import torch
    >>> context = RandContext()
    >>> first = torch.rand(3)
    >>> with context:
    ...     second = torch.rand(3)
    >>> torch.equal(first, second)
    True
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._inside = Replay()

    def __enter__(self) -> None:
        self._outside = Replay()
        self._inside.rewind()

    def __exit__(self, *error: object) -> None:
        self._outside.rewind()

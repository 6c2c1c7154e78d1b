"""GradCache with the constructor, call and methods of the class of this name in the package grad_cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import wholebatch as wb

from ...gradcache.grad_cache import ChunkSize
from ...gradcache.immediate import Scaler
from .context_managers import RandContext

__all__ = ["GradCache", "RandContext"]

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
        models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn: as there.
        fp16: as there.
        scaler: as there: it scales the loss if fp16 is True, and has no effect otherwise.
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

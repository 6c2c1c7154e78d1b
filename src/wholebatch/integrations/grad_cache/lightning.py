"""PLGradCache: gradient caching in a LightningModule with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..._checks import check_callable
from ...gradcache.grad_cache import ChunkSize
from ...gradcache.immediate import Scaler
from .grad_cache import GradCache

__all__ = ["PLGradCache"]


class PLGradCache(GradCache):
    """Their `PLGradCache`: a step whose backward pass is made by `backward_fn`, once.

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

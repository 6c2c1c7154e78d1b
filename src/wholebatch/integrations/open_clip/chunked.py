"""The model that open_clip's training loop calls, encoding the batch in chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import wholebatch as wb


class ChunkedModel(nn.Module):
    """A model that returns a dictionary, called by :func:`wholebatch.gradcache.encode`.

    Its parameters are those of the model. `module` is the model inside of DDP and of `torch.compile`: open_clip looks
    there for the logarithm of the scale, which it limits.
    """

    def __init__(self, model: nn.Module, chunk_size: int) -> None:
        super().__init__()
        self.model, self.chunk_size = model, chunk_size

    @property
    def module(self) -> nn.Module:
        """Return the model without wrappers."""
        inner: Any = self.model
        while (below := getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)) is not None:
            inner = below
        return inner

    def forward(self, *positional: Any, **keywords: Any) -> dict[str, Tensor]:
        """Return the model's dictionary for the whole batch, with a graph that encodes it again."""
        names: list[str] = []

        def outputs(found: dict[str, Tensor]) -> tuple[Tensor, ...]:
            names[:] = found
            # Under FSDP, open_clip's scalars have shape (1,). Shape () marks a number of the whole batch.
            return tuple(x.reshape(()) if name in _SCALARS else x for name, x in found.items())

        found = wb.gradcache.encode(self.model, (list(positional), keywords), self.chunk_size, get_rep_fn=outputs)
        return dict(zip(names, found, strict=True))


_SCALARS = ("logit_scale", "logit_bias")

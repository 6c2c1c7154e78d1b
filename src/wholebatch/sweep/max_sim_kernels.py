"""Late interaction in kernels: a launch each for the maxima and winners of a tile, their sums, and both gradients.

No product is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..partition import Tile
from .driver import Block
from .items import Items
from .max_sim import MaxSimDriver
from .products import Factor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelMaxSimDriver(MaxSimDriver):
    """:class:`MaxSimDriver` in kernels; cases that kernels do not support use plain PyTorch.

    As many query tokens are in a launch as the memory of products has room for their maxima.
    """

    def factors(self, tile: Tile, block: Block, start: int = 0) -> tuple[Factor, Factor]:
        """Return tokens as kernels multiply them: half precision is not widened."""
        dtype = self._in_kernels
        if dtype is None:
            return super().factors(tile, block, start)
        rows, cols = self.tokens(tile, block, start)
        return (rows.to(dtype),), (cols.to(dtype),)

    @property
    def adds_once(self) -> bool:
        return self._in_kernels is not None

    def _widened(self, factor: Factor) -> Tensor:
        """Return tokens as kernels read them."""
        return super()._widened(factor) if self._in_kernels is None else factor[0]

    @property
    def _in_kernels(self) -> torch.dtype | None:
        """The dtype of tokens in kernels; None where there are none."""
        dtype = self.precision.dtype_in_kernels(self.x.dtype)
        return dtype if dtype in _DTYPES else None

    def _maxima(
        self, queries: Factor, vectors: Factor, tokens: Items, documents: Items, s: Tensor, winners: Tensor | None
    ) -> None:
        if self._in_kernels is None:
            super()._maxima(queries, vectors, tokens, documents, s, winners)
            return
        count = s.shape[1]
        rows = max(1, self.budget.products // count)
        for start in range(0, tokens.vectors, rows):
            part = slice(start, min(start + rows, tokens.vectors))
            best = self.x.new_empty(part.stop - start, count, dtype=self.dtype)
            tile = self._tile_of(queries[0][part], vectors[0], documents)
            kernels.token_maxima(tile, best, None if winners is None else winners[part])
            kernels.token_sums(tile, s, best, tokens.starts, start)

    def _scatter(
        self,
        grad: Tensor,
        tokens: Items,
        documents: Items,
        features: tuple[Tensor, Tensor],
        into: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Add the gradients, without a search for copies: one program computes all products, equal ones alike."""
        if self._in_kernels is None:
            super()._scatter(grad, tokens, documents, features, into)
            return
        assert self.winners is not None
        tile, weights = self._tile_of(*features, documents), kernels.TokenWeights(self.winners, tokens.owners, grad)
        if into[0] is not None:
            kernels.query_gradient(tile, into[0], weights)
        if into[1] is not None:
            kernels.document_gradient(tile, into[1], weights)

    def _tile_of(self, queries: Tensor, vectors: Tensor, documents: Items) -> kernels.TokenTile:
        """Return tokens as kernels take them."""
        features = kernels.TileInputs(
            queries, vectors, None, kernels.Entries(), kernels.Entries(), 0, 0,
            allows_tf32=self.precision.allows_tf32,
        )  # fmt: skip
        return kernels.TokenTile(features, documents.starts, self.longest)

"""Late interaction in kernels: one launch computes the maxima and the winners of a tile, and stores no product.

Sums over a query's tokens, and gradients, are those of plain PyTorch.
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

    The memory of products holds maxima: as many query tokens are in a launch as it has room for.
    """

    def factors(self, tile: Tile, block: Block, start: int = 0) -> tuple[Factor, Factor]:
        """Return tokens as kernels multiply them: half precision is not widened."""
        dtype = self._in_kernels
        if dtype is None:
            return super().factors(tile, block, start)
        rows, cols = self.tokens(tile, block, start)
        return (rows.to(dtype),), (cols.to(dtype),)

    def _first_copies(self, vectors: Tensor, documents: Items) -> Tensor | None:
        """Return None with kernels: one program computes all products of a token and a document, equal ones alike."""
        return super()._first_copies(vectors, documents) if self._in_kernels is None else None

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
        count, starts = s.shape[1], documents.starts.int()
        rows = max(1, self.budget.products // count)
        for start in range(0, tokens.vectors, rows):
            part = slice(start, min(start + rows, tokens.vectors))
            best = self._product_memory(part.stop - start, count)
            features = kernels.TileInputs(
                queries[0][part], vectors[0], None, kernels.Entries(), kernels.Entries(), 0, 0,
                allows_tf32=self.precision.allows_tf32,
            )  # fmt: skip
            tile = kernels.TokenTile(features, starts, self.longest)
            kernels.token_maxima(tile, best, None if winners is None else winners[part])
            tokens.add_sums_(s, best, part)

"""Join a loss's features into X, whose rows stay, and Y, whose rows travel; split dX and dY into their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from .._base.normalize import divisors, known_norms, project_
from .._base.precision import accumulation_dtype
from .._base.sparse_rows import sparse_rows

Joined = tuple[Tensor | None, Tensor | None]  # of X's rows, and of Y's


@dataclass(frozen=True)
class Towers:
    """The features that are joined into X and Y, and the norms by which their rows are divided."""

    stays: tuple[int, ...]  # the indices of the features that are concatenated into X
    travels: tuple[int, ...] = ()  # the indices of those that are concatenated into Y; empty: Y is X
    normalize: bool = False  # whether the rows of X and Y are divided by their norms; Y must be X
    # normalize_per_tile: with `normalize`, X holds the rows as given, and the sweep divides a tile's rows at a time
    normalize_per_tile: bool = False
    # stay_norms: (b, 1), norms of X's rows, by which the sweep divides a tile's rows at a time; None: no division
    stay_norms: Tensor | None = None
    travel_norms: Tensor | None = None  # (B, 1), likewise for Y, all of whose rows this rank holds
    # stay_rows: (b,), ascending, the rows of the one feature in `stays` that are X's rows, read tile by tile; the
    # feature's gradient is sparse. None: all of its rows
    stay_rows: Tensor | None = None

    def join(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return X, Y, and the norms of X's rows; None instead of norms if rows are not divided by them.

        With `stay_rows` the first is the feature that contains X's rows.
        """
        if self.normalize:
            assert not self.travels, "only features against themselves are normalized here; please report this"
            x, norms = (_with_norms if self.normalize_per_tile else _normalized)([features[i] for i in self.stays])
            return x, x, norms
        x = stacked([features[i] for i in self.stays])
        return x, stacked([features[i] for i in self.travels]) if self.travels else x, self.stay_norms

    def needed(self, features: Sequence[bool]) -> tuple[bool, bool]:
        """Return whether dX is needed and whether dY is, given for each feature whether it needs a gradient."""
        x, y = (any(features[i] for i in indices) for indices in (self.stays, self.travels))
        return (x, y) if self.travels else (False, x)

    def split(
        self,
        products: Joined,
        joined: Joined,
        norms: Tensor | None,
        features: Sequence[tuple[bool, int, torch.dtype]],
        *,
        factor: float | Tensor,
        in_kernels: bool,
        divided: bool = False,
    ) -> list[Tensor | None]:
        """Return each feature's gradient, or None if not needed.

        Args:
            products: U and V, None where not needed; overwritten. If Y is X, V is that of the whole gradient.
            joined: X and Y from `join`.
            norms: from `join`.
            features: a tuple for each feature: whether its gradient is needed, its number of rows, its dtype.
            factor: of U and V in the gradients by normalized rows.
            in_kernels: whether kernels have computed U and V.
            divided: whether U is divided by the norms of X's rows already.
        """
        (u, v), (x, y) = products, joined
        grads: list[Tensor | None] = [None] * len(features)
        sides = [(self.stays, u, x, norms), (self.travels, v, y, self.travel_norms)]
        if not self.travels:
            sides = [(self.stays, v, x, norms)]
        for indices, product, rows, row_norms in sides:
            if product is None:
                continue
            assert rows is not None
            index = self.stay_rows if indices is self.stays else None
            divide = not self.normalize or self.normalize_per_tile
            if in_kernels and product.dtype == torch.float32 and (divide or row_norms is None):
                dtypes = {features[i][2] for i in indices}
                gradient, _ = kernels.row_gradient(
                    product, rows, None, row_norms, None, factor, product.dtype if len(dtypes) > 1 else dtypes.pop(),
                    index=index, divided=divided and product is u, in_place=True,
                )  # fmt: skip
            else:
                gradient = product.mul_(factor)
                if row_norms is not None:
                    project_(gradient, rows, row_norms, divide=divide, index=index)
            first = 0
            for i in indices:
                needed, count, dtype = features[i]
                if needed and index is not None:
                    grads[i] = sparse_rows(index, gradient.to(dtype), (count, gradient.shape[1]))
                elif needed:
                    # The whole, not a view of it: autograd adds another gradient of the feature in place.
                    part = gradient if count == len(gradient) else gradient[first : first + count]
                    grads[i] = part.to(dtype)
                first += count
        return grads


def stacked(features: Sequence[Tensor]) -> Tensor:
    """Return the rows of several features, one's after the other's; a single one is not copied."""
    return features[0] if len(features) == 1 else torch.cat(list(features))


def _normalized(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all rows normalized, in the accumulation dtype, and their norms, (rows, 1)."""
    rows, width = sum(map(len, features)), features[0].shape[1]
    z = features[0].new_empty(rows, width, dtype=accumulation_dtype(features[0].dtype))
    for part, feature in zip(z.split([len(feature) for feature in features]), features, strict=True):
        part.copy_(feature)
    norms = known_norms(z)
    return z.div_(divisors(norms)), norms


def _with_norms(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all rows unchanged, and their norms, (rows, 1), in the accumulation dtype."""
    x = stacked(features)
    return x, known_norms(x)

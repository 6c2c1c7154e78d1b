"""Modules that hold the settings of a recipe, and compute it by a :class:`wholebatch.PairLoss` that they declare.

    class SemiHardTripletLoss(Recipe):
        margin: float = 0.2

        def _pair_loss(self, **options):
            return PairLoss({"semi_hard": Max(where=_beyond_positive)}, _hinge, **options)

        def forward(self, anchors, positives):
            return self._compute({"anchors": anchors, "positives": positives}, numbers={"margin": self.margin})

So a recipe is called like every loss, by the names of its paper, and its declaration reads x, y and their data.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Literal

from torch import Tensor

from .._base.checks import check_features, check_ids, check_one
from ..comm import LocalCommunicator
from ..contract import prepared
from ..losses._module import KernelLoss
from ..pair_loss import PairLoss
from ..pair_loss.arguments import NOTHING


class Recipe(KernelLoss):
    """The settings of a recipe over pairs.

    Attributes:
        pairs: the declaration, by which it is computed.
    """

    compile_tiles: bool | Literal["auto"] = "auto"

    def __init__(self, **settings: Any) -> None:  # typed by the declarations of each subclass
        super().__init__(**settings)
        self.pairs = self._pair_loss(**{name: getattr(self, name) for name in Recipe._declared})
        self._dense = False

    def _pair_loss(self, **options: Any) -> PairLoss:  # those of PairLoss
        """Return the declaration with these options; numbers that it reads are passed by `_compute`."""
        raise NotImplementedError

    def _compute(
        self,
        features: Mapping[str, Any],  # tensors, or mappings of them for several similarities
        *,
        ids: Mapping[str, Tensor] = NOTHING,
        numbers: Mapping[str, Any] = NOTHING,
        **call: Any,
    ) -> Tensor:
        """Return L for `forward`, or for `reference`, of rows, and of columns if these are others.

        Ids belong to both unless `call`, the other arguments of a PairLoss, has `y_data`; numbers are its parameters.
        """
        first, rows = next(iter(features)), [*features.values()]
        x, y = rows[0], rows[1] if len(rows) > 1 else None

        def check() -> None:
            for name, value in numbers.items():
                check_one(name, value)
            for name, matrix in features.items():
                if not isinstance(matrix, dict):  # which PairLoss checks
                    check_features(name, matrix)
            for name, integers in ids.items():
                check_ids(name, integers, first, len(x))

        prepared(type(self).__name__, self.group, check)
        self.pairs.options = self.options
        loss_of = self.pairs.reference if self._dense else self.pairs
        call = {"x_data": ids, "y_data": ids, **call}
        loss: Tensor = loss_of(x, y, parameters=numbers, **call)
        return loss

    def reference(self, *arguments: Any, **named: Any) -> Tensor:  # those of forward
        """Return L of the rows given, from dense matrices, without communication; arguments as in `forward`."""
        alone = copy(self)
        alone.group, alone._dense = LocalCommunicator(), True
        loss: Tensor = alone.forward(*arguments, **named)
        return loss

"""Three and more kinds of data of the same examples, such as images, texts and sounds: CLIP's loss of each two of them.

    L = 1/2N sum over pairs of towers (a, b), and over the examples i that have both, of
        -log softmax_j(scale a_i . b_j)_i  over the j that have b  - log softmax_j(scale b_i . a_j)_i  over those with a

with the number N of these pairs of all examples. All similarities are computed in one sweep, with one exchange.

Source: three towers: Guzhov et al., 2021, arXiv:2106.13043; missing data: Girdhar et al., 2023, arXiv:2305.05665.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_features, is_dense
from .._base.settings import check_flag, shown
from ..contract import entry, prepared
from ..logsumexp import softplus
from ..losses._logit_scale import TakesLogitScale
from ..pair_loss import PairLoss
from ..pair_loss.arguments import NOTHING
from ..pair_loss.reductions import Term
from ..terms import LogSumExp, other
from ._module import Recipe


def _check(towers: Sequence[str], missing: bool) -> None:
    names = list(towers) if isinstance(towers, list | tuple) else []
    good = all(isinstance(name, str) and name.isidentifier() and not name.startswith("_") for name in names)
    if not good or len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"towers must be two or more different names such as 'image', got {shown(towers)}")
    check_flag("missing", missing)


class TowersLoss(TakesLogitScale, Recipe, check=_check):
    """CLIP's loss of each two of several towers, over the batch of all ranks.

    For each two towers a and b, rows are the examples that have both; candidates of a_i are all b_j, those of b_i all
    a_j, of examples that have them. L = (mean over all rows of all pairs, a to b + the same, b to a) / 2.

    Args:
        towers: their names, two or more, such as ("image", "text", "audio").
        missing: whether examples may lack towers; then each call says which.
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.recipes.TowersLoss(towers=["image", "text", "audio"])
    >>> loss_fn({name: torch.eye(2) for name in ("image", "text", "audio")}, logit_scale=1.0)
    tensor(0.3133)
    """

    towers: Sequence[str]
    missing: bool = False

    def _pair_loss(self, **options: Any) -> PairLoss:
        terms, sides = dict[str, Term](), ("rows", "cols")
        has = {
            pair: (f"has_{a}", f"has_{b}") if self.missing else None for pair, (a, b) in self._pairs_of_towers().items()
        }
        for pair, both in has.items():
            for side in sides:
                where = partial(_candidates, both=both, side=side) if both else other
                terms[f"{pair}_{side}"] = LogSumExp(partial(_over_partner, pair=pair, side=side), where)
        row_loss, column_loss = (
            partial(_mean, terms=[(f"{pair}_{side}", both) for pair, both in has.items()]) for side in sides
        )
        similarity = dict.fromkeys(has, "dot")
        return PairLoss(terms, row_loss, column_loss=column_loss, similarity=similarity, **options)

    def _pairs_of_towers(self) -> dict[str, tuple[str, str]]:
        return {f"pair_{n}": both for n, both in enumerate(combinations(self.towers, 2))}

    @entry
    def forward(
        self,
        features: Mapping[str, Tensor],
        *,
        has: Mapping[str, Tensor] = NOTHING,
        logit_scale: Tensor | float | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            features: (b_r, d) of each tower, by name; normalize them first. Those of a missing example are not used.
            has: (b_r,) booleans by name, with `missing=True`: which examples have this tower; left out: all have it.
            logit_scale: multiplies the similarities (1 / temperature).
            weights: (b_r,), >= 0, of examples.
        """
        scale = self._settings_of_call(logit_scale=logit_scale)["logit_scale"]
        x, y, data = prepared("TowersLoss", self.group, lambda: self._arguments(features, has))
        numbers, rows = {"logit_scale": scale}, {"first towers": x, "second towers": y}
        return self._compute(rows, x_data=data, y_data=data, numbers=numbers, weights=weights)

    def _arguments(
        self, features: Mapping[str, Tensor], has: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return rows and columns of each pair, and the data of both."""
        if not isinstance(features, Mapping) or set(features) != set(self.towers):
            got = sorted(map(str, features)) if isinstance(features, Mapping) else shown(features)
            raise ValueError(f"features must be a mapping with the names {sorted(self.towers)}, got {got}")
        if not isinstance(has, Mapping) or not set(has) <= set(self.towers):
            got = sorted(map(str, has)) if isinstance(has, Mapping) else shown(has)
            raise ValueError(f"has must be a mapping with names among {sorted(self.towers)}, got {got}")
        if has and not self.missing:
            raise ValueError(f"has must be left out, or needs TowersLoss(missing=True); got {sorted(has)}")
        for name, x in features.items():
            check_features(f"features[{name!r}]", x)
        shapes = {name: tuple(x.shape) for name, x in features.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(
                f"features must have the same shape for all towers, a row for each example, got {shapes}; rows of "
                "examples without a tower may hold anything, and has= says which they are"
            )
        data, rows = dict[str, Tensor](), dict(features)
        for name in self.towers if self.missing else ():
            x = rows[name]
            mask = has.get(name, x.new_ones(len(x), dtype=torch.bool))
            if not is_dense(mask) or mask.dtype != torch.bool or tuple(mask.shape) != (len(x),):
                kind = f"{tuple(mask.shape)}, {mask.dtype}" if is_dense(mask) else shown(mask)
                raise ValueError(f"has[{name!r}] must be a boolean vector of {len(x)} examples, got {kind}")
            data[f"has_{name}"] = mask
            rows[name] = torch.where(mask[:, None], x, 0.0)
        row_features, col_features = (
            {pair: rows[both[side]] for pair, both in self._pairs_of_towers().items()} for side in (0, 1)
        )
        return row_features, col_features, data


def _over_partner(s: Any, x: Any, y: Any, p: Any, *, pair: str, side: str) -> Tensor:  # similarities and fields
    partner = (x if side == "rows" else y).partner[pair]
    logit: Tensor = p.logit_scale * (s[pair] - partner)
    return logit


def _candidates(x: Any, y: Any, *, both: tuple[str, str], side: str) -> Tensor:  # fields
    """Return negatives of examples that have both towers: others, on the other side, with the tower of that side."""
    side_fields, opposite, tower = (x, y, both[1]) if side == "rows" else (y, x, both[0])
    candidates: Tensor = (side_fields[both[0]] & side_fields[both[1]]) & opposite[tower] & other(x, y)
    return candidates


def _mean(r: Any, fields: Any, p: Any, *, terms: Sequence[tuple[str, tuple[str, str] | None]]) -> tuple[Tensor, Tensor]:
    """Return half of the mean over the pairs of towers that an example has, and their number."""
    losses = torch.stack([softplus(r[name]) for name, _ in terms])
    all_have = torch.ones_like(losses[0], dtype=torch.bool)
    counted = torch.stack([fields[both[0]] & fields[both[1]] if both else all_have for _, both in terms])
    count = counted.sum(0).to(losses.dtype)
    return (losses * counted).sum(0) / count.clamp(min=1) / 2, count

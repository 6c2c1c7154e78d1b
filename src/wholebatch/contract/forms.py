"""Calls that were valid before: what the ranks agreed on is kept under the form of a call, and looked up afterward.

The form of a call is what decides its checks but for the values of numbers: options, settings, and for each tensor its
shape, dtype, device and whether it needs a gradient. A first call of a form makes a rank's statement for the handshake,
and from the statements of all ranks an :class:`Agreement`. A later call computes its numbers, such as norms, and looks
up both. On several ranks the agreement is that of all ranks' forms, which their records show.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..comm.records import FactsByRank, Statement
from ..partition import Partition
from ..sweep import Products

_T = TypeVar("_T")
KERNELS = "kernels compute it"  # a plan of a form whose kernels have passed their check
_MOST = 512  # forms of a group: a program whose batches all differ in size must not fill the memory


@dataclass(eq=False)
class Agreement:
    """Facts on which the ranks agree in every call of their forms."""

    by_rank: FactsByRank  # the facts of all ranks, with the numbers of the first call
    rows: Mapping[str, Partition]  # for each matrix of features, the rows that each rank holds
    needs_grad: Sequence[bool]  # for each differentiable argument, whether it needs a gradient on any rank
    products: Products  # the precision of products with these features
    # kernels: whether kernels may compute tiles: the caller named them, or "auto" can choose them on every rank
    kernels: bool
    embedding_size: int  # columns of the features
    given_dtype: torch.dtype  # dtype of the features that the caller passed
    dtype: torch.dtype  # dtype in which sums are computed
    # plans: what layers above have made for calls of this form, by name
    plans: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Form:
    """The form of a rank's call: its statement in the handshake, and its agreements with forms of other ranks."""

    statement: Statement
    varying: int  # how many of the statement's numbers change from call to call, the first ones of a record
    _agreements: dict[bytes, Agreement] = field(default_factory=dict)

    @property
    def in_kernels(self) -> bool:
        """Whether kernels computed calls of this form."""
        return any(agreement.plans.get(KERNELS) for agreement in self._agreements.values())

    @property
    def alone(self) -> Agreement:
        """The agreement of one process with itself."""
        return self._agreements[b""]

    def agreement(self, by_rank: FactsByRank) -> Agreement | None:
        """Return the agreement of ranks that have stated the same forms before; None if they have not."""
        return self._agreements.get(by_rank.without_numbers(self.varying) or b"")

    def agree(self, by_rank: FactsByRank, agreement: Agreement) -> bool:
        """Keep an agreement of these ranks, if their statements differ in numbers alone; return whether they do."""
        ranks = by_rank.without_numbers(self.varying)
        if ranks is None:
            return False
        if len(self._agreements) >= _MOST:
            self._agreements.clear()
        self._agreements[ranks] = agreement
        return True


def keep(forms: dict[Hashable, _T], key: Hashable, form: _T) -> None:
    """Keep what belongs to a form, in place of the oldest if there are many."""
    if len(forms) >= _MOST:
        del forms[next(iter(forms))]
    forms[key] = form

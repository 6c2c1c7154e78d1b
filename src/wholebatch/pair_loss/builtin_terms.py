"""The reductions of a declaration for a loss of this library, which has made its own agreement with the ranks.

The loss checks its arguments under their own names, and combines the reductions itself. What users' declarations need
beside that (looking at their functions, fingerprints, messages) is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Facts
from .arguments import Arguments
from .call import Call
from .declaration import Declaration
from .function_checks import Reads
from .lowered_terms import factors, names_of_factors
from .lowering import Lowered, lowered, may_be_lowered
from .pairs import indices
from .reductions import Term
from .similarity import ONE
from .tile import Affine


class Tower(NamedTuple):
    """One side of the matrix of pairs on this rank.

    Args:
        features: as `facts.inputs` has them; in late interaction with a row for each vector.
        lengths: the number of vectors of each row, in late interaction; else None.
        data: numbers of rows by name, (b,) each, without a gradient.
    """

    features: Tensor
    lengths: tuple[int, ...] | None
    data: Mapping[str, Tensor]


def reductions(
    facts: Facts,
    similarity: str,
    terms: Mapping[str, Term],
    towers: Mapping[str, Tower],
    parameters: Mapping[str, Any],
    sides: Collection[str],
    keep_as: str = "",
) -> dict[str, dict[str, Tensor]]:
    """Return all terms of one side or of both, reduced: (b,) or (n_r,) each, by the names of sides and terms.

    Args:
        facts: on which the ranks agreed.
        similarity: one of `similarity.SIMILARITIES`, or `MAX_SIM_OF_ROWS`.
        terms: by name.
        towers: rows, whose features stay, and columns, whose features travel, by the names of their features; or rows
            alone, which are the columns, too, with terms that are symmetric.
        parameters: numbers and tensors, as `facts.inputs` has them.
        sides: names of the towers whose rows are reduced.
        keep_as: the name under which calls of one form keep what is found of these terms: all of them have the same
            terms, and as parameters the same numbers. "": nothing is kept, and tiles of any terms compute them.
    """
    x, *columns = towers.values()
    y = columns[0] if columns else None
    declared = Declaration(
        dict(terms),
        None,
        None,
        {ONE: similarity},
        symmetric=y is None and not any(term.mask_reads_similarity for term in terms.values()),
        reads=Reads(*(set(terms) if name in sides else set() for name in towers)),
    )
    call = Arguments(
        x=x.features,
        y=None if y is None else y.features,
        candidates=None,
        widths={ONE: facts.embedding_size},
        x_data=dict(x.data),
        y_data={} if y is None else dict(y.data),
        candidate_data={},
        owners=indices(facts, 0, 0),
        parameters=dict(parameters),
        x_lengths=x.lengths,
        y_lengths=None if y is None else y.lengths,
    )
    named = {f"parameters[{name!r}]": value for name, value in parameters.items()}
    renamed = facts.with_(
        rows=dict(zip("xy", (facts.rows[name] for name in towers), strict=False)),
        inputs={
            **facts.inputs,
            **dict(zip("xy", (tower.features for tower in towers.values()), strict=False)),
            **named,
        },
    )
    passes = facts.once(("passes", keep_as), lambda: _passes(declared, call, facts)) if keep_as else None
    affine: Affine = facts.once(("affine", keep_as), dict) if keep_as else {}
    tower_terms = Call(declared, call, renamed, tiles=1, has_kernels=True, passes=passes, affine=affine).reduced()
    return dict(zip(towers, tower_terms, strict=False))


def _passes(declared: Declaration, call: Arguments, facts: Facts) -> tuple[Lowered, list[float]] | None:
    """Return the terms as passes over S, with the factor of each; None if tiles of any terms compute them."""
    passes = lowered(declared, call)
    if passes is None:
        return None
    names = names_of_factors(len(declared.terms))
    numbers = [x.item() for x in factors(passes, names, call, torch.device("cpu")).values()]
    return (passes, numbers) if may_be_lowered([passes.facts], numbers, in_kernels=facts.kernels) else None

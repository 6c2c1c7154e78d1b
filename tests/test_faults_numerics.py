"""A few cases of the campaign of numerical extremes, and planted defects that it must detect."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faults import numerics

import wholebatch as wb


def test_no_case_has_a_forbidden_outcome():
    done = numerics.run(0, len(numerics.CASES))
    assert not [(str(of), verdict) for of, verdict in done if verdict.outcome in numerics.FORBIDDEN]
    assert sum(verdict.outcome == "right" for _, verdict in done) > 0.8 * len(done)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("defect", "outcome"),
    [
        (lambda loss: loss * (1 + 1e-4), "wrong"),
        (lambda loss: loss + (loss - loss.detach()) / 50, "wrong"),
        (lambda loss: loss * float("nan"), "not finite"),
        (lambda loss: int("nothing"), "error"),
    ],
)
def test_a_defect_is_found(defect, outcome):
    def planted(*given, **options):
        return defect(wb.functional.nt_xent_loss(*given, **options))

    index = list(numerics.CASES).index("nt_xent")
    trial = replace(numerics.trial(0, index), dtype=torch.float32)
    assert numerics.evaluated(trial).outcome == "right"
    assert numerics.evaluated(replace(trial, functions=SimpleNamespace(nt_xent_loss=planted))).outcome == outcome

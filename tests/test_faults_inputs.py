"""A few hundred cases of `tests/faults/inputs.py`, and a planted defect of each kind, which it must detect."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import inputs
import inputs_calls
import inputs_legal
import inputs_pool

import wholebatch as wb


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values of the pool are valid names of folders
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrong(outcomes):
    return [f"{one.what}: {one.case}: {one.text}" for one in outcomes if one.what in inputs.FORBIDDEN]


@pytest.mark.usefixtures("group")
def test_random_inputs():
    known = [entry for entry in inputs_calls.entries() if entry.name not in inputs_calls.SLOW]
    outcomes = inputs.campaign(7, 400, known=known)
    assert not wrong(outcomes), "\n".join(wrong(outcomes))
    assert sum(one.what == "refused" for one in outcomes) > 200
    assert len({one.case.entry for one in outcomes}) > 100, "most of what is public"


def test_the_tables_name_only_existing_entries():
    """The tables list no name that no longer exists."""
    known = {entry.name: entry for entry in inputs_calls.entries()}
    parameters = {name for entry in known.values() for name in entry.parameters}
    for table in (inputs_legal.LEGAL, inputs_calls.VALUES):
        for key in table:
            entry, _, parameter = key.rpartition(".")
            assert parameter in (known[entry].parameters if entry else parameters), key
    for kinds in inputs_legal.LEGAL.values():
        assert set(kinds.split()) <= inputs_pool.POOL.keys() | {"np_float64"}, kinds
    assert tuple(name for name in inputs_calls.SLOW if name in known) == inputs_calls.SLOW


def test_every_public_name_is_called_or_left_out_with_a_reason():
    known = {entry.name.removeprefix("reference.") for entry in inputs_calls.entries()}
    for module in inputs_calls.modules():
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type) and issubclass(found, BaseException):
                continue
            if callable(found) and name not in inputs_calls.LEFT_OUT:
                assert name in known, f"{module.__name__}.{name}"


def by_truth(x: torch.Tensor, *, normalize: bool = True) -> torch.Tensor:
    """Use a flag by its truth value, and let errors of an argument's methods pass: a planted defect."""
    return x / 2 if normalize else x.sum(dim=0)


def no_such_argument(x: torch.Tensor, strange_name: int) -> None:
    """Have an argument with no known right value: a planted defect."""


@pytest.mark.usefixtures("group")
def test_planted_defects_are_detected():
    def entry(function):
        return inputs_calls.Entry(function.__name__, "wholebatch", inputs_calls._parameters(function), called=function)

    planted = entry(by_truth)
    outcomes = inputs.campaign(0, 300, known=[planted])
    seen = {one.what for one in outcomes}
    assert {"accepted, not reviewed", "other exception", "refused by accident"} <= seen
    assert any(one.case.replaced == {"normalize": "no"} and one.what == "accepted, not reviewed" for one in
               (inputs.run(planted, case) for case in inputs.all_cases([planted])))  # fmt: skip
    (outcome,) = inputs.campaign(0, 0, known=[entry(no_such_argument)])
    assert outcome.what == "no right call"
    assert "strange_name" in outcome.text
    assert inputs.report(outcomes, 0, most=0) == 1
    assert inputs.report([], 0) == 0


@pytest.mark.planted
@pytest.mark.usefixtures("group")
def test_a_removed_check_is_detected(monkeypatch):
    """The defect is planted in the library: flags count by their truth value."""
    from wholebatch.losses import triplet

    case = inputs.Case("triplet_loss", {"smooth": "no"})
    known = {one.name: one for one in inputs_calls.entries([wb.functional])}
    assert inputs.run(known["triplet_loss"], case).what == "refused"
    monkeypatch.setattr(triplet, "check_flag", lambda _name, value: value)
    assert inputs.run(known["triplet_loss"], case).what == "accepted, not reviewed"

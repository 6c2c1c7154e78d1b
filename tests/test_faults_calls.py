"""Some cases of the campaign of faults in calls (`make faults`), and planted defects that it must detect."""

import random
import sys
from pathlib import Path

import pytest

import wholebatch as wb

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import calls
import public_names
from case import ENTRIES, PLANTED
from good_calls import World
from mistakes import draw


def fault_of(seed, name, size):
    """Return the fault that the campaign draws for this seed."""
    world = World(seed, 0, size, None, "")
    make = {**ENTRIES, **PLANTED}[name]
    return draw(random.Random(f"{seed} fault"), make, make(world), world)


def test_faults_in_calls():
    """Each fault gives the same error on all ranks, or the right result; only absent ranks depend on the clock."""
    planned = [case for case in calls.plan(7, 900, sorted(ENTRIES)) if case.size == 2 and case.index % 3 == 0]
    planned = [case for case in planned if fault_of(case.seed, case.entry, 2).kind != "absent"]
    lane, outcomes = calls.Lane(timeout_s=60, hang_s=120), []
    try:
        for (
            case
        ) in planned:  # the names of entry points decide which faults are drawn: there may be many errors in a row
            if case.index >= 90 and len(outcomes) >= 10 and len({one.outcome for one in outcomes}) >= 2:
                break
            outcomes.append(lane.run(case))
    finally:
        lane.close()
    assert not [one for one in outcomes if not one.allowed]
    assert len({one.outcome for one in outcomes}) >= 2, "errors, and calls that are right"


@pytest.mark.planted
@pytest.mark.parametrize(
    ("name", "fault", "outcome", "timeout_s", "hang_s"),
    [
        ("planted silent", "x with a NaN", "wrong", 60, 120),
        ("planted hang", "x in float32", "hang", 60, 2),
        ("planted abort", "x in float32", "process lost", 60, 120),
        ("planted alone", "x in float32", "error and timeout", 1, 120),
    ],
)
def test_the_campaign_can_fail(name, fault, outcome, timeout_s, hang_s, capsys):
    seed = next(f"{i}" for i in range(1000) if fault_of(f"{i}", name, 2).text == fault)
    lane = calls.Lane(timeout_s, hang_s)
    try:
        found = lane.run(calls.Planned(0, seed, name, 2))
    finally:
        lane.close()
    assert (found.outcome, found.allowed) == (outcome, False)
    code = calls.finish("calls", calls.CLASSES, [found], calls.parsed([]), 0.0)
    assert code == 1
    assert f"OFFENDING, {outcome}: [0] {name} on 2 ranks" in capsys.readouterr().out


def test_every_public_name_is_known():
    public_names.check(ENTRIES)
    with pytest.raises(NotImplementedError, match=r"no right call is known of functional.new_loss"):
        public_names.check(ENTRIES, [*public_names.public_names(), "functional.new_loss"])
    for name in ("functional.clip_loss", "CLIPLoss", "comm.all_gather", "GradCache", "WholeBatch"):
        with pytest.raises(NotImplementedError, match=name):
            public_names.check([entry for entry in ENTRIES if not entry.startswith(name)])


def test_an_argument_without_a_known_value_is_an_error(monkeypatch):
    """A new loss is called from its signature; an argument without a known value is an error."""

    def new_loss(features, orientation, *, group=None, sync="mean"):
        raise AssertionError("not reached")

    for module in (wb.functional, wb.reference):
        monkeypatch.setattr(module, "new_loss", new_loss, raising=False)
    from losses_calls import make_loss

    with pytest.raises(NotImplementedError, match="new_loss: no right value is known for its argument 'orientation'"):
        make_loss("new_loss", World("0", 0, 2, None, ""))

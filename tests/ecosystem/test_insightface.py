"""insightface's own train_v2.py on two processes, with one changed line: the weights of one process on the whole batch.

    WHOLEBATCH_INSIGHTFACE=/path/to/recognition/arcface_torch make ecosystem ARGS=tests/ecosystem/test_insightface.py

In each case one process trains by the same script with a dense reference. Weights are float64, so that the distance of
two runs is rounding; it is relative to the distance that training has moved the weights.
"""

import inspect
from functools import cache

import insightface_audits
import pytest
import torch
from insightface_runs import BATCH, FOLDER, STEPS, train

import wholebatch as wb
from wholebatch.integrations.insightface import PartialFC_V2
from wholebatch.testing import run_ranks

if not FOLDER:
    pytest.skip("WHOLEBATCH_INSIGHTFACE names no folder of insightface's arcface_torch", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("default")  # their script warns

ROUNDING = 1e-12
ROUNDING_OF_ADAM = 1e-9  # it divides by the root of squares, and some gradients are tiny
CASES = {
    "arcface": {},
    "unfitted": {"noise": 9.0},
    "cosface": {"margin_list": (1.0, 0.0, 0.4)},
    "adamw": {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1},
    "accumulation": {"gradient_acc": 4},
    "fp16": {"fp16": True},
    "filtered": {"interclass_filtering_threshold": 0.9},
    "sampled": {"sample_rate": 0.3},
    "sampled, adamw": {"sample_rate": 0.3, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1},
}
HALF = {"images": STEPS // 2 * BATCH}  # half of the steps of the schedule in an epoch


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    @cache
    def run(case, variant, ranks):
        return train(tmp_path_factory.mktemp("run") / "out", ranks, variant, **CASES[case])

    return run


def rounding(case):
    return ROUNDING_OF_ADAM if "adamw" in case else ROUNDING


def distance(found, true):
    return ((found.weights - true.weights).norm() / true.moved).item()


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_weights_of_one(run, case):
    found, true = run(case, "ours", 2), run(case, "dense", 1)
    print(f"{case}: ours {distance(found, true):.1e}")
    assert distance(found, true) < rounding(case)
    assert found.losses == pytest.approx(true.losses, rel=rounding(case))


@pytest.mark.parametrize("case", [name for name in CASES if "sampled" not in name])
def test_theirs_ends_there_too(run, case):
    """Its gradient is that of the whole batch; the loss that it logs is cut at -log(1e-30) for each row."""
    found, true = run(case, "theirs", 2), run(case, "dense", 1)
    print(f"{case}: theirs {distance(found, true):.1e}, logged {found.losses[0]:.2f} of {true.losses[0]:.2f}")
    assert distance(found, true) < rounding(case)
    assert distance(found, run(case, "ours", 2)) < rounding(case)
    if case == "unfitted":
        assert true.losses[0] - found.losses[0] > 1


def test_theirs_draws_other_classes_and_is_exact_for_them(run, tmp_path):
    found = run("sampled", "theirs", 2)
    true = train(tmp_path / "dense", 1, "dense", given=found.drawn, **CASES["sampled"])
    print(f"sampled: theirs, for its own classes, {distance(found, true):.1e}")
    assert distance(found, true) < ROUNDING
    assert distance(found, run("sampled", "dense", 1)) > 0.01


def test_exact_derivatives_of_margins_on_request(run):
    found, true = run("arcface", "ours, exact", 2), run("arcface", "dense, exact", 1)
    print(f"exact: {distance(found, true):.1e}, straight-through {distance(run('arcface', 'ours', 2), true):.2f}")
    assert distance(found, true) < 1e-9  # the reference's arccosine
    assert distance(run("arcface", "ours", 2), true) > 0.01


def test_other_margins_end_elsewhere(run):
    assert distance(run("cosface", "ours", 2), run("arcface", "dense", 1)) > 0.01
    assert distance(run("filtered", "ours", 2), run("arcface", "dense", 1)) > 0.001


@pytest.mark.parametrize("case", ["arcface", "adamw"])
def test_each_resumes_the_checkpoints_of_the_other(tmp_path, case):
    ends = {}
    for first in ("theirs", "ours"):
        train(tmp_path / first, 2, first, **HALF, **CASES[case])
        for second in ("theirs", "ours"):
            ends[first, second] = train(
                tmp_path / f"{first}-{second}", 2, second, start=tmp_path / first, num_epoch=2, **HALF, **CASES[case]
            )
    true = ends["theirs", "theirs"]
    assert true.moved > 0
    for found in ends.values():
        assert distance(found, true) < rounding(case)


def adamw_body(folder, rows):
    head = PartialFC_V2(wb.ArcFace(64.0, 0.5), rows.shape[1], len(rows)).double()
    optimizer = torch.optim.AdamW(head.parameters())
    wb.heads.load_insightface(folder, head, optimizer)
    return {"weight": head.weight.detach(), **optimizer.state[head.weight]}


@pytest.mark.parametrize("variant", ["theirs", "ours"])
def test_averages_of_adamw_that_the_script_saved_are_read_on_other_numbers_of_processes(tmp_path, variant):
    train(tmp_path / "run", 2, variant, **HALF, **CASES["adamw"])
    files = [torch.load(tmp_path / "run" / f"checkpoint_gpu_{rank}.pt") for rank in range(2)]
    states = [[*file["state_optimizer"]["state"].values()][-1] for file in files]
    true = {name: torch.cat([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")}
    true["weight"] = torch.cat([file["state_dict_softmax_fc"]["weight"] for file in files])
    for ranks in (1, 3):
        found = run_ranks(adamw_body, ranks, tmp_path / "run", true["weight"], timeout_s=60)
        for name, x in true.items():
            assert torch.equal(torch.cat([of_rank[name] for of_rank in found]), x), name
        assert {of_rank["step"].item() for of_rank in found} == {states[0]["step"].item()} == {STEPS // 2}


def test_samples_continue_after_a_checkpoint(tmp_path):
    sampled = CASES["sampled"]
    train(tmp_path / "first", 2, "ours", **HALF, **sampled)
    resumed = train(tmp_path / "second", 2, "ours", start=tmp_path / "first", num_epoch=2, **HALF, **sampled)
    whole = train(tmp_path / "whole", 2, "ours", num_epoch=2, num_image=HALF["images"], **HALF, **sampled)
    assert torch.equal(resumed.weights, whole.weights)


def test_gradients_in_float16_as_the_script_sends_them(tmp_path):
    """Its hook of DDP rounds the backbone's gradient, so that one process differs from two, with any classifier."""
    settings = {"dtype": torch.float32, "compress": True}
    found, theirs = (train(tmp_path / name, 2, name, **settings) for name in ("ours", "theirs"))
    print(f"float32, float16 gradients: {distance(found, theirs):.1e}")
    assert distance(found, theirs) < 1e-3


@pytest.mark.parametrize("name", insightface_audits.SETTINGS)
def test_the_audit_finds_the_gradients_exact(name):
    """And it notes that margins are detached, except where theirs has an exact derivative, or ours is asked for it."""
    report = wb.audit(insightface_audits.SETTINGS[name], ranks=(1, 2))
    assert report.exact, report
    straight_through = "ArcFace" in name and "exact" not in name
    assert [finding.cause.name for finding in report.findings] == ["detached"] * straight_through


def test_the_constructor_takes_their_arguments(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import partial_fc_v2

    from wholebatch.integrations.insightface import PartialFC_V2

    theirs = inspect.signature(partial_fc_v2.PartialFC_V2.__init__).parameters
    ours = list(inspect.signature(PartialFC_V2.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs.values()]

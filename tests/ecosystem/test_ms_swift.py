"""ms-swift's own `swift sft` on two processes: 20 steps with our loss give the weights of one on the whole batch.

    make embedders

ms-swift's own loss is exact as well: the two are the same loss, and ours needs less time and memory. In each case one
process trains with ms-swift's loss on the whole batch, which is the truth. Weights are float64. The distance between
two runs is relative to the distance that training has moved the weights.
"""

import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("swift") is None:
    pytest.skip("ms-swift is not installed: `make embedders`", allow_module_level=True)

import torch
from dual import distance, free_port
from ms_swift_runs import Case, arguments, make_files, run, truth

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations import ms_swift

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-12  # of the distance moved: 20 steps in float64, summed in another order
OWN = {"INFONCE_USE_BATCH": "False"}
QWEN3 = {"INFONCE_MASK_FAKE_NEGATIVE": "True", "INFONCE_INCLUDE_QQ": "True", "INFONCE_INCLUDE_DD": "True"}
CASES = {
    "plain": Case(),
    "no negatives": Case(negatives="none"),
    "numbers of negatives that differ": Case(negatives="uneven"),
    "as Qwen3-Embedding": Case(variables=QWEN3),
    "as Qwen3-Embedding, numbers that differ": Case(variables=QWEN3, negatives="uneven"),
    "own negatives": Case(variables=OWN, negatives="uneven"),
    "first negative": Case(variables={"INFONCE_HARD_NEGATIVES": "1"}),
    "one negative three times": Case(variables={"INFONCE_HARD_NEGATIVES": "3"}, negatives="one"),
    "matryoshka": Case(("--mrl_dims", '{"16": 1.0, "8": 0.5}')),
    "two micro-steps": Case(micro_steps=2),
    "two micro-steps, ModernBERT": Case(micro_steps=2, model="bert"),
}
THEIRS = {name: truth(CASES[name]) for name in ("plain", "as Qwen3-Embedding", "two micro-steps")}
LOCAL = Case(variables=OWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("ms_swift")
    make_files(found)
    return found


@pytest.fixture(scope="module")
def true(folder):
    return run(folder, [*map(truth, CASES.values())], 1)


@pytest.fixture(scope="module")
def found(folder):
    return run(folder, [*CASES.values(), *THEIRS.values(), LOCAL], 2)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(found, true, name):
    run_of_case, expected = found[repr(CASES[name])], true[repr(truth(CASES[name]))]
    away = distance(run_of_case, expected)
    print(f"{name}: {away:.1e}")
    assert away < ROUNDING
    assert run_of_case.losses == pytest.approx(expected.losses, rel=1e-5)  # logged in float32


@pytest.mark.parametrize("name", THEIRS)
def test_ms_swift_alone_does_too(found, true, name):
    away = distance(found[repr(THEIRS[name])], true[repr(THEIRS[name])])
    print(f"theirs, {name}: {away:.1e}")
    assert away < ROUNDING


def test_another_loss_ends_elsewhere(found, true):
    """The distance tells apart a loss without the other queries' documents."""
    assert distance(found[repr(LOCAL)], true[repr(truth(CASES["plain"]))]) > 0.3


@pytest.mark.parametrize(
    ("setting", "exact"),
    [
        ("infonce", True),
        ("infonce as for Qwen3-Embedding", True),
        ("infonce, INFONCE_USE_BATCH=False, against the whole batch", False),
        ("infonce of wholebatch.integrations", True),
        ("infonce of wholebatch.integrations as for Qwen3-Embedding", True),
    ],
)
def test_the_audit(setting, exact):
    report = wb.audit(presets.settings("ms_swift")[setting], ranks=(1, 2))
    assert report.exact == exact, report


def test_the_signatures_are_those_of_ms_swift():
    from swift.loss import BaseLoss

    for name in ("__init__", "__call__"):
        theirs, ours = (
            list(inspect.signature(getattr(cls, name)).parameters) for cls in (BaseLoss, ms_swift.InfonceLoss)
        )
        assert ours == theirs


def test_their_environment_variables_are_all_known():
    """A variable that a newer ms-swift adds would be ignored."""
    import re

    from swift.loss import embedding

    found = {name: set(re.findall(r"INFONCE_\w+", inspect.getsource(module))) for name, module in
             (("theirs", embedding), ("ours", ms_swift))}  # fmt: skip
    assert found["ours"] == found["theirs"]


def test_values_are_theirs_in_one_process(monkeypatch):
    """Every combination of the variables, on uneven groups, in float64."""
    from itertools import product
    from types import SimpleNamespace

    from swift.loss.embedding import InfonceLoss

    names = ["INFONCE_USE_BATCH", "INFONCE_MASK_FAKE_NEGATIVE", "INFONCE_INCLUDE_QQ", "INFONCE_INCLUDE_DD"]
    labels = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0, 0])
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(12, 5, dtype=torch.float64), dim=1)
    for values in product(("True", "False"), repeat=len(names)):
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(name, value)
        theirs, ours = (
            loss(SimpleNamespace(), object())({"last_hidden_state": x}, labels)
            for loss in (InfonceLoss, ms_swift.InfonceLoss)
        )
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)


def test_the_command_line_trains_with_the_plugin(folder):
    """As a user calls it: `swift sft --external_plugins PATH`, under torchrun, by ms-swift's own launcher."""
    port = str(free_port())
    environment = os.environ | {"NPROC_PER_NODE": "2", "MASTER_PORT": port, "HF_HUB_OFFLINE": "1"}
    argv = arguments(folder, Case(), 2, str(folder / "by_command"))
    argv[argv.index("--max_steps") + 1] = "2"
    path = subprocess.run(
        [sys.executable, "-m", "wholebatch.integrations.ms_swift"], capture_output=True, text=True, check=True
    ).stdout.strip()
    swift = Path(sys.executable).parent / "swift"
    done = subprocess.run(
        [swift, "sft", *argv, "--external_plugins", path, "--add_version", "false"],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Successfully imported external_plugins" in done.stdout + done.stderr
    assert "--loss_type infonce is computed by wholebatch" in done.stdout + done.stderr


def test_the_versions_are_the_tested_ones():
    assert version("ms-swift") == "4.6.0"

"""FlagEmbedding's own program on two processes: 20 steps with our loss give the weights of one on the whole batch.

    make embedders

In each case one process trains with FlagEmbedding's own loss on the whole batch, which is the truth. Weights are
float64. The distance between two runs is relative to the distance that training has moved the weights.
"""

import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("FlagEmbedding") is None:
    pytest.skip("FlagEmbedding is not installed: `make embedders`", allow_module_level=True)

from flag_embedding_runs import PROGRAMS, Case, arguments, flat, make_files, run, truth

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations import flag_embedding
from wholebatch.testing import RankError

pytestmark = pytest.mark.filterwarnings("default")  # their libraries warn

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order
TEACHER = 1e-7  # the teacher's distribution is computed in float32, from scores in an order that differs between runs
KD = ("--knowledge_distillation", "True")
MRL = ("--use_mrl", "True", "--mrl_dims", "8", "16")
DENSE_M3 = ("--unified_finetuning", "False")
CASES = {
    "plain": Case(),
    "one passage": Case(group=1),
    "not normalized": Case(("--normalize_embeddings", "False", "--temperature", "4.0")),
    "mean pooling, sub-batches": Case(("--sentence_pooling_method", "mean", "--sub_batch_size", "3")),
    "kl_div": Case((*KD, "--kd_loss_type", "kl_div")),
    "m3_kd_loss": Case((*KD, "--kd_loss_type", "m3_kd_loss"), group=2),
    "matryoshka": Case(MRL),
    "matryoshka, kl_div": Case((*MRL, *KD)),
    "two micro-steps": Case(micro_steps=2),
    "m3 without unified fine-tuning": Case(DENSE_M3, program="m3"),
}
THEIRS = {name: Case(**(vars(CASES[name]) | {"ours": False})) for name in ("plain", "kl_div", "two micro-steps")}
SAME_DATASET = Case(("--same_dataset_within_batch", "True"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("flag_embedding")
    make_files(found)
    return found


@pytest.fixture(scope="module")
def true(folder):
    return run(folder, [*map(truth, CASES.values()), truth(SAME_DATASET)], 1)


@pytest.fixture(scope="module")
def found(folder):
    return run(folder, [*CASES.values(), *THEIRS.values(), SAME_DATASET], 2)


@pytest.fixture(scope="module")
def start(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def distance(found, true, start, case):
    weights, expected = found[repr(case)].weights, true[repr(truth(case))].weights
    assert weights.keys() == expected.keys()
    assert weights.keys() <= start.keys()
    moved = flat(expected) - flat({name: start[name] for name in expected})
    return ((flat(weights) - flat(expected)).norm() / moved.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(found, true, start, name):
    case = CASES[name]
    away = distance(found, true, start, case)
    print(f"{name}: {away:.1e}")
    assert away < (TEACHER if KD[0] in case.options else ROUNDING)
    assert found[repr(case)].losses == pytest.approx(true[repr(truth(case))].losses, rel=1e-5)  # logged in float32


def test_batches_of_one_data_set(found, true, start):
    assert distance(found, true, start, SAME_DATASET) < ROUNDING


@pytest.mark.parametrize("name", THEIRS)
def test_flag_embedding_alone_ends_elsewhere(found, true, start, name):
    away = distance(found, true, start, THEIRS[name])
    print(f"theirs, {name}: {away:.2g}")
    assert away > 0.1


def test_a_trained_temperature_is_refused_on_all_ranks(folder):
    """Their checkpoints hold the encoder alone."""
    with pytest.raises(RankError, match="2 of 2 ranks failed") as error:
        run(folder, [Case(trained_temperature=True)], 2)
    assert str(error.value).count("temperature must be a number, got a tensor that is trained") >= 2


AUDITED = {
    "default: negatives of local rows": False,
    "--negatives_cross_device True": False,
    "--negatives_cross_device True, distillation by kl_div": False,
    "--negatives_cross_device True, by wholebatch.integrations": True,
    "--negatives_cross_device True, distillation by kl_div, by wholebatch.integrations": True,
}


@pytest.mark.parametrize(("name", "exact"), AUDITED.items())
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("flag_embedding")[name], ranks=(1, 2))
    assert report.exact is exact, report


# Signatures, versions, and the command.


def test_the_signature_is_that_of_flag_embedding():
    from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

    theirs = inspect.signature(AbsEmbedderModel._compute_cross_device_neg_loss).parameters.values()
    ours = inspect.signature(flag_embedding.cross_device_loss).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours][1:] == [(p.name, p.default, p.kind) for p in theirs][1:]


def test_the_installed_version_is_among_the_tested():
    assert version("FlagEmbedding") in flag_embedding.FLAG_EMBEDDING.versions


def test_the_switch_is_restored():
    from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

    before = AbsEmbedderModel._compute_cross_device_neg_loss
    flag_embedding.enable()
    flag_embedding.enable()
    assert AbsEmbedderModel._compute_cross_device_neg_loss is flag_embedding.cross_device_loss
    flag_embedding.disable()
    flag_embedding.disable()
    assert AbsEmbedderModel._compute_cross_device_neg_loss is before


# The interpreter's teardown is left out: there gloo's threads abort any DDP program now and then (torch 2.13).
SCRIPT = """
import os, runpy, sys
try:
    runpy.run_module("wholebatch.integrations.flag_embedding", run_name="__main__", alter_sys=True)
    code = 0
except SystemExit as end:
    code = end.code
sys.stdout.flush()
sys.stderr.flush()
os._exit(code or 0)
"""


def command(folder, case, name):
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    options = arguments(folder, case, 2, str(folder / name))
    return subprocess.run(
        [sys.executable, *launcher, "-m", PROGRAMS[case.program], *options],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip


def test_the_command_trains_under_torchrun(folder, found):
    from safetensors.torch import load_file

    done = command(folder, CASES["plain"], "command")
    assert done.returncode == 0, done.stderr[-3000:]
    weights = load_file(folder / "command" / "model.safetensors")
    assert flat(weights).equal(flat(found[repr(CASES["plain"])].weights))


def test_unified_fine_tuning_of_m3_is_refused_on_all_ranks(folder):
    case = Case(("--unified_finetuning", "True"), program="m3", model="float32")  # M3's heads are made in float32
    done = command(folder, case, "unified")
    assert done.returncode != 0
    assert done.stderr.count("error: --negatives_cross_device True with --unified_finetuning True") == 2

"""open_clip's own trainer on two processes: with our losses, 20 steps give the weights of one on the whole batch.

    make vision

In each case one process trains with open_clip's loss on the whole batch, which is the truth. Weights are float32. The
distance between two runs is relative to the distance that training has moved the weights.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("open_clip") is None:
    pytest.skip("open_clip is not installed: `make vision`", allow_module_level=True)

import torch
from open_clip_runs import CLIP, make_data, train

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.auditing import presets

declare_torchvision_operators()
import open_clip  # noqa: E402
from open_clip import loss as theirs  # noqa: E402

from wholebatch.integrations import open_clip as ours  # noqa: E402
from wholebatch.integrations._framework import Framework, FrameworkError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # open_clip's libraries warn

PAIRS = 32
# Without momentum and decay, and with steps that are small, so that rounding does not grow from step to step.
SGD = ["--opt", "timm/momentum", "--momentum", "0", "--wd", "0", "--lr", "1e-3"]
ROUNDING = 1e-5  # of the distance moved: 20 steps in float32, summed in another order
LOSSES = {
    "clip": [],
    "siglip": ["--siglip"],
    "coca": ["--model", "tiny-coca", "--lr", "3e-4"],
    "distill": ["--distill-model", "tiny-vit", "--distill-pretrained", "TEACHER"],
}
EXACT_FLAGS = ["--local-loss", "--gather-with-grad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("open_clip")
    make_data(found, PAIRS)
    torch.save(train(found, 1, PAIRS, "--seed", "7", *SGD, steps=1, name="teacher").weights, found / "teacher.pt")
    return found


@pytest.fixture(scope="module")
def run(folder):
    @cache
    def run(name, ranks, *options, **settings):
        given = [str(folder / "teacher.pt") if x == "TEACHER" else x for x in LOSSES[name]]
        label = re.sub(r"[^\w.-]+", "_", "-".join([name, str(ranks), *options, *map(str, settings.items())]))
        return train(folder, ranks, PAIRS, *SGD, *given, *options, name=label, **settings)

    return run


def flat(weights):
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def distance(run, name, *found_options, **settings):
    """Return how far a run on two processes ends from that of one, relative to the way that the latter has gone."""
    true, start = run(name, 1), run(name, 1, "--lr", "0", steps=1)
    found = run(name, 2, *found_options, **settings)
    assert found.weights.keys() == true.weights.keys()
    moved = flat(true.weights) - flat(start.weights)
    return ((flat(found.weights) - flat(true.weights)).norm() / moved.norm()).item()


def assert_equal_to_one_process(run, name, *options, **settings):
    away = distance(run, name, *options, ours=True, **settings)
    assert away < ROUNDING, f"{name} {options} ends {away:.1e} of the way off"
    found = run(name, 2, *options, ours=True, **settings)
    assert found.losses == pytest.approx(run(name, 1).losses, rel=2e-4)  # the log has five digits


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_end_with_the_weights_of_one(run, name):
    assert_equal_to_one_process(run, name)


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("clip", (), 0.2),  # the default flags: encoders get half of their gradient
        ("clip", ("--local-loss",), 0.5),  # the wrong direction
        ("coca", tuple(EXACT_FLAGS), 1e-4),  # the mean of the ranks' means over tokens
        ("distill", (), 0.2),
    ],
)
def test_open_clip_alone_ends_elsewhere(run, name, options, least):
    assert distance(run, name, *options) > least


@pytest.mark.parametrize(("name", "options"), [("clip", tuple(EXACT_FLAGS)), ("siglip", ())])
def test_open_clip_alone_is_exact_in_these_settings(run, name, options):
    assert distance(run, name, *options) < ROUNDING


def test_flags_that_are_not_needed_are_named_and_change_nothing(run):
    assert_equal_to_one_process(run, "clip", "--local-loss")
    assert "--local-loss: no longer needed" in run("clip", 2, "--local-loss", ours=True).log


@pytest.mark.parametrize("name", ["clip", "siglip", "coca"])
def test_accumulation_counts_the_scale_once(run, name):
    assert_equal_to_one_process(run, name, "--accum-freq", "2", micro_steps=2)


def test_open_clips_accumulation_multiplies_the_gradient_of_the_scale(run):
    options = ["--accum-freq", "2", *EXACT_FLAGS]
    start = run("clip", 1, "--lr", "0", steps=1).weights["logit_scale"]
    true = run("clip", 1, steps=1).weights["logit_scale"] - start
    found = run("clip", 2, *options, micro_steps=2, steps=1).weights["logit_scale"] - start
    assert (found / true).item() == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("clip", ()), ("siglip", ()), ("distill", ()), ("clip", ("--grad-checkpointing", "--ddp-static-graph"))],
)
def test_chunks_give_the_same_weights(run, name, options):
    assert_equal_to_one_process(run, name, "--wholebatch-chunk-size", "5", *options)


@pytest.mark.skipif(not hasattr(open_clip, "create_task"), reason="open_clip 3 has no FSDP")
@pytest.mark.parametrize("options", [(), ("--wholebatch-chunk-size", "5")])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_fsdp(run, name, options):
    assert_equal_to_one_process(run, name, "--fsdp", *options)


@pytest.mark.skipif(hasattr(open_clip, "create_task"), reason="the audit's loop is that of open_clip 3")
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("ClipLoss, default flags", False),
        ("ClipLoss of wholebatch.integrations", True),
        ("ClipLoss of wholebatch.integrations, --accum-freq 4", True),
        ("SigLipLoss of wholebatch.integrations", True),
    ],
)
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("open_clip")[name], ranks=(1, 2))
    assert report.exact is exact, report


# Refusals.


def refused(*options):
    from wholebatch.integrations.open_clip import main

    main(["--train-data", "x", "--device", "cpu", "--logs", "none", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--accum-freq", "4", "--batch-size", "8", "--wholebatch-chunk-size", "4"],
            "pass instead --batch-size 32 ",
        ),
        (["--model", "coca_ViT-B-32", "--wholebatch-chunk-size", "4"], "needs the logits of all tokens"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        refused(*options)


@pytest.mark.skipif(not hasattr(theirs.ClipLoss(), "use_horovod"), reason="open_clip 4 has no Horovod")
def test_horovod_is_refused():
    with pytest.raises(ValueError, match="--horovod has no counterpart"):
        refused("--horovod")


def test_the_seams_are_restored():
    from open_clip_train import main as module

    before = dict(vars(module))
    with pytest.raises(ValueError, match="--wholebatch"):
        refused("--accum-freq", "2", "--wholebatch-chunk-size", "4")
    assert dict(vars(module)) == before


def test_the_seams_are_restored_after_an_error(monkeypatch):
    from open_clip_train import main as module

    def fail(_args):
        replaced = {name for name, value in vars(module).items() if value is not before[name]}
        raise RuntimeError(f"replaced: {sorted(replaced)}")

    monkeypatch.setattr(module, "main", fail)
    before = dict(vars(module))
    with pytest.raises(RuntimeError, match=r"replaced: \['create_(loss|task)', 'train_one_epoch'\]"):
        refused("--wholebatch-chunk-size", "4")
    assert dict(vars(module)) == before


# Signatures and versions.


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss", "CoCaLoss", "DistillClipLoss"])
def test_signatures_are_those_of_open_clip(name):
    """The constructors have open_clip's arguments first; only later ones are ours. The calls are equal."""
    for method in ("__init__", "forward"):
        of_theirs, of_ours = (
            [(p.name, p.default) for p in inspect.signature(getattr(getattr(x, name), method)).parameters.values()]
            for x in (theirs, ours)
        )
        assert of_ours[: len(of_theirs)] == of_theirs
        assert method == "__init__" or of_ours == of_theirs


def test_the_installed_version_is_among_the_tested():
    assert open_clip.__version__ in ours.OPEN_CLIP.versions


def test_other_versions(monkeypatch):
    framework = Framework("open_clip", ("3.3.0",), "pip install open_clip_torch")
    monkeypatch.setattr(open_clip, "__version__", "3.2.9")
    with pytest.raises(
        FrameworkError, match=r"open_clip 3\.2\.9 is too old; this adapter was tested with 3\.3\.0: pip"
    ):
        framework.load("open_clip")
    monkeypatch.setattr(open_clip, "__version__", "99.0")
    assert framework.load("open_clip") is open_clip
    with pytest.raises(FrameworkError, match=r"of open_clip 99\.0 has no create_nothing, where"):
        framework.seam(open_clip, "create_nothing")


def test_a_loss_with_an_argument_that_we_do_not_know_warns():
    class ClipLoss(theirs.ClipLoss):
        def forward(self, image_features, text_features, logit_scale, surprise=None, output_dict=False):
            raise NotImplementedError

    args = type("Args", (), {"rank": 1, "accum_freq": 1})
    with pytest.warns(UserWarning, match="takes surprise, which its counterpart here does not know"):
        ours.counterpart_of(ClipLoss(), args)


# The command.

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# The command as a script that lets DDP take the CPU. It ends without the interpreter's teardown, in which gloo's
# threads abort any DDP program now and then (torch 2.13).
SCRIPT = """
import os, runpy, sys
sys.path[:0] = {path}
from open_clip_runs import let_ddp_take_the_cpu
let_ddp_take_the_cpu()
try:
    runpy.run_module("wholebatch.integrations.open_clip", run_name="__main__", alter_sys=True)
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)
"""


@pytest.fixture(scope="module")
def command(folder):
    """Return a function that runs the command on this many processes."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP, "preprocess_cfg": {}}))
    here = Path(__file__).parent
    (folder / "script.py").write_text(SCRIPT.format(path=[str(here), str(here.parent)]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])

    def command(processes, *options):
        start = ["-m", "wholebatch.integrations.open_clip"] if processes == 1 else [*TORCHRUN, "script.py"]
        return subprocess.run(
            [sys.executable, *start, *options],
            cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=environment,
        )  # fmt: skip

    return command


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_trains(folder, command, processes):
    found = command(
        processes, "--train-data", "pairs.csv", "--dataset-type", "csv", "--device", "cpu", "--workers", "0",
        "--model", "local-dir:tiny", "--batch-size", str(PAIRS // processes), "--epochs", "2", "--warmup", "0",
        "--precision", "fp32", "--name", f"command-{processes}", "--wholebatch-chunk-size=12",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    log = (folder / "logs" / f"command-{processes}" / "out.log").read_text()
    assert log.count("wholebatch computes ClipLoss over the whole batch") == 1
    assert log.count("Train Epoch") == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--wholebatch-chunk-size", "4", "--accum-freq", "2"],
            "python -m wholebatch.integrations.open_clip: error: --accum-freq 2 and --wholebatch-chunk-size 4 both",
        ),
        (["--wholebatch-chunk-size", "none"], "must be a number of rows, at least 1, got 'none'"),
    ],
)
def test_a_mistake_is_one_line(command, options, line):
    found = command(1, *options)
    assert found.returncode == 2
    assert line in found.stderr
    assert "Traceback" not in found.stderr


def test_help_names_the_option_of_the_command(command):
    found = command(1, "--help")
    assert found.returncode == 0
    assert "--wholebatch-chunk-size N" in found.stdout
    assert "--local-loss" in found.stdout

"""The needs of a run of a week: figures, trackers, options in a file, extensions, an early end, a full disk."""

import io
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from glyph_files import SMALL, write_pairs
from rich.console import Console
from train_runs import metrics, options, recorded

from wholebatch.__main__ import main
from wholebatch._base.tensor_file import TensorFile
from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train.config import TrainConfig
from wholebatch_train.option_checks import check_options
from wholebatch_train.progress import Progress
from wholebatch_train.ranks.all_ranks import from_first_rank
from wholebatch_train.run import checkpoint
from wholebatch_train.run.figures import MEASURED, Best, Pace, TensorBoard
from wholebatch_train.run.record import Extension, Schedule, read_record
from wholebatch_train.tasks.retrieve import Retrieve

QUICK = ["--no-audit", "--no-tensorboard"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Return a run of 12 steps, with validations after 6 and 12 and checkpoints after 5, 10 and 12."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", *options(data, run, *QUICK)]) == 0
    return run


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_drawn():
    """Leave out the pictures, which take longer than the steps."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("wholebatch_train.run.run_folder.render", lambda report: report.title)
        yield


class KilledError(Exception):
    """An end that the program does not expect, after which nothing more is written."""


def killed_in(monkeypatch, step, *argv):
    """Run until the pass of this step, counted from 0, which raises."""

    def dies(self, at):
        if at == step:
            raise KilledError
        return original(self, at)

    original = Retrieve.add_gradients
    with monkeypatch.context() as patches:
        patches.setattr(Retrieve, "add_gradients", dies)
        with pytest.raises(KilledError):
            main(["train", *argv])


def one_line(capsys, *argv):
    capsys.readouterr()
    assert main(["train", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# Figures.
def test_metrics_and_lines_have_the_figures_of_speed_and_memory(data, tmp_path, capsys):
    assert main(["train", *options(data, tmp_path / "run", *QUICK)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["examples_per_second"] > 0
        assert row["peak_rss_bytes"] > 2**26
        assert {"loss", "grad_norm", "logit_scale", "learning_rate", "seconds"} <= row.keys()
    assert set(rows[0]) - set(MEASURED) == {"step", "loss", "logit_scale", "learning_rate", "grad_norm"}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert (tmp_path / "run" / "report.html").read_text() == "retrieve · pairs.csv"
    for word in ("loss", "grad norm", "logit scale", "examples/s", "B, ", "left", "validation recall@1"):
        assert word in lines[1], word
    assert lines[0].startswith("step    3/12")
    assert "left" not in lines[-1], "nothing is left after the last step"


def lines_of(*, done, steps, to):
    """Return the plain lines of a start whose first step takes 50 s, and each other one 2 s."""
    now, printed = 0.0, io.StringIO()
    progress = Progress(lambda: now)
    progress._console = Console(file=printed, width=200, soft_wrap=True, color_system=None)
    task = SimpleNamespace(describe=lambda: "pairs", headline=lambda validation: "recall@1 0.610 among 325")
    progress.start(TrainConfig(), task, size=1, done=done, steps=steps)
    for step in range(done + 1, to + 1):
        now += 50.0 if step == done + 1 else 2.0
        progress.step({"step": step, "loss": 1.0, "grad_norm": 1.0, "examples_per_second": 9.0, "seconds": now})
    return printed.getvalue().splitlines()[2:]


def test_a_log_file_has_an_estimate_of_the_time_left_after_three_steps():
    first, early, tenth = lines_of(done=0, steps=103, to=10)
    assert first == "the first step took 50.0 s, loss 1.0000"
    assert early.startswith("step    3/103  loss")
    assert early.endswith(", 3.33 min left"), "without the first step, which would make it 30 min"
    assert tenth.startswith("step   10/103  loss")
    assert tenth.endswith(", 3.1 min left")
    resumed = lines_of(done=7, steps=103, to=10)
    assert [line[:12] for line in resumed] == ["the first st", "step   10/10"], "the third step of this start"
    assert len(lines_of(done=0, steps=3, to=3)) == 2, "nothing is left after the last step"


def test_the_rate_is_that_of_the_last_steps():
    now = 0.0
    pace = Pace(10, lambda: now)
    for _ in range(50):
        now += 1.0
        assert pace.step() == 10.0
    for _ in range(20):
        now += 0.5
        rate = pace.step()
    assert rate == 20.0, "not the mean since the start, 12"


def test_the_peak_of_memory_grows_with_a_tensor():
    """In a process of its own: the peak of this one may be that of another test."""
    program = """
import torch
from wholebatch_train.run.figures import peak_memory

before = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
kept = torch.ones(2**27)
print((peak_memory(torch.device("cpu"))["peak_rss_bytes"] - before) / kept.nbytes)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert float(ran.stdout) >= 0.5


# Trackers.
def curve_of(run, tag="train/loss"):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0}
    )
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_curves_in_tensorboard_hold_each_step_once_after_a_kill(data, tmp_path, monkeypatch, whole):
    run = tmp_path / "run"
    killed_in(monkeypatch, 8, *options(data, run, "--no-audit"))
    assert [step for step, _ in curve_of(run)] == list(range(1, 9))
    assert main(["train", "--resume", str(run)]) == 0
    expected = [(row["step"], pytest.approx(row["loss"])) for row in metrics(whole)]
    assert curve_of(run) == expected
    assert [step for step, _ in curve_of(run, "validation/image_to_text/recall@1")] == [6, 12]
    assert [step for step, _ in curve_of(run, "test/image_to_text/recall@1")] == [12]


def test_curves_of_two_processes_are_read_in_their_order_even_within_a_second(tmp_path):
    pytest.importorskip("tensorboard")
    for done in range(3):
        TensorBoard(tmp_path, done).flush()
    seconds = [file.name.split(".")[3] for file in tmp_path.iterdir()]
    assert len({*seconds}) == 3, "one second, so the lower number of a process would be read first"


@pytest.mark.planted
def test_without_a_purge_steps_would_come_twice(data, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    killed_in(monkeypatch, 8, *options(data, run, "--no-audit"))
    monkeypatch.setattr("wholebatch_train.run.figures.TensorBoard.__init__", _without_purge)
    assert main(["train", "--resume", str(run)]) == 0
    steps = [step for step, _ in curve_of(run)]
    assert len(steps) > len({*steps})


def _without_purge(self, folder, done):
    from torch.utils.tensorboard import SummaryWriter

    self._folder, self._writer = folder, SummaryWriter(str(folder))


def test_a_missing_tensorboard_is_one_line(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", *options(data, tmp_path / "a", "--no-audit", steps=2)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("tensorboard is not installed: pip install tensorboard\n") == 1
    assert main(["train", *options(data, tmp_path / "b", "--no-audit", "--no-tensorboard", steps=2)]) == 0
    assert "TensorBoard" not in capsys.readouterr().out
    assert not (tmp_path / "b" / "tensorboard").exists()


def test_weights_and_biases_continues_its_run(data, tmp_path, monkeypatch):
    """The stand-in for wandb keeps its rules: a resumed run goes on after its last step, and refuses earlier ones."""
    logged, started = {}, []

    class Run:
        def __init__(self, **options):
            started.append(options)
            self.step = max(logged, default=-1) + 1

        def log(self, figures, *, step):
            assert step >= self.step
            self.step = step
            logged.setdefault(step, {}).update(figures)

        def finish(self):
            started[-1]["finished"] = True

    module = ModuleType("wandb")
    module.init, module.__spec__ = Run, ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = tmp_path / "run"
    killed_in(monkeypatch, 8, *options(data, run, *QUICK, "--wandb", "characters"))
    assert main(["train", "--resume", str(run)]) == 0
    assert [each["project"] for each in started] == ["characters"] * 2
    assert started[0]["id"] == started[1]["id"] == (run / "wandb-id").read_text().strip()
    assert started[0]["config"]["batch_size"] == int(SMALL[SMALL.index("--batch-size") + 1])
    assert all(each["finished"] for each in started)
    assert sorted(logged) == list(range(1, 13))
    assert logged[12]["train/loss"] == metrics(run)[-1]["loss"]


def test_a_missing_wandb_is_a_mistake(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wholebatch_train.cli.find_spec", lambda name: None)
    assert "--wandb needs wandb: pip install wandb" in one_line(
        capsys, *options(data, tmp_path / "run", "--wandb", "characters")
    )
    assert not (tmp_path / "run").exists()


# Extensions.
def test_an_extension_is_a_cosine_of_the_new_length_reached_from_the_present_rate():
    base = Schedule(100, 10)
    rates = [base.rate(2.0, step) for step in range(100)]
    assert rates[0] == 0.2
    assert rates[50] == pytest.approx(1.0)
    extended = base.extended(100, 200)
    assert [extended.rate(2.0, step) for step in range(100)] == rates, "steps of before are what they were"
    after = [extended.rate(2.0, step) for step in range(100, 200)]
    cosine = [Schedule(200, 0).rate(2.0, step) for step in range(100, 200)]
    assert after[9:] == pytest.approx(cosine[9:])
    assert after[0] == pytest.approx(cosine[0] / 10), "no jump: a tenth of the way from 0"
    assert all(a < b for a, b in pairwise(after[:10]))
    twice = extended.extended(150, 400)
    assert [twice.rate(2.0, step) for step in range(150)] == [extended.rate(2.0, step) for step in range(150)]
    assert twice.steps == 400
    assert twice.rate(2.0, 399) == pytest.approx(Schedule(400, 0).rate(2.0, 399))
    assert extended.extended(130, 200) is extended, "the same command again changes nothing"
    assert extended.extended(100, 300).extensions == (Extension(100, 300),), "nothing was trained in between"
    assert base.extended(40, 60).extended(40, 100) == base
    short = base.extended(92, 96)  # fewer steps than the warm-up: half of them reach the cosine
    assert [short.rate(2.0, step) for step in (93, 94, 95)] == [
        Schedule(96, 0).rate(2.0, step) for step in (93, 94, 95)
    ]


def extended_twice(run, kill=None):
    """Extend a run of 12 steps to 20 and to 30; `kill` ends some of the starts."""
    resume = ["--resume", str(run)]
    if kill:
        kill(17, *resume, "--until-step", "20")
    assert main(["train", *resume, "--until-step", "20"]) == 0
    if kill:
        kill(22, *resume, "--until-step", "30")
        kill(28, *resume)
    assert main(["train", *resume, *([] if kill else ["--until-step", "30"])]) == 0


def test_a_run_that_is_extended_twice_and_killed_in_between_has_the_same_bits(whole, tmp_path, monkeypatch, capsys):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for run in (calm, killed):
        shutil.copytree(whole, run)
    extended_twice(calm)

    def killing(step, *argv):
        killed_in(monkeypatch, step, *argv)

    capsys.readouterr()
    extended_twice(killed, killing)
    printed = capsys.readouterr().out
    line = "extended at step 12 to 20: the learning rate goes on along the cosine of 20 steps, reached over 2 steps"
    assert printed.count(line) == 2
    assert printed.count("extended at step 20 to 30") == 3
    assert recorded(killed) == 30
    assert metrics(killed) == metrics(calm)
    assert metrics(killed)[:12] == metrics(whole)
    assert (killed / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
    record = read_record(killed)
    assert record.extensions == (Extension(12, 20), Extension(20, 30))
    rates = [row["learning_rate"] for row in metrics(killed)]
    schedule = Schedule(12, 2, record.extensions)
    assert rates == [schedule.rate(0.002, step) for step in range(30)]
    assert [start.step for start in record.starts] == [0, 12, 15, 20, 20, 25]


def test_mistakes_of_extensions(whole, data, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    resume = ["--resume", str(run)]
    assert "--until-step must be given with --resume, to extend a run, got 20" in one_line(capsys, "--until-step", "20")
    assert "--until-step must be at least 12, the steps made so far; got 3" in one_line(
        capsys, *resume, "--until-step", "3"
    )
    assert "Leave these options out" in one_line(capsys, *resume, "--steps", "20"), "--steps alone does not extend"
    assert read_record(run).extensions == ()
    assert main(["train", *resume, "--until-step", "14"]) == 0
    record, whole_file = read_record(run), (run / "config.json").read_bytes()
    (run / "config.json").write_bytes(whole_file.replace(b'"steps": 14', b'"steps": 15'))
    assert "it is damaged, or was edited" in one_line(capsys, *resume)
    for extensions, message in (
        ((), "config.json is not the file that the checkpoint"),
        (((12, 15),), "config.json is not the file that the checkpoint"),
        (((12, 14), (99, 200)), "extends it at step 99, but its checkpoint is of step 14"),
        (((12, 14), (12, 20)), "must extend the run at later and later steps"),
    ):
        record._replace(extensions=tuple(Extension(*each) for each in extensions)).write(run)
        assert message in one_line(capsys, *resume)
    killed_in(monkeypatch, 2, *options(data, tmp_path / "new", *QUICK))
    assert "the run has no checkpoint yet" in one_line(capsys, "--resume", str(tmp_path / "new"), "--until-step", "20")


# An early end.
def validations(monkeypatch, figures):
    """Let the validations of a run have these figures, by step."""
    monkeypatch.setattr(Retrieve, "headline_figure", lambda self, validation: validation["image_to_text"]["recall@1"])

    def validate(self):
        step = int(self._optimizer.state[next(iter(self._encoder.parameters()))]["step"])
        found = dict.fromkeys(("recall@1", "recall@5", "recall@10"), figures[step // 2 - 1])
        return {"image_to_text": found, "text_to_image": found}

    monkeypatch.setattr(Retrieve, "validate", validate)


def steps_of(report):
    (found,) = [setting.value for setting in report.settings if setting.name == "steps"]
    (fact,) = [fact for fact in report.facts if fact.name == "steps"]
    assert found == fact.value or fact.note.endswith("; 16 planned")
    return found


def test_patience_ends_the_run_and_keeps_the_best_weights(data, tmp_path, monkeypatch, capsys):
    run, every = tmp_path / "run", ["--validate-every", "2", "--patience", "3"]
    figures = [0.1, 0.4, 0.3, 0.4, 0.2, 0.9, 0.9, 0.9]
    validations(monkeypatch, figures)
    kept = []
    add_gradients = Retrieve.add_gradients

    def noting(self, step):
        kept.append({name: x.clone() for name, x in self.weights().items()})
        return add_gradients(self, step)

    monkeypatch.setattr(Retrieve, "add_gradients", noting)
    reports = []
    monkeypatch.setattr("wholebatch_train.run.run_folder.render", lambda report: reports.append(report) or "")
    assert main(["train", *options(data, run, *QUICK, *every, steps=16)]) == 0
    assert steps_of(reports[-1]) == "16 planned, ended after step 10 by --patience 3"
    assert recorded(run) == 10, "step 4 was the best; 6, 8 and 10 were not better, equal included"
    assert "ended after step 10: no validation of the last 3 was better than that of step 4" in capsys.readouterr().out
    with TensorFile(run / "best.safetensors") as file:
        assert file.metadata["step"] == "4"
        best = {name: file.read(name) for name in file.entries}
    assert all(torch.equal(x, kept[4][name]) for name, x in best.items()), "the weights after 4 steps"
    assert not all(torch.equal(x, kept[9][name]) for name, x in best.items())
    assert checkpoint.last_step(run, recorded=10, checkpoint_every=5) == 10

    for more in ([], ["--until-step", "16"]):  # which is no extension: the run was planned for 16 steps
        assert main(["train", "--resume", str(run), *more]) == 0
        assert recorded(run) == 10, "a run that has ended early has ended"
        assert "; --resume with --patience 0, or with a larger one, trains on" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--patience", "4"]) == 0
    assert recorded(run) == 16, "more patience goes on"
    assert steps_of(reports[-1]) == "16"
    assert "trains on" not in capsys.readouterr().out


def test_a_resumed_run_ends_at_the_same_step(data, tmp_path, monkeypatch):
    run, every = tmp_path / "run", ["--validate-every", "2", "--patience", "3"]
    validations(monkeypatch, [0.1, 0.4, 0.3, 0.4, 0.2, 0.9, 0.9, 0.9])
    killed_in(monkeypatch, 7, *options(data, run, *QUICK, *every, steps=16))
    assert main(["train", "--resume", str(run)]) == 0
    assert recorded(run) == 10


def test_an_extension_gives_patience_a_new_start():
    def best(since, figures):
        task = SimpleNamespace(headline_figure=lambda validation: validation["x"])
        rows = [{"step": 2 * i + 2, "validation": {"x": x}} for i, x in enumerate(figures)]
        return Best(task, 2, since, [{"step": 1}, *rows])

    assert best(0, [0.5, 0.4, 0.3]).is_over
    assert not best(6, [0.5, 0.4, 0.3]).is_over
    assert not best(6, [0.5, 0.4, 0.3, 0.1]).is_over
    assert best(6, [0.5, 0.4, 0.3, 0.1, 0.1]).is_over
    assert best(6, [0.5, 0.4, 0.3]).step == 2, "the best one is that of the whole run"


def test_patience_must_not_be_negative():
    with pytest.raises(UserError, match="--patience must be at least 0, got -1"):
        check_options(TrainConfig(patience=-1))


def test_the_best_weights_are_kept_unless_the_run_is_not_to(whole, data, tmp_path):
    with TensorFile(whole / "best.safetensors") as file:
        step = int(file.metadata["step"])
    figures = {row["step"]: row["validation"]["image_to_text"]["recall@1"] for row in metrics(whole)[5::6]}
    assert step == max(figures, key=figures.get), "of equal ones the first"
    assert main(["train", *options(data, tmp_path / "run", *QUICK, "--no-keep-best", steps=2)]) == 0
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_run_that_learns_by_heart_says_so_once_while_it_can_be_ended():
    def warnings(figures, losses, **more):
        """Return the steps after whose validation there is a line, and the lines."""
        best = Best(SimpleNamespace(headline_figure=lambda validation: validation["x"]), 0, 0, [])
        found = {}
        for i, (figure, loss) in enumerate(zip(figures, losses, strict=True)):
            best.is_beaten_by({"step": 10 * i + 5, "loss": loss + 0.5})  # a mean of the steps since a validation counts
            best.is_beaten_by({"step": 10 * i + 10, "loss": loss - 0.5, "validation": {"x": figure}})
            if line := best.warning(is_kept=True, **more):
                found[10 * i + 10] = line
        return found

    falling = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    ((step, line),) = warnings([0.1, 0.4, 0.3, 0.3, 0.2, 0.2], falling).items()
    assert step == 50, "three validations after the best, and once"
    assert "since step 20, whose validation was the best, the training loss has fallen from 5 to 2 and no" in line
    assert line.endswith("; Ctrl-C ends it, and best.safetensors has the weights of step 20")
    assert [*warnings([0.4, 0.3, 0.3, 0.3, 0.5, 0.2], falling)] == [40], "a better one later starts again"
    assert not warnings([0.4, 0.3, 0.3, 0.3, 0.3, 0.3], [5.0] * 6), "nothing is learned, by heart or else"
    assert not warnings([0.4, 0.4, 0.4, 0.4, 0.4, 0.4], falling), "as good as the best is not worse"
    assert not warnings([0.1, 0.2, 0.3, 0.4, 0.3, 0.3], falling), "not for a while yet"
    assert not warnings([0.1], [5.0])


def test_the_line_of_a_run_that_learns_by_heart_comes_before_its_end(data, tmp_path, monkeypatch, capsys):
    validations(monkeypatch, [0.4, 0.3, 0.3, 0.2, 0.2, 0.2])
    assert main(["train", *options(data, tmp_path / "run", *QUICK, "--validate-every", "2", steps=12)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith("note: the run learns by heart: since step 2"))
    assert lines[place - 1].startswith("step    8/12"), "after three validations that were worse, and then no more"


# A full disk.
def test_a_full_disk_leaves_the_last_checkpoint_whole(data, whole, tmp_path, monkeypatch, capsys):
    run, save = tmp_path / "run", checkpoint.write_tensors

    def full(path, tensors, metadata):
        if json.loads(metadata.get("facts", "{}")).get("step", 0) > 5:
            raise OSError(28, "No space left on device")
        return save(path, tensors, metadata)

    with monkeypatch.context() as patches:
        patches.setattr(checkpoint, "write_tensors", full)
        line = one_line(capsys, *options(data, run, *QUICK))
    assert "checkpoint.safetensors' cannot be written: No space left on device" in line
    assert "; the checkpoint of step 5 is whole; resume with: " in line
    assert main(["train", "--resume", str(run)]) == 0
    assert metrics(run) == metrics(whole)


def test_on_a_file_system_that_is_full(data, whole, tmp_path, capsys):
    """The first checkpoint fits, and the second one beside it does not."""
    run, size = tmp_path / "run", (whole / "checkpoint.safetensors").stat().st_size
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size) // 4096 * 4096}", "none", str(run)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        line = one_line(capsys, *options(data, run, "--no-audit"))
        assert "No space left on device; the checkpoint of step 5 is whole; resume with: " in line
        assert "checkpoint.safetensors.partial" not in {path.name for path in run.iterdir()}
        more = ["mount", "-o", f"remount,size={20 * size}", str(run)]
        subprocess.run(more, capture_output=True, check=True)
        assert main(["train", "--resume", str(run)]) == 0
        assert metrics(run) == metrics(whole)
    finally:
        subprocess.run(["umount", str(run)], capture_output=True, check=True)


# A file of options.
def toml_of(data):
    """Return the options of the tests' runs as a file: those of the model in a table, some names with dashes."""
    pairs = list(zip(SMALL[::2], SMALL[1::2], strict=True))
    alone = [f"{name[2:]} = {value}" for name, value in pairs if "." not in name]
    of_model = [f"{name[8:].replace('-', '_')} = {value}" for name, value in pairs if name.startswith("--model.")]
    assert len(alone) + len(of_model) == len(pairs)
    more = [f'data = "{data}"', 'run-folder = "made/run"', "steps = 12", "validate-every = 6", "checkpoint_every = 5"]
    return "\n".join([*more, "audit = false", "tensorboard = false", *alone, "[model]", *of_model])


def test_a_file_gives_the_run_of_the_same_options(data, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    relative = os.path.relpath(data, folder)
    (folder / "run.toml").write_text(toml_of(relative))
    assert main(["train", "--config", "folder/run.toml"]) == 0
    run = folder / "made" / "run"
    assert metrics(run) == metrics(whole), "paths are relative to the file, and every option is used"
    other = tmp_path / "other"
    assert main(["train", "--config", str(run / "config.json"), "--run-folder", "other", "--steps", "3"]) == 0
    assert json.loads((other / "config.json").read_text())["run_folder"] == str(other)
    assert metrics(other)[0] == metrics(whole)[0] | {"learning_rate": metrics(other)[0]["learning_rate"]}
    assert recorded(other) == 3, "the command line has precedence"
    assert main(["train", "--config", "folder/run.toml", "--resume", str(run)]) == 0, "the same options"
    (folder / "run.toml").write_text(toml_of(relative).replace("steps = 12", "steps = 13"))
    said = one_line(capsys, "--config", "folder/run.toml", "--resume", str(run))
    assert "steps was 12, got 13" in said
    assert said.endswith("; --until-step 13 makes more steps")


def parsed(monkeypatch, *argv):
    asked = []
    monkeypatch.setattr("wholebatch_train.launch.run", asked.append)
    assert main(["train", *argv]) == 0
    return asked[0]


def test_every_option_can_be_in_the_file(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('task = "identify"\n[head]\nm = 0.2\nmargin = "arcface"\n')
    config = parsed(monkeypatch, "--config", str(file), "--head.m", "0.3")
    assert (config.task, config.steps, config.head.m, config.head.margin) == ("identify", 450, 0.3, "arcface")
    file.write_text('steps = 7\nlearning-rate = 1\ncolumns = "x"\nresume = "elsewhere"\nrun_folder = "/abs/run"\n')
    from wholebatch_train.config_file import with_file

    config = with_file(TrainConfig(), file)
    assert (config.learning_rate, type(config.learning_rate), config.columns) == (1.0, float, "x")
    assert (config.resume, config.run_folder) == (tmp_path / "elsewhere", Path("/abs/run"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "run.toml: there is no option 'stpes'; perhaps steps"),
        ("[model]\ntext_widht = 3", "run.toml: there is no option 'model.text_widht'; perhaps model.text_width"),
        ("zzz = 1", "run.toml: there is no option 'zzz'; `wholebatch train --help` lists them"),
        ('steps = "3"', "run.toml: --steps must be an integer, got '3'"),
        ("steps = 3.0", "run.toml: --steps must be an integer, got 3.0"),
        ("steps = true", "run.toml: --steps must be an integer, got True"),
        ("audit = 1", "run.toml: --audit must be true or false, got 1"),
        ('loss = "clpi"', "got 'clpi'; perhaps 'clip'"),
        ("model = 3", "run.toml: model must be a table, [model]; got 3"),
        ("steps = 0", "run.toml: --steps must be at least 1, got 0"),
        ("[model]\ntext-heads = 3", "run.toml: --model.text-width must be a multiple of --model.text-heads (3)"),
        ("steps = 3\nsteps = 4", "run.toml is no file of options: "),
        ("validate-every = 3\nvalidate_every = 4", "run.toml names validate_every twice"),
        ('data = "none.csv"', "run.toml: --data: there is no file "),
        ("\0", "run.toml is no file of options: "),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, capsys, text, message):
    file = tmp_path / "run.toml"
    file.write_text(text)
    line = one_line(capsys, "--config", str(file))
    assert message in line
    if "steps = 0" in text:
        assert "run.toml" not in one_line(capsys, "--config", str(file), "--steps", "-1"), "the flag is wrong"


def test_other_mistakes_of_files(tmp_path, capsys):
    assert "there is no file" in one_line(capsys, "--config", str(tmp_path / "none.toml"))
    assert "must be a .toml file, or the config.json of a run" in one_line(capsys, "--config", "run.yaml")
    (tmp_path / "folder.toml").mkdir()
    assert "folder.toml" in one_line(capsys, "--config", str(tmp_path / "folder.toml"))
    (tmp_path / "list.json").write_text("[1]")
    assert "must hold options by name" in one_line(capsys, "--config", str(tmp_path / "list.json"))
    (tmp_path / "latin.toml").write_bytes(b'data = "\xff"')
    assert "is no file of options" in one_line(capsys, "--config", str(tmp_path / "latin.toml"))


def decided_by_the_first(flags):
    return [from_first_rank(flag[dist.get_rank()], torch.device("cpu")) for flag in flags]


def test_rank_0_decides_for_all():
    assert run_ranks(decided_by_the_first, 2, [(True, False), (False, True)]) == [[True, False]] * 2
    assert from_first_rank(True, torch.device("cpu")), "a process alone needs no group"


@pytest.mark.parametrize("validation", ["\ud800", {"y": 1.0}, {"x": []}, [1]])
def test_validations_that_somebody_has_edited_are_refused(validation):
    """Resuming reads them before it writes anything."""
    task = SimpleNamespace(headline_figure=lambda validation: float(validation["x"]))
    with pytest.raises(UserError, match=r"metrics\.jsonl: step 3 has no figures in its validation"):
        Best(task, 0, 0, [{"step": 3, "loss": 1.0, "validation": validation}])

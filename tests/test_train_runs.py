"""Whole runs of `wholebatch train`, as a user starts them, on a small data set of real characters."""

import json
import re
import shutil
import signal
import sys
from dataclasses import replace

import pytest
from glyph_files import SMALL, write_pairs
from train_runs import TRAIN, difference, finish, killed, losses, metrics, options, recorded

from wholebatch.__main__ import main
from wholebatch_train.config import TrainConfig
from wholebatch_train.data.load import load_data, with_batch
from wholebatch_train.run.checkpoint import last_step
from wholebatch_train.run.record import read_config, read_record
from wholebatch_train.run.run_folder import RunFolder
from wholebatch_train.tasks.retrieve import Retrieve

pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process
QUICK = ["--no-audit", "--no-tensorboard"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


def test_a_picture_of_the_test_that_cannot_be_read_loses_no_step(data, tmp_path, capsys):
    """It is first read after the last step. Once it can be read, the run goes on with the test."""
    folder = shutil.copytree(data.parent, tmp_path / "data")
    run = tmp_path / "run"
    argv = ["train", "--data", str(folder / data.name), "--run-folder", str(run), *SMALL, "--steps", "3", "--no-audit"]
    config = replace(TrainConfig(), data=str(folder / data.name), workers=0)
    config, (pairs, split) = load_data(config, 1)
    alone = next(group for group in split.test.tolist() if pairs.first[group + 1] == pairs.first[group] + 1)
    picture = pairs.sides["image"].place(int(pairs.order[pairs.first[alone]]))
    content = picture.read_bytes()
    picture.write_bytes(b"x" * len(content))
    assert main([*argv, "--workers", "0", "--image-size", "32", "--image-channels", "1"]) == 2  # not of a sample
    assert f"{picture.name}' cannot be read as an image" in capsys.readouterr().err
    assert not (run / "report.json").exists()
    picture.write_bytes(content)
    assert main(["train", "--resume", str(run)]) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert [start["step"] for start in json.loads((run / "config.json").read_text())["run"]["starts"]] == [0, 3]
    assert (run / "report.json").exists()


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    done = finish(TRAIN + options(data, run, steps=50))
    return run, done.stdout


def test_a_run_writes_all_documented_files(uninterrupted):
    run, output = uninterrupted
    names = {path.name for path in run.iterdir()} - {"tensorboard"}  # where it is installed
    assert names == {
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "best.safetensors",
        "model.safetensors", "encoders", "report.json", "report.html", "lock",
    }  # fmt: skip
    assert [row["step"] for row in metrics(run)] == list(range(1, 51))
    assert losses(run)[-1] < 0.8 * losses(run)[0], "it learns"
    report = json.loads((run / "report.json").read_text())
    there = report["image_to_text"]
    assert report["test_texts"] == 24
    assert there["queries"] >= 24, "the groups are of characters with equal pictures"
    assert there["recall@10"] > there["chance"]["recall@10"]
    assert "\x1b" not in output, "plain lines without a terminal"
    assert output.startswith("loading torch and the data ...\n"), "a line is printed before the first step"
    assert re.search(r"^the first step took \d+\.\d s, loss \d\.\d{4}$", output, re.MULTILINE)
    assert "step   50/50" in output
    assert "recall@1" in output


@pytest.mark.usefixtures("ranks_are_forks")
def test_the_curve_is_the_same_on_any_number_of_processes(data, uninterrupted, tmp_path):
    """On two, without chunks, the next test but one has torchrun start them."""
    more = ["--ranks", "3", "--chunk-size", "10", *QUICK]
    assert main(["train", *options(data, tmp_path / "run", *more, steps=50)]) == 0
    assert difference(uninterrupted[0], tmp_path / "run") <= 1e-4


def test_the_curve_is_the_same_with_gradient_caching(data, uninterrupted, tmp_path):
    assert main(["train", *options(data, tmp_path / "run", "--chunk-size", "10", *QUICK, steps=50)]) == 0
    assert difference(uninterrupted[0], tmp_path / "run") <= 1e-4


def test_torchrun_gives_the_same_curve(data, uninterrupted, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    finish([*torchrun, "wholebatch", "train", *options(data, tmp_path / "run", *QUICK, steps=50)])
    assert difference(uninterrupted[0], tmp_path / "run") <= 1e-4


@pytest.mark.parametrize("loss", ["clip", "global_contrastive"])
def test_killed_and_resumed_gives_the_same_numbers(data, uninterrupted, tmp_path, loss):
    """Kill the run in the middle of a pass (2 batches a pass), some steps after a checkpoint.

    The second loss has running averages: a repeated step must not count twice in them.
    """
    run, whole = tmp_path / "run", uninterrupted[0]
    if loss != "clip":
        whole = tmp_path / "whole"
        assert main(["train", *options(data, whole, "--loss", loss, *QUICK, steps=50)]) == 0
    killed(TRAIN + options(data, run, "--loss", loss, *QUICK, steps=50), when=lambda: recorded(run) >= 13)
    assert recorded(run) < 50
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # as after a kill in the middle of a write
    assert main(["train", "--resume", str(run)]) == 0
    assert metrics(run) == metrics(whole)


def test_resume_with_another_number_of_processes(data, uninterrupted, tmp_path):
    run = tmp_path / "run"
    command = TRAIN + options(data, run, "--ranks", "2", *QUICK, steps=50)
    killed(command, when=(run / "checkpoint.safetensors").exists, kill=signal.SIGINT)  # as a terminal does
    assert recorded(run) < 50
    assert main(["train", "--resume", str(run), "--ranks", "1"]) == 0
    assert difference(uninterrupted[0], run) <= 1e-4


def one_line(capsys, code, *argv):
    """Check the command's exit code, and return its one line of error output."""
    assert main(["train", *argv]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("wholebatch train: error: ")
    return lines[0]


def test_mistakes_give_one_line_and_exit_code_2(capsys, data, tmp_path, uninterrupted):
    new = tmp_path / "new"
    assert "there is no file" in one_line(
        capsys, 2, "--data", str(tmp_path / "none.csv"), "--run-folder", str(tmp_path / "a")
    )
    assert "must be 'glyphs', a folder or" in one_line(
        capsys, 2, "--data", "emoji", "--run-folder", str(tmp_path / "b")
    )
    too_many = one_line(capsys, 2, *options(data, tmp_path / "c", "--test-texts", "110"))
    assert "--data has 127 groups of rows, less 16 for validation and 110 for test" in too_many
    assert "--batch-size must be at least the number of ranks, 4; got 3" in one_line(
        capsys, 2, *options(data, new, "--batch-size", "3", "--ranks", "4")
    )
    assert "--steps must be at least 1, got 0" in one_line(capsys, 2, "--steps", "0")
    assert "is not empty; resume its run with" in one_line(capsys, 2, *options(data, uninterrupted[0]))
    assert "that is no run folder" in one_line(capsys, 2, "--resume", str(tmp_path / "nowhere"))
    assert "learning_rate was 0.002, got 0.1" in one_line(
        capsys, 2, "--resume", str(uninterrupted[0]), "--learning-rate", "0.1"
    )
    assert "leave --run-folder out" in one_line(capsys, 2, "--resume", str(uninterrupted[0]), "--run-folder", str(new))
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in one_line(capsys, 2, *options(data, tmp_path / "file" / "run"))
    assert "there is no command 'trian'" in (main(["trian"]), capsys.readouterr().err)[1]
    with pytest.raises(SystemExit) as unknown:
        main(["train", "--learning-rte", "1"])
    assert unknown.value.code == 2
    assert not new.exists(), "nothing was started"


def test_what_the_data_choose_is_said_and_saved(capsys, data, tmp_path):
    """Nothing needs an option; the configuration of the run holds the choices, so that a resumed run makes the same."""
    run = tmp_path / "run"
    assert main(["train", "--data", str(data), "--run-folder", str(run), "--steps", "1", "--no-audit"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "data: pictures become 32 x 32: the shorter side of theirs is 16 (--image-size)",
        "data: pictures are gray (--image-channels)",
        "data: 6 groups for validation, 12 for the test, which the run does not learn "
        "(--validation-texts, --test-texts)",
        "data: so few groups for the test, 12, say little about others",
        "data: batch size 64, for 109 groups to train on (--batch-size)",
    ):
        assert line in printed
    config = read_config(run)
    assert (config.image_size, config.image_channels, config.batch_size) == (32, 1, 64)
    assert (config.validation_texts, config.test_texts) == (6, 12)
    _, (pairs, split) = load_data(config, 1)
    assert (len(pairs), len(split.train)) == (127, 109)


def test_a_batch_larger_than_the_data_is_lowered(capsys, data, tmp_path):
    assert main(["train", *options(data, tmp_path / "run", "--batch-size", "4096", steps=1), "--no-audit"]) == 0
    assert "data: batch size 87 instead of 4096: there are no more groups to train on" in capsys.readouterr().out
    assert read_config(tmp_path / "run").batch_size == 87


@pytest.mark.parametrize(
    ("count", "size", "batch"),
    [(2, 1, 2), (3, 1, 2), (3, 3, 3), (5, 5, 5), (7, 4, 4), (63, 1, 32), (255, 2, 64), (256, 2, 64), (512, 3, 128),
     (4095, 1, 512), (4096, 1, 1024), (10**6, 8, 1024), (10**6, 1500, 1500)],
)  # fmt: skip
def test_the_batch_that_is_left_to_the_data_has_a_row_for_each_rank(count, size, batch):
    """Nobody has asked for a smaller one, so no option is to blame."""
    assert with_batch(TrainConfig(), count, size, "texts", lambda _: None).batch_size == batch


def test_a_mistake_found_by_a_started_rank_gives_one_line(capfd, data, tmp_path):
    line = one_line(capfd, 2, *options(data, tmp_path / "run", "--ranks", "2", "--test-texts", "110"))
    assert "--data has 127 groups of rows" in line


def flipped(content):
    """Flip one bit of a number in the middle."""
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("checkpoint.safetensors", lambda _: b"nonsense", "damaged or incomplete"),
        ("checkpoint.safetensors", flipped, "checkpoint.safetensors is damaged"),
        ("config.json", lambda _: b"{", "config.json is not the configuration of a run"),
        ("config.json", lambda _: b"[" * 100_000, "brackets are nested more than 16 deep"),
        ("config.json", lambda _: b" " * (2**20 + 1), "has 1048577 bytes; expected at most 1048576"),
        ("config.json", lambda text: text.replace(b'"seed": 0', b'"seed": 1'), "its digest is not that of its text"),
        ("metrics.jsonl", lambda _: b'{"step": 1, "loss": 1.0}\n', "does not hold the steps 1 to 50"),
        ("metrics.jsonl", lambda text: text.replace(b'"step": 7,', b'"step": 8,'), "line 7 is not that of step 7"),
        ("metrics.jsonl", lambda text: text.replace(b'"loss": ', b'"loss": 1'), "metrics.jsonl is not the file that"),
        ("metrics.jsonl", lambda text: text.replace(b'"loss": ', b'"loss": NaN, "was": '), "NaN is not a finite"),
    ],
)
def test_damaged_runs_are_refused(capsys, uninterrupted, tmp_path, file, damage, message):
    """The error names the file, and the folder is unchanged."""
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    (run / file).write_bytes(damage((run / file).read_bytes()))
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "lock"}
    line = one_line(capsys, 2, "--resume", str(run))
    assert message in line
    assert file in line
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name in before} == before


def test_another_runs_configuration_is_refused(capsys, uninterrupted, tmp_path):
    """Its shapes are the same, so the run would continue with another learning rate."""
    run, other = tmp_path / "run", tmp_path / "other"
    record = read_record(uninterrupted[0])
    RunFolder.create(other, replace(record.config, learning_rate=0.003), record.data).close()
    shutil.copytree(uninterrupted[0], run)
    shutil.copy(other / "config.json", run / "config.json")
    capsys.readouterr()
    assert "config.json is not the file that the checkpoint" in one_line(capsys, 2, "--resume", str(run))


def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_last_good_checkpoint(capsys, data, tmp_path):
    """At this learning rate the first update is the last: a checkpoint of step 1 is useless and not written."""
    run = tmp_path / "run"
    slow = ["--warmup-steps", "1000000", "--checkpoint-every", "1"]
    assert "stopped in step 2" in one_line(capsys, 2, *options(data, run, "--learning-rate", "1e30"))
    assert not (run / "checkpoint.safetensors").exists()
    capsys.readouterr()

    # Slowly growing updates: some steps are good, and the checkpoint is that of the last good one.
    run = tmp_path / "slow"
    message = one_line(capsys, 2, *options(data, run, *slow, "--learning-rate", "1e9", steps=200))
    stopped = int(message.split("stopped in step ")[1].split(":")[0])

    from safetensors.torch import load_file

    recorded = len(metrics(run))
    assert last_step(run, recorded=recorded, checkpoint_every=1) == recorded - 1 == stopped - 2
    assert all(value.isfinite().all() for value in load_file(run / "checkpoint.safetensors").values())
    assert f"stopped in step {stopped}" in one_line(capsys, 2, "--resume", str(run)), "it continues from there"


@pytest.mark.parametrize("asks", [False, True])
def test_weights_that_are_not_finite_replace_no_checkpoint(capsys, monkeypatch, data, tmp_path, asks):
    """The features of the test do not depend on the scale of the similarities, and no other pass shows the last step.

    Nor does one before a checkpoint that a signal has asked for.
    """
    run, steps = tmp_path / "run", 6

    def spoil(task):
        if recorded(run) == steps - 1:
            task.module.log_logit_scale.detach().fill_(float("nan"))
            if asks:
                signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Retrieve, "after_step", spoil)
    line = one_line(capsys, 2, *options(data, run, "--no-audit", steps=steps + asks))
    assert "training stopped in step 6: weights are not finite after it" in line
    assert last_step(run, recorded=recorded(run), checkpoint_every=5) == 5, "the checkpoint before is kept"
    assert not (run / "model.safetensors").exists()


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(capsys, data, tmp_path):
    run = tmp_path / "run"
    assert "stopped in step 2" in one_line(capsys, 2, *options(data, run, "--learning-rate", "1e30"))
    assert "stopped in step 2" in one_line(capsys, 2, "--resume", str(run))


def test_a_mistake_in_the_data_leaves_no_run_folder(capsys, data, tmp_path):
    one_line(capsys, 2, *options(data, tmp_path / "run", "--test-texts", "110"))
    assert not (tmp_path / "run").exists()

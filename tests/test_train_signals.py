"""Signals to `wholebatch train`, ranks that die, and the lock of a run folder."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from glyph_files import write_pairs
from train_runs import TRAIN, metrics, options, recorded

import wholebatch as wb
from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch._launch.launcher import launcher_size
from wholebatch.testing import run_ranks
from wholebatch_train import launch
from wholebatch_train.config import TrainConfig
from wholebatch_train.progress import Progress
from wholebatch_train.ranks import local_ranks, signals
from wholebatch_train.ranks.signals import Patience, Requests, Stopped, signals_blocked
from wholebatch_train.run.checkpoint import last_step
from wholebatch_train.run.lock import Lock
from wholebatch_train.run.record import DataFacts, read_config
from wholebatch_train.run.resume import resume_command
from wholebatch_train.run.run_folder import RunFolder
from wholebatch_train.tasks.retrieve import Retrieve

DATA = DataFacts("pairs.csv", "20 pairs", "0" * 64)
pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process
MORE = ["--no-audit", "--loss", "global_contrastive"]  # a loss with running averages


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", *options(data, run, *MORE)]) == 0
    return run


@pytest.fixture
def requests():
    """Return the requests of this process, as if it were in the middle of a step."""
    found = Requests(announce=False)
    found.begin()
    yield found
    found.close()


def noted(requests, number):
    """Send this process a signal, and return once it is recorded."""
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 60
    while not (requests._checkpoint if number == signal.SIGUSR1 else requests._stop):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_signals_are_requests(requests):
    assert requests.combined() == (0, False)
    noted(requests, signal.SIGUSR1)
    assert requests.combined() == (0, True)
    assert requests.combined() == (0, False), "a checkpoint is written once"
    noted(requests, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # GNU timeout sends two, and this process still runs
    assert requests.combined() == (signal.SIGTERM, False)
    assert requests.combined() == (signal.SIGTERM, False)


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    threads = threading.active_count()
    requests = Requests()
    assert signal.getsignal(signal.SIGTERM) not in before
    requests.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_an_echo_is_not_a_second_signal(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience()
    assert not patience.is_second()
    now += 0.2
    assert not patience.is_second()
    now += 0.2
    assert patience.is_second()


def test_signals_are_held_from_the_start_of_a_process():
    blocked = "import signal; print(sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    with signals_blocked():
        inside = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True)
    outside = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True)
    asked = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    assert {*map(int, asked)} <= {*json.loads(inside.stdout)}
    assert not asked & {*json.loads(outside.stdout)}


def a_loop_with_signals(signaled, at):
    """Return the step after which this rank stops, and those after which it writes a checkpoint."""
    requests = Requests(announce=False)
    requests.begin()
    checkpoints = []
    try:
        for step in range(20):
            if dist.get_rank() in signaled and step == at:
                noted(requests, signal.SIGUSR1)
            if dist.get_rank() in signaled and step == at + 2:
                noted(requests, signal.SIGINT if dist.get_rank() else signal.SIGTERM)
            asked = requests.combined()
            if asked.checkpoint:
                checkpoints.append(step)
            if asked.stop:
                return step, checkpoints, asked.stop
    finally:
        requests.close()
    return None


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("signaled", [(0,), (1,), (0, 1)])
def test_all_ranks_stop_after_the_same_step_for_a_signal_to_any(world_size, signaled):
    found = run_ranks(a_loop_with_signals, world_size, signaled, 5)
    number = signal.SIGTERM if 0 in signaled else signal.SIGINT
    assert found == [(7, [5], number)] * world_size


HANGS = """
import ctypes, os
from wholebatch_train.ranks.signals import Requests
requests = Requests()
requests.begin()
print("ready", flush=True)
os.pipe()
read, write = os.pipe()
ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # as a collective whose other ranks are gone
"""


def test_a_second_signal_ends_a_process_that_hangs_at_once():
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "the run completes this step or its report and ends, with a checkpoint" in process.stderr.readline()
        time.sleep(0.5)  # no echo
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert process.stderr.read() == "wholebatch train: SIGINT: ended at once\n"
    finally:
        process.kill()
        process.communicate()


MOMENTS = {
    "step": (Retrieve, "add_gradients", 8, 8, False),
    "first step": (Retrieve, "add_gradients", 1, 1, False),
    "last step": (Retrieve, "add_gradients", 12, 12, False),
    "evaluation": (Retrieve, "validate", 1, 6, False),
    "checkpoint": (Retrieve, "save", 1, 6, False),
    "metrics": (RunFolder, "append", 4, 4, False),
    "test set": (Retrieve, "test", 1, 12, True),
    "last checkpoint": (Retrieve, "save", 3, 12, True),
    "report": (RunFolder, "finish", 1, 12, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_loses_no_step(capsys, monkeypatch, data, undisturbed, tmp_path, moment):
    where, method, call, step, finished = MOMENTS[moment]
    run, found, calls, ended = tmp_path / "a run", [], [], []

    class Kept(Requests):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    original = getattr(where, method)

    def with_a_signal(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            noted(found[-1], signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patches:
        patches.setattr(launch, "Requests", Kept)
        patches.setattr(where, method, with_a_signal)
        patches.setattr(signals, "end_by", ended.append)
        main(["train", *options(data, run, *MORE)])
    assert ended == [signal.SIGTERM]
    assert recorded(run) == step == last_step(run, recorded=step, checkpoint_every=5)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, "one line confirms the signal"
    line = printed.out.splitlines()[-1]
    if finished:
        assert line == "SIGTERM: the run was finished"
        assert (run / "report.json").exists()
    else:
        command = f"wholebatch train --resume '{run}'"  # for any program that runs the tests
        assert line == f"SIGTERM: stopped after step {step}, which has a checkpoint; resume with: {command}"
        assert main(["train", "--resume", str(run)]) == 0
        assert f"resuming after step {step}" in capsys.readouterr().out
    assert metrics(run) == metrics(undisturbed)
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_checkpoint_by_signal_is_written_once(capsys, monkeypatch, data, undisturbed, tmp_path):
    """A second write would leave no checkpoint for a moment, since a classifier has one folder per step."""
    run, found, steps = tmp_path / "run", [], []

    class Kept(Requests):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    def gradients(self, step):
        if step in (4, 11):
            noted(found[-1], signal.SIGUSR1)
        return add_gradients(self, step)

    def save(self, *args, step, **kwargs):
        steps.append(step)
        return original(self, *args, step=step, **kwargs)

    add_gradients, original = Retrieve.add_gradients, Retrieve.save
    with monkeypatch.context() as patches:
        patches.setattr(launch, "Requests", Kept)
        patches.setattr(Retrieve, "add_gradients", gradients)
        patches.setattr(Retrieve, "save", save)
        assert main(["train", *options(data, run, *MORE)]) == 0
    assert steps == [5, 10, 12]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "requested" in line] == [
        f"a checkpoint was requested: step {step} has one" for step in (5, 12)
    ]
    assert metrics(run) == metrics(undisturbed)


@pytest.fixture
def started(data, tmp_path):
    """Return a run of two processes that has made a few of its many steps."""
    command = TRAIN + options(data, tmp_path / "run", *MORE, "--ranks", "2", steps=100_000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while recorded(tmp_path / "run") < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process, tmp_path / "run"
    finally:
        process.kill()
        process.communicate()


def test_a_killed_rank_gives_one_line(capsys, data, started):
    process, run = started
    assert main(["train", "--resume", str(run)]) == 2
    of_second = capsys.readouterr().err
    pid = re.search(r"is written by process (\d+) on '.+' at this moment, and a run has one writer", of_second)[1]
    assert of_second.count("\n") == 1
    assert main(["train", *options(data, run)]) == 2, "another new run"
    assert "a run has one writer" in capsys.readouterr().err
    os.kill(int(pid), signal.SIGKILL)  # rank 0, which has the lock
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stdout + stderr
    assert stderr == (
        "wholebatch train: error: rank 0 of 2 was killed by SIGKILL (was the machine out of memory?); the other ranks "
        f"were ended; resume with: {sys.executable} -m wholebatch train --resume {run}\n"
    )
    assert main(["train", *options(data, run)]) == 2, "a new run, while no process holds the lock"
    assert "is not empty; resume its run with --resume" in capsys.readouterr().err
    RunFolder.lock(run).close()


def test_two_processes_stop_together(started):
    process, run = started
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 120
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM, stdout + stderr
    assert time.monotonic() < deadline
    assert stderr.count("\n") == 1
    assert f"SIGTERM: stopped after step {recorded(run)}, which has a checkpoint" in stdout
    assert last_step(run, recorded=recorded(run), checkpoint_every=5) == recorded(run)


def test_a_signal_to_torchrun_stops_the_run(data, undisturbed, tmp_path):
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "wholebatch", "train", *options(data, run, *MORE, steps=100_000)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while recorded(run) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    command = f"{TORCHRUN} --nproc-per-node 2 -m wholebatch train --resume {run}\n"
    stopped = f"SIGTERM: stopped after step {recorded(run)}, which has a checkpoint; resume with: {command}"
    assert stopped in stdout, stdout + stderr
    assert last_step(run, recorded=recorded(run), checkpoint_every=5) == recorded(run)
    assert read_config(run).ranks == 2, "so that it resumes with as many ranks without torchrun, too"


TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone"


@pytest.mark.parametrize(
    ("called", "found", "environment", "program"),
    [
        ("/e/bin/wholebatch", "/e/bin/wholebatch", {}, "wholebatch"),
        ("/e/bin/wholebatch", None, {}, "/e/bin/wholebatch"),
        ("/an env/bin/wholebatch", None, {}, "'/an env/bin/wholebatch'"),
        ("/e/lib/wholebatch/__main__.py", None, {}, f"{sys.executable} -m wholebatch"),
        ("/a/notebook.py", None, {}, "wholebatch"),
        ("/e/bin/wholebatch", "/f/bin/wholebatch", {}, "/e/bin/wholebatch"),
        ("x", None, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, f"{TORCHRUN} --nproc-per-node 4 -m wholebatch"),
        (
            "x",
            None,
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            "torchrun as before on each machine, with -m wholebatch",
        ),
        ("x", None, {"WORLD_SIZE": "8"}, "wholebatch"),
    ],
)
def test_the_command_that_resumes_can_be_pasted(monkeypatch, tmp_path, called, found, environment, program):
    monkeypatch.setattr(sys, "argv", [called, "train"])
    monkeypatch.setattr("wholebatch_train.run.resume.shutil.which", lambda name: found)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TORCHELASTIC_RUN_ID": "x"} | environment if environment else {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert resume_command(Path("runs/a run"), TrainConfig()) == f"{program} train --resume '{tmp_path}/runs/a run'"


def test_the_command_that_resumes_repeats_the_options_of_this_resume(monkeypatch, tmp_path):
    """Options of the run's start are saved, not repeated; under torchrun the command has the number of ranks."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    saved = TrainConfig(ranks=2, run_folder=tmp_path / "run")
    RunFolder.create(tmp_path / "run", saved, DATA).close()
    command = f"wholebatch train --resume {tmp_path}/run"
    assert resume_command(tmp_path / "run", saved) == command
    resumed = replace(saved, resume=tmp_path / "run", audit=False)
    assert resume_command(tmp_path / "run", resumed) == command
    changed = replace(resumed, ranks=3, device="cpu", chunk_size=8)
    assert resume_command(tmp_path / "run", changed) == f"{command} --ranks 3 --device cpu --chunk-size 8"
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert resume_command(tmp_path / "run", changed).endswith(f" {command} --device cpu --chunk-size 8")


def test_a_path_is_printed_unchanged(capsys):
    """Rich would read parts of it as markup and emoji."""
    folder = Path("/runs[lr=1]/[red]x/:smile:")
    Progress().say(f"run folder: {folder}")
    Progress(is_quiet=True).say(f"run folder: {folder}")
    assert capsys.readouterr().out == f"run folder: {folder}\n"


def test_a_folder_that_is_not_a_run_is_not_changed(capsys, data, tmp_path):
    for name in ("lock", "thesis.txt"):
        (tmp_path / name).write_text("precious")
    assert main(["train", *options(data, tmp_path)]) == 2
    assert "is not empty and no run; choose another folder" in capsys.readouterr().err
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("lock", "thesis.txt"), "precious"
    )


LAUNCHED = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be an integer of at least 1, got 'abc'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE must be an integer of at least 1, got '-2'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be an integer of at least 1, got ''"),
        ({"RANK": "5"}, "RANK must be an integer from 0 to 1, got '5'"),
        ({"RANK": "-1"}, "RANK must be an integer from 0 to 1, got '-1'"),
        ({"RANK": "1.0"}, "RANK must be an integer from 0 to 1, got '1.0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be an integer from 0 to 1, got '2'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be an integer from 1 to 2, got '3'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be an integer from 1 to 65535, got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be an integer from 1 to 65535, got '70000'"),
        ({"MASTER_ADDR": None}, "several processes, but MASTER_ADDR is not set; start with torchrun"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR must be the address of the machine of rank 0"),
        ({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}, "but LOCAL_RANK and LOCAL_WORLD_SIZE are not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        (dict.fromkeys([*LAUNCHED], None) | {"WORLD_SIZE": "abc"}, "WORLD_SIZE must be an integer of at least 1"),
    ],
)
def test_an_invalid_environment_gives_one_line_at_once(capsys, monkeypatch, tmp_path, changed, message):
    for name, value in (LAUNCHED | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if changed.get("WORLD_SIZE", 1) is None:
        monkeypatch.setenv("RANK", "1")
    assert main(["train", "--run-folder", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message in printed
    assert not (tmp_path / "run").exists()


def test_other_readers_of_the_environment_raise_the_same_errors(capsys, monkeypatch):
    for value in ("abc", "-1", "0", "1.5", ""):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(ValueError, match=f"WORLD_SIZE must be an integer of at least 1, got '{value}'; a launcher"):
            wb.comm.select_communicator(None)
        assert main(["audit", "--preset", "open_clip"]) == 2
        assert "WORLD_SIZE must be an integer of at least 1" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", " 1 ")
    assert wb.comm.select_communicator(None).size == 1


def test_the_variables_of_one_process_need_no_launcher(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert launcher_size() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launcher_size() is None
    monkeypatch.setenv("RANK", "0")
    assert launcher_size() is None
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launcher_size() == 2


def test_a_lock_has_one_holder(tmp_path):
    first = Lock(tmp_path)
    with pytest.raises(UserError, match=rf"is written by process {os.getpid()} on '.+' at this moment") as caught:
        Lock(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "lock").write_bytes(b"\xff" * 4000)
    with pytest.raises(UserError, match="is written by another process"):
        Lock(tmp_path)
    first.close()
    first.close()
    Lock(tmp_path).close()


HOLDS = (
    "import sys, time, pathlib\nfrom wholebatch_train.run.lock import Lock\nheld = Lock(pathlib.Path(sys.argv[1]))\n"
)


def test_a_kill_releases_the_lock(tmp_path):
    code = HOLDS + "print('held', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            Lock(tmp_path)
    finally:
        process.kill()
        process.communicate()
    Lock(tmp_path).close()


@pytest.mark.parametrize("error", [37, 95])  # ENOLCK, EOPNOTSUPP
def test_a_file_system_without_locks_is_reported_and_used(capsys, monkeypatch, tmp_path, error):

    def refuse(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.flock", refuse)
    Lock(tmp_path).close()
    assert "there are no file locks here: nothing keeps a second run out of" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "fcntl", None)
    Lock(tmp_path).close()
    assert "there are no file locks here" in capsys.readouterr().err


def test_a_lock_that_is_a_link_or_no_file_is_refused(tmp_path):
    (tmp_path / "precious").write_text("do not touch")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder.lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "do not touch"
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="must be a regular file"):
        RunFolder.lock(tmp_path)


def test_a_folder_that_a_kill_left_before_the_configuration_is_empty(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").write_text("4711 elsewhere\n")
    (run / "config.json.partial").write_text("{")
    RunFolder.create(run, TrainConfig(), DATA).close()
    assert json.loads((run / "config.json").read_text())["task"] == "retrieve"


def fails(config, store, rank, launcher):
    """Run a rank that raises or ends, while the other one waits for it."""
    requests = Requests(launcher, announce=False)
    requests.begin()
    if rank == 1:
        if config.data == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("of the user's")
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"^rank 1 of 2 was killed by SIGKILL \(was .*; nothing was written yet$"),
        ("raise", r"^rank 1 of 2 ended with KeyError: \"of the user's\"; the other ranks were ended; nothing"),
    ],
)
def test_the_end_of_a_rank_is_reported(capfd, tmp_path, how, message):
    config = TrainConfig(data=how, ranks=2, run_folder=tmp_path / "run")
    with pytest.raises(launch.RankDiedError, match=message):
        launch.run_local_ranks(config, fails)
    assert ("Traceback" in capfd.readouterr().err) == (how == "raise"), "the traceback helps to find the mistake"


def test_lost_connections_of_every_backend_are_recognized():
    gloo = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:27555: Connection reset by peer"
    assert local_ranks.is_connection_error(RuntimeError(gloo))
    assert local_ranks.is_connection_error(UserError(f"save_head: run/head-5 cannot be written: {gloo}")), (
        "the disk is not the cause"
    )
    assert local_ranks.is_connection_error(dist.DistStoreError("wait timeout"))
    assert not local_ranks.is_connection_error(UserError("the run folder 'run' cannot be written: No space left"))


LOST = ("raised", "RuntimeError: Connection closed by peer", 1)


@pytest.mark.parametrize(
    ("words", "codes", "seen", "error", "message"),
    [
        # A rank that has lost its partner reports that, though it is not the cause of the end.
        ({0: LOST}, [1, -9], [0, 1], launch.RankDiedError, "^rank 1 of 2 was killed by SIGKILL"),
        ({0: LOST}, [1, 7], [0, 1], launch.RankDiedError, "^rank 1 of 2 ended with exit code 7"),
        (
            {0: LOST, 1: ("raised", "KeyError: 0", 0)},
            [1, 1],
            [0],
            launch.RankDiedError,
            "^rank 1 of 2 ended with KeyErr",
        ),
        ({0: LOST, 1: ("mistake", "not a picture", 2)}, [1, 2], [0, 1], UserError, "^not a picture$"),
        ({1: ("stopped", "", 0)}, [-9, 130], [1], Stopped, r"^\(2, ''\)$"),
        # Ranks that were ended because of the first are not reported as dead.
        ({}, [-9, -11], [1], launch.RankDiedError, "^rank 1 of 2 was killed by SIGSEGV; the other ranks were ended"),
        (
            {},
            [-9, 143],
            [1],
            Stopped,
            "SIGTERM: rank 1 of 2 ended at once, and the others with it; nothing was",
        ),
    ],
)
def test_the_rank_that_caused_the_end_is_named(tmp_path, words, codes, seen, error, message):
    for rank, (kind, text, at_ns) in words.items():
        report = {"kind": kind, "text": text, "signum": 2 if kind == "stopped" else 0, "trace": "", "at_ns": at_ns}
        (tmp_path / f"{rank}.json").write_text(json.dumps(report))
    config = TrainConfig(ranks=2, run_folder=tmp_path / "run")
    found = local_ranks._cause(seen, [SimpleNamespace(exitcode=code) for code in codes], tmp_path, config)
    assert type(found) is error
    assert re.search(message, str(found))

"""The ranks of a launcher say what they wait for until they have met."""

import os
import socket
import subprocess
import threading

import pytest
from train_runs import TRAIN

from wholebatch._base.user_error import UserError
from wholebatch_train import launch
from wholebatch_train.config import TrainConfig

VARIABLES = {"WORLD_SIZE": "3", "MASTER_ADDR": "gpu07", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(("rank", "others"), [("0", "the other 2 of 3 ranks"), ("1", "rank 0")])
def test_a_rank_that_waits_says_for_whom_and_where(monkeypatch, rank, others):
    shown, said = [], threading.Event()
    monkeypatch.setattr(launch, "show", lambda line: (shown.append(line), said.set()))
    seconds = []
    monkeypatch.setattr(launch, "Timer", lambda after_s, *of: (seconds.append(after_s), threading.Timer(0, *of))[1])
    monkeypatch.setattr(launch, "_train_on_this_rank", lambda *_: None)
    for name, value in {**VARIABLES, "RANK": rank}.items():
        monkeypatch.setenv(name, value)

    def meet_late(*_args, **_more):
        assert said.wait(60)

    monkeypatch.setattr(launch.dist, "init_process_group", meet_late)
    launch._run_rank(TrainConfig(device="cpu"), "env://", None, local_rank=0, local_size=3)
    assert shown == [f"rank {rank} waits for {others} at gpu07:4000 (MASTER_ADDR, MASTER_PORT)"]

    assert seconds == [10]
    monkeypatch.setattr(launch, "Timer", lambda _after_s, *of: threading.Timer(3600, *of))
    monkeypatch.setattr(launch.dist, "init_process_group", lambda *_args, **_more: None)
    launch._run_rank(TrainConfig(device="cpu"), "env://", None, local_rank=0, local_size=3)
    for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
        timer.join(60)
        assert not timer.is_alive(), "it has been cancelled"


def launched(rank, port):
    """Return the environment of one of two ranks that a launcher has started."""
    ranks = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    return {**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_rank_1_without_rank_0_says_so():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    environment = launched("1", port)
    process = subprocess.Popen(TRAIN, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(200, process.kill)
    late.start()
    try:
        line = next((line for line in process.stderr if "waits for" in line), "")
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
    assert f"wholebatch train: rank 1 waits for rank 0 at 127.0.0.1:{port}" in line


def test_rank_0_whose_port_is_in_use_says_so():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = subprocess.run(
            TRAIN, env=launched("0", port), capture_output=True, text=True, timeout=200, check=False
        )
    last = process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
    assert f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) is in use or answered by another program" in last
    assert "EADDRINUSE" in last
    assert "choose another MASTER_PORT, the same on all ranks" in last
    assert process.returncode == 2


def test_a_rank_that_another_program_answers_says_so(monkeypatch):
    def meet(*_args, **_more):
        raise launch.dist.DistNetworkError("Ping failed, invalid value returned from server. Expected: 665, Got: 1347")

    monkeypatch.setattr(launch.dist, "init_process_group", meet)
    for name, value in {**VARIABLES, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"gpu07:4000 .* answered by another program"):
        launch._run_rank(TrainConfig(device="cpu"), "env://", None, local_rank=0, local_size=3)

"""wholebatch.jax is exact on several processes that communicate over sockets, each with some of the devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")  # JAX needs Python 3.11
from jax_cases import EVERYTHING

TESTS = Path(__file__).parent


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)] if EVERYTHING else [(2, 2)])
def test_every_loss_on_processes(processes, devices, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    logs = [tmp_path / f"{rank}.log" for rank in range(processes)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, str(TESTS / "jax_process.py"), str(rank), str(processes), str(port)]
            started.append(
                subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": flags}, stdout=out, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0] * processes, "\n".join(texts)
    assert all(text.rstrip().endswith("exact") for text in texts), "\n".join(texts)

"""Ranks that `srun` has started find each other by Slurm's variables, and give the numbers of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from glyph_files import SMALL, write_pairs
from train_runs import TRAIN, difference, options

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch._launch import slurm
from wholebatch._launch.launcher import launcher_size
from wholebatch._launch.slurm import first_host, use_variables_of_slurm
from wholebatch_train import launch
from wholebatch_train.config import TrainConfig
from wholebatch_train.run.record import DataFacts
from wholebatch_train.run.resume import resume_command
from wholebatch_train.run.run_folder import RunFolder

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4242", "SLURM_NODEID": "2",
        "SLURM_JOB_NODELIST": "gpu[07-09],login1", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NNODES": "4",
        "SLURM_STEP_ID": "0"}  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Return a function that sets Slurm's variables; torchrun's are not set, and are removed at the end."""
    for name in (*TORCHRUN, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.setenv(name, "")  # so that the value of before comes back
        monkeypatch.delenv(name)
    monkeypatch.setattr(slurm.shutil, "which", lambda program: None)

    def set_them(values):
        for name, value in values.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_them


def test_the_variables_are_those_of_torchrun(variables):
    variables(STEP)
    assert use_variables_of_slurm() == "", "rank 0 alone reports"
    assert {name: os.environ[name] for name in TORCHRUN} == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "16242",
    }  # fmt: skip
    assert launcher_size() == 7


def test_steps_of_a_job_on_some_of_its_nodes(variables):
    variables(STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu09",
                      "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_ID": "1"})  # fmt: skip
    line = use_variables_of_slurm()
    assert line == "Slurm has started 2 processes, which meet at gpu09:17251"
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "2")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"SLURM_NTASKS": "4"},  # a script of sbatch before it calls srun has no rank, or is one of one
        STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        STEP | {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_one_process_and_torchrun_are_left_alone(variables, values):
    variables(values)
    before = dict(os.environ)
    assert use_variables_of_slurm() == ""
    assert dict(os.environ) == before


def test_addresses_of_the_user_count(variables):
    variables(STEP | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    use_variables_of_slurm()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.7", "4000")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID must be an integer from 0 to 6, got '7'"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be an integer of at least 1, got 'many'"),
        ({"SLURM_LOCALID": None}, "SLURM_PROCID is set, but SLURM_LOCALID is not"),
        ({"SLURM_TASKS_PER_NODE": "2x3"}, "must be a list such as 2(x3),1; got '2x3'"),
        ({"SLURM_TASKS_PER_NODE": None}, "SLURM_NNODES is above 1, but SLURM_TASKS_PER_NODE is not set"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID must be an integer from 0 to 3, got '4'"),
        (
            {"SLURM_STEP_ID": None},  # of a batch script, which has rank 0
            "SLURM_NTASKS=7 asks for 7 processes, and a batch script alone starts one: write srun before the command",
        ),
        ({"SLURM_JOB_NODELIST": "gpu[07-"}, "must be a list such as gpu[03-05],login1; got 'gpu[07-'"),
    ],
)
def test_contradictions_are_one_line(variables, capsys, changed, message):
    variables(STEP | changed)
    assert main(["train"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_scontrol_knows_the_hosts_best(variables, monkeypatch, tmp_path):
    """The program of the test prints another host than the parser would, so that its use is seen."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "from-$3" && echo other\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm.shutil, "which", lambda name: str(program))
    assert first_host("a1,a2") == "from-a1,a2"
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UserError, match=r"`scontrol show hostnames a1` failed: .* set MASTER_ADDR"):
        first_host("a1")


def test_each_process_may_see_its_gpu_alone(variables, monkeypatch):
    variables(STEP)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert launch._device(TrainConfig(), 1, 2).type == "cpu", "two ranks share one GPU, which NCCL refuses"
    variables({"SLURM_GPUS_PER_TASK": "1"})
    assert launch._device(TrainConfig(), 1, 2) == torch.device("cuda", 0)
    assert chosen == [0]


def test_the_command_that_resumes_names_srun(variables, monkeypatch, tmp_path):
    variables(STEP)
    use_variables_of_slurm()
    RunFolder.create(tmp_path / "run", TrainConfig(), DataFacts("pairs.csv", "20 pairs", "0" * 64)).close()
    expected = f"srun as before, with {sys.executable} -m wholebatch train --resume {tmp_path}/run"
    assert resume_command(tmp_path / "run", TrainConfig()) == expected


def test_two_processes_give_the_numbers_of_one(variables, tmp_path):
    data = write_pairs(tmp_path)
    quick = ["--no-audit", "--no-tensorboard"]
    assert main(["train", *options(data, tmp_path / "one", *quick)]) == 0
    of_job = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()),
              "SLURM_STEP_ID": "0"}  # fmt: skip
    processes = [
        subprocess.Popen(
            TRAIN + options(data, tmp_path / "two", *quick),
            env=os.environ | of_job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    assert "Slurm has started 2 processes, which meet at localhost:" in printed[0]
    assert f"global batch {SMALL[SMALL.index('--batch-size') + 1]} on 2 processes" in printed[0]
    assert printed[1] == "", "rank 0 reports"
    assert difference(tmp_path / "one", tmp_path / "two") <= 1e-4


def test_documented_commands_end_all_ranks_when_one_dies():
    """Without the option, the others would wait for it in a collective."""
    docs = Path(__file__).parent.parent / "docs"
    lines = [line for page in docs.rglob("*.md") for line in page.read_text().splitlines() if line.startswith("srun ")]
    assert len(lines) >= 2
    assert [line for line in lines if "--kill-on-bad-exit=1" not in line] == []

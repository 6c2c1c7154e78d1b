"""run_ranks: results come back, failures and hangs raise, and warnings are errors on every rank."""

import contextlib
import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from wholebatch._launch.processes import RankProcesses
from wholebatch.testing import RankError, RankTimeoutError, run_ranks


def sum_of_ranks(factor):
    total = torch.tensor([float(dist.get_rank() * factor)], requires_grad=True)
    gathered = total.detach().clone()
    dist.all_reduce(gathered)
    return {"rank": dist.get_rank(), "sum": gathered, "local": total}


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("planted mistake")
    dist.barrier()


def hang_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)


def leave_early_on_rank_1():
    if dist.get_rank() == 1:
        raise SystemExit(3)


class Numbers(torch.utils.data.Dataset):
    """A data set whose workers write their process ids to a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 12

    def __getitem__(self, index):
        (self.folder / f"{os.getpid()}").touch()
        return torch.tensor(index)


def load(folder, method, end):
    """Sum the items of two workers, which live as long as their iterator, and start `sleep` without waiting for it."""
    # Python 3.12 and later warn of a fork in a process with threads. Workers use none of gloo's.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    (folder / f"{os.getpid()}").touch()
    loader = torch.utils.data.DataLoader(
        Numbers(folder), 4, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    kept.append(iter(loader))
    total = sum(batch.sum().item() for batch in kept[0])
    (folder / str(subprocess.Popen(["sleep", "600"]).pid)).touch()
    dist.barrier()
    if end == "raise":
        if dist.get_rank() == 1:
            raise KeyError("planted mistake")
        time.sleep(600)  # until it is killed
    return total


kept = []


def warn():
    warnings.warn("a deprecation that should not pass unseen", FutureWarning, stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_are_in_rank_order(world_size):
    results = run_ranks(sum_of_ranks, world_size, 2)
    assert [result["rank"] for result in results] == list(range(world_size))
    assert all(result["sum"].item() == 2 * sum(range(world_size)) for result in results)
    assert not any(result["local"].requires_grad for result in results)
    assert not dist.is_initialized()


def test_a_failing_rank_fails_the_call_with_every_traceback():
    with pytest.raises(RankError, match="planted mistake") as caught:
        run_ranks(fail_on_rank_1, 3)
    assert "fail_on_rank_1" in str(caught.value)
    assert all(f"rank {rank}" in str(caught.value) for rank in range(3))


def test_a_hanging_rank_times_out_with_its_stack():
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match="timed out after 2 s") as caught:
        run_ranks(hang_on_rank_0, 2, timeout_s=2)
    assert time.monotonic() - start < 30
    assert "in hang_on_rank_0" in str(caught.value)
    assert "barrier" in str(caught.value)


def test_a_rank_that_dies_or_leaves_is_a_failure():
    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(die_on_rank_1, 2)
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(leave_early_on_rank_1, 2)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc, as Linux has it")
@pytest.mark.parametrize(("method", "end"), [("fork", "return"), ("fork", "raise"), ("forkserver", "return")])
def test_ranks_may_start_processes_and_leave_none(tmp_path, method, end):
    if end == "return":
        assert run_ranks(load, 2, tmp_path, method, end, timeout_s=120) == [66, 66]
    else:
        with pytest.raises(RankError, match=r"(?s)rank 0 did not finish.*planted mistake"):
            run_ranks(load, 2, tmp_path, method, end, timeout_s=120)
    started = {int(file.name) for file in tmp_path.iterdir()}
    assert len(started) == 2 + 2 * 2 + 2, "ranks, workers, and a program for each rank"
    deadline = time.monotonic() + 60  # the processes are killed, but may end later
    while (left := {pid for pid in started if runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc, as Linux has it")
def test_processes_stay_from_call_to_call_and_are_new_after_a_failure():
    with contextlib.closing(RankProcesses(2, timeout_s=60)) as processes:
        first = processes.call(os.getpid)
        assert processes.call(os.getpid) == first
        assert [result["rank"] for result in processes.call(sum_of_ranks, 2)] == [0, 1]
        with pytest.raises(RankError, match="planted mistake"):
            processes.call(fail_on_rank_1)
        second = processes.call(os.getpid)
        assert not {*first} & {*second}
    assert not any(runs(pid) for pid in first + second)


def runs(pid):
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_failure_on_one_process_keeps_its_exception():
    with pytest.raises(FutureWarning):
        run_ranks(warn, 1)
    assert not dist.is_initialized()


def test_warnings_are_errors_on_every_rank():
    with pytest.raises(RankError, match="FutureWarning: a deprecation"):
        run_ranks(warn, 2)


def test_local_functions_reach_ranks_with_cloudpickle():
    assert run_ranks(lambda x: x + dist.get_rank(), 2, 10) == [10, 11]


def test_invalid_arguments_are_reported():
    with pytest.raises(ValueError, match="world_size must be an integer from 1 to 1024, ranks on this machine; got 0"):
        run_ranks(sum_of_ranks, 0, 2)
    with pytest.raises(ValueError, match="picklable"):
        run_ranks(sum_of_ranks, 2, (i for i in range(3)))

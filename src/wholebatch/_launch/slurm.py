"""Processes that `srun` has started: their Slurm variables as those of torchrun. This module imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from .._base.user_error import UserError
from .launcher import environment_integer

_FIRST_PORT, _PORTS = 12_000, 20_000  # below the ports that Linux gives to clients
_TIMEOUT_S = 30
_FIX = "srun sets it"


def use_variables_of_slurm() -> str:
    """Set RANK, WORLD_SIZE and the rest of torchrun's variables from Slurm's, if srun has started several processes.

    Variables of torchrun that are set already, in a script that sets them itself, count before Slurm's.

    Returns:
        A line about the place where the ranks meet; "" if nothing was done.

    Raises:
        UserError: if Slurm's variables contradict each other, or some are missing, or nobody has started the processes.
    """
    if {"RANK", "WORLD_SIZE"} & os.environ.keys() or "SLURM_PROCID" not in os.environ:
        return ""
    size = _integer("SLURM_STEP_NUM_TASKS", 1) or _integer("SLURM_NTASKS", 1) or 1
    if size == 1:
        return ""
    if not {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():  # which srun sets
        raise UserError(
            f"SLURM_NTASKS={size} asks for {size} processes, and a batch script alone starts one: write srun before "
            f"the command, or for one machine sbatch --ntasks 1 and the option --ranks {size}"
        )
    rank, local_rank = _integer("SLURM_PROCID", 0, size - 1) or 0, _integer("SLURM_LOCALID", 0, size - 1)
    if local_rank is None:
        raise UserError("SLURM_PROCID is set, but SLURM_LOCALID is not: start the processes with srun, or unset it")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job, step = (int("0" + re.sub(r"\D", "", os.environ.get(name, ""))) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": _local_size(size),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or _FIRST_PORT + (job + 1009 * step) % _PORTS,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    if rank:
        return ""
    return f"Slurm has started {size} processes, which meet at {variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"


def has_gpu_of_its_own() -> bool:
    """Return whether Slurm shows each process its own GPU only, as with --gpus-per-task."""
    bound = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return "SLURM_PROCID" in os.environ and bound


def has_cores_of_its_own() -> bool:
    """Return whether srun has started several processes and has bound each to its own cores, as with --cpus-per-task.

    A single process that it has started, and torchrun, start ranks that share the cores of their parent.
    """
    size = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    is_task = "SLURM_PROCID" in os.environ and size != "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_task and os.environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask_cpu", "map_cpu"))


def _local_size(size: int) -> int:
    """Return the number of processes on this node."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        if (_integer("SLURM_NNODES", 1) or 1) == 1:
            return size
        raise UserError("SLURM_NNODES is above 1, but SLURM_TASKS_PER_NODE is not set; start the processes with srun")
    counts = list(_counts(text))
    node = _integer("SLURM_NODEID", 0, len(counts) - 1) or 0
    return counts[node]


def _counts(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as 2(x3),1: 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_TASKS_PER_NODE must be a list such as 2(x3),1; got {text!r}; {_FIX}")
        yield from [int(match[1])] * int(match[2] or 1)


def first_host(nodes: str) -> str:
    """Return the first host of a list such as gpu[03-05,9],login1, by `scontrol` where it is installed.

    >>> first_host("gpu[03-05,9],login1"), first_host("a1,a2"), first_host("r[1-2]c[05-07]-ib")
    ('gpu03', 'a1', 'r1c05-ib')
    """
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"`{' '.join(command)}` failed: {error}; set MASTER_ADDR to the host of rank 0") from error
        if done.stdout.split():
            return done.stdout.split()[0]
    pattern = r"(?:[^\[\],]|\[\d+(?:[-,]\d+)*\])+"
    match = re.match(pattern, nodes.strip())
    if match is None or re.fullmatch(f"{pattern}(?:,{pattern})*", nodes.strip()) is None:
        raise UserError(f"the hosts of Slurm's job must be a list such as gpu[03-05],login1; got {nodes!r}; {_FIX}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _integer(name: str, smallest: int, largest: int | None = None) -> int | None:
    try:
        return environment_integer(name, minimum=smallest, maximum=largest, fix=_FIX)
    except ValueError as error:
        raise UserError(str(error)) from error

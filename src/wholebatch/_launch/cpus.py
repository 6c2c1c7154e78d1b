"""The CPUs that this process may use, by its affinity and by the limits of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .slurm import has_cores_of_its_own

_GROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many CPUs this process may use: taskset, Slurm and Kubernetes give it less than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([count, *(int(limit) for limit in _limits())]))


def cpus_of_a_rank(ranks: int) -> int:
    """Return the share of each of so many ranks of this machine, at least 1."""
    return max(1, usable_cpus() // (1 if has_cores_of_its_own() else ranks))


def _limits() -> Iterator[float]:
    """Yield the CPUs that a control group, or one above it, has in each period: of version 2, and of version 1."""
    for group in _groups():
        for quota_file, period_file in (("cpu.max", "cpu.max"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota = (group / quota_file).read_text().split()[0]
                period = (group / period_file).read_text().split()[-1]
            except (OSError, IndexError):  # there is no such limit
                continue
            if quota.isdigit() and int(period):  # or "max", or -1
                yield int(quota) / int(period)


def _groups() -> Iterator[Path]:
    """Yield the folders of the process's group, and of those above it."""
    try:
        lines = _OF_PROCESS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS / controllers if controllers else _GROUPS
        inside = PurePosixPath(path.lstrip("/"))
        yield from (root / each for each in (inside, *inside.parents))

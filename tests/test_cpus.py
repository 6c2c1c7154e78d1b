"""The CPUs that a process may use."""

import os
from pathlib import Path

import pytest

from wholebatch._launch import cpus
from wholebatch._launch.cpus import cpus_of_a_rank, usable_cpus


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes a machine: the CPUs of the process's affinity, its groups, and their limits."""
    monkeypatch.setattr(cpus, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cpus, "_OF_PROCESS", tmp_path / "cgroup")
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_CPU_BIND_TYPE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def make(affinity, groups="", **limits):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
        (tmp_path / "cgroup").write_text(groups)
        for name, content in limits.items():
            file = Path(tmp_path, "groups", *name.split("__"))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_name(file.name.replace("_at_", ".")).write_text(content)

    return make


def test_without_limits_it_is_the_affinity_and_not_the_machine(machine, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    machine(6)
    assert usable_cpus() == 6
    assert [cpus_of_a_rank(ranks) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == 64, "of systems without an affinity"


@pytest.mark.parametrize(
    ("limit", "count"), [("max 100000\n", 16), ("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000\n", 1)]
)
def test_the_limit_of_a_container(machine, limit, count):
    machine(16, "0::/\n", cpu_at_max=limit)
    assert usable_cpus() == count


def test_the_smallest_limit_of_a_group_and_those_above_it(machine):
    limits = {
        "a__cpu_at_max": "300000 100000\n",
        "a__b__cpu_at_max": "max 100000\n",
        "a__c__cpu_at_max": "100000 100000",
    }
    machine(16, "0::/a/b\n", **limits)
    assert usable_cpus() == 3


def test_groups_of_version_1(machine):
    limits = {"cpu,cpuacct__x__cpu_at_cfs_quota_us": "500000\n", "cpu,cpuacct__x__cpu_at_cfs_period_us": "100000\n"}
    machine(16, "4:memory:/m\n1:cpu,cpuacct:/x\n0::/\n", **limits)
    assert usable_cpus() == 5
    machine(16, **{"cpu,cpuacct__x__cpu_at_cfs_quota_us": "-1\n"})
    assert usable_cpus() == 16


def test_cores_that_slurm_has_bound_to_each_rank_are_its_own(machine, monkeypatch):
    machine(8)
    for name, value in (("PROCID", "1"), ("NTASKS", "4"), ("CPU_BIND_TYPE", "mask_cpu:")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert cpus_of_a_rank(4) == 8
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cpus_of_a_rank(4) == 2, "torchrun's ranks share those of torchrun"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("SLURM_CPU_BIND_TYPE", "none")
    assert cpus_of_a_rank(4) == 2

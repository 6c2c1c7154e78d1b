"""Run every case of `comm_cases` under mpiexec, and write each one's outcome on each rank as a line of JSON.

Usage: mpiexec -n N python -m mpi4py tests/over_mpi.py FOLDER [CASE ...]
"""

import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
from comm_cases import CASES, run_case
from mpi_cases import MPI_CASES

from wholebatch.comm import MPICommunicator, mpi


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    gc.freeze()  # cases collect garbage: not that of the imported modules
    rank = MPICommunicator().rank
    with (Path(sys.argv[1]) / f"rank-{rank}.jsonl").open("w") as outcomes:
        for name in sys.argv[2:] or [*CASES, *MPI_CASES]:
            error = None
            try:
                if name in MPI_CASES:
                    MPI_CASES[name]()
                else:
                    run_case(name, MPICommunicator(timeout_s=60))
            except BaseException:
                error = traceback.format_exc()
            outcomes.write(json.dumps({"case": name, "error": error}) + "\n")
            outcomes.flush()
            if error is not None:
                sys.exit(f"{name} failed on rank {rank}")  # the others may still be inside it


if __name__ == "__main__":
    # More ranks than cores: a rank that sleeps for an instant frees its core; one that yields seldom does.
    with patch.object(mpi, "_BUSY_TESTS", 100), patch.object(os, "sched_yield", lambda: time.sleep(1e-5)):
        main()

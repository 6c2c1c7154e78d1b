"""For tests: run a function on W real processes, and assert that a training step's gradient is exact."""

from ._launch.processes import RankError, RankTimeoutError, preload, run_ranks
from .auditing.assertion import assert_exact

__all__ = ["RankError", "RankTimeoutError", "assert_exact", "preload", "run_ranks"]

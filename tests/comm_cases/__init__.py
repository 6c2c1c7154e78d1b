"""Requirements on every communicator, as functions of one: they run on gloo, MPICH, Open MPI and in one process."""

from . import adjoint, closing, graphs, losses, messages, mistakes, order, values
from .registry import CASES, run_case

# Cases that four ranks run, too: adjoints, and orders of calls.
FOUR = [
    name for name in CASES if name.startswith(("dot_test_float64_sum", "dot_test_in_parts", "chain", "token", "graphs"))
]

__all__ = [
    "CASES",
    "FOUR",
    "adjoint",
    "closing",
    "graphs",
    "losses",
    "messages",
    "mistakes",
    "order",
    "run_case",
    "values",
]

"""Requirements on every communicator, as functions of one: they run on gloo, MPICH, Open MPI and in one process."""

from . import adjoint, closing, graphs, losses, messages, mistakes, order, values
from .registry import CASES, run_case

__all__ = ["CASES", "adjoint", "closing", "graphs", "losses", "messages", "mistakes", "order", "run_case", "values"]

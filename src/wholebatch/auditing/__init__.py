"""The audit: whether the gradient that ranks end with is that of one process, and if not, why not.

Real processes run the user's own training step; what they end with is compared with one process. Where it differs,
causes are told apart by measurements: whose loss depends on whose rows, which calls of a model got a gradient back,
what the same code gives on batches for which a mistake of one kind does no harm.
"""

from .audit import audit
from .causes import Cause
from .problem import Problem
from .report import Finding, Report, Row

__all__ = ["Cause", "Finding", "Problem", "Report", "Row", "audit"]

"""The audit: compare the final gradient of several ranks with that of one process, and find the causes of differences.

Real processes run the user's training step. Causes are told apart by measurements: how each rank's loss depends on each
rank's rows, which calls of a model received a gradient, and the losses of batches on which a mistake of one kind has no
effect.
"""

from .audit import audit
from .causes import Cause
from .problem import Problem
from .report import Finding, Report, Row

__all__ = ["Cause", "Finding", "Problem", "Report", "Row", "audit"]

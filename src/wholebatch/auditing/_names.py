"""The public names of the audit."""

from .causes import Cause
from .driver import audit
from .problem import Problem
from .report import Finding, Report, Row

__all__ = ["Cause", "Finding", "Problem", "Report", "Row", "audit"]

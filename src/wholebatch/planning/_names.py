"""The public names of the planner."""

from .calibration import calibrate
from .given import DEVICES
from .options import plan
from .rates import Rates
from .report import Option, Plan

__all__ = ["DEVICES", "Option", "Plan", "Rates", "calibrate", "plan"]

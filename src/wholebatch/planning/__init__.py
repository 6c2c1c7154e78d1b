"""The planner: predict memory, time and bytes sent of a step before it runs."""

from .calibrate import calibrate
from .given import DEVICES
from .options import plan
from .rates import Rates
from .report import Option, Plan

__all__ = ["DEVICES", "Option", "Plan", "Rates", "calibrate", "plan"]

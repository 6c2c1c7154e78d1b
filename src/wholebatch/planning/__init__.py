"""What a step takes, before it runs: memory, time and bytes on the wire, and what fits."""

from .calibrate import calibrate
from .options import Option, Plan, plan
from .rates import DEVICES, Rates

__all__ = ["DEVICES", "Option", "Plan", "Rates", "calibrate", "plan"]

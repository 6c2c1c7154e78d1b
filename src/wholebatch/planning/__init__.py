"""What a step takes, before it runs: memory, time and bytes on the wire, and what fits."""

from .calibrate import calibrate
from .given import DEVICES
from .options import Option, Plan, plan
from .rates import Rates

__all__ = ["DEVICES", "Option", "Plan", "Rates", "calibrate", "plan"]

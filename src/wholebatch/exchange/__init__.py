"""How Y travels to the rows of X, and its gradient home. This layer knows no loss."""

from .gather import GatherExchange

__all__ = ["GatherExchange"]

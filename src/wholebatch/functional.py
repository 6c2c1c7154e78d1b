"""Every loss as a function; the modules only hold its settings."""

from .losses.clip import clip_loss

__all__ = ["clip_loss"]

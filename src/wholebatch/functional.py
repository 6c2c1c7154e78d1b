"""Every loss as a function; the modules only hold its settings."""

from .losses.clip import clip_loss
from .losses.info_nce import info_nce_loss
from .losses.nt_xent import nt_xent_loss
from .losses.siglip import siglip_loss

__all__ = ["clip_loss", "info_nce_loss", "nt_xent_loss", "siglip_loss"]

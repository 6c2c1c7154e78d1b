"""The same losses for JAX, on any mesh of devices: exact gradients, memory that does not grow with B x B.

Imports no torch. Each loss is one function of global arrays, under `jit` or not, `clip_loss(x, y, scale, mesh=mesh)`,
and one of a device's rows inside of a `jax.shard_map`, `clip_loss_local(x, y, scale, axis_name="data")`.

    a loss (clip, info_nce, nt_xent, sup_con, siglip, partial_fc)   what is positive, what is left out
    options, reduction                                              what a caller chooses; from rows to one number
    softmax, sigmoid                                                numbers of the rows and columns of S; derivatives
    exchange                                                        how the columns' features travel, and sums get home
    tiles, logsumexp, products                                      a tile of S, what is made of it, sums of that
    axis, mesh                                                      the devices, and from global arrays to theirs
    caching                                                         encoders in chunks: knows no loss
    reference                                                       the dense twin of every loss
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("wholebatch.jax needs JAX: pip install 'wholebatch[jax]'") from error

from . import reference
from .caching import (
    cache_grad,
    cache_train_step,
    chunk_encode,
    chunked,
    grad_cached,
    tree_chunk,
    tree_unchunk,
    unchunk_args,
)
from .clip import clip_loss, clip_loss_local
from .info_nce import info_nce_loss, info_nce_loss_local
from .margins import ArcFace, CombinedMargin, CosFace, Margin, NormFace, SphereFace
from .nt_xent import nt_xent_loss, nt_xent_loss_local
from .partial_fc import partial_fc_loss, partial_fc_loss_local
from .siglip import siglip_loss, siglip_loss_local
from .sup_con import sup_con_loss, sup_con_loss_local

__all__ = [
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "Margin",
    "NormFace",
    "SphereFace",
    "cache_grad",
    "cache_train_step",
    "chunk_encode",
    "chunked",
    "clip_loss",
    "clip_loss_local",
    "grad_cached",
    "info_nce_loss",
    "info_nce_loss_local",
    "nt_xent_loss",
    "nt_xent_loss_local",
    "partial_fc_loss",
    "partial_fc_loss_local",
    "reference",
    "siglip_loss",
    "siglip_loss_local",
    "sup_con_loss",
    "sup_con_loss_local",
    "tree_chunk",
    "tree_unchunk",
    "unchunk_args",
]


def __dir__() -> list[str]:
    """What is public; the files beside this one are how it is made."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

"""The losses for JAX, on any mesh of devices: exact gradients, memory that need not grow with B x B.

Imports no torch. Each loss is one function of global arrays, under `jit` or not, `clip_loss(x, y, scale, mesh=mesh)`,
and one function of a device's rows inside of a `jax.shard_map`, `clip_loss_local(x, y, scale, axis_name="data")`.

    a loss (clip, info_nce, nt_xent, sup_con, siglip, partial_fc)   which entries are positive, which are excluded
    options, reduction                                              the caller's choices; from rows to one number
    softmax, sigmoid, pairs                                         statistics of the rows and columns of S; derivatives
    sweep                                                           a pass over all tiles of S of a device: how
                                                                    columns travel, and their sums return
    tiles, logsumexp, products                                      a list of tiles, sums over them, products
    axis, mesh                                                      the devices; from global arrays to local rows
    chunking, gradcache                                             encoders in chunks; they know no loss
    reference                                                       dense reference implementations of all losses
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("wholebatch.jax needs JAX: pip install jax") from error

from . import reference
from .chunking import chunked
from .clip import clip_loss, clip_loss_local
from .gradcache import (
    cache_grad,
    cache_train_step,
    chunk_encode,
    grad_cached,
    tree_chunk,
    tree_unchunk,
    unchunk_args,
)
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
    """List the public names only."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

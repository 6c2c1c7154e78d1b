"""Train with losses that need the whole batch: exact gradients, flat memory, any number of processes."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import jax as jax
    from ._torch_names import *  # noqa: F403
else:  # a type checker sees the names themselves, and which there are not
    from ._base.lazy import lazy_names

    # `wholebatch.jax` is a submodule like others: it imports no torch, and the other names import no JAX.
    __getattr__, _list_names = lazy_names(__name__, "._torch_names", "__version__")

    def __dir__() -> list[str]:
        return sorted({*_list_names(), *["jax"] * (find_spec("jax") is not None)})


__version__ = "0.1.0"

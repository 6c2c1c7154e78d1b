"""Train with losses that need the whole batch: exact gradients, flat memory, any number of processes."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import jax as jax
    from ._torch_names import *  # noqa: F403

__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker sees the names themselves, and which there are not

    def __getattr__(name: str) -> Any:
        """Load what is asked for, so that `wholebatch.jax` imports no torch and the rest no JAX."""
        if name == "__all__":
            return [*import_module("._torch_names", __name__).__all__, "__version__"]
        if name.isidentifier() and not name.startswith("__"):
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f".{name}", __name__)
            names = vars(import_module("._torch_names", __name__))
            if name in names:
                return globals().setdefault(name, names[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return the names that are loaded, and all public ones."""
        return sorted({*globals(), *__getattr__("__all__"), *["jax"] * (find_spec("jax") is not None)})

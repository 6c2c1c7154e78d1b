"""Skip the doctests of wholebatch.jax if JAX is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("jax") else ["src/wholebatch/jax/*"]

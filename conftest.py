"""Where there is no JAX, its part of the package has no examples to be run."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("jax") else ["src/wholebatch/jax/*"]

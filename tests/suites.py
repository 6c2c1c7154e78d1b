"""The suites that continuous integration runs as jobs of their own; `make test` runs all of them.

    python tests/suites.py arguments SUITE     arguments of pytest for one suite
    python tests/suites.py changed < FILES     the suites that a change of these files concerns, as a list in JSON

A suite runs when its tests, its folder or a layer below changes. Which files these are is known without importing torch
or pytest.
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import NamedTuple

from layers import LAYERS, layer_of

CORE = "core"
LIBRARY, APPLICATION = "src/wholebatch/", "packages/wholebatch-train/"


class Suite(NamedTuple):
    """Test files, and what they test: a layer of the library, or the application above it."""

    tests: tuple[str, ...]
    layer: str | None = None


SUITES = {  # every other test is in the core
    "train": Suite(("tests/test_train_*.py", "tests/test_newcomers.py", "packages/*")),
    "integrations": Suite(("tests/test_integrations*.py",), "integrations"),
    "audit": Suite(("tests/test_audit.py",), "auditing"),
    "jax": Suite(("tests/test_jax_*.py", "src/wholebatch/jax/*"), "jax"),
    "mpi": Suite(("tests/test_mpi.py",), "comm"),
}
ALL = [CORE, *SUITES]


def arguments(suite: str) -> list[str]:
    """Return the arguments with which pytest runs this suite alone; the core is everything that is in no other."""
    if suite == CORE:
        return [f"--ignore-glob=*/{pattern}" for other in SUITES.values() for pattern in other.tests]
    return [pattern.removesuffix("*") if pattern.endswith("/*") else pattern for pattern in SUITES[suite].tests]


def changed(files: list[str]) -> list[str]:
    """Return the suites that a change of these files concerns; the core always runs."""
    concerned = {CORE}.union(*map(_suites_of, files))
    return [suite for suite in ALL if suite in concerned]


def _suites_of(file: str) -> set[str]:
    of_tests = {name for name, suite in SUITES.items() if any(fnmatch(file, pattern) for pattern in suite.tests)}
    if file.startswith(APPLICATION):
        return {"train"}
    if file.startswith(LIBRARY):
        return of_tests | _suites_above(layer_of(file.removeprefix(LIBRARY).removesuffix(".py").replace("/", ".")))
    name = PurePosixPath(file).name
    if file.startswith("tests/") and fnmatch(name, "test_*.py"):
        return of_tests
    if file.startswith(("docs/", "benchmarks/", "examples/", "tests/ecosystem/")) or name.endswith((".md", ".cff")):
        return set()  # the core reads and runs them
    return {*SUITES}  # what all tests share: settings, versions, helpers


def _suites_above(layer: str) -> set[str]:
    """Return the suites of this layer and those above it; no layer imports that of JAX."""
    height = {name: at for at, layers in enumerate(LAYERS) for name in layers}
    return {
        name
        for name, suite in SUITES.items()
        if suite.layer == layer or (layer != "jax" and (suite.layer is None or height[suite.layer] > height[layer]))
    }


if __name__ == "__main__":
    command, *names = sys.argv[1:]
    print(json.dumps(changed(sys.stdin.read().splitlines())) if command == "changed" else " ".join(arguments(*names)))

"""Full signatures reach a user's editor: arguments of functions and modules complete, and mistakes are underlined."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = ROOT / "tests" / "typed" / "user.py"
MODULES = [
    "integrations.grad_cache",
    "integrations.flag_embedding",
    "integrations.insightface",
    "integrations.lightning",
    "integrations.lightly",
    "integrations.ms_swift",
    "integrations.open_clip",
    "integrations.pylate",
    "integrations.pytorch_metric_learning",
    "integrations.sentence_transformers",
    "integrations.tevatron",
    "integrations.transformers",
    "functional",
    "comm",
    "heads",
    "gradcache",
    "testing",
    "jax",
    "reference",
    "planning",
    "auditing",
]


def mistakes() -> set[int]:
    return {number for number, line in enumerate(USER.read_text().splitlines(), 1) if line.endswith("# error")}


def test_mypy_finds_the_mistakes_of_a_user_and_no_others():
    """With the settings of pyproject.toml, so that what `make lint` knows of torch need not be found again."""
    api = pytest.importorskip("mypy.api")
    report, _, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", str(USER)])
    assert {int(line) for line in re.findall(r"user\.py:(\d+): error", report)} == mistakes(), report


def test_basedpyright_finds_the_mistakes_of_a_user_and_no_others():
    program = shutil.which("basedpyright")
    if program is None:
        pytest.skip("basedpyright is not installed")
    command = [program, "--level", "error", "--pythonpath", sys.executable, str(USER)]
    report = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300).stdout
    assert {int(line) for line in re.findall(r"user\.py:(\d+):\d+ - error", report)} == mistakes(), report


def public(module: str) -> list[object]:
    """Return the public functions and classes of a module, and the classes of this package that these inherit from."""
    if module == "jax":
        pytest.importorskip("jax")
    found = import_module(f"wholebatch.{module}".rstrip("."))
    objects = [getattr(found, name) for name in found.__all__]
    classes = [base for x in objects if inspect.isclass(x) for base in x.__mro__]
    functions = [inspect.unwrap(x) for x in objects if inspect.isroutine(x)]
    return [x for x in (*classes, *functions) if x.__module__.startswith("wholebatch.")]


def unexplained(source: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a function's or class's signatures that have `Any`, and no comment."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            for annotation in annotations(node):
                for part in ast.walk(annotation):
                    is_any = "Any" in (getattr(part, "id", None), getattr(part, "attr", None))
                    if is_any and "#" not in lines[part.lineno - 1]:
                        yield part.lineno, lines[part.lineno - 1].strip()


def annotations(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the annotations of a function, or of a class's public methods and fields."""
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            name = getattr(member, "name", getattr(getattr(member, "target", None), "id", "_"))
            if not name.startswith("_") or name in ("__init__", "__call__"):
                yield from annotations(member)
    elif isinstance(node, ast.FunctionDef):
        every = [*ast.walk(node.args), node]
        found = [getattr(x, "annotation", None) or getattr(x, "returns", None) for x in every]
        yield from (x for x in found if x is not None)
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation


@pytest.mark.parametrize("module", ["", *MODULES])
def test_any_in_a_public_signature_has_a_reason_beside_it(module):
    found = {
        f"{path}:{line}: {text}"
        for path, name in {(inspect.getsourcefile(x), x.__name__) for x in public(module)}
        for line, text in unexplained(Path(path).read_text(), name)
    }
    assert not found, "\n".join(sorted(found))


def test_a_planted_any_is_found():
    source = """
def f(
    a: int,
    *rest: Any,
    b: dict[str, typing.Any],  # of the caller's types
) -> Callable[..., Any]: ...

class C:
    field: Any
    _field: Any
    def method(self, x: Any) -> int: ...
    def _private(self, x: Any) -> int: ...
"""
    assert [line for line, _ in unexplained(source, "f")] == [4, 6]
    assert [line for line, _ in unexplained(source, "C")] == [9, 11]

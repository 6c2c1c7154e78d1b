"""Imports point down the layers only and form no circle; imports in functions and for type checkers count, too."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
from layers import BASE, FOUNDATION, LAYERS, circles, imports, layer_of

import wholebatch
from wholebatch import app
from wholebatch.app import tensors

ROOT = Path(__file__).parent.parent / "src" / "wholebatch"


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that go up, or to a sibling."""
    height = {name: at for at, layer in enumerate(LAYERS) for name in layer}
    pairs = [(source, target) for source, targets in graph.items() for target in targets]
    return sorted(
        f"{source} imports {target}"
        for source, target in pairs
        if layer_of(source) != layer_of(target) and height[layer_of(source)] <= height[layer_of(target)]
    )


def test_no_import_goes_up():
    assert upward(imports(ROOT)) == []


def test_no_imports_form_a_circle():
    assert circles(imports(ROOT)) == []


def drawn(page: str) -> list[list[str]]:
    """Return the layers of the picture in CONTRIBUTING.md, from the top down, each with its names."""
    picture = page.split("<!-- layers -->")[1].split("```")[1]
    return [re.split(r" {3,}", line)[0].replace("/", "").split() for line in picture.strip().splitlines()]


def wrong_layers(picture: list[list[str]]) -> list[str]:
    """Return the names that stand at another height than in `LAYERS`, or are missing."""
    height = {name: at for at, layer in enumerate(LAYERS) for name in layer}
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    heights = [{height[layer_of(name)] for name in line} for line in picture]
    rising = [f"{above} above {below}" for above, below in pairwise(heights) if not min(above) > max(below)]
    return [*rising, *sorted(packages ^ {name for line in picture for name in line if layer_of(name) != FOUNDATION})]


def test_the_picture_shows_these_layers():
    picture = drawn((ROOT.parents[1] / "CONTRIBUTING.md").read_text())
    assert wrong_layers(picture) == []
    assert wrong_layers(picture[1:]) == ["app", "bench", "doctor"]
    assert wrong_layers(picture[::-1])


LISTED = re.compile(r"^ {0,4}([a-z_0-9]+/?(?:, [a-z_0-9]+)*)  +\S", re.MULTILINE)


def unknown_modules(package):
    """Return the names in the list of a package's docstring that are no module beside it."""
    listed = LISTED.findall(ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "")
    names = [name for row in listed for name in row.split(", ")]
    return [name for name in names if not any((package / end).exists() for end in (f"{name}.py", name))]


@pytest.mark.parametrize("package", sorted(p.parent for p in ROOT.rglob("__init__.py")), ids=lambda p: p.name)
def test_packages_list_modules_that_exist(package):
    assert unknown_modules(package) == []


def test_a_planted_name_of_no_module_is_found(tmp_path):
    (tmp_path / "__init__.py").write_text(
        '"""Two.\n\n    tiles/, rows   both\n    rows           one\n    gone  none\n"""'
    )
    (tmp_path / "rows.py").touch()
    (tmp_path / "tiles").mkdir()
    assert unknown_modules(tmp_path) == ["gone"]


def test_jax_stands_alone():
    """It imports only what lies below every layer, because the rest of the package imports torch."""
    graph = imports(ROOT)
    assert {layer_of(target) for module in graph if layer_of(module) == "jax" for target in graph[module]} <= {
        "jax",
        FOUNDATION,
        *BASE,
    }


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("sweep/memory.py", "from ..losses import clip\n", "sweep.memory imports losses.clip"),
        ("comm/local.py", "def late():\n    from ..sweep import Block\n", "comm.local imports sweep"),
        (
            "heads/rows.py",
            "if TYPE_CHECKING:\n    from ..losses.clip import CLIPLoss\n",
            "heads.rows imports losses.clip",
        ),
        ("partition.py", "import wholebatch.comm.mpi\n", "partition imports comm.mpi"),
    ],
)
def test_planted_upward_imports_are_found(tmp_path, module, line, found):
    graph = imports(planted(tmp_path, module, line))
    assert found in upward(graph)


def test_a_planted_circle_is_found(tmp_path):
    graph = imports(planted(tmp_path, "_base/precision.py", "if TYPE_CHECKING:\n    from .normalize import EPS\n"))
    assert ["_base.normalize", "_base.precision"] in circles(graph)


def planted(folder: Path, module: str, line: str) -> Path:
    """Return a copy of the package with one more line in one module."""
    for path in ROOT.rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text() + (line if path == ROOT / module else ""))
    return folder


def of_application(text):
    """Return the names that a module of the application takes from the library, each with where it takes it from."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "wholebatch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wholebatch":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wb":
            yield "wholebatch", node.attr


def private(names):
    """Return those of these names that are no public ones of a public module."""
    modules = {"wholebatch": wholebatch, "wholebatch.app": app, "wholebatch.app.tensors": tensors}
    for module, name in names:
        if module not in modules or (name is not None and name not in modules[module].__all__):
            yield f"{module}.{name}"


def test_the_application_uses_public_names_alone():
    sources = [*(ROOT.parents[1] / "packages" / "wholebatch-train" / "src").rglob("*.py")]
    names = {name for path in sources for name in of_application(path.read_text())}
    assert len(names) > 40
    assert [*private(names)] == []
    wrong = "from wholebatch.losses.clip import CLIPLoss\nfrom wholebatch.app import amounts\nwb.kernels.choices()"
    assert len([*private(of_application(wrong))]) == 3

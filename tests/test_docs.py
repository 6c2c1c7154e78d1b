"""The Python code in README and docs runs, links have targets, and quoted messages are those of the source."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from mpi import available, mpiexec

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]


def blocks(language):
    """Return the blocks of code of all pages; a block that stands on two pages counts once."""
    found = {}
    for page in PAGES:
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)):
            found.setdefault(block, f"{page.name}-{number}")
    return [pytest.param(block, id=name) for block, name in found.items()]


def test_pages_have_code_to_run():
    assert len(blocks("python")) >= 30


def same_on_both(printed):
    """Return whether two ranks have printed the same number."""
    losses = re.findall(r"rank \d: (\d+\.\d{6})", printed)
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize("block", blocks("python"))
def test_block_runs(block, tmp_path):
    if "import jax" in block:
        pytest.importorskip("jax")  # JAX needs Python 3.11
    if "# mpiexec" in block:
        file = tmp_path / "block.py"
        file.write_text(block)
        for implementation in available():
            run = mpiexec(implementation, 2, str(file))
            assert run.returncode == 0, run.stderr
            same_on_both(run.stdout)
        return
    if "# torchrun" in block:
        # Without the interpreter's teardown, in which gloo's threads abort any DDP program now and then (torch 2.13).
        (tmp_path / "block.py").write_text(block + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
        torchrun = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        run = subprocess.run([*torchrun, str(tmp_path / "block.py")], capture_output=True, text=True, check=True)
        same_on_both(run.stdout)
        return
    exec(compile(block, "documentation", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("py"))
def test_block_of_another_library_parses(block):
    ast.parse(block)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if generated := re.fullmatch(r"api/([\w.]+)\.md", target):  # `make docs` writes these
            assert find_spec(generated[1]), f"{page.name}: {target}"
        else:
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_named_files_exist(page):
    files = r"(?<![\w/])((?:tests|benchmarks|examples|docs)/[\w/]+\.(?:py|ipynb|md|jsonl?|png))"
    named = re.findall(files, page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {missing}"


@cache
def literals():
    """Return every string of the source, placeholders as `...`; adjacent strings are one."""
    found = []
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted():
    """Return the messages that the two catalogs of errors quote."""
    text = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("errors", "errors_application"))
    return re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)


def in_source(message):
    """Return whether one string of the source holds the parts of a message in this order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), flags=re.DOTALL)
    return any(pattern.search(text) for text in literals())


@pytest.mark.parametrize("message", quoted())
def test_the_catalog_quotes_messages_of_the_source(message):
    assert in_source(message), "no string of src/ holds this; was the message reworded?"


@pytest.mark.planted
def test_a_changed_wording_is_not_found_in_the_source():
    assert len(quoted()) > 40
    assert not in_source("must be the same on every rank, obtained ...")


def test_pages_are_short():
    """A page that answers one question has at most 250 lines."""
    long = {page.name: count for page in PAGES if (count := len(page.read_text().splitlines())) > 250}
    assert not long


def test_the_readme_counts_the_audited_settings(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    theirs, ours = import_module("readme_figure").audits()
    counts = f"{sum(map(len, theirs.values()))} settings of {len(theirs)} libraries"
    for page in ("README.md", "docs/audit.md", "docs/audit_libraries.md"):
        assert counts in (ROOT / page).read_text(), page
    assert f"with our adapters all {sum(map(len, ours.values()))} are right" in (ROOT / "README.md").read_text()
    assert {kind for kinds in ours.values() for kind in kinds} == {"that of the global batch"}

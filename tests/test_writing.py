"""The rules of prose that a program can check: retired words, British spellings, openings of docstrings.

`docs/writing.md` has the rules. To widen the check, add to `PROSE` or `SOURCES`. A test lists all violations.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROSE = [
    "README.md",
    "packages/*/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "examples/*.ipynb",
]  # whole files
SOURCES = [
    "src/**/*.py",
    "packages/**/*.py",
    "docs/*.py",
    "tests/**/*.py",
    "benchmarks/**/*.py",
    "examples/*.py",
    "conftest.py",
]  # docstrings and comments of Python
STRINGS = ["src/**/*.py", "packages/**/*.py"]  # string constants, such as messages
ALLOWED = {"docs/writing.md", "tests/test_writing.py"}  # name the retired words

RETIRED = {
    r"doors?": "entry validation",
    r"(?<!barlow )twins?": "reference implementation",
    r"certificates?": "underflow check",
    r"mend(?:s|ed|ing)?": "fix",
    r"reckon(?:s|ed|ing)?": "estimate",
    r"anew": "again",
    r"in the place of": "instead of",
    r"without a word": "silently",
    r"a look": "a check, a read",
    r"so much of": "a factor",
    r"give that,? too": "name the argument",
    r"(?:bring|brings|brought|takes?|gets?|go|goes) (?:\w+ )?home": "reduce to the owner",
    r"one shift does not do": "one shift underflows",
    r"without more ado": "nothing",
    r"that which": "a noun",
    r"ranks-count-alike": "mean-of-means",
    r"another-loss": "loss-differs",
    r"scaled-alike": "uniform-scaling",
    r"value-is-another": "value-not-global",
}
STEMS = "normal|initial|optim|memor|organ|general|real|synchron|recogn|summar|minim|maxim|vector|serial|util|regular"
BRITISH = {
    rf"\w*(?:{STEMS})is(?:e|es|ed|ing|ation|er|ers)": "-ize",
    r"(?:sub)?centre[sd]?": "center",
    r"colours?": "color",
    r"behaviours?": "behavior",
    r"favours?": "favor",
    r"neighbours?": "neighbor",
    r"licence[sd]?": "license",
    r"(?:un)?(?:label|cancel|travel|model)l(?:ed|ing)": "one l",
    r"grey": "gray",
    r"analyse[sd]?": "analyze",
    r"catalogues?": "catalog",
    r"judgement": "judgment",
    r"artefacts?": "artifact",
    r"whilst|amongst": "while, among",
}
PATTERNS = {
    word: (re.compile(rf"(?<![\w-]){word}(?![\w-])", re.IGNORECASE), instead)
    for word, instead in (RETIRED | BRITISH).items()
}


def files(globs: list[str]) -> list[Path]:
    found = [path for pattern in globs for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if path.relative_to(ROOT).as_posix() not in ALLOWED]


def violations(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the retired word and its replacement."""
    for pattern, instead in PATTERNS.values():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[0], instead


def report(path: Path, text: str) -> list[str]:
    """Return a line for each violation in the text of a file."""
    name = path.relative_to(ROOT).as_posix()
    return [f"{name}:{line}: {word!r} -> {instead}" for line, word, instead in violations(text)]


def prose_of(source: str) -> str:
    """Return the source with everything but comments and docstrings blanked, so that lines keep their numbers."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += " " + token.string
    for node in docstrings(source):
        for offset, line in enumerate(node.value.splitlines()):
            lines[node.lineno - 1 + offset] += " " + line
    return "\n".join(lines)


def strings_of(source: str) -> str:
    """Return the string constants of the source with everything else blanked, so that lines keep their numbers."""
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                at = min(node.lineno - 1 + offset, node.end_lineno - 1)
                lines[at] += " " + line
    return "\n".join(lines)


def docstrings(source: str) -> Iterator[ast.Constant]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()) as docstring):
                    yield docstring


def test_pages_use_the_vocabulary() -> None:
    found = [line for path in files(PROSE) for line in report(path, path.read_text())]
    assert not found, "\n".join(found)


def test_docstrings_and_comments_use_the_vocabulary() -> None:
    found = [line for path in files(SOURCES) for line in report(path, prose_of(path.read_text()))]
    assert not found, "\n".join(found)


def test_strings_use_the_vocabulary() -> None:
    found = [line for path in files(STRINGS) for line in report(path, strings_of(path.read_text()))]
    assert not found, "\n".join(found)


def test_docstrings_stand_alone() -> None:
    opens_badly = re.compile(r"(?:Of|What|Whatever|That which)\b")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.splitlines()[0]}"
        for path in files(SOURCES)
        for node in docstrings(path.read_text())
        if opens_badly.match(node.value.strip())
    ]
    assert not found, "\n".join(found)


def bindings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each argument and variable of a function."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                match node:
                    case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                        yield node.lineno, name


def unnamed(source: str) -> set[tuple[int, str]]:
    """Return the bindings that do not say what they hold."""
    return {binding for binding in bindings(source) if re.fullmatch(r"of(_\w+)?|at|found|given|one|what", binding[1])}


def test_bindings_are_nouns() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(STRINGS)
        for line, name in unnamed(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_globs_find_files() -> None:
    assert all(files([pattern]) for pattern in PROSE + SOURCES + STRINGS)


@pytest.mark.planted
def test_the_check_rejects() -> None:
    planted = "A mistake ends at the door.\nThe dense Twin is normalised anew, without a word."
    assert [(line, word) for line, word, _ in sorted(violations(planted))] == [
        (1, "door"),
        (2, "Twin"),
        (2, "anew"),
        (2, "normalised"),
        (2, "without a word"),
    ]
    assert not list(violations("barlow_twins_loss and BarlowTwinsLoss keep their names; so do recommend and precise."))
    assert "Twin" in prose_of('def f():\n    """Twin."""\n    return "door"  # no comment here')
    assert "door" in strings_of('def f():\n    return f"{f} door"  # twin')
    assert "twin" not in strings_of("f()  # twin")
    assert unnamed("def f(of_x, x_grad):\n    for at in of_x:\n        given = 1") == {
        (1, "of_x"),
        (2, "at"),
        (3, "given"),
    }
    assert unnamed("async def f():\n  try:\n    pass\n  except OSError as found:\n    pass") == {(4, "found")}
    assert "door" not in prose_of('def f():\n    """Twin."""\n    return "door"')

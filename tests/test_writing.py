"""The rules of prose that a program can check: retired words, British spellings, openings of docstrings.

`docs/writing.md` has the rules. To widen the check, add to `PROSE` or `SOURCES`.
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
PROSE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md"]  # whole files
SOURCES = [
    "src/**/*.py",
    "docs/*.py",
    "tests/test_docs.py",
    "benchmarks/readme_figure.py",
]  # docstrings and comments of Python
ALLOWED = {"docs/writing.md"}  # names the retired words

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


def docstrings(source: str) -> Iterator[ast.Constant]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str()) as docstring):
                    yield docstring


@pytest.mark.parametrize("path", files(PROSE), ids=lambda path: path.name)
def test_pages_use_the_vocabulary(path: Path) -> None:
    found = [f"{path.name}:{line}: {word!r} -> {instead}" for line, word, instead in violations(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", files(SOURCES), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_and_comments_use_the_vocabulary(path: Path) -> None:
    text = prose_of(path.read_text())
    found = [f"{path.name}:{line}: {word!r} -> {instead}" for line, word, instead in violations(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", files(SOURCES), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_stand_alone(path: Path) -> None:
    opens_badly = re.compile(r"(?:Of|What|Whatever|That which)\b")
    found = [
        f"{path.name}:{node.lineno}: {node.value.splitlines()[0]}"
        for node in docstrings(path.read_text())
        if opens_badly.match(node.value.strip())
    ]
    assert not found, "\n".join(found)


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
    assert "door" not in prose_of('def f():\n    """Twin."""\n    return "door"')

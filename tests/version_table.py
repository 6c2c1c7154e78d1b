"""The versions of frameworks on docs/integrations/index.md, from the adapters' table and from what the tests install.

python tests/version_table.py    # writes the table between the page's marks
"""

import re
from pathlib import Path

from wholebatch.integrations import _framework
from wholebatch.integrations._framework import Framework

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "integrations" / "index.md"
BETWEEN = re.compile(r"(<!-- versions: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def installed_by(framework: Framework, version: str) -> str:
    """Return the file of pins that has this version; a version without one is tested in a checkout."""
    command = re.match(r"pip install '?([\w-]+)", framework.install)
    package = command[1].replace("_", "[-_]") if command else framework.module
    for file in sorted(ROOT.glob("constraints*.txt"), key=lambda file: len(file.name)):
        if re.search(rf"^{package}=={re.escape(version)}$", file.read_text(), flags=re.MULTILINE):
            return f"`{file.name}`"
    beside = re.search(r"^SENTENCE \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    if framework is _framework.SENTENCE_TRANSFORMERS and version in beside[1].split():
        return "`make sentence`"
    return "a checkout"


def table() -> str:
    """Return the table."""
    lines = ["| framework | refused | tested, with the pins of | used, with a line in the log |", "|---|---|---|---|"]
    for x in vars(_framework).values():
        if isinstance(x, Framework):
            tested = ", ".join(f"{version} ({installed_by(x, version)})" for version in x.versions)
            lines.append(f"| {x.module} | before {x.versions[0]} | {tested} | all others |")
    return "\n".join(lines) + "\n"


def page_with_table() -> str:
    """Return the page with the table of now."""
    page, count = BETWEEN.subn(lambda found: found[1] + table() + found[2], PAGE.read_text())
    assert count == 1, f"{PAGE} has {count} places for the table"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_table())

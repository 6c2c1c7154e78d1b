"""Run what pages print, as it is printed: their commands and their programs.

    python tests/as_printed.py README.md docs/own_data.md     # each page in a fresh clone and an empty environment
    python tests/as_printed.py --installed README.md          # in the environment of this Python, without installing

Commands are the lines of `sh` blocks, those after `$` in other blocks, and each `pip install ...` of the prose; of an
example the lines of its docstring. Programs are `python` blocks: a first line `# NAME.py` names the file, and a first
line `# torchrun ... this_file.py` is the command that runs it. Files that a page takes from its reader are made here.
The output is in build/as_printed, and the exit code is 1 if a command failed: if its own is not the one that its
comment announces, as in ": exit code 1", or else 0. pip chooses torch by the settings of the machine, such as
PIP_CONSTRAINT=constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
INSTALL = "pip install . ./packages/wholebatch-train"  # as the README has it, before pages that begin without it
NOT_RUN = {  # part of a command, and the reason
    "export runs/photos ": "needs a run with pretrained encoders",
    "srun ": "needs Slurm",
    "FOLDER_OR_HUB_NAME": "needs a pretrained encoder",
    "timm:": "downloads weights",
    "/models/": "needs pretrained encoders",
    "--resume runs/": "needs a run of the reader's",
    "mine.py": "needs encoders of the reader's",
    " ... ": "is abridged",
    "$model": "needs a line before it",
    "my_project.py": "needs a program of the reader's",
    "--device cuda": "needs a GPU",
    "make gpu": "needs a GPU",
    "PID": "needs the number of a process",
    "tensorboard --logdir": "is a server, which does not end",
    "--wandb": "needs an account",
}


class Printed(NamedTuple):
    """A command of a page, and the program that it runs, if the page has it."""

    line: int
    command: str
    file: str = ""
    program: str = ""

    @property
    def reason(self) -> str:
        """Return why the command is not run, or an empty string."""
        return next((reason for part, reason in NOT_RUN.items() if part in self.command), "")


def printed(page: Path) -> list[Printed]:
    """Return the commands of a page: installations of its prose, then the others in their order."""
    text = page.read_text()
    if page.suffix == ".py":
        commands = re.finditer(r"^ {4}((?:pip|python|torchrun) .*)", text.partition('\n"""')[0], flags=re.M)
        return [_at(text, match.start(), match[1]) for match in commands]
    fences = [*re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)]
    prose = re.sub(r"^```.*?^```", lambda fence: re.sub(r"[^\n]", " ", fence[0]), text, flags=re.M | re.S)
    found = [_at(text, match.start(), match[1]) for match in re.finditer(r"`(pip install [^`]+)`", prose)]
    for fence in fences:
        found += _of_block(fence[1], fence[2], _at(text, fence.start(), "").line + 1)
    return found


def torchrun_commands(page: Path) -> Iterator[str]:
    """Yield all of a page's commands that start by torchrun; of a diff those that it ends with."""
    new = re.sub(r"^-.*\n|^[+ ] ", "", page.read_text(), flags=re.M)
    for match in re.finditer(r"^(?:\w+=\S+ |timeout \d+ )*(torchrun (?:.*\\\n)*.*)", new, flags=re.M):
        yield match[1].replace("\\\n", " ").partition(" #")[0]


def _at(text: str, start: int, command: str) -> Printed:
    return Printed(text.count("\n", 0, start) + 1, " ".join(command.split()))


def _of_block(language: str, block: str, line: int) -> Iterator[Printed]:
    if language == "python":
        first = block.partition("\n")[0].removeprefix("# ")
        file = first if re.fullmatch(r"\w+\.py", first) else "this_file.py"
        yield Printed(line, first if first.endswith(" this_file.py") else f"python {file}", file, block)
    elif language == "sh" and not block.startswith("#!"):
        yield from _lines(block, line, "")
    elif not language:
        yield from _lines(block, line, "$ ")


def _lines(block: str, line: int, prompt: str) -> Iterator[Printed]:
    for match in re.finditer(rf"^{re.escape(prompt)}(\S(?:.*\\\n)*.*)", block, flags=re.M):
        yield Printed(line + block.count("\n", 0, match.start()), match[1].replace("\\\n", " "))


def make_files(folder: Path) -> None:
    """Write the files that pages take from their reader: pictures with texts, tables, options."""
    colors = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "gold": (230, 180, 30)}
    sizes = {"heart": 5, "bird": 9, "tree": 14, "house": 20, "star": 26}
    for name in ("photos", "pictures", "other-photos"):
        (folder / name).mkdir()
        for k, (word, color) in enumerate(colors.items()):
            for noun, size in sizes.items():
                (folder / name / f"{word}-{noun}.png").write_bytes(_picture(size + k % 2, color))
    names = [(f"photos/{word}-{noun}.png", word, noun) for word in colors for noun in sizes]
    rows = [f"{file},{word} {noun}" for file, word, noun in names]
    (folder / "pairs.csv").write_text("\n".join(["image,text", *rows]) + "\n")
    lines = [
        {"query": f"a {word} {noun}", "positive": f"{noun} in {word}", "negatives": ["a"]} for _, word, noun in names
    ]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "queries.csv").write_text("text\nred bird\nblue tree\n")
    (folder / "run.toml").write_text('data = "pairs.csv"\nsteps = 20\n')


def _picture(size: int, color: tuple[int, int, int]) -> bytes:
    """Return a PNG of 32 x 32 pixels, a square of one color on white."""
    row = [b"\0" + b"".join(bytes(color if max(x, y) < size else (255,) * 3) for x in range(32)) for y in range(32)]
    parts = [
        (b"IHDR", struct.pack(">2I5B", 32, 32, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(row))),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def run(page: Path, log_file: Path, *, installed: bool, timeout_s: float) -> int:
    """Run a page's commands in their order, write the log, and return how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as temporary, log_file.open("w") as log:
        checkout = Path(temporary) / "checkout"
        subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
        programs = Path(sys.executable).parent
        if not installed:
            programs = Path(temporary) / "environment" / "bin"
            subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True)
        make_files(checkout)
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        commands = printed(page)
        if commands and not re.match(r"(python -m )?pip install '?\.['\s\[]", commands[0].command + " "):
            commands.insert(0, Printed(0, INSTALL))
        for each in commands:
            reason = "is installed" if installed and "pip install" in each.command else each.reason
            outcome = f"not run: {reason}"
            if not reason:
                if each.file:
                    (checkout / each.file).write_text(each.program)
                log.write(f"\n$ {each.command}\n")
                log.flush()
                began = time.monotonic()
                command = ["timeout", str(timeout_s), "bash", "-c", each.command]
                code = subprocess.run(
                    command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False
                ).returncode
                announced = re.search(r"#.*: exit code (\d)", each.command)
                right = code == (int(announced[1]) if announced else 0)
                failed += not right
                outcome = f"{'ok' if right else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s"
            report = f"{page.name}:{each.line}: {each.command}  [{outcome}]"
            log.write(f"{report}\n")
            print(report, flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    """Run the pages of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--installed", action="store_true", help="the environment of this Python has the packages")
    parser.add_argument("--timeout-s", type=float, default=1200, help="of a command")
    options = parser.parse_args(argv)
    logs = ROOT / "build" / "as_printed"
    logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for page in options.pages:
        log_file = logs / f"{'-'.join(page.with_suffix('.log').parts[-2:])}"
        failed += run(page, log_file, installed=options.installed, timeout_s=options.timeout_s)
    print(f"{failed} failed; the output is in {logs}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

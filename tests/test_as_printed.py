"""Printed commands name what exists, torchrun passes on what follows its program, and `as_printed.py` runs them."""

import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
from as_printed import INSTALL, ROOT, printed, torchrun_commands
from torch.distributed.run import get_args_parser

from wholebatch.integrations import _framework

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
COMMANDS = sorted({each.command for page in [*PAGES, *ROOT.glob("examples/*.py")] for each in printed(page)})
TORCHRUN = sorted({command for page in PAGES for command in torchrun_commands(page)})


def words(command):
    return shlex.split(command, comments=True)


def test_commands_are_found():
    assert len(COMMANDS) > 60
    assert len(TORCHRUN) >= 6


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_targets_exist(command):
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert words(command)[1] in targets


def unknown_options(command):
    """Return the options of a `wholebatch` command that its help does not have."""
    _, *arguments = words(command[command.index("wholebatch ") :])
    upto = next((k for k, word in enumerate(arguments) if word.startswith("-") or k == 2), len(arguments))
    names = arguments[: upto if arguments[0] == "bench" else 1]
    return [x for x in arguments if x.startswith("--") and not re.search(rf"{x}\b", help_of(*names))]


@cache
def help_of(*names):
    command = [sys.executable, "-m", "wholebatch", *names, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_options_exist():
    ours = [command for command in COMMANDS if re.match(r"(?:\.venv/bin/|torchrun .* -m )?wholebatch \w", command)]
    assert len(ours) > 25
    assert {command: found for command in ours if (found := unknown_options(command))} == {}


@pytest.mark.planted
def test_an_option_that_does_not_exist_is_found():
    assert unknown_options("wholebatch plan --batch-sizes 8") == ["--batch-sizes"]


def indented_commands(text):
    """Return the commands of a page that stand outside of fences, where `printed` does not see them."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^ {4}(?:pip|python|make|wholebatch|torchrun)\b.*", outside, flags=re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=lambda page: page.name)
def test_commands_stand_in_fences(page):
    assert indented_commands(page.read_text()) == []


@pytest.mark.planted
def test_an_indented_command_is_found():
    text = "```sh\nmake a\n```\n\n    make strict  # long\n\n```python\n    pip = 3\n```\n"
    assert indented_commands(text) == ["    make strict  # long"]


def test_installations_name_this_checkout():
    of_packages = re.compile(
        r"pip install (?:--no-deps )?(?:'?\.[' \[]|\.$|numpy|mpich|cloudpickle|pylate==|torch==|transformers gt-)"
    )
    installations = [command for command in COMMANDS if "pip install" in command]
    assert not [command for command in installations if not of_packages.search(command)]


def test_an_error_names_an_installation_of_the_pages():
    hints = [each.install for each in vars(_framework).values() if isinstance(each, _framework.Framework)]
    hints.remove(_framework.TEVATRON.install)  # is in no index
    assert len(hints) >= 8
    assert not [hint for hint in hints if not any({*words(hint)} <= {*words(command)} for command in COMMANDS)]


def passed_on(command):
    """Return whether torchrun's own parser gives its program all that follows it."""
    arguments = words(command)[1:]
    options = get_args_parser().parse_args(arguments)
    start = arguments.index(options.training_script)
    return options.training_script_args == arguments[start + 1 :]


@pytest.mark.parametrize("command", TORCHRUN)
def test_torchrun_passes_on_the_options_of_its_program(command):
    assert passed_on(command)


@pytest.mark.planted
def test_torchrun_refuses_what_it_takes_for_its_own(capsys):
    (command,) = (command for command in TORCHRUN if "--logs runs" in command)
    with pytest.raises(SystemExit):
        passed_on(command.replace(" -- ", " "))
    assert "ambiguous option: --logs" in capsys.readouterr().err


def as_printed(page, *options):
    program = [sys.executable, str(ROOT / "tests" / "as_printed.py"), *options, str(page)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_a_page_is_run_as_printed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "First `pip install .`.\n\n```python\n# here.py\nprint(3)\n```\n\n```sh\npython here.py \\\n  x  # runs\n"
        "ls photos/red-bird.png\nsrun python here.py\nfalse  # mostly wrong: exit code 1\n```\n"
    )
    run = as_printed(page, "--installed")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.sub(r"\d+ s\]", "0 s]", run.stdout).splitlines()[:-1] == [
        "page.md:1: pip install .  [not run: is installed]",
        "page.md:4: python here.py  [ok, 0 s]",
        "page.md:9: python here.py    x  # runs  [ok, 0 s]",
        "page.md:11: ls photos/red-bird.png  [ok, 0 s]",
        "page.md:12: srun python here.py  [not run: needs Slurm]",
        "page.md:13: false  # mostly wrong: exit code 1  [ok, 0 s]",
    ]


@pytest.mark.parametrize("first", ["ls photos/red-bird.png", "pip install cloudpickle"])
def test_a_page_without_this_package_starts_after_the_readmes_installation(tmp_path, first):
    page = tmp_path / "page.md"
    page.write_text(f"```sh\n{first}\n```\n")
    assert f"\n{INSTALL}\n" in (ROOT / "README.md").read_text()
    assert as_printed(page, "--installed").stdout.startswith(f"page.md:0: {INSTALL}  [not run: is installed]\n")


@pytest.mark.planted
def test_a_command_that_fails_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nls no-such-file\ntrue  # it finds: exit code 1\n```\n")
    run = as_printed(page, "--installed")
    assert run.returncode == 1
    assert run.stdout.splitlines()[1:-1] == [
        "page.md:2: ls no-such-file  [FAILED (2), 0 s]",
        "page.md:3: true  # it finds: exit code 1  [FAILED (0), 0 s]",
    ]

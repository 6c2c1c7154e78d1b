"""First steps: what is printed can be pasted, examples of the data are shown, and slips get the right command."""

import shlex
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest
from glyph_files import SMALL, write_pairs

from wholebatch.__main__ import main
from wholebatch._base.user_error import needs
from wholebatch_train.data.reading import open_picture
from wholebatch_train.run.resume import command_line

FEW = ["--steps", "2", "--no-audit", "--no-tensorboard", "--workers", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Train in a process of its own; return the run and the lines that it printed."""
    run = tmp_path_factory.mktemp("runs") / "a run"
    command = [sys.executable, "-m", "wholebatch", "train", "--data", data, "--run-folder", run, *SMALL, *FEW]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, check=True)
    return run, done.stdout.splitlines()


def mistake(capsys, *argv):
    capsys.readouterr()
    assert main([str(each) for each in argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_last_line_of_a_run_is_a_command_that_works_as_printed(trained):
    run, lines = trained
    label, _, command = lines[-1].partition(" ")
    assert label == "next:"
    assert shlex.split(command) == [sys.executable, "-m", "wholebatch", "search", str(run), "a few words"]
    found = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240, check=True)
    assert "LATIN" in found.stdout


def test_a_program_that_is_not_on_the_path_is_named_in_full(tmp_path, monkeypatch):
    program = tmp_path / "wholebatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert command_line("doctor") == f"{program} doctor"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line("doctor") == "wholebatch doctor"


def test_three_rows_are_shown_as_they_were_read(trained):
    shown = [line for line in trained[1] if line.startswith("data: for example ")]
    letters = ("LATIN CAPITAL LETTER A", "LATIN CAPITAL LETTER B", "LATIN CAPITAL LETTER C")
    expected = [f"{{'image': 'images/{0x41 + i:x}.png', 'text': '{text}'}}" for i, text in enumerate(letters)]
    assert shown == [f"data: for example {row}" for row in expected]


def test_a_search_of_pictures_prints_their_texts(trained, data, tmp_path, capsys):
    run, _ = trained
    capsys.readouterr()
    assert main(["search", str(run), str(data.parent / "images" / "41.png"), "--side", "image", "-k", "1"]) == 0
    similarity, place, text = capsys.readouterr().out.splitlines()[-2].split(maxsplit=2)
    assert (place, text) == (str(data.parent / "images" / "41.png"), "LATIN CAPITAL LETTER A")
    page = (run / "search.html").read_text()
    assert ">LATIN CAPITAL LETTER A</span>" in page
    assert f">{float(similarity):.3f}</span>" in page
    without = tmp_path / "pictures.csv"
    without.write_text(f"image\n{data.parent / 'images' / '41.png'}\n")
    assert main(["search", str(run), "A", "--in", str(without)]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[1:] == [str(data.parent / "images" / "41.png")]


def test_words_in_another_order_get_the_right_command(trained, data, capsys):
    run, _ = trained
    swapped = mistake(capsys, "search", "red bird", run)
    assert f"RUN comes before QUERY: wholebatch search '{run}' 'red bird'" in swapped
    assert f"the data have an option: wholebatch train --data {data}" in mistake(capsys, "train", data)


def test_the_first_lines_of_the_help_say_where_to_start(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "Start here: --data" in " ".join(capsys.readouterr().out.splitlines()[:8])


def test_missing_packages_are_named_as_an_index_has_them():
    assert needs("--data", "pyarrow", "PIL") == "--data needs pyarrow, PIL: pip install pyarrow pillow"
    source = Path(main.__code__.co_filename).parent
    advice = [path for path in source.rglob("*.py") if "pip install 'wholebatch[" in path.read_text()]
    assert not advice, "the package is on no index"


PROBLEM = """
import torch
import wholebatch as wb
from beside_a_problem import WIDTH

def problem():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, WIDTH)
    batch = torch.randn(8, 3, dtype=torch.float64)
    return wb.Problem(model, batch, lambda model, x: wb.functional.clip_loss(model(x), 2 * model(x), 3.0))
"""


def test_a_problem_is_named_by_its_file_as_elsewhere(tmp_path, capsys):
    file = tmp_path / "problem.py"
    file.write_text(PROBLEM)
    (tmp_path / "beside_a_problem.py").write_text("WIDTH = 4\n")
    before = [*sys.path]
    try:
        assert main(["audit", f"{file}:problem", "--ranks", "2"]) == 0
    finally:
        sys.path[:] = before
    nowhere = tmp_path / "none.py"
    assert f"there is no file '{nowhere}'" in mistake(capsys, "audit", f"{nowhere}:problem")


USER = """
import torch
import wholebatch as wb

loss = wb.CLIPLoss(checks="deferred")
x = torch.eye(8, 4)

def step(factor):
    return loss(factor * x, x, 10.0)  # the user's line
"""


def test_a_warning_points_at_the_line_of_the_user(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(USER)
    names = {"__name__": "__main__"}
    exec(compile(USER, str(file), "exec"), names)
    names["step"](1.0)
    names["step"](1000.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["step"](1.0)
    (warning,) = caught
    assert "checks='deferred'" in str(warning.message)
    assert warning.filename == str(file)
    assert "# the user's line" in USER.splitlines()[warning.lineno - 1]


def png(width, height):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(width)) * min(height, 2**20 // width))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_picture_with_a_side_of_millions_of_pixels_is_not_decoded():
    for size in ((1, 80_000_000), (65_536, 1)):
        with pytest.raises(ValueError, match=r"^[\d,]+ x [\d,]+ pixels; expected sides of at most 65,535$"):
            open_picture(png(*size))
    assert open_picture(png(65_535, 1)).size == (65_535, 1)


def test_a_link_to_itself_in_a_folder_is_named_with_the_way_out(tmp_path, data, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for code in range(0x41, 0x5B):
        (folder / f"letter {code:x}.png").write_bytes((data.parent / "images" / f"{code:x}.png").read_bytes())
    (folder / "z.png").symlink_to("z.png")
    line = mistake(capsys, "train", "--data", folder, "--run-folder", tmp_path / "run", *FEW)
    assert f"{folder / 'z.png'}: Too many levels of symbolic links; --skip-bad leaves such rows out" in line
    assert not (tmp_path / "run").exists()
    assert main(["train", "--data", str(folder), "--run-folder", str(tmp_path / "run"), *FEW, "--skip-bad"]) == 0

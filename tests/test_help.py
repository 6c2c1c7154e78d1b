"""Help and mistakes in options need no torch, so every command answers quickly; a mistake never ends in a traceback."""

import json
import re
import subprocess
import sys

import pytest

from wholebatch._cli.declared_names import LABELED_LOSSES, SWEPT_LOSSES

TWO_TOWERS = [name for name in SWEPT_LOSSES if name not in LABELED_LOSSES]
PROGRAM = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
known = set(sys.modules)
from wholebatch.__main__ import main
{extra}
for folder, argv in json.load(sys.stdin):
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code
    imported = [name for name in ("torch", "numpy", "matplotlib") if name in {{*sys.modules}} - known]
    known |= {{*sys.modules}}
    print(json.dumps([code, output.getvalue(), errors.getvalue().strip("\\n"), imported]))
"""


def run_all(calls, extra=""):
    """Call commands in one process, each in a folder; each one's exit code, output, errors, and first imports."""
    program = [sys.executable, "-W", "error", "-c", PROGRAM.format(extra=extra)]
    done = subprocess.run(program, input=json.dumps(calls), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(*argv, extra=""):
    return run_all([(".", argv)], extra)[0]


HELP = [
    (["--help"], "wholebatch COMMAND"),
    (["audit", "--help"], "--preset"),
    (["bench", "--help"], "gather"),
    (["bench", "gather", "--help"], "--embedding-sizes"),
    (["bench", "loss", "--help"], f"{{{','.join(TWO_TOWERS)},max_sim}}"),
    (["doctor", "--help"], "--embedding-size"),
    (["embed", "--help"], "--column"),
    (["evaluate", "--help"], "--columns"),
    (["export", "--help"], "{sentence-transformers,open_clip}"),
    (["plan", "--help"], f"{{{','.join(SWEPT_LOSSES)},partial_fc,"),
    (["search", "--help"], "--queries"),
    (["train", "--help"], "--batch-size"),
]


PLAN = "plan --batch-size 64 --embedding-size 8"
LOSS, GATHER = "bench loss", "bench gather"
MISTAKES = [
    ("", "usage: wholebatch COMMAND [OPTIONS]"),
    (
        "trian",
        "there is no command 'trian'; choose one of: audit, bench, doctor, embed, evaluate, export, plan, search, "
        "train; did you mean train?",
    ),
    (f"search {'red-bird' * 40} red", "cannot be reached: File name too long"),
    (f"train --run-folder {'run' * 100}", "cannot be reached: File name too long"),
    ("audit", "name a problem, as FILE.py:FUNCTION, or presets"),
    ("audit my_file", "name the problem as FILE.py:FUNCTION or as MODULE:FUNCTION, as in my_project"),
    ("audit my_file:problem --rank 2", "Perhaps you meant"),
    ("audit my_file:problem --ranks 0", "--ranks must be numbers of ranks from 1 to 64, as in 1 2 3; got (0,)"),
    ("audit my_file:problem --tolerance nan", "--tolerance must be a relative error between 0 and 1"),
    ("audit my_file:problem --timeout-s -1", "--timeout-s must be a positive number of seconds, below 1e+09; got -1.0"),
    ("audit my_file:problem --seed 99999999999", "--seed must be an integer from 0 to 4294965295; got 99999999999"),
    ("audit --preset recipes --json --markdown", "two formats of the output: give one of the two"),
    ("audit --preset nowhere", "there is no preset 'nowhere'; choose one of: recipes, open_clip"),
    ("audit --preset all recipes", "--preset all stands alone, got all recipes"),
    (["audit", "--preset", "recipes", "--setting", ""], "--setting must be a part of a setting's name, got ''"),
    ("bench", "usage: wholebatch bench {gather,loss} [OPTIONS]"),
    ("bench los", "there is no benchmark 'los'; choose one of: gather, loss; did you mean loss?"),
    (f"{GATHER} --embedding-size 8", "--embedding-sizes"),
    (f"{GATHER} --ranks", "--ranks must be at least 1, got nothing"),
    (f"{GATHER} --rows-per-rank 99999999999999", "--rows-per-rank must be at most 2147483648, got 99999999999999"),
    (f"{GATHER} --results folder.json", "folder.json does not hold the results of this benchmark"),
    (f"{LOSS} --losses clpi", "or declared losses such as my_losses.py:lifted; got 'clpi'; did you mean clip?"),
    (
        f"{LOSS} --beside clpi",
        f"--beside must be one of {', '.join(TWO_TOWERS)}; got 'clpi'; did you mean clip?",
    ),
    (f"{LOSS} --batch-size 64k", "write a whole number with digits alone, as in 65536; got"),
    (f"{LOSS} --losses", "--losses needs at least one value"),
    (f"{LOSS} --batch-size 3 --ranks 4", "--batch-size must be at least the number of ranks, 4; got 3"),
    (f"{LOSS} --keep nan", "--keep is in bytes for each entry of S, from 0 to 16; got nan"),
    (f"{LOSS} --threads 1000000", "--threads must be at most 1024, got 1000000"),
    (f"{LOSS} --exchange ring", "--exchanges"),
    (f"{LOSS} --exchanges rong", "'auto', 'gather', 'ring'"),
    (f"{LOSS} --kernels triton", "--kernels triton needs --device cuda"),
    (f"{LOSS} --results bad.json", "bad.json does not hold the results of this benchmark; name another file"),
    ("doctor --rows 1", "--rows must be at least 2, got 1"),
    ("doctor --device tpu", "there is no option --device; see wholebatch doctor --help"),
    ("doctor --josn", "there is no option --josn; see wholebatch doctor --help; did you mean --json?"),
    ("plan", "--batch-size and --embedding-size must be given"),
    (f"{PLAN} --bath-size 3", "Perhaps you meant"),
    (f"{PLAN} --ranks", "Missing value for argument '--ranks'"),
    (f"{PLAN} --ranks 1e3", "Error parsing --ranks"),
    (f"{PLAN} --ranks 0", "--ranks must be an integer of at least 1; got 0"),
    (f"{PLAN} --ranks 128", "--batch-size is that of all ranks together: at least one example for each of 128 ranks"),
    (
        f"{PLAN} --loss clpi",
        f"{', '.join(SWEPT_LOSSES)}, partial_fc, max_sim, or a declared loss; got 'clpi'; did you mean clip?",
    ),
    (f"{PLAN} --dtype bfloat", "got 'bfloat'; did you mean bfloat16?"),
    (f"{PLAN} --chunk-size 64k", "write a whole number with digits alone, as in 65536; got"),
    (f"{PLAN} --dtype int8", "--dtype must be one of float64, float32"),
    (f"{PLAN} --device tpu", "--device must be one of cpu, cuda, t4"),
    (f"{PLAN} --encoder-flops nan", "--encoder-flops must be at least 0, and finite; got nan"),
    (f"{PLAN} --encoder-bytes", "--encoder-bytes must be one number, or one for each of the 2 encoders of clip; got 0"),
    (f"{PLAN} --memory-limit -5GB", "--memory-limit must be a number of bytes, such as 80GB, 64MiB or 1e9; got '-5GB'"),
    (f"{PLAN} --bandwidth 0", "--bandwidth must be above 0, such as 80GB; got '0'"),
    (f"{PLAN} --loss partial_fc", "partial_fc needs --classes, as in --classes=1000000"),
    (f"{PLAN} --chunk-size 4", "--chunk-size needs --encoder-bytes"),
    (f"{PLAN} --rates nowhere.json", "--rates: there is no file nowhere.json"),
    (f"{PLAN} --rates folder.json", "folder.json does not hold rates"),
    (f"{PLAN} --measure --save folder.json", "--save must be a file, folder.json is a folder"),
    ("embed", "Missing from wholebatch embed"),
    ("embed nowhere pairs.csv", "RUN: there is no folder 'nowhere'; expected the folder of a run, such as runs/NAME"),
    ("embed folder.csv pairs.csv", "RUN: 'folder.csv' is no run folder, it has no config.json"),
    ("embed runs pairs.csv", "RUN: there is no folder 'runs'; did you mean 'run'?"),
    ("evaluate run --data=folder.csv", "Missing value for argument 'data'"),
    ("search run text --data d", "Unrecognized options: --data"),
    ("search run text --side=image -k 0", "-k must be from 1 to 10000, got 0"),
    ("train --data flder.csv", "folder.csv'?"),
    ("embed run flder.cvs", "DATA: there is no file or folder 'flder.cvs'; did you mean 'folder.csv'?"),
    ("embed run none.csv", "DATA: there is no file or folder 'none.csv'"),
    ("embed run folder.csv --out features.txt", "--out must be a .parquet or .npy file, got 'features.txt'"),
    ("embed run folder.csv --out none/f.npy", "--out: there is no folder"),
    ("embed run folder.csv --batch-size 0", "--batch-size must be from 1 to 1048576, got 0"),
    (
        ["search", "run", ""],
        "give a QUERY, a text or the path of a picture, or a table of them with --queries; got none",
    ),
    (["search", "run", "  "], "got an empty QUERY"),
    ("search run text --queries folder.csv", "got both"),
    ("search run none.png", "QUERY: there is no picture 'none.png'"),
    ("search run text --in none.csv", "--in: there is no file or folder 'none.csv'"),
    ("search run text -k 0", "-k must be from 1 to 10000, got 0"),
    ("search run text --sheet s.jpg", "--sheet must be a .html file, got 's.jpg'"),
    ("evaluate run folder.csv --out e.txt", "--out must be a .json file, got 'e.txt'"),
    ("export run folder.csv --to onnx", "sentence-transformers"),
    ("export run run --to open_clip", "FOLDER must be empty or new, 'run' is not empty; choose another name"),
    ("train --stpes 3", "Perhaps you meant"),
    ("train --steps x", "Error parsing --steps"),
    ("train --steps 0", "--steps must be at least 1, got 0"),
    ("train --ranks 4 --batch-size 3", "--batch-size must be at least the number of ranks, 4; got 3"),
    ("train --augment inf", "--augment must be in [0, 1e30], got inf"),
    ("train --weight-decay inf", "--weight-decay must be in [0, 1e30], got inf"),
    ("train --data none.csv", "there is no file"),
    ("train --data pairs.txt", "it must be 'glyphs', a folder or a .csv, .tsv, .jsonl, .parquet, .tar file"),
    ("train --data s-{0..3}.tar", "names 4 shards, 4 of which do not exist"),
    ("train --resume nowhere", "that is no run folder"),
    ("train --until-step 3", "--until-step must be given with --resume, to extend a run, got 3"),
    ("train --patience -1", "--patience must be at least 0, got -1"),
    ("train --config none.toml", "--config: there is no file"),
    ("train --config bad.json", "bad.json is no file of options"),
    ("train --run-folder /", "is not empty and no run"),
    ("train --run-folder bad.json", "--run-folder must be a folder, 'bad.json' is a file; choose another name"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return {command: what `run` returns}, of all commands below in one process, each in a folder of its own."""
    folders = {}
    for argv, _ in HELP + MISTAKES:
        folders[str(argv)] = folder = tmp_path_factory.mktemp("help")
        (folder / "bad.json").write_text('{"a":')
        for name in ("folder.json", "folder.csv", "run"):
            (folder / name).mkdir()
        (folder / "run" / "config.json").write_text("{}")
    calls = [argv.split() if isinstance(argv, str) else argv for argv, _ in HELP + MISTAKES]
    return dict(zip(folders, run_all([*zip(map(str, folders.values()), calls, strict=True)]), strict=True))


@pytest.mark.parametrize(("argv", "text"), HELP)
def test_help_imports_no_torch(argv, text, outcomes):
    code, output, errors, imported = outcomes[str(argv)]
    assert (code, errors, imported) == (0, "", [])
    assert text in output


@pytest.mark.planted
def test_the_check_above_can_fail():
    assert run("--help", extra="import numpy")[3] == ["numpy"]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[str(argv) for argv, _ in MISTAKES])
def test_mistakes_import_no_torch(argv, message, outcomes):
    code, output, errors, imported = outcomes[str(argv)]
    assert (code, output, imported) == (2, "", [])
    assert message in " ".join(re.sub("[─│╭╮╰╯]", " ", errors).split())
    assert "Traceback" not in errors


def test_a_launcher_with_missing_variables_is_reported(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for argv in (["bench", "gather"], ["bench", "loss"], ["audit", "my_file:problem"], ["train"]):
        code, output, errors, imported = run(*argv)
        assert (code, output, imported) == (2, "", [])
        assert "launcher" in errors or "torchrun" in errors


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"]], ids=["all", "plan"])
def test_a_reader_of_the_output_may_leave(argv):
    program = [sys.executable, "-m", "wholebatch", *argv]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_missing_packages_are_named_with_the_command_that_installs_them():
    code, _, errors, _ = run("bench", "--help", extra="sys.modules['matplotlib'] = None; sys.modules['rich'] = None")
    assert code == 2
    assert errors == "wholebatch bench: error: this command needs rich, matplotlib: pip install rich matplotlib"
    code, _, errors, _ = run("train", "--help", extra="sys.modules['tyro'] = None")
    assert (code, errors) == (2, "wholebatch train: error: this command needs tyro: pip install tyro")


def test_a_command_of_the_application_says_what_to_install_without_it():
    code, _, errors, _ = run("train", "--help", extra="import importlib.metadata as m; m.entry_points = lambda **_: ()")
    assert code == 2
    assert errors == (
        "wholebatch train: error: this command belongs to wholebatch-train: pip install ./packages/wholebatch-train, "
        "in a checkout"
    )

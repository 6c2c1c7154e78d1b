"""Outcomes of the command line on hostile pictures, tables, shards, run folders, features and options.

    python tests/faults/readers.py --seed 0 --count 300 [--reader png] [--only 17] [--json OUT]

Each case makes one file hostile: flipped bits, cut off, huge numbers, nested brackets, another format under the name, a
link, a loop of links, a pipe, a folder, bytes of code 0, a long line, bytes that are no UTF-8, letters that a terminal
obeys, a pickle. In the files of a run that have digests, half of the cases have digests that fit. Then a command reads
it: tables are searched and trained on, and runs are searched, evaluated, exported and resumed. It must read the file,
or end with exit code 2 and one line; within a limit of time and of memory, with nothing executed and no process
started, nothing written that a failed command should not write, and nothing printed that a terminal obeys. One process
judges all cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import common
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from files import FACES, Bomb
from glyph_files import SMALL, write_pairs
from PIL import Image

from wholebatch.__main__ import main as command
from wholebatch._base.bounded_json import sealed, unsealed
from wholebatch._base.tensor_file import TensorFile, write_tensors
from wholebatch._base.user_error import UserError
from wholebatch_train.encoders.make import digest_of
from wholebatch_train.run.checkpoint import digests_of_run

CLASSES = {
    "read": "the command succeeds",
    "refused": "exit code 2, and one line",
    "several lines": "exit code 2, and more or fewer lines",
    "traceback": "an exception that is no mistake of the user's",
    "waits": "not done within the limit of time",
    "executed": "code in a file was executed",
    "started": "a process was started, or a pickle was read",
    "writes": "a command that was refused has left a file or a run folder, or changed the run that it should resume",
    "obeyed": "output has characters that a terminal obeys",
    "another code": "an exit code that is neither 0 nor 2",
}
ALLOWED = ("read", "refused")
LIMIT_S = 60
MEMORY = 24 * 2**30
PICTURES = ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm", "ico", "tga", "jp2", "avif")
TABLES = ("csv", "tsv", "jsonl", "parquet")
OF_RUN = ("config.json", "encoders/encoders.json", "encoders/text/encoder.json", "model.safetensors")
STATE = ("config.json", "metrics.jsonl", "checkpoint.safetensors")
FEATURES = ("kept", "features.parquet")
OPTIONS = ("toml", "json")
READERS = (*PICTURES, *TABLES, "folder", "tar", "run", "state", "best", *FEATURES, *OPTIONS)
_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.system")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FEW = ["--no-audit", "--no-tensorboard", "--workers", "0"]
_FEWER = ["--validation-texts", "4", "--test-texts", "4", "--batch-size", "4"]
_SIDES = ("image", "text")
_CLASSES = ["--task", "identify", "--head.margin", "adaface", "--head.sample-rate", "0.4"]


# Whole files.
def build(base: Path) -> None:
    """Train a run of each task, search in one, and write a whole file for each reader."""
    table = write_pairs(base / "data")
    for run, data, task in (("run", table, []), ("classes", write_pairs(base / "faces", faces=FACES), _CLASSES)):
        made = ["--data", str(data), "--run-folder", str(base / run), "--steps", "2", "--keep-best"]
        quietly(["train", *made, "--checkpoint-every", "1", *SMALL, *_FEW, *task])
        quietly(["train", "--resume", str(base / run), "--until-step", "3", "--workers", "0"])
    quietly(["search", str(base / "run"), "A", "-k", "1"])
    rows = [f"images/{0x41 + i:x}.png" for i in range(16)]
    images = [str(base / "data" / row) for row in rows]
    texts = [f'a letter, "{name}"' for name in rows]
    picture = Image.open(base / "data" / rows[0]).convert("RGB").resize((20, 12))
    for ending in PICTURES:
        picture.save(base / f"whole.{ending}")
    lines = [
        {"image": i, "text": t, "group": n, "many": [t]} for n, (i, t) in enumerate(zip(images, texts, strict=True))
    ]
    (base / "whole.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for ending, comma in (("csv", ","), ("tsv", "\t")):
        cells = ["image", "text", "n"], *([image, f"letter {n}", str(n)] for n, image in enumerate(images))
        (base / f"whole.{ending}").write_text("".join(comma.join(row) + "\n" for row in cells))
    pq.write_table(pa.table({"image": images, "text": texts, "n": range(16)}), base / "whole.parquet")
    with tarfile.open(base / "whole.tar", "w") as file:
        for i, name in enumerate(rows):
            file.add(base / "data" / name, f"{i}.png")
            text = f"letter {i}".encode()
            member = tarfile.TarInfo(f"{i}.txt")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text))
    quietly(["embed", str(base / "run"), str(table), "--side", "text", "--out", str(base / "whole.features.parquet")])
    (base / "whole.toml").write_text('steps = 3\nloss = "siglip"\nlearning-rate = 1e-3\n[model]\ntext_width = 64\n')
    shutil.copyfile(base / "run" / "config.json", base / "whole.json")


def quietly(argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert command(argv) == 0, argv


# Damages of bytes.
def numbers(content: bytes, dice: random.Random) -> bytes:
    """Replace some numbers by others that are huge, negative or none."""
    wrong = (b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"2147483648", b"-9223372036854775809", b"1e308")
    found = [*re.finditer(rb"-?\d+(?:\.\d+)?", content)]
    for each in sorted(dice.sample(found, min(len(found), dice.randint(1, 3))), key=lambda m: -m.start()):
        content = content[: each.start()] + dice.choice(wrong) + content[each.end() :]
    return content


def flips(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.randint(1, 8)):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def binary_numbers(content: bytes, dice: random.Random) -> bytes:
    """Write extreme integers of two, four or eight bytes somewhere."""
    form = dice.choice(("<H", ">H", "<I", ">I", "<Q", ">Q", "<i", ">i"))
    largest = 2 ** (8 * struct.calcsize(form)) - 1
    if form[1] == "i":
        largest >>= 1
    value = struct.pack(form, dice.choice((largest, largest // 2, largest // 256, 0, 1)))
    at = dice.randrange(min(len(content), 200) or 1)
    return content[:at] + value + content[at + len(value) :]


def nested(content: bytes, dice: random.Random) -> bytes:
    deep = dice.choice((b"[" * 10**5, b'{"a":' * 10**5, b"a" + b".a" * 10**5 + b" = 1", b"((" * 10**5))
    at = dice.choice((0, len(content), content.find(b":") + 1, content.find(b"=") + 1))
    return content[:at] + deep + content[at:]


def inserted(content: bytes, dice: random.Random) -> bytes:
    """Insert what a reader of texts may not expect."""
    piece = dice.choice(
        (b"\0", b"\0" * 4096, b"a" * 10**6, b"\xff\xfe\xc3\x28", "\x1b]0;owned\x07\x1b[2J\u202ecba\u2066".encode(),
         b"\\ud800", b'"', b"\r", b"\n" * 10**5, b"," * 10**5, b"\t" * 10**4, b"\xef\xbb\xbf", b"=cmd|' /C calc'!A0",
         b"../../../etc/passwd", b"\xed\xa0\x80", "\u2028".encode())
    )  # fmt: skip
    at = dice.randrange(len(content) + 1)
    return content[:at] + piece + content[at:]


def foreign(content: bytes, dice: random.Random) -> bytes:
    """Return a file of another format."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb(MARKER)))
    return dice.choice(
        (b"", b"\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg onload='x'/>", b"\x1f\x8b\x08\0",
         b"PAR1PAR1", b"null", b"[]", b"{}", b"MZ" + bytes(64), archive.getvalue(), pickle.dumps(Bomb(MARKER)),
         png(1, 80_000_000),
         png(40_000, 40_000), b"\x93NUMPY\x01\0\x10\0{'descr': 'O'}  \n", content * 2, bytes(5000), dice.randbytes(999))
    )  # fmt: skip


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


MARKER = Path(tempfile.gettempdir()) / f"wholebatch-readers-executed-{os.getpid()}"
BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flips, flips, numbers, numbers, binary_numbers, nested, inserted, inserted, foreign,
    lambda content, dice: content[: dice.randrange(len(content) or 1)],
)  # fmt: skip


# Damages of places.
def in_place(path: Path, dice: random.Random) -> str:
    """Put something that is no regular file into the place of a file."""
    kind = dice.choice(("a loop of links", "a link", "a link to nothing", "a pipe", "a folder", "a device"))
    shutil.move(path, path.with_name(f"{path.name}.moved"))
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(
            {"a loop of links": path.name, "a link": f"{path.name}.moved", "a link to nothing": "nothing"}.get(
                kind, "/dev/zero"
            )
        )
    return kind


def damage(path: Path, dice: random.Random) -> str:
    """Make a file hostile, and return the way."""
    if dice.random() < 0.12:
        return in_place(path, dice)
    content, ways = path.read_bytes(), [dice.choice(BYTES) for _ in range(dice.choice((1, 1, 2)))]
    for way in ways:
        content = way(content, dice)
    path.write_bytes(content)
    return " and ".join("cut off" if way.__name__ == "<lambda>" else way.__name__ for way in ways)


VALUES = (
    None, True, -1, 0, 2**31, 10**18, 0.5, 1e308, "", "x", "../../x", "a\0b", [], {}, [[]], {"a": 1}, [None], "\x1b[2J",
    "glyphs", "small", "timm:hf-hub:a/b", "transformers:/", "../x.py:f", "cuda", "\ud800", "9" * 400,
)  # fmt: skip


def edit(value: Any, dice: random.Random) -> str:
    """Replace a value inside of parsed JSON, or remove or add a key; return the way."""
    into = value
    while True:
        keys = [*range(len(into))] if isinstance(into, list) else sorted(into)
        if not keys:
            return "nothing"
        key = dice.choice(keys)
        if not isinstance(into[key], (dict, list)) or not into[key] or dice.random() < 0.2:
            break
        into = into[key]
    how = dice.random()
    if how < 0.85:
        into[key] = dice.choice(VALUES)
        return f"{key} -> {into[key]!r:.30}"
    if how < 0.95 or isinstance(into, list):
        del into[key]
        return f"without {key}"
    into["another"] = 1
    return "another key"


def edit_class_names(path: Path, dice: random.Random) -> str:
    """Change what the library datasets has left in a parquet file about its classes; return the way."""
    about = {"info": {"features": {name: {"_type": "ClassLabel", "names": ["a", "b"]} for name in ("text", "n")}}}
    said = edit(about, dice)
    metadata = {"huggingface": json.dumps(about) if dice.random() < 0.9 else "[" * 10**5}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    return said


def reseal(run: Path, name: str, dice: random.Random) -> str:
    """Change a value in a file of a run, and write digests that fit in all its files of weights."""
    path = run / name
    if path.suffix == ".safetensors":
        with TensorFile(path) as file:
            tensors, metadata = {each: file.read(each) for each in file.entries}, file.metadata
        how = dice.random()
        if how < 0.4:
            key = dice.choice(sorted(metadata))
            if metadata[key].startswith(("{", "[")):
                parsed = json.loads(metadata[key])
                said = edit(parsed, dice)
                metadata = {**metadata, key: json.dumps(parsed)}
            else:
                metadata, said = {**metadata, key: str(dice.choice(VALUES)).encode(errors="replace").decode()}, key
        else:
            key = dice.choice(sorted(tensors))
            x = tensors[key]
            tensors[key] = dice.choice(
                (x[:0] if x.dim() else x[None], x.double(), x.flatten(), torch.full_like(x, -1) if x.numel() else x,
                 x.float() * float("nan"), x.to(torch.int64), torch.zeros(0))
            )  # fmt: skip
            said = f"tensor {key}"
        write_tensors(path, tensors, metadata)
        return said
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        said = edit(lines[dice.randrange(len(lines))], dice)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        content = path.read_bytes()
        value = unsealed(content, name) if b'"sha256"' in content else json.loads(content)
        said = edit(value, dice)
        path.write_bytes(sealed(value) if b'"sha256"' in content else json.dumps(value).encode())
    try:
        digests = digests_of_run(run)
    except UserError:  # the edit has left no facts of a run, and nothing fits then
        return said
    for weights in ("model.safetensors", "best.safetensors"):
        with TensorFile(run / weights) as file:
            tensors, metadata = {each: file.read(each) for each in file.entries}, file.metadata
        facts = {key: str(digest) for key, digest in digests.items()}
        more = {"encoders": digest_of(run / "encoders")} if weights.startswith("model") else {}
        write_tensors(run / weights, tensors, metadata | facts | more)
    with TensorFile(run / "checkpoint.safetensors") as file:
        tensors, metadata = {each: file.read(each) for each in file.entries}, file.metadata
    facts = json.loads(metadata["facts"]) | digests
    if name == "metrics.jsonl":
        lines = path.read_bytes().splitlines(keepends=True)[: facts["step"]]
        facts["metrics"] = hashlib.sha256(b"".join(lines)).hexdigest()
    write_tensors(run / "checkpoint.safetensors", tensors, metadata | {"facts": json.dumps(facts)})
    return said


# Cases.
def case(reader: str, base: Path, folder: Path, dice: random.Random) -> tuple[list[str], str]:
    """Write a hostile file into a folder; return the command that reads it, and the damage in words."""
    run, out = str(base / "run"), str(folder / "out.npy")
    if reader in PICTURES:
        name = f"letter.{reader}"
        (folder / "data").mkdir()
        shutil.copyfile(base / f"whole.{reader}", folder / "data" / name)
        said = damage(folder / "data" / name, dice)
        more = ["--skip-bad"] * dice.randint(0, 1)
        return ["embed", run, str(folder / "data"), "--side", "image", "--out", out, "--workers", "0", *more], said
    if reader == "folder":
        data = folder / "data"
        shutil.copytree(base / "data" / "images", data)
        names = ["x\x1b[2J", "\udcff", "a" * 250, "\u202egnp", "", ".", "a\nb"]
        names = [*(f"{name}.png" for name in names), "41.txt"]
        name = dice.choice(names)
        with open(os.path.join(data, name), "wb") as file:
            file.write(dice.choice((b"", b"\x1b[2J", b"\xff\xfe", bytes(99), b"a" * (2**20 + 1))))
        picture = dice.choice(sorted(data.glob("4?.png")))
        said = f"{name!a:.30}, {damage(picture, dice)}"
        more = [*["--skip-bad"] * dice.randint(0, 1), "--side", dice.choice(_SIDES)]
        return ["embed", run, str(data), "--out", out, "--workers", "0", *more], said
    if reader in (*TABLES, "tar"):
        path = folder / f"hostile.{reader}"
        shutil.copyfile(base / f"whole.{reader}", path)
        of_names = reader == "parquet" and dice.random() < 0.3
        said = edit_class_names(path, dice) if of_names else damage(path, dice)
        more = ["--skip-bad"] * dice.randint(0, 1)
        if dice.random() < 0.15:  # seconds each
            new = ["--data", str(path), "--run-folder", str(folder / "run"), "--steps", "1", *more]
            return ["train", *new, *SMALL, *_FEW, *_FEWER], f"{said}, trained on"
        return ["embed", run, str(path), "--side", dice.choice(_SIDES), "--out", out, "--workers", "0", *more], said
    if reader in ("run", "state", "best"):
        task, copy = dice.choice(("run", "classes")), folder / "run"
        shutil.copytree(base / task, copy)
        heads = [str(path.relative_to(copy)) for path in sorted(copy.glob("head-*/*"))]
        names = {"run": OF_RUN, "state": (*STATE, *heads), "best": ("best.safetensors",)}[reader]
        name = dice.choice([name for name in names if (copy / name).exists()])
        fits = name not in heads and dice.random() < 0.5
        said = f"{task}/{name}: {reseal(copy, name, dice) if fits else damage(copy / name, dice)}"
        if reader == "state":
            return ["train", "--resume", str(copy), "--until-step", "4", "--no-tensorboard", "--workers", "0"], said
        shutil.rmtree(copy / "features", ignore_errors=True)
        weights = ["--weights", "best" if reader == "best" else dice.choice(("auto", "checkpoint"))]
        few = ["--workers", "0", *weights]
        commands = [
            ["search", str(copy), "A", "-k", "2", *few, "--sheet", str(folder / "s.html")],
            ["embed", str(copy), str(base / "data" / "images"), "--side", "image", "--out", out, *few],
            ["evaluate", str(copy), str(base / ("data" if task == "run" else "faces") / "pairs.csv"), *few],
        ]
        if task == "classes":
            del commands[0]  # it has no side of texts
        elif dice.random() < 0.1:
            commands = [["export", str(copy), str(folder / "exported"), "--to", "sentence-transformers", *weights]]
        return dice.choice(commands), said
    if reader == "kept":
        copy = folder / "run"
        shutil.copytree(base / "run", copy)
        (path,) = (copy / "features").iterdir()
        return ["search", str(copy), "A", "-k", "2", "--sheet", str(folder / "s.html")], damage(path, dice)
    path = folder / f"hostile.{reader.rpartition('.')[2]}"
    shutil.copyfile(base / f"whole.{reader}", path)
    if reader in OPTIONS:
        said = damage(path, dice)
        return ["train", "--config", str(path), "--data", str(folder / "nothing.csv")], said
    said = damage(path, dice)
    return ["search", run, "A", "-k", "2", "--in", str(path)], said


class Late(BaseException):
    """The limit of time is reached."""


def _late(*_: object) -> None:
    raise Late


_started: list[str] = []


def _record_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" or event in _STARTS:
        _started.append(f"{event} {arguments[:2]!a:.300}")


sys.addaudithook(_record_start)


def content_of(run: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return type, size and content of all files of a run but its lock."""
    found = {}
    for path in run.rglob("*"):
        facts = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        found[str(path.relative_to(run))] = stat.S_IFMT(facts.st_mode), facts.st_size, content
    return {name: facts for name, facts in found.items() if name != "lock"}


def outcome_of(argv: list[str], folder: Path, limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Run a command in this process, and return its outcome and what it said."""
    out, errors = io.StringIO(), io.StringIO()
    resumed = "--resume" in argv
    content = content_of(folder / "run") if resumed else {}
    _started.clear()
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = command(argv)
    except Late:
        return "waits", traceback.format_exc(limit=-4)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        return "traceback", traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    said = errors.getvalue()
    if MARKER.exists():
        MARKER.unlink()
        return "executed", said
    if _started:
        return "started", "; ".join(_started)
    lines = said.splitlines()
    if found := _OBEYED.search(re.sub(r"[\r\n\t]", "", out.getvalue() + said)):
        return "obeyed", f"{found[0]!a} in {(out.getvalue() + said)[:2000]!a}"
    if code == 0:
        return "read", ""
    if code != 2:
        return "another code", f"{code}: {said[-2000:]}"
    if len(lines) != 1 or not lines[0].startswith(f"wholebatch {argv[0]}: error: "):
        return "several lines", said[-3000:]
    left = [path for path in (folder / "out.npy", folder / "s.html") if path.exists()]
    if argv[0] == "train" and not resumed and (folder / "run").exists():
        left.append(folder / "run")
    if resumed and (after := content_of(folder / "run")) != content:
        left += [
            folder / "run" / name for name in after.keys() | content.keys() if after.get(name) != content.get(name)
        ]
    return ("writes", f"{left}: {said}") if left else ("refused", said.strip())


def run_cases(
    base: Path, seed: int, chosen: list[tuple[str, int]], limit_s: float = LIMIT_S
) -> Iterator[common.Outcome]:
    """Yield the outcome of each case: a reader and a number."""
    for reader, number in chosen:
        dice = random.Random(f"{seed} {reader} {number}")
        with tempfile.TemporaryDirectory(prefix="wholebatch-readers-") as name:
            folder = Path(name)
            argv, said = case(reader, base, folder, dice)
            faulthandler.dump_traceback_later(5 * LIMIT_S, exit=True)  # where a signal does not end the wait
            outcome, detail = outcome_of(argv, folder, limit_s)
            faulthandler.cancel_dump_traceback_later()
        repeat = f"python tests/faults/readers.py --seed {seed} --reader {reader} --only {number}"
        yield common.Outcome(outcome, f"{reader}: {said}", detail, repeat, outcome in ALLOWED)


def main(argv: list[str] | None = None) -> int:
    parser = common.options(__doc__, count=300)
    parser.add_argument("--reader", choices=READERS, nargs="+", default=READERS, help="kinds of files")
    parser.add_argument("--only", type=int, help="the number of a single case")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    counts = range(arguments.count) if arguments.only is None else [arguments.only]
    with tempfile.TemporaryDirectory(prefix="wholebatch-readers-") as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        build(Path(name))
        outcomes = []
        for reader in arguments.reader:
            start = time.monotonic()
            found = [*run_cases(Path(name), arguments.seed, [(reader, number) for number in counts])]
            tally = {kind: sum(one.outcome == kind for one in found) for kind in CLASSES}
            words = ", ".join(f"{count} {kind}" for kind, count in tally.items() if count)
            print(f"{reader}: {words}; {time.monotonic() - start:.0f} s", flush=True)
            outcomes += found
    return common.finish("readers", CLASSES, outcomes, arguments, began)


if __name__ == "__main__":
    sys.exit(main())

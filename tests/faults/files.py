"""Outcomes of reading checkpoints from damaged, foreign or hostile files.

    python tests/faults/files.py --seed 0 --count 300 [--json OUT]

Each case copies a whole folder (a run of `wholebatch train` with either task, a head that three ranks have saved,
insightface's files), changes one thing in it, and reads it. Every case must be refused with a ValueError of one line,
and weights, optimizer, generator and folder must stay as they were. Two kinds of case may also be accepted with exactly
the numbers of the whole folder: one flipped bit that no number depends on (a time in a zip archive), and a folder whose
bytes are unchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from glyph_files import write_pairs

import wholebatch as wb
from wholebatch._base.bounded_json import sealed, unsealed
from wholebatch._base.tensor_file import TensorFile, write_tensors
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.config_file import to_json
from wholebatch_train.data.load import load_data
from wholebatch_train.run.checkpoint import last_step
from wholebatch_train.run.record import DataFacts, read_config
from wholebatch_train.run.run_folder import RunFolder
from wholebatch_train.tasks.make import make_task

REFUSED = "refused, all as before"
SAME = "accepted, identical"
FORBIDDEN = (
    "refused, but something is changed",
    "accepted, different",
    "executed",
    "another exception",
)
CHANGED, DIFFERENT, EXECUTED, OTHER = FORBIDDEN
KINDS = ("head", "retrieve", "identify", "insightface")
PAGE = 4096
FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono")


@dataclass
class Case:
    """One folder to read, and the outcome."""

    number: int
    kind: str
    damage: str
    file: str
    folder: Path
    outcome: str = ""
    message: str = ""


# Whole folders.
def build(base: Path) -> None:
    """Write a folder of each kind, one of another run with the same shapes, and one of an earlier save."""
    run_ranks(save_heads, 3, base, timeout_s=120)
    data = {"retrieve": write_pairs(base / "one"), "identify": write_pairs(base / "four", faces=FACES)}
    for task, pairs in data.items():
        for name, seed in (("whole", 0), ("foreign", 1)):
            save_run(base, pairs, task, name, seed)
    for name in ("whole", "foreign"):
        save_insightface(base / "insightface" / name, seed=len(name))


def make_head(seed: int = 0) -> tuple[wb.PartialFC, wb.SparseSGD]:
    """Return a head and an optimizer after a step, with every kind of state that a checkpoint has."""
    head = wb.PartialFC(48, 67, margin=wb.AdaFace(), sample_rate=0.5, seed=seed)
    optimizer = wb.SparseSGD(head.parameters(), lr=0.1, momentum=0.9)
    train_head(head, optimizer)
    return head, optimizer


def train_head(head: wb.PartialFC, optimizer: wb.SparseSGD) -> None:
    generator = torch.Generator().manual_seed(int(head.step))
    head(torch.randn(6, 48, generator=generator), torch.randint(67, (6,), generator=generator)).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_heads(base: Path) -> None:
    for name, seed in (("whole", 0), ("foreign", 1)):
        head, optimizer = make_head(seed)
        if name == "whole":
            wb.heads.save_head(base / "head" / "earlier", head, optimizer)
            train_head(head, optimizer)
        wb.heads.save_head(base / "head" / name, head, optimizer)


def save_run(base: Path, pairs: Path, task_name: str, name: str, seed: int) -> None:
    """Make two steps of the training loop, with a checkpoint after each."""
    config = TrainConfig(
        task=task_name, data=str(pairs), seed=seed, batch_size=8, steps=2, image_size=16, validation_texts=8,
        test_texts=8, checkpoint_every=1, audit=False, learning_rate=1e-3,
        model=ModelConfig(embedding_size=8, image_width=8, text_width=8, text_buckets=64),
    )  # fmt: skip
    path = base / task_name / name
    facts = DataFacts(config.data, f"{name} pairs", hashlib.sha256(name.encode()).hexdigest())
    task, folder = make(config), RunFolder.create(path, config, facts)
    for step in range(config.steps):
        loss = task.add_gradients(step)
        for optimizer in task.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        folder.append({"step": step + 1, "loss": loss.item(), "seconds": 0.5 * step})
        torch.rand(seed + 1)
        task.save(path, task.pass_state(), step=step + 1, seconds=0.5)
        if step == 0 and name == "whole":
            shutil.copytree(path, path.with_name("earlier"))


_DATA: dict[str, Any] = {}


def make(config: TrainConfig) -> Any:
    """Return the run's task; its data are read once."""
    key = f"{config.task} {config.seed}"
    if key not in _DATA:
        _DATA[key] = load_data(dataclasses.replace(config, workers=0), 1)
    return make_task(*_DATA[key], torch.device("cpu"), rank=0, size=1)


def save_insightface(folder: Path, seed: int) -> None:
    """Write the files of train_v2.py."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(2, 67, 48, generator=generator)
    for rank in range(3):
        weight, momentum = whole[:, Partition.even(67, 3).rows(rank)].clone().unbind()
        content = {
            "epoch": 1, "global_step": 10 * seed, "state_dict_backbone": {"fc.weight": torch.ones(4, 4)},
            "state_dict_softmax_fc": torch.nn.Linear(1, 1).state_dict() | {"weight": weight.clone()},
            "state_optimizer": {"state": {5: {"momentum_buffer": momentum.clone()}}, "param_groups": [{"params": [5]}]},
        }  # fmt: skip
        torch.save(content, folder / f"checkpoint_gpu_{rank}.pt")


# Readers: each is a function that reads a folder, and a function that returns the state that reading changes.
State = Callable[[], list[bytes]]


def reader(kind: str, base: Path) -> tuple[Callable[[Path], None], State]:
    """Return a new reader of folders of this kind."""
    if kind in ("head", "insightface"):
        head, optimizer = make_head(seed=9)

        def read(folder: Path) -> None:
            load = wb.heads.load_head if kind == "head" else wb.heads.load_insightface
            load(folder, head, optimizer)

        def state() -> list[bytes]:
            return [as_bytes(head.state_dict()), as_bytes(optimizer.state_dict()), as_bytes(torch.get_rng_state())]

        return read, state
    config = read_config(base / kind / "whole")
    task = make(config)
    found: dict[str, Any] = {}

    def read_run(folder: Path) -> None:
        """Read as --resume does."""
        config = read_config(folder)
        metrics = RunFolder(folder).metrics()
        step = last_step(folder, recorded=len(metrics), checkpoint_every=config.checkpoint_every)
        facts = task.load(folder)
        assert step == facts["step"]
        found.update(config=to_json(config), metrics=metrics[:step], step=step)

    def run_state() -> list[bytes]:
        heads = [task.head.state_dict()] if kind == "identify" else []
        return [
            as_bytes([task.weights(), task.loss_state(), task.precision.state(), *heads, torch.get_rng_state()]),
            as_bytes([optimizer.state_dict() for optimizer in task.optimizers]),
            json.dumps({name: str(value) for name, value in found.items()}, sort_keys=True).encode(),
        ]

    return read_run, run_state


def as_bytes(value: Any) -> bytes:
    """Return a digest of tensors, dictionaries and plain values."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()
    if isinstance(value, dict):
        return hashlib.sha256(b"".join(as_bytes(str(k)) + as_bytes(v) for k, v in value.items())).digest()
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(b"".join(map(as_bytes, value))).digest()
    return hashlib.sha256(repr(value).encode()).digest()


def tree(folder: Path) -> dict[str, str]:
    """Return the contents of a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


# Damages: each changes a folder and returns the name of the file that it has changed.
@dataclass
class Spot:
    """The place of a damage."""

    dice: random.Random
    kind: str
    folder: Path
    base: Path

    def files(self) -> list[Path]:
        """Return the files that reading needs."""
        names = ("*.pt",) if self.kind == "insightface" else ("*.safetensors", "*.json", "*.jsonl")
        return sorted(path for pattern in names for path in self.folder.rglob(pattern))

    def file(self) -> Path:
        return self.dice.choice(self.files())

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def other(self, which: str, path: Path) -> Path:
        return self.base / self.kind / which / path.relative_to(self.folder)


def flip_a_bit(spot: Spot) -> str:
    file = spot.file()
    text = bytearray(file.read_bytes())
    at = spot.dice.randrange(8 * len(text))
    text[at // 8] ^= 1 << at % 8
    file.write_bytes(text)
    return f"{spot.name(file)} bit {at}"


def zero_a_page(spot: Spot) -> str:
    file = spot.file()
    text = bytearray(file.read_bytes())
    start = PAGE * spot.dice.randrange(-(-len(text) // PAGE))
    count = len(text[start : start + PAGE])
    if not any(text[start : start + count]):
        start, count = 0, min(PAGE, len(text))
    text[start : start + count] = bytes(count)
    file.write_bytes(text)
    return f"{spot.name(file)} from {start}"


def truncate(spot: Spot) -> str:
    file = spot.file()
    size = spot.dice.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{spot.name(file)} to {size}"


def append(spot: Spot) -> str:
    file = spot.file()
    more = spot.dice.choice([b"\n", b" ", b"\0" * PAGE, b"{}\n", spot.dice.randbytes(9)])
    if file.name == "metrics.jsonl":  # a line that a kill has cut short, and a whole one of a later step, are dropped
        more = b"\n" + more + b"\n"
    with file.open("ab") as opened:
        opened.write(more)
    return spot.name(file)


def from_another_run(spot: Spot) -> str:
    file = spot.file()
    shutil.copy(spot.other("foreign", file), file)
    return spot.name(file)


def from_an_earlier_save(spot: Spot) -> str:
    if spot.kind in ("insightface", "retrieve"):  # these have no ids; a whole earlier checkpoint of the run is valid
        return from_another_run(spot)
    if spot.kind == "identify":  # its name has the step
        shutil.rmtree(spot.folder / "head-2")
        shutil.copytree(spot.base / "identify" / "earlier" / "head-1", spot.folder / "head-2")
        return "head-2"
    file = spot.file()
    shutil.copy(spot.other("earlier", file), file)
    return spot.name(file)


def swap(spot: Spot) -> str:
    first, second = spot.dice.sample(spot.files(), 2)
    between = first.with_suffix(".between")
    first.rename(between)
    second.rename(first)
    between.rename(second)
    return f"{spot.name(first)} and {spot.name(second)}"


def link(spot: Spot) -> str:
    path = spot.file()
    if spot.kind == "identify" and spot.dice.random() < 0.5:
        path = spot.folder / "head-2"
    elsewhere = spot.folder.with_name(f"{spot.folder.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return spot.name(path)


def remove(spot: Spot) -> str:
    file = spot.file()
    file.unlink()
    return spot.name(file)


HOSTILE = (
    None, True, -1, -(2**63) - 1, 2**64, 10**30, 0.5, 1e308, "", "x", "../../x", "\0", [], {}, [[]], {"a": 1}, [None],
)  # fmt: skip
RAW = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"step": NaN}',
    b'{"step": 1e999}',
    b'{"step": ' + b"9" * 100_000 + b"}",
    b'{"a": 1, "a": 2}',
    b"\xff\xfe",
    b'"' + b"\\" * 100_001,
    b"null",
    b"",
)


def hostile_json(spot: Spot) -> str:
    """Write nonsense instead of a value, with a valid digest; or text that is not JSON."""
    if spot.kind == "insightface":
        return malicious(spot)
    files = [file for file in spot.files() if file.suffix in (".json", ".jsonl")]
    files += [file for file in spot.files() if file.name == "checkpoint.safetensors"]
    file = spot.dice.choice(files)
    if file.suffix == ".safetensors":
        with TensorFile(file) as opened:
            metadata, tensors = opened.metadata, {name: opened.read(name) for name in opened.entries}
        facts = json.loads(metadata["facts"])
        key = spot.dice.choice(sorted(facts))
        any_of = {"seconds": (int, float), "torch": (str,)}.get(key, ())  # not part of the state
        wrong = [value for value in HOSTILE if value is True or not isinstance(value, any_of)]
        facts[key] = spot.dice.choice(wrong)
        write_tensors(file, tensors, metadata | {"facts": json.dumps(facts)})
        return f"{spot.name(file)} {key}"
    if file.suffix == ".jsonl" or spot.dice.random() < 0.4:
        file.write_bytes(spot.dice.choice(RAW) + b"\n")
        return f"{spot.name(file)} as a whole"
    value = unsealed(file.read_bytes(), file.name)
    into, key = value, spot.dice.choice(sorted(value))
    while isinstance(into[key], (dict, list)) and into[key] and spot.dice.random() < 0.8:
        into = into[key]
        key = spot.dice.choice(sorted(into)) if isinstance(into, dict) else spot.dice.randrange(len(into))
    was, now = into[key], spot.dice.choice(HOSTILE)
    if now == was or (key == "seed" and isinstance(now, int) and abs(now) < 2**63):
        now = {"nonsense": now}
    into[key] = now
    file.write_bytes(sealed(value))
    return f"{spot.name(file)} {key} {was!r:.40} -> {now!r:.40}"


# Pickles that make a file if they are executed.
class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def bombs(marker: Path) -> Iterator[bytes]:
    for protocol in range(6):
        yield pickle.dumps(Bomb(marker), protocol)
    call = f"touch {marker}\n".encode()
    yield b"cos\nsystem\n(S'" + call[:-1] + b"'\ntR."
    yield b"(S'" + call[:-1] + b"'\nios\nsystem\n."
    yield b"(cos\nsystem\nS'" + call[:-1] + b"'\no."


def malicious(spot: Spot) -> str:
    """Write a malicious pickle instead of a file, or beside one."""
    marker = spot.folder.parent / "executed"
    bomb = spot.dice.choice(list(bombs(marker)))
    if spot.kind == "head" and spot.dice.random() < 0.5:
        if spot.dice.random() < 0.5:
            for file in spot.files():
                file.unlink()
        (spot.folder / ".metadata").write_bytes(bomb)
        (spot.folder / "__0_0.distcp").write_bytes(bomb)
        return ".metadata"
    file = spot.file()
    how = spot.dice.choice(["a pickle", "torch.save", "in an archive", "the old torch.save"])
    if how == "a pickle":
        file.write_bytes(bomb)
    elif how == "in an archive" or file.suffix != ".pt":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", bomb)
            archive.writestr("archive/byteorder", "little")
    else:
        content = {"weight": torch.ones(2, 2), "state_dict_softmax_fc": Bomb(marker)}
        torch.save(content, file, _use_new_zipfile_serialization=how == "torch.save")
    return f"{spot.name(file)} as {how}"


DAMAGES: dict[str, tuple[Callable[[Spot], str], int]] = {
    "a flipped bit": (flip_a_bit, 5),
    "a zeroed page": (zero_a_page, 4),
    "truncated": (truncate, 3),
    "appended bytes": (append, 2),
    "another run's file": (from_another_run, 4),
    "an earlier save's file": (from_an_earlier_save, 3),
    "swapped files": (swap, 2),
    "a link": (link, 2),
    "a missing file": (remove, 1),
    "hostile JSON": (hostile_json, 4),
    "a malicious pickle": (malicious, 4),
}


# Cases.
def make_case(number: int, seed: int, base: Path, folder: Path) -> Case:
    """Copy a whole folder and change one thing in it."""
    dice = random.Random(f"{seed} {number}")
    kind = dice.choice(KINDS)
    names = [name for name, (_, weight) in DAMAGES.items() for _ in range(weight)]
    damage = dice.choice(names)
    shutil.copytree(base / kind / "whole", folder)
    file = DAMAGES[damage][0](Spot(dice, kind, folder, base))
    return Case(number, kind, damage, file, folder)


def evaluate(case: Case, base: Path, true: dict[str, list[bytes]]) -> None:
    """Read the case's folder, and set the outcome."""
    read, state = reader(case.kind, base)
    torch.manual_seed(case.number)
    before, folder_before = state(), tree(case.folder)
    refused = False
    try:
        read(case.folder)
    except ValueError as error:
        refused, case.message = True, str(error)
    except BaseException:
        case.outcome, case.message = OTHER, traceback.format_exc()
    if (case.folder.parent / "executed").exists():
        case.outcome = EXECUTED
    elif refused and (state() != before or tree(case.folder) != folder_before):
        case.outcome = CHANGED
    elif refused:
        case.outcome = REFUSED if "\n" not in case.message else OTHER
    elif not case.outcome:
        case.outcome = SAME if comparable(case.kind, state()) == true[case.kind] else DIFFERENT


def comparable(kind: str, state: list[bytes]) -> list[bytes]:
    """Return a state without the generator's, for kinds that do not read it."""
    return state[:-1] if kind in ("head", "insightface") else state


def truth(base: Path) -> dict[str, list[bytes]]:
    """Return the state after reading each whole folder."""
    found = {}
    for kind in KINDS:
        read, state = reader(kind, base)
        read(base / kind / "whole")
        found[kind] = comparable(kind, state())
    return found


def on_two_ranks(cases: list[Path]) -> list[str]:
    """Load damaged heads on two ranks; return this rank's outcomes. All should raise, and no head should change."""
    found = []
    for folder in cases:
        head, optimizer = make_head(seed=9)
        before = as_bytes([head.state_dict(), optimizer.state_dict()])
        try:
            wb.heads.load_head(folder, head, optimizer)
            found.append(DIFFERENT)
        except ValueError:
            found.append(REFUSED if as_bytes([head.state_dict(), optimizer.state_dict()]) == before else CHANGED)
        except Exception:
            found.append(OTHER)
    return found


@contextmanager
def one_case(number: int, seed: int, base: Path) -> Iterator[Case]:
    """Yield a case in a folder that is removed afterward."""
    with tempfile.TemporaryDirectory() as name:
        yield make_case(number, seed, base, Path(name) / "case")


def run(seed: int, numbers: range, base: Path) -> list[Case]:
    """Run all cases, and those of heads on two ranks, too."""
    torch.manual_seed(0)
    true, found = truth(base), []
    with tempfile.TemporaryDirectory() as name:
        of_heads = []
        for number in numbers:
            with one_case(number, seed, base) as case:
                evaluate(case, base, true)
                found.append(case)
                if case.kind == "head" and case.outcome == REFUSED and case.damage != "a link":
                    kept = Path(name) / str(number)
                    shutil.copytree(case.folder, kept)
                    of_heads.append((case, kept))
        if of_heads:
            outcomes = run_ranks(on_two_ranks, 2, [folder for _, folder in of_heads], timeout_s=300)
            for (case, _), *both in zip(of_heads, *outcomes, strict=True):
                found.append(Case(case.number, "head, 2 ranks", case.damage, case.file, case.folder))
                found[-1].outcome = next((outcome for outcome in both if outcome != REFUSED), REFUSED)
    return found


def report(cases: list[Case], seed: int) -> int:
    """Print counts and forbidden cases; return the exit code."""
    counts = Counter(case.outcome for case in cases)
    for outcome in (REFUSED, SAME, *FORBIDDEN):
        print(f"{counts[outcome]:6}  {outcome}{'  (forbidden)' if outcome in FORBIDDEN else ''}")
    print()
    for damage in DAMAGES:
        of_damage = Counter(case.outcome for case in cases if case.damage == damage)
        print(f"{sum(of_damage.values()):6}  {damage}: {', '.join(f'{n} {name}' for name, n in of_damage.items())}")
    for case in cases:
        if case.outcome != REFUSED:
            print(f"\n{case.outcome}: {case.kind}, {case.damage}, {case.file}\n    {case.message}")
            print(f"    python tests/faults/files.py --seed {seed} --only {case.number}")
    return int(any(counts[outcome] for outcome in FORBIDDEN))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, help="the number of a single case")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wholebatch-files-") as name:
        build(Path(name))
        numbers = range(options.count) if options.only is None else range(options.only, options.only + 1)
        cases = run(options.seed, numbers, Path(name))
    code = report(cases, options.seed)
    print(f"\n{len(cases)} cases of seed {options.seed} in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        rows = [{**vars(case), "folder": None} for case in cases]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

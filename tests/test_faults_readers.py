"""A small share of the campaign of hostile files, and planted defects that it must count."""

import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import readers

from wholebatch._base.user_error import UserError
from wholebatch_train import cli as train_cli
from wholebatch_train.using import cli

SLOW = ("folder", "state")  # seconds each


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("readers")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        readers.build(folder)
        yield folder


@pytest.mark.parametrize("reader", readers.READERS)
def test_hostile_files_are_read_or_refused_in_one_line(base, reader):
    chosen = [(reader, number) for number in range(3 if reader in SLOW else 10)]
    found = [*readers.run_cases(base, 7, chosen)]
    assert not [one for one in found if not one.allowed]
    assert len(found) == len(chosen)


def test_whole_files_are_read(base, tmp_path, monkeypatch):
    """So a refusal is due to the damage."""
    monkeypatch.setattr(readers, "damage", lambda path, dice: "none")
    monkeypatch.setattr(readers, "reseal", lambda run, name, dice: "none")
    for reader in set(readers.READERS) - {"folder", *readers.OPTIONS}:
        (found,) = readers.run_cases(base, 7, [(reader, 0)])
        assert found.outcome == "read", found


def planted(monkeypatch, defect):
    monkeypatch.setattr(cli, "main", defect)
    folder = Path(os.devnull).parent
    return readers.outcome_of(["embed"], folder, limit_s=0.2)[0]


def fails(*_, **__):
    raise RuntimeError("a defect")


def sleeps(*_, **__):
    time.sleep(5)


def executes(*_, **__):
    readers.MARKER.touch()
    raise UserError("refused")


def prints_raw(*_, **__):
    print("\x1b[2J")
    raise UserError("refused")


def warns(*_, **__):
    print("a second line", file=sys.stderr)
    raise UserError("refused")


def starts(*_, **__):
    subprocess.run(["true"], check=True)
    raise UserError("refused")


def unpickles(*_, **__):
    pickle.loads(pickle.dumps(io.BytesIO))
    raise UserError("refused")


def ends(*_, **__):
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("defect", "outcome"),
    [
        (fails, "traceback"), (sleeps, "waits"), (executes, "executed"), (prints_raw, "obeyed"),
        (warns, "several lines"), (ends, "another code"), (starts, "started"), (unpickles, "started"),
    ],
)  # fmt: skip
def test_planted_defects_are_counted(monkeypatch, defect, outcome):
    assert planted(monkeypatch, defect) == outcome
    assert outcome not in readers.ALLOWED


@pytest.mark.planted
def test_a_file_that_a_refused_command_leaves_is_counted(monkeypatch, tmp_path):
    def writes(*_, **__):
        (tmp_path / "out.npy").touch()
        raise UserError("refused\x1b[2J")

    monkeypatch.setattr(cli, "main", writes)
    assert readers.outcome_of(["embed"], tmp_path)[0] == "writes"


@pytest.mark.planted
def test_a_file_that_a_refused_resume_changes_is_counted(monkeypatch, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").touch()
    (run / "config.json").write_text("{}")

    def change(name):
        def resume(*_, **__):
            (run / name).write_text("changed")
            raise UserError("refused")

        monkeypatch.setattr(train_cli, "main", resume)
        return readers.outcome_of(["train", "--resume", str(run)], tmp_path)[0]

    assert change("lock") == "refused"
    assert change("config.json") == "writes"
    assert change("another") == "writes"

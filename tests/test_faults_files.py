"""A few cases of the campaign of damaged files, and planted defects that it must count."""

import pickle
import random
import shutil

import pytest
import torch
from faults import files

from wholebatch._base import tensor_file
from wholebatch._base.files import read_into
from wholebatch.heads import insightface


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    files.build(folder)
    return folder


def test_a_few_cases(base):
    cases = files.run(7, range(30), base)
    assert {case.outcome for case in cases} <= {files.REFUSED, files.SAME}, [vars(case) for case in cases]
    assert all(case.kind == "insightface" for case in cases if case.outcome == files.SAME)


@pytest.mark.parametrize("kind", files.KINDS)
def test_whole_folders_are_accepted(base, kind, tmp_path):
    """Undamaged folders are accepted, so a refusal is due to the damage; another run's folders are different."""
    true = files.truth(base)
    for which, outcome in (("whole", files.SAME), ("foreign", files.DIFFERENT)):
        shutil.copytree(base / kind / which, tmp_path / which / "case")
        case = files.Case(0, kind, "none", "", tmp_path / which / "case")
        files.evaluate(case, base, true)
        # Another run has another configuration: its checkpoint does not fit this run's task.
        assert case.outcome == outcome, case.message


def outcome_of(base, folder, kind, damage, seed=0):
    """Return the outcome of one damage."""
    true = files.truth(base)
    shutil.copytree(base / kind / "whole", folder / "case")
    case = files.Case(0, kind, damage.__name__, "", folder / "case")
    case.file = damage(files.Spot(random.Random(seed), kind, folder / "case", base))

    def outcome():
        case.outcome = ""
        files.evaluate(case, base, true)
        return case.outcome

    return outcome


def flip_a_number(spot):
    """Flip the lowest bit of the last number of a file of rows."""
    file = sorted(spot.folder.glob("rank-*"))[1]
    text = bytearray(file.read_bytes())
    text[-4] ^= 1
    file.write_bytes(text)
    return file.name


@pytest.mark.planted
def test_a_number_that_is_read_without_its_digest_is_counted(base, tmp_path, monkeypatch):
    def read(self, name):
        entry = self.entries[name]
        x = torch.empty(entry.shape, dtype=entry.dtype)
        self._file.seek(self._first + entry.start)
        read_into(self._file, tensor_file.bytes_of(x))
        return x

    outcome = outcome_of(base, tmp_path, "head", flip_a_number)
    assert outcome() == files.REFUSED
    monkeypatch.setattr(tensor_file.TensorFile, "read", read)
    assert outcome() == files.DIFFERENT


@pytest.mark.planted
def test_a_pickle_that_is_executed_is_counted(base, tmp_path, monkeypatch):
    class Loaded(insightface.TorchFile):
        def __init__(self, path):
            torch.load(path, weights_only=False)
            super().__init__(path)

    def plant(spot):
        torch.save(files.Bomb(spot.folder.parent / "executed"), spot.folder / "checkpoint_gpu_0.pt")
        return "checkpoint_gpu_0.pt"

    outcome = outcome_of(base, tmp_path, "insightface", plant)
    assert outcome() == files.REFUSED
    monkeypatch.setattr(insightface, "TorchFile", Loaded)
    assert outcome() == files.EXECUTED


@pytest.mark.planted
def test_a_change_before_a_refusal_is_counted(base, tmp_path, monkeypatch):
    def changes(folder, head, optimizer):
        head.weight.data += 1
        raise ValueError("no")

    outcome = outcome_of(base, tmp_path, "insightface", files.truncate)
    monkeypatch.setattr("wholebatch.heads.load_insightface", changes)
    assert outcome() == files.CHANGED


def test_the_pickles_are_malicious(tmp_path):
    for number, bomb in enumerate(files.bombs(tmp_path / "executed")):
        pickle.loads(bomb)
        assert (tmp_path / "executed").exists(), number
        (tmp_path / "executed").unlink()

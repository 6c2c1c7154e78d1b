"""The cache of tables: what is read again, what is not, and what a kill or a full disk leaves."""

import os
import re
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from fcntl import LOCK_EX, flock

import pytest
import torch
from data_sets import FORMS, png

from wholebatch._base.user_error import UserError
from wholebatch_train.config import TrainConfig
from wholebatch_train.data import pictures as equal_pictures
from wholebatch_train.data.cache import cache_folder, new_file
from wholebatch_train.data.from_table import table_pairs
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.reading import bytes_of

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pairs_of(data, **settings):
    return table_pairs(open_table(str(data)), replace(CONFIG, **settings))


def arrow_files():
    return sorted(path.name for path in cache_folder().glob("*.arrow"))


def test_a_changed_file_is_read_anew_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    path = FORMS["csv"](tmp_path)
    first = pairs_of(path).digest
    (name,) = arrow_files()
    monkeypatch.setattr("wholebatch_train.data.open_table.read_separated", None)
    assert pairs_of(path).digest == first, "from the cache"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.write_text(path.read_text(encoding="utf-8").replace("snow", "rain"), encoding="utf-8")
    os.utime(path, (5, 5))
    assert pairs_of(path).digest != first
    (other,) = arrow_files()
    assert other != name, "the table of the earlier version is removed"


@pytest.mark.parametrize("damage", ["cut", "letters", "zeros", "empty"])
def test_a_damaged_cache_file_is_written_again(tmp_path, damage):
    path = FORMS["csv"](tmp_path)
    first = pairs_of(path).digest
    (name,) = arrow_files()
    file = cache_folder() / name
    whole = file.read_bytes()
    half, letters = whole[: len(whole) // 2], whole.replace(b"snow", b"\xffnow")
    file.write_bytes({"cut": half, "letters": letters, "zeros": bytes(len(whole)), "empty": b""}[damage])
    pairs = pairs_of(path)
    assert pairs.digest == first
    assert pairs.sides["text"].items(torch.tensor([3])) == ["snow"]
    assert file.read_bytes() == whole


@pytest.mark.parametrize("where", ["open", "write", "fsync", "mkdir"])
def test_a_cache_that_cannot_be_written_is_the_memory_of_the_rank(tmp_path, monkeypatch, where):
    full = OSError(28, "No space left on device")

    def fails(*args, **kwargs):
        raise full

    path = FORMS["csv"](tmp_path)
    expected = pairs_of(path).digest
    shutil.rmtree(tmp_path / "cache")
    if where == "write":
        monkeypatch.setattr("wholebatch_train.data.cache.new_file", _file_that_is_full)
    else:
        monkeypatch.setattr(
            {"open": "tempfile.NamedTemporaryFile", "fsync": "os.fsync", "mkdir": "pathlib.Path.mkdir"}[where], fails
        )
    said = []
    table = open_table(str(path))
    pairs = table_pairs(table, CONFIG, say=said.append)
    assert pairs.digest == expected
    assert "the table is in the memory of each rank: the cache" in said[0]
    assert "No space left on device" in said[0]
    monkeypatch.setattr("wholebatch_train.data.cache._MOST_BYTES", 10)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; set XDG_CACHE_HOME to a folder"):
        open_table(str(path))
    monkeypatch.undo()
    assert not [*(tmp_path / "cache").rglob("*.partial")]


@contextmanager
def _file_that_is_full(folder):
    """Yield a file whose every write fails, as on a full disk."""
    with new_file(folder) as file, open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), file.fileno())
        yield file


def test_an_error_of_the_source_is_not_taken_for_one_of_the_cache(tmp_path):
    path = FORMS["csv"](tmp_path)
    path.write_text("image,text\n" + "a.png,b\n" * 9 + 'a.png,"b\n')
    with pytest.raises(UserError, match=r"pairs.csv, line 11: not a CSV file: unexpected end of data"):
        open_table(str(path))
    assert not [*cache_folder().glob("*.arrow")]
    assert not [*cache_folder().glob("*.partial")]


def test_processes_that_start_together_read_the_source_once(tmp_path, monkeypatch):
    """Threads stand for processes: each opens the lock file for itself, which is what flock goes by."""
    from wholebatch_train.data import open_table as module

    path, reads, original = FORMS["csv"](tmp_path), [], module.read_separated
    monkeypatch.setattr(module, "read_separated", lambda path: (reads.append(path), original(path))[1])
    found = []
    threads = [threading.Thread(target=lambda: found.append(open_table(str(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(reads) == 1
    assert len(arrow_files()) == 1


def test_without_locks_processes_write_equal_files(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = FORMS["csv"](tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(pairs_of(path).digest)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(arrow_files()) == 1


def test_the_copy_of_pictures_is_announced_once(tmp_path):
    for form, says in (("parquet of paths", False), ("csv", False), ("parquet of bytes", True)):
        path, said = FORMS[form](tmp_path), []
        for _ in range(2):
            open_table(str(path), said.append)
        assert len(said) == says, form
    size = sum(len(png(i)) for i in range(6)) / 1000
    line = re.fullmatch(rf"the pictures inside of {path} are copied into {cache_folder()}, once: (\S+) kB", said[0])
    assert size < float(line[1]) < 1.5 * size


# Which pictures are equal.
@pytest.mark.parametrize("form", ["csv", "parquet of bytes"])
def test_equal_pictures_are_looked_for_once(tmp_path, monkeypatch, form):
    """At later starts no picture is read for it, until one changes."""
    path, reads = FORMS[form](tmp_path), []
    monkeypatch.setattr(equal_pictures, "bytes_of", lambda place: (reads.append(place), bytes_of(place))[1])

    def start():
        reads.clear()
        pairs = pairs_of(path)
        return len(reads), pairs.digest, pairs.numbers["image"].tolist()

    first = start()
    assert first[0] >= 2, "some pictures have as many bytes"
    assert start() == start() == (0, *first[1:])
    (kept,) = cache_folder().glob("*.pictures")
    kept.write_bytes(kept.read_bytes()[:100])
    assert start() == first
    assert start()[0] == 0
    os.utime(tmp_path / "images" / "0.png" if form == "csv" else path, (5, 5))
    assert start() == first


# Files of processes that were killed.
def partial_file(name, age):
    path = cache_folder() / f"{name}.partial"
    path.write_bytes(b"half of a table")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_a_killed_process_has_left_is_removed_after_a_day(tmp_path):
    old, recent = partial_file("old", 100_000), partial_file("recent", 1000)
    pairs_of(FORMS["csv"](tmp_path))
    assert (old.exists(), recent.exists()) == (False, True)


def test_a_start_does_not_wait_for_others_if_the_table_is_there(tmp_path):
    path = FORMS["csv"](tmp_path)
    open_table(str(path))
    (lock,) = cache_folder().glob("*.lock")
    found = []
    with lock.open("wb") as file:
        flock(file, LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(open_table(str(path))), daemon=True)
        thread.start()
        thread.join(30)
        assert len(found) == 1


# Results that are replaced.
def names():
    return sorted(path.name for path in cache_folder().iterdir())


def test_results_about_earlier_versions_of_a_table_are_removed(tmp_path):
    """Other rows make other results; those with the same pictures, such as of all rows, stay."""
    path = FORMS["csv"](tmp_path)
    pairs_of(path, skip_bad=True)
    first = names()
    assert [sum(name.endswith(ending) for name in first) for ending in (".arrow", ".pictures", ".unreadable")] == [
        1, 1, 1,
    ]  # fmt: skip
    for number in range(3):
        (tmp_path / "images" / f"more{number}.png").write_bytes(png(10 + number))
        with path.open("a") as file:
            file.write(f"images/more{number}.png,more {number}\n")
        pairs_of(path, skip_bad=True)
        assert len(names()) == len(first)
        assert not {name for name in names() if not name.endswith(".lock")} & {*first}
    whole = names()
    pairs_of(path)  # the same rows, because all can be read
    assert names() == whole
    (tmp_path / "images" / "more0.png").write_bytes(b"no picture")
    pairs_of(path, skip_bad=True)
    assert len(names()) == len(first)

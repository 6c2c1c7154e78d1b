"""Many tar shards are read by workers; the table, and the mistakes, are those of one process."""

import json
import tarfile

import pyarrow as pa
import pytest
from data_sets import add, png

from wholebatch._base.user_error import UserError
from wholebatch_train.data import shards as module
from wholebatch_train.data.shards import shard_batches


def write(path, *rows):
    """Write a shard of rows: a picture and the fields of its .json file."""
    with tarfile.open(path, "w") as tar:
        for number, fields in enumerate(rows):
            add(tar, f"{number:03d}.png", png(number))
            add(tar, f"{number:03d}.json", json.dumps(fields).encode())
    return path


def table_of(paths, monkeypatch, *, workers):
    monkeypatch.setattr(module, "cpus_of_a_rank", lambda ranks: 2)
    monkeypatch.setattr(module, "_FOR_WORKERS", 4 if workers else len(paths) + 1)
    return pa.Table.from_batches(list(shard_batches(paths)))


def test_shards_with_other_fields_have_those_of_the_first(tmp_path, monkeypatch):
    paths = [
        write(tmp_path / "0.tar", {"caption": "a", "id": 7}, {"caption": "b"}),
        write(tmp_path / "1.tar", {"id": 8, "other": "left out", "caption": "c"}),
        write(tmp_path / "2.tar", {"id": 9}),
        write(tmp_path / "3.tar", {"caption": "d"}),
        write(tmp_path / "4.tar", {}),
    ]
    found = table_of(paths, monkeypatch, workers=True)
    assert found.column_names[:-2] == ["image", "caption", "id"]
    assert found["caption"].to_pylist() == ["a", "b", "c", None, "d", None]
    assert found["id"].to_pylist() == ["7", None, "8", "9", None, None]
    assert [each["shard"] for each in found["image"].to_pylist()] == [str(paths[k]) for k in (0, 0, 1, 2, 3, 4)]
    assert found.equals(table_of(paths, monkeypatch, workers=False))


def test_a_damaged_shard_that_a_worker_reads_is_named(tmp_path, monkeypatch):
    paths = [write(tmp_path / f"{number}.tar", {"caption": "a"}) for number in range(5)]
    paths[3].write_bytes(paths[3].read_bytes()[:700])
    with pytest.raises(UserError, match=r"^.*3\.tar cannot be read as a tar file: .*is it complete\?$"):
        table_of(paths, monkeypatch, workers=True)

"""A user's data in every form: the same pairs, the same split, and the same batches however they are read."""

import csv
import gc
import io
import json
import math
import os
import pathlib
import signal
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import resource_sharer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_sets import FORMS, TEXTS, picture, png, shard, write_pictures
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import wholebatch as wb
from wholebatch._base.user_error import UserError
from wholebatch.partition import Partition
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.data.from_table import FalseNegatives, table_pairs
from wholebatch_train.data.load import load_data
from wholebatch_train.data.loader import Feed, WorkerDiedError, prepared, workers_of_a_rank
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.pairs import Order, batch_of_step, joined, split_groups, stated_pairs
from wholebatch_train.data.roles import asked_roles, find_roles
from wholebatch_train.data.sides import Texts
from wholebatch_train.data.text_files import read_json_lines, read_separated
from wholebatch_train.encoders.encoder import map_tensors
from wholebatch_train.encoders.small import Pad
from wholebatch_train.encoders.words import tokenize
from wholebatch_train.tasks.batches import PairBatches, Reader, rows_of_chunks
from wholebatch_train.tasks.make import make_task
from wholebatch_train.using.items import Items, _workers
from wholebatch_train.using.options import EmbedConfig

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)
SMALL_MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_buckets=256)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pairs_of(data, **settings):
    return table_pairs(open_table(str(data)), replace(CONFIG, **settings))


def pixels(pictures, rows):
    return [np.asarray(each.convert("RGB")).tobytes() for each in pictures.items(rows)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(tmp_path, monkeypatch, form):
    if form == "a saved data set" and find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    monkeypatch.chdir(tmp_path)
    data = FORMS[form](tmp_path)
    for start in ("read", "from the cache"):
        pairs = pairs_of(data)
        rows = pairs.rows(torch.arange(len(pairs)))
        images, texts = pairs.sides.values()
        found = dict(zip(texts.items(rows), pixels(images, rows), strict=True))
        assert found == {text: np.asarray(picture(i)).tobytes() for i, text in enumerate(TEXTS)}, start
        assert (len(pairs), len(pairs.order)) == (len(TEXTS), len(TEXTS))
    assert not (tmp_path / "executed").exists(), "the pickles of a shard are not loaded"


def padded(content, size):
    return content + bytes(size - len(content))


_PNGS = [padded(png(number), 600) for number in range(len(TEXTS))]
_PATHS = pa.array([f"{number}.png" for number in range(len(TEXTS))], pa.string_view())
IMAGES = {
    "binary": pa.array(_PNGS, pa.binary()),
    "large": pa.array(_PNGS, pa.large_binary()),
    "view": pa.array(_PNGS, pa.binary_view()),
    "fixed size": pa.array(_PNGS, pa.binary(600)),
    "dictionary": pa.array(_PNGS, pa.binary()).dictionary_encode(),
    "dictionary of a fixed size": pa.array(_PNGS, pa.binary(600)).dictionary_encode(),
    "struct of views": pa.StructArray.from_arrays([pa.array(_PNGS, pa.binary_view()), _PATHS], ["bytes", "path"]),
}
WORDS = {
    "string": pa.array(TEXTS, pa.string()),
    "large": pa.array(TEXTS, pa.large_string()),
    "view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS, pa.string()).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
    "bytes": pa.array([text.encode() for text in TEXTS], pa.binary()),
    "a view of bytes": pa.array([text.encode() for text in TEXTS], pa.binary_view()),
}


@pytest.mark.parametrize(
    ("images", "texts"), [(name, "string") for name in IMAGES] + [("binary", name) for name in WORDS], ids=str
)
def test_texts_and_bytes_of_every_type_of_arrow(tmp_path, images, texts):
    """A group by each of these types is the same, too; and a second start, from the cache."""
    path = tmp_path / "pairs.parquet"
    table = {"image": IMAGES[images], "text": WORDS[texts], "number": range(6), "by_image": IMAGES["view"]}
    pq.write_table(pa.table(table | {"by_text": WORDS[texts]}), path)
    for columns in ("", "", "group=by_image", "group=by_text"):
        pairs = pairs_of(path, columns=columns)
        rows = torch.arange(6)
        assert pixels(pairs.sides["image"], rows) == [picture(number).tobytes() for number in range(6)]
        assert pairs.sides["text"].items(rows) == [*TEXTS]
        assert len(pairs) == 6
    stored = open_table(str(path)).arrow.schema
    assert {str(field.type).removeprefix("large_") for field in stored} <= {
        "binary", "string", "int64", "struct<bytes: large_binary, path: string>",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [pa.list_(pa.string_view()), pa.large_list(pa.large_string()), pa.string_view()])
def test_negatives_of_every_type_of_arrow(tmp_path, kind):
    values = [f"n{number}" for number in range(6)]
    values = values if kind == pa.string_view() else [[value] for value in values]
    table = {"query": WORDS["view"], "positive": [f"d{number}" for number in range(6)]}
    pq.write_table(pa.table(table | {"negatives": pa.array(values, kind)}), tmp_path / "pairs.parquet")
    found = pairs_of(tmp_path / "pairs.parquet", loss="info_nce").negatives
    assert found.of(torch.arange(6))[0] == [f"n{number}" for number in range(6)]


def test_bytes_that_are_no_texts(tmp_path):
    pq.write_table(pa.table({"query": [b"a", b"\xff"], "positive": ["b", "c"]}), tmp_path / "pairs.parquet")
    with pytest.raises(UserError, match=r"'query' must hold texts to be the query; its bytes are not UTF-8"):
        pairs_of(tmp_path / "pairs.parquet")


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
def test_a_saved_data_set_with_other_types_of_arrow(tmp_path):
    import datasets

    table = pa.table({"query": WORDS["view"], "positive": pa.array(TEXTS[::-1]).dictionary_encode()})
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    pairs = pairs_of(tmp_path / "saved")
    assert pairs.sides["query"].items(torch.arange(6)) == [*TEXTS]
    assert pairs.sides["document"].items(torch.arange(6)) == [*TEXTS[::-1]]


def test_the_digest_is_that_of_the_contents(tmp_path):
    """The form of a file does not change it, and neither does its time; a text, an order or a picture does."""
    digests = {pairs_of(FORMS[form](tmp_path)).digest for form in ("csv", "tsv", "jsonl", "parquet of paths")}
    assert len(digests) == 1
    path = FORMS["csv"](tmp_path)
    os.utime(path, (1, 1))
    assert pairs_of(path).digest in digests
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for other in (lines[:-1], [lines[0], *lines[:0:-1]], [*lines[:-1], lines[-1].replace("sun", "son")]):
        path.write_text("".join(other), encoding="utf-8")
        digests.add(pairs_of(path).digest)
    path.write_text("".join(lines), encoding="utf-8")
    (tmp_path / "images" / "0.png").write_bytes(png(99) + b"\0")
    digests.add(pairs_of(path).digest)
    assert len(digests) == 5


def test_columns_have_usual_names_or_those_of_the_option(tmp_path):
    names = write_pictures(tmp_path)
    for header, columns in (
        ("filepath,title", ""),
        ("File_Name,Caption", ""),
        ("a,b", "image=a,text=b"),
        ("b,image", "image=b,text=image"),
        ("img,class", ""),
    ):
        path = tmp_path / "pairs.csv"
        path.write_text(header + "\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names)))
        pairs = pairs_of(path, columns=columns)
        assert pairs.names == ("image", "text")
        assert pairs.sides["text"].items(torch.arange(6)) == list("012345")
    path.write_text("image,text,label\n" + "".join(f"{name},t{i},{i % 2}\n" for i, name in enumerate(names)))
    table = open_table(str(path))
    assert find_roles(table, "", task="retrieve") == {"image": ["image"], "text": ["text"]}
    assert find_roles(table, "", task="identify") == {"image": ["image"], "text": ["label"]}
    assert find_roles(table, "text=text", task="identify") == {"image": ["image"], "text": ["text"]}
    assert asked_roles("query=q, negatives=a+b") == {"query": ["q"], "negatives": ["a", "b"]}


# Pictures.
def odd_pictures():
    """Return files of pictures in unusual modes, with the color of their upper left corner as a viewer shows it."""
    turned = Image.new("RGB", (12, 12), (0, 0, 255))
    turned.paste((255, 0, 0), (0, 6, 6, 12))  # at the lower left; the orientation says: turn it clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = Image.new("RGBA", (12, 12), (9, 9, 9, 0))
    deep = Image.fromarray(np.full((12, 12), 0x8000, np.uint16))
    palette = Image.new("RGB", (12, 12), (10, 200, 30)).quantize(4)
    cmyk = Image.new("CMYK", (12, 12), (255, 0, 0, 0))
    for image, kind, options, color in (
        (turned, "jpeg", {"exif": exif, "quality": 100}, (255, 0, 0)),
        (clear, "png", {}, (255, 255, 255)),
        (deep, "png", {}, (128, 128, 128)),
        (palette, "gif", {}, (10, 200, 30)),
        (cmyk, "jpeg", {"quality": 100}, (0, 255, 255)),
    ):
        content = io.BytesIO()
        image.save(content, format=kind, **options)
        yield kind, content.getvalue(), color


@pytest.mark.parametrize("source", ["files", "bytes", "shard"])
def test_unusual_pictures_are_the_same_from_every_source(tmp_path, source):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from data_sets import add

    every = [*odd_pictures()]
    data = tmp_path / {"files": "pairs.csv", "bytes": "pairs.parquet", "shard": "pairs.tar"}[source]
    if source == "files":
        for i, (kind, content, _) in enumerate(every):
            (tmp_path / f"{i}.{kind}").write_bytes(content)
        data.write_text("image,text\n" + "".join(f"{i}.{kind},t{i}\n" for i, (kind, *_) in enumerate(every)))
    elif source == "bytes":
        pq.write_table(pa.table({"image": [e[1] for e in every], "text": [f"t{i}" for i in range(len(every))]}), data)
    else:
        import tarfile

        with tarfile.open(data, "w") as tar:
            for i, (kind, content, _) in enumerate(every):
                add(tar, f"{i}.{kind}", content)
                add(tar, f"{i}.txt", f"t{i}".encode())
    images = pairs_of(data).sides["image"]
    found = Reader(Pad(12, 3), 3)(images, torch.arange(len(every)))
    for pixel, (kind, _, color) in zip(found[:, :, 0, 0].tolist(), every, strict=True):
        assert max(abs(a - b) for a, b in zip(pixel, color, strict=True)) <= 8, (kind, pixel, color)


# Groups and the split.
def groups_by_search(columns):
    """Return the rows of each group, by following equal values from row to row."""
    n, left, found = len(columns[0]), set(range(len(columns[0]))), []
    while left:
        group, new = set(), [min(left)]
        while new:
            row = new.pop()
            if row not in group:
                group.add(row)
                new += [other for other in range(n) if any(column[row] == column[other] for column in columns)]
        found.append(group)
        left -= group
    return sorted(map(sorted, found))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30))
def test_groups_are_connected_by_texts_and_pictures(rows):
    columns = [*zip(*rows, strict=True)]
    found = joined([torch.tensor(column) for column in columns])
    together = {}
    for row, label in enumerate(found.tolist()):
        together.setdefault(label, []).append(row)
    assert sorted(together.values()) == groups_by_search(columns)


def repeated(folder, choices):
    """Write a table of (picture, text) numbers; every second use of a picture is a copy of its file."""
    (folder / "images").mkdir(exist_ok=True)
    lines = ["image,text\n"]
    for row, (image, text) in enumerate(choices):
        name = f"images/{image}.png" if row % 2 else f"images/{image}-{row}.png"
        if not (folder / name).exists():
            (folder / name).write_bytes(png(image))
        lines.append(f"{name},text {text}\n")
    (folder / "pairs.csv").write_text("".join(lines))
    return folder / "pairs.csv"


def split_by_row(count, *, validation, test, seed):
    """Return the plausible wrong split, which does not know of repetitions."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[validation + test :], order[test : test + validation], order[:test]


def shared(parts, values):
    """Return the values that are in two of the parts."""
    sets = [{values[row] for row in part} for part in parts]
    return set().union(*(a & b for i, a in enumerate(sets) for b in sets[:i]))


@pytest.mark.parametrize("seed", range(12))
def test_repeated_texts_and_pictures_are_on_one_side_of_the_split_and_once_in_a_batch(tmp_path, seed):
    rng = np.random.default_rng(seed)
    choices = rng.integers(0, 60, (48, 2)).tolist()
    pairs = pairs_of(repeated(tmp_path, choices))
    images, texts = ([row[side] for row in choices] for side in (0, 1))
    assert len(pairs) == len(groups_by_search([images, texts]))
    assert 6 < len(pairs) < 40, "some rows are connected, and not all of them"
    split = split_groups(pairs, validation=1, test=2, seed=seed)
    parts = [
        [row for g in part.tolist() for row in pairs.order[pairs.first[g] : pairs.first[g + 1]].tolist()]
        for part in (split.train, split.validation, split.test)
    ]
    assert sorted(row for part in parts for row in part) == [*range(48)]
    assert not shared(parts, images)
    assert not shared(parts, texts)
    naive = [part.tolist() for part in split_by_row(48, validation=8, test=12, seed=seed)]
    assert shared(naive, images) or shared(naive, texts), "the split by row is wrong, and this test sees it"
    order = Order(split.train, batch_size=3, seed=seed)
    for step in range(12):
        rows = batch_of_step(order, pairs, step=step, seed=seed)[0].tolist()
        for values in (images, texts):
            assert len({values[row] for row in rows}) == len(rows)


def test_equal_pictures_are_found_in_bytes_and_shards(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["a", "b", "c"]
    pq.write_table(pa.table({"image": [png(1), png(2), png(1)], "text": texts}), tmp_path / "pairs.parquet")
    for number in range(2):
        shard(tmp_path / f"{number}.tar", range(3))  # the same pictures and texts in both
    assert [len(pairs_of(tmp_path / name)) for name in ("pairs.parquet", "*.tar")] == [2, 3]


def test_a_text_that_is_a_query_and_a_document_is_one_group(tmp_path):
    """With one encoder for both it would be a false negative of itself, and stand on both sides of the split."""
    (tmp_path / "pairs.csv").write_text("query,positive\na,b\nb,c\nd,e\nf,a\ng,h\n")
    pairs = table_pairs(open_table(str(tmp_path / "pairs.csv")), TrainConfig())
    assert pairs.group_of.tolist() == [0, 0, 1, 0, 2]


def write_ids(folder, ids, *, form="csv"):
    """Write pairs, each with a picture and a text of its own, and a column of ids."""
    names = write_pictures(folder, len(ids))
    if form == "csv":
        lines = [
            f"{name},text {i},{'' if each is None else each}\n"
            for i, (name, each) in enumerate(zip(names, ids, strict=True))
        ]
        (folder / "pairs.csv").write_text("image,text,product\n" + "".join(lines))
        return folder / "pairs.csv"
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"text {i}" for i in range(len(ids))]
    pq.write_table(pa.table({"image": names, "text": texts, "product": ids}), folder / "pairs.parquet")
    return folder / "pairs.parquet"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_of_one_id_are_never_apart_nor_in_one_batch(tmp_path, form):
    ids = [i % 13 if i % 3 else None for i in range(48)]
    path = write_ids(tmp_path, ids, form=form)
    pairs = pairs_of(path, columns="group=product")
    alone = ids.count(None)
    assert len(pairs) == alone + 13, "a row without an id is a group of its own"
    assert len(pairs_of(path)) == 48, "the column counts only if it is named"
    for row, each in enumerate(ids):
        same = [r for r in range(48) if r == row or (each is not None and ids[r] == each)]
        assert (pairs.group_of == pairs.group_of[row]).nonzero()[:, 0].tolist() == same
        assert (pairs.ids == pairs.ids[row]).nonzero()[:, 0].tolist() == same
    assert pairs.digest != pairs_of(path).digest
    split = split_groups(pairs, validation=4, test=6, seed=0)
    parts = [
        [row for g in part.tolist() for row in pairs.order[pairs.first[g] : pairs.first[g + 1]].tolist()]
        for part in (split.train, split.validation, split.test)
    ]
    assert sorted(row for part in parts for row in part) == [*range(48)]
    assert shared(parts, ids) <= {None}
    assert shared([part.tolist() for part in split_by_row(48, validation=4, test=6, seed=0)], ids) > {None}
    order = Order(split.train, batch_size=8, seed=0)
    for step in range(20):
        rows = batch_of_step(order, pairs, step=step, seed=0)[0].tolist()
        found = [ids[row] for row in rows if ids[row] is not None]
        assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("columns", "common"), [("group=id", "a text or a value of the column for group"), ("", "a text")]
)
def test_the_line_about_the_data_says_what_groups_do_not_share(tmp_path, columns, common):
    (tmp_path / "pairs.csv").write_text("query,positive,id\n" + "".join(f"q{i},d{i},{i}\n" for i in range(9)))
    config = TrainConfig(data=str(tmp_path / "pairs.csv"), columns=columns, model=SMALL_MODEL, workers=0)
    config, data = load_data(config, 1)
    line = make_task(config, data, torch.device("cpu"), rank=0, size=1).describe().splitlines()[0]
    assert line == (
        f"9 pairs of queries and documents in 9 groups that do not share {common}: 7 for training, 1 for validation, "
        "1 for test"
    )


def test_ids_join_texts_and_pictures_and_are_of_retrieval(tmp_path):
    (tmp_path / "pairs.csv").write_text("query,positive,id\na,b,1\nc,d,2\ne,f,1\nc,g, \nh,i,\n")
    pairs = pairs_of(tmp_path / "pairs.csv", columns="group=id")
    assert pairs.group_of.tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(
        UserError, match=r"--columns group=id goes with --task retrieve; of --task identify name the col"
    ):
        find_roles(open_table(str(tmp_path / "pairs.csv")), "group=id", task="identify")
    lines = [{"query": "a", "positive": "b", "id": ["x"]}, {"query": "c", "positive": "d", "id": ["y"]}]
    with pytest.raises(UserError, match=r"the column 'id' must hold texts or numbers to be the group; got list<"):
        pairs_of(write_queries(tmp_path, lines), columns="group=id")
    numbers = pa.table({"query": [*"acegi"], "positive": [*"bdfhj"], "id": [1.0, math.nan, 1.0, math.nan, None]})
    pq.write_table(numbers, tmp_path / "numbers.parquet")
    pairs = pairs_of(tmp_path / "numbers.parquet", columns="group=id")
    assert pairs.group_of.tolist() == [0, 1, 0, 2, 3], "some writers put a number that is none for a missing one"


# Batches.
def batches_of(pairs, rank=0, size=1, batch_size=4, chunk_size=0):
    config = replace(CONFIG, batch_size=batch_size, chunk_size=chunk_size)
    split = split_groups(pairs, validation=0, test=0, seed=0)
    readers = {"image": Reader(Pad(16, 3), 3), "text": Reader(partial(tokenize, max_words=12, buckets=64), 3)}
    rows = Partition.even(batch_size, size).rows(rank)
    return PairBatches(pairs, split.train, readers, config, rows, rows_of_chunks(rows, config, size))


def flat(batch):
    found = [batch.names]
    for chunk in batch.chunks:
        for inputs in (chunk.first, chunk.second):
            map_tensors(found.append, inputs)
    return found


def assert_equal(batch, other):
    for x, y in zip(flat(batch), flat(other), strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def many(tmp_path):
    """Return 40 pairs, of which each batch is made."""
    names = write_pictures(tmp_path, 40)
    (tmp_path / "pairs.csv").write_text("image,text\n" + "".join(f"{name},text {i}\n" for i, name in enumerate(names)))
    return pairs_of(tmp_path / "pairs.csv")


@pytest.mark.parametrize("first", [0, 3, 17])
def test_batches_are_equal_with_workers_from_any_step(many, first):
    prepare = batches_of(many, chunk_size=3)
    feed = Feed(prepare, stop=20, workers=2)
    for step in range(first, 20):
        assert_equal(feed.at(step), prepare(step))
    assert feed._ahead is None, "the last step ends the workers"
    assert_equal(feed.at(first), prepare(first))
    feed.close()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_parts_of_the_same_batch(many, size):
    whole = batches_of(many, batch_size=7)
    for step in (0, 5, 11):
        parts = [batches_of(many, rank, size, 7)(step) for rank in range(size)]
        images = torch.cat([part.chunks[0].first for part in parts])
        assert torch.equal(images, whole(step).chunks[0].first)
        assert torch.equal(torch.cat([part.names for part in parts]), whole(step).names)


def test_workers_start_in_other_ways_than_by_a_fork(many):
    """Python 3.14 does not fork: everything that a worker needs can be pickled."""
    prepare = batches_of(many)
    for step, batch in enumerate(prepared(prepare, range(2), workers=1, context="spawn")):
        assert_equal(batch, prepare(step))
    gc.collect()


def test_the_number_of_workers_follows_from_the_data_and_the_ranks(many, monkeypatch):
    monkeypatch.setattr("wholebatch._launch.cpus.usable_cpus", lambda: 6)
    sides = many.sides.values()
    assert [workers_of_a_rank(-1, sides, size) for size in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert workers_of_a_rank(-1, [Texts(["a"])], 1) == 0, "texts are read at once"
    assert workers_of_a_rank(0, sides, 1) == 0
    monkeypatch.setattr("wholebatch._launch.cpus.usable_cpus", lambda: 128)
    assert workers_of_a_rank(-1, sides, 1) == 8
    items = Items("image", many.sides["image"], many.order, "DATA")
    options = EmbedConfig(run=pathlib.Path("run"), data="DATA", batch_size=1)
    assert [_workers(items, replace(options, workers=workers)) for workers in (-1, 0, 3)] == [8, 0, 3]
    assert _workers(items, replace(options, batch_size=len(items))) == 0, "a single batch is read at once"


class Fails:
    """Prepare numbers, and fail at one in a way."""

    def __init__(self, how):
        self.how = how

    def __call__(self, key):
        if key == 3 and self.how == "mistake":
            raise UserError("pairs.csv, line 4: no picture")
        if key == 3 and isinstance(self.how, type):
            raise self.how("planted")
        if key == 3:
            os.kill(os.getpid(), self.how)
        return torch.tensor(key)


def test_a_mistake_in_a_worker_is_the_users(many):
    with pytest.raises(UserError, match=r"^pairs.csv, line 4: no picture$"):
        [*prepared(Fails("mistake"), range(9), workers=2)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, r"^was killed by SIGKILL \(was the machine out of memory\? fewer --workers need less\)$"),
        (signal.SIGBUS, r"^had too little shared memory; enlarge /dev/shm"),
    ],
)
def test_a_worker_that_dies_is_named(how, said):
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(WorkerDiedError, match=said):
        [*prepared(Fails(how), range(9), workers=2)]
    assert signal.getsignal(signal.SIGCHLD) == before, "no error is raised at any other place"


def test_an_error_of_the_program_in_a_worker_has_its_traceback():
    for kind in (RuntimeError, FileNotFoundError, ConnectionResetError):
        with pytest.raises(kind, match=r"Caught \w+ in DataLoader worker process 0(.|\n)*in __call__"):
            [*prepared(Fails(kind), range(9), workers=1)]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_workers_ignore_the_signals_of_their_rank():
    def dispositions(_):
        asked = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        return [signal.getsignal(each) == signal.SIG_IGN for each in asked], torch.get_num_threads()

    assert [*prepared(dispositions, range(1), workers=1)] == [([True] * 3, 1)]


def test_workers_are_sent_no_tensors():
    """A thread of the sender hands tensors over: a worker whose rank is killed meanwhile would print a traceback."""
    resource_sharer.stop()
    assert [*prepared(torch.Tensor.tolist, [*torch.arange(6).split(2)], workers=1)] == [[0, 1], [2, 3], [4, 5]]
    assert resource_sharer._resource_sharer._thread is None


def test_a_worker_is_silent_about_the_end_of_its_rank(capfd):
    def shown(kind):
        sys.excepthook(kind, kind("planted"), None)

    [*prepared(shown, [ConnectionResetError, EOFError, BrokenPipeError, ValueError], workers=1)]
    assert capfd.readouterr().err.strip() == "ValueError: planted"


# Mined negatives.
def write_queries(folder, lines):
    path = folder / "queries.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


NEGATIVES = [["n1", "n2"], [], ["p0", "n1"], ["n3"], None, [" ", "n4"]]


def of_rows(negatives, rows):
    return [negatives.of(torch.tensor([row]))[0] for row in rows]


def test_negatives_are_lists_or_columns_with_any_number_of_texts(tmp_path):
    lines = [{"query": f"q{i}", "positive": f"p{i}", "negatives": n} for i, n in enumerate(NEGATIVES)]
    expected = [["n1", "n2"], [], ["p0", "n1"], ["n3"], [], ["n4"]]
    pairs = pairs_of(write_queries(tmp_path, lines))
    assert pairs.names == ("query", "document")
    assert of_rows(pairs.negatives, range(6)) == expected
    texts, names = pairs.negatives.of(torch.tensor([2, 0]))
    assert texts == ["p0", "n1", "n1", "n2"]
    assert names[1] == names[2], "equal texts have equal numbers"
    positives = pairs.numbers["document"]
    assert names[0] == positives[0], "and so has the positive of another row"
    assert len({*positives.tolist(), *names.tolist()}) == 8
    with (tmp_path / "queries.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["anchor", "passage", "negative_1", "negative_2"])
        writer.writerows([f"q{i}", f"p{i}", *(n or []), *[""] * (2 - len(n or []))] for i, n in enumerate(NEGATIVES))
    columns = pairs_of(tmp_path / "queries.csv")
    assert of_rows(columns.negatives, range(6)) == expected
    assert torch.equal(columns.numbers["document"], positives)
    named = pairs_of(tmp_path / "queries.csv", columns="query=anchor,positive=passage,negatives=negative_2")
    assert of_rows(named.negatives, range(6)) == [["n2"], [], ["n1"], [], [], ["n4"]]


def test_a_negative_that_is_a_positive_of_the_same_id_is_none(tmp_path):
    """Also if it is a negative of another query in the batch."""
    lines = [
        {"query": "q0", "positive": "p0", "negatives": ["p1", "n"], "id": "7"},
        {"query": "q1", "positive": "p1", "negatives": ["n"], "id": "7"},
        {"query": "q2", "positive": "p2", "negatives": ["p1", "p0"], "id": "8"},
    ]
    path, rows = write_queries(tmp_path, lines), torch.tensor([0, 2])
    for columns, expected in (("group=id", [0, -1, 0, 0]), ("", [-1, -1, -1, 0])):
        pairs = pairs_of(path, columns=columns)
        false = FalseNegatives(pairs.numbers["query"], pairs.numbers["document"], pairs.group_of, pairs.ids)
        assert false.ids(pairs.negatives.of(rows)[1], rows, pairs.group_of[rows]).tolist() == expected


def test_rows_of_one_id_are_right_answers_of_each_other_and_of_no_others(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("query,positive,id\na,A,1\nb,B,1\nc,A,\nd,D,2\na,E,2\nf,F,\n")
    pairs = pairs_of(path, columns="group=id")
    assert pairs.group_of.tolist() == [0, 0, 0, 0, 0, 1], "all are connected but the last"
    stated = stated_pairs(pairs, pairs.order)
    asked, sought = (side.items(rows) for side, rows in zip(pairs.sides.values(), stated.rows, strict=True))
    found = {(asked[i], sought[j]) for i, j in stated.right.T.tolist()}
    assert found == {*zip("aabbcddaaf", "ABABADEDEF", strict=True)}
    assert len(found) == stated.right.shape[1]


def test_data_without_any_negative_have_none(tmp_path):
    lines = [{"query": f"q{i}", "positive": f"p{i}", "negatives": []} for i in range(4)]
    assert pairs_of(write_queries(tmp_path, lines)).negatives is None


def test_negatives_of_another_type_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"query": ["a", "b"], "positive": ["c", "d"], "negatives": [[1], [2]]})
    pq.write_table(table, tmp_path / "numbers.parquet")
    with pytest.raises(UserError, match=r"column 'negatives' must hold texts, or lists of texts, .* got list<.*int64>"):
        pairs_of(tmp_path / "numbers.parquet")


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_a_negative_that_equals_a_positive_is_no_candidate_of_its_query(tmp_path, chunk_size):
    """The loss is compared with the definition, written out for each query."""
    lines = [
        {"query": "red fox", "positive": "a fox", "negatives": ["a dog", "two trees"]},
        {"query": "boat", "positive": "two trees", "negatives": ["a fox"]},
        {"query": "snow", "positive": "cold", "negatives": []},
        {"query": "sun", "positive": "warm", "negatives": ["a dog", "cold", "moon"]},
        *({"query": f"q{i}", "positive": f"p{i}"} for i in range(8)),
    ]
    data = write_queries(tmp_path, lines)
    config = TrainConfig(
        data=str(data), model=SMALL_MODEL, batch_size=9, validation_texts=1, test_texts=1, chunk_size=chunk_size
    )
    config, (pairs, split) = load_data(config, 1)
    task = make_task(config, (pairs, split), torch.device("cpu"), rank=0, size=1)
    loss = task.add_gradients(0).item()

    order = Order(split.train, batch_size=9, seed=0)
    rows, _ = batch_of_step(order, pairs, step=0, seed=0)
    queries, documents = (side.items(rows) for side in pairs.sides.values())
    own = of_rows(pairs.negatives, rows.tolist())
    negatives = [text for each in own for text in each]
    assert set(negatives) & set(documents), "a case to leave out"
    model = task._encoder
    prepare = model.encoder("query").prepare
    with torch.no_grad():
        x, y, z = (model.encode(side, prepare(texts)) for side, texts in
                   (("query", queries), ("document", documents), ("document", negatives)))  # fmt: skip
        scale = model.logit_scale

        def definition(*, leave_out):
            terms = []
            for i, right in enumerate(documents):
                allowed = [j for j, text in enumerate(negatives) if not (leave_out and text == right)]
                logits = scale * torch.cat([y @ x[i], z[allowed] @ x[i]])
                terms.append(logits.logsumexp(0) - logits[i])
            return torch.stack(terms).mean().item()

        numbers = {text: number for number, text in enumerate(dict.fromkeys([*documents, *negatives]))}
        ids = [torch.tensor([numbers[text] for text in texts]) for texts in (documents, negatives)]
        reference = wb.reference.info_nce_loss(
            x, y, logit_scale=scale, negatives=z, query_ids=ids[0], negative_ids=ids[1]
        ).item()
    assert loss == pytest.approx(definition(leave_out=True), rel=1e-5)
    assert reference == pytest.approx(definition(leave_out=True), rel=1e-5)
    assert abs(loss - definition(leave_out=False)) > 1e-3, "a positive among the negatives would show"


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("t.tsv", 'image\ttext\n0.png\t"one\n1.png\ttwo"\n2.png\t"all"\n', ['"one', 'two"', "all"]),
        ("a space.csv", 'image, text\n0.png, "x, big"\n1.png, b\n', ["x, big", "b"]),
        ("no name.csv", "image,text,,\n0.png,a,,\n1.png,b,,1\n", ["a", "b"]),
        ("no values.csv", "image,text\n0.png,a\n,\n1.png,b\n , \n,\n", ["a", "b"]),
        ("excel.csv", "sep=;\nimage;text\n0.png;a, b\n1.png;c\n", ["a, b", "c"]),
        ("long.csv", "image,text\n0.png," + "x" * 200_000 + "\n", ["x" * 200_000]),
    ],
    ids=lambda of: of if isinstance(of, str) and "." in of[:20] and "\n" not in of else "",
)  # fmt: skip
def test_tables_as_other_programs_write_them(tmp_path, name, content, texts):
    (tmp_path / name).write_text(content)
    table = pa.Table.from_batches(read_separated(tmp_path / name))
    assert table["text"].to_pylist() == texts
    assert table["image"].to_pylist() == [f"{number}.png" for number in range(len(texts))]
    assert table.column_names[:2] == ["image", "text"]
    assert csv.field_size_limit() == 131_072


def test_no_number_is_no_word(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"image": "0.png", "text": "a"}\n{"image": "1.png", "text": NaN}\n')
    with pytest.raises(UserError, match=r"t\.jsonl, line 2: not JSON \(NaN is no value; write null"):
        list(read_json_lines(tmp_path / "t.jsonl"))

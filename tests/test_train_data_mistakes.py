"""Mistakes in a user's data: one line with the file, the place in it, and the fix."""

import csv
import json
import os
import re
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from data_sets import FORMS, TEXTS, add, picture, png, shard, write_pictures
from PIL import Image

from wholebatch.__main__ import main
from wholebatch._base.bounded_json import sealed, unsealed
from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train import launch
from wholebatch_train.config import TrainConfig
from wholebatch_train.data.cache import cache_folder
from wholebatch_train.data.from_table import table_pairs
from wholebatch_train.data.load import load_data
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.reading import open_picture
from wholebatch_train.data.roles import asked_roles
from wholebatch_train.data.sides import FilePictures
from wholebatch_train.run.record import read_record

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def error_of(data, **settings):
    """Return the line about the data, after all that is read before the first step."""
    with pytest.raises(UserError) as caught:
        load_data(replace(CONFIG, data=str(data), **settings), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SEPARATED = [
    ("", "holds no rows"),
    ("\n\n", "holds no rows"),
    ("image,text\n", "holds no rows"),
    ("picture,words\nimages/0.png,A\n", r"has no column for the text; its columns are picture, words. Name it: "
     r"--columns text=NAME \(usual names need no option: text, caption"),
    ("file,caption,title\nimages/0.png,A,B\n", r"several columns that could be the text: caption, title; name one, "
     r"for instance --columns text=caption"),
    ("text,url\nA,https://example.org/a.png\n", r"addresses of images in the column 'url'; .*img2dataset writes tar"),
    ("image,text\nhttps://example.org/a.png,A\n", r"line 2: an address is no picture; download the pictures first"),
    ("image,text\nimages/0.png,A, or Alpha\n", r"pairs.csv, line 2: more values than columns; a text that holds a "
     r"comma is written in double quotes"),
    ('image,text\nimages/0.png,"A\nB"\n\nimages/1.png,A,B\n', "pairs.csv, line 5: more values than columns"),
    ("image,text\nimages/0.png,A\nimages/1.png\n", r"line 3: the text, column 'text', is empty"),
    ("image,text\nimages/0.png,A\nimages/1.png,  \n", r"line 3: the text, column 'text', is empty"),
    ("image,text\n,A\n", r"line 2: the image, column 'image', is empty"),
    ("image,text,text\nimages/0.png,A,B\n", "line 1: the column 'text' appears twice; rename one of them"),
    ("image,text\nimages/none.png,A\n", r"line 2: there is no image '.*images/none.png'; --skip-bad leaves such rows"),
    ("image,text\nimages/a\0b.png,A\n", r"line 2: a path cannot hold the character of code 0"),
    ('image,text\nimages/0.png,"A\n', r"pairs.csv, line 2: not a CSV file: unexpected end of data"),
    ("image,text\nimages/0.png,A\n", r"--data has 1 group of rows, less 1 for validation and 1 for test "
     r"\(--validation-texts, --test-texts\); expected at least two to train on"),
    ("image,text\n" + "".join(f"images/{i}.png,A\n" for i in range(6)), "--data has 1 group of rows, less"),
    ("image,text\n" + "".join(f"images/0.png,t{i}\n" for i in range(6)), "share a text or a picture count once$"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), SEPARATED)
def test_tables(tmp_path, content, message):
    write_pictures(tmp_path)
    (tmp_path / "pairs.csv").write_text(content, newline="")
    assert re.search(message, error_of(tmp_path / "pairs.csv"))


@pytest.mark.parametrize(
    ("content", "columns", "common"),
    [
        ("image,text,id\n" + "".join(f"images/{i}.png,t{i},7\n" for i in range(6)), "group=id",
         "a text, a picture or a value of the column for group"),
        ("query,positive,id\n" + "".join(f"q{i},d{i},7\n" for i in range(6)), "group=id",
         "a text or a value of the column for group"),
        ("query,positive,id\n" + "".join(f"q,d{i},7\n" for i in range(6)), "", "a text"),
    ],
)  # fmt: skip
def test_too_few_groups_are_explained_by_the_columns_that_join_them(tmp_path, content, columns, common):
    write_pictures(tmp_path)
    path = tmp_path / "pairs.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=f"--data has 1 group of rows, .* on: rows that share {common} count once$"):
        load_data(replace(CONFIG, data=str(path), columns=columns), 1)


def test_tables_that_are_not_utf8(tmp_path):
    for name, head in (("pairs.csv", b"image,text\na.png,A\n"), ("pairs.jsonl", b'{"image": "a", "text": "A"}\n\n')):
        (tmp_path / name).write_bytes(head + b"caf\xe9.png,B\n")
        assert re.search(
            rf"{name}, line 3: not UTF-8 text \(byte 0xe9 at column 4\); save the file as UTF-8",
            error_of(tmp_path / name),
        )


ROW = '{"image": "images/0.png", "text": "A"}\n'
JSON_LINES = [
    ("", "holds no rows"),
    ("{\n", "line 1: not JSON"),
    (ROW + "\n[1, 2]\n", r"line 3: expected an object, as in .*; got \[1, 2\]"),
    (ROW + '{"image": "images/1.png", "text": "\\ud800"}\n', "line 2: half of a surrogate pair, .*; write the whole"),
    (ROW + '{"image": 3, "text": "A"}\n', "line 2: there is no image '.*3'"),
    (ROW + '{"image": "images/1.png", "text": ["A"]}\n', "line 1: 'text' must be a list of texts, as in other lines"),
    (ROW + '{"image": "images/1.png", "text": {"en": "A"}}\n', r"column 'text' must hold a text in each line, or a "
     r"list of texts in each line; line 2 has an object"),
    ('{"query": "a", "positive": "b", "negatives": ["c", 1]}\n', "line 1 has a list of other things than texts"),
    ('{"query": "a", "positive": "b", "negatives": ["c"]}\n{"query": "d", "positive": "e", "negatives": "f"}\n',
     "line 2: 'negatives' must be a list of texts, as in other lines; got 'f'"),
    ('{"query": "a", "document": 1}\n{"query": "b"}\n', "line 2: the positive, column 'document', is empty"),
    ('{"query": "a", "answer": "b", "document": "c"}\n', "could be the positive: document, answer"),
    ("[" * 100_000 + "\n", "line 1: not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), JSON_LINES)
def test_lines_of_json(tmp_path, content, message):
    write_pictures(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(content)
    assert re.search(message, error_of(tmp_path / "pairs.jsonl"))


def test_values_that_no_role_needs_may_be_anything(tmp_path):
    names = write_pictures(tmp_path)
    rows = [
        {"image": name, "text": f"t{i}", "boxes": [[1, 2]] * (i % 3), "about": {"id": i} if i else None, "ok": True}
        for i, name in enumerate(names)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(table_pairs(open_table(str(tmp_path / "pairs.jsonl")), CONFIG)) == 6


def test_a_type_that_changes_far_down(tmp_path, monkeypatch):
    """The rows before are already written."""
    monkeypatch.setattr("wholebatch_train.data.text_files._ROWS", 2)
    rows = [{"query": f"q{i}", "positive": f"p{i}", "negatives": ["n"]} for i in range(4)]
    for last, message in (
        ({"negatives": "n"}, r"lines 5 to 5: 'negatives' is not of the type of the lines before them; expected a text"),
        ({"negatives": [1]}, "lines 5 to 5: 'negatives' is not of the type"),
    ):
        lines = [*rows, {"query": "q", "positive": "p", **last}]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        assert re.search(message, error_of(tmp_path / "q.jsonl"))
    lines = [*rows, {"query": "q", "positive": "p", "note": 1}, {"query": "r", "positive": "s", "negatives": None}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    pairs = table_pairs(open_table(str(tmp_path / "q.jsonl")), CONFIG)
    assert [len(pairs.negatives.of(torch.tensor([row]))[0]) for row in (3, 4, 5)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            "image=nowhere",
            r"--columns: .*pairs.csv has no column 'nowhere' for image; its "
            "columns are image, text; name one of them: --columns image=NAME$",
        ),
        ("image=imege", r"has no column 'imege' for image; its columns are image, text; did you mean 'image'\?"),
        ("picture=image", r"--columns must be ROLE=COLUMN,... with the roles image, text, .* got 'picture=image'"),
        ("image", "got 'image'"),
        ("image=", "got 'image='"),
        ("text=a,text=b", "gives 'text' more than one column"),
        ("text=a+b", "gives 'text' more than one column; only negatives may have several, joined by +"),
    ],
)
def test_columns_of_the_option(tmp_path, columns, message):
    assert re.search(message, error_of(FORMS["csv"](tmp_path), columns=columns))
    assert asked_roles("") == {}


# Paths.
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.csv", "there is no file or folder '.*none.csv'$"),
        ("none", r"there is no file or folder '.*none'; it must be 'glyphs', a folder or a .csv, .tsv, .jsonl"),
        ("pairs.txt", r"--data must be 'glyphs', a folder or a .csv, .* file, got '.*pairs.txt'"),
        ("pairs.tar.gz", "is compressed, and one cannot jump in it; decompress it to a .tar file"),
        ("p-*.tar.gz", "is compressed"),
        ("compressed", "is compressed"),
        ("{5..3}.tar", "must be a range of at most a million shards, upwards"),
        ("s-{000..003}.tar", r"names 4 shards, 3 of which do not exist: .*s-001.tar"),
        ("s-*9.tar", r"names 1 shards, 1 of which do not exist"),
        ("empty", r"the folder '.*empty' holds no pictures, no .tar shards and no saved data set; expected files such"),
        ("pipe.csv", "must be a file or a folder; '.*pipe.csv' is neither"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_paths(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").write_text("nothing here")
    (tmp_path / "compressed").mkdir()
    for file in ("pairs.txt", "pairs.tar.gz", "p-0.tar.gz", "compressed/0.tar.gz"):
        (tmp_path / file).write_text("x")
    os.mkfifo(tmp_path / "pipe.csv")
    shard(tmp_path / "s-000.tar", range(1))
    assert re.search(message, error_of(tmp_path / name))


def test_files_that_are_not_parquet(tmp_path):
    (tmp_path / "a.parquet").write_text("image,text\n")
    assert "a.parquet cannot be read as a parquet file: " in error_of(tmp_path / "a.parquet")
    for image, message in (
        ([1.5] * 4, r"column 'image' must hold paths or bytes of pictures to be the image; got double"),
        ([{"bytes": png(1), "path": None}] * 3 + [{"bytes": None, "path": None}], "row 4: the image, .* is empty"),
        ([png(1)] * 3 + [None], "row 4: the image, column 'image', is empty"),
        ([png(1)] * 3 + [b"nonsense"], "row 4: the picture cannot be read as an image"),
        ([{"bytes": None, "path": "none.png"}] * 4, "row 1: there is no image '.*none.png'"),
    ):
        pq.write_table(pa.table({"image": image, "text": list("abcd")}), tmp_path / "a.parquet")
        assert re.search(message, error_of(tmp_path / "a.parquet", image_size=0))
    pq.write_table(pa.table({"image": [png(1)] * 4, "text": [0.5] * 4}), tmp_path / "a.parquet")
    assert "the column 'text' must hold texts to be the text; got double" in error_of(tmp_path / "a.parquet")


def test_folders(tmp_path):
    where = FORMS["texts beside"](tmp_path)
    (where / "images" / "3.txt").unlink()
    assert re.search(r"images/3.png: there is no text beside it, 'images/3.txt'; other pictures", error_of(where))
    for content, message in ((b" \n", "3.txt is empty"), (b"\xff", "3.txt is not UTF-8 text"), (b"x" * 2**21, "bytes")):
        (where / "images" / "3.txt").write_bytes(content)
        assert re.search(message, error_of(where))
    (where / "images" / "3.txt").write_text("ok")
    (where / "images" / os.fsdecode(b"\xff.png")).write_bytes(png(1))
    assert re.search(r"the file name b'images/\\xff.png' is not UTF-8; rename the file", error_of(where))


def test_a_folder_that_was_saved_by_datasets_and_is_damaged(tmp_path):
    (tmp_path / "state.json").write_text("{")
    pytest.importorskip("datasets")
    assert "cannot be loaded as a saved data set: " in error_of(tmp_path)


# Shards.
def edited(path, edit):
    content = bytearray(path.read_bytes())
    edit(content)
    path.write_bytes(content)
    return path


def cut(size):
    def edit(content):
        del content[size:]

    return edit


def nonsense_at(place):
    def edit(content):
        content[place : place + 512] = b"\x01" * 512

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (cut(0), "cannot be read as a tar file: empty file"),
        (cut(700), "cannot be read as a tar file: .*; is it complete?"),  # inside of the first picture
        (cut(2048 + 100), "cannot be read as a tar file: .*; is it complete?"),  # inside of a header
        (nonsense_at(0), "cannot be read as a tar file"),
        (nonsense_at(1024), "no header at byte 1024; is it complete?"),  # tarfile takes this for the end
    ],
)
def test_damaged_shards(tmp_path, edit, message):
    path = shard(tmp_path / "a.tar", range(6))
    with tarfile.open(path) as tar:
        assert [member.offset for member in tar][1] == 1024, "the tests above know where headers are"
    assert re.search(message, error_of(edited(path, edit)))


def test_a_shard_that_is_cut_between_two_members_is_noticed_by_its_digest(tmp_path):
    """Nothing in the file tells; but a resumed run and the other ranks have another hash."""
    path = shard(tmp_path / "a.tar", range(6))
    with tarfile.open(path) as tar:
        end = [member.offset for member in tar][6]
    whole = table_pairs(open_table(str(path)), CONFIG)
    part = table_pairs(open_table(str(edited(path, cut(end)))), CONFIG)
    assert (len(whole), len(part)) == (6, 2)
    assert whole.digest != part.digest


def test_members_that_climb_out_are_names_and_nothing_is_written(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    with tarfile.open(inner / "a.tar", "w") as tar:
        for number in range(6):
            add(tar, f"../../{number}.png", png(number))
            add(tar, f"../../{number}.txt", TEXTS[number].encode())
        link = tarfile.TarInfo("9.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    pairs = table_pairs(open_table(str(inner / "a.tar")), CONFIG)
    assert len(pairs) == 6, "a link is no picture"
    assert pairs.sides["image"].items(torch.arange(6))[0].size == picture(0).size
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds no pictures, such as 000017.jpg; it has no members"),
        ({"0.heic": b"x", "0.txt": b"a"}, r"holds no pictures, .*; its members end in .heic, .txt"),
        ({"0.png": png(0), "0.jpg": png(0)}, "0.png and 0.jpg are two pictures of one row"),
        ({"0.png": png(0), "0.txt": b"a", "0.text": b"b"}, "0.txt and 0.text are two texts of one row"),
        ({"0.cls": b"a", "0.label": b"a", "0.png": png(0)}, "0.cls and 0.label are two labels of one row"),
        ({"0.png": png(0), "0.txt": b"a", "1.txt": b"b"}, "a.tar, 1.txt: no picture stands beside it; --skip-bad"),
        ({"0.png": png(0), "0.json": b'{"text": "a"}', "1.png": png(1), "1.json": b"\xff"},
         "a.tar, 1.png: 1.json: not UTF-8"),
        ({"0.png": png(0), "0.json": b"{"}, r"a.tar, 0.json: not JSON \("),
        ({"0.png": png(0), "0.json": b"[]"}, "0.json: expected a JSON object"),
        ({"0.png": png(0), "0.json": b'{"text": "\\udfff"}'}, "0.json: half of a surrogate pair in 'text'"),
        ({"0.png": png(0), "0.txt": b"\xff"}, "0.txt: not UTF-8 text"),
        ({"0.png": png(0), "0.txt": b"x" * 2**21}, "0.txt: 2097152 bytes; expected a text of at most 1048576"),
        ({"0.png": png(0), "0.txt": b"a", "1.png": png(1)}, r"a.tar, 1.png: the text, column 'text', is empty"),
        ({"0.png": png(0), "1.png": png(1), "0.txt": b"a", "1.txt": b"b"}, r"a.tar, 0.txt: other members of its row "
         r"stand before other rows; the members of a row must be neighbors: .* \(tar --sort=name\)$"),
        ({"0.png": png(0), "0.txt": b"a", "1.png": png(1), "0.json": b"{}", "0.cls": b"1"}, "0.cls: other members"),
        ({"0.png": b"no picture", "0.txt": b"a", "1.png": png(1), "1.txt": b"b", "2.png": png(2), "2.txt": b"c",
          "3.png": png(3), "3.txt": b"d"}, "a.tar, 0.png: the picture cannot be read as an image"),
    ],
)  # fmt: skip
def test_members_of_shards(tmp_path, members, message):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members.items():
            add(tar, name, content)
    assert re.search(message, error_of(tmp_path / "a.tar", image_size=0))


@pytest.mark.parametrize("own", ["0.txt", "0.text"])
@pytest.mark.parametrize("first", [True, False])
def test_a_members_own_text_comes_before_a_field_of_json(tmp_path, own, first):
    members = {own: b"own", "0.json": b'{"text": "of json", "width": 7}'}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in [*members][:: 1 if first else -1]:
            add(tar, name, members[name])
        add(tar, "0.png", png(0))
    table = open_table(str(tmp_path / "a.tar"))
    assert [table.arrow[name].to_pylist() for name in ("text", "width")] == [["own"], ["7"]]
    assert table.where(0).endswith("a.tar, 0.png")


def test_every_row_of_a_shard_that_cannot_be_used_is_left_out_with_its_reason(tmp_path):
    members = {
        "0.png": png(0),
        "0.json": b'{"text": "a"}',
        "1.json": b'{"text": "b"}',
        "2.png": png(2),
        "2.json": b"\xff",
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members.items():
            add(tar, name, content)
        add(tar, "3.png", png(3))
        add(tar, "3.json", b'{"text": "d", "\\u0000reason": "none"}')
    said = []
    pairs = table_pairs(open_table(str(tmp_path / "a.tar")), replace(CONFIG, skip_bad=True), said.append)
    assert {each.place.rpartition(" ")[2]: each.reason for each in pairs.left_out} == {
        "1.json": "no picture stands beside it",
        "2.png": "2.json: not UTF-8 text: invalid start byte at byte 0",
    }
    assert sorted(pairs.sides["text"].items(pairs.order)) == ["a", "d"]


def test_a_row_without_values_is_said_once(tmp_path):
    path = with_bad_pictures(tmp_path, bad=(3,))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:8], b"\xff,x\n", *lines[9:]]))
    said = []
    pairs = table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True), said.append)
    assert len(pairs.left_out) == 2
    assert sum("line 9" in line for line in said) == 1
    assert [line for line in said if "left out" in line] == [
        "1 of 20 rows are left out, because they have no text that can be read:",
        "1 of 20 rows are left out, because their picture cannot be read:",
    ]


def test_a_shard_that_is_removed_after_the_start(tmp_path):
    path = shard(tmp_path / "a.tar", range(6))
    pairs = table_pairs(open_table(str(path)), CONFIG)
    path.unlink()
    with pytest.raises(UserError, match=r"a.tar, part/000002.png: there is no shard '.*a.tar' any more; --skip-bad"):
        pairs.sides["image"].items(torch.tensor([2]))
    assert "there is no file or folder" in error_of(path)


def test_a_link_to_nothing_is_not_what_was_meant(tmp_path):
    (tmp_path / "pairs.csv").symlink_to("nothing")
    assert error_of(tmp_path / "pairs.csv").endswith(f"there is no file or folder {str(tmp_path / 'pairs.csv')!r}")
    (tmp_path / "pair.csv").touch()
    assert error_of(tmp_path / "pairs.csv").endswith(f"; did you mean {str(tmp_path / 'pair.csv')!r}?")


# Pictures that cannot be read.
def with_bad_pictures(folder, bad=(3, 7, 11)):
    names = write_pictures(folder, 20)
    for place, how in zip(bad, ("missing", "text", "cut", *["text"] * 17), strict=False):
        file = folder / names[place]
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(b"not a picture" if how == "text" else file.read_bytes()[:100])
    path = folder / "pairs.csv"
    path.write_text("image,text\n" + "".join(f"{name},text {i}\n" for i, name in enumerate(names)))
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_left_out_counted_and_listed(tmp_path, workers):
    said = []
    path = with_bad_pictures(tmp_path)
    config = replace(CONFIG, data=str(path), skip_bad=True, workers=workers)
    _, (pairs, split) = load_data(config, 1, said.append)
    assert len(pairs) == 17
    rows = torch.cat([pairs.rows(part) for part in (split.train, split.validation, split.test)])
    assert sorted(rows.tolist()) == [row for row in range(20) if row not in (3, 7, 11)]
    place = said.index("3 of 20 rows are left out, because their picture cannot be read:")
    assert re.fullmatch(r"  .*pairs.csv, line 5: there is no image '.*3.png'", said[place + 1])
    assert re.fullmatch(r"  .*pairs.csv, line 9: '.*7.png' cannot be read as an image \(.*\)", said[place + 2])
    assert re.fullmatch(r"  .*pairs.csv, line 13: '.*11.png' cannot be read as an image \(.*\)", said[place + 3])
    (tmp_path / "images" / "7.png").write_bytes(png(7))
    _, (again, _) = load_data(config, 1)
    assert again.digest != pairs.digest, "a picture that has become readable makes other data"


def test_examples_are_rows_that_are_used(tmp_path):
    said = []
    load_data(replace(CONFIG, data=str(with_bad_pictures(tmp_path, bad=(0, 1))), skip_bad=True), 1, said.append)
    examples = [line for line in said if line.startswith("for example ")]
    assert [f"text {number}" in example for number, example in zip((2, 3, 4), examples, strict=True)] == [True] * 3


def test_a_place_is_one_path_and_is_said_once(tmp_path):
    folder = tmp_path / "photos"
    (folder / "cats").mkdir(parents=True)
    for number in range(4):
        (folder / "cats" / f"{number}.png").write_bytes(png(number))
    (folder / "cats" / "2.png").write_bytes(b"not a picture")
    side = FilePictures(open_table(str(folder)), "image")
    place = f"{folder}/cats/2.png"
    with pytest.raises(UserError) as caught:
        side.read(2)
    assert (
        str(caught.value)
        == f"{place}: the picture cannot be read as an image (it is no picture of a known format, such as PNG or JPEG)"
    )
    (folder / "cats" / "2.png").unlink()
    with pytest.raises(UserError) as caught:
        side.read(2)
    assert str(caught.value) == f"{place}: there is no image"
    (folder / "cats" / "1.txt").write_text("a cat")
    assert error_of(folder).startswith(f"{folder}/cats/0.png: there is no text beside it")

    shards = tmp_path / "shards"
    shards.mkdir()
    shard(shards / "000.tar", range(2))
    for data in (shards, shards / "000.tar", shards / "{000..000}.tar"):
        assert open_table(str(data)).where(1) == f"{shards}/000.tar, part/000001.png"

    table = with_bad_pictures(tmp_path)
    with pytest.raises(UserError) as caught:
        FilePictures(open_table(str(table)), "image").read(7)
    assert str(caught.value).count("7.png") == 1
    assert str(caught.value).startswith(f"{table}, line 9: '{tmp_path}/images/7.png' cannot be read as an image (")


@pytest.fixture
def pictures_read(monkeypatch):
    """Return a list that gets the row of each picture that is read."""
    rows, original = [], FilePictures.read

    def read(self, row):
        rows.append(row)
        return original(self, row)

    monkeypatch.setattr(FilePictures, "read", read)
    return rows


def test_pictures_are_decoded_at_the_first_start_only_until_one_changes(tmp_path, pictures_read):
    path = with_bad_pictures(tmp_path)

    def start():
        pictures_read.clear()
        pairs = table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True))
        assert [each.place for each in pairs.left_out] == [f"{path}, line {line}" for line in (5, 9, 13)]
        assert "there is no image" in pairs.left_out[0].reason
        return len(pictures_read)

    assert [start() for _ in range(3)] == [23, 3, 3], "those that cannot be read are tried again"
    os.utime(tmp_path / "images" / "4.png", (5, 5))
    assert [start() for _ in range(2)] == [23, 3]
    (kept,) = cache_folder().glob("*.unreadable")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-5], b"[]", whole.replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little"))):
        assert damaged != whole
        kept.write_bytes(damaged)
        assert [start() for _ in range(2)] == [23, 3]
    assert kept.read_bytes() == whole


def test_ranks_that_start_together_decode_each_picture_once(tmp_path, pictures_read):
    """Threads stand for the processes of a machine: each opens the lock file for itself."""
    path, found = with_bad_pictures(tmp_path), []
    config = replace(CONFIG, skip_bad=True)
    start = [
        threading.Thread(target=lambda: found.append(table_pairs(open_table(str(path)), config))) for _ in range(3)
    ]
    for thread in start:
        thread.start()
    for thread in start:
        thread.join()
    assert sorted(pictures_read) == sorted([*range(20), *3 * [3, 7, 11]]), "bad ones by each as well"
    assert [len(pairs) for pairs in found] == [17] * 3
    assert len({pairs.digest for pairs in found}) == 1


@pytest.mark.parametrize("form", ["bytes", "paths of datasets", "shard"])
def test_pictures_in_a_parquet_file_or_a_shard_are_decoded_again_if_their_file_changes(tmp_path, pictures_read, form):
    names = write_pictures(tmp_path)
    (tmp_path / names[2]).write_bytes(b"no picture")
    content = [(tmp_path / name).read_bytes() for name in names]
    if form == "shard":
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as tar:
            for i, each in enumerate(content):
                add(tar, f"{i}.png", each)
                add(tar, f"{i}.txt", f"t{i}".encode())
    else:
        path = tmp_path / "a.parquet"
        structs = [{"bytes": None, "path": name} for name in names[:-1]] + [{"bytes": content[-1], "path": None}]
        pq.write_table(pa.table({"image": content if form == "bytes" else structs, "text": list("abcdef")}), path)

    def start():
        pictures_read.clear()
        assert len(table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True)).left_out) == 1
        return len(pictures_read)

    assert [start() for _ in range(2)] == [7, 1]
    os.utime(tmp_path / names[0] if form == "paths of datasets" else path, (5, 5))
    assert [start() for _ in range(2)] == [7, 1]


def test_bad_pictures_without_a_cache_are_found_at_each_start(tmp_path, monkeypatch, pictures_read):
    def fails(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    path, said = with_bad_pictures(tmp_path), []
    monkeypatch.setattr("wholebatch_train.data.cache.write_tensors", fails)
    for _ in range(2):
        table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True), said.append)
    assert len(pictures_read) == 46
    assert (
        said.count("--skip-bad reads all pictures at each start: the cache cannot be written (Read-only file system)")
        == 2
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_system_is_tried_again_at_the_next_start(tmp_path, monkeypatch, workers):
    """Such as a lost server of files, which changes no size and no time of any file when it comes back."""
    path, original = with_bad_pictures(tmp_path), Image.open

    def fails(file, *args, **named):
        if Path(getattr(file, "name", file)).name in ("4.png", "5.png"):
            raise OSError(5, "Input/output error", str(file))
        return original(file, *args, **named)

    def lines():
        pairs = table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True, workers=workers))
        return [int(each.place.rpartition(" ")[2]) for each in pairs.left_out]

    with monkeypatch.context() as broken:
        broken.setattr(Image, "open", fails)
        assert lines() == [5, 6, 7, 9, 13]
        assert lines() == [5, 6, 7, 9, 13]
    assert lines() == [5, 9, 13]


def test_another_pillow_reads_all_pictures_again(tmp_path, monkeypatch, pictures_read):
    path = with_bad_pictures(tmp_path)
    for version, reads in (("1", 23), ("1", 3), ("2", 23)):
        monkeypatch.setattr("PIL.__version__", version)
        pictures_read.clear()
        table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True))
        assert len(pictures_read) == reads


def test_a_long_list_of_bad_pictures_is_cut_short(tmp_path):
    said = []
    load_data(replace(CONFIG, data=str(with_bad_pictures(tmp_path, range(12))), skip_bad=True), 1, said.append)
    place = said.index("12 of 20 rows are left out, because their picture cannot be read:")
    assert said[place + 6] == "  and 7 more"


def test_only_bad_pictures(tmp_path):
    path = with_bad_pictures(tmp_path, range(20))
    assert re.search(
        r"none of the 20 pictures of --data can be read; the first: .*line 2: there is no image",
        error_of(path, skip_bad=True),
    )


# Whole runs.
OPTIONS = [
    "--image-size", "16", "--image-channels", "3", "--batch-size", "4", "--validation-texts", "2", "--test-texts", "2",
    "--no-audit", "--no-tensorboard", "--model.embedding-size", "8", "--model.image-width", "8",
    "--model.text-width", "8", "--model.text-buckets", "64", "--workers", "1",
]  # fmt: skip


def good(folder):
    names = write_pictures(folder, 20)
    (folder / "pairs.csv").write_text("image,text\n" + "".join(f"{name},text {i}\n" for i, name in enumerate(names)))
    return folder / "pairs.csv"


def one_line(capsys, code, *argv):
    capsys.readouterr()
    assert main(["train", *argv]) == code
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    return errors


@pytest.mark.usefixtures("nothing_is_drawn")
def test_a_picture_that_is_none_ends_a_run_with_one_line_from_its_worker(capsys, tmp_path):
    path = good(tmp_path)
    shutil.rmtree(tmp_path / "images")
    for number in range(20):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / f"images/{number}.png").write_text(f"text {number}")
    line = one_line(capsys, 2, "--data", str(path), "--run-folder", str(tmp_path / "run"), "--steps", "3", *OPTIONS)
    assert re.search(r"line \d+: '.*\.png' cannot be read as an image \(.*\); --skip-bad leaves such rows out", line)


@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.parametrize("task", ["retrieve", "identify"])
def test_the_run_folder_lists_all_rows_that_are_left_out(capsys, tmp_path, task):
    path, run = with_bad_pictures(tmp_path, range(7)), tmp_path / "run"
    if task == "identify":
        path.write_text(re.sub(r"text (\d+)", lambda found: f"class {int(found[1]) % 3}", path.read_text()))
    (tmp_path / "images" / "0.png").write_bytes(b'a, "b"')
    options = [*OPTIONS[:-2], "--workers", "0", "--steps", "2"]
    argv = ["--data", str(path), "--run-folder", str(run), "--skip-bad", "--task", task, *options]
    assert main(["train", *argv]) == 0
    assert f"data: {run / 'left_out.csv'} lists the 7 rows that are left out" in capsys.readouterr().out
    with (run / "left_out.csv").open(newline="") as file:
        rows = [*csv.reader(file)]
    assert rows[0] == ["place", "reason"]
    assert [place for place, _ in rows[1:]] == [f"{path}, line {line}" for line in range(2, 9)]
    assert "cannot be read as an image" in rows[1][1]
    before = (run / "left_out.csv").stat().st_mtime_ns
    assert main(["train", "--resume", str(run)]) == 0
    assert (run / "left_out.csv").stat().st_mtime_ns == before


@pytest.mark.usefixtures("nothing_is_drawn")
def test_a_run_is_not_resumed_with_other_data(capsys, tmp_path):
    path, run = good(tmp_path), tmp_path / "run"
    assert main(["train", "--data", str(path), "--run-folder", str(run), "--steps", "3", *OPTIONS]) == 0
    lines = path.read_text().splitlines(keepends=True)
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != "lock"}
    path.write_text("".join([*lines[:5], *lines[6:]]))
    line = one_line(capsys, 2, "--resume", str(run))
    assert re.search(
        r"--resume continues with the data of the run: '.*pairs.csv' held 20 pairs in 20 groups, hash \w{12}, and "
        r"holds 19 pairs in 19 groups, hash \w{12} now. Restore the data, or start a new run",
        line,
    )
    path.write_text("".join(lines))
    (tmp_path / "images" / "4.png").write_bytes(png(4) + b"\0")
    assert "held 20 pairs in 20 groups, hash" in one_line(capsys, 2, "--resume", str(run))
    (tmp_path / "images" / "4.png").write_bytes(png(4))
    assert {name: (run / name).read_bytes() for name in before} == before, "nothing was changed"
    assert main(["train", "--resume", str(run), "--workers", "0"]) == 0, "the time of a file does not matter"


@pytest.mark.usefixtures("nothing_is_drawn")
def test_a_damaged_or_exchanged_hash_of_the_data_is_refused(capsys, tmp_path):
    path, run = good(tmp_path), tmp_path / "run"
    assert main(["train", "--data", str(path), "--run-folder", str(run), "--steps", "3", *OPTIONS]) == 0
    file, record = run / "config.json", read_record(run)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"20 pairs", b"21 pairs"))
    assert "its digest is not that of its text" in one_line(capsys, 2, "--resume", str(run))
    record._replace(data=record.data._replace(what="20 pairs of another run")).write(run)
    assert "config.json is not the file that the checkpoint" in one_line(capsys, 2, "--resume", str(run))
    values = unsealed(whole, "")
    for change, message in (
        ({"run": None}, "config.json is not the configuration of a run of this version: run must have the fields"),
        ({"run": values["run"] | {"data": {"digest": 3}}}, "is not the configuration of a run of this version"),
        ({"run": values["run"] | {"starts": [{"at": "now"}]}}, "is not the configuration of a run of this version"),
    ):
        file.write_bytes(sealed(values | change))
        assert message in one_line(capsys, 2, "--resume", str(run))
    file.unlink()
    file.symlink_to(path)
    assert "is a link; expected the file itself" in one_line(capsys, 2, "--resume", str(run))


@pytest.mark.usefixtures("nothing_is_drawn")
def test_a_worker_that_is_killed_ends_the_run_with_one_line_and_it_resumes(capsys, tmp_path, monkeypatch):
    from wholebatch_train.tasks.batches import PairBatches

    path, run = good(tmp_path), tmp_path / "run"
    rank, original = os.getpid(), PairBatches.__call__

    def dies(self, step):
        if step == 9 and os.getpid() != rank:  # of which the rank has made seven by then, at least
            os.kill(os.getpid(), 9)
        return original(self, step)

    every = ["--steps", "12", "--checkpoint-every", "2", *OPTIONS]
    with monkeypatch.context() as patches:
        patches.setattr(PairBatches, "__call__", dies)
        line = one_line(capsys, 1, "--data", str(path), "--run-folder", str(run), *every)
    assert re.search(
        r"a process that reads the data for rank 0 of 1 was killed by SIGKILL \(was the machine out of memory\? fewer "
        rf"--workers need less\); resume with: .* train --resume {run}\n$",
        line,
    )
    assert main(["train", "--resume", str(run)]) == 0
    assert "resuming after step" in capsys.readouterr().out


def test_a_picture_that_is_none_ends_two_ranks(tmp_path, capfd):
    """One rank finds it in one of its steps, while the other one waits in a collective."""
    path = good(tmp_path)
    config = replace(CONFIG, data=str(path), batch_size=4, validation_texts=2, test_texts=2)
    _, (pairs, split) = load_data(config, 1)
    (tmp_path / f"images/{int(pairs.rows(split.train)[0])}.png").write_text("not a picture")
    every = ["--data", str(path), "--run-folder", str(tmp_path / "run"), "--steps", "9", "--ranks", "2", *OPTIONS]
    assert main(["train", *every]) == 2
    assert re.fullmatch(
        r"wholebatch train: error: .*pairs.csv, line \d+: '.*.png' cannot be read as an image \(.*\); --skip-bad "
        r"leaves such rows out\n",
        capfd.readouterr().err,
    )


def meets(paths):
    """Load the data of this rank, as the start of a run does, and return the error."""
    config = replace(CONFIG, data=paths[dist.get_rank()])
    try:
        chosen, data = load_data(config, 2)
        launch._agree(lambda: (chosen, data, None, {"data": data[0].digest}))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_see_other_files_are_refused(tmp_path):
    """As on two machines whose disks differ."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [str(good(tmp_path / name)) for name in "ab"]
    lines = (tmp_path / "b" / "pairs.csv").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "pairs.csv").write_text("".join([*lines[:-1], lines[-1].replace("text", "words")]))
    message = "--data holds other rows on rank 1 than on rank 0; every machine needs the same files"
    assert run_ranks(meets, 2, paths) == [message] * 2


PAGE = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.skipif(os.name != "posix", reason="starts a script")
def test_no_program_is_started_for_a_picture(tmp_path, monkeypatch):
    """Pillow would start Ghostscript, which it finds by its name, for PostScript of any file name."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "x.png").write_bytes(PAGE)
    for place in (tmp_path / "x.png", PAGE):
        with pytest.raises(ValueError, match="no picture of a known format"):
            open_picture(place)
    assert not (tmp_path / "started").exists()
    with pytest.raises(Exception), Image.open(tmp_path / "x.png") as image:  # noqa: B017, PT011
        image.load()
    assert (tmp_path / "started").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
def test_a_pipe_is_not_waited_for(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
        (tmp_path / f"{number}.txt").write_text(f"picture {number}")
    for name, said, read in (
        ("2.png", "it is no regular file", lambda table: FilePictures(table, "image").read(2)),
        ("0.txt", "is not a regular file", lambda table: table_pairs(table, CONFIG)),
    ):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match=said):
            read(open_table(str(tmp_path)))
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(kept)
    (tmp_path / "2.png").unlink()
    (tmp_path / "2.png").symlink_to(tmp_path / "1.png")
    assert FilePictures(open_table(str(tmp_path)), "image").read(2) is not None

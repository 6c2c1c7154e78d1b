"""Data as their programs write them: lists of positives and captions, pandas' labels, compressed tables, odd names."""

import csv
import gzip
import json
import re
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_sets import TEXTS, add, picture, png, shard, write_pictures
from glyph_files import SMALL

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train.config import TrainConfig
from wholebatch_train.data import text_files
from wholebatch_train.data.from_table import table_pairs
from wholebatch_train.data.load import load_data
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.pairs import stated_pairs
from wholebatch_train.data.pictures import LeftOut

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)
ALL_OF = SMALL[SMALL.index("--batch-size") :]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs_of(path, **settings):
    return table_pairs(open_table(str(path)), replace(CONFIG, **settings))


def texts_of(pairs, name="text"):
    return pairs.sides[name].items(pairs.order.sort().values)


RETRIEVAL = [
    {"query": "q0", "pos": ["a", "b", " "], "neg": ["n1", "n2"], "pos_scores": [1.0, 0.5], "prompt": "find"},
    {"query": "q1", "pos": ["c"], "neg": ["n3"]},
    {"query": "q2", "pos": ["", "d"], "neg": []},
]


def test_a_query_with_lists_of_documents_is_a_row_for_each_in_one_group(tmp_path):
    pairs = pairs_of(lines(tmp_path / "f.jsonl", RETRIEVAL))
    assert texts_of(pairs, "query") == ["q0", "q0", "q1", "q2"]
    assert texts_of(pairs, "document") == ["a", "b", "c", "d"]
    assert pairs.first.diff().tolist() == [2, 1, 1]
    negatives = [pairs.negatives.of(torch.tensor([row]))[0] for row in range(4)]
    assert negatives == [["n1", "n2"], ["n1", "n2"], ["n3"], []], "hard negatives of each row of the query"
    assert stated_pairs(pairs, pairs.order).right.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
    with pytest.raises(UserError, match=r"f\.jsonl: only one of the columns query and pos may hold lists of texts$"):
        pairs_of(lines(tmp_path / "f.jsonl", [{"query": ["q"], "pos": ["p"]}]))


def captions(folder, form):
    """Write three pictures with one, two and three captions, and return the path."""
    names = write_pictures(folder, 3)
    texts = [["one"], ["two a", "two b"], ["three a", "", "three b", "three c"]]
    if form == "paths":
        return lines(folder / "c.jsonl", [{"image": n, "caption": t} for n, t in zip(names, texts, strict=True)])
    pq.write_table(
        pa.table({"image": [{"bytes": png(i), "path": None} for i in range(3)], "caption": texts}), folder / "c.parquet"
    )
    return folder / "c.parquet"


@pytest.mark.parametrize("form", ["paths", "bytes"])
def test_a_picture_with_a_list_of_captions_is_a_row_for_each_in_one_group(tmp_path, form):
    pairs = pairs_of(captions(tmp_path, form))
    assert texts_of(pairs) == ["one", "two a", "two b", "three a", "three b", "three c"]
    assert pairs.first.diff().tolist() == [1, 2, 3]
    found = [each.tobytes() for each in pairs.sides["image"].items(torch.arange(6))]
    assert found == [picture(number).tobytes() for number in (0, 1, 1, 2, 2, 2)]
    assert [len(rows) for rows in stated_pairs(pairs, pairs.order).rows] == [3, 6]
    with pytest.raises(UserError, match="must hold texts to be the text; got list"):  # a picture has one label
        pairs_of(captions(tmp_path, form), task="identify")


@pytest.mark.parametrize("form", ["paths", "bytes"])
def test_places_in_lists_are_those_of_the_file_and_bad_rows_are_left_out(tmp_path, form):
    path = captions(tmp_path, form)
    where = f"{path}, line" if form == "paths" else f"{path}, row"
    if form == "paths":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines(path, [{**rows[0], "caption": [" "]}, *rows[1:], {"image": "no.png", "caption": ["a", "b"]}])
    else:
        table = pq.read_table(path).to_pylist()
        table = [
            {**table[0], "caption": []},
            *table[1:],
            {"image": {"bytes": b"x", "path": None}, "caption": ["a", "b"]},
        ]
        pq.write_table(pa.Table.from_pylist(table), path)
    with pytest.raises(UserError, match=rf"{where} 1: the text, column 'caption', is empty; --skip-bad leaves such"):
        pairs_of(path)
    pairs = pairs_of(path, skip_bad=True)
    assert texts_of(pairs) == ["two a", "two b", "three a", "three b", "three c"]
    assert [each.place for each in pairs.left_out] == [f"{where} 4", f"{where} 1"]


def test_a_run_on_lists_is_trained_evaluated_and_searched_both_ways(tmp_path, capsys):
    names = write_pictures(tmp_path, 12)
    path = lines(
        tmp_path / "c.jsonl", [{"image": n, "caption": [f"red {i}", f"blue {i}"]} for i, n in enumerate(names)]
    )
    run = str(tmp_path / "run")
    options = ["--steps", "4", "--no-audit", "--workers", "0", "--image-size", "16", "--batch-size", "4"]
    assert main(["train", "--data", str(path), "--run-folder", run, *ALL_OF[2:], *options]) == 0
    capsys.readouterr()
    assert main(["search", run, str(tmp_path / names[0]), "-k", "24"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if f"{path}, line" in line]
    assert len(found) == 24, "each caption"
    assert main(["search", run, "red 3"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert main(["evaluate", run, str(path), "--out", str(tmp_path / "e.json")]) == 0
    figures = json.loads((tmp_path / "e.json").read_text())
    assert (figures["rows"], figures["groups"]) == (24, 12)
    out = tmp_path / "f.parquet"
    assert main(["embed", run, str(path), "--side", "text", "--out", str(out)]) == 0
    assert pq.read_table(out)["caption"].to_pylist()[:3] == ["red 0", "blue 0", "red 1"]


def test_whole_numbers_of_pandas_are_labels(tmp_path):
    images = [png(number) for number in range(4)]

    def written(labels):
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    assert texts_of(pairs_of(written(pa.array([0.0, 1.0, -2.0, 1.0])), task="identify")) == ["0", "1", "-2", "1"]
    assert texts_of(pairs_of(written(pa.array([0, 1, 2, 1], pa.float32())), task="identify")) == ["0", "1", "2", "1"]
    for labels in ([0.0, 0.5, 1.0, 1.0], [1e300, 0.0, 1.0, 1.0], [float("inf"), 0.0, 1.0, 1.0]):
        with pytest.raises(UserError, match="must hold texts to be the text; got double"):
            pairs_of(written(labels), task="identify")
    path = written([0.0, float("nan"), 1.0, None])
    with pytest.raises(UserError, match=r"row 2: the text, column 'label', is empty"):
        pairs_of(path, task="identify")
    assert texts_of(pairs_of(path, task="identify", skip_bad=True)) == ["0", "1"]


CLASS_NAMES = {
    '{"info": {"features": [1]}}': [0, 1],
    '{"info": {"features": null}}': [0, 1],
    "[" * 10**5: [0, 1],
    '{"info": {"features": {"n": {"_type": "ClassLabel", "names": ["a", "b"]}}}}': ["a", "b"],
    '{"info": {"features": {"n": {"_type": "ClassLabel", "names": [1, "\\ud800"]}}}}': ["1", "?"],
    '{"info": {"features": {"text": {"_type": "ClassLabel", "names": ["a"]}}}}': [0, 1],
    '{"info": {"features": {"x": {"_type": "ClassLabel", "names": ["a"]}}}}': [0, 1],
}


@pytest.mark.parametrize(("about", "labels"), CLASS_NAMES.items(), ids=range(len(CLASS_NAMES)))
def test_names_of_classes_that_do_not_fit_their_numbers(tmp_path, about, labels):
    table = pa.table({"n": [0, 1], "text": ["red", "blue"], "x": [0.5, 1.5]})
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), tmp_path / "a.parquet")
    found = open_table(str(tmp_path / "a.parquet")).arrow
    assert found.to_pydict() == {"n": labels, "text": ["red", "blue"], "x": [0.5, 1.5]}


def test_texts_of_a_parquet_file_that_are_not_utf8_are_one_line(tmp_path):
    texts = pa.array([b"red", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"image": ["a.png", "b.png"], "text": texts}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as a parquet file: .*UTF8"):
        open_table(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".tsv"])
def test_a_compressed_table_is_one_line_with_the_fix(tmp_path, ending):
    path = tmp_path / f"pairs{ending}.gz"
    path.write_bytes(gzip.compress(b"image,text\na.png,a\n"))
    with pytest.raises(UserError, match=rf"is compressed, and one cannot jump in it; .* to a {ending} file$"):
        open_table(str(path))
    write_pictures(tmp_path)
    (tmp_path / "images" / "a.csv.gz").write_bytes(b"x")
    assert len(open_table(str(tmp_path / "images"))) == len(TEXTS), "beside pictures it is another file"


def test_late_keys_are_null_in_the_lines_before_them(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_ROWS", 2)
    names = write_pictures(tmp_path)
    rows = [{"image": name, "text": text} for name, text in zip(names, TEXTS, strict=True)]
    rows[4]["width"], rows[5]["license"] = 12, {"id": 3}
    assert texts_of(pairs_of(lines(tmp_path / "p.jsonl", rows))) == [*TEXTS]
    rows[5]["caption"] = rows[5].pop("text")
    path = lines(tmp_path / "p.jsonl", rows)
    assert open_table(str(path)).arrow["caption"].to_pylist() == [None] * 5 + [TEXTS[5]]
    with pytest.raises(UserError, match="line 6: the text, column 'text', is empty"):
        pairs_of(path, columns="text=text")


def test_marks_of_patterns_in_the_names_of_folders_stand_for_themselves(tmp_path):
    folder = tmp_path / "of [2024]" / "a*b"
    folder.mkdir(parents=True)
    for number in range(3):
        shard(folder / f"s-{number}.tar", range(number * 2, number * 2 + 2))
    for pattern in ("s-*.tar", "s-[012].tar", "s-{0..2}.tar"):
        assert len(open_table(str(folder / pattern))) == 6
    assert len(open_table(str(tmp_path / "of*" / "a*" / "s-1.tar"))) == 2
    with pytest.raises(UserError, match="names 1 shards, 1 of which do not exist"):
        open_table(str(folder / "t-*.tar"))


class Name(str):
    """A name of a column that counts how often one is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)

    def strip(self, *_):
        return self


def test_the_names_of_columns_are_compared_a_few_times_each(tmp_path):
    count = 2000
    names = [Name(f"column {number}") for number in range(count)]
    Name.compared = 0
    path, reader = tmp_path / "a.csv", SimpleNamespace(line_num=1)
    batches = [*text_files._batches(path, text_files._named_rows(path, reader, iter([names, ["x"] * count]), []))]
    assert {batch.num_columns for batch in batches} == {count + 2}, "the line, and the reason of a row without values"
    assert Name.compared < 20 * count, "not with all others"
    with pytest.raises(UserError, match="line 1: the column 'column 7' appears twice"):
        [*text_files._named_rows(path, reader, iter([[*names, Name("column 7")]]), [])]


def beside(folder):
    """Write four pictures with texts beside them: none, an empty one, and one that is not UTF-8."""
    folder.mkdir()
    for number in range(5):
        picture(number).save(folder / f"{number}.png")
    for number, content in enumerate((b"zero", None, b" \n", b"\xff", b"four")):
        if content is not None:
            (folder / f"{number}.txt").write_bytes(content)
    return folder


def in_csv(folder):
    names = write_pictures(folder, 5)
    with (folder / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "text"], *zip(names, ("zero", "", " ", "", "four"), strict=True)])
    return folder / "p.csv"


def in_tar(folder):
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, content in enumerate((b"zero", None, b"", b" ", b"four")):
            for name, data in ((f"{number}.png", png(number)), (f"{number}.txt", content)):
                if data is not None:
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, __import__("io").BytesIO(data))
    return folder / "a.tar"


@pytest.mark.parametrize("written", [beside, in_csv, in_tar])
def test_rows_without_a_text_are_found_before_pictures_are_read_and_left_out_if_asked(tmp_path, monkeypatch, written):
    path = written(tmp_path / "data")
    read = []
    monkeypatch.setattr("wholebatch_train.data.from_table.kept_numbers", lambda *_: read.append("pictures"))
    with pytest.raises(UserError, match=r"(1\.png|line 3).*(no text beside|is empty).*; --skip-bad leaves such rows "):
        load_data(replace(CONFIG, data=str(path)), 1)
    assert read == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = []
    pairs = table_pairs(open_table(str(path)), replace(CONFIG, skip_bad=True), said.append)
    assert texts_of(pairs) == ["zero", "four"]
    assert len(pairs.left_out) == 3
    assert said.index("3 of 5 rows are left out, because they have no text that can be read:") < said.index(
        "--skip-bad: reading all 5 pictures, once"
    )
    if written is beside:
        reasons = [each.reason for each in pairs.left_out]
        assert pairs.left_out[0] == LeftOut(
            str(path / "1.png"), "there is no text beside it, '1.txt'; other pictures have one"
        )
        assert "2.txt is empty" in reasons[1]
        assert "3.txt is not UTF-8" in reasons[2]


def test_no_row_with_a_text_or_none_with_both(tmp_path):
    names = write_pictures(tmp_path, 2)
    path = lines(tmp_path / "p.jsonl", [{"image": names[0], "text": ""}, {"image": names[1], "text": None}])
    with pytest.raises(UserError, match=r"none of the 2 rows of --data has a text; the first: .*line 1: the text"):
        pairs_of(path, skip_bad=True)
    lines(path, [{"image": names[0], "text": ""}, {"image": "none.png", "text": "a"}])
    with pytest.raises(UserError, match=r"no row of --data has a text and a readable picture; the first: .*line 2: "):
        pairs_of(path, skip_bad=True)


@pytest.mark.usefixtures("nothing_is_drawn", "ranks_are_forks")
def test_a_run_with_rows_without_a_text_is_searched_and_embedded(tmp_path, capsys):
    names = write_pictures(tmp_path, 12)
    texts = ["", *(f"word {number}" for number in range(1, 12))]
    path = lines(tmp_path / "p.jsonl", [{"image": n, "text": t} for n, t in zip(names, texts, strict=True)])
    with path.open("ab") as file:
        file.write(b'{"image": "images/0.png", "text": "caf\xe9"}\n')
    run = str(tmp_path / "run")
    options = ["--steps", "4", "--no-audit", "--workers", "0", "--image-size", "16", "--batch-size", "4", "--skip-bad"]
    assert main(["train", "--data", str(path), "--run-folder", run, *ALL_OF[2:], *options]) == 0
    listed = csv.reader((tmp_path / "run" / "left_out.csv").read_text().splitlines())
    assert {place for place, _ in listed} == {"place", f"{path}, line 1", f"{path}, line 13"}
    capsys.readouterr()
    assert main(["search", run, str(tmp_path / names[3]), "-k", "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{path}, line") == 13, "eleven results, and the rows that are left out"
    for side, count in (("text", 11), ("image", 12)):
        out = str(tmp_path / f"{side}.parquet")
        command = ["embed", run, str(path), "--side", side, "--out", out, "--workers", "0"]
        assert main([*command, "--skip-bad", "--batch-size", "4"]) == 0
        assert pq.read_table(out).num_rows == count
        capsys.readouterr()
    assert main(["embed", run, str(path), "--side", "text", "--out", str(tmp_path / "o.parquet")]) == 2
    assert "line 1: the text, column 'text', is empty; --skip-bad leaves such rows out" in capsys.readouterr().err
    assert main(["embed", run, str(path), "--side", "image", "--out", str(tmp_path / "o.parquet")]) == 2
    assert "line 13: not UTF-8 text (byte 0xe9 at column 39)" in capsys.readouterr().err


NOT_UTF8 = {  # three rows whose second is not UTF-8: the content, its place, and the reason
    "p.csv": (b'image,text\na.png,A\nb.png,"B\ncaf\xe9"\nc.png,C\n', "line 3", "byte 0xe9 at column 4"),
    "p.tsv": (b"image\ttext\na.png\tA\n\xff.png\tB\nc.png\tC\n", "line 3", "byte 0xff at column 1"),
    "p.jsonl": (
        b'{"image": "a.png", "text": "A"}\n\n{"image": "b.png", "text": "\xc3\xa9\xe9"}\n'
        b'{"image": "c.png", "text": "C"}\n',
        "line 3",
        "byte 0xe9 at column 31",
    ),
    "p.tar": ({"a": b"A", "b": b"caf\xe9", "c": b"C"}, "b.png", "b.txt: not UTF-8 text: .* at byte 3"),
}


@pytest.mark.parametrize("name", NOT_UTF8)
def test_a_row_that_is_not_utf8_is_refused_or_left_out_if_asked(tmp_path, name):
    path, (content, place, reason) = tmp_path / name, NOT_UTF8[name]
    if isinstance(content, dict):
        with tarfile.open(path, "w") as tar:
            for number, (key, text) in enumerate(content.items()):
                add(tar, f"{key}.png", png(number))
                add(tar, f"{key}.txt", text)
    else:
        path.write_bytes(content)
        for number, key in enumerate("abc"):
            picture(number).save(tmp_path / f"{key}.png")
    with pytest.raises(UserError, match=rf"{name}, {place}: .*not UTF-8 .*; --skip-bad leaves such rows out$") as error:
        pairs_of(path)
    assert re.search(reason, str(error.value))
    pairs = pairs_of(path, skip_bad=True)
    assert texts_of(pairs) == ["A", "C"]
    ((where, why),) = pairs.left_out
    assert where == f"{path}, {place}"
    assert re.search(reason, why)


def test_the_header_of_a_table_is_utf8(tmp_path):
    (tmp_path / "p.csv").write_bytes("image,text\na.png,A\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"p\.csv, line 1: not UTF-8 text \(byte 0xff at column 1\); save the file"):
        open_table(str(tmp_path / "p.csv"))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_null_in_a_list_of_texts_is_refused_or_left_out_if_asked(tmp_path, ending):
    rows = [{"query": "q0", "pos": ["a", None]}, {"query": "q1", "pos": ["b"]}]
    path = lines(tmp_path / "p.jsonl", rows)
    where = f"{path}, line 1"
    if ending == ".parquet":
        path = tmp_path / "p.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        where = f"{path}, row 1"
    with pytest.raises(UserError, match=rf"{where}: the positive, column 'pos', is empty; --skip-bad leaves such rows"):
        pairs_of(path)
    pairs = pairs_of(path, skip_bad=True)
    assert texts_of(pairs, "document") == ["a", "b"]
    assert pairs.left_out == (LeftOut(where, "the positive, column 'pos', is empty"),)

"""A trained run in use: its features, searches, figures, and the mistakes of a user."""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from glyph_files import SMALL, write_pairs

from wholebatch.__main__ import main
from wholebatch._base.tensor_file import TensorFile, write_tensors
from wholebatch._base.user_error import UserError
from wholebatch_train.data.open_table import open_table
from wholebatch_train.tasks.evaluation import chance, features_of_rows
from wholebatch_train.using import items as module_of_items
from wholebatch_train.using.embed import open_features
from wholebatch_train.using.items import features_of, open_items
from wholebatch_train.using.open_run import OpenRun, open_run
from wholebatch_train.using.options import EmbedConfig
from wholebatch_train.using.search import most_similar


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Tables that are read are kept in a folder of these tests."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Train a small dual encoder."""
    folder = tmp_path_factory.mktemp("runs") / "a run"  # a name with a space
    small = ["--steps", "25", "--no-audit", "--workers", "0", "--checkpoint-every", "20"]
    assert main(["train", "--data", str(data), "--run-folder", str(folder), *SMALL, *small]) == 0
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Train a small classifier of characters in four faces, and return its run and its data."""
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold")
    data = write_pairs(tmp_path_factory.mktemp("classes"), faces=faces)
    folder = tmp_path_factory.mktemp("runs") / "classes"
    small = ["--steps", "20", "--no-audit", "--workers", "0", "--task", "identify"]
    assert main(["train", "--data", str(data), "--run-folder", str(folder), *SMALL, *small]) == 0
    return folder, data


def succeeds(*argv):
    assert main([str(each) for each in argv]) == 0


def mistake(capsys, *argv):
    """Check that a command ends with exit code 2, and return its one line of error output."""
    capsys.readouterr()
    assert main([str(each) for each in argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def npy(path):
    return torch.from_numpy(np.load(path, allow_pickle=False))


def reference(run, data, side, column):
    """Return the features of all rows as the training application computes them."""
    found = open_run(run)
    items = open_items(found, str(data), "DATA", column=column, side=side)
    return features_of_rows(found.model, side, items.side, items.rows, torch.device("cpu"))


# embed


def test_features_are_those_of_the_model_in_the_order_of_the_rows(run, data, tmp_path):
    succeeds("embed", run, data, "--out", tmp_path / "f.parquet", "--batch-size", "50")
    succeeds("embed", run, data, "--out", tmp_path / "f.npy", "--batch-size", "7")
    table = pq.read_table(tmp_path / "f.parquet")
    features = torch.tensor(table["features"].to_pylist())
    expected = reference(run, data, "image", "image")
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(npy(tmp_path / "f.npy"), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(features.roll(1, 0), expected, atol=1e-2), "another order would be found"
    torch.testing.assert_close(features.norm(dim=1), torch.ones(len(features)))
    assert table["features"].type == pa.list_(pa.float32(), 32)
    rows = open_table(str(data)).arrow
    assert table["text"].to_pylist() == rows["text"].to_pylist()
    assert table["image"].to_pylist() == rows["image"].to_pylist()


def test_the_side_is_that_of_the_column(run, data, tmp_path):
    out = tmp_path / "f.npy"
    expected = reference(run, data, "text", "text")
    for options in (["--column", "text"], ["--side", "text"]):
        succeeds("embed", run, data, "--out", out, *options)
        torch.testing.assert_close(npy(out), expected, rtol=0, atol=1e-6)
    assert (expected - reference(run, data, "image", "image")).abs().max() > 0.1


def test_a_folder_of_pictures_is_embedded(run, data, tmp_path, capsys):
    folder, out = data.parent / "images", tmp_path / "f.parquet"
    succeeds("embed", run, folder, "--out", out)
    line = f"{out}: 158 rows of 32 numbers, of the column 'image' of {folder}, by the encoder of the image\n"
    assert capsys.readouterr().out.endswith(line)
    table = pq.read_table(out)
    assert table.column_names == ["image", "text", "features"]
    assert table["image"].to_pylist() == sorted(path.name for path in (data.parent / "images").iterdir())
    assert table["text"][0].as_py() == table["image"][0].as_py().removesuffix(".png")
    capsys.readouterr()
    succeeds("search", run, "letter", "--in", out, "-k", "1")
    assert re.search(r"/(\d+)\.png  \1\n", capsys.readouterr().out), "the text beside the picture is printed"
    succeeds("embed", run, folder, "--side", "text", "--out", out)
    succeeds("search", run, folder / "41.png", "--in", out, "-k", "3")
    places = printed_places(capsys)
    assert len(places) == 3
    assert {Path(place).parent for place in places} == {folder}, "the places of the texts are those of their pictures"
    (tmp_path / "one.csv").write_text("text\nletter\n")
    succeeds("embed", run, tmp_path / "one.csv", "--out", tmp_path / "f.npy")
    assert ": 1 row of 32 numbers, of the column 'text'" in capsys.readouterr().out


def test_the_names_of_pictures_in_shards_are_kept_in_a_file_of_features(run, data, tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "000.tar", "w") as tar:
        for name in ("41.png", "42.png"):
            tar.add(data.parent / "images" / name, name)
    succeeds("embed", run, tmp_path / "shards", "--out", tmp_path / "f.parquet")
    succeeds("search", run, "letter", "--in", tmp_path / "f.parquet", "-k", "1", "--sheet", tmp_path / "s.html")
    assert re.search(r"shards/000\.tar, 4[12]\.png\n", capsys.readouterr().out)


def test_several_devices_give_the_same_features(run, data, tmp_path, monkeypatch):
    """Each has a copy of the encoders, and the rows keep their order."""
    used, encode = [], OpenRun.encode
    monkeypatch.setattr(OpenRun, "encode", lambda run, *inputs: [used.append(id(run)), encode(run, *inputs)][1])
    for devices, name in ((0, "one.npy"), (1, "two.npy"), (9, "many.npy")):
        used.clear()
        monkeypatch.setattr(module_of_items, "_further_devices", lambda _: [torch.device("cpu")] * devices)  # noqa: B023
        succeeds("embed", run, data, "--out", tmp_path / name, "--batch-size", "25")
        parts = -(-len(npy(tmp_path / name)) // 25)
        assert (len(used), len(set(used))) == (parts, min(parts, devices + 1))
        assert torch.equal(npy(tmp_path / "one.npy"), npy(tmp_path / name))


@pytest.fixture
def damaged(data, tmp_path):
    """Copy the data, with a last picture that is none."""
    shutil.copytree(data.parent, tmp_path / "damaged")
    (tmp_path / "damaged" / "images" / "none.png").write_bytes(b"not a picture")
    with (tmp_path / "damaged" / "pairs.csv").open("a") as file:
        file.write("images/none.png,NONE\n")
    return tmp_path / "damaged" / "pairs.csv"


@pytest.mark.parametrize("ending", ["parquet", "npy"])
def test_a_failure_leaves_the_file_as_it_was(run, damaged, tmp_path, capsys, ending):
    out = tmp_path / f"f.{ending}"
    for before in (None, b"as it was"):
        if before is not None:
            out.write_bytes(before)
        line = mistake(capsys, "embed", run, damaged, "--out", out, "--batch-size", "20")
        assert "none.png" in line
        assert "cannot be read as an image" in line
        assert "--skip-bad leaves such rows out" in line
        assert (out.read_bytes() if out.exists() else None) == before
        assert not list(tmp_path.glob("*.partial"))


def test_bad_rows_are_left_out_if_asked(run, data, damaged, tmp_path, capsys):
    succeeds("embed", run, damaged, "--out", tmp_path / "f.parquet", "--skip-bad", "--workers", "0")
    assert "1 of 159 rows are left out" in capsys.readouterr().out
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["text"].to_pylist() == open_table(str(data)).arrow["text"].to_pylist()


def test_rows_are_read_batch_by_batch(run, damaged):
    """The first features come before the last picture is read, so memory does not grow with the rows."""
    found = open_run(run)
    items = open_items(found, str(damaged), "DATA")
    tiles = features_of(found, items, EmbedConfig(run=run, data=str(damaged), batch_size=50, workers=0))
    assert [len(next(tiles)) for _ in range(3)] == [50, 50, 50]
    with pytest.raises(UserError, match=r"none\.png"):
        next(tiles)


def test_an_older_column_of_features_is_replaced(run, data, tmp_path, capsys):
    succeeds("embed", run, data, "--out", tmp_path / "f.parquet")
    assert "the column 'features' of" not in capsys.readouterr().out
    shutil.copytree(data.parent / "images", tmp_path / "images")
    succeeds("embed", run, tmp_path / "f.parquet", "--column", "text", "--out", tmp_path / "g.parquet")
    said = f"the column 'features' of {tmp_path / 'f.parquet'} is left out of {tmp_path / 'g.parquet'}: it is the name "
    assert said in capsys.readouterr().out
    table = pq.read_table(tmp_path / "g.parquet")
    assert table.column_names.count("features") == 1
    expected = reference(run, data, "text", "text")
    torch.testing.assert_close(torch.tensor(table["features"].to_pylist()), expected, rtol=0, atol=1e-6)


# search


def test_the_most_similar_rows_are_those_of_a_full_sort():
    torch.manual_seed(0)
    queries, rows = torch.randn(5, 4), torch.randn(200, 4)
    rows[150] = rows[3]  # a tie, far away
    rows[:2] = 0.0
    for tiles in (rows.split(7), rows.split(200), [rows[:1], rows[1:]]):
        similarities, found = most_similar(queries, tiles, 20)
        expected, order = (queries @ rows.T + 0.0).sort(dim=1, descending=True, stable=True)
        assert torch.equal(found, order[:, :20])
        torch.testing.assert_close(similarities, expected[:, :20])
    assert most_similar(queries, rows[:3].split(2), 20)[1].shape == (5, 3), "there are only three rows"


def test_equal_rows_come_in_their_order():
    same = torch.ones(40, 2)
    for size in (1, 3, 40):
        assert most_similar(-torch.ones(1, 2), same.split(size), 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def printed_places(capsys):
    return re.findall(r"^ *-?\d\.\d{4}  (\S+)", capsys.readouterr().out, flags=re.MULTILINE)


def test_a_text_finds_pictures_and_the_features_are_kept(run, data, tmp_path, capsys):
    text = "GREEK SMALL LETTER ALPHA"
    succeeds("search", run, text, "-k", "4", "--sheet", tmp_path / "sheet.html")
    places = printed_places(capsys)
    found = open_run(run)
    query = found.encode("text", found.encoder("text").prepare([text]))
    similarity = (query @ reference(run, data, "image", "image").T)[0]
    names = open_table(str(data)).arrow["image"].to_pylist()
    expected = [str(data.parent / names[row]) for row in similarity.argsort(descending=True, stable=True)[:4]]
    assert places == expected
    page = (tmp_path / "sheet.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert f">{text}</span>" in page
    assert "<script" not in page
    assert "rank" not in page.partition("</style>")[2], "nobody has said which are right"
    (kept,) = (run / "features").glob("image-*.parquet")
    stamp = kept.stat().st_mtime_ns
    succeeds("search", run, *text.split(), "-k", "4")
    assert printed_places(capsys) == expected, "without quotes"
    assert kept.stat().st_mtime_ns == stamp, "not computed again"
    assert (run / "search.html").exists()


def test_a_file_that_is_replaced_is_said(run, data, tmp_path, capsys, monkeypatch):
    """Whichever file a command writes; one that fails in between leaves the earlier one."""
    queries = tmp_path / "queries.csv"
    queries.write_text("text\nGREEK SMALL LETTER ALPHA\n")
    sheet, out = tmp_path / "sheet.html", tmp_path / "found.jsonl"
    cases = [
        (["search", run, "--queries", queries, "-k", "2", "--out", out, "--sheet", sheet], [out, sheet]),
        (["embed", run, data, "--side", "text", "--out", tmp_path / "f.npy"], [tmp_path / "f.npy"]),
        (["evaluate", run, data, "--out", tmp_path / "e.json"], [tmp_path / "e.json"]),
    ]  # fmt: skip
    for argv, files in cases:
        for again in (False, True):
            capsys.readouterr()
            succeeds(*argv)
            lines = capsys.readouterr().out.splitlines()
            for file in files:
                (line,) = [line for line in lines if line.startswith(f"{file}: ")]
                assert line.endswith(", in place of an earlier file") == again, line

    class Page(str):
        def encode(self, *_, **__):
            raise OSError(28, "No space left on device")

    before = sheet.read_bytes()
    monkeypatch.setattr("wholebatch_train.using.search.render", lambda _: Page())
    assert "--sheet" in mistake(capsys, *cases[0][0])
    assert sheet.read_bytes() == before


def test_features_of_a_changed_picture_are_computed_again(run, data, tmp_path, capsys):
    copy = shutil.copytree(data.parent, tmp_path / "copy") / "pairs.csv"
    wanted = tmp_path / "copy" / "images" / "41.png"
    query = str(data.parent / "images" / "42.png")
    options = ["--in", copy, "--side", "image", "-k", "1", "--sheet", tmp_path / "s.html"]
    succeeds("search", run, query, *options)
    assert Path(printed_places(capsys)[0]).name == "42.png"
    shutil.copyfile(query, wanted)
    os.utime(wanted, (1, 1))
    (tmp_path / "copy" / "images" / "42.png").write_bytes((data.parent / "images" / "43.png").read_bytes())
    succeeds("search", run, query, *options)
    assert Path(printed_places(capsys)[0]).name == "41.png"


def test_features_of_weights_that_the_run_does_not_have_any_more_are_replaced(run, data, tmp_path, capsys):
    """Those of other data, of other kinds of weights, and files of others stay."""
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("features"))
    with TensorFile(copy / "model.safetensors") as file:
        tensors, metadata = {name: file.read(name) for name in file.entries}, file.metadata
    facts = {name: each for name, each in metadata.items() if "sha256" not in name}

    def searched(weights, *options):
        succeeds("search", copy, "letter", "-k", "1", "--weights", weights, *options)
        assert "embedding" in capsys.readouterr().out
        return {path.name: path.read_bytes() for path in (copy / "features").iterdir()}

    def change_best(by):
        write_tensors(copy / "best.safetensors", {name: x + by for name, x in tensors.items()}, facts)

    (of_final,) = searched("final")
    change_best(0.125)
    (of_best,) = searched("best").keys() - {of_final}
    searched("final", "--in", data.parent / "images")
    (copy / "features" / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in (copy / "features").iterdir()}
    opened = open_features(copy / "features" / of_best)
    rows = torch.cat([*opened.tiles()])
    change_best(0.25)
    after = searched("best")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {of_best}
    assert torch.equal(torch.cat([*opened.tiles()]), rows), "a search that reads the file goes on"
    succeeds("search", copy, "letter", "-k", "1", "--weights", "best")
    assert "embedding" not in capsys.readouterr().out, "nor are they computed again"


def test_bad_pictures_are_left_out_of_a_search_if_asked(run, data, damaged, tmp_path, capsys):
    """Rows keep their numbers, also when the features come from the folder of the run."""
    with damaged.open("a") as file:  # a good row after the bad one
        file.write("images/41.png,AGAIN\n")
    query = [str(data.parent / "images" / "41.png"), "--side", "image", "--in", damaged, "-k", "4"]
    query += ["--out", tmp_path / "o.jsonl", "--workers", "0"]
    assert "--skip-bad" in mistake(capsys, "search", run, *query)
    for _ in range(2):
        succeeds("search", run, *query, "--skip-bad")
        rows = [hit["row"] for hit in json.loads((tmp_path / "o.jsonl").read_text())["results"]]
        assert {1, 160} <= set(rows)
        assert 159 not in rows
    printed = capsys.readouterr().out
    assert printed.count("1 of 160 rows are left out") == 2
    assert printed.count("reading all 160 pictures, once") == printed.count("embedding 159 rows") == 1


def test_a_picture_finds_texts_once_each(run, data, tmp_path, capsys):
    twice = tmp_path / "twice.csv"
    lines = data.read_text().splitlines()
    twice.write_text("\n".join([lines[0], *lines[1:], *lines[1:]]) + "\n")
    (tmp_path / "images").symlink_to(data.parent / "images")
    succeeds("search", run, data.parent / "images" / "41.png", "--in", twice, "-k", "5")
    output = capsys.readouterr().out
    texts = re.findall(r"line \d+  (.+)$", output, flags=re.MULTILINE)
    assert len(set(texts)) == 5
    assert str(twice) in output


def test_equal_columns_of_texts_are_one_as_in_training(run, data, tmp_path, capsys):
    (tmp_path / "images").symlink_to(data.parent / "images")
    twice = tmp_path / "twice.csv"
    header, *lines = data.read_text().splitlines()
    assert header == "image,text"
    twice.write_text("image,text,caption\n" + "".join(f"{line},{line.split(',')[1]}\n" for line in lines))
    picture = data.parent / "images" / "41.png"
    succeeds("search", run, picture, "--in", twice, "-k", "3", "--out", tmp_path / "o.jsonl")
    succeeds("evaluate", run, twice, "--out", tmp_path / "e.json")
    twice.write_text("image,text,caption\n" + "".join(f"{line},another\n" for line in lines))
    assert "several columns that could be the text: text, caption" in mistake(
        capsys, "search", run, picture, "--in", twice
    )
    assert "several columns that could be the text: text, caption" in mistake(capsys, "evaluate", run, twice)


def test_features_in_a_file_are_searched(run, data, tmp_path, capsys):
    text = "CYRILLIC CAPITAL LETTER ZHE"
    succeeds("embed", run, data, "--out", tmp_path / "f.parquet")
    found = []
    for options in (["--in", tmp_path / "f.parquet"], []):
        succeeds("search", run, text, *options, "--out", tmp_path / "o.jsonl", "-k", "3")
        (line,) = (tmp_path / "o.jsonl").read_text().splitlines()
        found.append(json.loads(line)["results"])
    assert [hit["row"] for hit in found[0]] == [hit["row"] for hit in found[1]]
    assert found[0][0]["place"].endswith(".png")


def test_many_queries_from_a_table(run, data, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"query": "LATIN SMALL LETTER B"}\n{"query": "GREEK SMALL LETTER ALPHA"}\n')
    out = tmp_path / "o.jsonl"
    succeeds("search", run, "--queries", tmp_path / "q.jsonl", "--out", out, "-k", "3", "--sheet", tmp_path / "s.html")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["query"] for line in lines] == ["LATIN SMALL LETTER B", "GREEK SMALL LETTER ALPHA"]
    for line in lines:
        similarities = [hit["similarity"] for hit in line["results"]]
        assert similarities == sorted(similarities, reverse=True)
        assert len(similarities) == 3
    assert lines[0]["results"] != lines[1]["results"]


# evaluate


def test_chance_is_the_mean_over_all_orders():
    for n, m in ((5, 1), (5, 2), (6, 4), (4, 4)):
        expected = dict.fromkeys(chance(2, torch.tensor([1])), 0.0)
        orders = list(itertools.combinations(range(n), m))  # the places of the right ones
        for right in orders:
            gain = sum(1 / math.log2(2 + place) for place in right if place < 10)
            best = sum(1 / math.log2(2 + place) for place in range(min(m, 10)))
            for k in (1, 5, 10):
                expected[f"recall@{k}"] += (right[0] < k) / len(orders)
            expected["mrr"] += 1 / (1 + right[0]) / len(orders)
            expected["ndcg@10"] += gain / best / len(orders)
        assert chance(n, torch.tensor([m])) == pytest.approx(expected)
    both = chance(5, torch.tensor([1, 2, 2]))
    one, two = (chance(5, torch.tensor([m])) for m in (1, 2))
    assert both["mrr"] == pytest.approx((one["mrr"] + 2 * two["mrr"]) / 3)


def test_figures_count_repeated_texts_and_pictures_once_and_stated_pairs_as_right(run, data, tmp_path, capsys):
    """A brute-force search over the distinct pictures and texts gives the same figures."""
    lines = data.read_text().splitlines()
    table = tmp_path / "some.csv"
    some = lines[1:40]
    some += [f"{some[0].split(',')[0]},{some[5].split(',')[1]}", some[7]]  # a second text of a picture, and a repeat
    table.write_text("\n".join([lines[0], *some]) + "\n")
    (tmp_path / "images").symlink_to(data.parent / "images")
    succeeds("evaluate", run, table, "--out", tmp_path / "e.json")
    report = json.loads((tmp_path / "e.json").read_text())
    pictures = list(dict.fromkeys(line.split(",")[0] for line in some))
    texts = list(dict.fromkeys(line.split(",")[1] for line in some))
    stated = {tuple(line.split(",")) for line in some}
    stated |= {(text, picture) for picture, text in stated}
    found = open_run(run)
    features = {}
    for side, names in (("image", pictures), ("text", texts)):
        (tmp_path / "one.csv").write_text("\n".join([side, *names]) + "\n")
        features[side] = reference(run, tmp_path / "one.csv", side, side)
    ways = {"image_to_text": ("image", pictures, "text", texts), "text_to_image": ("text", texts, "image", pictures)}
    for way, (one, asked, other, sought) in ways.items():
        similarity = features[one] @ features[other].T
        right = torch.tensor([[(a, b) in stated for b in sought] for a in asked])
        best = similarity.masked_fill(~right, -2).amax(1, keepdim=True)
        rank = ((similarity >= best) & ~right).sum(1)
        assert report[way]["queries"] == len(asked)
        assert report[way]["candidates"] == len(sought)
        for k in (1, 5, 10):
            assert report[way][f"recall@{k}"] == pytest.approx((rank < k).double().mean().item())
        assert report[way]["mrr"] == pytest.approx((1 / (1 + rank.double())).mean().item())
        assert report[way]["chance"]["recall@1"] < 0.06
        assert report[way]["recall@5"] > report[way]["chance"]["recall@5"]
    assert found.weights, "the run is the one that was evaluated"
    assert "nDCG@10" in capsys.readouterr().out


def test_the_columns_of_the_run_are_found_in_data_without_negatives_and_groups(tmp_path, capsys):
    (tmp_path / "of_run.csv").write_text("q,p,n,g\n" + "".join(f"q {i},p {i},n {i},{i // 2}\n" for i in range(40)))
    columns = ["--columns", "query=q,positive=p,negatives=n,group=g", "--steps", "1", "--batch-size", "4", "--no-audit"]
    small = ["--validation-texts", "2", "--test-texts", "2", "--model.text-width", "32", "--model.text-buckets", "64"]
    succeeds("train", "--data", tmp_path / "of_run.csv", "--run-folder", tmp_path / "run", *columns, *small)
    for names, right in (("q,p,x", 1), ("q,p,g", 2)):
        rows = "".join(f"other q {i},other p {i},{i // 2}\n" for i in range(6))
        (tmp_path / "new.csv").write_text(f"{names}\n{rows}")
        succeeds("evaluate", tmp_path / "run", tmp_path / "new.csv", "--out", tmp_path / "e.json")
        found = json.loads((tmp_path / "e.json").read_text())["query_to_document"]
        assert found["queries"] == 6
        assert found["chance"]["recall@1"] == pytest.approx(right / 6)
    (tmp_path / "new.csv").write_text("q,y\na,b\n")
    assert "--columns" in mistake(capsys, "evaluate", tmp_path / "run", tmp_path / "new.csv")


def note(capsys):
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    return line


# --task identify


def test_a_classifier_is_evaluated_and_searched(classifier, tmp_path, capsys):
    run, data = classifier
    more = data.parent / "more.csv"
    more.write_text(data.read_text() + "images/DejaVuSans-41.png,UNKNOWN CLASS\n")
    succeeds("evaluate", run, more, "--out", tmp_path / "e.json")
    report = json.loads((tmp_path / "e.json").read_text())
    found = open_run(run)
    rows = open_table(str(data)).arrow
    features = reference(run, data, "image", "image")
    logits = features @ torch.nn.functional.normalize(found.centers, dim=1).T
    labels = torch.tensor([found.classes.index(name) for name in rows["text"].to_pylist()])
    best = logits.topk(5, dim=1).indices == labels[:, None]
    assert report["rows"] == len(labels) + 1
    assert report["images_of_these_classes"] == len(labels)
    assert report["top_1"] == pytest.approx(best[:, 0].double().mean().item(), abs=2 / len(labels))
    assert report["top_5"] == pytest.approx(best.any(1).double().mean().item(), abs=2 / len(labels))
    assert report["top_5"] > 5 * report["chance"]["top_5"]
    assert 0 < report["verification"]["tar"] <= 1
    capsys.readouterr()
    picture = data.parent / "images" / "DejaVuSerif-416.png"
    succeeds("search", run, picture, "-k", "2")
    assert printed_places(capsys)[0] == str(picture)
    assert "only has an encoder of pictures" in mistake(capsys, "search", run, "a text")


# the run folder


def block(readme):
    (found,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    return found


def test_a_checkpoint_is_opened_and_gives_the_features_of_its_weights(run, data, tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "model.safetensors").unlink()
    shutil.rmtree(unfinished / "encoders")
    for folder, out, options in (
        (run, "a.npy", []),
        (unfinished, "b.npy", []),  # the last step has a checkpoint
        (run, "c.npy", ["--weights", "checkpoint"]),
    ):
        capsys.readouterr()
        succeeds("embed", folder, data, "--out", tmp_path / out, *options)
        is_final = "weights: the checkpoint after step 25 of 25\n" not in capsys.readouterr().out
        assert is_final == (out == "a.npy")
    assert torch.equal(npy(tmp_path / "a.npy"), npy(tmp_path / "b.npy"))
    assert torch.equal(npy(tmp_path / "a.npy"), npy(tmp_path / "c.npy"))
    line = mistake(capsys, "embed", unfinished, data, "--weights", "final")
    assert "it has best and checkpoint" in line
    shutil.copyfile(run / "model.safetensors", unfinished / "best.safetensors")
    capsys.readouterr()
    succeeds("embed", unfinished, data, "--out", tmp_path / "d.npy", "--weights", "best")
    assert "weights: those of the best validation\n" in capsys.readouterr().out, "this file has no step"
    assert torch.equal(npy(tmp_path / "a.npy"), npy(tmp_path / "d.npy"))


def test_the_weights_that_are_not_final_are_named(data, tmp_path, capsys):
    """The run was extended, so that its steps are not those of its configuration."""
    run = tmp_path / "run"
    small = ["--steps", "2", "--no-audit", "--workers", "0", "--keep-best", "--validate-every", "2"]
    succeeds("train", "--data", data, "--run-folder", run, *SMALL, *small)
    succeeds("train", "--resume", run, "--until-step", "3")
    with TensorFile(run / "best.safetensors") as file:
        step = file.metadata["step"]
    queries = tmp_path / "q.csv"
    queries.write_text("text\nletter\n")
    for argv in (["search", run, "letter"], ["search", run, "--queries", queries], ["evaluate", run, data]):
        for weights, line in (
            ("auto", ""), ("final", ""), ("checkpoint", "weights: the checkpoint after step 3 of 3"),
            ("best", f"weights: those of the best validation after step {step} of 3"),
        ):  # fmt: skip
            capsys.readouterr()
            succeeds(*argv, "--weights", weights)
            lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("weights: ")]
            assert lines == [line] * bool(line)
    for name in ("model", "checkpoint", "best"):
        (run / f"{name}.safetensors").unlink()
    line = mistake(capsys, "search", run, "letter")
    assert "no checkpoint yet; the first comes after step 2, or" in line


# mistakes


def damage(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def other_version(folder):
    (folder / "config.json").write_text('{"task": "retrieve"}')


def other_sizes(folder):
    file = folder / "encoders" / "text" / "encoder.json"
    file.write_text(file.read_text().replace('"text_buckets": 512', '"text_buckets": 256'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage, "model.safetensors is damaged or incomplete"),
        (other_version, "is not the configuration of a run of this version"),
        (other_sizes, "are not those that model.safetensors was written with"),
        (lambda folder: (folder / "encoders" / "encoders.json").unlink(), "are not those that model.safetensors was"),
        (lambda folder: [(folder / name).unlink() for name in ("model.safetensors", "checkpoint.safetensors")],
         "the run has had no checkpoint yet"),
    ],
    ids=["damaged", "version", "sizes", "no encoders", "no weights"],
)  # fmt: skip
def test_a_wrong_run_folder_is_refused(run, data, tmp_path, capsys, change, message):
    copy = shutil.copytree(run, tmp_path / "copy")
    change(copy)
    assert message in mistake(capsys, "embed", copy, data, "--out", tmp_path / "f.npy")
    assert not (tmp_path / "f.npy").exists()


def test_mistakes_in_data_and_queries_are_one_line(run, data, tmp_path, capsys):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text('text\n"  "\n')
    (tmp_path / "bad.png").write_bytes(b"nothing")
    succeeds("embed", run, data, "--out", tmp_path / "whole.parquet")
    table = pq.read_table(tmp_path / "whole.parquet")
    facts = table.schema.metadata[b"wholebatch"]
    values = pa.array([[0.0] * 4] * len(table), pa.list_(pa.float32(), 4))
    for name, column, metadata in (("narrow", values, facts), ("of-lists", values.cast(pa.list_(pa.float32())), facts),
                                   ("bad", values, b"nothing")):  # fmt: skip
        changed = table.set_column(table.column_names.index("features"), "features", column)
        pq.write_table(changed.replace_schema_metadata({b"wholebatch": metadata}), tmp_path / f"{name}.parquet")
    out = ["--out", tmp_path / "f.npy"]
    cases = [
        (["embed", run, tmp_path / "other.csv", *out], "has no column for the image or the text; its columns are a, b"),
        (["embed", run, data, "--column", "tetx", *out], "--column:"),
        (["embed", run, tmp_path / "empty.csv", *out], "line 2: the text, column 'text', is empty"),
        (["embed", run, data, "--side", "query", *out], "--side must be a side of the run, which has image, text"),
        (["search", run, tmp_path / "bad.png"], "cannot be read as an image"),
        (["search", run, "a", "--in", tmp_path / "bad.parquet"], "cannot be read as a file of features"),
        (["search", run, "a", "--in", tmp_path / "of-lists.parquet"], "cannot be read as a file of features"),
        (["search", run, "a", "--in", tmp_path / "narrow.parquet"], "has features of 4, expected 32"),
        (["search", run, "a", "--in", tmp_path / "other.csv"], "has no column for the image"),
        (["search", run, "--queries", tmp_path / "other.csv"], "has no column for the"),
        (["evaluate", run, tmp_path / "other.csv"], "has no column for the image"),
        (["export", run, tmp_path / "x", "--to", "sentence-transformers"], "needs a text encoder of transformers"),
        (["export", run, "--to", "open_clip", tmp_path / "x"], "needs an image encoder of timm"),
    ]  # fmt: skip
    for argv, message in cases:
        assert message in mistake(capsys, *argv), argv
    assert not (tmp_path / "x").exists()


def test_features_of_another_model_are_refused(run, classifier, data, tmp_path, capsys):
    succeeds("embed", run, data, "--out", tmp_path / "f.parquet")
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "features", ignore_errors=True)
    table = pq.read_table(tmp_path / "f.parquet")
    facts = json.loads(table.schema.metadata[b"wholebatch"]) | {"weights": "0" * 64}
    pq.write_table(
        table.replace_schema_metadata({b"wholebatch": json.dumps(facts).encode()}), tmp_path / "other.parquet"
    )
    assert "another model or checkpoint" in mistake(capsys, "search", run, "a", "--in", tmp_path / "other.parquet")


# docs/own_data.md


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Make the folders that the page names, of pictures whose texts are their names."""
    folder = tmp_path_factory.mktemp("page")
    rows = open_table(str(write_pairs(folder / "pairs"))).arrow
    for name, some in (("photos", slice(0, 150)), ("other-photos", slice(100, 150))):
        (folder / name).mkdir()
        for image, text in list(zip(rows["image"].to_pylist(), rows["text"].to_pylist(), strict=True))[some]:
            shutil.copyfile(folder / "pairs" / image, folder / name / f"{text.lower().replace(' ', '-')}.png")
    shutil.copyfile(folder / "pairs" / "images" / "7a.png", folder / "photos" / "red-bird.png")
    (folder / "queries.csv").write_text("text\na red bird\nlatin small letter b\n")
    return folder


def test_every_command_of_the_page_runs(photos, monkeypatch, capsys):
    """`train` gets a small model and few steps; the two exports end with a line that says what they need."""
    monkeypatch.chdir(photos)
    page = (Path(__file__).parent.parent / "docs" / "own_data.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL) for line in block.splitlines()]
    lines = [line for line in lines if not line.endswith("\\")]  # that one wants pretrained encoders
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("wholebatch ")]
    assert [argv[0] for argv in commands] == [
        "train", "search", "search", "search", "search", "embed", "embed", "search", "evaluate", "export", "export",
    ]  # fmt: skip
    for argv in commands:
        small = [*SMALL, "--steps", "12", "--no-audit", "--workers", "0"] if argv[0] == "train" else []
        assert main([*argv, *small]) == (2 if argv[0] == "export" else 0), argv
    assert "needs a text encoder of transformers" in capsys.readouterr().err
    assert {"features.parquet", "texts.npy", "found.jsonl", "figures.json"} <= {path.name for path in photos.iterdir()}
    assert (photos / "runs" / "photos" / "search.html").exists()
    assert len(json.loads((photos / "found.jsonl").read_text().splitlines()[0])["results"]) == 10
    (row,) = [
        k for k, name in enumerate(pq.read_table("features.parquet")["image"].to_pylist()) if name == "red-bird.png"
    ]
    texts = npy("texts.npy")
    assert len(texts) == 151
    assert texts[row].norm().item() == pytest.approx(1)


def test_a_sheet_that_nobody_asked_for_stops_no_search(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "search.html").unlink(missing_ok=True)
    (copy / "search.html").mkdir()
    succeeds("search", copy, "letter", "-k", "1")
    assert f"no page of the pictures: --sheet: '{copy / 'search.html'}' cannot be written" in capsys.readouterr().out


# What is executed, and what a terminal gets.


def test_code_that_was_added_to_a_run_is_not_executed(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    encoder = copy / "encoders" / "text"
    values = json.loads((encoder / "encoder.json").read_text())
    (encoder / "encoder.json").write_text(json.dumps({**values, "form": "file", "function": "make", "kind": "text"}))
    (encoder / "encoder.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit(7)\n")
    for trust in ([], ["--trust"]):
        said = mistake(capsys, "search", copy, "A", *trust)
        assert "are not those that model.safetensors was written with" in said
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("change", ["a byte", "a file more", "a file less", "a link"])
def test_every_file_of_the_encoders_is_compared(run, tmp_path, capsys, change):
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "encoders" / "text" / "encoder.json"
    if change == "a byte":
        file.write_bytes(file.read_bytes().replace(b" ", b"  ", 1))
    elif change == "a file more":
        (file.parent / "more.txt").write_text("")
    else:
        moved = shutil.move(file, tmp_path / "encoder.json")
        if change == "a link":
            file.symlink_to(moved)
    expected = "is a link" if change == "a link" else "are not those that model.safetensors was written with"
    assert expected in mistake(capsys, "search", copy, "A")


def test_a_terminal_obeys_no_text_of_the_data(run, data, capsys):
    orders = "\x1b]0;owned\x07\x1b[2J\x9b1m\x08\u202ecba\ufeff"
    rows = [{"image": f"images/{at}.png", "text": f"{orders} {at}"} for at in (62, 65)]
    (data.parent / "orders.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    succeeds("search", run, data.parent / "images" / "62.png", "--in", data.parent / "orders.jsonl", "-k", "2")
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in printed
    assert not {*printed} & {*"\x1b\x07\x9b\x08\u202e\ufeff"}


def test_a_stream_without_a_letter_gets_an_escape(run, data):
    rows = [{"image": f"images/{at}.png", "text": f"{at} \u0939\u093f\u0928\u094d\u0926\u0940"} for at in (62, 65)]
    (data.parent / "hindi.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["search", run, data.parent / "images" / "62.png", "--in", data.parent / "hindi.jsonl", "-k", "2"]
    for encoding in ("ascii", "cp1252"):
        found = subprocess.run(
            [sys.executable, "-m", "wholebatch", *map(str, command)],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        )
        assert b"\\u0939\\u093f" in found.stdout

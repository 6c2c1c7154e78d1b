"""No row of a user's data vanishes, and no column is taken or replaced, without a line that says so."""

import json
import tarfile
from dataclasses import replace

import pytest
import torch
from data_sets import add, picture, png, write_pictures

from wholebatch._base.user_error import UserError
from wholebatch_train.config import TrainConfig
from wholebatch_train.data.from_table import table_pairs
from wholebatch_train.data.open_table import open_table

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pairs_of(path, **settings):
    """Return the (path or text, text) of each row, and the lines about the data."""
    said = []
    table = open_table(str(path), said.append)
    pairs = table_pairs(table, replace(CONFIG, **settings), said.append)
    texts = pairs.sides["text"].items(torch.arange(len(table)))
    return [*zip(table.arrow["image"].to_pylist(), texts, strict=True)], said


def line(said, word):
    """Return the one line with a word."""
    (found,) = [each for each in said if word in each]
    return found


def classes(folder, count=20, of_class=2):
    """Write pictures in folders of classes, none of which is equal to another."""
    for number in range(count):
        (folder / f"class-{number}").mkdir(parents=True)
        for place in range(of_class):
            picture(number * of_class + place).save(folder / f"class-{number}" / f"{place}.png")
    return folder


def test_links_to_folders_of_classes_are_followed(tmp_path):
    whole, linked = classes(tmp_path / "whole"), tmp_path / "linked"
    linked.mkdir()
    for number in range(20):
        (linked / f"class-{number}").symlink_to(whole / f"class-{number}", target_is_directory=True)
    assert pairs_of(linked) == pairs_of(whole)
    (tmp_path / "link").symlink_to(linked, target_is_directory=True)
    assert pairs_of(tmp_path / "link")[0] == pairs_of(whole)[0], "a link to the data themselves is none to refuse"


@pytest.mark.parametrize("target", [".", "..", "class-0", "../.."])
def test_links_in_a_circle_are_refused(tmp_path, target):
    folder = classes(tmp_path / "data" / "classes", 3)
    (folder / "class-0" / "again").symlink_to(folder / "class-0" / target, target_is_directory=True)
    if target == "class-0":  # two links, of which none leads to a folder that it lies in
        (folder / "class-0" / "again").unlink()
        (folder / "class-0" / "again").symlink_to(folder / "class-1", target_is_directory=True)
        (folder / "class-1" / "back").symlink_to(folder / "class-0", target_is_directory=True)
    with pytest.raises(UserError, match=r"^--data: '.*(again|back)' is a link to '.*', in which it lies; "):
        open_table(str(folder))


def test_a_picture_beside_the_folders_of_classes_is_named_and_changes_no_label(tmp_path):
    folder = classes(tmp_path / "classes")
    rows, said = pairs_of(folder)
    assert len({text for _, text in rows}) == 20
    picture(100).save(folder / "stray one.png")
    with_stray, lines = pairs_of(folder)
    assert with_stray == rows
    assert line(lines, "stray") == "pictures in no subfolder are left out, 1: 'stray one.png'"
    assert not any("left out" in each for each in said)
    for number in range(7):
        picture(200 + number).save(folder / f"another-{number}.png")
    found = line(pairs_of(folder)[1], "subfolder are")
    assert found.startswith("pictures in no subfolder are left out, 8: 'another-0.png', ")
    assert found.endswith("'another-4.png', ...")


def test_names_of_files_are_texts_where_most_are_beside_the_subfolder(tmp_path):
    for number, name in enumerate(("red fox.png", "blue sea.png", "more/snow.png")):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(tmp_path / "data" / name)
    rows, _ = pairs_of(tmp_path / "data")
    assert {text for _, text in rows} == {"red fox", "blue sea", "snow"}


def test_other_files_are_counted_by_their_ending(tmp_path):
    folder = classes(tmp_path / "classes", 3)
    for name in ("a.HEIC", "b.heic", "c.mp4", "notes", ".hidden"):
        (folder / "class-1" / name).write_bytes(b"x")
    (folder / "__MACOSX").mkdir()
    picture(50).save(folder / "__MACOSX" / "0.png")
    rows, said = pairs_of(folder)
    assert len(rows) == 6
    assert line(said, "heic") == "other files are left out: 2 .heic, 1 .mp4, 1 without an ending"
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.heic").write_bytes(b"x")
    with pytest.raises(UserError, match=r"holds no pictures, .*; its files are 1 \.heic$"):
        open_table(str(tmp_path / "none"))


def test_the_text_beside_a_picture_has_its_name_in_any_case_and_form(tmp_path):
    for number, (name, text) in enumerate((("I0.JPG", "I0.TXT"), ("i1.png", "i1.txt"), ("é.png", "e\u0301.txt"))):
        picture(number).save(tmp_path / name)
        (tmp_path / text).write_text(f"text {number}")
    assert [text for _, text in sorted(pairs_of(tmp_path)[0])] == ["text 0", "text 1", "text 2"]


def test_what_a_mac_adds_to_a_shard_is_no_member_of_a_row(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(4):
            add(tar, f"._{number}.png", b"Mac OS X")
            add(tar, f"{number}.png", png(number))
            add(tar, f"__MACOSX/{number}.png", png(9))
            add(tar, f"._{number}.txt", b"Mac OS X")
            add(tar, f"{number}.txt", f"text {number}".encode())
    rows, _ = pairs_of(tmp_path / "a.tar")
    assert [text for _, text in rows] == [f"text {number}" for number in range(4)]


def test_columns_that_differ_in_case_are_several(tmp_path):
    names = write_pictures(tmp_path)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"image": x, "Text": f"a {x}", "text": f"b {x}"}) + "\n" for x in names))
    with pytest.raises(UserError, match="several columns that could be the text: Text, text; name one, "):
        pairs_of(path)
    assert [text for _, text in pairs_of(path, columns="text=Text")[0]] == [f"a {name}" for name in names]
    path.write_text("".join(json.dumps({"image": x, "Text": f"a {x}", "text": f"a {x}"}) + "\n" for x in names))
    assert [text for _, text in pairs_of(path)[0]] == [f"a {name}" for name in names], "equal ones are one"

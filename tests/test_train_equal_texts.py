"""Texts that an encoder reads alike are one text: in groups, splits, negatives, right answers, counts and searches."""

import json
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from data_sets import picture, write_pictures

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train.config import TrainConfig
from wholebatch_train.data.cache import stamp_of_pictures
from wholebatch_train.data.from_table import table_pairs
from wholebatch_train.data.load import load_data
from wholebatch_train.data.open_table import open_table
from wholebatch_train.data.pairs import stated_pairs
from wholebatch_train.data.sides import Texts
from wholebatch_train.encoders import small
from wholebatch_train.encoders.words import identity, split_words, tokenize
from wholebatch_train.using.items import Items, distinct

CONFIG = TrainConfig(workers=0, image_size=16, image_channels=3)
CAPTIONS = ("café bleu", "über alles", "red bird", "naïve idea", "piñata five", "señor who", "crème cake",
            "jalapeño hot", "façade big", "smörgås small")  # fmt: skip
SPELLINGS = (str, str.title, lambda text: "  ".join(text.split()), lambda text: decomposed(text.upper()))


def decomposed(text):
    """Return a text as Macs write names of files."""
    return unicodedata.normalize("NFD", text)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spelled(folder, spellings=SPELLINGS):
    """Write 10 captions in some spellings, each with a picture of its own."""
    names = write_pictures(folder, len(CAPTIONS) * len(spellings))
    texts = [spell(caption) for caption in CAPTIONS for spell in spellings]
    lines = [json.dumps({"image": name, "text": text}) + "\n" for name, text in zip(names, texts, strict=True)]
    (folder / "spelled.jsonl").write_text("".join(lines))
    return folder / "spelled.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी लाल पक्षी", ["हिन्दी", "लाल", "पक्षी"]),
        ("சிவப்பு பறவை", ["சிவப்பு", "பறவை"]),
        ("شَمْس", ["شَمْس"]),
        ("שָׁלוֹם", [unicodedata.normalize("NFC", "שָׁלוֹם")]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),  # noqa: RUF001
        ("q\u0323\u0301a", ["Q\u0323\u0301A"]),  # no composed letter exists
        ("\U000112b0\U000112df\U000112b0", ["\U000112b0\U000112df\U000112b0"]),  # beyond 16 bits
        ("1️⃣ ❤️", ["1️⃣", "❤️"]),
        ("a_b-c", ["A", "B", "C"]),
    ],
)
def test_marks_and_joiners_belong_to_the_letter_before(text, words):
    assert split_words(text) == words
    assert split_words(decomposed(text)) == split_words(text)


def test_letters_in_another_order_are_another_text():
    one, other = (tokenize([text], max_words=4, buckets=1 << 20) for text in ("राम", "मार"))
    assert not torch.equal(one.pieces, other.pieces)
    assert identity("राम") != identity("मार")
    assert identity("Straße") == identity("STRASSE") != identity("strase")


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({}, 10),
        ({"text_encoder": "transformers:some"}, 40),  # that may read case and spaces
        ({"task": "identify"}, 40),  # labels, which no encoder reads
    ],
)
def test_spellings_are_one_group_where_the_encoder_reads_them_alike(tmp_path, settings, groups):
    pairs = table_pairs(open_table(str(spelled(tmp_path))), replace(CONFIG, **settings))
    assert (len(pairs), len(pairs.order)) == (groups, 40)


@pytest.mark.parametrize("settings", [{}, {"text_encoder": "transformers:some"}, {"task": "identify"}])
def test_the_form_of_unicode_makes_no_other_text_for_any_encoder(tmp_path, settings):
    pairs = table_pairs(open_table(str(spelled(tmp_path, (str, decomposed)))), replace(CONFIG, **settings))
    assert (len(pairs), len(pairs.order)) == (10, 20)
    assert {*pairs.sides["text"].items(torch.arange(20))} == {*CAPTIONS}, "the encoder reads one form as well"


def test_no_spelling_is_on_both_sides_of_the_split_and_each_is_a_right_answer(tmp_path):
    _, (pairs, split) = load_data(replace(CONFIG, data=str(spelled(tmp_path)), batch_size=2), 1)
    parts = [{int(row) // 4 for row in pairs.order[torch.isin(pairs.group_of[pairs.order], part)]}
             for part in (split.train, split.validation, split.test)]  # fmt: skip
    assert sum(map(len, parts)) == len(set.union(*parts)) == 10
    stated = stated_pairs(pairs, pairs.order)
    assert [len(rows) for rows in stated.rows] == [40, 10]
    assert stated.right.shape == (2, 40)


def test_a_negative_in_another_spelling_than_its_positive_is_none(tmp_path):
    rows = [{"query": "q one", "positive": "Café noir", "neg": [decomposed("café  NOIR"), "tea"]},
            {"query": "q two", "positive": "milk", "neg": ["water", "tea"]}]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = table_pairs(open_table(str(tmp_path / "q.jsonl")), CONFIG)
    positive, (same, tea) = pairs.numbers["document"][0], pairs.negatives.of(torch.tensor([0]))[1]
    assert positive == same != tea
    left = pairs.negatives.without(pairs.numbers["document"][:1])
    assert left.of(torch.tensor([0, 1]))[0] == ["tea", "water", "tea"]


def test_a_search_lists_a_text_once(tmp_path):
    encoder = small.TextEncoder(TrainConfig().model)
    run = SimpleNamespace(encoder=lambda _: encoder)
    items = Items("text", Texts(["Red Bird", "red  bird", "bird red"]), torch.arange(3), "texts")
    assert distinct(run, items).rows.tolist() == [0, 2]


def test_a_query_finds_the_same_in_every_form(tmp_path, capsys):
    """The names of the pictures are decomposed."""
    folder, run = tmp_path / "photos", tmp_path / "run"
    folder.mkdir()
    for number, caption in enumerate(CAPTIONS):
        picture(number, 16).save(folder / f"{decomposed(caption)}.png")
    options = ["--test-texts", "1", "--validation-texts", "1", "--steps", "9", "--no-audit", "--workers", "0"]
    assert main(["train", "--data", str(folder), "--run-folder", str(run), "--model.image-width", "8", *options]) == 0
    printed = []
    for query in ("Café", decomposed("café")):
        capsys.readouterr()
        assert main(["search", str(run), query]) == 0
        printed.append(capsys.readouterr().out.splitlines()[-11:-1])
    assert printed[0] == printed[1]
    assert all(".png" in line for line in printed[0])


@pytest.mark.parametrize(
    ("named", "on_disk"),
    [
        ("images/café.png", decomposed("images/café.png")),
        (decomposed("images/café.png"), "images/café.png"),
        ("images\\0.png", "images/0.png"),
        ("images\\café.png", decomposed("images/café.png")),
    ],
)
def test_a_path_of_another_system_is_found(tmp_path, named, on_disk):
    write_pictures(tmp_path, 2)
    (tmp_path / "images" / "0.png").rename(tmp_path / on_disk)
    rows = [{"image": named, "text": "one"}, {"image": "images/1.png", "text": "two"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    side = table_pairs(open_table(str(path)), CONFIG).sides["image"]
    assert side.items(torch.tensor([0]))[0].tobytes() == picture(0).tobytes()
    stamp = stamp_of_pictures(side)
    picture(7).save(tmp_path / on_disk)
    assert stamp_of_pictures(side) != stamp, "what is kept about the pictures depends on this file"
    path.write_text(path.read_text().replace("0.png", "8.png").replace("caf", "kaf"))
    with pytest.raises(UserError, match=r"line 1: there is no image .*; --skip-bad"):
        table_pairs(open_table(str(path)), CONFIG)

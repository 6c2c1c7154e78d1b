"""The note of a search about words that no text of a run's data has."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch_train.data.tables.table import Table
from wholebatch_train.encoders.words import split_words
from wholebatch_train.using import search as module
from wholebatch_train.using.search import note_of, unknown_words

AWKWARD = "aéßſıİςσΣﬁŉ²5_-. \nह\u093e\u0301\u200d"  # noqa: RUF001


def asked(queries, columns, *, by="text", encoders=None, text_encoder="small", named=""):
    """Return the unknown words of queries, whose encoder has read the sides that have the same in `encoders`."""
    encoders = encoders or {"image": "of images", "text": "of texts"}
    config = SimpleNamespace(text_encoder=text_encoder, columns=named, task="retrieve")
    run = SimpleNamespace(config=config, sides=tuple(encoders), encoder=encoders.get)
    queries = [queries] if isinstance(queries, str) else queries
    return unknown_words(run, queries, by, Table(Path("rows.csv"), pa.table(columns), Path()))


def of_texts(query, *texts, **options):
    return asked(query, {"image": [*texts], "text": [*texts]}, **options)


@given(st.text(AWKWARD, max_size=6), st.lists(st.text(AWKWARD, min_size=1, max_size=8), min_size=1))
def test_words_are_those_that_the_encoder_reads(query, texts):
    """Letters whose upper case is another or longer ones are no other words than the encoder's."""
    texts = [f"{text}." for text in texts]  # none is empty
    known = {word for text in texts for word in split_words(text.strip())}
    expected = [word.lower() for word in dict.fromkeys(split_words(query)) if word not in known]
    assert of_texts(query, *texts) == expected


@pytest.mark.parametrize(
    ("query", "unknown"), [("straße", []), ("STRASSE", []), ("strass", ["strass"]), ("e-mail", [])]
)
def test_the_case_of_a_query_does_not_matter(query, unknown):
    assert of_texts(query, "Die Straße, die E-Mail") == unknown


@pytest.mark.parametrize("query", ["红色", "鞋子", "色的鞋"])
def test_words_of_scripts_without_spaces_are_where_their_characters_are(query):
    assert of_texts(query, "一双红色的鞋子") == []
    assert of_texts("蓝色", "一双红色的鞋子") == ["蓝色"]
    many = [f"word{number}" for number in range(40)]
    assert of_texts([query, "蓝色", *many], "一双红色的鞋子", *many) == ["蓝色"]


def test_a_word_is_known_if_its_encoder_has_read_it_on_either_side():
    rows = {"query": ["where is it"], "positive": ["in Rome"]}
    shared, two = {"query": 1, "document": 1}, {"query": 1, "document": 2}
    assert asked("Where is Rome now", rows, by="query", encoders=shared) == ["now"]
    assert asked("Where is Rome now", rows, by="query", encoders=two) == ["rome", "now"]
    assert asked("Where is Rome now", rows, by="document", encoders=two) == ["where", "is", "now"]
    named = {"a": ["where is it"], "b": ["in Rome"], "positive": ["now"]}
    assert asked("Rome now", named, by="query", encoders=shared, named="query=a,positive=b") == ["now"]


def test_the_last_texts_of_many_count(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 3)
    assert of_texts("last word none", *["first text"] * 9, "the last word") == ["none"]


def test_the_tokens_of_a_pretrained_encoder_are_no_words():
    assert of_texts("unheard of", "a text", text_encoder="transformers:bert") == []


def test_the_words_of_several_queries_are_found_in_one_reading(monkeypatch):
    """Each word is named once, in the order of the queries; the texts are read once for all of them."""
    readings = []
    parts = module._parts
    monkeypatch.setattr(module, "_parts", lambda column: readings.append(column) or parts(column))
    queries = ["red bird", "blue Bird", "red whale", *(f"new{chr(97 + i)} bird" for i in range(12))]
    found = of_texts(queries, "a red bird", "a newb")
    assert found == ["blue", "whale", *(f"new{chr(97 + i)}" for i in range(12) if i != 1)]
    assert len(readings) == 1
    assert note_of(found).startswith('note: no text of the data has "blue", "whale", "newa", "newc", ')
    assert '"newi" and 3 more; the built-in' in note_of(found)
    assert note_of(found[:10]) == note_of(found).replace(" and 3 more", "")

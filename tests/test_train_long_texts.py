"""How many words of a text the built-in encoder reads: a choice that is left to the data, and said."""

import json
from dataclasses import replace

import pytest

from wholebatch.__main__ import main
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.encoders.make import make_dual_encoder, open_dual_encoder, save_encoders

CONFIG = TrainConfig(workers=0, validation_texts=1, test_texts=1)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded(folder, lengths, **settings):
    """Return the configuration for documents of so many words, with queries of as many, and the line about it."""
    rows = [{"query": " ".join([f"q{number}", *["word"] * (length - 2)]), "positive": " ".join(
        [f"d{number}", *["word"] * (length - 2)])} for number, length in enumerate(lengths)]  # fmt: skip
    path = folder / f"{len(lengths)}-{max(lengths)}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # "q7" are two words, a letter and a digit
    said = []
    config, _ = load_data(replace(CONFIG, data=str(path), **settings), 1, said.append)
    return config, [line for line in said if "max-words" in line]


def test_99_of_100_texts_are_read_to_their_end_within_bounds(tmp_path):
    short, line = loaded(tmp_path, [5] * 9)
    assert (short.model.max_words, line) == (12, []), "and no text is cut"
    middle, line = loaded(tmp_path, [30] * 9)
    assert middle.model.max_words == 30
    assert line == ["of a text 30 words are read; 0.0% of those to train on are longer, and are cut off "
                    "(--model.max-words)"]  # fmt: skip
    long, line = loaded(tmp_path, [2000] * 9)
    assert long.model.max_words == 128
    assert "100.0% of those to train on" in line[0]


def test_a_few_long_texts_do_not_decide(tmp_path):
    lengths = [8] * 1200
    for number in range(0, 1200, 240):
        lengths[number] = 100
    config, line = loaded(tmp_path, lengths)
    assert config.model.max_words == 12
    assert "0.4% of those" in line[0], "5 of about 1,200 texts"


@pytest.mark.parametrize(
    "settings", [{"model": ModelConfig(max_words=7)}, {"text_encoder": "transformers:some"}]
)  # fmt: skip
def test_a_choice_of_the_user_stays_and_other_encoders_have_limits_of_their_own(tmp_path, settings):
    config, line = loaded(tmp_path, [40] * 9, **settings)
    assert config.model == settings.get("model", ModelConfig())
    assert line == []


def test_words_far_behind_the_twelfth_are_read_in_training_and_from_a_run_folder(tmp_path):
    config, _ = loaded(tmp_path, [40] * 9)
    kinds = {"query": "text", "document": "text"}
    dual = make_dual_encoder(config, kinds)
    save_encoders(tmp_path / "saved", dual)
    texts = [" ".join([*["word"] * 30, last]) for last in ("left", "right")]
    for each in (dual, open_dual_encoder(tmp_path / "saved")):
        one, other = each.encode("query", each.encoder("query").prepare(texts))
        assert (one - other).abs().max() > 1e-4
    twelve = make_dual_encoder(replace(config, model=ModelConfig(max_words=12)), kinds)
    one, other = twelve.encode("query", twelve.encoder("query").prepare(texts))
    assert (one == other).all(), "which this test would notice"
    assert make_dual_encoder(TrainConfig(image_size=16), kinds).encoder("query").prepare.keywords["max_words"] == 12


def test_less_than_no_words_are_refused(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path), "--model.max-words", "-1"]) == 2
    assert "--model.max-words must be at least 0, got -1" in capsys.readouterr().err

"""The parts of the examples, with small encoders instead of pretrained ones, which no test can download."""

import importlib.util
import math
import random
import sys
from collections import UserDict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from wholebatch.testing import run_ranks

SOURCE = '''
def documented(x):
    """Add one to a number.

    And more.
    """
    y = x + 1
    y = y * 1
    return y


class Some:
    async def method(self):
        """Give back all that there is."""
        first = 1
        second = 2
        return first, second


def short(x):
    """Add one to a number, shortly."""
    return x + 1


def terse(x):
    """Add."""
    y = x + 1
    y = y * 1
    return y


def bare(x):
    y = x + 1
    return y
'''


@contextmanager
def example(name):
    file = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def code_search():
    with example("code_search") as module:
        yield module


def test_pairs_are_sentences_and_bodies(code_search, tmp_path):
    (tmp_path / "good.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("def f(:\n")
    found = [*code_search.functions(tmp_path / "good.py", "good")]
    assert {(pair.docstring, pair.body) for pair in found} == {
        ("Add one to a number.", "y = x + 1\ny = y * 1\nreturn y"),
        ("Give back all that there is.", "first = 1\nsecond = 2\nreturn first, second"),
    }
    assert not [*code_search.functions(tmp_path / "bad.py", "bad")]


def pairs_of(code_search, count):
    return [code_search.Pair(f"package{k % 50}", f"docstring {k}", f"body {k}") for k in range(count)]


def test_no_package_is_on_both_sides(code_search):
    config = code_search.Config(model="", pairs=300, candidates=60)
    train, test = code_search.split(pairs_of(code_search, 1000), config)
    assert (len(train), len(test)) == (300, 60)
    assert not {pair.package for pair in train} & {pair.package for pair in test}
    with pytest.raises(SystemExit, match="ask for more"):
        code_search.split(pairs_of(code_search, 100), config)


class Batch(UserDict):
    def to(self, _device):
        return self


def tokenizer(texts, **_):
    """Return the number at the end of each text."""
    return Batch(number=torch.tensor([int(text.split()[-1]) for text in texts]))


class Table(nn.Module):
    """The encoder of both sides: a vector for each number."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors, self.log_scale = nn.Parameter(vectors), nn.Parameter(torch.tensor(2.0))

    def forward(self, number):
        return normalize(self.vectors[number], dim=1), self.log_scale.exp()


def test_search_ranks_the_body_of_each_docstring(code_search):
    config = code_search.Config(model="", chunk_size=2)
    angles = torch.tensor([0.0, 1.0, 2.0])

    class Shifted(Table):
        """Return vectors of bodies, moved by 0.8: the body of 0 is nearer to 1."""

        def forward(self, number):
            shifted = angles[number % 10] + 0.8 * (number >= 10)
            return torch.stack([shifted.cos(), shifted.sin()], 1), self.log_scale.exp()

    # Docstrings at 0, 1, 2, bodies at 0.8, 1.8, 2.8: each docstring but the first has another's body at 0.2.
    found = code_search.search(
        Shifted(torch.zeros(1, 1)), tokenizer, [code_search.Pair("", f"d {k}", f"b {k + 10}") for k in range(3)], config
    )
    assert math.isclose(found["MRR"], (1 + 1 / 2 + 1 / 2) / 3, rel_tol=1e-6)
    assert found["recall@10"] == 1.0


def test_training_finds_the_pairs_of_its_batches(code_search, capsys):
    torch.manual_seed(0)
    config = code_search.Config(model="", chunk_size=3, learning_rate=0.5)
    pairs = [code_search.Pair("", f"d {k % 8}", f"b {8 + k % 8}") for k in range(8 * 20)]
    encoder = Table(torch.randn(16, 4))
    losses = code_search.train(encoder, tokenizer, pairs, 8, config)
    assert len(losses) == 20
    assert losses[-1] < 0.1 * losses[0]
    assert "step 20 of 20" in capsys.readouterr().out
    assert code_search.search(encoder, tokenizer, pairs[:8], config)["MRR"] == 1.0


def test_jax_trains_the_same_on_eight_devices_as_on_one():
    pytest.importorskip("jax")
    curves = []
    with example("jax_glyphs") as jax_glyphs:
        for devices in (8, 1):
            config = jax_glyphs.Config(devices=devices, steps=3, batch_size=24, chunk_size=2, embedding_size=16)
            losses, recall = jax_glyphs.train(config)
            assert 0 <= recall <= 1
            curves.append(losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert len(set(curves[0])) == 3


NOUNS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in ("ner", "rrow", "stle", "mp")]


def texts(module, count):
    """Return pairs of ten words and of four of these."""
    found = []
    for k in range(count):
        words = random.Random(k).sample(NOUNS, 10)
        found.append(module.Pair(f"file{k % 20}", f"name{k}", tuple(words[::3]), tuple(words)))
    return found


def trained_and_searched():
    with example("late_interaction") as module:
        config = module.Config(steps=8, batch_size=24, candidates=60, embedding_size=16)
        return [*module.runs(texts(module, 300), config, lambda line: None)]


def test_late_interaction_is_the_same_on_two_ranks():
    rows = trained_and_searched()
    assert [row["vectors"] for row in rows] == ["one vector", "one per token"]
    for of_rank in run_ranks(rounded_of_rank, 2):
        for row, (losses, recalls) in zip(rows, of_rank, strict=True):
            assert losses == pytest.approx(row["losses"], rel=1e-4)
            assert recalls == pytest.approx([row["recall@1"], row["recall@10"]], abs=2.5 / 60)
    for row in rows:
        assert row["losses"][-1] < row["losses"][0]
        assert row["recall@1"] > 10 / 60


def rounded_of_rank():
    return [(row["losses"], [row["recall@1"], row["recall@10"]]) for row in trained_and_searched()]


@pytest.fixture(scope="module")
def late_interaction():
    with example("late_interaction") as module:
        yield module


def test_texts_are_sentences_and_code_without_docstrings(late_interaction, tmp_path):
    (tmp_path / "good.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("def f(:\n")
    config = late_interaction.Config(document_tokens=6)
    found = [*late_interaction.functions(tmp_path, Path("good.py"), config)]
    assert [(pair.name, pair.query, pair.document) for pair in found] == [
        ("documented", ("add", "one", "to", "a", "number"), ("def", "documented", "x", "y", "return")),
        ("short", ("add", "one", "to", "a", "number", "shortly"), ("def", "short", "x", "return")),
        (
            "method",
            ("give", "back", "all", "that", "there", "is"),
            ("async", "def", "method", "self", "first", "second"),
        ),
    ]
    assert found[0].file == f"{tmp_path.name}/good.py"
    assert not [*late_interaction.functions(tmp_path, Path("bad.py"), config)]
    assert late_interaction.split_words("readHTTPHeader_from2files") == ["read", "http", "header", "from", "files"]


def test_no_file_is_on_both_sides(late_interaction):
    config = late_interaction.Config(candidates=60, batch_size=24)
    train, test = late_interaction.split(texts(late_interaction, 300), config, seed=1)
    assert len(test) == 60
    assert not {pair.file for pair in train} & {pair.file for pair in test}
    with pytest.raises(SystemExit, match="ask for more"):
        late_interaction.split(texts(late_interaction, 80), config, seed=1)


def test_the_picture_of_token_scores_is_drawn(late_interaction, tmp_path):
    encoder = late_interaction.Encoder(late_interaction.MANY_VECTORS, 16)
    pair = late_interaction.Pair("", "read_file", ("read", "all", "lines", "of", "a", "file"), tuple(NOUNS[:14]))
    scores = late_interaction.token_scores(encoder, pair)
    assert scores.shape == (6, 14)
    rows = [
        {
            "vectors": kind,
            "recall@1": 0.25 * seed,
            "recall@10": 0.5,
            "cpu seconds": 1.0,
            "encoder": encoder,
            "test": [pair],
        }
        for seed in (0, 1)
        for kind in (late_interaction.ONE_VECTOR, late_interaction.MANY_VECTORS)
    ]
    late_interaction.picture(rows, "title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert late_interaction.spread(rows, late_interaction.ONE_VECTOR, "recall@1", ".3f") == "0.125 (0.000 to 0.250)"

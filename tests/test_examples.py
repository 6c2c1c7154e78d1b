"""The parts of the examples, with small encoders instead of pretrained ones, which no test can download."""

import importlib.util
import math
import random
import sys
from collections import UserDict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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
    sys.path.insert(0, str(file.parent))  # as of a program: an example may import another
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(file.parent))
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


class Words:
    """A tokenizer of words from NOUNS, with a first token of its own."""

    def __call__(self, texts, *, max_length, **_):
        ids = [[1, *(2 + NOUNS.index(word) for word in text.split())][:max_length] for text in texts]
        longest = max(map(len, ids))
        padded = [row + [0] * (longest - len(row)) for row in ids]
        found = Batch(input_ids=torch.tensor(padded))
        found["attention_mask"] = (found["input_ids"] > 0).long()
        return found

    def convert_ids_to_tokens(self, ids):
        return [["[PAD]", "[CLS]", *NOUNS][k] for k in ids]


class Transformer(nn.Module):
    """A small stand-in for a pretrained transformer: a token is also part of its neighbors."""

    def __init__(self):
        super().__init__()
        self.embed, self.context = nn.Embedding(2 + len(NOUNS), 16), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) * attention_mask[..., None]
        return SimpleNamespace(last_hidden_state=x + 0.3 * self.context(x.mT).mT)


def texts(module, count):
    """Return docstrings of four words and bodies of ten, with these among them."""
    found = []
    for k in range(count):
        words = random.Random(k).sample(NOUNS, 10)
        found.append(module.Pair(f"package{k % 20}", " ".join(words[::3]), " ".join(words)))
    return found


@pytest.fixture(scope="module")
def late_interaction():
    with example("late_interaction") as module:
        yield module


def trained_and_searched(module):
    config = module.Config(
        model="", pairs=192, batch_size=24, candidates=60, chunk_size=7, learning_rate=0.02, seeds=1, device="cpu"
    )
    return [*module.runs(texts(module, 400), Words(), config, Transformer)]


def figures_of_rank():
    with example("late_interaction") as module:
        return [(row["losses"], row["before"], row["after"]) for row in trained_and_searched(module)]


def test_late_interaction_is_the_same_on_two_ranks(late_interaction, tmp_path):
    rows = trained_and_searched(late_interaction)
    assert [row["vectors"] for row in rows] == [late_interaction.ONE_VECTOR, late_interaction.MANY_VECTORS]
    for row in rows:
        assert len(row["losses"]) == 8
        assert row["losses"][-1] < row["losses"][0]
        assert row["after"]["recall@10"] >= row["after"]["recall@1"] > 10 / 60
        assert not {pair.package for pair in row["held out"]} & {pair.package for pair in row["trained"]}
    for of_rank in run_ranks(figures_of_rank, 2):
        for row, (losses, before, after) in zip(rows, of_rank, strict=True):
            assert losses == pytest.approx(row["losses"], rel=1e-4)
            assert before == pytest.approx(row["before"], abs=1.5 / 60)
            assert after == pytest.approx(row["after"], abs=2.5 / 60)
    config = late_interaction.Config(model="")
    matches = late_interaction.some_matches(rows[1]["encoder"], Words(), rows[1]["held out"], config, shortest=4)
    assert len(matches) == 3
    for some in (matches, []):
        late_interaction.picture(rows, some, "title", tmp_path / f"{len(some)}.png")
    assert (tmp_path / "3.png").stat().st_size > (tmp_path / "0.png").stat().st_size > 1_000


def test_a_match_takes_the_best_token_of_each(late_interaction):
    torch.manual_seed(0)
    encoder = late_interaction.Encoder(Transformer(), late_interaction.MANY_VECTORS)
    pair = late_interaction.Pair("", " ".join(NOUNS[:2]), " ".join([*NOUNS[20:24], *NOUNS[:2]]))
    match = late_interaction.Match(encoder, Words(), pair, late_interaction.Config(model=""))
    assert match.query == ["[CLS]", *NOUNS[:2]]
    assert match.document == ["[CLS]", *NOUNS[20:24], *NOUNS[:2]]
    assert match.scores.shape == (3, 7)
    assert match.scores.argmax(1)[1:].tolist() == [5, 6]


def test_the_spread_of_seeds_is_shown(late_interaction):
    kind = late_interaction.ONE_VECTOR
    rows = [{"vectors": kind, "after": {"recall@1": 0.25 * seed}} for seed in (0, 1)]
    assert late_interaction.spread(rows, kind, "after", "recall@1") == "0.125 (0.000 to 0.250)"
    assert late_interaction.spread(rows[:1], kind, "after", "recall@1") == "0.000"

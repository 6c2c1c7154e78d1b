"""The parts of the examples, with small encoders instead of pretrained ones, which no test can download."""

import importlib.util
import math
import sys
from collections import UserDict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

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

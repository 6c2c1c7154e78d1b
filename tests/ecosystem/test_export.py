"""Exported encoders give the features of `wholebatch embed`, in sentence-transformers and in plain transformers.

make ecosystem
"""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tyro")
transformers = pytest.importorskip("transformers")

from wholebatch.__main__ import main  # noqa: E402

TEXTS = ["sort a list", "read the file", "open and close a line", "sum the number", "write a word", "find the sum"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a query encoder with random weights, with a projection, on a few pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("export")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder / "bert")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder / "bert")
    rows = [f"{text},{text} {k}" for k, text in enumerate(TEXTS)]
    (folder / "pairs.csv").write_text("\n".join(["query,positive", *rows]) + "\n")
    options = ["--text-encoder", f"transformers:{folder / 'bert'}", "--model.embedding-size", "8", "--steps", "3"]
    options += ["--batch-size", "4", "--no-audit", "--run-folder", str(folder / "run")]
    assert main(["train", "--data", str(folder / "pairs.csv"), *options]) == 0
    assert main(["embed", str(folder / "run"), str(folder / "pairs.csv"), "--out", str(folder / "f.npy")]) == 0
    return folder


def test_sentence_transformers_gives_the_same_features(run):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    assert main(["export", str(run / "run"), "--to", "sentence-transformers", str(run / "exported")]) == 0
    model = sentence_transformers.SentenceTransformer(str(run / "exported"), device="cpu")
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Dense", "Normalize"]
    expected = np.load(run / "f.npy")
    assert expected.shape == (len(TEXTS), 8)
    np.testing.assert_allclose(model.encode(TEXTS), expected, rtol=0, atol=1e-6)
    assert np.abs(model.encode(TEXTS[::-1]) - expected).max() > 1e-3, "other texts would be found"


def test_open_clip_needs_an_image_encoder(run, capsys):
    assert main(["export", str(run / "run"), "--to", "open_clip", str(run / "clip")]) == 2
    assert "needs an image encoder of timm" in capsys.readouterr().err
    assert not Path(run / "clip").exists()

"""An image encoder of timm and a text encoder of transformers, exported to open_clip, give the same features.

make ecosystem
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from wholebatch._base.third_party import declare_torchvision_operators

declare_torchvision_operators()
open_clip = pytest.importorskip("open_clip")
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

from glyph_files import write_pairs  # noqa: E402
from PIL import Image  # noqa: E402

from wholebatch.__main__ import main  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train both encoders from random weights for two steps, and export them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("clip")
    data = write_pairs(folder / "data")
    with data.open() as file:
        words = sorted({word for row in csv.DictReader(file) for word in row["text"].split()})
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder / "bert")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder / "bert")
    options = ["--image-encoder", "timm:test_vit", "--image.no-pretrained", "--no-audit", "--workers", "0"]
    options += ["--text-encoder", f"transformers:{folder / 'bert'}", "--model.embedding-size", "24"]
    options += ["--steps", "2", "--batch-size", "8", "--validation-texts", "4", "--test-texts", "8"]
    assert main(["train", "--data", str(data), "--run-folder", str(folder / "run"), *options]) == 0
    for side in ("image", "text"):
        out = str(folder / f"{side}.npy")
        assert main(["embed", str(folder / "run"), str(data), "--side", side, "--out", out]) == 0
    assert main(["export", str(folder / "run"), "--to", "open_clip", str(folder / "exported")]) == 0
    return folder


@torch.no_grad()
def test_open_clip_gives_the_same_features(folder):
    name = f"local-dir:{folder / 'exported'}"
    model, _, _ = open_clip.create_model_and_transforms(name)
    model.eval()
    with (folder / "data" / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    texts = open_clip.get_tokenizer(name)([row["text"] for row in rows])
    expected = np.load(folder / "text.npy")
    np.testing.assert_allclose(model.encode_text(texts, normalize=True).numpy(), expected, rtol=0, atol=1e-6)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    values = json.loads((folder / "run" / "encoders" / "image" / "encoder.json").read_text())
    transform = timm.data.create_transform(**values["data"])
    pixels = [transform(Image.open(folder / "data" / row["image"]).convert("RGB")) for row in rows[:20]]
    found = model.encode_image(torch.stack(pixels), normalize=True).numpy()
    np.testing.assert_allclose(found, np.load(folder / "image.npy")[:20], rtol=0, atol=1e-6)


def test_the_command_says_how_the_preprocessing_differs(folder, capsys):
    assert main(["export", str(folder / "run"), "--to", "open_clip", str(folder / "again")]) == 0
    assert "where the run cropped 0.95 of it" in capsys.readouterr().out

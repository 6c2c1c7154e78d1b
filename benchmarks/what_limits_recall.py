"""Count the held-out characters that a run of the training application misses, by kind.

python benchmarks/what_limits_recall.py RUN_FOLDER
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from wholebatch.app.tensors import first_ranks
from wholebatch_train.data.load import load_data
from wholebatch_train.data.pairs import Pairs
from wholebatch_train.encoders.dual import DualEncoder
from wholebatch_train.encoders.make import make_dual_encoder
from wholebatch_train.encoders.words import split_words
from wholebatch_train.run.record import read_config
from wholebatch_train.tasks.evaluation import features_of_rows, recall


def main() -> None:
    """Print a table of kinds of characters, with the recall for each kind."""
    folder = Path(sys.argv[1])
    config, data = load_data(read_config(folder), 1)
    assert isinstance(data, tuple), "a run of --task retrieve"
    pairs, split = data
    model = make_dual_encoder(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    ranks = first_ranks(*features(model, pairs, split.test))

    test = split.test.tolist()
    pictures, again = pictures_of(pairs, pairs.rows(split.test)), Counter[bytes]()
    again.update(pictures)
    trained = torch.isin(pairs.group_of, split.train).nonzero()[:, 0]
    drawn_in_training = set(pictures_of(pairs, trained))
    texts = pairs.sides["text"]
    names = dict(enumerate(texts.items(pairs.rows(torch.arange(len(pairs))))))
    words_of_training = {word for text in split.train.tolist() for word in split_words(names[text])}
    kinds = {
        "all": torch.ones(len(test), dtype=torch.bool),
        "name holds a word that no training name holds": torch.tensor(
            [any(word not in words_of_training for word in split_words(names[text])) for text in test]
        ),
        "picture equal to another test character's": torch.tensor([again[picture] > 1 for picture in pictures]),
        "picture equal to one of a training character": torch.tensor([p in drawn_in_training for p in pictures]),
    }
    new_word = kinds["name holds a word that no training name holds"]
    homoglyph = kinds["picture equal to one of a training character"]
    kinds["all words known"] = ~new_word
    kinds["picture not in training under any name"] = ~homoglyph
    print("| test characters | how many | recall@1 | recall@10 | of the misses |\n" + "|---" * 5 + "|")
    for kind, members in kinds.items():
        found = ranks[members]
        print(
            f"| {kind} | {len(found)} | {(found < 1).double().mean():.3f} | {(found < 10).double().mean():.3f} "
            f"| {(found >= 1).sum()} of {(ranks >= 1).sum()} |"
        )
    seen = split.train[torch.randperm(len(split.train), generator=torch.Generator().manual_seed(0))[: len(test)]]
    print("\nas many characters of training:", recall(*features(model, pairs, seen)))


def features(model: DualEncoder, pairs: Pairs, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of the image and of the name that a character is tested with."""
    rows, device = pairs.rows(groups), torch.device("cpu")
    images, texts = (features_of_rows(model, name, side, rows, device) for name, side in pairs.sides.items())
    return images, texts


def pictures_of(pairs: Pairs, rows: Tensor) -> list[bytes]:
    """Return the pixels of these rows' images."""
    return [picture.tobytes() for picture in pairs.sides["image"].items(rows)]


if __name__ == "__main__":
    main()

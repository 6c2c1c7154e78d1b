"""Count the held-out characters that a run of the training application misses, by kind.

python benchmarks/what_limits_recall.py RUN_FOLDER
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from wholebatch.train.data.load import load_data
from wholebatch.train.data.pairs import Pairs
from wholebatch.train.encoders.make import make_dual_encoder
from wholebatch.train.encoders.words import split_words
from wholebatch.train.evaluation import held_out_features
from wholebatch.train.resume import read_config
from wholebatch.train.retrieval import both_ways, ranks_of_partner


def main() -> None:
    """Print a table of kinds of characters, with the recall for each kind."""
    folder = Path(sys.argv[1])
    config = read_config(folder)
    pairs, split = load_data(config, 1)
    model = make_dual_encoder(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    device = torch.device("cpu")
    images, texts = held_out_features(model, pairs, split.test, device)
    ranks = ranks_of_partner(images, texts)

    test = split.test.tolist()
    pictures = [first_picture(pairs, text) for text in test]
    again = Counter(pictures)
    drawn_in_training = {
        pairs.images[image].numpy().tobytes()
        for text in split.train.tolist()
        for image in range(int(pairs.first[text]), int(pairs.first[text + 1]))
    }
    words_of_training = {word for text in split.train.tolist() for word in split_words(pairs.texts[text])}
    kinds = {
        "all": torch.ones(len(test), dtype=torch.bool),
        "name holds a word that no training name holds": torch.tensor(
            [any(word not in words_of_training for word in split_words(pairs.texts[text])) for text in test]
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
    print("\nas many characters of training:", both_ways(*held_out_features(model, pairs, seen, device)))


def first_picture(pairs: Pairs, text: int) -> bytes:
    """Return the pixels of the image that a character is tested with."""
    return pairs.images[pairs.first[text]].numpy().tobytes()


if __name__ == "__main__":
    main()

"""The picture of confusions: classes that are mistaken for each other, and their images."""

from __future__ import annotations

import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.classes.labeled import LabeledImages
from ..data.pictures.pixel_digests import PixelDigests

_IN_MATRIX, _IN_LIST = 24, 12
_PIXELS = 128  # of a thumbnail


class Mistakes(NamedTuple):
    """The test images with a wrong class."""

    images: Tensor
    """int64, (n,): places in the test set."""
    are_equal: Tensor
    """bool, (n,): whether the class that was found has an equal image, pixel by pixel."""


def find_mistakes(data: LabeledImages, found: Tensor, digests: PixelDigests) -> Mistakes:
    """Return the test images with a wrong class; reads these, and the images of the classes that were found.

    Args:
        data: labeled images, with the test images among them.
        found: (n,), the class that was found for each test image.
        digests: of the pixels of the data's pictures.
    """
    wrong = (found != data.labels[data.test]).nonzero()[:, 0]
    rows = torch.isin(data.labels, found[wrong]).nonzero()[:, 0]
    known = set(zip(data.labels[rows].tolist(), digests.of(rows), strict=True))
    pairs = zip(found[wrong].tolist(), digests.of(data.test[wrong]), strict=True)
    return Mistakes(wrong, torch.tensor([pair in known for pair in pairs], dtype=torch.bool))


def draw_look_alikes(data: LabeledImages, found: Tensor, logits: Tensor, mistakes: Mistakes, path: Path) -> None:
    """Draw the most confused classes as a matrix, beside the surest mistakes about pictures that differ.

    Args:
        data: labeled images, with the test images among them.
        found: (n,), the class that was found for each test image.
        logits: (n,), its similarity.
        mistakes: those of `find_mistakes`.
        path: file of the picture.
    """
    from matplotlib.figure import Figure

    labels = data.labels[data.test]
    wrong, equal = mistakes
    figure = Figure(figsize=(14, 7.6 if len(wrong) else 0.8))
    figure.suptitle(
        f"{len(wrong):,} of {len(labels):,} test images are taken for another class, which for {int(equal.sum()):,} of "
        "them has the same picture, pixel by pixel"
    )
    if len(wrong):
        _draw_matrix(figure, data, labels, found)
        _draw_list(figure, data, labels, found, surest_mistakes(data, found, logits, mistakes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=110)


def surest_mistakes(data: LabeledImages, found: Tensor, logits: Tensor, mistakes: Mistakes) -> list[int]:
    """Return the test images with a wrong class, about pictures that differ: the surest first, each pair once."""
    labels = data.labels[data.test]
    wrong = mistakes.images[~mistakes.are_equal]
    by_pair: dict[tuple[int, int], int] = {}
    for i in wrong[logits[wrong].argsort(descending=True)].tolist():
        a, b = int(labels[i]), int(found[i])
        by_pair.setdefault((min(a, b), max(a, b)), i)
    return [*by_pair.values()]


def confused_classes(labels: Tensor, found: Tensor, most: int) -> list[int]:
    """Return at most `most` classes, those of the most confused pairs, with confused classes side by side.

    >>> confused_classes(torch.tensor([0, 0, 1, 2, 3, 4]), torch.tensor([3, 3, 1, 4, 3, 2]), 4)
    [0, 3, 2, 4]
    """
    counts = Counter(tuple(sorted(pair)) for pair in zip(labels.tolist(), found.tolist(), strict=True))
    group_of: dict[int, list[int]] = {}
    for a, b in sorted((pair for pair in counts if pair[0] != pair[1]), key=lambda pair: (-counts[pair], pair)):
        if len(group_of.keys() | {a, b}) <= most:
            one, other = group_of.get(a, [a]), group_of.get(b, [b])
            joined = one if one is other else one + other
            group_of |= dict.fromkeys(joined, joined)
    groups = {id(group): group for group in group_of.values()}.values()
    return [label for group in sorted(groups, key=len, reverse=True) for label in group]


def _draw_matrix(figure: Any, data: LabeledImages, labels: Tensor, found: Tensor) -> None:
    classes = confused_classes(labels, found, _IN_MATRIX)
    place = {label: index for index, label in enumerate(classes)}
    counts = torch.zeros(len(classes), len(classes))
    for a, b in zip(labels.tolist(), found.tolist(), strict=True):
        if a in place and b in place:
            counts[place[a], place[b]] += 1
    axes = figure.add_axes((0.06, 0.05, 0.43, 0.8))
    diagonal, largest = torch.eye(len(classes), dtype=torch.bool), 1.5 * counts.max().item()
    for colors, others in (("Purples", diagonal), ("Greens", ~diagonal)):
        cells = counts.masked_fill(others | (counts == 0), float("nan"))
        axes.imshow(cells.numpy(), cmap=colors, vmin=0, vmax=largest)
    for a, b in counts.nonzero().tolist():
        axes.text(b, a, f"{int(counts[a, b])}", ha="center", va="center", fontsize=7)
    axes.set(xticks=[], yticks=[])
    axes.set_title("taken for, among the most confused classes (green: right)", fontsize=9, pad=24)
    axes.set_ylabel("shown", labelpad=24, fontsize=9)
    size = 0.9 / len(classes)
    for index, label in enumerate(classes):
        picture = data.pictures.items(data.example(label)[None])[0]
        at = (index + 0.5) / len(classes)
        _thumbnail(axes.inset_axes((at - size / 2, 1.005, size, size)), picture)
        _thumbnail(axes.inset_axes((-size - 0.005, 1 - at - size / 2, size, size)), picture)


def _draw_list(figure: Any, data: LabeledImages, labels: Tensor, found: Tensor, surest: list[int]) -> None:
    """Draw each mistaken image beside a training image of the class that it was taken for."""
    grid = figure.add_gridspec(
        _IN_LIST, 3, left=0.53, right=0.99, top=0.85, bottom=0.05, width_ratios=[1, 1, 9], wspace=0.05
    )
    figure.text(0.53, 0.88, "the surest mistakes about pictures that differ: the image, and a training", fontsize=9)
    figure.text(0.53, 0.86, "image of the class that it was taken for", fontsize=9)
    for line, i in enumerate(surest[:_IN_LIST]):
        taken = int(found[i])
        for column, picture in enumerate(data.pictures.items(torch.stack([data.test[i], data.example(taken)]))):
            _thumbnail(figure.add_subplot(grid[line, column]), picture)
        axes = figure.add_subplot(grid[line, 2])
        axes.axis("off")
        names = (("shown", int(labels[i]), "tab:green"), ("taken for", taken, "tab:red"))
        for row, (role, label, color) in enumerate(names):
            name = textwrap.shorten(data.names[label], 62, placeholder=" …")
            axes.text(0, 0.72 - 0.45 * row, f"{role}: {name}", fontsize=7.5, color=color, va="center", parse_math=False)


def _thumbnail(axes: Any, picture: Any) -> None:
    small = picture.copy()
    small.thumbnail((_PIXELS, _PIXELS))
    axes.imshow(small, cmap="gray", vmin=0, vmax=255)
    axes.axis("off")

"""How many of the items that are evaluated a run was trained on.

The run folder keeps no single item, only the hash of the data, so the run's data are loaded and split again. If they
are not there any more, or others, the answer is not known. Texts are compared as the encoder of their side reads them:
by its words, as groups are, or without case if it lowers its texts, else letter by letter.
Pictures are compared byte by byte, of which only those of equal sizes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wholebatch.app import UserError

from ..data.load import load_data
from ..data.pairs.pairs import Pairs
from ..data.pictures.equal import MOST, digests_of, first_of_each, numbers_in_common
from ..data.sides import Chosen, DrawnPictures, FilePictures, Side, Texts
from ..encoders.encoder import Encoder
from ..encoders.small import TextEncoder
from ..encoders.words import identity
from ..run.record import read_record
from ..tasks.retrieval import PLURAL
from .open_run import OpenRun
from .options import renamed


class _Rows(NamedTuple):
    """Rows of a side, one of each distinct item."""

    side: Side
    rows: Tensor

    @classmethod
    def of(cls, side: Side, rows: Tensor) -> _Rows:
        """Return these rows, or those behind them of the side that this one is chosen from."""
        return cls(side.side, side.rows[rows]) if isinstance(side, Chosen) else cls(side, rows)


def seen_in_training(run: OpenRun, pairs: Pairs) -> tuple[dict[str, int | None], str]:
    """Return by side how many distinct items of these data the run was trained on, None if unknown, and a line."""
    ours = {name: _distinct(pairs, name, pairs.order) for name in run.sides}
    try:
        theirs = dict(_training_rows(run))
    except UserError as error:
        return dict.fromkeys(ours), _unknown_in_words(str(renamed(error, "the data of the run")))
    trained = {name: _count_in(each, theirs[name], case_ignored_by(run.encoder(name))) for name, each in ours.items()}
    return trained, _seen_in_words(trained, {name: len(each.rows) for name, each in ours.items()})


def _training_rows(run: OpenRun) -> Iterator[tuple[str, list[_Rows]]]:
    """Yield by side the rows that the run was trained on; UserError if its data are not there, or have changed."""
    _, data = load_data(run.config, 1)
    if (data[0] if isinstance(data, tuple) else data).digest != read_record(run.folder).data.digest:
        raise UserError(f"{run.config.data!r} has changed since the run was started")
    if not isinstance(data, tuple):
        yield "image", [_Rows.of(data.pictures, data.train)]
        return
    pairs, split = data
    trained = pairs.order[torch.isin(pairs.group_of[pairs.order], split.train)]
    for name in pairs.names:
        rows = [_distinct(pairs, name, trained)]
        if name == "document" and pairs.negatives is not None:
            texts = Texts(pairs.negatives.texts)
            owner = torch.repeat_interleave(torch.arange(len(pairs.negatives.first) - 1), pairs.negatives.first.diff())
            of_trained = torch.isin(owner, trained).nonzero()[:, 0]
            rows.append(_Rows(texts, of_trained))
        yield name, rows


def _distinct(pairs: Pairs, name: str, rows: Tensor) -> _Rows:
    rows = rows.sort().values
    if name in pairs.numbers and len(rows):
        rows = rows[first_of_each(torch.unique(pairs.numbers[name][rows], return_inverse=True)[1])]
    return _Rows.of(pairs.sides[name], rows)


def case_ignored_by(encoder: Encoder) -> Callable[[str], str] | None:
    """Return the function that removes from a text what this encoder ignores; None: it distinguishes case."""
    if isinstance(encoder, TextEncoder):
        return identity
    prepare = getattr(encoder, "prepare", None)
    tokenizer = getattr(prepare, "tokenizer", None)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(fast, "normalizer", None)
    lowers = (
        getattr(prepare, "lower", False)
        or (normalizer is not None and normalizer.normalize_str("A") == normalizer.normalize_str("a"))
        or (fast is None and getattr(tokenizer, "do_lower_case", False))
    )
    return str.lower if lowers else None


def _count_in(ours: _Rows, theirs: list[_Rows], same: Callable[[str], str] | None = None) -> int | None:
    """Return how many of our items are among theirs; None if they cannot be compared."""
    sides = [each.side for each in theirs]
    if isinstance(ours.side, Texts) and all(isinstance(side, Texts) for side in sides):
        columns = [each.side.column(each.rows) for each in (ours, *theirs) if isinstance(each.side, Texts)]
        mine, *others = numbers_in_common(columns, same)
        return int(torch.isin(mine, torch.cat(others)).sum())
    if isinstance(ours.side, FilePictures) and isinstance(sides[0], FilePictures):
        return _count_pictures_in(ours, ours.side, theirs[0], sides[0])
    if isinstance(ours.side, DrawnPictures) and isinstance(sides[0], DrawnPictures):
        known = {each.numpy().tobytes() for each in sides[0].pixels[theirs[0].rows]}
        return sum(each.numpy().tobytes() in known for each in ours.side.pixels[ours.rows])
    return None


def _count_pictures_in(ours: _Rows, mine: FilePictures, theirs: _Rows, others: FilePictures) -> int | None:
    if max(len(ours.rows), len(theirs.rows)) > MOST:  # so many that nothing is asked about their files
        return None
    my_sizes, their_sizes = (
        torch.tensor([side.size(row) for row in each.rows.tolist()]) for side, each in ((mine, ours), (others, theirs))
    )
    rows = ours.rows[torch.isin(my_sizes, their_sizes)]
    alike = theirs.rows[torch.isin(their_sizes, my_sizes)]
    if len(rows) + len(alike) > MOST:
        return None
    known = {*digests_of(others, alike)}
    return sum(digest in known for digest in digests_of(mine, rows))


def _seen_in_words(trained: Mapping[str, int | None], items: Mapping[str, int]) -> str:
    known = {name: count for name, count in trained.items() if count is not None}
    if not known:
        return _unknown_in_words("the pictures were not compared")
    counts = " and ".join(f"{count:,} of the {items[name]:,} {PLURAL[name]}" for name, count in known.items())
    others = "".join(f" ({PLURAL[name]} were not compared)" for name in trained if name not in known)
    return f"note: the run was trained on {counts}{others}"


def _unknown_in_words(reason: str) -> str:
    return f"note: whether the run was trained on some of these rows is not known: {reason}"

"""`wholebatch search`: the rows of data that are most similar to a text or to a picture."""

from __future__ import annotations

import json
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError

from ..data.reading import open_picture
from ..data.roles import asked_roles
from ..data.sides import Side
from ..report.page import Candidate, Evidence, Gallery, Item, Query, Report, render
from .embed import FeatureFile, has_features, kept_features, open_features
from .items import Items, check_side, distinct, features_of, open_items, opened
from .open_run import OpenRun
from .options import SearchConfig
from .output import say, written

_OTHER = {"image": "text", "text": "image", "query": "document", "document": "query"}
_CHARACTERS = 100  # of a text that are printed
_MOST_QUERIES, _MOST_PICTURES = 20, 12  # of a page
_MOST_PRODUCTS = 2**22  # similarities that are held at a time


class Given(Side):
    """One item that was given on the command line."""

    def __init__(self, kind: Any, item: Any) -> None:
        self.kind, self._item = kind, item

    def items(self, rows: Tensor) -> list[Any]:
        return [self._item for _ in rows]


@dataclass(frozen=True)
class Hit:
    """A row that was found."""

    similarity: float
    row: int
    """From 1, as in `place`."""
    place: str
    text: str


def search(options: SearchConfig) -> None:
    """Print the results, write them, and draw those that are pictures."""
    run = opened(options)
    queries = _queries(run, options)
    features = torch.cat([*features_of(run, queries, options)])
    candidates = _candidates(run, options, queries.name)
    similarities, rows = most_similar(features, candidates.tiles(), options.k)
    hits = [
        [_hit(candidates, value, row) for value, row in zip(values, numbers, strict=True)]
        for values, numbers in zip(similarities.tolist(), rows.tolist(), strict=True)
    ]
    if options.out is None:
        for number, each in enumerate(hits):
            _print(_query_in_words(queries, number), each, is_one=len(queries) == 1)
    else:
        _write(options.out, queries, hits)
    if candidates.items is not None and candidates.items.side.kind == "image":
        path = options.sheet or options.run / "search.html"
        page = render(_page(run, queries, candidates.items, hits))
        try:
            with written(path, "the pictures", "--sheet") as file:
                file.write(page.encode(errors="replace"))  # a file name need not be UTF-8
        except UserError as error:
            if options.sheet is not None:
                raise
            say(f"no page of the pictures: {error}")
    elif options.sheet is not None:
        raise UserError("--sheet shows pictures, and the results are texts; --side image searches pictures")


def _queries(run: OpenRun, options: SearchConfig) -> Items:
    check_side(run, options.side)
    if options.queries:
        side = _OTHER.get(options.side or "")
        side = side if side in run.sides else None
        try:
            return open_items(run, options.queries, "--queries", side=side)
        except UserError:
            if side is None:
                raise
            return open_items(run, options.queries, "--queries")
    kind = "image" if options.is_picture else "text"
    sides = [name for name in run.sides if run.kind(name) == kind]
    if not sides:
        other_kind = "pictures" if kind == "text" else "texts"
        raise UserError(
            f"QUERY is a {'picture' if kind == 'image' else 'text'}, and the run only has an encoder of {other_kind}"
        )
    item: Any = unicodedata.normalize("NFC", options.query)  # as the texts of the data are
    if kind == "image":
        try:
            item = open_picture(Path(options.query))
        except ValueError as error:
            raise UserError(f"QUERY: {options.query!r} cannot be read as an image ({error})") from error
    name = next((each for each in sides if each != options.side), sides[0])
    return Items(name, Given(kind, item), torch.zeros(1, dtype=torch.int64), options.query)


def _candidates(run: OpenRun, options: SearchConfig, asked: str) -> FeatureFile:
    """Return the features to search: of the file of `--in`, or of the run's folder, where they are kept."""
    if options.data and has_features(options.data):
        features = open_features(Path(options.data))
        if (width := features.shape[1]) != run.width:
            raise UserError(f"--in: {options.data!r} has features of {width}, expected {run.width}, those of the run")
        if features.weights != run.weights:
            raise UserError(
                f"--in: {options.data!r} holds features of another model or checkpoint; embed the data again"
            )
        return features
    data, column = options.data or run.config.data, options.column
    argument = "--in" if options.data else "the data of the run"
    side = options.side or (_OTHER[asked] if _OTHER[asked] in run.sides else asked)
    if not column and not options.data:
        column = _column_of_run(run, side)
    skip_bad = options.skip_bad or (not options.data and run.config.skip_bad)
    items = open_items(
        run, data, argument, column=column, side=side, skip_bad=skip_bad, say=say, workers=options.workers
    )
    return kept_features(run, distinct(run, items), options)


def _column_of_run(run: OpenRun, side: str) -> str:
    """Return the column that `--columns` of the run names for a side; "" if it names none."""
    roles = asked_roles(run.config.columns)
    names = {"text": ("text", "label"), "document": ("positive",)}.get(side, (side,))
    return next((roles[role][0] for role in names if role in roles), "")


def _hit(candidates: FeatureFile, similarity: float, row: int) -> Hit:
    if candidates.items is None:
        return Hit(similarity, row + 1, f"{candidates.path}, row {row + 1}", "")
    number = int(candidates.items.rows[row])
    return Hit(similarity, number + 1, candidates.items.where(number), candidates.items.text(number))


def _query_in_words(queries: Items, number: int) -> str:
    row = int(queries.rows[number])
    if isinstance(queries.side, Given):
        return queries.source
    return queries.text(row) or queries.where(row)


def _print(asked: str, hits: list[Hit], *, is_one: bool) -> None:
    if not is_one:
        say(f"{_one_line(asked)}")
    for hit in hits:
        text = f"  {_one_line(hit.text)}" if hit.text else ""
        say(f"{hit.similarity:7.4f}  {hit.place}{text}")


def _one_line(text: str) -> str:
    return textwrap.shorten(text, _CHARACTERS, placeholder=" …")


def _write(path: Path, queries: Items, hits: list[list[Hit]]) -> None:
    with written(path, f"{len(hits):,} queries with {len(hits[0])} results each") as file:
        for number, each in enumerate(hits):
            results = [{name: x for name, x in vars(hit).items() if x != ""} for hit in each]
            line = {"query": _query_in_words(queries, number), "results": results}
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _page(run: OpenRun, queries: Items, candidates: Items, hits: list[list[Hit]]) -> Report:
    """Return the first queries, each with its first pictures and their texts or names, as a page."""
    shown = []
    for number, results in enumerate(hits[:_MOST_QUERIES]):
        query = queries.side.items(queries.rows[number][None])[0]
        best = results[:_MOST_PICTURES]
        pictures = candidates.side.items(torch.tensor([hit.row - 1 for hit in best]))
        similar = [
            Candidate(Item(hit.text or Path(hit.place).stem, picture), hit.similarity, False)
            for hit, picture in zip(best, pictures, strict=True)
        ]
        shown.append(Query(Item(query) if queries.side.kind == "text" else Item(picture=query), similar, None))
    gallery = Gallery("Search", f"The most similar rows of {candidates.source}.", shown, has_answers=False)
    return Report(f"search · {run.folder.absolute().name}", "", evidence=Evidence([gallery]))


def most_similar(queries: Tensor, tiles: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Return the similarities and the rows of the k most similar rows of each query, (q, k) each, the best first.

    Of equal similarities the lowest row comes first. With fewer rows than k, all of them are returned.

    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> most_similar(torch.tensor([[0.6, 0.8]]), rows.split(2), 2)[1]
    tensor([[1, 0]])
    """
    values, rows = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    start, step = 0, max(1, _MOST_PRODUCTS // max(1, len(queries)))
    for tile in tiles:
        for part in tile.split(step):
            numbers = torch.arange(start, start + len(part)).expand(len(queries), -1)
            values, places = torch.cat([values, queries @ part.T], 1).sort(dim=1, descending=True, stable=True)
            rows = torch.cat([rows, numbers], 1).gather(1, places)[:, :k]
            values, start = values[:, :k], start + len(part)
    return values, rows

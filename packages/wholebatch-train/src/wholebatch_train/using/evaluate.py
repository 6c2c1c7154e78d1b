"""`wholebatch evaluate`: a search both ways over all rows of DATA, or classes and verification, beside chance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch.app import UserError

from ..config import TrainConfig, for_glyphs
from ..data.classes import glyph_pairs
from ..data.from_table import table_pairs
from ..data.open_table import open_table
from ..data.pairs import Pairs, stated_pairs
from ..data.roles import asked_roles
from ..data.sides import Side
from ..data.table import Table
from ..tasks.evaluation import FAR, report_of_search, table, verification_row, verify, ways_of
from ..tasks.identify import make_head
from .items import Items, features_of, opened, with_progress
from .open_run import OpenRun
from .options import EvaluateConfig, renamed
from .output import say, show_table, written

_TOP = 5
_OPTIONAL = ("negatives", "group")
"""Roles without which data can be evaluated: a test set seldom has negatives."""


def evaluate(options: EvaluateConfig) -> None:
    """Print the figures, and write them."""
    run = opened(options)
    pairs = _pairs(run, options)
    figures = _classification if run.config.task == "identify" else _search
    report = figures(run, pairs, options)
    report = {"data": options.data, "weights": run.kind_of_weights, "rows": len(pairs.order), **report}
    if options.data == run.config.data or Path(options.data).absolute() == Path(run.config.data).absolute():
        say("note: these are the data of the run, whose report.json has the figures of items held out")
    _show(run, report)
    if options.out is not None:
        with written(options.out, "the figures") as file:
            file.write(json.dumps(report, indent=2).encode() + b"\n")


def _pairs(run: OpenRun, options: EvaluateConfig) -> Pairs:
    """Return the rows of DATA in groups."""
    try:
        if options.data == "glyphs":
            return glyph_pairs(for_glyphs(run.config).image_size)
        table = open_table(options.data, say)
        config = replace(
            run.config, columns=_columns(run.config, table, options), skip_bad=options.skip_bad, workers=options.workers
        )
        pairs = table_pairs(table, config, say=say)
    except UserError as error:
        raise renamed(error, "DATA") from error
    if pairs.names != run.sides and run.config.task == "retrieve":
        raise UserError(
            f"DATA: {options.data!r} has {' and '.join(pairs.names)}, and the run has encoders of "
            f"{' and '.join(run.sides)}; --columns names the columns of these"
        )
    return pairs


def _columns(config: TrainConfig, table: Table, options: EvaluateConfig) -> str:
    """Return `--columns`, or else that of the run if the data have these columns; those of _OPTIONAL may be missing."""
    if options.columns:
        return options.columns
    columns_of_role = {
        role: [name for name in names if name in table.names] for role, names in asked_roles(config.columns).items()
    }
    if any(not names for role, names in columns_of_role.items() if role not in _OPTIONAL):
        return ""
    return ",".join(f"{role}={'+'.join(names)}" for role, names in columns_of_role.items() if names)


def _features(run: OpenRun, name: str, side: Side, rows: Tensor, options: EvaluateConfig) -> Tensor:
    items = Items(name, side, rows, name)
    return torch.cat([*with_progress(features_of(run, items, options), len(items))])


def _search(run: OpenRun, pairs: Pairs, options: EvaluateConfig) -> dict[str, Any]:
    """Return the figures of a search both ways among the distinct items of each side."""
    stated = stated_pairs(pairs, pairs.order)
    first, second = (
        _features(run, name, side, rows, options)
        for (name, side), rows in zip(pairs.sides.items(), stated.rows, strict=True)
    )
    return {"groups": len(pairs), **report_of_search(ways_of(pairs), stated, first, second, device=run.device)}


def _classification(run: OpenRun, pairs: Pairs, options: EvaluateConfig) -> dict[str, Any]:
    """Return the accuracy among the classes of the run, and the verification of pairs of images."""
    if run.centers is None:
        raise UserError(
            f"the classes of {run.folder} are in its final weights, which the run does not have yet; resume it, or wait"
        )
    pictures, texts = pairs.sides.values()
    rows = pairs.order.sort().values
    numbers = {name: number for number, name in enumerate(run.classes)}
    names = texts.items(rows)
    features = _features(run, "image", pictures, rows, options)
    labels = torch.tensor([numbers.get(name, -1) for name in names])
    known = labels >= 0
    report: dict[str, Any] = {"classes": len(run.classes), "images_of_these_classes": int(known.sum())}
    if known.any():
        right = _top_classes(run, features[known]) == labels[known, None]
        report |= {f"top_{k}": right[:, :k].any(1).double().mean().item() for k in (1, _TOP)}
        report["chance"] = {f"top_{k}": min(1.0, k / len(run.classes)) for k in (1, _TOP)}
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    text_labels = torch.tensor([distinct[name] for name in names])
    return report | {"texts": len(distinct), "verification": verify(features, text_labels, run.device)}


def _top_classes(run: OpenRun, features: Tensor) -> Tensor:
    """Return the best classes of each image, (n, at most 5)."""
    alone = wb.comm.LocalCommunicator()
    head = make_head(run.config, run.width, len(run.classes), torch.device("cpu"), alone)
    assert run.centers is not None
    if run.centers.shape != head.weight.shape:
        raise UserError(
            f"RUN: {str(run.folder)!r} has centers of shape {tuple(run.centers.shape)} in its {run.kind_of_weights} "
            f"weights, expected {tuple(head.weight.shape)} for {len(run.classes):,} classes; was the file edited?"
        )
    with torch.no_grad():
        head.weight.copy_(run.finite(run.centers))
    return head.top_classes(features, min(_TOP, len(run.classes))).class_ids


def _show(run: OpenRun, report: dict[str, Any]) -> None:
    if run.config.task == "identify":
        rows = [[f"top-{k} accuracy", f"{report[f'top_{k}']:.4f}", f"{report['chance'][f'top_{k}']:.4f}"]
                for k in (1, _TOP) if f"top_{k}" in report]  # fmt: skip
        rows.append([*verification_row(report["verification"], report["rows"]), f"{FAR:.4f}"])
        say(
            f"{report['rows']:,} images of {report['texts']:,} texts, {report['images_of_these_classes']:,} of them of "
            f"the run's {report['classes']:,} classes"
        )
        show_table(["", "", "chance"], rows)
        return
    ways = [name for name in report if "_to_" in name]
    for way in ways:
        say(f"{way.replace('_to_', ' -> ')}: {report[way]['queries']:,} queries among {report[way]['candidates']:,}")
    _, columns, lines = table(report, ways)
    show_table(columns, lines)

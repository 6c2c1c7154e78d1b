"""`--task retrieve`: a dual encoder, trained with a loss of its pairs of images and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..data.pairs import Pairs, Split, Stated, stated_of_groups
from ..data.sides import Side
from ..encoders.dual import Unused
from ..encoders.encoder import Inputs, number_of_rows, to_device
from ..encoders.make import make_dual_encoder
from ..ranks.sharding import whole
from ..report.evidence import search_evidence
from ..report.page import Evidence, Item
from .batches import Chunk, PairBatch, PairBatches, Reader, augmented, rows_of_chunks
from .evaluation import PLURAL, further_candidates, recall, report_of_search, table, ways_of
from .objectives import make_objective
from .task import Curve, Task, finite_loss, not_finite


class Retrieve(Task):
    """Find the second side of a pair by the first, and back, among pairs never seen in training."""

    validation_title = "validation: texts not trained on"

    def __init__(
        self,
        config: TrainConfig,
        pairs: Pairs,
        split: Split,
        device: torch.device,
        *,
        rank: int,
        size: int,
        dense: bool = False,
    ) -> None:
        torch.manual_seed(config.seed)
        self._encoder = make_dual_encoder(config, {name: side.kind for name, side in pairs.sides.items()})
        super().__init__(config, self._encoder, device, rank=rank, size=size, dense=dense)
        self._pairs, self._split = pairs, split
        self._ways = ways_of(pairs)
        self.curves = tuple(
            Curve(f"recall@{k}, {way.replace('_', ' ')}", (way, f"recall@{k}")) for way in self._ways for k in (1, 10)
        )
        objective = make_objective(config, len(pairs), negatives=pairs.negatives is not None, dense=dense)
        self._objective = objective.to(device)
        self._state = nn.ModuleDict({"encoder": self._encoder, "objective": self._objective})
        self.optimizers = [self._optimizer]
        readers = {name: Reader.of(self._encoder.encoder(name)) for name in pairs.sides}
        chunks = rows_of_chunks(self._rows, config, size)
        batches = PairBatches(pairs, split.train, readers, config, self._rows, chunks)
        self._feed(batches, pairs.sides.values(), split_input_fn=self._chunks, get_rep_fn=_drop_none)
        self._searched: tuple[Tensor, Tensor, Tensor] | None = None

    def describe(self) -> str:
        pairs, split = self._pairs, self._split
        first, second = (PLURAL[name] for name in pairs.names)
        return (
            f"{len(pairs.order):,} pairs of {first} and {second} in {len(pairs):,} groups that do not share "
            f"{pairs.common}: {len(split.train):,} for training, {len(split.validation):,} for validation, "
            f"{len(split.test):,} for test"
            + "".join(f"\n{line}" for side in self._encoder.sides for line in self._encoder.encoder(side).notes)
        )

    def add_gradients(self, step: int) -> Tensor:
        batch = self._batches.at(step)
        named: dict[str, Any] = {"step": step, "names": batch.names.to(self._device)}
        if self._pairs.negatives is not None:
            named["negative_names"] = batch.negative_names.to(self._device)

        def encode() -> tuple[Tensor, ...]:
            return _drop_none(self._model(*self._chunk(batch.chunks[0], step)))

        return self._add_gradients(batch, encode, self._objective, named)

    def encode_rows(self, rows: int) -> Tensor:
        chunk, sides = self._batches.at(0).chunks[0], self._encoder.sides
        first, second = (self._encoder.encoder(side).first(x, rows) for side, x in zip(sides, chunk[:2], strict=True))
        negatives = chunk.negatives
        if negatives is not None:
            share = -(-number_of_rows(negatives) * rows // len(range(*chunk.rows.indices(chunk.rows.stop))))
            negatives = self._encoder.encoder(sides[1]).first(negatives, share)
        with self.precision.autocast():
            features = self._encoder(*self._chunk(Chunk(first, second, negatives, slice(0, rows)), 0))
        return torch.stack([x.float().sum() for x in _drop_none(features)]).sum()

    def _loss(self, features: Sequence[Tensor], *, step: int, **names: Tensor) -> Tensor:
        first, second, scale, *rest = features
        if self._pairs.negatives is not None:
            names["negatives"] = rest.pop()
        return finite_loss(self._objective, first, second, scale, rest[0] if rest else None, step=step, **names)

    def _chunks(self, batch: PairBatch, _: int) -> list[tuple[Inputs | Unused | None, ...]]:
        return [self._chunk(chunk, batch.step) for chunk in batch.chunks]

    def _chunk(self, chunk: Chunk, step: int) -> tuple[Inputs | Unused | None, ...]:
        """Return the arguments of the encoders, on the device; images are augmented."""
        arguments = []
        start = self._rows.start
        rows = slice(start + chunk.rows.start, start + chunk.rows.stop)
        for side, inputs in zip(self._pairs.sides.values(), chunk[:2], strict=True):
            moved = to_device(inputs, self._device)
            arguments.append(augmented(moved, self._config, rows, step) if side.kind == "image" else moved)
        if self._pairs.negatives is None:
            return tuple(arguments)
        if chunk.negatives is not None:
            return (*arguments, to_device(chunk.negatives, self._device))
        # With sharded weights the ranks call each encoder together, and other ranks may have negatives here.
        first_row = self._encoder.encoder(self._encoder.sides[1]).first(chunk.second, 1) if self._is_sharded else None
        return (*arguments, None if first_row is None else Unused(to_device(first_row, self._device)))

    def grad_norm(self) -> float:
        grads = [p.grad for p in self._encoder.parameters() if p.grad is not None]
        return whole(nn.utils.get_total_norm(grads)).item()

    def after_step(self) -> None:
        self._encoder.limit_logit_scale()

    def metrics(self) -> dict[str, Any]:
        return {"logit_scale": whole(self._encoder.log_logit_scale.detach()).exp().item()}

    def validate(self) -> dict[str, Any]:
        stated = self._validated
        first, second = self._features(stated)
        if self._rank:
            return {}
        searches = ((first, second, stated.right), (second, first, stated.back))
        both = (recall(*each, device=self._device) for each in searches)
        return dict(zip(self._ways, both, strict=True))

    @cached_property
    def _validated(self) -> Stated:
        return stated_of_groups(self._pairs, self._split.validation)

    @cached_property
    def _tested(self) -> Stated:
        return stated_of_groups(self._pairs, self._split.test)

    def _features(self, stated: Stated) -> tuple[Tensor, Tensor]:
        """Return the features of these items, on rank 0. All ranks."""
        sides = self._pairs.sides.items()
        first, second = (
            self._features_of(name, side, rows) for (name, side), rows in zip(sides, stated.rows, strict=True)
        )
        return first, second

    def headline(self, validation: Mapping[str, Any]) -> str:
        return f"recall@1 {validation[self._ways[0]]['recall@1']:.3f} among {len(self._validated.rows[1])}"

    def loss_state(self) -> dict[str, Tensor]:
        return {f"objective.{name}": x.clone() for name, x in self._objective.state_dict().items()}

    def test(self) -> dict[str, Any]:
        stated, other = self._tested, self._pairs.names[1]
        rows = further_candidates(self._pairs, stated)
        first, second = self._features(stated)
        further = self._features_of(other, self._pairs.sides[other], rows) if len(rows) else second[:0]
        if self._rank:
            return {}
        if not all(x.isfinite().all() for x in (first, second)):
            raise not_finite(self._config.steps - 1, "the features of the test set are not finite")
        second = torch.cat([second, further])
        self._searched = first, second, torch.cat([stated.rows[1], rows])
        held_out = {"test_texts": len(self._split.test)}
        return held_out | report_of_search(self._ways, stated, first, second, device=self._device)

    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        return table(report, self._ways)

    def result(self, report: Mapping[str, Any]) -> tuple[str, str, str]:
        way, figures = self._ways[0], report[self._ways[0]]
        note = f"chance {figures['chance']['recall@1']:.2g}"
        return f"recall@1, {way.replace('_to_', ' → ')}", f"{figures['recall@1']:.3f}", note

    def evidence(self) -> Evidence:
        assert self._searched is not None
        first, second, rows = self._searched

        def item(side: Side, rows: Tensor) -> Callable[[int], Item]:
            def item_at(place: int) -> Item:
                value = side.items(rows[place][None])[0]
                return Item(value) if side.kind == "text" else Item(picture=value)

            return item_at

        sides = zip(self._pairs.sides.items(), (first, second), (self._tested.rows[0], rows), strict=True)
        query, answer = ((PLURAL[name], features, item(side, rows)) for (name, side), features, rows in sides)
        return search_evidence(query, answer, self._tested, device=self._device)


def _drop_none(features: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in features if x is not None)

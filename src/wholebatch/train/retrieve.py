"""`--task retrieve`: a dual encoder, trained with a loss of its pairs of images and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb

from .augment import augmented
from .checkpoint import load_checkpoint, save_checkpoint
from .config import TrainConfig
from .data.pairs import Pairs, Split, batch_of_step
from .encoders.small import DualEncoder
from .encoders.words import TextBatch
from .evaluation import as_float, held_out_features, tokens
from .objectives import make_objective
from .pictures import draw_retrieval
from .report.content import Evidence, Item
from .report.images import picture_of
from .report.search import search_evidence
from .retrieval import KS, both_ways
from .task import Curve, Task, finite_loss, make_adamw, not_finite


class Retrieve(Task):
    """Find the text of an image and the image of a text, among texts never seen in training."""

    curves = tuple(
        Curve(f"recall@{k}, {direction.replace('_', ' ')}", (direction, f"recall@{k}"), color, style, marker)
        for direction, style, marker in (("image_to_text", "-", "o"), ("text_to_image", "--", "x"))
        for k, color in ((1, "tab:green"), (10, "tab:orange"))
    )
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
        self._config, self._pairs, self._split, self._device, self._rank = config, pairs, split, device, rank
        self._rows = wb.partition.Partition.even(config.batch_size, size).rows(rank)
        torch.manual_seed(config.seed)
        self._encoder = DualEncoder(
            config.model, channels=config.image_channels, image_size=config.image_size, bias=config.loss == "siglip"
        ).to(device)
        self._objective = make_objective(config, len(pairs), dense=dense).to(device)
        self._state = nn.ModuleDict({"encoder": self._encoder, "objective": self._objective})
        self._optimizer = make_adamw(self._encoder, config)
        self.optimizers = [self._optimizer]
        self._model = DistributedDataParallel(self._encoder) if size > 1 else self._encoder
        self._cached = None
        if config.chunk_size:
            self._cached = wb.GradCache(
                [self._model], config.chunk_size, self._loss, split_input_fn=self._chunks, get_rep_fn=_without_none
            )
        self._found: tuple[Tensor, Tensor] | None = None

    def describe(self) -> str:
        pairs, split = self._pairs, self._split
        return (
            f"{len(pairs.images):,} images of {len(pairs):,} texts: {len(split.train):,} for training, "
            f"{len(split.validation):,} for validation, {len(split.test):,} for test"
        )

    def add_gradients(self, step: int) -> Tensor:
        config = self._config
        image_rows, text_rows = batch_of_step(
            self._split.train, self._pairs, batch_size=config.batch_size, step=step, seed=config.seed
        )
        images = as_float(self._pairs.images[image_rows[self._rows]], self._device)
        images = augmented(images, config, self._rows, step)
        texts = text_rows[self._rows]
        named: dict[str, Any] = {"step": step, "names": texts.to(self._device)}
        if self._cached is not None:
            return self._cached((images, texts), **named)
        loss = self._loss(_without_none(self._model(images, self._tokens(texts))), **named)
        loss.backward()
        return loss.detach()

    def _loss(self, features: Sequence[Tensor], *, step: int, names: Tensor) -> Tensor:
        images, texts, scale, *bias = features
        return finite_loss(self._objective, images, texts, scale, bias[0] if bias else None, names, step=step)

    def _chunks(self, batch: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, TextBatch]]:
        parts = zip(*(part.split(size) for part in batch), strict=True)
        return [(images, self._tokens(texts)) for images, texts in parts]

    def _tokens(self, texts: Tensor) -> TextBatch:
        return tokens(self._config, self._pairs, texts, self._device)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._encoder.named_parameters() if p.grad is not None}

    def grad_norm(self) -> float:
        return nn.utils.get_total_norm([p.grad for p in self._encoder.parameters() if p.grad is not None]).item()

    def after_step(self) -> None:
        self._encoder.limit_logit_scale()

    def metrics(self) -> dict[str, Any]:
        return {"logit_scale": self._encoder.logit_scale.item()}

    def validate(self) -> dict[str, Any]:
        return both_ways(*self._features(self._split.validation)) if self._rank == 0 else {}

    def _features(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        return held_out_features(self._encoder, self._config, self._pairs, texts, self._device)

    def headline(self, validation: Mapping[str, Any]) -> str:
        return f"recall@1 {validation['image_to_text']['recall@1']:.3f} among {len(self._split.validation)}"

    def loss_state(self) -> dict[str, Tensor]:
        return {f"objective.{name}": x.clone() for name, x in self._objective.state_dict().items()}

    def save(self, folder: Path, loss_state: Mapping[str, Tensor], *, step: int, seconds: float) -> None:
        if self._rank == 0:
            state = self._state.state_dict() | dict(loss_state)
            save_checkpoint(folder, state, self._optimizer, step=step, seconds=seconds)

    def load(self, folder: Path) -> dict[str, Any]:
        return load_checkpoint(folder, self._state, self._optimizer, steps=self._config.steps)

    def test(self) -> dict[str, Any]:
        if self._rank:
            return {}
        features = self._found = self._features(self._split.test)
        if not all(x.isfinite().all() for x in features):
            raise not_finite(self._config.steps, "the features of the test set are not finite")
        texts = len(self._split.test)
        chance = {f"recall@{k}": min(1.0, k / texts) for k in KS}
        return {"test_texts": texts, "chance": chance, **both_ways(*features)}

    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        names = {"image -> text": "image_to_text", "text -> image": "text_to_image", "chance": "chance"}
        rows = [[label, *(f"{report[key][f'recall@{k}']:.4f}" for k in KS)] for label, key in names.items()]
        title = f"Retrieval among {report['test_texts']} texts never seen in training"
        return title, ["", *(f"recall@{k}" for k in KS)], rows

    def weights(self) -> dict[str, Tensor]:
        return dict(self._encoder.state_dict())

    def result(self, report: Mapping[str, Any]) -> tuple[str, str, str]:
        chance = report["chance"]["recall@1"]
        return "recall@1, image → text", f"{report['image_to_text']['recall@1']:.3f}", f"chance {chance:.2g}"

    def evidence(self) -> Evidence:
        assert self._found is not None
        pairs, texts = self._pairs, self._split.test.tolist()
        found, sought = self._found
        return search_evidence(
            ("images", found, lambda row: Item(picture=picture_of(pairs.images[pairs.first[texts[row]]]))),
            ("texts", sought, lambda row: Item(pairs.texts[texts[row]])),
        )

    def draw(self, folder: Path) -> None:
        draw_retrieval(self.evidence().galleries[0], folder / "retrieval.png")


def _without_none(features: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in features if x is not None)

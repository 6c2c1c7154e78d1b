"""`--task identify`: an image encoder, and a classifier that is sharded over the ranks: wholebatch.PartialFC."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb

from ..config import TrainConfig
from ..data.classes.labeled import LabeledImages
from ..data.loader import Feed, workers_of_a_rank
from ..encoders.adapters import merged_state
from ..encoders.inputs import Inputs, rows_of, to_device
from ..encoders.make import make_encoder
from ..encoders.saved import save_encoder
from ..ranks.all_ranks import on_all_ranks
from ..ranks.sharding import shard_weights, whole_state
from ..report.classes import classes_evidence, surest_mistakes
from ..report.content import Evidence, Item
from ..run.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from .augment import augmented
from .batches import ImageBatches, Reader, rows_of_chunks
from .evaluation import features_of_rows
from .head import has_reference, make_head
from .head_folder import check_head_folder, load_head, remove_other_heads, save_head
from .precision import Precision
from .task import Curve, PassState, Task, finite_loss, make_adamw, not_finite
from .verification import FAR, accepted_at, best_possible, rows_to_verify

_TOP = 5


class Identify(Task):
    """Find the class of a new image among the classes of training."""

    curves = (Curve("top-1", ("top_1",)), Curve(f"top-{_TOP}", (f"top_{_TOP}",)))
    validation_title = "validation: images not trained on"

    def __init__(
        self,
        config: TrainConfig,
        data: LabeledImages,
        device: torch.device,
        *,
        rank: int,
        size: int,
        dense: bool = False,
    ) -> None:
        self._config, self._data, self._device, self._rank = config, data, device, rank
        self._rows = wb.partition.Partition.even(config.batch_size, size).rows(rank)
        self._chunks = rows_of_chunks(self._rows, config, size)
        torch.manual_seed(config.seed)
        self._encoder = make_encoder(config, "image")
        self._is_trained = any(p.requires_grad for p in self._encoder.parameters())
        self._is_sharded = config.fsdp and size > 1 and not dense
        if self._is_sharded:
            shard_weights(self._encoder, device)
        else:
            self._encoder.to(device)
        self._dense = dense
        self.module, self.precision = self._encoder, Precision(config.precision, device)
        if config.compile:
            self._encoder.compile(dynamic=True)
        self.head = make_head(
            config, self._encoder.width, len(data), device, wb.comm.LocalCommunicator() if dense else None
        )
        head_rate = config.head.learning_rate
        groups = [{"params": list(self.head.parameters()), "peak": head_rate}]
        self._head_optimizer = wb.SparseAdamW(groups, lr=head_rate, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
        self._optimizer = make_adamw(self._encoder, config)
        self.optimizers = [self._optimizer, self._head_optimizer]
        # The head stays outside of DDP: the gradient of a rank's classes is complete on that rank.
        replicated = size > 1 and self._is_trained and not self._is_sharded
        self._model = DistributedDataParallel(self._encoder) if replicated else self._encoder
        self._cached = None
        if config.chunk_size and self._is_trained:
            self._cached = wb.GradCache(
                [self._model],
                config.chunk_size,
                self._loss,
                split_input_fn=self._split,
                scaler=self.precision.scaler,
            )
        self._workers = workers_of_a_rank(config, {"image": data.pictures}, size)
        self._batches = Feed(
            ImageBatches(data, Reader.of(self._encoder), config, self._rows), stop=config.steps, workers=self._workers
        )
        self._step = 0
        self._ranks = size
        self._predictions: tuple[Tensor, Tensor, Tensor] | None = None

    def describe(self) -> str:
        data = self._data
        return (
            f"{len(data):,} classes: {len(data.train):,} images for training, {len(data.validation):,} for validation, "
            f"{len(data.test):,} for test ({data.novelty})" + "".join(f"\n{line}" for line in self._encoder.notes)
        )

    def add_gradients(self, step: int) -> Tensor:
        self._step = step
        batch = self._batches.at(step)
        images = augmented(to_device(batch.images, self._device), self._config, self._rows, step)
        named: dict[str, Any] = {"step": step, "labels": batch.labels.to(self._device)}

        def compute() -> Tensor:
            with self.precision.autocast():
                if self._cached is not None:
                    return self._cached(images, **named)
                loss = self._loss(self._encode(images), **named)
            return self.precision.backward(loss)

        return self.precision.add_gradients(compute, self.optimizers, self.head)

    def encode_rows(self, rows: int) -> Tensor:
        images = to_device(self._encoder.first(self._batches.at(0).images, rows), self._device)
        with self.precision.autocast():
            return self._encoder(augmented(images, self._config, slice(0, rows), 0)).float().sum()

    def _encode(self, images: Inputs) -> Tensor:
        if self._is_trained:
            return self._model(images)
        return torch.cat([self._model(some) for some in self._split(images)])

    def _split(self, images: Inputs, _: int = 0) -> list[Inputs]:
        return [rows_of(images, rows) for rows in self._chunks]

    def _loss(self, embeddings: Tensor, *, step: int, labels: Tensor) -> Tensor:
        if self._dense and has_reference(self._config.head):
            margin, smoothing = self.head.margin, self._config.label_smoothing
            reference = partial(wb.reference.partial_fc_loss, margin=margin, label_smoothing=smoothing)
            return finite_loss(reference, embeddings, labels, self.head.weight, step=step)
        return finite_loss(self.head, embeddings, labels, step=step)

    def gradients(self) -> dict[str, Tensor]:
        local_grads = {name: p.grad for name, p in self._encoder.named_parameters() if p.grad is not None}
        gradients = whole_state(local_grads, kept=self._rank == 0 or not self._is_sharded)
        assert self.head.weight.grad is not None
        local = self.head.weight.grad.to_dense()
        parts: list[Any] = [local]
        if dist.is_initialized() and not self._dense:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, local.cpu())
        return gradients | {"head": torch.cat(parts)}

    def grad_norm(self) -> float:
        return wb.heads.clip_grad_norm_(self._encoder.parameters(), self.head.parameters(), float("inf")).item()

    def validate(self) -> dict[str, Any]:
        return self._accuracy(self._data.validation)[0]

    def _accuracy(self, rows: Tensor) -> tuple[dict[str, Any], Tensor, wb.heads.TopClasses]:
        """Return the accuracy on these images, their embeddings and the classes found; rank 0 has all the images."""
        embeddings = self._embeddings(rows)
        try:
            top = self.head.top_classes(embeddings.to(self._device), min(_TOP, len(self._data)))
        except ValueError as error:
            raise not_finite(self._step, str(error)) from error
        right = top.class_ids.cpu() == self._data.labels[rows[: len(embeddings)], None]
        figures = {f"top_{k}": right[:, :k].any(1).double().mean().item() for k in (1, _TOP)} if len(right) else {}
        return figures, embeddings, top

    def _embeddings(self, rows: Tensor) -> Tensor:
        """Return unit embeddings of these images, on the CPU of rank 0, without augmentation. All ranks."""
        if not len(rows):
            return torch.empty(0, self._encoder.width)
        with self.precision.autocast():
            return features_of_rows(
                self._encoder, "image", self._data.pictures, rows, self._device,
                workers=self._workers, chunk_size=self._config.chunk_size, ranks=self._ranks,
            )  # fmt: skip

    def headline(self, validation: Mapping[str, Any]) -> str:
        return f"top-1 {validation['top_1']:.3f} among {len(self._data)} classes"

    def loss_state(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.head.named_buffers()}

    def save(self, folder: Path, before: PassState, *, step: int, seconds: float, metrics: str | None = None) -> None:
        present = self.loss_state()
        self.head.load_state_dict(before.loss, strict=False)
        save = save_head(folder, step, self.head, self._head_optimizer, rank=self._rank)
        self.head.load_state_dict(present, strict=False)
        if self._rank == 0 or self._is_sharded:
            save_checkpoint(
                folder, self._encoder.state_dict(), self._optimizer, step=step, seconds=seconds, save=save,
                metrics=metrics, scaler=before.scaler, writes=self._rank == 0,
            )  # fmt: skip
        if self._rank == 0:
            remove_other_heads(folder, step)

    def load(self, folder: Path) -> dict[str, Any]:
        def read() -> Checkpoint:
            arguments = (folder, self._encoder, self._optimizer)
            checkpoint = read_checkpoint(*arguments, steps=self._config.steps, scaler=self.precision.state())
            check_head_folder(folder, checkpoint.facts["step"])
            return checkpoint

        checkpoint, _ = on_all_ranks("resume", read)
        load_head(folder, checkpoint.facts["step"], checkpoint.facts["save"], self.head, self._head_optimizer)
        checkpoint.restore(self._encoder, self._optimizer)
        self.precision.restore(checkpoint.scaler)
        return checkpoint.facts

    def test(self) -> dict[str, Any]:
        data, rows = self._data, self._data.test
        figures, embeddings, top = self._accuracy(rows)
        if self._rank:
            return {}
        self._predictions = embeddings, top.class_ids.cpu(), top.logits.cpu() / self._config.head.scale
        verified = rows_to_verify(data.labels[rows])
        tar, threshold = accepted_at(embeddings[verified], data.labels[rows[verified]], FAR, device=self._device)
        return {
            "classes": len(data),
            "test_images": len(rows),
            **figures,
            "top_1_at_most": best_possible(data.numbers[rows].tolist(), data.labels[rows]),
            "chance": 1 / len(data),
            "verified_images": len(verified),
            "far": FAR,
            "tar": None if math.isnan(tar) else tar,
            "threshold": None if math.isnan(threshold) else threshold,
        }

    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        title = f"{report['test_images']:,} test images ({self._data.novelty}), {report['classes']:,} classes"
        tar, verified = report["tar"], report["verified_images"]
        subset = "" if verified == report["test_images"] else f", {verified:,} of the images"
        rows = [
            ["top-1 accuracy", f"{report['top_1']:.4f}"],
            [f"top-{_TOP} accuracy", f"{report[f'top_{_TOP}']:.4f}"],
            ["best possible top-1: some classes have equal pictures", f"{report['top_1_at_most']:.4f}"],
            ["top-1 by chance", f"{report['chance']:.4f}"],
            [f"verification: TAR at FAR {report['far']:g}{subset}", "no pairs" if tar is None else f"{tar:.4f}"],
        ]
        return title, ["", ""], rows

    def weights(self) -> dict[str, Tensor]:
        centers = self.head.full_weight()
        return whole_state(merged_state(self._encoder), kept=True) | ({} if centers is None else {"centers": centers})

    def save_encoders(self, folder: Path) -> None:
        save_encoder(folder / "image", self._encoder)

    def facts(self) -> dict[str, str]:
        return {"classes": json.dumps(self._data.names)}

    def result(self, report: Mapping[str, Any]) -> tuple[str, str, str]:
        return "top-1 accuracy", f"{report['top_1']:.3f}", f"chance {report['chance']:.2g}"

    def evidence(self) -> Evidence:
        assert self._predictions is not None
        data, (embeddings, predicted, cosines) = self._data, self._predictions
        return classes_evidence(
            embeddings,
            data.labels[data.test],
            predicted,
            cosines,
            surest_mistakes(data, predicted[:, 0], cosines[:, 0]),
            lambda row: Item(data.names[data.labels[data.test[row]]], data.picture(data.test[row])),
            lambda label: Item(data.names[label], data.picture(data.example(label))),
        )

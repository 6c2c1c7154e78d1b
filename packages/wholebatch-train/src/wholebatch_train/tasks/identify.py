"""`--task identify`: an image encoder, and a classifier that is sharded over the ranks: wholebatch.PartialFC.

In a checkpoint the classifier is a folder `head-N` of its shards, beside the file of the encoder, which names the save
of the classifier that belongs to it. The file is written after the folder and before older folders are removed, so a
run that is killed in between has both of the last checkpoint, or both of the one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import wholebatch as wb
from wholebatch.app import UserError

from ..config import HeadConfig, TrainConfig
from ..data.classes import LabeledImages
from ..encoders.encoder import Inputs, rows_of, to_device
from ..encoders.make import make_encoder
from ..report.evidence import classes_evidence, surest_mistakes
from ..report.page import Evidence, Item
from .batches import ImageBatches, Reader, augmented, rows_of_chunks
from .evaluation import best_possible, verification_row, verify
from .task import Curve, PassState, Task, finite_loss, not_finite

_COSFACE_M = 0.1  # there are few images of each class, and many classes look alike


def make_head(config: TrainConfig, width: int, classes: int, device: torch.device, group: Any = None) -> wb.PartialFC:
    """Make this rank's shard of the classifier of embeddings of this width."""
    head = config.head
    return wb.PartialFC(
        width, classes, margin=make_margin(head), sub_centers=head.sub_centers, sample_rate=head.sample_rate,
        label_smoothing=config.label_smoothing, seed=config.seed, group=group, device=device,
    )  # fmt: skip


def has_reference(head: HeadConfig) -> bool:
    """Return whether the reference implementation has the head's loss: one batch, all centers, a stateless margin."""
    return head.sample_rate == 1.0 and head.margin in ("arcface", "cosface", "sphereface", "normface")


def make_margin(head: HeadConfig) -> Any:
    margins: dict[str, Callable[..., Any]] = {
        "arcface": wb.ArcFace, "cosface": wb.CosFace, "sphereface": wb.SphereFace, "normface": wb.NormFace,
        "adaface": wb.AdaFace, "magface": wb.MagFace, "curricularface": wb.CurricularFace,
    }  # fmt: skip
    m = _COSFACE_M if head.m is None and head.margin == "cosface" else head.m
    return margins[head.margin](s=head.scale, **({} if m is None else {"m": m}))


def _head_folder(folder: Path, step: int | str) -> Path:
    """Return the folder of the classifier after so many steps."""
    return folder / f"head-{step}"


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, but not the target of a link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


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
        torch.manual_seed(config.seed)
        self._state = self._encoder = make_encoder(config, "image")
        super().__init__(config, self._encoder, device, rank=rank, size=size, dense=dense)
        self._data = data
        self._chunks = rows_of_chunks(self._rows, config, size)
        self.head = make_head(
            config, self._encoder.width, len(data), device, wb.comm.LocalCommunicator() if dense else None
        )
        head_rate = config.head.learning_rate
        groups = [{"params": list(self.head.parameters()), "peak": head_rate}]
        self._head_optimizer = wb.SparseAdamW(groups, lr=head_rate, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
        self.optimizers = [self._optimizer, self._head_optimizer]
        # The head stays outside of DDP: the gradient of a rank's classes is complete on that rank.
        batches = ImageBatches(data, Reader.of(self._encoder), config, self._rows)
        self._feed(batches, [data.pictures], split_input_fn=self._split)
        self._step = 0
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
        named = {"step": step, "labels": batch.labels.to(self._device)}
        return self._add_gradients(images, lambda: self._encode(images), self.head, named)

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

    def _loss(self, features: Tensor, *, step: int, labels: Tensor) -> Tensor:
        if self._dense and has_reference(self._config.head):
            margin, smoothing = self.head.margin, self._config.label_smoothing
            reference = partial(wb.reference.partial_fc_loss, margin=margin, label_smoothing=smoothing)
            return finite_loss(reference, features, labels, self.head.weight, step=step)
        return finite_loss(self.head, features, labels, step=step)

    def gradients(self) -> dict[str, Tensor]:
        assert self.head.weight.grad is not None
        local = self.head.weight.grad.to_dense()
        parts: list[Any] = [local]
        if dist.is_initialized() and not self._dense:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, local.cpu())
        return super().gradients() | {"head": torch.cat(parts)}

    def grad_norm(self) -> float:
        return wb.heads.clip_grad_norm_(self._encoder.parameters(), self.head.parameters(), float("inf")).item()

    def validate(self) -> dict[str, Any]:
        return self._accuracy(self._data.validation)[0]

    def _accuracy(self, rows: Tensor) -> tuple[dict[str, Any], Tensor, wb.heads.TopClasses]:
        """Return the accuracy on these images, their embeddings and the classes found; rank 0 has all the images."""
        nothing = torch.empty(0, self._encoder.width)
        embeddings = self._features_of("image", self._data.pictures, rows) if len(rows) else nothing
        try:
            top = self.head.top_classes(embeddings.to(self._device), min(_TOP, len(self._data)))
        except ValueError as error:
            raise not_finite(self._step, str(error)) from error
        right = top.class_ids.cpu() == self._data.labels[rows[: len(embeddings)], None]
        figures = {f"top_{k}": right[:, :k].any(1).double().mean().item() for k in (1, _TOP)} if len(right) else {}
        return figures, embeddings, top

    def headline(self, validation: Mapping[str, Any]) -> str:
        return f"top-1 {validation['top_1']:.3f} among {len(self._data)} classes"

    def loss_state(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.head.named_buffers()}

    def save(self, folder: Path, before: PassState, *, step: int, **facts: Any) -> None:
        path = _head_folder(folder, step)
        if self._rank == 0:
            with suppress(OSError):  # what cannot be removed is reported by the save
                _remove(path)  # left by a run that was killed while it wrote this folder
        if dist.is_initialized():
            dist.barrier()
        present = self.loss_state()
        self.head.load_state_dict(before.loss, strict=False)
        try:
            save = wb.heads.save_head(path, self.head, self._head_optimizer)
        except ValueError as error:
            raise UserError(str(error)) from error
        self.head.load_state_dict(present, strict=False)
        super().save(folder, before._replace(loss={}), step=step, save=save, **facts)
        if self._rank == 0:
            for other in {*folder.glob(_head_folder(folder, "*").name)} - {path}:
                try:
                    _remove(other)
                except OSError as error:
                    raise UserError(f"{other}, of an earlier checkpoint, cannot be removed: {error}") from error

    def _check_beside(self, folder: Path, facts: Mapping[str, Any]) -> None:
        if (path := _head_folder(folder, facts["step"])).is_symlink():  # which a save would follow
            raise UserError(f"{path} is a link; expected the folder itself: was the run folder edited?")

    def _load_beside(self, folder: Path, facts: Mapping[str, Any]) -> None:
        path = _head_folder(folder, facts["step"])
        try:
            wb.heads.load_head(path, self.head, self._head_optimizer, save_id=facts["save"])
        except ValueError as error:
            raise UserError(f"{error}; was the run folder edited?") from error

    def test(self) -> dict[str, Any]:
        data, rows = self._data, self._data.test
        figures, embeddings, top = self._accuracy(rows)
        if self._rank:
            return {}
        self._predictions = embeddings, top.class_ids.cpu(), top.logits.cpu() / self._config.head.scale
        verified = verify(embeddings, data.labels[rows], self._device)
        return {
            "classes": len(data),
            "test_images": len(rows),
            **figures,
            "top_1_at_most": best_possible(data.numbers[rows].tolist(), data.labels[rows]),
            "chance": 1 / len(data),
            "verified_images": verified.pop("images"),
            **verified,
        }

    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        title = f"{report['test_images']:,} test images ({self._data.novelty}), {report['classes']:,} classes"
        rows = [
            ["top-1 accuracy", f"{report['top_1']:.4f}"],
            [f"top-{_TOP} accuracy", f"{report[f'top_{_TOP}']:.4f}"],
            ["best possible top-1: some classes have equal pictures", f"{report['top_1_at_most']:.4f}"],
            ["top-1 by chance", f"{report['chance']:.4f}"],
            verification_row({"images": report["verified_images"], **report}, report["test_images"]),
        ]
        return title, ["", ""], rows

    def weights(self) -> dict[str, Tensor]:
        centers = self.head.full_weight()
        return super().weights() | ({} if centers is None else {"centers": centers})

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

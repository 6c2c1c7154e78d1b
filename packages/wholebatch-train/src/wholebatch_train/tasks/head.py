"""The classifier of `--task identify`, from the options, and in a checkpoint: a folder `head-N` of its shards.

The folder is beside the file of the encoder, which names the save of the classifier that belongs to it. The file is
written after the folder and before older folders are removed, so a run that is killed in between has both of the last
checkpoint, or both of the one before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.app import UserError

from ..config import HeadConfig, TrainConfig

_COSFACE_M = 0.1  # there are few images of each class, and many classes look alike


def make_head(config: TrainConfig, width: int, classes: int, device: torch.device, group: Any = None) -> wb.PartialFC:
    """Make this rank's shard of the classifier of embeddings of this width."""
    head = config.head
    return wb.PartialFC(
        width,
        classes,
        margin=make_margin(head),
        sub_centers=head.sub_centers,
        sample_rate=head.sample_rate,
        label_smoothing=config.label_smoothing,
        seed=config.seed,
        group=group,
        device=device,
    )


def has_reference(head: HeadConfig) -> bool:
    """Return whether the reference implementation has the head's loss: one batch, all centers, a stateless margin."""
    return head.sample_rate == 1.0 and head.margin in ("arcface", "cosface", "sphereface", "normface")


def make_margin(head: HeadConfig) -> Any:
    margins: dict[str, Callable[..., Any]] = {
        "arcface": wb.ArcFace,
        "cosface": wb.CosFace,
        "sphereface": wb.SphereFace,
        "normface": wb.NormFace,
        "adaface": wb.AdaFace,
        "magface": wb.MagFace,
        "curricularface": wb.CurricularFace,
    }
    m = _COSFACE_M if head.m is None and head.margin == "cosface" else head.m
    return margins[head.margin](s=head.scale, **({} if m is None else {"m": m}))


def save_head(folder: Path, step: int, head: wb.PartialFC, optimizer: wb.SparseAdamW, *, rank: int) -> str:
    """Write the classifier after so many steps into its folder, and return the save's id. All ranks.

    Raises:
        UserError: on all ranks, if one cannot write.
    """
    path = _path(folder, step)
    if rank == 0:
        with suppress(OSError):  # what cannot be removed is reported by the save
            _remove(path)  # left by a run that was killed while it wrote this folder
    if dist.is_initialized():
        dist.barrier()
    try:
        return wb.heads.save_head(path, head, optimizer)
    except ValueError as error:
        raise UserError(str(error)) from error


def remove_other_heads(folder: Path, step: int) -> None:
    """Remove the classifiers of other checkpoints than that after so many steps."""
    for other in folder.glob(_path(folder, "*").name):
        if other != _path(folder, step):
            try:
                _remove(other)
            except OSError as error:
                raise UserError(f"{other}, of an earlier checkpoint, cannot be removed: {error}") from error


def check_head_folder(folder: Path, step: int) -> None:
    """Refuse a link in place of the folder, which a save would follow."""
    path = _path(folder, step)
    if path.is_symlink():
        raise UserError(f"{path} is a link; expected the folder itself: was the run folder edited?")


def load_head(folder: Path, step: int, save: str, head: wb.PartialFC, optimizer: wb.SparseAdamW) -> None:
    """Read the classifier of a save after so many steps. All ranks.

    Raises:
        UserError: on all ranks, if the folder is missing, damaged or of another save.
    """
    try:
        wb.heads.load_head(_path(folder, step), head, optimizer, save_id=save)
    except ValueError as error:
        raise UserError(f"{error}; was the run folder edited?") from error


def _path(folder: Path, step: int | str) -> Path:
    return folder / f"head-{step}"


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, but not the target of a link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)

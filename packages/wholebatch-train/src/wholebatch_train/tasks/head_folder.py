"""The classifier in a checkpoint of `--task identify`: a folder `head-N` of its shards, beside the file of the encoder.

The file names the save of the classifier that belongs to it. It is written after the folder and before older folders
are removed, so a run that is killed in between has both of the last checkpoint, or both of the one before.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

import wholebatch as wb
from wholebatch.app import UserError


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

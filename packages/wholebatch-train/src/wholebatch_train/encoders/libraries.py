"""The libraries of models, which are optional, and the models of theirs that are on this machine."""

from __future__ import annotations

import os
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from wholebatch.app import UserError, declare_torchvision_operators, needs

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
SAFE = ("model.safetensors", "model.safetensors.index.json")


def needed(library: str, value: str) -> Any:
    """Import a library that `value`, the text of an option, needs."""
    try:
        declare_torchvision_operators()  # for preprocessing, which both libraries of models leave to torchvision
        return import_module(library)
    except ModuleNotFoundError as error:
        raise UserError(needs(value, error.name or library)) from error
    except Exception as error:  # for instance compiled operators that belong to another torch
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{value} needs {library}, which cannot be imported: {reason}") from error


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message: the known names that are most similar."""
    names = get_close_matches(name, known, n=5, cutoff=0.5)
    return f"; similar names: {', '.join(names)}" if names else ""


def folder_of(value: str, name: str) -> Path:
    """Return the folder of a model: `name` itself, or its place in the cache of Hugging Face; nothing is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    check_is_no_path(value, name)
    hub, errors = needed("huggingface_hub", value), needed("huggingface_hub.errors", value)
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except errors.HFValidationError as error:
        raise UserError(
            f"{value}: {name!r} is neither a folder nor a name of Hugging Face, such as MODEL or OWNER/MODEL"
            f"{_nearest_models(name, [*_folders_beside(name), *_cached_models(hub)])}"
        ) from error
    except OSError as error:  # not in the cache, or not all of it
        raise UserError(
            f"{value} would need a download: {name!r} is neither a folder nor in the cache of Hugging Face "
            f"({hub.constants.HF_HUB_CACHE}){_nearest_models(name, [*_folders_beside(name), *_cached_models(hub)])}. "
            f"Nothing is downloaded here. On a machine with network: hf download {name} --local-dir FOLDER; then give "
            "that folder"
        ) from error


def check_is_no_path(value: str, name: str) -> None:
    """Refuse the path of a folder that is not there; other names may be those of models."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or os.sep != "/":
        raise UserError(f"{value}: there is no folder {name!r}{_nearest_models(name, _folders_beside(name))}")


def _folders_beside(name: str) -> list[str]:
    """Return the folders of models in the folder that a path names before its last part."""
    parent = Path(name).parent
    if not parent.is_dir():
        return []
    try:
        return sorted(str(path.parent) for path in parent.glob("*/config.json"))
    except OSError:  # a folder that cannot be listed has no names to offer
        return []


def _cached_models(hub: Any) -> list[str]:
    """Return the names of the models in the cache of Hugging Face."""
    if not Path(hub.constants.HF_HUB_CACHE).is_dir():
        return []
    repositories = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE).repos
    return sorted(each.repo_id for each in repositories if each.repo_type == "model")


def _nearest_models(name: str, known: list[str]) -> str:
    """Return the end of a message: the models whose last part of the name is most similar."""
    by_last: dict[str, list[str]] = {}
    for model in known:
        by_last.setdefault(_last_part(model), []).append(model)
    near = get_close_matches(_last_part(name), by_last, n=5, cutoff=0.5)
    models = [model for last in near for model in by_last[last]][:5]
    return f"; similar names on this machine: {', '.join(models)}" if models else ""


def _last_part(name: str) -> str:
    return name.lower().rstrip("/").rpartition("/")[2]


def check_safe_weights(value: str, folder: Path) -> None:
    """Raise UserError unless the folder has weights as safetensors; other files of weights are pickles."""
    if not any((folder / name).exists() for name in SAFE):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        state = f"{', '.join(others)} is not read, because such files can run code" if others else holds(folder)
        side = value.partition("-encoder")[0]
        raise UserError(
            f"{value}: {str(folder)!r} has no {SAFE[0]}; {state}. Save it as safetensors, or start from random weights "
            f"with {side}.no-pretrained"
        )


def holds(folder: Path) -> str:
    """Return the names of a folder's files, as a clause of a message."""
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"it holds {', '.join(names[:12])}{more}" if names else "it is empty"

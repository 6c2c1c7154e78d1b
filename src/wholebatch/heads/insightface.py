"""Load centers and the optimizer's state from the files that insightface's PartialFC writes, one for each of its ranks.

    rank_{r}_softmax_weight.pt, rank_{r}_softmax_weight_mom.pt     its first version: a tensor each
    softmax_fc_gpu_{r}.pt                                          its second version: a state_dict with "weight"
    checkpoint_gpu_{r}.pt                                          train_v2.py: such a state_dict under the name
                                                                   "state_dict_softmax_fc", and the optimizer of
                                                                   backbone and classifier

insightface distributes classes as `PartialFC` does: evenly, with the remainder on the first ranks. The files are
pickles, and nothing in them is executed: see `torch_file`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._base.checks import check_instance, checked_path
from .._base.settings import shown
from ..contract import bind_on_all_ranks
from .checkpoint import check_head, communicator_of
from .optim import SparseAdamW, SparseSGD
from .partial_fc import PartialFC
from .rows import overlap
from .torch_file import check_bytes, read_torch_file

_RANK = r"(0|[1-9]\d{0,5})"


@bind_on_all_ranks
def load_insightface(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Load centers, and their state in an optimizer, on any number of ranks. Collective: 1 handshake.

    Nothing in the files is executed. The bytes of each tensor are compared with their checksum.

    Args:
        folder: the folder with the files of all of insightface's ranks.
        head: the head that gets the centers.
        optimizer: an optimizer of `head.weight`. A :class:`wholebatch.SparseSGD` or torch.optim.SGD gets the momentum,
            which the files of the first version contain, and those of train_v2.py with SGD. A
            :class:`wholebatch.SparseAdamW` or torch.optim.AdamW gets the averages and the number of steps, which those
            of train_v2.py with AdamW contain.

    Raises:
        ValueError: on every rank, with head and optimizer unchanged: files are missing, damaged, of different steps,
            hold more than plain values and tensors, are of another optimizer, or have another number of classes or
            embedding size.
    """
    comm, parts, steps = communicator_of(head), dict[str, Tensor](), list[float]()

    def state() -> dict[str, Any]:
        check_head(head)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        if head.sub_centers > 1 or head.bias is not None:
            raise ValueError(
                "head must have sub_centers=1 and bias=False, as the files do; got "
                f"sub_centers={head.sub_centers} and bias={head.bias is not None}"
            )
        kind = None if optimizer is None else _kind_of(optimizer, head)
        checked_path("folder", folder)
        try:
            found, count = _read_parts(Path(folder), head, kind)
        except OSError as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        parts.update(found)
        steps.append(count)
        return {}

    comm.handshake(state, caller="load_insightface")
    with torch.no_grad():
        head.weight.copy_(parts.pop("weight"))
        if optimizer is not None:
            for name, rows in parts.items():  # state that is there may be that of another rank, with other rows
                optimizer.state[head.weight][name] = rows.to(head.weight.device)
            if isinstance(optimizer, SparseAdamW | torch.optim.AdamW):
                _set_steps(optimizer, head.weight, steps[0])


class _Kind(NamedTuple):
    """A kind of optimizer, by the state that it has of the centers."""

    name: str
    content: str
    """Its state of the centers, in words."""
    names: tuple[str, ...]
    """Its matrices like that of the centers."""
    counts: bool = False
    """Whether it counts its steps."""


def _kind_of(optimizer: Optimizer, head: PartialFC) -> _Kind:
    """Return the kind of an optimizer of the head; raise ValueError for others."""
    adam = isinstance(optimizer, SparseAdamW | torch.optim.AdamW)
    if not adam and not isinstance(optimizer, SparseSGD | torch.optim.SGD):
        raise ValueError(
            "optimizer must be a wholebatch.SparseSGD or SparseAdamW, a torch.optim.SGD or AdamW, or None; got "
            f"{type(optimizer).__name__}"
        )
    groups = [group for group in optimizer.param_groups if any(p is head.weight for p in group["params"])]
    if not groups:
        raise ValueError("optimizer must have head.parameters() among its parameters; it lacks weight")
    if not adam:
        return _Kind("SGD", "momentum", ("momentum_buffer",))
    largest = ("max_exp_avg_sq",) if groups[0].get("amsgrad") else ()
    return _Kind("AdamW", "averages", ("exp_avg", "exp_avg_sq", *largest), counts=True)


def _set_steps(optimizer: Optimizer, weight: Tensor, steps: float) -> None:
    """Set the number of steps of AdamW: one for each row in SparseAdamW, and one in torch's."""
    if isinstance(optimizer, SparseAdamW):
        optimizer.state[weight]["steps"] = torch.full_like(weight[:, 0], steps, dtype=torch.float32)
        return
    (group,) = (group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    device = weight.device if group["capturable"] or group["fused"] else "cpu"
    optimizer.state[weight]["step"] = torch.tensor(steps, dtype=torch.float32, device=device)


def _state_of(name: str) -> Callable[[Any], Any]:
    """Return a function that takes the last parameter's state: those of the classifier come after the backbone's."""

    def take(content: Any) -> Any:
        optimizer = content["state_optimizer"]
        last = optimizer["param_groups"][-1]["params"][-1]
        if type(last) is not int:
            raise TypeError("parameters must have numbers")
        return optimizer["state"][last][name]

    return take


def _steps_of(content: Any) -> Any:
    steps = content["epoch"], content["global_step"]
    if not all(type(n) is int and 0 <= n < 2**63 for n in steps):
        raise TypeError("epoch and global_step must be numbers")
    return steps


class _Version(NamedTuple):
    """A version of the files: the pattern of their names, and functions that take parts of their content."""

    pattern: str
    weight: Callable[[Any], Any]
    common: Callable[[Any], Any] = lambda content: None
    """The part that is the same in all files."""
    state: Callable[[str], Callable[[Any], Any]] | None = None
    """Takes the state of the centers with a name; None: there are no files of an optimizer."""
    momentum_pattern: str | None = None
    """The files of the state, if they are others, which hold the momentum alone."""


_VERSIONS = (
    _Version(
        rf"rank_{_RANK}_softmax_weight\.pt",
        lambda content: content,
        state=lambda _name: lambda content: content,
        momentum_pattern=rf"rank_{_RANK}_softmax_weight_mom\.pt",
    ),
    _Version(rf"softmax_fc_gpu_{_RANK}\.pt", lambda content: content["weight"]),
    _Version(
        rf"checkpoint_gpu_{_RANK}\.pt", lambda content: content["state_dict_softmax_fc"]["weight"], _steps_of, _state_of
    ),
)


def _read_parts(folder: Path, head: PartialFC, kind: _Kind | None) -> tuple[dict[str, Tensor], float]:
    """Return the rows of the local classes, of the weight and of an optimizer's state, and its number of steps."""
    version = next((v for v in _VERSIONS if _files_by_rank(folder, v.pattern)), None)
    if version is None:
        names = " or ".join(_name_of(v.pattern) for v in _VERSIONS)
        raise ValueError(f"{folder} holds no file whose name is {names}")
    files = _Files(folder, version.pattern, version.common)
    rows, steps = {"weight": files.rows("weight", version.weight, head)}, 0.0
    if kind is None:
        return rows, steps
    if version.state is None or (version.momentum_pattern is not None and kind.counts):
        raise ValueError(f"files like {_name_of(version.pattern)} hold no {kind.content}; leave the optimizer out")
    if version.momentum_pattern is not None:
        files = _Files(folder, version.momentum_pattern, version.common)
    for name in kind.names:
        rows[name] = files.rows(f"{name} of {kind.name}", version.state(name), head)
    if kind.counts:
        steps = files.steps(version.state("step"))
    return rows, steps


def _files_by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    return {int(m[1]): file for file in folder.glob("*.pt") if (m := re.fullmatch(pattern, file.name))}


def _name_of(pattern: str) -> str:
    return pattern.replace(_RANK, "0").replace("\\", "")


class _Files:
    """The contents of the files of all ranks, in the order of the ranks."""

    def __init__(self, folder: Path, pattern: str, common: Callable[[Any], Any]) -> None:
        by_rank = _files_by_rank(folder, pattern)
        missing = sorted(set(range(max(by_rank, default=0) + 1)) - by_rank.keys())
        if missing:
            raise ValueError(
                f"{folder} has files like {_name_of(pattern)} of ranks {sorted(by_rank)}, those of {missing[:10]} are "
                "missing"
            )
        self._folder, self._common, self._contents, self._checked = folder, common, dict[Path, Any](), set[Path]()
        for rank, file in sorted(by_rank.items()):
            self._contents[file], saved_as = read_torch_file(file)
            was = re.fullmatch(pattern, f"{saved_as}.pt")
            if was is not None and int(was[1]) != rank:
                raise ValueError(f"{file} was saved as {was[0]}: another rank's classes; restore that name")

    def rows(self, name: str, take: Callable[[Any], Any], head: PartialFC) -> Tensor:
        """Return the rows of the local classes; the bytes of their files are compared with the checksums."""
        shards = self._parts(take, f"the classifier's {name}")
        for file, x in shards.items():
            if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
                raise ValueError(f"{file} must hold a matrix of floating-point numbers for the classifier's {name}")
        (first, first_steps), *others = self._parts(self._common, "epoch and global_step").items()
        for file, steps in others:
            if steps != first_steps:
                raise ValueError(
                    f"{file} is of epoch and step {steps}, {first.name} of {first_steps}: of different saves"
                )
        rows, widths = sum(len(x) for x in shards.values()), {x.shape[1] for x in shards.values()}
        if rows != head.num_classes or widths != {head.embedding_size}:
            raise ValueError(
                f"the files in {self._folder} have {rows} classes of {sorted(widths)} numbers, the head has "
                f"{head.num_classes} of {head.embedding_size}"
            )
        parts, start = [], 0
        for file, x in shards.items():
            shared = overlap(start, len(x), head.local_classes.start, len(head.weight))
            if shared is not None:
                self._check_bytes(file)
                parts.append(x.detach()[shared[0]].to(head.weight.dtype))
            start += len(x)
        return torch.cat(parts)

    def steps(self, take: Callable[[Any], Any]) -> float:
        """Return the number of the optimizer's steps, which is the same in all files."""
        by_file = self._parts(take, "the number of AdamW's steps")
        for file, content in by_file.items():
            self._check_bytes(file)
            number = content.item() if isinstance(content, Tensor) and content.numel() == 1 else content
            if type(number) not in (int, float) or not 0 <= number < 2**24:
                raise ValueError(f"{file} must hold the number of the optimizer's steps, got {shown(content)}")
            by_file[file] = float(number)
        (first, steps), *others = by_file.items()
        for file, other in others:
            if other != steps:
                raise ValueError(f"{file} is of step {other:.0f} of the optimizer, {first.name} of {steps:.0f}")
        return float(steps)

    def _parts(self, take: Callable[[Any], Any], name: str) -> dict[Path, Any]:
        """Return a part of each file's content."""
        parts = {}
        for file, content in self._contents.items():
            try:
                parts[file] = take(content)
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{file} must hold {name} where insightface writes it; it is missing there") from error
        return parts

    def _check_bytes(self, file: Path) -> None:
        if file not in self._checked:
            check_bytes(file)
            self._checked.add(file)

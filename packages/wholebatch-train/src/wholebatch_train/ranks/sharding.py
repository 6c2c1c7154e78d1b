"""`--fsdp`: weights, gradients and optimizer state in parts, one on each rank (FSDP2), for encoders that do not fit.

A block of an encoder is whole on a rank only while it computes. A checkpoint holds whole tensors: it is the same file
as without `--fsdp`, and continues on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.app import UserError

from ..encoders.encoder import Encoder

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def shard_weights(model: nn.Module, device: torch.device) -> None:
    """Shard every block of the encoders in `model`, each encoder, its projection, and the rest. All ranks.

    Blocks are those of `blocks_of`, such as the layers of a transformer; inner ones come first.
    The weights go to the device one block after the other, so the whole model must fit into the host's memory alone.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes 0.4 s

    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(f"--fsdp takes no parameter of shape (), and {name} has it; give it the shape (1,)")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    blocks = {block for encoder in encoders for block in blocks_of(encoder)}
    outer_first = [module for module in model.modules() if module in blocks]
    others = [*encoders, *getattr(model, "projections", {}).values()]
    if model not in others:
        others.append(model)
    for module in (*reversed(outer_first), *others):
        module.register_forward_hook(_copy_view)  # before FSDP2's own hook
        fully_shard(module, mesh=mesh)


def blocks_of(encoder: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of an encoder that stand in a list, or in a sequence of such with parts."""
    blocks: dict[nn.Module, None] = {}
    for module in encoder.modules():
        for child in module.children() if isinstance(module, _CONTAINERS) else ():
            has_parts = isinstance(module, nn.ModuleList) or any(True for _ in child.children())
            has_weights = any(True for _ in child.parameters())
            if has_parts and has_weights and not isinstance(child, _CONTAINERS):
                blocks[child] = None
    return [*blocks]


def _copy_view(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Return a copy of an output that is a view, such as the first token of each row: FSDP2 warns of views."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _in_parts(x: Any) -> bool:
    return hasattr(x, "full_tensor")  # as a DTensor has, whose module takes long to import


def is_sharded(model: nn.Module) -> bool:
    """Return whether weights of the model are in parts."""
    return any(_in_parts(p) for p in model.parameters())


def whole(x: Any) -> Any:
    """Return a tensor with all its parts, on every rank. All ranks."""
    return x.full_tensor() if _in_parts(x) else x


def whole_state(state: Mapping[str, Tensor], *, kept: bool) -> dict[str, Tensor]:
    """Return whole tensors, sharded ones on the CPU; {} unless they are `kept` here. All ranks.

    They are gathered one by one: no device holds more than one of them.
    """
    tensors = {}
    for name, x in state.items():
        gathered = whole(x).cpu() if _in_parts(x) else x
        if kept:
            tensors[name] = gathered
    return tensors


def as_in(x: Tensor, model: Any) -> Tensor:
    """Return this rank's part of a whole tensor, in parts as `model` is. Each rank passes the same tensor."""
    if not _in_parts(model) or _in_parts(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def local_parts(tensors: Iterable[Any]) -> list[Tensor]:
    """Return this rank's part of each tensor, which shares its memory."""
    return [x.to_local() if _in_parts(x) else x for x in tensors]

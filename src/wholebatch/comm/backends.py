"""The backends of a process group, and what each can do: no other module knows their names.

A process group has one backend for each type of device, as in "cpu:gloo,cuda:nccl". `init_process_group()` without a
backend makes such a group. The name of its single backend is then "undefined", so nothing here asks for that name.

    host      gloo, mpi, ucc      tensors of the CPU (others are copied there first); messages have tags
    device    nccl, xccl, ...     tensors of that device; messages of two ranks arrive in the order in which they
                                  were sent, and have no tags; equal parts are gathered and reduced in one operation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ON_THE_HOST = ("gloo", "mpi", "ucc")


@dataclass(frozen=True)
class Backends:
    """The backends of a group, by type of device."""

    by_device: Mapping[str, str]  # "gloo" for "cpu", and so on

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Backends:
        """Return the backends of a process group, None for the default group."""
        config = str(dist.get_backend_config(group))
        return cls(dict(pair.split(":", 1) for pair in config.split(",")))

    def on_device(self, device_type: str) -> bool:
        """Whether tensors of this type of device, other than the CPU, travel from device to device."""
        return device_type != "cpu" and self.by_device.get(device_type, "gloo") not in _ON_THE_HOST

    def take(self, device_type: str) -> bool:
        """Whether a backend takes tensors of this type of device as they are."""
        return self.on_device(device_type) or (device_type == "cpu" and "cpu" in self.by_device)

    @property
    def may_abort(self) -> bool:
        """Whether a message that is too long ends the process that receives it."""
        return "gloo" in self.by_device.values()

    def home(self, bound: torch.device | None) -> torch.device:
        """Return where numbers from the host travel if no backend takes them: the device that the group is bound to."""
        device_types = [device_type for device_type in self.by_device if self.on_device(device_type)]
        assert device_types, f"no backend of {dict(self.by_device)} takes tensors; please report this"
        return bound if bound is not None and bound.type in device_types else torch.device(device_types[0])

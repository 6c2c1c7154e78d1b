"""The precision of the encoders: `--precision`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from wholebatch.app import UserError


class Precision:
    """Weights, gradients and the optimizer stay in float32; the products of the encoders have this precision.

    The loss gets unit rows in float32. Under autocast, on a GPU, it rounds them to bfloat16 before it multiplies them,
    and sums in float32.

    Raises:
        UserError: the device does not have this precision.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if device.type != "cuda" and name == "tf32":
            raise UserError(
                f"--precision {name} needs a GPU, and the run is on the {device.type.upper()}; bf16 runs there"
            )
        if device.type == "cuda":
            if name == "bf16" and not torch.cuda.is_bf16_supported():
                raise UserError("--precision bf16 needs a GPU that multiplies bfloat16, which this one does not")
            float32 = "tf32" if name == "tf32" else "ieee"
            torch.backends.cuda.matmul.fp32_precision = float32
            torch.backends.cudnn.conv.fp32_precision = float32  # type: ignore[attr-defined]  # of torch's stubs
        self._device, self._is_half = device.type, name == "bf16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which encoders and loss are called."""
        return torch.autocast(self._device, torch.bfloat16) if self._is_half else nullcontext()

"""The precision of the encoders: `--precision`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import wholebatch as wb
from wholebatch.app import UserError

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Weights, gradients and the optimizer stay in float32; the products of the encoders have this precision.

    The loss gets unit rows in float32. Under autocast, on a GPU, it rounds them to the same half precision before it
    multiplies them, and sums in float32.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if device.type != "cuda" and name in ("tf32", "fp16"):
            raise UserError(
                f"--precision {name} needs a GPU, and the run is on the {device.type.upper()}; bf16 runs there"
            )
        if device.type == "cuda":
            if name == "bf16" and not torch.cuda.is_bf16_supported():
                raise UserError("--precision bf16 needs a GPU that multiplies bfloat16; this one has fp16")
            float32 = "tf32" if name == "tf32" else "ieee"
            torch.backends.cuda.matmul.fp32_precision = float32
            torch.backends.cudnn.conv.fp32_precision = float32  # type: ignore[attr-defined]  # of torch's stubs
        self._device, self._dtype = device.type, _HALF.get(name)
        self.scaler = GradScaler(device.type) if name == "fp16" else None
        """Of the loss, so that its gradient is not too small for float16."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which encoders and loss are called."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    def backward(self, loss: Tensor) -> Tensor:
        """Go backward from a loss, scaled if need be; return it detached."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        """Return the scale and the number of steps since it last changed, which a checkpoint keeps; {} without one."""
        if self.scaler is None:
            return {}
        state = self.scaler.state_dict()
        return {"scale": torch.tensor(state["scale"]), "growth_tracker": torch.tensor(state["_growth_tracker"])}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` has returned."""
        if self.scaler is not None:
            values = {"scale": state["scale"].item(), "_growth_tracker": int(state["growth_tracker"])}
            self.scaler.load_state_dict(self.scaler.state_dict() | values)

    def add_gradients(
        self, compute: Callable[[], Tensor], optimizers: Sequence[Optimizer], loss_fn: nn.Module
    ) -> Tensor:
        """Return the loss of `compute`, which adds its gradient to the parameters'. All ranks.

        With a scale, the gradients are divided by it afterward. If one is not finite, the step is computed again with
        half the scale: no step is left out, on no rank. The buffers of `loss_fn` are those of the last pass alone.
        """
        if self.scaler is None:
            return compute()
        before = {name: x.clone() for name, x in loss_fn.named_buffers()}
        while True:
            loss, scale = compute(), self.scaler.get_scale()
            for optimizer in optimizers:
                self.scaler.unscale_(optimizer)
            wb.heads.agree_on_overflow(self.scaler, *optimizers)
            self.scaler.update()
            if self.scaler.get_scale() >= scale or scale < 1:
                return loss  # below 1 the scale is not the reason
            for optimizer in optimizers:
                optimizer.zero_grad()
            for name, x in before.items():
                loss_fn.get_buffer(name).copy_(x)

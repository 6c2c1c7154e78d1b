"""Training steps of CLIP with ViT-B/32 and its text tower under autocast to bfloat16: with each loss, in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.bench.peers import PairLoss

from .device import DEVICE, GPU, Row, message, peak_bytes, relative, seconds_of
from .libraries import Method, libraries

_BATCH, _ROUNDS = (1024, 15) if GPU else (8, 2)
_IMAGE, _PATCH, _WORDS, _CONTEXT = (224, 32, 49_408, 77) if GPU else (16, 8, 50, 5)
_WIDE, _WIDTH, _LAYERS, _SIZE = (768, 512, 12, 512) if GPU else (16, 8, 1, 8)  # images' and texts' widths
_CLOSE = 2e-2  # of a value that autocast has rounded to bfloat16
_METHODS = (("torch", "dense"), ("open_clip_torch", ""), ("wholebatch", ""))  # libraries, and a label or all


class Tower(nn.Module):
    """A transformer over embedded patches or words, whose mean output is projected to a feature of length 1."""

    def __init__(self, embed: nn.Module, length: int, width: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.project = nn.Linear(width, _SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images (b, 3, h, w) or of words (b, length)."""
        embedded = self.embed(x).flatten(2).mT if x.dim() == 4 else self.embed(x)
        return F.normalize(self.project(self.layers(embedded + self.positions).mean(1)), dim=1)


class Clip(nn.Module):
    """The two towers and the logarithm of the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Tower(nn.Conv2d(3, _WIDE, _PATCH, _PATCH), (_IMAGE // _PATCH) ** 2, _WIDE)
        self.text = Tower(nn.Embedding(_WORDS, _WIDTH), _CONTEXT, _WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of images and texts, and the scale."""
        return self.image(images), self.text(words), self.log_scale.exp()


def clip_methods() -> list[Method]:
    """Return the methods to compare."""
    every = libraries()
    return [
        method for name, label in _METHODS for method in every[name]
        if method.loss == "clip" and label in ("", method.label)
    ]  # fmt: skip


def steps(left: Callable[[], float], methods: list[Method] | None = None) -> Iterator[Row]:
    """Yield the time of a step with each loss: the median over rounds in which each takes its turn.

    Args:
        left: returns the seconds that are left; without any, no further round begins.
        methods: other methods than `clip_methods`.
    """
    torch.manual_seed(0)
    model = Clip().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=GPU)
    images = torch.randn(_BATCH, 3, _IMAGE, _IMAGE, device=DEVICE)
    words = torch.randint(_WORDS, (_BATCH, _CONTEXT), device=DEVICE)
    bias = torch.zeros((), device=DEVICE)

    def forward(loss: PairLoss) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return loss(*model(images, words), bias)

    def step(loss: PairLoss) -> None:
        optimizer.zero_grad()
        forward(loss).backward()
        optimizer.step()

    rows: dict[str, Row] = {}
    built: dict[str, PairLoss] = {}
    for method in clip_methods() if methods is None else methods:
        name = f"{method.package or 'wholebatch'}, {method.label}"
        row = rows[name] = {"batch_size": _BATCH, "method": name}
        if (why := method.missing(_SIZE)) is not None:
            row["skipped"] = why
            continue
        try:
            loss = method.build()
            with torch.no_grad():
                true = forward(lambda x, y, s, _: wb.reference.clip_loss(x.double(), y.double(), s.double()))
                row["error_of_loss"] = relative(forward(loss), true)
            if not row["error_of_loss"] <= _CLOSE:
                raise AssertionError(f"wrong: an error above {_CLOSE:g}")
            step(loss)
            row["peak_bytes"] = peak_bytes(lambda loss=loss: step(loss))
            built[name] = loss
        except Exception as error:  # a loss that fails costs its own figure; the row says so
            row["error"] = message(error)
    times: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(_ROUNDS):
        if left() <= 0:
            break
        for name, loss in built.items():
            times[name].append(seconds_of(lambda loss=loss: step(loss)))
    for name, of in times.items():
        rows[name] |= {"seconds": median(of), "rounds": len(of)} if of else {"skipped": "no time left"}
    yield from rows.values()

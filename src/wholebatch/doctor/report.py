"""The report of `wholebatch doctor`: what is installed, and whether kernels are right and fast on this machine.

It calls losses on random features, in each precision, with kernel="auto" on a GPU and kernel="triton" in Triton's
interpreter. Each call checks the kernels that it would start, against float64, and times them (see
`nodes.kernel_check`). The text is made to be pasted into a report.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .. import functional, kernels
from .._cli.text_table import format_rows
from ..heads import ArcFace
from ..kernels import choice, verdicts

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PACKAGES = ("wholebatch", "torch", "triton", "numpy", "mpi4py", "jax")
_SETTINGS = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "NVIDIA_TF32_OVERRIDE")


@dataclass(frozen=True)
class Row:
    """The check of one loss in one precision.

    Args:
        loss: its name.
        dtype: of the features.
        result: "kernels", "PyTorch" or "error".
        why: why not kernels; "" otherwise.
        checked: the kernels that gave the right results.
        kernels_ms, pytorch_ms: of a sweep forward and backward; None: not measured.
        failed: whether a kernel failed its check.
    """

    loss: str
    dtype: str
    result: str
    why: str = ""
    checked: tuple[str, ...] = ()
    kernels_ms: float | None = None
    pytorch_ms: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class Report:
    """The installation, the device, and the check of each loss.

    Args:
        versions: of packages and tools, by name.
        device: its name and properties.
        settings: environment variables that change what kernels do, if they are set.
        kernels: "" if kernels can run here; else what they need.
        rows: the checks.
    """

    versions: dict[str, str]
    device: dict[str, str]
    settings: dict[str, str]
    kernels: str
    rows: tuple[Row, ...]

    @property
    def failed(self) -> bool:
        """Whether kernels can run here and failed a check."""
        return any(row.failed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the same facts for programs."""
        return {**asdict(self), "failed": self.failed}

    def __str__(self) -> str:
        facts = {**self.versions, **self.device, **self.settings}
        lines = [f"{name:20} {value}" for name, value in facts.items()]
        lines.append(f"{'kernels':20} {self.kernels or 'can run here'}")
        if not self.rows:
            return "\n".join(lines)
        header = ["loss", "features", "computed by", "ms in kernels", "ms in PyTorch", "checked"]
        cells = [
            [row.loss, row.dtype, row.result, _number(row.kernels_ms), _number(row.pytorch_ms), " ".join(row.checked)]
            for row in self.rows
        ]
        table = format_rows(header, cells, left=["loss", "features", "computed by", "checked"])
        reasons = [f"{row.loss}, {row.dtype}: {row.why}" for row in self.rows if row.why]
        return "\n".join(
            [*lines, "", *(line.rstrip() for row in table for line in row), *([""] if reasons else []), *reasons]
        )


def examine_here(rows: int | None, embedding_size: int | None) -> Report:
    """Return the report of the GPU, or of the CPU where there is none, by default at a size for it."""
    on_gpu = torch.cuda.is_available()
    default_rows, default_size = (4096, 512) if on_gpu else (256, 64)
    return examine(torch.device("cuda" if on_gpu else "cpu"), rows or default_rows, embedding_size or default_size)


def examine(device: torch.device, rows: int, embedding_size: int) -> Report:
    """Return the report of a device, with losses on `rows` random rows of `embedding_size` numbers."""
    missing = kernels.missing(device)
    results = (
        ()
        if missing is not None
        else tuple(_examined(name, dtype, device, rows, embedding_size) for name in _losses() for dtype in _DTYPES)
    )
    return Report(
        _versions(), _device(device), _settings(), "" if missing is None else f"kernel='triton' {missing}", results
    )


def _losses() -> dict[str, Callable[..., Tensor]]:
    """Return a loss of each family of kernels, on features (b, d) of two towers and labels."""
    return {
        "clip": lambda x, y, _, **options: functional.clip_loss(x, y, 20.0, **options),
        "nt_xent": lambda x, y, _, **options: functional.nt_xent_loss(x, y, temperature=0.1, **options),
        "sup_con": lambda x, _, labels, **options: functional.sup_con_loss(x, labels, temperature=0.1, **options),
        "siglip": lambda x, y, _, **options: functional.siglip_loss(x, y, 20.0, -5.0, **options),
        "matryoshka": lambda x, y, _, **options: functional.matryoshka_loss(
            x, y, logit_scale=20.0, dims=(x.shape[1] // 4, x.shape[1]), **options
        ),
        "partial_fc": lambda x, y, labels, **options: functional.partial_fc_loss(
            x, labels, y, margin=ArcFace(16.0, 0.3), **options
        ),
        "max_sim": lambda x, y, _, **options: functional.max_sim_loss(
            x, y, logit_scale=1.0, query_offsets=_offsets(x), document_offsets=_offsets(y), **options
        ),
    }


def _offsets(x: Tensor) -> Tensor:
    """Return the offsets of texts of 64 tokens, the last one shorter."""
    return torch.tensor([*range(0, len(x), 64), len(x)])


def _examined(name: str, dtype: str, device: torch.device, rows: int, size: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.nn.functional.normalize(torch.randn(rows, size, generator=generator), dim=1)
        .to(device, _DTYPES[dtype])
        .requires_grad_()
        for _ in range(2)
    )
    labels = torch.randint(0, max(1, rows // 2), (rows,), generator=generator).to(device)
    before = len(choice.choices())
    with warnings.catch_warnings(), verdicts.ignored():
        warnings.simplefilter("ignore")  # the report says the same
        try:
            kernel = "auto" if kernels.chooses(device) else "triton"
            _losses()[name](x, y, labels, kernel=kernel).sum().backward()
        except (RuntimeError, ValueError) as error:
            return Row(name, dtype, "error", " ".join(str(error).split()), failed=True)
    choices = choice.choices()[before:]
    if not choices:
        return Row(name, dtype, "PyTorch", "no kernel computes this form")
    last = choices[-1]
    times = last.milliseconds or (None, None)
    computed_by = "kernels" if last.in_kernels else "PyTorch"
    return Row(name, dtype, computed_by, last.why, last.kernels, times[0], times[1], last.failed)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    if versions["wholebatch"] == "not installed":  # run from its source
        versions["wholebatch"] = "not installed (run from source)"
    versions["torch"] = str(torch.__version__)  # with the build, as in 2.11.0+cu130
    versions["CUDA"] = torch.version.cuda or "none"
    if torch.cuda.is_available():
        versions["NCCL"] = (
            ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        )
    if (ptxas := _ptxas()) is not None:
        versions["ptxas"] = ptxas
    return versions


def _ptxas() -> str | None:
    """Return the version of Triton's assembler; None where Triton is missing or does not say."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version
    except ImportError:
        return None
    try:
        text: str = get_ptxas_version(90)
    except Exception as error:  # a missing or broken assembler is a fact of the report
        return f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[-1]


def _device(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"device": f"{device.type}, {os.cpu_count()} cores"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} SMs",
    }


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

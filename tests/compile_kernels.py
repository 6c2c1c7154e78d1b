"""Compile the kernels that losses start, without a GPU, and print facts of the machine code, a line of JSON each.

Losses run on a CPU, and the function that starts kernels only records its arguments. With another Triton:

    PYTHONPATH=folder-of-another-triton:src python tests/compile_kernels.py --all
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.backends.nvidia
from kernel_losses import CANARIES, PASSED, REHEARSE, losses
from torch.nn.functional import normalize
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import wholebatch as wb
from wholebatch.kernels import Blocks, using
from wholebatch.kernels.blocks import Form, blocks_of
from wholebatch.kernels.launch import Box
from wholebatch.sweep import Products

# Triton 3.6's cannot read code for compute capability 10.3.
CUOBJDUMP = os.environ.get("CUOBJDUMP") or Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
TYPES = {
    **{torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"},
    **{torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
    **{torch.float64: "*fp64", int: "i32", float: "fp32", type(None): "constexpr"},
}
WHOLE = {"num_cols", "positive_stride", "excluded_stride", "stride_gradient"}  # multiples of 16, as in most batches
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

# Triton 3.8's compiler, under Python 3.13.
warnings.filterwarnings(
    "ignore", message="AnnAssign.__init__ missing 1 required positional", category=DeprecationWarning
)


@dataclass(frozen=True)
class Started:
    """A kernel, the types of its arguments, and its compile-time constants."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    def has(self, argument: str) -> bool:
        """Tell whether the kernel takes an argument of that name."""
        return argument in self.kernel.arg_names

    def describe(self, **more: Any) -> dict[str, Any]:
        """Return the facts that identify it in a message."""
        return {"kernel": self.kernel.__name__, "constants": dict(self.constants), **more}


def type_of(argument: Any) -> str:
    """Return the type of an argument as Triton writes it; None is a constant."""
    if isinstance(argument, Box):
        return f"tensordesc<{TYPES[argument.tensor.dtype][1:]}{argument.size}>"
    return TYPES[argument.dtype if isinstance(argument, torch.Tensor) else type(argument)]


def as_on_cuda(_precision: str, dtype: torch.dtype, *_: Any) -> Products:
    """Return the products that precision="auto" chooses on CUDA."""
    return Products(str(dtype).removeprefix("torch.")) if dtype in (torch.bfloat16, torch.float16) else Products()


@functools.cache
def started(
    dtype: torch.dtype, capability: int, features: int = 520, only: str = "", rows: int = 50
) -> dict[Started, str]:
    """Return every form in which losses start kernels, each with the first loss that starts it.

    Args:
        dtype: of features.
        capability: of the GPU.
        features: their number.
        only: the beginning of the names of losses.
        rows: the number of rows; of tokens, the longest document has 7 of 10.
    """
    found: dict[Started, str] = {}
    name = ""

    def record(kernel: Any, _programs: int, *arguments: Any, **constants: Any) -> None:
        for argument, of in zip(kernel.arg_names, arguments, strict=False):
            if argument in ("pair_targets", "target_sums") or (
                isinstance(of, torch.Tensor) and of.dtype == torch.uint8
            ):
                of.zero_()  # the backward pass looks places up
            elif kernel.__name__ == "row_numbers" and argument in ("products", "norms_x", "norms_y", "out"):
                of.fill_(1.0)  # read on the host
        types = map(type_of, arguments)
        found.setdefault(Started(kernel, tuple(types), tuple(constants.items())), name)

    patches = [patch("wholebatch.kernels.launch.run", record)]
    patches += [
        patch.object(importlib.import_module("wholebatch.contract.agree"), "check_kernel"),
        patch.object(importlib.import_module("wholebatch.contract.agree"), "select_products", as_on_cuda),
        patch(REHEARSE, return_value=PASSED),
        patch(CANARIES),
    ]
    patches.append(patch("wholebatch.kernels.launch.capability", return_value=divmod(capability, 10)))
    patches.append(patch("wholebatch.kernels.launch.processors", return_value=132))
    for of in patches:
        of.start()
    torch.manual_seed(0)
    x, y = (normalize(torch.randn(rows, features), dim=1).to(dtype).requires_grad_() for _ in range(2))
    made, _ = losses(x, y, torch.randint(0, 30, (rows,)))
    for name, loss in made.items():  # `record` reads the name
        if not name.startswith(only):
            continue
        for memory in ("flat", 2**24):
            loss(wb.functional, {"kernel": "triton", "memory": memory}).backward()
    for of in patches:
        of.stop()
    return found


COUNTED = ("LDL", "STL", "UTMA", "LDG", "MMA")  # instructions: few of the text's megabytes


def compiled(of: Started, capability: int) -> dict[str, Any]:
    """Return facts of the machine code."""
    constants = dict(of.constants)
    options = {name: constants.pop(name) for name in OPTIONS}
    names = of.kernel.arg_names[: len(of.types)]
    signature = dict(zip(names, of.types, strict=True)) | dict.fromkeys(constants, "constexpr")
    constants |= {name: None for name, kind in signature.items() if kind == "constexpr" and name not in constants}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or (name in WHOLE and kind == "i32")]
    made = triton.compile(
        ASTSource(
            of.kernel,
            signature,
            constexprs=constants,
            attrs={(of.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    with TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(made.asm["cubin"])
        used, instructions = (
            subprocess.run([CUOBJDUMP, option, code], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    instructions = "\n".join(line for line in instructions.splitlines() if any(name in line for name in COUNTED))
    return {
        "capability": capability,
        "registers": int(re.search(r"REG:(\d+)", used)[1]),
        # Triton 3.6 writes an unused 0 (RZ) for each box that it reads on 12.0.
        "spills": len(re.findall(r"\bLDL\b|\bSTL\b[^,]*, (?!RZ)", instructions)),
        "shared": made.metadata.shared,
        "boxes read": len(re.findall(r"\bUTMALDG", instructions)),
        "boxes written": len(re.findall(r"\bUTMASTG", instructions)),
        "narrow loads": len(re.findall(r"\bLDG\.E\.[US](?:8|16)\b", instructions)),
        "writes dS": signature.get("gradient", "constexpr") != "constexpr" and "ends" not in signature,
        "wgmma": len(re.findall(r"\bHGMMA\b", instructions)),
        "products": len(re.findall(r"\b(?:HMMA|HGMMA|UTC[A-Z]*MMA)\b", instructions)),
    }


# The forms that `make test` compiles: the most different ones, for the most different GPUs.
SOME = {
    (torch.bfloat16, 90): (
        *("clip", "clip, label smoothing", "nt_xent", "sup_con", "siglip, learned bias", "matryoshka", "partial_fc"),
        *("matryoshka, wide parts", "max_sim", "dcl", "info_nce, both directions"),
    ),
    (torch.bfloat16, 100): ("nt_xent, ids", "max_sim"),
    (torch.float32, 80): ("nt_xent", "max_sim"),
}
ALL = (
    (torch.bfloat16, (80, 89, 90, 100, 103, 120)),
    (torch.float32, (80, 90, 100, 103, 120)),
    (torch.float16, (90, 100)),
)
FEW = 128  # features of tokens that are loaded at once


@dataclass(frozen=True)
class Task:
    """A form to compile, and the loss that starts it."""

    form: Started
    loss: str
    capability: int
    dtype: str


def tasks(everything: bool) -> list[Task]:
    """Return the forms to compile; the last one is too large and must be reported as spilling."""
    found = []
    for dtype, capabilities in ALL:
        for capability in capabilities:
            names = None if everything else SOME.get((dtype, capability), ())
            forms = dict(started(dtype, capability))
            for rows in (40, 50):  # short documents, and others
                forms |= started(dtype, capability, FEW, "max_sim", rows)
            found += [
                Task(of, name, capability, str(dtype)) for of, name in forms.items() if names is None or name in names
            ]
    found += [
        of_one_column(of)
        for of in found
        if (of.loss, of.capability, of.dtype) == ("clip", 90, "torch.bfloat16") and of.form.has("num_cols")
    ]
    found.append(sums_in(blocks_of(Form("tile_sums", (9, 0), torch.bfloat16, 768, many_rows=True), boxes=True), "clip"))
    return [*found, sums_in(Blocks(128, 128, 64, 8, 4, 3), "clip, ids")]


def of_one_column(of: Task) -> Task:
    """Return the form of a tile with one column, a number that the compiler takes for a constant."""
    types = [*of.form.types]
    types[of.form.kernel.arg_names.index("num_cols")] = "constexpr"
    form = replace(of.form, types=tuple(types), constants=(*of.form.constants, ("num_cols", 1)))
    return replace(of, form=form)


def sums_in(blocks: Blocks, loss: str) -> Task:
    """Return the sums of a loss on 9.0 in other blocks than those of its size."""
    with using(blocks):
        forms = started.__wrapped__(torch.bfloat16, 90, only=loss)
    form = next(of for of, name in forms.items() if name == loss and of.kernel.__name__ == "tile_sums")
    return Task(form, loss, 90, str(torch.bfloat16))


TASKS: list[Task] = []  # of this process and of its children, which cannot receive a kernel


def line(at: int) -> str:
    """Return the facts of a form, by its place in `TASKS`, as JSON."""
    of = TASKS[at]
    found = compiled(of.form, of.capability)
    return json.dumps(of.form.describe(loss=of.loss, dtype=of.dtype, triton=triton.__version__, **found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    TASKS += tasks("--all" in sys.argv)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for made in pool.imap(line, range(len(TASKS))):
            print(made, flush=True)

"""Compile every kernel for GPUs that need not be there, and print what the machine code has, a line of JSON each."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wholebatch.kernels import Blocks, blocks_for, softmax_tiles

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS = {"row_sums", "col_sums", "row_weights", "col_weights", "row_targets", "col_targets"}
IDS = {"positive_rows", "positive_cols", "excluded_rows", "excluded_cols"}
WHOLE = {"num_rows", "num_cols", "dim", "stride_x", "stride_y"}  # multiples of 16, as in most batches


def compiled(kernel, capability, dtype, positive, excluded, blocks=None):
    """What one of them takes."""
    comparisons = positive[0] + bool(positive[1]) + excluded[0] + bool(excluded[1])
    blocks = blocks or blocks_for(dtype, comparisons)
    constants = {
        "POSITIVE_DIAGONALS": positive[0],
        "POSITIVE_IDS": positive[1],
        "EXCLUDED_DIAGONALS": excluded[0],
        "EXCLUDED_IDS": excluded[1],
        "CANDIDATES": 0 if positive[1] == 0 else 1,
        "OF_ROWS": True,
        "OF_COLS": True,
        "TARGETS_OF_ROWS": True,
        "TARGETS_OF_COLS": bool(positive[1]),
        "BM": blocks.rows,
        "BN": blocks.cols,
        "BK": blocks.depth,
        "GROUP": blocks.group,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        "WIDEN": False,
    }
    signature = {name: type_of(name, dtype) for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = [n for n, of in signature.items() if of.startswith("*") or n in WHOLE]
    made = triton.compile(
        ASTSource(
            kernel,
            signature,
            constexprs=constants,
            attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True},
    )
    with TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(made.asm["cubin"])
        used, instructions = (
            subprocess.run([CUOBJDUMP, option, code], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "dtype": NAMES[dtype],
        "positive": positive,
        "excluded": excluded,
        "registers": int(re.search(r"REG:(\d+)", used)[1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", instructions)),
        "shared": made.metadata.shared,
        "products": len(re.findall(r"\b(?:HMMA|HGMMA|UTC[A-Z]*MMA)\b", instructions)),
    }


def type_of(name, dtype):
    """Of an argument."""
    if name in ("x", "y", "gradient"):
        return f"*{NAMES[dtype]}"
    if name in POINTERS:
        return "*fp32"
    if name in IDS:
        return "*i32"
    return "fp32" if name in ("scale", "log2_scale", "log2_shift") else "i32"


if __name__ == "__main__":
    # A pair for each row; queries and keys; two views, and ids: no loss has more.
    sets = [((1, 0), (0, 0)), ((1, 0), (1, 0)), ((2, 0), (2, 2))]
    for of in product((softmax_tiles.tile_sums, softmax_tiles.tile_gradient), (80, 90, 100), NAMES):
        for positive, excluded in sets:
            print(json.dumps(compiled(*of, positive, excluded)), flush=True)
    # And one whose part is too large: that is seen.
    too_large = Blocks(128, 256, 64, 8, 8, 3)
    print(json.dumps(compiled(softmax_tiles.tile_sums, 90, torch.bfloat16, (1, 0), (1, 2), too_large)))

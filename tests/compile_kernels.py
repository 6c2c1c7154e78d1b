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
# What losses ask for: positives, those excluded, and candidates, as kernels have them.
SETS = {
    "clip": ((1, 0), (0, 0), 0),
    "clip, equal ids are positive": ((0, 2), (0, 0), 1),
    "clip, equal ids are excluded": ((1, 0), (1, 2), 0),
    "info_nce, several positives": ((1, 1), (0, 0), 1),
    "nt_xent": ((2, 0), (1, 0), 0),
    "nt_xent, equal ids are excluded": ((2, 0), (2, 2), 0),
    "sup_con": ((1, 2), (1, 0), 1),
}
IDS = {"positive_rows", "positive_cols", "excluded_rows", "excluded_cols"}
WHOLE = {"num_rows", "num_cols", "dim", "stride_x", "stride_y"}  # multiples of 16, as in most batches


def compiled(kernel, capability, dtype, of, blocks=None):
    """What one of them takes."""
    positive, excluded, candidates = SETS[of]
    comparisons = positive[0] + bool(positive[1]) + excluded[0] + bool(excluded[1])
    blocks = blocks or blocks_for(dtype, comparisons)
    constants = {
        "POSITIVE_DIAGONALS": positive[0],
        "POSITIVE_IDS": positive[1],
        "EXCLUDED_DIAGONALS": excluded[0],
        "EXCLUDED_IDS": excluded[1],
        "CANDIDATES": candidates,
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
        "of": of,
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
    return "fp32" if name in ("log2_scale", "log2_shift") else "i32"


if __name__ == "__main__":
    kernels, half, single = (softmax_tiles.tile_sums, softmax_tiles.tile_gradient), torch.bfloat16, torch.float32
    chosen = [(half, capability, of) for capability, of in product((90, 100), SETS)]
    chosen += [(half, capability, "nt_xent") for capability in (80, 89, 120)]
    chosen += [(single, capability, "nt_xent") for capability in (80, 90, 100)]
    for kernel, (dtype, capability, of) in product(kernels, chosen):
        print(json.dumps(compiled(kernel, capability, dtype, of)), flush=True)
    # And one whose part is too large: that is seen.
    too_large = Blocks(128, 256, 64, 8, 8, 3)
    print(json.dumps(compiled(kernels[0], 90, half, "clip, equal ids are excluded", too_large)))

"""The machine code of kernels, compiled without a GPU, by the Triton that is installed: `make kernels` takes others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from inspect import isfunction, signature
from pathlib import Path

import pytest

from wholebatch import kernels

pytest.importorskip("triton")
LAUNCHERS = {  # a launcher has the name of its kernel, and takes a tile first
    name
    for name, function in vars(kernels).items()
    if name in kernels.__all__ and isfunction(function) and [*signature(function).parameters][:1] == ["tile"]
}
OF_ROWS = {  # memory is their limit
    "row_numbers", "side_weights", "pair_losses", "pair_weights", "row_gradient", "target_chords", "target_gradients",
}  # fmt: skip
WITHOUT_PRODUCTS = {"token_sums", "query_gradient"}
ALL_KERNELS = os.environ.get("WHOLEBATCH_TEST_KERNELS") == "all"  # `make kernels`: minutes
KIB_OF_A_PROGRAM = {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
KIB_OF_AN_SM = 228  # of 9.0
REGISTERS_OF_AN_SM = 65536
MOST_SPILLS = 24  # instructions, where no card was measured; none on 9.0


def test_machine_code():
    """Tensor cores are used, few registers are spilled, none on 9.0, and shared memory is large enough."""
    environment = {name: of for name, of in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "error", Path(__file__).parent / "compile_kernels.py", *["--all"] * ALL_KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *found, too_large = [json.loads(line) for line in run.stdout.splitlines()]
    assert too_large["spills"] > 0
    assert {of["capability"] for of in found} >= (set(KIB_OF_A_PROGRAM) if ALL_KERNELS else {80, 90, 100})
    assert {of["kernel"] for of in found} == LAUNCHERS | OF_ROWS, "the losses start every kernel"
    spilled = [of for of in found if of["spills"] > MOST_SPILLS * (of["capability"] != 90)]
    assert not spilled, spilled
    found_of_rows = [of for of in found if of["kernel"] in OF_ROWS]
    found = [of for of in found if of["kernel"] in LAUNCHERS - WITHOUT_PRODUCTS]
    for of in found_of_rows:
        assert of["narrow loads"] == of["products"] == 0, of
        assert of["registers"] <= 128, of  # an SM has room for four programs of 128 threads
    for of in found:
        constants, capability = of["constants"], of["capability"]
        of_parts = constants.get("ENDS", 8) < 8  # parts of 7 features, for one
        assert of["narrow loads"] == 0 or of_parts or of["kernel"] == "document_gradient", of  # winners: bytes
        assert of["products"] > 0, of
        assert of["registers"] <= 255, of
        assert of["shared"] <= KIB_OF_A_PROGRAM[capability] * 1024, of
        boxes = constants.get("BOXES", False)
        whole_steps = of["kernel"].startswith("tile_") or constants.get("ENDS") == 64
        assert boxes == (capability >= 90 and of["dtype"] != "torch.float32" and whole_steps), of
        assert (of["boxes read"] > 0) == boxes, of
        assert (of["boxes written"] > 0) == constants.get("STORES", False) == (boxes and of["writes dS"]), of
        if capability == 90 and constants["num_warps"] == 4 and boxes:  # an SM has room for two programs
            assert of["wgmma"] > 0, of
            assert 2 * 32 * 4 * of["registers"] <= REGISTERS_OF_AN_SM, of
            assert 2 * (of["shared"] + 1024) <= KIB_OF_AN_SM * 1024, of
        if of["dtype"] == "torch.float32" and capability in (100, 103):  # where overlapping products have been wrong
            assert constants["num_stages"] == 1, of
    whole = [of for of in found if of["capability"] == 90 and of["constants"]["BN"] == 128]
    assert {of["kernel"] for of in whole if of["constants"]["num_warps"] == 4} >= {
        "tile_sums", "tile_gradient", "tile_sigmoid",
    }  # fmt: skip
    assert any(of["constants"]["BM"] == 256 for of in whole), "sums of many rows and features"

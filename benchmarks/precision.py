"""The errors of losses in each precision of products, beside plain PyTorch under autocast in bfloat16.

    python benchmarks/precision.py

Errors are those of the loss and of its gradient by both towers, relative, against the reference in float64 at the given
features: random ones, half trained and trained ones, at scales 10, 50 and 100. A CPU rounds factors as tensor cores do
and sums in float32. The losses and plain PyTorch's formulas are those of tests/precision_losses.py. Prints a table in
Markdown, and writes results/precision.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "precision.json"
sys.path.insert(0, str(HERE.parent / "tests"))

from precision_losses import LOSSES, errors  # noqa: E402  # found by the line above

PRECISIONS = ("float32", "bfloat16x3", "tf32", "float16", "bfloat16", "autocast")
KINDS, SCALES = ("random", "half trained", "trained"), (10.0, 50.0, 100.0)


def main() -> None:
    """Measure, print and write."""
    found = []
    for name in LOSSES:
        for kind in KINDS:
            for scale in SCALES:
                for precision in PRECISIONS:
                    torch.manual_seed(0)
                    loss, gradient = errors(name, kind, scale, precision)
                    found.append(
                        {"loss": name, "features": kind, "scale": scale, "precision": precision}
                        | {"error_of_loss": loss, "error_of_gradient": gradient}
                    )
    of_rounded = []
    for kind in KINDS:
        for scale in SCALES:
            torch.manual_seed(0)
            of_rounded.append(errors("CLIP", kind, scale, "bfloat16", given=torch.bfloat16)[1])
            found.append(
                {"loss": "CLIP of bfloat16 features", "features": kind, "scale": scale, "precision": "bfloat16"}
                | {"error_of_gradient": of_rounded[-1]}
            )
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "results": found}, indent=1) + "\n")
    print("Errors of the gradient: the range over features and scales.\n")
    print("| loss |", " | ".join(PRECISIONS), "|")
    print("|---" * (1 + len(PRECISIONS)) + "|")
    for name in LOSSES:
        cells = []
        for precision in PRECISIONS:
            of = [x["error_of_gradient"] for x in found if (x["loss"], x["precision"]) == (name, precision)]
            cells.append(f"{min(of):.0e} … {max(of):.0e}")
        print(f"| {name} |", " | ".join(cells), "|")
    print(f"\nCLIP of features that are bfloat16 already, in bfloat16: {min(of_rounded):.0e} … {max(of_rounded):.0e}")


if __name__ == "__main__":
    main()

"""A step of losses in kernels, at ragged sizes, under compute-sanitizer's memcheck: `python -m gpu.sanitized`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

from .compiled import compile_form
from .device import GPU, ROOT, Row, SkippedError

_LOSSES = ("clip", "nt_xent", "siglip", "matryoshka", "partial_fc", "max_sim")


def sanitizer() -> Iterator[Row]:
    """Run the step under compute-sanitizer; raise if it finds something."""
    tool = shutil.which("compute-sanitizer")
    if not GPU or tool is None:
        raise SkippedError("compute-sanitizer is not installed" if GPU else "no GPU")
    done = subprocess.run([tool, "--error-exitcode", "9", sys.executable, "-m", __name__], cwd=ROOT, check=False)
    yield {"tool": tool, "exit_code": done.returncode}
    if done.returncode:
        raise AssertionError(f"{tool} ended with {done.returncode}")


def main() -> None:
    """Make the step."""
    for name in _LOSSES:
        row = compile_form((name, "bfloat16", 136), 300 if GPU else 40)
        print(row)
        if "error" in row:
            sys.exit(1)


if __name__ == "__main__":
    main()

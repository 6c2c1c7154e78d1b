"""The tests whose results depend on a card, run by pytest on all cores where pytest-xdist is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from wholebatch._base.third_party import version

from .device import GPU, ROOT, Row, SkippedError

_ON_DEVICE = re.compile(r'^DEVICE = torch\.device\("cuda"', re.MULTILINE)
_MORE = ("test_backends", "test_gradcache_devices", "test_launches", "test_precision")  # with pretended GPUs
_QUICK = ("tests/test_gradcache_devices.py",)  # without a GPU


def files() -> list[str]:
    """Return the test files with tensors of the GPU where there is one, and those that must not notice it."""
    if not GPU:
        return list(_QUICK)
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [f"tests/{path.name}" for path in paths if path.stem in _MORE or _ON_DEVICE.search(path.read_text())]


def suite(names: list[str] | None = None) -> Iterator[Row]:
    """Yield how many tests passed, and each that failed; raise if one did."""
    if version("pytest") is None:
        raise SkippedError("pytest is not installed")
    workers = ["-n", str(min(12, os.cpu_count() or 1))] if GPU and version("pytest-xdist") else ["-p", "no:xdist"]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *workers]
        done = subprocess.run([*command, *(files() if names is None else names)], cwd=ROOT, check=False)
        found = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else iter(())
        outcomes = {"passed": 0, "not_run": 0, "failed": 0}
        for test in found:
            wrong = [part for kind in ("failure", "error") for part in test.iter(kind)]
            outcomes["failed" if wrong else "not_run" if test.find("skipped") is not None else "passed"] += 1
            if wrong:
                name = f"{test.get('classname')}::{test.get('name')}"
                yield {"test": name, "error": wrong[0].get("message", "")[:300]}
    yield {**outcomes, "files": files() if names is None else names}
    if done.returncode:
        raise AssertionError(f"pytest ended with {done.returncode}, {outcomes['failed']} tests failed")

"""The command for a GPU: a stage that fails or takes too long costs itself, and the figures that it checks, alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STAGES = Path(__file__).parent.parent / "benchmarks" / "gpu_stages.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stages are small on a CPU only")


def run(folder, *arguments):
    command = [sys.executable, str(STAGES), "--out", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_stages_without_a_gpu_pass_or_say_what_they_skip(tmp_path):
    done = run(tmp_path, "--only", "about", "self_check", "sanitizer", "floors")
    assert done.returncode == 0, done.stderr
    assert "| about | passed |" in done.stdout
    assert "| sanitizer | skipped: no GPU |" in done.stdout
    assert "| self_check | passed |" in done.stdout
    assert json.loads((tmp_path / "about.json").read_text())["results"][0]["torch"] == torch.__version__
    assert json.loads((tmp_path / "floors.json").read_text())["results"][0]["tflops_of_S"] > 0
    assert "times mean nothing" in (tmp_path / "report.md").read_text()


def test_a_stage_that_hangs_costs_itself_and_what_it_checks(tmp_path):
    done = run(tmp_path, "--only", "precision", "losses", "sanitizer", "--limit", "0.01")
    assert done.returncode == 1
    assert "| precision | FAILED: longer than 0 s |" in done.stdout
    assert "| losses | skipped: precision did not pass |" in done.stdout
    assert "| sanitizer | FAILED" in done.stdout  # it was started all the same
    assert (tmp_path / "report.md").exists()

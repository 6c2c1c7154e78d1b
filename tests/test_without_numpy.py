"""The core needs torch alone: the public API in an environment where NumPy cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import wholebatch as wb

# Python imports it in every process, those of run_ranks included.
SITECUSTOMIZE = """
import gc
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec


def without_numpy(name, path=None, target=None):
    return None if name.partition(".")[0] in ("numpy", "safetensors") else find_spec(name, path, target)


PathFinder.find_spec = without_numpy
gc.set_threshold(50_000)  # as tests/started has it
"""

PROGRAM = """
import os
import sys
import tempfile
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch warns once
    import torch
warnings.simplefilter("error")

import wholebatch as wb
from wholebatch import functional as F
from wholebatch.losses.catalog import CATALOG

x, y = torch.randn(2, 64, 8).unbind()
labels = torch.arange(64) // 4


def of_catalog(entry):
    entry.module(**entry.required_settings(8))
    return lambda a, b: entry.call(F, a, b, scale=10.0, bias=-10.0, labels=labels)


LOSSES = {
    **{entry.module.__name__: (of_catalog(entry), (x, y)) for entry in CATALOG.values()},
    "DistillationLoss": (wb.DistillationLoss(), (x, y, 10.0, y, x, 5.0)),
    "GlobalContrastiveLoss": (wb.GlobalContrastiveLoss(64), (x, y, torch.arange(64))),
    "MaxSimLoss": (wb.MaxSimLoss(), (x.view(16, 4, 8), y.view(16, 4, 8), 10.0)),
    "MoCoLoss": (lambda a, b: wb.MoCoLoss()(a, b, wb.KeyQueue(24, 8).keys, logit_scale=10.0), (x, y)),
    "PairLoss": (wb.PairLoss({"all": wb.terms.LogSumExp()}, lambda r, x, p: r.all), (x, y)),
    "WholeBatch": (wb.WholeBatch(lambda a, b: (a @ b.T).logsumexp(1).mean()), (x, y)),
}
MARGINS = (
    wb.ArcFace(), wb.CosFace(), wb.CombinedMargin(8.0, 1.0, 0.1, 0.1), wb.NormFace(), wb.SphereFace(), wb.AdaFace(),
    wb.MagFace(), wb.CurricularFace(),
)


def losses():
    missing = {name for name in wb.__all__ if name.endswith("Loss") or name == "WholeBatch"} - LOSSES.keys()
    assert not missing, missing
    for name, (loss, arguments) in LOSSES.items():
        given = [a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
        loss(*given).backward()
        assert given[0].grad.isfinite().all(), name


def classifier(folder, optimizer=wb.SparseSGD):
    for margin in MARGINS:
        head = wb.PartialFC(8, 20, margin=margin, sample_rate=0.5)
        one = optimizer(head.parameters())
        head(x, labels).backward()
        wb.heads.clip_grad_norm_([], head.parameters(), 1.0)
        one.step()
        target = folder / type(margin).__name__
        save = wb.heads.save_head(target, head, one)
        other = wb.PartialFC(8, 21, margin=margin, sample_rate=0.5, seed=1)
        wb.heads.load_head(target, other, optimizer(other.parameters()), classes=torch.arange(20), save_id=save)
        whole, again = head.full_weight(), other.full_weight()
        assert whole is None or torch.equal(whole, again[:20])
        other.top_classes(x, 3)
    written = folder / f"written by {os.getpid()}.pt"
    torch.save(torch.ones(20, 8), written)
    written.replace(folder / "rank_0_softmax_weight.pt")  # each rank writes it: no rank reads half a file
    wb.heads.load_insightface(folder, head)
    assert (head.weight == 1).all()


def on_ranks(folder):
    losses()
    classifier(Path(folder), wb.SparseAdamW)
    return wb.comm.TorchCommunicator().all_reduce(torch.ones(())).item()


def cached():
    encoder = torch.nn.Linear(8, 8)
    cache = wb.GradCache([encoder, encoder], 4, wb.NTXentLoss())
    cache(x, y)
    assert encoder.weight.grad.isfinite().all()


def problem():
    loss = wb.NTXentLoss()
    return wb.Problem(torch.nn.Linear(8, 4), torch.randn(12, 8), lambda model, z: loss(model(z), model(z.roll(1, 1))))


def main():
    assert "numpy" not in sys.modules
    losses()
    cached()
    print(wb.plan(batch_size=64, embedding_size=8, ranks=2))
    report = wb.audit(problem, ranks=(1, 2))
    assert report.exact, report
    with tempfile.TemporaryDirectory() as folder:
        classifier(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        assert wb.testing.run_ranks(on_ranks, 2, folder, timeout_s=120) == [2.0, 2.0]
    assert "numpy" not in sys.modules
    print("done")


if __name__ == "__main__":
    main()
"""


def run(program, tmp_path):
    """Run a program in a process where NumPy cannot be imported, and neither in the processes that it starts."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "program.py").write_text(program)
    source = str(Path(wb.__file__).parent.parent)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # it needs NumPy
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), source]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_the_public_api_without_numpy(tmp_path):
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")


def test_a_planted_import_of_numpy_is_detected(tmp_path):
    """The test above can fail."""
    program = "import warnings; warnings.simplefilter('ignore'); import torch; torch.ones(2).numpy()"
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert "Numpy is not available" in done.stderr

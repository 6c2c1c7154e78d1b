"""A step, a checkpoint and the memory of a classifier in Lightning: a replicated head in DDP, and a head of shards.

    .venv-ecosystem/bin/python benchmarks/integrations_lightning.py

Two processes on CPUs, SGD with momentum. The replicated head is a matrix of all centers in the LightningModule, with
dense logits of the local rows; DDP reduces its gradient. Times are medians of the steps after the first three. Memory
is the rise of the peak of a process since before the module is made. Results:
benchmarks/results/integrations_lightning.json.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch._measure import peak, reset_peak
from wholebatch.testing import run_ranks

CLASSES, WIDTH, ROWS, STEPS = 200_000, 128, 64, 13
FORMS = ("replicated in DDP", "PartialFC", "PartialFC, sample_rate=0.1")
MARGIN = wb.CosFace(32.0, 0.2)


def measure(port: int, form: str, folder: Path) -> dict[str, float]:
    """Train one form in this process; return seconds and megabytes."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    warnings.simplefilter("ignore")
    import lightning

    from wholebatch.integrations.lightning import ddp_strategy

    times: list[float] = []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(256, WIDTH)
            if form == FORMS[0]:
                self.weight = nn.Parameter(0.01 * torch.randn(CLASSES, WIDTH))
            else:
                rate = 0.1 if "rate" in form else 1.0
                self.head = wb.PartialFC(WIDTH, CLASSES, margin=MARGIN, sample_rate=rate)

        def training_step(self, batch, _index):
            times.append(time.perf_counter())
            x, y = self.backbone(batch[0]), batch[1]
            if form != FORMS[0]:
                return self.head(x, y)
            logits = nn.functional.normalize(x) @ nn.functional.normalize(self.weight).T
            logits = MARGIN.s * (logits - 0.2 * nn.functional.one_hot(y, CLASSES))
            return nn.functional.cross_entropy(logits, y)

        def configure_optimizers(self):
            one = torch.optim.SGD if form == FORMS[0] else wb.SparseSGD
            return one(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(int(rank))
    data = [(torch.randn(ROWS, 256), torch.randint(CLASSES, (ROWS,))) for _ in range(STEPS)]
    before = reset_peak()
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp" if form == FORMS[0] else ddp_strategy(), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    trained = peak()
    start = time.perf_counter()
    trainer.save_checkpoint(folder / f"{len(form)}.ckpt")
    saving = time.perf_counter() - start
    step = statistics.median([b - a for a, b in pairwise(times[3:])])
    size = (folder / f"{len(form)}.ckpt").stat().st_size / 2**20
    rises = {"training_mb": (trained - before) / 2**20, "saved_mb": (peak() - before) / 2**20}
    return {"step_s": step, "save_s": saving, "file_mb": size, **rises}


def main() -> None:
    """Measure all forms, and write the results."""
    found = {}
    for form in FORMS:
        with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
            found[form] = run_ranks(partial(measure, port, form, Path(folder)), 2, timeout_s=500)
        for rank, numbers in enumerate(found[form]):
            print(form, f"rank {rank}", {name: round(x, 3) for name, x in numbers.items()}, flush=True)
    result = {"classes": CLASSES, "width": WIDTH, "rows": ROWS, "torch": torch.__version__, "forms": found}
    path = Path(__file__).parent / "results" / "integrations_lightning.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs of open_clip's own trainer with tiny models and random images, for tests and for the picture of the docs.

Each epoch is one step on the whole data set, so a step's global batch does not depend on how processes divide and
shuffle it. Augmentation is off. Weights are those of the checkpoint, losses those of the log, which the trainer writes.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from dual import as_launched, free_port
from PIL import Image

from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.testing import run_ranks

TEXT = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
VISION = {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}
CLIP = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
COCA = {
    "embed_dim": 16,
    "vision_cfg": VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
    "text_cfg": TEXT | {"embed_cls": True, "output_tokens": True},
    "multimodal_cfg": TEXT | {"attn_pooler_heads": 2},
    "custom_text": True,
}
MODELS = {"tiny-vit": CLIP, "tiny-coca": COCA}
WORDS = ["sort", "find", "read", "write", "open", "close", "list", "file", "line", "word", "number", "sum"]


@dataclass
class Run:
    """A finished training: the logged loss of each step, and the weights at the end by their names."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    log: str


def make_data(folder, count, seed=0, times=1):
    """Write random images, captions of different lengths, and the table that open_clip reads, its rows repeated."""
    random = np.random.default_rng(seed)
    rows = []
    for k in range(count):
        path = folder / f"{k}.png"
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
        rows.append(f"{path}\t{' '.join(random.choice(WORDS, random.integers(1, 6)))}")
    (folder / "pairs.csv").write_text("\n".join(["filepath\ttitle", *rows * times]) + "\n")
    for name, config in MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))


def train(folder, ranks, pairs, *options, ours=False, steps=20, name="run", micro_steps=1):
    """Train for some steps on all pairs, by open_clip's trainer alone or with our losses."""
    argv = [
        "--train-data", str(folder / "pairs.csv"), "--dataset-type", "csv", "--model", "tiny-vit",
        "--batch-size", str(pairs // ranks // micro_steps), "--epochs", str(steps), "--workers", "0",
        "--precision", "fp32", "--device", "cpu", "--aug-cfg", "scale=(1.0,1.0)", "--warmup", "0", "--lr", "1e-3",
        "--lr-scheduler", "const", "--logs", str(folder / "logs"), "--name", name, "--save-frequency", "0",
        "--log-every-n-steps", "1", *options,
    ]  # fmt: skip
    run_ranks(train_rank, 2, ranks, free_port(), str(folder), argv, ours, timeout_s=300)
    log = (folder / "logs" / name / "out.log").read_text()
    saved = torch.load(folder / "logs" / name / "checkpoints" / f"epoch_{steps}.pt", weights_only=True)["state_dict"]
    return Run(
        [float(text) for text in re.findall(r" Loss: ([\d.e+-]+)", log)],
        {key.removeprefix("module."): value for key, value in saved.items()},
        log,
    )


def train_rank(ranks, port, folder, argv, ours):
    """Train in this process, the only one or one of two."""
    as_launched(port)
    rank = dist.get_rank()
    dist.destroy_process_group()  # open_clip makes its own
    if rank >= ranks:
        return  # a run of one process has a process of its own, too
    os.environ["WORLD_SIZE"] = str(ranks)
    declare_torchvision_operators()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import open_clip
    from open_clip_train import main as theirs

    for name in MODELS:
        open_clip.add_model_config(str(Path(folder) / f"{name}.json"))
    let_ddp_take_the_cpu()
    if ours:
        from wholebatch.integrations.open_clip import main

        assert main(argv) == 0
    else:
        assert theirs.main(argv) is None


def let_ddp_take_the_cpu():
    """Leave out `device_ids`, which open_clip passes on CPUs as well, where DDP refuses them."""
    ddp = torch.nn.parallel.DistributedDataParallel
    made = ddp.__init__

    def make(self, module, device_ids=None, **settings):
        made(self, module, **settings)

    ddp.__init__ = make

"""Train by open_clip's own trainer, on one process and on two, alone and with our losses; draw losses, compare weights.

    .venv-vision/bin/python benchmarks/integrations_open_clip.py          # some minutes on two cores

Each run is 20 steps of a tiny model on 32 random images with captions, the whole data set in each step, in float32 with
plain SGD. It prints a table of distances: how far the weights of two processes end from those of one process with
open_clip's loss of the whole batch, relative to the distance that the latter have moved. The picture's curves are the
losses that the trainer logs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]

import matplotlib  # noqa: E402
import torch  # noqa: E402
from open_clip_runs import Run, make_data, train  # noqa: E402

from wholebatch._base.third_party import declare_torchvision_operators  # noqa: E402
from wholebatch.bench.records import about  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_open_clip.json"
PICTURE = ROOT / "docs" / "images" / "open_clip_losses.png"
PAIRS, STEPS, CURVE_STEPS = 32, 20, 60
SGD = ["--opt", "timm/momentum", "--momentum", "0", "--wd", "0", "--lr", "1e-3"]
LOSSES: dict[str, list[str]] = {
    "CLIP": [],
    "SigLIP": ["--siglip"],
    "CoCa": ["--model", "tiny-coca", "--lr", "3e-4"],
    "distillation": ["--distill-model", "tiny-vit", "--distill-pretrained", "TEACHER"],
}
EXACT = ["--local-loss", "--gather-with-grad"]
ACCUMULATED = ["--accum-freq", "2"]
ROWS: list[tuple[str, list[str], bool]] = [  # a loss, options of the two processes, whether the loss is ours
    *((loss, options, ours) for loss in LOSSES for options, ours in (([], False), (EXACT, False), ([], True))),
    ("CLIP", ["--local-loss"], False),
    ("CLIP", [*EXACT, *ACCUMULATED], False),
    ("CLIP", ACCUMULATED, True),
    ("CLIP", ["--wholebatch-chunk-size", "5"], True),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, PAIRS)
        teacher = train(folder, 1, PAIRS, "--seed", "7", *SGD, steps=1, name="teacher")
        torch.save(teacher.weights, folder / "teacher.pt")
        distances_of_rows = distances(folder)
        curves = {
            "one process, the whole batch": run(folder, "CLIP", 1, steps=CURVE_STEPS),
            "two processes, wholebatch": run(folder, "CLIP", 2, ours=True, steps=CURVE_STEPS),
            "two processes, open_clip, default flags": run(folder, "CLIP", 2, steps=CURVE_STEPS),
            "two processes, open_clip, --local-loss": run(folder, "CLIP", 2, "--local-loss", steps=CURVE_STEPS),
        }
    found = {
        **about(),
        "open_clip": version(),
        "distances": distances_of_rows,
        "losses": {label: one.losses for label, one in curves.items()},
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    draw(found)


def run(folder: Path, loss: str, ranks: int, *options: str, **settings: Any) -> Run:
    given = [str(folder / "teacher.pt") if option == "TEACHER" else option for option in LOSSES[loss]]
    name = f"run-{len(list((folder / 'logs').glob('run-*')))}"
    return train(folder, ranks, PAIRS, *SGD, *given, *options, name=name, **{"steps": STEPS, **settings})


def distances(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each setting: how far it ends from one process, relative to the distance moved."""
    found = []
    true = {loss: flat(run(folder, loss, 1)) for loss in LOSSES}
    moved = {loss: (true[loss] - flat(run(folder, loss, 1, "--lr", "0", steps=1))).norm() for loss in LOSSES}
    for loss, options, ours in ROWS:
        micro_steps = 2 if "--accum-freq" in options else 1
        one = run(folder, loss, 2, *options, ours=ours, micro_steps=micro_steps)
        distance = ((flat(one) - true[loss]).norm() / moved[loss]).item()
        found.append({"loss": loss, "options": " ".join(options), "ours": ours, "distance": distance})
        print(
            f"| {loss} | {'wholebatch' if ours else 'open_clip'} | {' '.join(options)} | {distance:.1e} |", flush=True
        )
    return found


def flat(one: Run) -> torch.Tensor:
    return torch.cat([one.weights[name].double().flatten() for name in sorted(one.weights)])


def version() -> str:
    declare_torchvision_operators()
    import open_clip

    return str(open_clip.__version__)


def draw(found: dict[str, Any]) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.4))
    styles = [("black", "-", 4.5), ("tab:blue", "-", 1.8), ("tab:orange", "--", 1.6), ("tab:red", ":", 1.6)]
    for (label, losses), (color, line, width) in zip(found["losses"].items(), styles, strict=True):
        axis.plot(range(len(losses)), losses, color=color, linestyle=line, linewidth=width, label=label)
    axis.set_xlabel("step")
    axis.set_title("logged loss, open_clip's trainer, SGD", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    on = f"open_clip {found['open_clip']}, tiny ViT, 32 pairs, {found['machine']}, torch {found['torch']}"
    figure.text(0.99, 0.01, on, fontsize=7, ha="right", color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()

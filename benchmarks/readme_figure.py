"""Draw the README's picture from `results/losses.json`: time and memory of CLIP's loss beside open_clip's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "losses.json"
PICTURE = ROOT / "docs" / "images" / "clip_beside_open_clip.png"
BARS = {"wholebatch flat": "wholebatch", "wholebatch flat gather": "wholebatch", "open_clip ClipLoss": "open_clip"}
COLORS = {"wholebatch": "tab:blue", "open_clip": "tab:gray"}


def rows() -> list[dict[str, Any]]:
    """Return CLIP's measurements at the size that both libraries were measured at, in the order of the picture."""
    found = [
        row
        for row in json.loads(RESULTS.read_text())
        if row["loss"] == "clip" and row["method"] in BARS and (row["batch_size"], row["embedding_size"]) == (8192, 512)
    ]
    return sorted(found, key=lambda row: (row["ranks"], row["method"] == "open_clip ClipLoss"))


def main() -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    shown = rows()
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.3), sharey=True)
    panels = (
        ("time of a step, seconds", "step_ms", 1000, "{:.2f}"),
        ("memory beyond the inputs, MB", "transient_mb", 1, "{:.0f}"),
    )
    for axis, (title, field, unit, form) in zip(axes, panels, strict=True):
        values = [row[field] / unit for row in shown]
        bars = axis.barh(range(len(shown)), values, color=[COLORS[BARS[row["method"]]] for row in shown])
        axis.bar_label(bars, [form.format(value) for value in values], padding=3)
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.12)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    processes = {1: "1 process", 2: "2 processes"}
    axes[0].set_yticks(range(len(shown)), [f"{BARS[row['method']]}, {processes[row['ranks']]}" for row in shown])
    axes[0].invert_yaxis()
    on = {f"CLIP, B = 8192, d = 512, float32, {row['machine']}, torch {row['torch']}" for row in shown}
    figure.text(0.99, 0.02, "; ".join(sorted(on)), fontsize=7, ha="right", color="gray")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()

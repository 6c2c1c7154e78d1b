"""Draw the README's pictures: audits of other libraries, and CLIP's time and memory, from `results/*.json`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from findings import KINDS, LIBRARIES, kind_of
from findings import RESULTS as AUDITS
from findings import theirs as settings_of_theirs
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
Row = dict[str, Any]

COLORS = dict(zip(KINDS, ("tab:blue", "lightgray", "tab:red"), strict=True))
NAMES = {
    "pml": "pytorch-metric-learning",
    "flag_embedding": "FlagEmbedding",
    "ms_swift": "ms-swift",
    "grad_cache": "GradCache",
    "tevatron": "Tevatron",
    "colpali": "colpali-engine",
    "pylate": "PyLate",
    "sentence_transformers": "sentence-transformers",
    "lightning": "Lightning",
}


def audits() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the kinds of each library's settings, and those of the same steps with adapters of ours."""
    theirs: dict[str, list[str]] = {}
    ours: dict[str, list[str]] = {}
    rows = [row for row in json.loads(AUDITS.read_text()) if row["preset"] in LIBRARIES]
    others = settings_of_theirs(rows)
    for row in rows:
        adapter = row not in others
        if not adapter or "wholebatch." not in row["setting"] or "wholebatch.integrations" in row["setting"]:
            (ours if adapter else theirs).setdefault(row["preset"], []).append(kind_of(row))
    order = sorted(theirs, key=lambda name: -len(theirs[name]))
    return {name: sorted(theirs[name], key=KINDS.index) for name in order}, ours


def draw_audits() -> None:
    theirs, ours = audits()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, gridspec_kw={"width_ratios": [12, 7]})
    for axis, columns in zip(axes, (theirs, ours), strict=True):
        for height, name in enumerate(theirs):
            for place, kind in enumerate(columns.get(name, [])):
                axis.add_patch(plt.Rectangle((place, height - 0.38), 0.82, 0.76, color=COLORS[kind]))
        axis.set_xlim(0, 12 if columns is theirs else 7)
        axis.set_ylim(len(theirs) - 0.4, -0.6)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    counts = Counter(kind for kinds in theirs.values() for kind in kinds)
    settings = sum(counts.values())
    axes[0].set_title(f"{settings} settings of {len(theirs)} libraries", fontsize=10, loc="left")
    axes[1].set_title(f"with our adapters: {sum(map(len, ours.values()))}", fontsize=10, loc="left")
    axes[0].set_yticks(range(len(theirs)), [NAMES.get(name, name) for name in theirs], fontsize=9)
    marks = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    labels = [f"{kind}: {counts[kind]}" for kind in KINDS]
    figure.legend(
        marks,
        labels,
        title="The gradient on several processes is ...",
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0.01, 0.0),
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        alignment="left",
        handlelength=1,
        handleheight=1,
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(IMAGES / "audits.png", dpi=150)
    print(dict(counts), {name: Counter(kinds) for name, kinds in ours.items()})


ON_CPU = {
    ("wholebatch flat", 1): "wholebatch",
    ("open_clip ClipLoss", 1): "open_clip",
    ("wholebatch flat gather", 2): "wholebatch, 2 processes",
    ("open_clip ClipLoss", 2): "open_clip, 2 processes",
}
ON_H100 = {
    "wholebatch": "wholebatch, by default",
    "memeff": "memeff",
    "open_clip": "open_clip",
    "dense, compiled": "dense, torch.compile",
}


def measured() -> list[tuple[str, list[tuple[str, Row]]]]:
    """Return the title and the rows of each machine."""
    cpu = {
        (row["method"], row["ranks"]): row
        for row in json.loads((RESULTS / "losses.json").read_text())
        if row["loss"] == "clip" and (row["batch_size"], row["embedding_size"]) == (8192, 512)
    }
    card = {
        row["method"]: row
        for row in json.loads((RESULTS / "h100_28e8e03.json").read_text())
        if row["batch_size"] == 32768
    }
    on_cpu = [(label, cpu[key]) for key, label in ON_CPU.items()]
    on_card = [(label, card[key]) for key, label in ON_H100.items()]
    about, h100 = on_cpu[0][1], on_card[0][1]
    return [
        (f"CPU ({about['machine']}), 8,192 pairs, float32, commit {about['commit']}", on_cpu),
        (f"one H100, 32,768 pairs, bfloat16, commit {h100['commit']}: before the kernels were rewritten", on_card),
    ]


def draw_clip() -> None:
    figure, axes = plt.subplots(2, 2, figsize=(9, 4.2), sharey="row")
    panels = (
        ("time of a step", "step_ms", lambda ms: f"{ms / 1000:.2f} s" if ms > 1000 else f"{ms:.1f} ms"),
        ("memory beyond the inputs", "transient_mb", lambda mb: f"{mb:,.0f} MB"),
    )
    for line, rows in zip(axes, (rows for _, rows in measured()), strict=True):
        for axis, (what, field, shown) in zip(line, panels, strict=True):
            values = [row[field] for _, row in rows]
            colors = ["tab:blue" if label.startswith("wholebatch") else "tab:gray" for label, _ in rows]
            bars = axis.barh(range(len(rows)), values, color=colors, height=0.7)
            axis.bar_label(bars, [shown(value) for value in values], padding=3, fontsize=9)
            axis.set_title(what, fontsize=9, loc="left", color="gray")
            axis.margins(x=0.16)
            axis.set_xticks([])
            axis.tick_params(length=0)
            axis.spines[["top", "right", "bottom"]].set_visible(False)
        line[0].set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=9)
        line[0].invert_yaxis()
    figure.tight_layout(rect=(0, 0, 1, 0.95), h_pad=3)
    for line, (title, _) in zip(axes, measured(), strict=True):
        figure.text(0.01, line[0].get_position().y1 + 0.075, title, fontsize=10)
    figure.savefig(IMAGES / "clip_beside_open_clip.png", dpi=150)


if __name__ == "__main__":
    draw_audits()
    draw_clip()

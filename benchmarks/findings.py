"""Write docs/findings.md from results/audit.json: what the settings of other libraries give on several processes.

`benchmarks/audit_peers.py`, which measures them, calls it. Alone: .venv/bin/python benchmarks/findings.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wholebatch.auditing import causes, presets
from wholebatch.auditing.causes import Cause

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "audit.json"
PAGE = ROOT / "docs" / "findings.md"
KINDS = ("that of the global batch", "another one, as documented", "another one, or an error")
GROUPS = dict(zip(KINDS, ("exact", "documented", "different"), strict=True))  # the words of the tables
# Settings with another gradient as documented, by preset: which ones, where the library says so, and what it says.
DOCUMENTED = {
    "sentence_transformers": {
        r".*RankingLoss, default": (
            "the losses' docstrings, `gather_across_devices`",
            "False by default; True gathers the embeddings of all devices before the loss is computed",
        ),
    },
    "pylate": {
        r"Contrastive, default|CachedContrastive, size_average=False": (
            "the losses' docstrings, `gather_across_devices`",
            "False by default; True gathers embeddings across devices for more negatives in the batch",
        ),
    },
    "ms_swift": {
        r"infonce, INFONCE_USE_BATCH=False, .*": (
            "ms-swift's page Embedding Training, `INFONCE_USE_BATCH`",
            "True by default, for negatives from other samples of the batch; otherwise those of the sample are used",
        ),
    },
    "flag_embedding": {
        r"default: negatives of local rows": (
            "`FlagEmbedding/abc/finetune/embedder/`: `AbsModeling.py`, `AbsArguments.py`, `negatives_cross_device`",
            "False by default; True computes the loss with the negatives of all devices",
        ),
    },
    "lightly": {
        r"(NTXent|DCL|DCLW)Loss, default": (
            "`lightly/loss/`: `ntx_ent_loss.py`, `dcl_loss.py`, `gather_distributed`",
            "False by default; True gathers the negatives of all GPUs before the loss is computed",
        ),
        r"(BarlowTwins|VICReg)Loss, default": (
            "`lightly/loss/`: `barlow_twins_loss.py`, `vicreg_loss.py`, `gather_distributed`",
            "False by default; True gathers and adds the cross-correlation matrices of all GPUs",
        ),
    },
    "pml": {
        r"\w+ alone": (
            "pytorch-metric-learning's page Distributed, `DistributedLossWrapper`",
            "a loss is to be wrapped under DistributedDataParallel; the page promises nothing for a loss alone",
        ),
        r"DistributedLossWrapper\(\w+, efficient=True\)": (
            "pytorch-metric-learning's page Distributed, `efficient`",
            "gradients differ from those of code that is not distributed",
        ),
    },
}
# Settings in which something of the library was changed: by preset, which ones, and what.
CHANGED = {
    "sentence_transformers": (
        r"(Cached)?MultiVector.*",
        "`wb.reference.max_sim` computes the scores, because their `colbert_scores` rounds to float32",
    ),
    "colpali": (
        r"(?!the same, with gloo, untouched).*",
        "the gradient of gathered documents is made contiguous, because torch's all-gather on gloo scrambles others",
    ),
}
# Causes that the audit's figures do not tell apart, known from the libraries' sources.
AFTER_BACKWARD = "the mean over a process's rows is taken after the backward pass, which multiplies by their number"
KNOWN_CAUSES = {
    ("pylate", "CachedContrastive, default"): f"[not-gathered](#causes); {AFTER_BACKWARD}",
    ("pylate", "CachedContrastive, gather_across_devices=True"): f"[everything-times-w](#causes); {AFTER_BACKWARD}",
    ("colpali", "the same, with gloo, untouched"): "torch's all-gather on gloo scrambles a gradient that is not "
    "contiguous; by torch's source NCCL's is not affected, which was not run",
}
LIBRARIES = {  # presets, in the page's order: the adapter's page if there is one, and words that people search for
    "open_clip": ("open_clip.md", "`--local-loss`, `--gather-with-grad`, `--accum-freq`"),
    "sentence_transformers": ("sentence_transformers.md", "`gather_across_devices`"),
    "pylate": ("late_interaction.md", "`gather_across_devices`"),
    "colpali": ("late_interaction.md#the-same-loss-by-the-function", "`ContrastiveTrainer`"),
    "transformers": ("transformers.md", "`Trainer`, `compute_loss_func`"),
    "ms_swift": ("ms_swift.md", "`--loss_type infonce`"),
    "flag_embedding": ("flag_embedding.md", "`--negatives_cross_device`"),
    "tevatron": ("tevatron.md", "`--grad_cache`"),
    "grad_cache": ("grad_cache.md", "`DistributedContrastiveLoss`"),
    "lightly": ("lightly.md", "`gather_distributed`"),
    "pml": ("pytorch_metric_learning.md", "`DistributedLossWrapper`, `efficient`"),
    "lightning": ("lightning.md", '`strategy="ddp"`'),
    "insightface": ("insightface.md", "`PartialFC_V2`, against one process with the same straight-through margins"),
}
WRITTEN_OUT = {  # presets of losses that are not run as installed
    "nvidia": (
        None,
        "`do_distributed_inbatch_negative`, `detach_distributed_inbatch_negatives`, `pretrain_ict.py`; not among the "
        "numbers above. Negatives of other ranks are detached by default in NeMo Automodel",
    ),
}
HEAD = """# What other libraries' contrastive losses give on several processes

```sh
wholebatch audit --preset open_clip     # or another library that you have installed
wholebatch audit my_project.py:problem  # a loss or a training step of yours
```

{count} settings of {libraries} libraries, each on 1, 2 and 3 processes with DistributedDataParallel in float64, against
one process with the whole batch: **{exact} give its gradient, {documented} another one as their documentation says, and
{wrong} another one or an error**.

* **exact**: after the averaging over processes, the gradient is that of one process on the whole batch, up to rounding.
* **1/W**, **x W**: too small or too large by the number of processes W. Adam hides a constant factor, except where
  gradients are clipped, a decay is added to them, or the loss has other terms.
* **wrong direction**: no factor repairs it. The cosine is that with the right gradient, the lowest over parameters and
  splits.
* **-**: there is no such parameter, or no gradient to compare.

The group of a setting is **exact**; **documented**, if the gradient is another one and the library's documentation says
what is left out, or names the option or the wrapper that adds it (in our words below the table); or **different**.

Presets are {presets}.

Libraries are run in the named version, with small encoders and batches; where one has a training loop, the step is its
own. They are run as installed, except in rows with an asterisk: there the audit replaces sentence-transformers' scorer
by one in float64, and makes a gradient of colpali-engine contiguous, as said below the tables. The page does not cover
GPUs, half precision, FSDP and DeepSpeed, or what training makes of a wrong gradient. [How the audit works](audit.md);
[why each recipe is right or wrong, and the settings with our losses](audit_libraries.md).
"""
TAIL = """
(torch {torch}, {machine}; `benchmarks/audit_peers.py`, `benchmarks/results/audit.json`. This page:
`benchmarks/findings.py`.)
"""


def kind_of(row: dict[str, Any]) -> str:
    """Return which of the kinds of gradients a setting has."""
    right, documented, wrong = KINDS
    if row["exact"]:
        return right
    return documented if source(row) else wrong


def source(row: dict[str, Any]) -> tuple[str, str] | None:
    """Return where a library documents that a setting has another gradient, and what it says there."""
    of_library = DOCUMENTED.get(row["preset"], {})
    return next((text for settings, text in of_library.items() if re.fullmatch(settings, row["setting"])), None)


def change(row: dict[str, Any]) -> str:
    """Return what of the library was changed in a setting, or an empty string."""
    settings, text = CHANGED.get(row["preset"], ("", ""))
    return text if settings and re.fullmatch(settings, row["setting"]) else ""


def section(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a library's part of the page."""
    page, words = (LIBRARIES | WRITTEN_OUT)[name]
    link = f" With our losses: [what to change](integrations/{page})." if page else ""
    if name == "colpali":
        link = f" With our losses: there is no adapter; call [the function](integrations/{page}) in a trainer of yours."
    lines = [f"## {rows[0]['library']}", "", f"{words}.{link}", ""]
    lines += ["| setting | group | encoders | learned scale | cause |", "|---|---|---|---|---|"]
    for row in rows:
        setting = row["setting"] + (" *" if change(row) else "")
        cells = (setting, GROUPS[kind_of(row)], row["encoders"], row["scalars"], cause(row))
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"\\* {text}." for text in dict.fromkeys(map(change, rows)) if text]
    documented = dict.fromkeys(text for row in rows if kind_of(row) == KINDS[1] and (text := source(row)))
    notes += [f"Documented ({place}): {says}." for place, says in documented]
    return "\n".join([*lines, "", *(f"{note}\n" for note in notes)])


def cause(row: dict[str, Any]) -> str:
    """Return the causes of a setting, with links."""
    names = row["causes"].split(", ")
    linked = ", ".join(f"[{name}](#causes)" for name in names if name)
    return KNOWN_CAUSES.get((row["preset"], row["setting"]), linked)


def cause_list(names: set[str]) -> str:
    """Return what the causes mean, and how to correct each."""
    known = [x for x in vars(causes).values() if isinstance(x, Cause) and x.name in names]
    return "\n".join(["## Causes", "", *(f"* `{x.name}`: {x.title}. Fix: {x.fix}." for x in known)])


def theirs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings without a loss of this library; "the same" goes on with the one before."""
    kept, ours = [], False
    for row in rows:
        ours = (
            row["preset"] == "wholebatch"
            or "wholebatch" in row["setting"]
            or (ours and row["setting"].startswith("the same"))
        )
        kept += [] if ours else [row]
    return kept


def page() -> str:
    """Return the page."""
    results = json.loads(RESULTS.read_text())
    found = {name: theirs([*rows]) for name, rows in groupby(results, lambda row: row["preset"])}
    found = {name: found[name] for name in LIBRARIES | WRITTEN_OUT if found.get(name)}
    measured = [row for name, rows in found.items() for row in rows if name in LIBRARIES]
    exact, documented, wrong = (sum(kind_of(row) == kind for row in measured) for kind in KINDS)
    head = HEAD.format(
        presets=", ".join(name for name, packages in presets.PACKAGES.items() if packages or name in WRITTEN_OUT),
        count=len(measured),
        libraries=len({row["preset"] for row in measured}),
        exact=exact,
        documented=documented,
        wrong=wrong,
    )
    names = {name for rows in found.values() for row in rows for name in re.findall(r"\[([\w-]+)\]", cause(row))}
    tail = TAIL.format(torch=results[0]["torch"], machine=results[0]["machine"])
    return "\n".join([head, *(section(name, rows) for name, rows in found.items()), cause_list(names), tail])


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write docs/findings.md from results/audit.json: what the settings of other libraries give on several processes.

`benchmarks/audit_peers.py`, which measures them, calls it. Alone: .venv/bin/python benchmarks/findings.py
"""

from __future__ import annotations

import json
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
# Settings whose documentation says that rows meet fewer rows than those of the global batch, or that gradients differ,
# beside those with the cause "not-gathered".
DOCUMENTED = {
    "DCLWLoss, default",
    "infonce, INFONCE_USE_BATCH=False, against the whole batch",
}
LIBRARIES = {  # presets, in the page's order: the adapter's page if there is one, and words that people search for
    "open_clip": ("open_clip.md", "`--local-loss`, `--gather-with-grad`, `--accum-freq`"),
    "sentence_transformers": ("sentence_transformers.md", "`gather_across_devices`"),
    "pylate": ("late_interaction.md", "`gather_across_devices`"),
    "colpali": ("late_interaction.md", "`ContrastiveTrainer`"),
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
        "numbers above. Negatives of other ranks are detached by default, as NeMo Automodel's documentation says",
    ),
}
HEAD = """# What other libraries' contrastive losses give on several processes

    wholebatch audit --preset open_clip     # or another library that you have installed
    wholebatch audit my_project.py:problem  # a loss or a training step of yours

{count} settings of {libraries} libraries, each on 1, 2 and 3 processes with DistributedDataParallel in float64, against
one process with the whole batch: **{exact} give its gradient, {documented} another one as their documentation says, and
{wrong} another one or an error**.

* **exact**: after the averaging over processes, the gradient is that of one process on the whole batch, up to rounding.
* **1/W**, **x W**: too small or too large by the number of processes W. Adam hides a constant factor, except where
  gradients are clipped, a decay is added to them, or the loss has other terms.
* **wrong direction**: no factor repairs it. The cosine is that with the right gradient, the lowest over parameters and
  splits.
* **-**: there is no such parameter, or no gradient to compare.

Presets are {presets}.

Libraries are run as installed, in the named version, with small encoders and batches; where one has a training loop,
the step is its own. The page does not cover GPUs, half precision, FSDP and DeepSpeed, or what training makes of a wrong
gradient. [How the audit works](audit.md);
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
    setting = row["setting"]
    return (
        documented if row["causes"] == "not-gathered" or setting in DOCUMENTED or "efficient=True" in setting else wrong
    )


def section(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a library's part of the page."""
    page, words = (LIBRARIES | WRITTEN_OUT)[name]
    link = f" With our losses: [what to change](integrations/{page})." if page else ""
    lines = [f"## {rows[0]['library']}", "", f"{words}.{link}", ""]
    lines += ["| setting | encoders | learned scale | cause |", "|---|---|---|---|"]
    cells = [(row["setting"], row["encoders"], row["scalars"], _links(row["causes"])) for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])


def _links(names: str) -> str:
    return ", ".join(f"[{name}](#causes)" for name in names.split(", ") if name)


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
    names = {name for rows in found.values() for row in rows for name in row["causes"].split(", ")}
    tail = TAIL.format(torch=results[0]["torch"], machine=results[0]["machine"])
    return "\n".join([head, *(section(name, rows) for name, rows in found.items()), cause_list(names), tail])


if __name__ == "__main__":
    PAGE.write_text(page())

"""Compare value and gradient with each peer that has the same loss, in float64 on one process.

Run in the environment that `make peers` makes. Prints a table in Markdown, and writes it to results/.

    PYTHONPATH=src .venv-peers/bin/python benchmarks/same_as_peers.py
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators
from wholebatch.bench.records import about

RESULTS = Path(__file__).parent / "results" / "same_as_peers.json"
Loss = Callable[..., Tensor]
B, D, SCALE = 48, 16, 12.0


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def rows(n: int, d: int = D) -> Tensor:
        return normalize(torch.randn(n, d, dtype=torch.float64, generator=generator), dim=1)

    x = rows(B)
    return {
        "x": x,
        "y": normalize(x + 0.4 * rows(B), dim=1),
        "n": rows(B),
        "gx": rows(B),
        "gy": rows(B),
        "gn": rows(B),
        "labels": torch.arange(B) // 4,
    }


def from_open_clip() -> Iterator[tuple[str, str, Loss, Loss, str]]:
    from open_clip.loss import ClipLoss, DistillClipLoss, SigLipLoss

    scale, bias = torch.tensor(SCALE, dtype=torch.float64), torch.tensor(-5.0, dtype=torch.float64)
    yield (
        "clip_loss",
        "ClipLoss",
        lambda t: wb.functional.clip_loss(t["x"], t["y"], scale),
        lambda t: ClipLoss()(t["x"], t["y"], scale),
        "",
    )
    yield (
        "siglip_loss",
        "SigLipLoss",
        lambda t: wb.functional.siglip_loss(t["x"], t["y"], scale, bias),
        lambda t: SigLipLoss()(t["x"], t["y"], scale, bias),
        "",
    )
    yield (
        "distillation_loss",
        "DistillClipLoss, distill_loss",
        lambda t: wb.functional.distillation_loss(t["x"], t["y"], scale, t["gx"], t["gy"], 8.0),
        lambda t: DistillClipLoss()(t["x"], t["y"], scale, t["gx"], t["gy"], 8.0)[1],
        "",
    )


def from_lightly() -> Iterator[tuple[str, str, Loss, Loss, str]]:
    from lightly.loss import BarlowTwinsLoss, DCLLoss, DCLWLoss, NTXentLoss, VICRegLoss
    from lightly.loss.wmse_loss import WMSELoss

    f = wb.functional
    pairs: list[tuple[str, str, Loss, Any, str]] = [
        ("nt_xent_loss", "NTXentLoss", lambda t: f.nt_xent_loss(t["x"], t["y"], temperature=0.1), NTXentLoss(0.1), ""),
        ("dcl_loss", "DCLLoss", lambda t: f.dcl_loss(t["x"], t["y"], temperature=0.1), DCLLoss(0.1), ""),
        (
            "dcl_loss, sigma",
            "DCLWLoss",
            lambda t: f.dcl_loss(t["x"], t["y"], temperature=0.1, sigma=0.5),
            DCLWLoss(0.1, 0.5),
            "",
        ),
        (
            "barlow_twins_loss",
            "BarlowTwinsLoss",
            lambda t: f.barlow_twins_loss(t["x"], t["y"]),
            BarlowTwinsLoss(),
            "",
        ),
        ("vicreg_loss", "VICRegLoss", lambda t: f.vicreg_loss(t["x"], t["y"]), VICRegLoss(), ""),
    ]
    for ours, name, loss, theirs, note in pairs:
        yield ours, name, loss, lambda t, theirs=theirs: theirs(t["x"], t["y"]), note
    whitening = WMSELoss(embedding_dim=D, w_size=B, track_running_stats=False).double()
    yield (
        "w_mse_loss",
        "WMSELoss, w_size=B",
        lambda t: f.w_mse_loss(t["x"], t["y"]),
        lambda t: whitening(torch.cat([t["x"], t["y"]])),
        "theirs whitens random parts of w_size rows; ours the batch",
    )
    bank = NTXentLoss(0.1, memory_bank_size=(64, D)).double()
    bank.memory_bank.bank = normalize(torch.randn(64, D, dtype=torch.float64), dim=1)
    queue = bank.memory_bank.bank.clone()
    yield (
        "moco_loss",
        "NTXentLoss, memory_bank_size",
        lambda t: f.moco_loss(*(normalize(t[name], dim=1) for name in "xy"), queue, logit_scale=10.0),
        lambda t: bank(t["x"], t["y"]),
        "",
    )


def from_metric_learning() -> Iterator[tuple[str, str, Loss, Loss, str]]:
    from pytorch_metric_learning import losses, miners, reducers

    f = wb.functional

    def batch_hard(t: dict[str, Tensor], *, smooth: bool = False) -> Tensor:
        found = miners.BatchHardMiner()(t["x"], t["labels"])
        loss = losses.TripletMarginLoss(margin=0.2, smooth_loss=smooth, reducer=reducers.MeanReducer())
        return loss(t["x"], t["labels"], found)

    def mined(t: dict[str, Tensor]) -> Tensor:
        found = miners.MultiSimilarityMiner(epsilon=0.1)(t["x"], t["labels"])
        return losses.MultiSimilarityLoss()(t["x"], t["labels"], found)

    yield (
        "sup_con_loss",
        "SupConLoss",
        lambda t: f.sup_con_loss(t["x"], t["labels"]),
        lambda t: losses.SupConLoss(0.1)(t["x"], t["labels"]),
        "",
    )
    yield (
        "nt_xent_loss",
        "NTXentLoss, two of each label",
        lambda t: f.nt_xent_loss(t["x"], t["y"], temperature=0.1),
        lambda t: losses.NTXentLoss(0.1)(torch.cat([t["x"], t["y"]]), torch.arange(B).repeat(2)),
        "",
    )
    yield (
        "multi_similarity_loss",
        "MultiSimilarityLoss",
        lambda t: f.multi_similarity_loss(t["x"], t["labels"]),
        lambda t: losses.MultiSimilarityLoss()(t["x"], t["labels"]),
        "",
    )
    yield (
        "multi_similarity_loss, epsilon",
        "MultiSimilarityLoss, MultiSimilarityMiner",
        lambda t: f.multi_similarity_loss(t["x"], t["labels"], epsilon=0.1),
        mined,
        "",
    )
    yield (
        "circle_loss",
        "CircleLoss",
        lambda t: f.circle_loss(t["x"], t["labels"]),
        lambda t: losses.CircleLoss()(t["x"], t["labels"]),
        "",
    )
    yield (
        "triplet_loss",
        "TripletMarginLoss, BatchHardMiner, MeanReducer",
        lambda t: f.triplet_loss(t["x"], t["labels"]),
        batch_hard,
        "theirs averages over the triplets that violate the margin unless told otherwise (AvgNonZeroReducer)",
    )
    yield (
        "triplet_loss, smooth",
        "the same, smooth_loss=True",
        lambda t: f.triplet_loss(t["x"], t["labels"], smooth=True),
        lambda t: batch_hard(t, smooth=True),
        "",
    )

    def square(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return six classes of six rows; for other numbers the peer takes rows of different classes for one class."""
        return t["x"][:36], torch.arange(36) // 6

    yield (
        "smooth_ap_loss",
        "SmoothAPLoss",
        lambda t: f.smooth_ap_loss(*square(t)),
        lambda t: losses.SmoothAPLoss()(*square(t)),
        "differs: theirs counts each query among its own results, always first; the paper and ours leave it out. "
        "And it is right only for as many classes as each has rows",
    )
    yield (
        "smooth_ap_loss, with that query",
        "SmoothAPLoss",
        lambda t: _with_itself(*square(t)),
        lambda t: losses.SmoothAPLoss()(*square(t)),
        "the explanation of the line before, tried",
    )


def _with_itself(x: Tensor, labels: Tensor) -> Tensor:
    """Return Smooth-AP where each query is its own first result."""
    x = normalize(x, dim=1)
    cosines, same = x @ x.T, labels[:, None] == labels
    larger = ((cosines[:, None, :] - cosines[:, :, None]) / 0.01).sigmoid() * ~torch.eye(len(x), dtype=torch.bool)
    precision = (1 + (larger * same[:, None]).sum(2)) / (1 + larger.sum(2))
    return 1 - ((precision * same).sum(1) / same.sum(1)).mean()


def from_sentence_transformers() -> Iterator[tuple[str, str, Loss, Loss, str]]:
    from sentence_transformers.sentence_transformer.losses import gist_embed
    from sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking import (
        MultipleNegativesRankingLoss as Ranking,
    )

    ours = {"query": "query", "doc": "key"}
    every = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")

    def renamed(direction: str) -> str:
        first, second = direction.split("_to_")
        return f"{ours[first]}_to_{ours[second]}"

    def theirs(names: str, **options: Any) -> Loss:
        return lambda t: Ranking(torch.nn.Identity(), scale=SCALE, **options).compute_loss_from_embeddings(
            [t[name] for name in names], None
        )

    def mine(*more: str, **options: Any) -> Loss:
        """Return InfoNCE of normalized rows, to match the peer's cosines."""

        def loss(t: dict[str, Tensor]) -> Tensor:
            x, y = (normalize(t[name], dim=1) for name in "xy")
            return wb.functional.info_nce_loss(
                x, y, logit_scale=SCALE, **{name: t[name[0]] for name in more}, **options
            )

        return loss

    yield "info_nce_loss", "MultipleNegativesRankingLoss", mine(), theirs("xy"), ""
    yield (
        "info_nce_loss, negatives",
        "the same, three columns",
        mine("negatives"),
        theirs("xyn"),
        "",
    )
    for partition, directions in (("joint", every), ("per_direction", ("query_to_doc", "doc_to_query"))):
        yield (
            f"info_nce_loss, {len(directions)} directions, {partition}",
            f"the same, directions, partition_mode={partition!r}",
            mine(directions=tuple(map(renamed, directions)), partition=partition),
            theirs("xy", directions=directions, partition_mode=partition),
            "" if partition == "joint" else "theirs refuses query_to_query and doc_to_doc here",
        )
    yield (
        "info_nce_loss, hardness",
        "the same, hardness_mode='all_negatives'",
        mine(hardness=5.0),
        theirs("xy", hardness_mode="all_negatives", hardness_strength=5.0),
        "",
    )
    yield (
        "info_nce_loss, key_to_key, negatives",
        "the same, doc_to_doc, three columns",
        mine("negatives", directions=("query_to_key", "key_to_key")),
        theirs("xyn", directions=("query_to_doc", "doc_to_doc")),
        "differs: theirs leaves out d_i against the i-th negative; ours does not know whose a pooled negative is",
    )
    for strategy, relative in (("absolute", False), ("relative", True)):

        def gist(t: dict[str, Tensor], strategy: str = strategy) -> Tensor:
            loss = gist_embed.GISTEmbedLoss.__new__(gist_embed.GISTEmbedLoss)
            torch.nn.Module.__init__(loss)
            columns = iter([[t["x"], t["y"]], [t["gx"], t["gy"]]])
            embed, gist_embed.embed_columns = gist_embed.embed_columns, lambda *_: next(columns)
            loss.model = loss.guide = loss.tokenizer = None
            loss.temperature, loss.margin, loss.margin_strategy = 1 / SCALE, 0.1, strategy
            loss.must_retokenize = loss.gather_across_devices = False
            loss.contrast_anchors = loss.contrast_positives = True
            loss.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
            loss.cross_entropy_loss = torch.nn.CrossEntropyLoss()
            try:
                value: Tensor = loss([{}, {}], torch.empty(0))
            finally:
                gist_embed.embed_columns = embed
            return value

        yield (
            f"info_nce_loss, guides{', relative' if relative else ''}",
            f"GISTEmbedLoss, margin_strategy={strategy!r}",
            lambda t, relative=relative: mine(
                directions=("query_to_key", "query_to_query", "key_to_key"),
                exclude_above=-0.1,
                exclude_relative=relative,
                query_guides=t["gx"],
                key_guides=t["gy"],
            )(t),
            gist,
            "",
        )
    yield (
        "matryoshka_loss, symmetric=False",
        "MatryoshkaLoss of MultipleNegativesRankingLoss",
        lambda t: wb.functional.matryoshka_loss(
            t["x"], t["y"], logit_scale=SCALE, dims=(4, 8, 16), dim_weights=(1.0, 2.0, 1.0), symmetric=False
        ),
        lambda t: sum(
            weight * theirs("xy")({name: t[name][:, :m] for name in "xy"})
            for m, weight in ((4, 1.0), (8, 2.0), (16, 1.0))
        ),
        "theirs truncated here by hand, as it does inside its model",
    )


def compared(ours: Loss, theirs: Loss) -> tuple[float, float]:
    """Return the relative difference of the values, and the largest one of the gradients by x and y."""
    found = []
    for loss in (ours, theirs):
        tensors = inputs()
        leaves = [tensors[name].requires_grad_() for name in ("x", "y")]
        value = loss(tensors)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        found.append((value.item(), [torch.zeros(B, D) if g is None else g for g in gradients]))
    (value, gradients), (other, others) = found
    largest = max(g.abs().max().item() for g in others)
    differences = [(a - b).abs().max().item() for a, b in zip(gradients, others, strict=True)]
    return abs(value - other) / abs(other), max(differences) / largest


def main() -> None:
    warnings.simplefilter("ignore")
    declare_torchvision_operators()
    packages = {
        "open_clip_torch": from_open_clip,
        "lightly": from_lightly,
        "pytorch-metric-learning": from_metric_learning,
        "sentence-transformers": from_sentence_transformers,
    }
    rows = []
    print("| ours | peer | value differs by | gradient differs by | |\n|---|---|---|---|---|")
    for package, losses in packages.items():
        for ours, name, loss, theirs, note in losses():
            value, gradient = compared(loss, theirs)
            rows.append(
                {"ours": ours, "package": package, "peer": name, "value": value, "gradient": gradient, "note": note}
            )
            print(f"| `{ours}` | {package.removesuffix('_torch')} {name} | {value:.0e} | {gradient:.0e} | {note} |")
            if max(value, gradient) > 1e-6 and "differ" not in note:
                raise SystemExit(f"{ours} and {name} differ, without a known reason")
    versions = {package: version(package) for package in (*packages, "torch")}
    RESULTS.write_text(json.dumps({"versions": versions, **about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

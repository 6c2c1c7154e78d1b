"""Late interaction: time of a step against the floor of its products and against other libraries, and its memory.

    .venv/bin/python benchmarks/late_interaction.py time
    .venv/bin/python benchmarks/late_interaction.py time --ragged
    .venv/bin/python benchmarks/late_interaction.py memory --documents 256 512 1024
    .venv/bin/python benchmarks/late_interaction.py cached
    PYTHON benchmarks/late_interaction.py time --peers    # with PyLate, colpali-engine, late-interaction-kernels

256 queries of 32 tokens against 256 documents of 180, d = 128, float32. All losses are first compared on a small batch,
values and gradients. For the time they take turns in one process with one thread; a ratio is the median over rounds of
a loss's seconds by those of its floor: the products of all query tokens with all document tokens in parts of the size
that the loss takes, once forward, and once more backward where winners are not kept. The memory is the rise of a
process's peak beyond inputs and new gradients, each in a process of its own. `cached` makes a step of 512 queries and
512 documents through an encoder with gradient caching. Results go to results/late_interaction.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import wholebatch as wb  # noqa: E402
from wholebatch import _measure  # noqa: E402
from wholebatch._base.third_party import declare_torchvision_operators  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "late_interaction.json"
QUERIES, QUERY_TOKENS, DOCUMENTS, DOCUMENT_TOKENS, WIDTH = 256, 32, 256, 180, 128
KEEPING = 2**24  # bytes, enough for all winners
Loss = Callable[[Tensor, Tensor], Tensor]


def texts(count: int, tokens: int, seed: int) -> Tensor:
    """Return token embeddings of length 1, with a gradient."""
    made = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, tokens, WIDTH, generator=made), dim=-1).requires_grad_()


def losses(*, peers: bool) -> dict[str, Loss]:
    """Return losses with the scale 1, by name."""
    found: dict[str, Loss] = {
        "wholebatch": lambda q, d: wb.functional.max_sim_loss(q, d, logit_scale=1.0, memory="flat"),
        "wholebatch, winners kept": lambda q, d: wb.functional.max_sim_loss(q, d, logit_scale=1.0, memory=KEEPING),
        "dense formula": lambda q, d: wb.reference.max_sim_loss(q, d, logit_scale=1.0),
    }
    if peers:
        declare_torchvision_operators()
        from colpali_engine.loss import ColbertLoss
        from late_interaction_kernels import MaxSimScorer
        from pylate.scores import colbert_scores

        theirs = ColbertLoss(temperature=1.0, normalize_scores=False)
        scorer = MaxSimScorer(normalize=False)
        found[f"PyLate {version('pylate')}, plain"] = lambda q, d: _ranked(colbert_scores(q, d, backend="torch"))
        found[f"colpali-engine {version('colpali-engine')}, plain"] = theirs
        name = f"late-interaction-kernels {version('late-interaction-kernels')}, on a CPU"
        found[name] = lambda q, d: _ranked(scorer(q, d))
    return found


def _ranked(scores: Tensor) -> Tensor:
    return cross_entropy(scores, torch.arange(len(scores)))


def check(loss: Loss, name: str) -> None:
    """Raise AssertionError unless value and gradients are those of the reference in float64, on a small batch."""
    q, d = texts(12, 5, 0), texts(12, 9, 1)
    wide = [x.detach().double().requires_grad_() for x in (q, d)]
    value = wb.reference.max_sim_loss(*wide, logit_scale=1.0)
    expected = torch.autograd.grad(value, wide)
    found = loss(q, d)
    assert torch.allclose(found.double(), value, rtol=1e-5), name
    for grad, right in zip(torch.autograd.grad(found, [q, d]), expected, strict=True):
        assert torch.allclose(grad.double(), right, rtol=1e-3, atol=1e-6), name


def floor(q: Tensor, d: Tensor) -> float:
    """Return the seconds of the products of all tokens, once."""
    q, d = q.detach().view(-1, WIDTH), d.detach().view(-1, WIDTH)
    rows, cols = 1024, 360
    out = torch.empty(rows * cols)
    start = time.perf_counter()
    for i in range(0, len(q), rows):
        for j in range(0, len(d), cols):
            left, right = q[i : i + rows], d[j : j + cols]
            torch.mm(left, right.T, out=out[: len(left) * len(right)].view(len(left), len(right)))
    return time.perf_counter() - start


def step(loss: Loss, q: Tensor, d: Tensor) -> tuple[float, float]:
    """Return the seconds of a forward pass, and of a whole step."""
    q.grad = d.grad = None
    start = time.perf_counter()
    value = loss(q, d)
    forward = time.perf_counter() - start
    value.backward()
    return forward, time.perf_counter() - start


def times(rounds: int, *, peers: bool) -> list[dict[str, object]]:
    """Return the seconds of each loss, and their ratios to the floor."""
    methods = losses(peers=peers)
    for name, loss in methods.items():
        check(loss, name)
    q, d = texts(QUERIES, QUERY_TOKENS, 0), texts(DOCUMENTS, DOCUMENT_TOKENS, 1)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    floors = []
    for number in range(rounds + 1):  # the first is a warm-up
        unit = floor(q, d)
        for name, loss in methods.items():
            taken = step(loss, q, d)
            if number:
                seconds[name].append(taken)
        if number:
            floors.append((unit + floor(q, d)) / 2)
    return [
        {
            "what": "time",
            "method": name,
            "documents": DOCUMENTS,
            "seconds": median(of_step for _, of_step in of),
            "forward_units": median(a / unit for (a, _), unit in zip(of, floors, strict=True)),
            "units": median(b / unit for (_, b), unit in zip(of, floors, strict=True)),
            "floor": 1 if "kept" in name else 2,
            "ratio": median(b / unit for (_, b), unit in zip(of, floors, strict=True)) / (1 if "kept" in name else 2),
        }
        for name, of in seconds.items()
    ]


def ragged_times(rounds: int) -> list[dict[str, object]]:
    """Return ratios to the floor where documents have 1 to 40 tokens, packed: 1,024 of them."""
    made = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (1024,), generator=made)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    d = texts(int(offsets[-1]), 1, 1).detach()[:, 0].requires_grad_()
    q = texts(QUERIES, QUERY_TOKENS, 0)
    ratios, seconds = [], []

    def loss(q: Tensor, d: Tensor) -> Tensor:
        owners = torch.full((QUERIES,), 4)
        return wb.functional.max_sim_loss(
            q, d, logit_scale=1.0, document_offsets=offsets, documents_per_query=owners, memory="flat"
        )

    for number in range(rounds + 1):
        unit, taken = floor(q, d), step(loss, q, d)[1]
        if number:
            ratios.append(taken / unit / 2)
            seconds.append(taken)
    return [
        {
            "what": "ragged",
            "method": "wholebatch",
            "documents": 1024,
            "seconds": median(seconds),
            "ratio": median(ratios),
        }
    ]


def memory(method: str, documents: int) -> float:
    """Return the megabytes by which a step raises the peak beyond inputs and new gradients, in this process."""
    loss = losses(peers="wholebatch" not in method and "dense" not in method)[method]
    check(loss, method)
    _measure.map_each_tensor()
    q, d = texts(QUERIES, QUERY_TOKENS, 0), texts(documents, DOCUMENT_TOKENS, 1)
    before = _measure.reset_peak()
    loss(q, d).backward()
    gradients = sum(x.grad.nbytes for x in (q, d) if x.grad is not None)
    return (_measure.peak() - before - gradients) / 2**20


class Encoder(nn.Module):
    """Token embeddings with context, of length 1, beside their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, tokens, d), and the mask."""
        x = self.layer(self.embed(ids), src_key_padding_mask=~attention_mask)
        return normalize(x, dim=-1), attention_mask


def sentences(count: int, longest: int, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    mask = torch.arange(longest) < torch.randint(longest // 4, longest + 1, (count, 1), generator=made)
    return {"ids": torch.randint(0, 5000, (count, longest), generator=made), "attention_mask": mask}


def cached(rows: int) -> dict[str, object]:
    """Return seconds and memory of a step with gradient caching."""
    torch.manual_seed(0)
    encoder = Encoder()

    def loss(queries: tuple[Tensor, Tensor], documents: tuple[Tensor, Tensor]) -> Tensor:
        (q, q_mask), (d, d_mask) = queries, documents
        return wb.functional.max_sim_loss(q, d, logit_scale=1.0, query_mask=q_mask, document_mask=d_mask)

    grad_cache = wb.GradCache([encoder, encoder], wb.gradcache.TokenBudget(2048), loss)
    grad_cache(sentences(16, 32, 0), sentences(16, 180, 1))
    encoder.zero_grad()
    _measure.map_each_tensor()
    inputs = sentences(rows, 32, 0), sentences(rows, 180, 1)
    before, start = _measure.reset_peak(), time.perf_counter()
    value = grad_cache(*inputs)
    seconds = time.perf_counter() - start
    held = (_measure.peak() - before) / 2**20
    tokens = [int(of["attention_mask"].sum()) for of in inputs]
    scores = 4 * rows * rows * 32 * 180 / 2**20
    return {
        "what": "cached", "method": "GradCache", "documents": rows, "loss": value.item(), "seconds": seconds,
        "megabytes": held, "tokens": tokens, "megabytes_of_all_scores": scores,
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "cached", "one"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="other libraries as well, where they are installed")
    parser.add_argument("--ragged", action="store_true", help="documents of 1 to 40 tokens instead")
    parser.add_argument("--documents", type=int, nargs="+", default=[DOCUMENTS])
    parser.add_argument("--rows", type=int, default=512, help="of `cached`")
    parser.add_argument("--method", default="wholebatch")
    options = parser.parse_args()
    if options.what == "one":  # of `memory`, in a process of its own
        torch.set_num_threads(1)
        print(memory(options.method, options.documents[0]))
        return
    if options.what == "cached":
        torch.set_num_threads(2)
        found = [cached(options.rows)]
    elif options.what == "time":
        torch.set_num_threads(1)
        found = ragged_times(options.rounds) if options.ragged else times(options.rounds, peers=options.peers)
    else:
        found = []
        for documents in options.documents:
            for method in losses(peers=options.peers):
                if documents > DOCUMENTS and "wholebatch" not in method:
                    continue
                command = [sys.executable, __file__, "one", "--method", method, "--documents", str(documents)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(
                    {"what": "memory", "method": method, "documents": documents, "megabytes": float(done.stdout)}
                )
    for row in found:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    keep(RESULTS, found, ("what", "method", "documents"))


if __name__ == "__main__":
    main()

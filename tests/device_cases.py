"""Calls of every public entry point, for tests that put their tensors on another device: a new one is a new row.

A case is a function of `moved`, which moves arguments and modules, and `context`, in which the library computes:
everything else stands outside. It returns results by name.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernel_losses import losses as losses_of_kernels
from loss_cases import EVERY, IDS, WEIGHTS, gradients, options_of, rows_of, whole_batch
from pair_losses import DECLARATIONS, Batch, batch_for, cut, part
from pair_losses import gradients as gradients_of_batch
from partial_fc_data import MARGINS, D
from partial_fc_data import data as data_of_head

import wholebatch as wb

sys.path.insert(0, str(Path(__file__).parent / "faults"))

from case import ENTRIES, _copied
from good_calls import World

Case = Callable[..., dict[str, Any]]
COUNTS = {1: [(5,)], 2: [(3, 2), (0, 5)]}  # rows of each rank
MESSAGES = ("comm.send", "comm.recv", "comm.isend", "comm.irecv")  # there is nobody else on one rank
SCALE = torch.tensor(7.0, dtype=torch.float64)


def cases(size: int, rank: int, folder: str, *, on_card: bool) -> dict[str, Case]:
    """Return all cases of one rank, by name; tensors of `card.py` have no data pointer and no sparse layout."""
    found: dict[str, Case] = {}
    for counts in COUNTS[size]:
        world = World("0", rank, size, wb.comm.LocalCommunicator() if size == 1 else None, folder, counts)
        found |= {
            f"{name}, {counts}": partial(_entry, make, world)
            for name, make in ENTRIES.items()
            if size > 1 or name not in MESSAGES
        }
    counts = COUNTS[size][0]
    at = cut(counts, rank)
    for name, case in EVERY.items():
        inputs = [z[of] for z, of in zip(whole_batch(case, counts), rows_of(case, counts, rank), strict=True)]
        single = [z.float() if z.is_floating_point() else z for z in inputs]
        found[name] = partial(_loss, case, wb.functional, inputs)
        if IDS in case.inputs or WEIGHTS in case.inputs:
            found[f"{name}, of the CPU"] = partial(_loss, case, wb.functional, inputs, stay=(IDS, WEIGHTS))
        if size == 1:
            found[f"{name}, float32 in small tiles"] = partial(_loss, case, wb.functional, single, memory=700)
            found[f"{name}, dense"] = partial(_loss, case, wb.reference, inputs)
    batches = {
        f"declared {name}": (make, batch_for(name, sum(counts), sum(counts))) for name, make in DECLARATIONS.items()
    }
    for name, (make, whole) in batches.items():
        batch = part(whole, at, at)
        found[name] = partial(_declared, make, batch)
        if size == 1:
            found[f"{name}, small tiles"] = partial(_declared, partial(make, memory=700, exchange="ring"), batch)
        if size == 1:
            found[f"{name}, dense"] = partial(_declared, lambda make=make: make().reference, batch)
    found |= {
        f"head with {name}": partial(_head, margin, at, None if on_card else 0.6) for name, margin in MARGINS.items()
    }
    found |= {name: partial(more, at) for name, more in MORE.items()}
    if size == 1:
        found["lengths, dense"] = partial(_lengths, at, functions=wb.reference)
    if size == 1 and not on_card and find_spec("triton") is not None:
        x, y = (torch.nn.functional.normalize(torch.randn(40, 24), dim=1) for _ in range(2))
        ids = torch.arange(40) % 30
        found |= {f"{name}, kernels": partial(_kernels, name, x, y, ids) for name in losses_of_kernels(x, y, ids)[0]}
    return found


def _entry(make: Any, world: World, moved: Any, context: Any) -> dict[str, Any]:
    good = make(world)
    arguments = moved(_copied(good.arguments[world.rank]))
    if "root" in arguments:
        arguments["root"] = 0
    made = moved(good.construct(arguments))
    if world.size > 1:
        dist.barrier()  # what one rank has constructed may be in a file
    with context():
        return good.call(made, arguments, True)


def _loss(
    case: Any, functions: Any, inputs: Any, moved: Any, context: Any, stay: Any = (), **options: Any
) -> dict[str, Any]:
    """Compute a loss; inputs of these kinds and the scale stay on the CPU, where they may be."""
    inputs = [z if of in stay else moved(z) for of, z in zip(case.inputs, inputs, strict=True)]
    scale = SCALE if stay else moved(SCALE)
    with context():
        return dict(enumerate(gradients(case, functions, inputs, scale, **options_of(case, **options))))


def _declared(make: Any, batch: Batch, moved: Any, context: Any) -> dict[str, Any]:
    loss, given = make(), Batch(**moved(vars(batch)))
    with context():
        value, found = gradients_of_batch(loss, given)
    return {"value": value, **found}


def _kernels(name: str, x: Any, y: Any, ids: Any, moved: Any, context: Any) -> dict[str, Any]:
    x, y, ids = moved([x.clone().requires_grad_(), y.clone().requires_grad_(), ids])
    call = losses_of_kernels(x, y, ids)[0][name]
    with context():
        call(wb.functional, {"kernel": "triton"}).backward()
    return {name: z.grad for name, z in (("x", x), ("y", y)) if z.grad is not None}


def _head(margin: Any, at: slice, sample_rate: float | None, moved: Any, context: Any) -> dict[str, Any]:
    """Make two steps of training, of all classes or of samples."""
    x, labels, _ = data_of_head(9)
    settings = {"margin": copy.deepcopy(margin), "dtype": torch.float64, "bias": True, "seed": 3}
    head = moved(wb.PartialFC(D, 11, **settings, sample_rate=sample_rate or 1.0))
    x, labels = moved([x[at].requires_grad_(), labels[at]])
    optimizer = wb.SparseAdamW(head.parameters(), lr=0.1)
    with context():
        for _ in range(2):
            head(x, labels).backward()
            optimizer.step()
    return {"x": x.grad, "centers": head.weight.detach()}


def _statistics_of_losses(at: slice, moved: Any, context: Any) -> dict[str, Any]:
    x, y = moved([torch.nn.functional.normalize(z[at], dim=1) for z in torch.linspace(-3, 5, 72).sin().view(2, 9, 4)])
    declared = DECLARATIONS["clip"]()
    with context():
        value, statistics = wb.with_statistics(wb.functional.clip_loss)(x, y, 5.0)
        of_terms = wb.with_statistics(declared)(x, y, parameters={"scale": 5.0})
    return {"value": value, **statistics._asdict(), "terms": of_terms.loss}


def _lengths(at: slice, moved: Any, context: Any, functions: Any = wb.functional) -> dict[str, Any]:
    """Compute late interaction of packed texts, whose lengths are tensors as well."""
    queries, documents = (
        torch.linspace(-3, 5, 6 * n, dtype=torch.float64).sin().view(n, 6)[: n // 9 * (at.stop - at.start)]
        for n in (18, 54)
    )
    count = at.stop - at.start
    lengths = {
        "query_offsets": 2 * torch.arange(count + 1),
        "document_offsets": 3 * torch.arange(2 * count + 1),
        "documents_per_query": torch.full((count,), 2),
        "query_ids": torch.arange(count) // 2,
    }
    queries, documents, lengths = moved([queries.requires_grad_(), documents.requires_grad_(), lengths])
    options = {"share_hard_negatives": False, "token_reduction": "mean", "equal_ids": "positive"}
    with context():
        loss = functions.max_sim_loss(queries, documents, logit_scale=3.0, **lengths, **options)
        loss.backward()
    return {"value": loss, "queries": queries.grad, "documents": documents.grad}


def _parameters_of_the_cpu(at: slice, moved: Any, context: Any) -> dict[str, Any]:
    """A declared loss takes parameters and data wherever they are, and their gradients arrive there."""
    batch = part(batch_for("weighted_mean", 5, 5), at, at)
    batch.x, batch.y = moved([batch.x, batch.y])
    with context():
        value, found = gradients_of_batch(DECLARATIONS["weighted_mean"](), batch)
    return {"value": value, **found}


def _learned_scale(at: slice, moved: Any, context: Any) -> dict[str, Any]:
    x, y = moved([torch.nn.functional.normalize(z[at], dim=1) for z in torch.linspace(-3, 5, 72).sin().view(2, 9, 4)])
    scale = moved(wb.Scale(10.0))
    with context():
        wb.functional.clip_loss(x, y, scale()).backward()
    return {"scale": scale.log_scale.grad}


MORE = {
    "statistics of losses": _statistics_of_losses,
    "lengths": _lengths,
    "parameters of the CPU": _parameters_of_the_cpu,
    "a learned scale": _learned_scale,
}

"""A loss, PartialFC, gradient caching and collectives on W ranks, against the dense float64 reference.

A case has two halves: each rank calls the library and returns what it got, and one process computes the same densely
for all ranks and returns relative errors, which it compares with the case's bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.comm import Communicator, select_communicator
from wholebatch.partition import Partition

from .device import DEVICE, GPU, Row, relative
from .precision import ALLOWED

SIZE, CLASSES, SCALE, BIAS = 32, 101, 20.0, -5.0
Part = dict[str, Tensor]  # what one rank returns
# Relative errors of gradients, by the dtype of features: 10 times the rounding of one number, for sums of some hundred.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Case:
    """A case on ranks with `counts` rows.

    Args:
        name: in the results.
        part: a rank's half.
        errors: the half that compares.
        counts: rows of each rank.
        options: arguments of both halves.
        bound: the largest relative error that is allowed.
    """

    name: str
    part: Callable[..., Part]
    errors: Callable[..., Row]
    counts: tuple[int, ...]
    options: dict[str, Any]
    bound: float

    def run_rank(self) -> Part:
        """Return this rank's half."""
        return self.part(self.counts, **self.options)

    def row(self, parts: Sequence[Part]) -> Row:
        """Return the errors, and "error" where one is larger than the bound."""
        found = self.errors(parts, self.counts, **self.options)
        row: Row = {"case": self.name, "ranks": len(parts), "rows": list(self.counts)}
        row |= {name: str(value).removeprefix("torch.") for name, value in self.options.items()} | found
        wrong = {name: value for name, value in found.items() if not value <= self.bound}
        return row | ({"error": f"{' and '.join(wrong)} above {self.bound:g}"} if wrong else {})


def towers(counts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the features of all ranks: pairs that are similar, as after a part of a training."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (
        F.normalize(torch.randn(sum(counts), SIZE, dtype=torch.float64, generator=generator), dim=1) for _ in range(2)
    )
    return x.to(dtype), F.normalize(0.4 * x + 0.6 * noise, dim=1).to(dtype)


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip": lambda of, x, y, **more: of.clip_loss(x, y, SCALE, **more),
    "siglip": lambda of, x, y, **more: of.siglip_loss(x, y, SCALE, BIAS, **more),
    "info_nce": lambda of, x, y, **more: of.info_nce_loss(x, y, logit_scale=SCALE, **more),
    "nt_xent": lambda of, x, y, **more: of.nt_xent_loss(x, y, temperature=1 / SCALE, **more),
}


def loss_part(counts: tuple[int, ...], *, loss: str, dtype: torch.dtype, memory: str) -> Part:
    """Return the loss and the gradients of this rank's rows."""
    rank = select_communicator(None).rank
    x, y = (z.split(counts)[rank].to(DEVICE).requires_grad_() for z in towers(counts, dtype))
    value = _LOSSES[loss](wb.functional, x, y, sync="sum", memory=memory)
    value.backward()
    assert x.grad is not None
    assert y.grad is not None
    return {"loss": value.detach(), "x": x.grad, "y": y.grad}


def loss_errors(parts: Sequence[Part], counts: tuple[int, ...], *, loss: str, dtype: torch.dtype, memory: str) -> Row:
    """Return the largest errors of a loss and of its gradients."""
    x, y = (z.to(DEVICE).double().requires_grad_() for z in towers(counts, dtype))
    true = _LOSSES[loss](wb.reference, x, y)
    grads = torch.autograd.grad(true, (x, y))
    found = [torch.cat([part[name] for part in parts]) for name in ("x", "y")]
    return {
        "error_of_loss": max(relative(part["loss"], true.detach()) for part in parts),
        "error_of_gradient": max(map(relative, found, grads)),
    }


def partial_fc_part(counts: tuple[int, ...], *, dtype: torch.dtype, precision: str, sample_rate: float) -> Part:
    """Return the loss, the embeddings' gradient, and the centers with their gradient, of this rank."""
    comm = select_communicator(None)
    head = wb.PartialFC(
        SIZE, CLASSES, margin=wb.ArcFace(SCALE, 0.3), sample_rate=sample_rate, precision=precision, dtype=dtype,
        device=DEVICE, sync="sum",
    )  # fmt: skip
    x = towers(counts, dtype)[0].split(counts)[comm.rank].to(DEVICE).requires_grad_()
    value = head(x, _labels(counts).split(counts)[comm.rank].to(DEVICE))
    value.backward()
    grad = head.weight.grad
    assert x.grad is not None
    assert grad is not None
    rows = grad.coalesce().indices()[0] if grad.is_sparse else torch.arange(len(grad), device=DEVICE)
    return {
        "loss": value.detach(), "x": x.grad, "centers": head.weight.detach(), "of_centers": grad.to_dense(),
        "classes": head.local_classes.start + rows,
    }  # fmt: skip


def partial_fc_errors(
    parts: Sequence[Part], counts: tuple[int, ...], *, dtype: torch.dtype, precision: str, sample_rate: float
) -> Row:
    """Return the errors of the loss over the classes that took part, and of its gradients."""
    together = {name: torch.cat([part[name] for part in parts]) for name in ("x", "centers", "of_centers", "classes")}
    x, centers = (z.double().requires_grad_() for z in (towers(counts, dtype)[0], together["centers"].cpu()))
    classes = together["classes"].cpu()
    true = wb.reference.partial_fc_loss(
        x, _labels(counts), centers[classes], margin=wb.ArcFace(SCALE, 0.3), class_ids=classes
    )
    of_x, of_centers = torch.autograd.grad(true, (x, centers))
    return {
        "error_of_loss": max(relative(part["loss"], true.detach()) for part in parts),
        "error_of_gradient": relative(together["x"], of_x),
        "error_of_centers": relative(together["of_centers"], of_centers),
    }


def _labels(counts: tuple[int, ...]) -> Tensor:
    return torch.randint(CLASSES, (sum(counts),), generator=torch.Generator().manual_seed(1))


def caching_part(counts: tuple[int, ...], *, precision: str, autocast: bool) -> Part:
    """Return the loss and the parameters' gradients of a step of gradient caching, in one process."""
    tower = _tower().float().to(DEVICE)
    loss = wb.CLIPLoss(precision=precision)  # type: ignore[arg-type]  # its name, from the table of cases
    cached = wb.GradCache([tower, tower], 16, lambda a, b: loss(F.normalize(a, dim=1), F.normalize(b, dim=1), SCALE))
    x, y = (z.to(DEVICE) for z in towers(counts, torch.float32))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        value = cached(x, y)
    return {"loss": value.detach(), "parameters": _flat_gradient(tower)}


def caching_errors(parts: Sequence[Part], counts: tuple[int, ...], *, precision: str, autocast: bool) -> Row:
    """Return the errors of gradient caching against a plain step in float64."""
    tower = _tower()
    x, y = (F.normalize(tower(z.double()), dim=1) for z in towers(counts, torch.float32))
    true = wb.reference.clip_loss(x, y, SCALE)
    true.backward()
    return {
        "error_of_loss": relative(parts[0]["loss"], true.detach()),
        "error_of_gradient": relative(parts[0]["parameters"], _flat_gradient(tower)),
    }


def _tower() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    layers = [torch.nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / math.sqrt(SIZE)
    return copy.deepcopy(torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]))


def _flat_gradient(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def _whole(counts: Sequence[int]) -> list[slice]:
    return [Partition(tuple(counts)).rows(rank) for rank in range(len(counts))]


# Each collective, the rows of its input on a rank, and its results on all ranks by plain PyTorch.
_COLLECTIVES: dict[
    str,
    tuple[
        Callable[[Communicator, Tensor, tuple[int, ...]], Tensor],
        Callable[[tuple[int, ...], int], int],
        Callable[[list[Tensor], tuple[int, ...]], list[Tensor]],
    ],
] = {
    "all_gather": (
        lambda comm, x, counts: comm.all_gather(x, counts=counts),
        lambda counts, rank: counts[rank],
        lambda xs, counts: [torch.cat(xs)] * len(xs),
    ),
    "reduce_scatter": (
        lambda comm, x, counts: comm.reduce_scatter(x, counts=counts),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.stack(xs).sum(0)[rows] for rows in _whole(counts)],
    ),
    "all_reduce": (
        lambda comm, x, counts: comm.all_reduce(x),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.stack(xs).sum(0)] * len(xs),
    ),
    "broadcast": (
        lambda comm, x, counts: comm.broadcast(x, comm.size - 1),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [xs[-1]] * len(xs),
    ),
    "all_to_all": (  # each rank sends counts[q] rows to rank q
        lambda comm, x, counts: comm.all_to_all(x, send_counts=counts),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.cat([x[rows] for x in xs]) for rows in _whole(counts)],
    ),
}


def collective_part(counts: tuple[int, ...], *, operation: str, dtype: torch.dtype) -> Part:
    """Return a collective's input, its result, a random cotangent, and the gradient that comes of it, on this rank."""
    comm = select_communicator(None)
    call, rows, _ = _COLLECTIVES[operation]
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(rows(counts, comm.rank), 3, dtype=torch.float64, generator=generator).to(DEVICE, dtype)
    x.requires_grad_()
    out = call(comm, x, counts)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out)
    comm.backward(out, cotangent)
    assert x.grad is not None
    return {"x": x.detach(), "out": out.detach(), "cotangent": cotangent, "grad": x.grad}


def collective_errors(parts: Sequence[Part], counts: tuple[int, ...], *, operation: str, dtype: torch.dtype) -> Row:
    """Return the errors of a collective and of its adjoint: the gradient of the sum of all <result, cotangent>."""
    xs = [part["x"].double().cpu().requires_grad_() for part in parts]
    outs = _COLLECTIVES[operation][2](xs, counts)
    total = sum((out * part["cotangent"].double().cpu()).sum() for out, part in zip(outs, parts, strict=True))
    grads = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    return {
        "error_of_value": relative(torch.cat([part["out"] for part in parts]), torch.cat(outs).detach()),
        "error_of_gradient": relative(torch.cat([part["grad"] for part in parts]), torch.cat(grads)),
    }


def cases_of_communication(*counts: int) -> list[Case]:
    """Return the cases of collectives: values and adjoints."""
    return [
        Case("collective", collective_part, collective_errors, counts, {"operation": name, "dtype": dtype}, bound)
        for name in _COLLECTIVES
        for dtype, bound in ROUNDING.items()
    ]


def cases_of_losses(*counts: int) -> list[Case]:
    """Return the cases of losses: in each dtype, by the default sweep and by one that keeps nothing."""
    return [
        Case("loss", loss_part, loss_errors, counts, {"loss": name, "dtype": dtype, "memory": memory}, bound)
        for name in _LOSSES
        for dtype, bound in ROUNDING.items()
        for memory in ("auto", "flat")
    ]


def cases_of_tiles() -> list[Case]:
    """Return the cases of losses on one rank with more rows than a tile has."""
    return [
        Case(
            "several tiles", loss_part, loss_errors, (9000 if GPU else 1100,),
            {"loss": name, "dtype": torch.float32, "memory": "flat"}, ROUNDING[torch.float32],
        )
        for name in _LOSSES
    ]  # fmt: skip


def cases_of_partial_fc(*counts: int) -> list[Case]:
    """Return the cases of PartialFC: float64, and float32 in each precision; all classes, and a sample."""
    settings = [(torch.float64, "auto", ROUNDING[torch.float64]), *((torch.float32, *of) for of in ALLOWED.items())]
    return [
        Case(
            "PartialFC", partial_fc_part, partial_fc_errors, counts,
            {"dtype": dtype, "precision": precision, "sample_rate": rate}, bound,
        )
        for dtype, precision, bound in settings
        for rate in (1.0, 0.3)
    ]  # fmt: skip


def cases_of_caching(rows: int) -> list[Case]:
    """Return the cases of gradient caching: in each precision of the loss, and under autocast."""
    settings = [(precision, False, bound) for precision, bound in ALLOWED.items()] + [
        ("auto", True, ALLOWED["bfloat16"])
    ]
    return [
        Case(
            "GradCache", caching_part, caching_errors, (rows,), {"precision": precision, "autocast": autocast}, bound
        )
        for precision, autocast, bound in settings
    ]  # fmt: skip

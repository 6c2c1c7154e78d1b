"""A right call of a declared loss: one matrix with classes, and terms over rows of the same and of other classes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from good_calls import Arguments, D, Good, Results, World, entry, gradients_of, with_gradients
from torch import Tensor

import wholebatch as wb
from wholebatch.partition import Partition

SETTINGS = ("group", "sync", "exchange", "memory", "reduction", "precision", "similarity", "symmetric", "compile_tiles")
DIFFERENTIABLE = ("x", "weights")


def _score(s: Tensor, x: Any, y: Any, p: Any) -> Tensor:
    return p.scale * s


def _same(x: Any, y: Any) -> Tensor:
    return (x.label == y.label) & (x.index != y.index)


def _different(x: Any, y: Any) -> Tensor:
    return x.label != y.label


def _row_loss(r: Any, x: Any, p: Any) -> Tensor:
    return r.same + torch.where(r.other.isinf(), 0.0, r.other)


def declared(**options: Any) -> wb.PairLoss:
    """Return the loss."""
    terms = {"same": wb.terms.Mean(_score, where=_same), "other": wb.terms.LogSumExp(_score, where=_different)}
    return wb.PairLoss(terms, _row_loss, **options)


@entry("PairLoss")
def _pair_loss(world: World) -> Good:
    rng, rows = world.choices, sum(world.rows)
    sync = rng.choice(["mean", "sum", None])
    whole = {"x": world.normal("x", rows, D), "labels": world.integers("labels", 3, rows)}
    if rng.random() < 0.5:
        whole["weights"] = world.normal("weights", rows).abs() + 0.1
    common: Arguments = {"group": world.group, "sync": sync, "parameters": {"scale": 0.7}}
    common |= {"exchange": rng.choice(["gather", "ring"]), "symmetric": rng.random() < 0.5}
    arguments = []
    for rank in range(world.size):
        part = {k: x[Partition(world.rows).rows(rank)] for k, x in whole.items()}
        arguments.append({**common, **part, "x_data": {"label": part.pop("labels")}})
        del arguments[-1]["labels"]
    forward = inspect.signature(wb.PairLoss.forward).parameters
    parameters = {k: p for k, p in forward.items() if k != "self"}
    parameters |= {k: p for k, p in inspect.signature(wb.PairLoss).parameters.items() if k in SETTINGS}

    def construct(given: Arguments) -> Any:
        return declared(**{k: v for k, v in given.items() if k in SETTINGS})

    def call(made: Any, given: Arguments, backward: bool) -> Results:
        given = with_gradients({k: v for k, v in given.items() if k not in SETTINGS}, DIFFERENTIABLE)
        loss = made(**given).sum()
        if loss.requires_grad and backward:
            loss.backward()
        return {"value": loss.detach(), **gradients_of(given, DIFFERENTIABLE)}

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        counts = [len(of["x"]) for of in of_ranks]
        given: Arguments = {
            k: torch.cat([of[k].detach().double() for of in of_ranks]) for k in DIFFERENTIABLE if k in of_ranks[0]
        }
        given = with_gradients(given, DIFFERENTIABLE)
        labels = torch.cat([of["x_data"]["label"] for of in of_ranks])
        settings = of_ranks[settings_of]
        loss_fn = declared(**{k: settings[k] for k in ("reduction", "similarity") if k in settings})
        loss = loss_fn.reference(**given, x_data={"label": labels}, parameters=settings["parameters"]).sum()
        loss.backward()
        factor = world.size if sync == "mean" else 1
        gradients = gradients_of(given, DIFFERENTIABLE)
        return [
            {
                "value": loss.detach(),
                **{k: factor * x[Partition(tuple(counts)).rows(rank)] for k, x in gradients.items()},
            }
            for rank in range(world.size)
        ]

    return Good(arguments, parameters, call, expected, construct, settings=frozenset(SETTINGS), has_backward=True)

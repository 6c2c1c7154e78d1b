"""Right calls of the losses, from their signatures: a new loss is covered, or its unknown argument is reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from good_calls import ENTRIES, Arguments, D, Good, Results, World, entry, gradients_of, with_gradients
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.partition import Partition

CLASSES = 11


@dataclass(frozen=True)
class Rows:
    """An argument with rows on each rank."""

    make: Callable[[World, str, int], Tensor]
    counts: Callable[[World], tuple[int, ...]] = lambda world: world.rows
    differentiable: bool = True
    sharded: bool = False  # parameters that are local to each rank: their gradient is dL/dx under every `sync`


def _features(world: World, name: str, rows: int) -> Tensor:
    return normalize(world.normal(name, rows, D), dim=1)


def _ids(world: World, name: str, rows: int) -> Tensor:
    return world.integers(name, 3, rows)


def _other_counts(world: World) -> tuple[int, ...]:
    return tuple((3 * rank + 1) % 4 for rank in range(world.size))


def _of_classes(world: World) -> tuple[int, ...]:
    return Partition.even(CLASSES, world.size).counts


FEATURES = Rows(_features)
IDS = Rows(_ids, differentiable=False)
ROWS = {
    **dict.fromkeys(("image_features", "text_features", "queries", "keys", "z0", "z1", "features"), FEATURES),
    "embeddings": FEATURES,
    **dict.fromkeys(("teacher_image_features", "teacher_text_features"), Rows(_features, differentiable=False)),
    **dict.fromkeys(("labels", "ids", "query_ids", "key_ids"), IDS),
    "negatives": Rows(_features, counts=_other_counts),
    "hard_negatives": Rows(lambda w, name, n: normalize(w.normal(name, n, 2, D), dim=2)),
    "weights": Rows(lambda w, name, n: w.normal(name, n).abs() + 0.1),
    "image_log_averages": Rows(lambda w, name, n: w.normal(name, n), differentiable=False),
    "text_log_averages": Rows(lambda w, name, n: w.normal(name, n), differentiable=False),
    "centers": Rows(_features, counts=_of_classes, sharded=True),
}
TOKENS = Rows(lambda w, name, n: normalize(w.normal(name, n, 3, D), dim=2))
ROWS_OF = {"max_sim_loss": {"queries": TOKENS, "documents": TOKENS, "document_ids": IDS}}  # instead of those by name
SCALARS = {"logit_scale": 7.0, "logit_bias": -2.5, "teacher_logit_scale": 3.0, "temperature": 0.2}
LEARNED = ("logit_scale", "logit_bias", "temperature")
REPLICATED: dict[str, Callable[[World], Any]] = {
    "queue": lambda world: normalize(world.normal("queue", 9, D), dim=1),
    "dims": lambda _world: (2, 3, 5),
}
NEEDED: dict[str, Arguments] = {  # if the default does not suit a small batch, or is not a plain value
    "w_mse_loss": {"epsilon": 0.2},
    "partial_fc_loss": {"margin": wb.CosFace(8.0, 0.2)},
}
OPTIONAL = (
    "weights",
    "ids",
    "query_ids",
    "key_ids",
    "document_ids",
    "negatives",
    "hard_negatives",
    "temperature",
    "logit_bias",
)
LABELS_OF_CLASSES = ("partial_fc_loss", "PartialFC")


def make_loss(name: str, world: World, module: type[torch.nn.Module] | None = None) -> Good:
    """Return a right call of a functional loss, or of the module that holds its settings."""
    function, reference = getattr(wb.functional, name), getattr(wb.reference, name)
    if module is None:
        parameters, settings = dict(inspect.signature(function).parameters), frozenset[str]()
    else:
        settings = frozenset(inspect.signature(module).parameters)
        forward = {k: p for k, p in inspect.signature(module.forward).parameters.items() if k != "self"}
        of_function = inspect.signature(function).parameters  # knows what is required
        parameters = {k: of_function[k] for k in (*inspect.signature(module).parameters, *forward)}
        if world.integers("scale in the call", 2, 1):  # otherwise in the constructor, and logit_bias too
            settings -= forward.keys()
    rows_of = ROWS | ROWS_OF.get(name, {})
    common, whole, sync = _draw(name, parameters, world, tensors=module is None)
    arguments = [
        {**common, **{k: x[Partition(rows_of[k].counts(world)).rows(rank)] for k, x in whole.items()}}
        for rank in range(world.size)
    ]
    differentiable = [k for k in (*whole, *LEARNED) if k not in rows_of or rows_of[k].differentiable]
    known = inspect.signature(reference).parameters

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        given = {k: v for k, v in of_ranks[settings_of].items() if k in known}
        counts = {k: tuple(len(of[k]) for of in of_ranks) for k in whole}
        given |= {k: torch.cat([_wide(of[k]) for of in of_ranks]) for k in whole}
        given = with_gradients(given, differentiable)
        loss = reference(**given)
        loss = (loss[0] if isinstance(loss, tuple) else loss).sum()
        loss.backward()
        results = []
        for rank in range(world.size):
            of_rank = {"value": loss.detach()}
            for k, x in gradients_of(given, differentiable).items():
                argument = k.removeprefix("gradient of ")
                if argument in whole:
                    factor = world.size if sync == "mean" and not rows_of[argument].sharded else 1
                    x = factor * x[Partition(counts[argument]).rows(rank)]
                of_rank[k] = x
            results.append(of_rank)
        return results

    def construct(given: Arguments) -> Any:
        if module is None:
            return function
        return module(**{k: v for k, v in given.items() if k in settings})

    def call(made: Any, given: Arguments, backward: bool) -> Results:
        given = with_gradients({k: v for k, v in given.items() if k not in settings}, differentiable)
        loss = made(**given)
        loss = (loss[0] if isinstance(loss, tuple) else loss).sum()
        if loss.requires_grad and backward:
            loss.backward()
        return {"value": loss.detach(), **gradients_of(given, differentiable)}

    return Good(arguments, parameters, call, expected, construct, settings=settings, has_backward=True)


def _draw(
    name: str, parameters: dict[str, inspect.Parameter], world: World, *, tensors: bool
) -> tuple[Arguments, dict[str, Tensor], str | None]:
    """Return the arguments that are equal on all ranks, the rows of all ranks, and `sync`."""
    rng, rows_of = world.choices, ROWS | ROWS_OF.get(name, {})
    sync = rng.choice(["mean", "mean", "sum", None])
    common: Arguments = {"group": world.group, "sync": sync, **NEEDED.get(name, {})}
    whole: dict[str, Tensor] = {}
    for key, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty
        asked = rng.random() < 0.3 and key in OPTIONAL
        if key in ("group", "sync") or not (required or asked):
            continue
        if key == "labels" and name in LABELS_OF_CLASSES:
            whole[key] = world.integers(key, CLASSES, sum(world.rows))
        elif key in rows_of:
            whole[key] = rows_of[key].make(world, key, sum(rows_of[key].counts(world)))
        elif key in SCALARS:
            learned = tensors and sync == "mean" and key in LEARNED and rng.random() < 0.5
            common[key] = torch.tensor(SCALARS[key], dtype=torch.float64) if learned else SCALARS[key]
        elif key in REPLICATED:
            common[key] = REPLICATED[key](world)
        elif key not in common:
            raise NotImplementedError(f"{name}: no right value is known for its argument {key!r}")
    for key, values in (("exchange", USED_EXCHANGES), ("memory", ("flat",)), ("reduction", ("sum",))):
        if key in parameters and rng.random() < 0.4:
            common[key] = rng.choice(values)
    return common, whole, sync


def _wide(x: Any) -> Any:
    """Convert to float64; for labels in a matrix of one column, which some losses accept, return the column."""
    if x.is_floating_point():
        return x.detach().double()
    return x[:, 0] if x.dim() == 2 and x.shape[1] == 1 else x


@entry("max_sim")
def _max_sim(world: World) -> Good:
    rng, rows = world.choices, sum(world.rows)
    whole = {name: normalize(world.normal(name, rows, 3, D), dim=2) for name in ("queries", "documents")}
    common: Arguments = {"group": world.group, "exchange": rng.choice(USED_EXCHANGES), "k": rng.choice([None, 2, 99])}
    partition = Partition(world.rows)
    arguments = [{**common, **{k: x[partition.rows(rank)] for k, x in whole.items()}} for rank in range(world.size)]

    def results(found: Tensor | wb.TopDocuments) -> Results:
        return {"value": found} if isinstance(found, Tensor) else {"value": found.scores, "index": found.documents}

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        q, d = (torch.cat([of[name].double() for of in of_ranks]) for name in ("queries", "documents"))
        scores, top = wb.reference.max_sim(q, d), of_ranks[settings_of]["k"]
        if top is not None:
            scores, index = scores.sort(dim=1, descending=True, stable=True)
            scores, index = scores[:, :top], index[:, :top]
        counts = Partition(tuple(len(of["queries"]) for of in of_ranks))
        at = [counts.rows(rank) for rank in range(world.size)]
        return [{"value": scores[rows]} | ({} if top is None else {"index": index[rows]}) for rows in at]

    return Good(
        arguments,
        dict(inspect.signature(wb.max_sim).parameters),
        lambda made, given, backward: results(wb.max_sim(**given)),
        expected,
    )


def module_names() -> dict[str, str]:
    """Return the modules that hold a functional loss's settings, each with the loss's name."""
    functions = {name.replace("_", "").lower(): name for name in wb.functional.__all__}
    classes = [name for name in wb.__all__ if isinstance(getattr(wb, name), type)]
    return {name: functions[name.lower()] for name in classes if name.lower() in functions}


def register() -> None:
    """Register all losses."""
    for name in wb.functional.__all__:
        ENTRIES[f"functional.{name}"] = partial(make_loss, name)
    for name, function in module_names().items():
        if name != "GlobalContrastiveLoss":  # takes indices, and has a state
            ENTRIES[name] = partial(make_loss, function, module=getattr(wb, name))


register()

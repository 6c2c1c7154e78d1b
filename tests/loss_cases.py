"""The table of losses that the tests run over: a new loss, or a new option of one, is a new row.

A row has one call for a loss and its reference, `call(functions, *inputs, scale, bias, **options)` with `functions`
either `wb.functional` or `wb.reference`, and describes the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.partition import Partition

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """Rows of one argument: their number on each rank, and a function that makes them from the features x and y."""

    make: Callable[[torch.Generator, int, Tensor, Tensor], Tensor]
    counts: Callable[[Counts], Counts] = lambda counts: counts
    differentiable: bool = True
    replicated: bool = False  # every rank holds all of it


def _random(*shape: int) -> Callable[[torch.Generator, int, Tensor, Tensor], Tensor]:
    """Return a function that makes rows of norm 1, as wide as the features unless the shape ends with another width."""

    def make(generator: torch.Generator, rows: int, x: Tensor, _y: Tensor) -> Tensor:
        whole = (rows, *shape) if shape and shape[-1] > 0 else (rows, *shape[:-1], x.shape[1])
        return normalize(torch.randn(whole, dtype=torch.float64, generator=generator), dim=-1)

    return make


X = Input(lambda _g, _n, x, _y: x)
Y = Input(lambda _g, _n, _x, y: y)
NEGATIVES = Input(_random(), counts=lambda counts: tuple((3 * rank + 1) % 4 for rank in range(len(counts))))
NO_NEGATIVES = Input(_random(), counts=lambda counts: (0,) * len(counts))
HARD_NEGATIVES = Input(_random(2, 0))
IDS = Input(lambda g, n, _x, _y: torch.randint(0, 1 + n // 2, (n,), generator=g), differentiable=False)
HARD_IDS = Input(lambda g, n, _x, _y: torch.randint(0, 1 + n // 2, (n, 2), generator=g), differentiable=False)
NEGATIVE_IDS = Input(IDS.make, counts=NEGATIVES.counts, differentiable=False)
WEIGHTS = Input(lambda g, n, _x, _y: torch.rand(n, dtype=torch.float64, generator=g))
GUIDES = Input(_random(3), differentiable=False)
QUEUE = Input(lambda g, _n, x, y: _random()(g, 9, x, y), replicated=True)
TEACHER = Input(_random(4), differentiable=False)
AVERAGES = Input(lambda g, n, _x, _y: torch.randn(n, dtype=torch.float64, generator=g), differentiable=False)
NEW = Input(lambda _g, n, _x, _y: torch.full((n,), -torch.inf, dtype=torch.float64), differentiable=False)


@dataclass(frozen=True)
class Case:
    """A loss with its options."""

    call: Callable[..., Tensor]
    inputs: tuple[Input, ...] = (X, Y)
    has_scale: bool = True
    has_bias: bool = False  # whether the bias reaches the loss
    normalizes: bool = False
    core: bool = False  # runs with all scales, budgets and steps of training; other rows are options of core rows
    choices: tuple[str, ...] = ("exchange", "memory", "reduction")  # the options that the loss has
    at_least: int = 1  # rows of the global batch
    tile_bytes: int = 2 * 2 * 2 * 8  # of small tiles: two of 2 x 2 in float64
    smooth: bool = True  # no hinge and no choice of the hardest, whose gradients jump

    @property
    def differentiable(self) -> list[int]:
        """Return the positions of inputs that have a gradient."""
        return [position for position, of in enumerate(self.inputs) if of.differentiable]


def clip(**settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, scale, bias, **o: f.clip_loss(x, y, scale, logit_bias=bias, **settings, **o)


def info_nce(**settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, scale, _bias, **o: f.info_nce_loss(x, y, logit_scale=scale, **settings, **o)


def info_nce_with(*names: str, **settings: Any) -> Callable[..., Tensor]:
    """Return a call that passes further inputs by these names, in order."""

    def call(f: ModuleType, x: Tensor, y: Tensor, *more: Any, **options: Any) -> Tensor:
        *inputs, scale, _bias = more
        given = dict(zip(names, inputs, strict=True))
        return f.info_nce_loss(x, y, logit_scale=scale, **given, **settings, **options)

    return call


def two_views(name: str, **settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, scale, _bias, **o: getattr(f, name)(x, y, temperature=1 / scale, **settings, **o)


def labeled(name: str, *, with_temperature: bool = False, **settings: Any) -> Callable[..., Tensor]:
    def call(f: ModuleType, x: Tensor, labels: Tensor, scale: Any, _bias: Any, **options: Any) -> Tensor:
        temperature = {"temperature": 1 / scale} if with_temperature else {}
        return getattr(f, name)(x, labels, **temperature, **settings, **options)

    return call


def moments(name: str, **settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, _scale, _bias, **o: getattr(f, name)(x, y, **settings, **o)


def siglip(f: ModuleType, x: Tensor, y: Tensor, scale: Any, bias: Any, **options: Any) -> Tensor:
    return f.siglip_loss(x, y, scale, bias, **options)


def keyword(call: Callable[..., Tensor], *names: str) -> Callable[..., Tensor]:
    """Return a call that passes the last inputs by keyword."""

    def with_keywords(f: ModuleType, *arguments: Any, **options: Any) -> Tensor:
        *inputs, scale, bias = arguments
        first = len(inputs) - len(names)
        return call(f, *inputs[:first], scale, bias, **dict(zip(names, inputs[first:], strict=True)), **options)

    return with_keywords


def global_contrastive(**settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, u, v, scale, _bias, **o: f.global_contrastive_loss(
        x, y, u, v, temperature=1 / scale, **settings, **o
    )[0]


def moco(f: ModuleType, x: Tensor, y: Tensor, queue: Tensor, scale: Any, _bias: Any, **options: Any) -> Tensor:
    return f.moco_loss(x, y, queue, logit_scale=scale, **options)


def distillation(f: ModuleType, x: Tensor, y: Tensor, *more: Any, **options: Any) -> Tensor:
    teacher_x, teacher_y, scale, _bias = more
    return f.distillation_loss(x, y, scale, teacher_x, teacher_y, 3.0, **options)


def matryoshka(**settings: Any) -> Callable[..., Tensor]:
    return lambda f, x, y, scale, _bias, **o: f.matryoshka_loss(
        x, y, logit_scale=scale, dims=(2, 3, 5), **settings, **o
    )


def max_sim(*names: str, **settings: Any) -> Callable[..., Tensor]:
    call = lambda f, x, y, scale, _bias, **o: f.max_sim_loss(x, y, logit_scale=scale, **settings, **o)  # noqa: E731
    return keyword(call, *names)


TOKENS = (Input(_random(3, 0)), Input(_random(4, 0)))
ALL_DIRECTIONS = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
BOTH_DIRECTIONS = ALL_DIRECTIONS[:2]
LABELED = {"inputs": (X, IDS), "has_scale": False, "normalizes": True}
MOMENTS = {"has_scale": False, "normalizes": True, "choices": (), "at_least": 2}
LOSSES = {
    "clip": Case(clip(), core=True),
    "clip, label smoothing": Case(clip(label_smoothing=0.2), core=True),
    "info_nce": Case(info_nce(), core=True),
    "info_nce, few negatives": Case(info_nce_with("negatives"), inputs=(X, Y, NEGATIVES), core=True),
    "info_nce, no negatives on any rank": Case(info_nce_with("negatives"), inputs=(X, Y, NO_NEGATIVES), core=True),
    "nt_xent": Case(two_views("nt_xent_loss"), normalizes=True, core=True),
    "siglip": Case(siglip, has_bias=True, core=True),
    "clip, ids, weights": Case(keyword(clip(), "ids", "weights"), inputs=(X, Y, IDS, WEIGHTS)),
    "clip, ids, label smoothing": Case(keyword(clip(label_smoothing=0.2), "ids"), inputs=(X, Y, IDS)),
    "clip, ids excluded, label smoothing": Case(
        keyword(clip(label_smoothing=0.2, equal_ids="excluded"), "ids"), inputs=(X, Y, IDS)
    ),
    "siglip, ids, weights": Case(keyword(siglip, "ids", "weights"), inputs=(X, Y, IDS, WEIGHTS), has_bias=True),
    "nt_xent, ids, weights": Case(
        keyword(two_views("nt_xent_loss"), "ids", "weights"), inputs=(X, Y, IDS, WEIGHTS), normalizes=True
    ),
    "info_nce, all directions, ids": Case(
        info_nce_with("query_ids", "key_ids", directions=ALL_DIRECTIONS), inputs=(X, Y, IDS, IDS)
    ),
    "info_nce, per direction, negatives": Case(
        info_nce_with(
            "negatives",
            "key_ids",
            "negative_ids",
            directions=ALL_DIRECTIONS,
            partition="per_direction",
            label_smoothing=0.1,
        ),
        inputs=(X, Y, NEGATIVES, IDS, NEGATIVE_IDS),
    ),
    "info_nce, several positives": Case(
        info_nce_with("query_ids", equal_ids="positive", directions=BOTH_DIRECTIONS, partition="per_direction"),
        inputs=(X, Y, IDS),
    ),
    "info_nce, hard negatives, margin, hardness, weights": Case(
        info_nce_with("negatives", "hard_negatives", "weights", margin=0.1, hardness=2.0, directions=BOTH_DIRECTIONS),
        inputs=(X, Y, NEGATIVES, HARD_NEGATIVES, WEIGHTS),
    ),
    "info_nce, hardness of hard negatives": Case(
        info_nce_with("hard_negatives", hardness=1.0, hard_negative_hardness=3.0), inputs=(X, Y, HARD_NEGATIVES)
    ),
    "info_nce, hardness, label smoothing": Case(
        info_nce_with("negatives", hardness=2.0, label_smoothing=0.2, directions=BOTH_DIRECTIONS),
        inputs=(X, Y, NEGATIVES),
    ),
    "info_nce, keys' queries, keys among themselves": Case(
        info_nce_with("negatives", "key_ids", directions=("key_to_query", "key_to_key")), inputs=(X, Y, NEGATIVES, IDS)
    ),
    "info_nce, false negatives by margin": Case(
        info_nce_with(
            "hard_negatives",
            "query_ids",
            "hard_negative_ids",
            directions=ALL_DIRECTIONS,
            exclude_above=0.1,
            label_smoothing=0.1,
        ),
        inputs=(X, Y, HARD_NEGATIVES, IDS, HARD_IDS),
        smooth=False,
    ),
    "info_nce, false negatives by margin, in some directions": Case(
        info_nce_with(
            "negatives",
            directions=("query_to_key", "query_to_query", "key_to_key"),
            exclude_above=0.1,
            exclude_directions=("query_to_key", "query_to_query"),
        ),
        inputs=(X, Y, NEGATIVES),
        smooth=False,
    ),
    "info_nce, false negatives of keys alone": Case(
        info_nce_with(
            "hard_negatives",
            directions=BOTH_DIRECTIONS,
            partition="per_direction",
            exclude_above=-0.1,
            exclude_directions=("key_to_query",),
        ),
        inputs=(X, Y, HARD_NEGATIVES),
        smooth=False,
    ),
    "info_nce, false negatives by guide": Case(
        info_nce_with(
            "query_guides", "key_guides", directions=ALL_DIRECTIONS, exclude_above=-0.2, exclude_relative=True
        ),
        inputs=(X, Y, GUIDES, GUIDES),
    ),
    "sup_con": Case(labeled("sup_con_loss", with_temperature=True), **(LABELED | {"has_scale": True})),
    "sup_con, weights": Case(keyword(labeled("sup_con_loss"), "weights"), **(LABELED | {"inputs": (X, IDS, WEIGHTS)})),
    "dcl": Case(two_views("dcl_loss"), normalizes=True),
    "dcl, weighted": Case(
        keyword(two_views("dcl_loss", sigma=0.5), "ids", "weights"), inputs=(X, Y, IDS, WEIGHTS), normalizes=True
    ),
    "alignment and uniformity": Case(
        moments("alignment_uniformity_loss", alpha=1.5, t=3.0),
        has_scale=False,
        normalizes=True,
        choices=("exchange", "memory"),
    ),
    "debiased": Case(two_views("debiased_loss", tau_plus=0.1), normalizes=True),
    "debiased, hard negatives": Case(two_views("debiased_loss", tau_plus=0.02, beta=1.0), normalizes=True),
    "moco": Case(moco, inputs=(X, Y, QUEUE), choices=("memory", "reduction")),
    "global contrastive": Case(global_contrastive(), inputs=(X, Y, AVERAGES, AVERAGES)),
    "global contrastive, new examples": Case(global_contrastive(gamma=0.5), inputs=(X, Y, NEW, AVERAGES)),
    "matryoshka": Case(matryoshka(dim_weights=(1.0, 0.0, 2.0)), inputs=(X, Y)),
    "matryoshka, one direction, ids": Case(
        keyword(matryoshka(symmetric=False, normalize=False), "ids"), inputs=(X, Y, IDS)
    ),
    "distillation": Case(distillation, inputs=(X, Y, TEACHER, TEACHER)),
    "max_sim": Case(max_sim(), inputs=TOKENS, smooth=False),
    "max_sim, both directions, ids, mean": Case(
        max_sim(
            "query_ids",
            directions=("query_to_document", "document_to_query"),
            equal_ids="positive",
            token_reduction="mean",
            label_smoothing=0.1,
        ),
        inputs=(*TOKENS, IDS),
        smooth=False,
    ),
    "barlow_twins": Case(moments("barlow_twins_loss"), **MOMENTS),
    "vicreg": Case(moments("vicreg_loss"), **MOMENTS, smooth=False),
    "w_mse": Case(moments("w_mse_loss", epsilon=0.2), **MOMENTS),
    "triplet": Case(labeled("triplet_loss"), **LABELED, smooth=False),
    "triplet, no hinge, not normalized": Case(
        labeled("triplet_loss", smooth=True, distance="squared", normalize=False), **LABELED, smooth=False
    ),
    "multi_similarity": Case(labeled("multi_similarity_loss"), **LABELED),
    "multi_similarity, mined": Case(labeled("multi_similarity_loss", epsilon=0.1), **LABELED, smooth=False),
    "circle": Case(labeled("circle_loss"), **LABELED),
    "smooth_ap": Case(labeled("smooth_ap_loss", temperature=0.1), **LABELED),
}


@cache
def module_of(name: str, **settings: Any) -> Any:
    """Return the recipe of these settings, which later calls use again."""
    return getattr(wb.recipes, name)(**settings)


def recipe(name: str, *, scaled: bool = False, **settings: Any) -> Callable[..., Tensor]:
    """Return a call of a recipe; its own reference stands for `wholebatch.reference`."""
    default = module_of(name, **settings)

    def call(f: ModuleType, *arguments: Any, **keywords: Any) -> Tensor:
        *inputs, scale, _bias = arguments
        named = {key: keywords.pop(key) for key in ("has", "weights") if key in keywords}
        named |= {"logit_scale": scale} if scaled else {}
        loss_fn = module_of(name, **settings, **keywords) if keywords else default
        loss: Tensor = (loss_fn.reference if f is wb.reference else loss_fn)(*inputs, **named)
        return loss

    return call


def towers(*, missing: bool) -> Callable[..., Tensor]:
    """Return a call of the loss of three towers; with `missing`, two masks say who has the first and the last."""
    of_features = recipe("TowersLoss", scaled=True, towers=("image", "text", "audio"), missing=missing)

    def call(f: ModuleType, image: Tensor, text: Tensor, audio: Tensor, *more: Any, **options: Any) -> Tensor:
        *has, scale, bias = more
        masks = {"has": dict(zip(("image", "audio"), has, strict=True))} if missing else {}
        return of_features(f, {"image": image, "text": text, "audio": audio}, scale, bias, **masks, **options)

    return call


def queue_of(keys: Tensor, group: Any) -> wb.KeyQueue:
    """Return a queue with these keys, of which each rank brings a part. Collective."""
    comm = wb.comm.select_communicator(group)
    with torch.device(keys.device):
        numbers, dtypes = torch.arange(len(keys)), {"labels": torch.int64, "examples": torch.int64}
        queue = wb.KeyQueue(*keys.shape, data=dtypes, dtype=keys.dtype, group=group)
    part = Partition.even(len(keys), comm.size).rows(comm.rank)
    data = {"labels": numbers % 3, "examples": numbers + 4}  # the batch holds some of the same examples
    queue.enqueue(keys[part], {name: x[part] for name, x in data.items()})
    return queue


def cross_batch(
    f: ModuleType, x: Tensor, labels: Tensor, examples: Tensor, keys: Tensor, *more: Any, **options: Any
) -> Tensor:
    """Call the loss with a queue of these keys."""
    group = wb.comm.LocalCommunicator() if f is wb.reference else options.get("group")
    inputs = (x, labels, examples, queue_of(keys, group), *more)
    return recipe("CrossBatchSupConLoss", temperature=0.5)(f, *inputs, **options)


DOCUMENTS, SCORES = Input(_random(3, 0)), Input(_random(3), differentiable=False)
TAGS = Input(lambda g, n, _x, _y: torch.randint(0, 2, (n, 3), generator=g).to(torch.float64), differentiable=False)
SOME = Input(lambda g, n, _x, _y: torch.rand(n, generator=g) < 0.7, differentiable=False)
EXAMPLES = Input(lambda _g, n, _x, _y: torch.arange(n), differentiable=False)
KEYS = Input(QUEUE.make, differentiable=False, replicated=True)
DIRECTIONS = Input(lambda g, _n, x, y: _random()(g, 3, x, y), replicated=True)
DISTILLED = {"inputs": (X, DOCUMENTS, SCORES), "has_scale": False}
RECIPES = {
    "same task": Case(recipe("SameTaskInfoNCELoss", scaled=True), inputs=(X, Y, IDS), at_least=3),
    "same task, weights": Case(
        keyword(recipe("SameTaskInfoNCELoss", scaled=True), "weights"), inputs=(X, Y, IDS, WEIGHTS), at_least=3
    ),
    "soft labels": Case(recipe("SoftLabelCLIPLoss", scaled=True), inputs=(X, Y, TAGS, TAGS), tile_bytes=256),
    "semi-hard triplets": Case(
        recipe("SemiHardTripletLoss", margin=4.0), inputs=(X, Y, IDS), has_scale=False, at_least=2, smooth=False
    ),
    "listwise distillation": Case(
        recipe("ListwiseDistillationLoss", temperature=2.0, teacher_temperature=0.5), **DISTILLED
    ),
    "margin MSE": Case(recipe("MarginMSELoss"), inputs=(X, Y, DOCUMENTS, SCORES), has_scale=False),
    "cross-batch memory": Case(cross_batch, inputs=(X, IDS, EXAMPLES, KEYS), has_scale=False, normalizes=True),
    "towers": Case(towers(missing=False), inputs=(X, Y, Input(_random())), at_least=2, tile_bytes=1024),
    "towers, some missing": Case(
        towers(missing=True), inputs=(X, Y, Input(_random()), SOME, SOME), at_least=4, tile_bytes=1024
    ),
    "FLOPS": Case(recipe("FLOPSLoss"), inputs=(X,), has_scale=False, choices=(), smooth=False),
    "SIGReg": Case(recipe("SIGRegLoss"), inputs=(X, DIRECTIONS), has_scale=False, choices=()),
}
EVERY = LOSSES | RECIPES  # the declared ones are called alike, and have the same options
CORE = {name: case for name, case in LOSSES.items() if case.core}
BIAS = -2.5


def whole_batch(case: Case, counts: Counts, *, d: int = 6, seed: int = 0) -> list[Tensor]:
    """Return the inputs of all ranks in float64: pairs that are neither random nor solved."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), d, dtype=torch.float64, generator=generator)
    y = x + 1.5 * torch.randn(sum(counts), d, dtype=torch.float64, generator=generator)
    x, y = (x, y) if case.normalizes else (normalize(z, dim=-1) for z in (x, y))
    return [of.make(generator, sum(of.counts(counts)), x, y) for of in case.inputs]


def rows_of(case: Case, counts: Counts, rank: int) -> list[slice]:
    """Return the slice of each input that holds a rank's rows."""
    return [slice(None) if of.replicated else Partition(of.counts(counts)).rows(rank) for of in case.inputs]


def options_of(case: Case, **options: Any) -> dict[str, Any]:
    """Return those of the options that the loss has."""
    return {name: value for name, value in options.items() if name in case.choices or name in ("group", "sync")}


def gradients(case: Case, functions: ModuleType, inputs: list[Tensor], scale: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss and its gradients by inputs that have one, and by scale and bias where the loss has them."""
    leaves = [z.detach().clone() for z in inputs]
    differentiated = [leaves[position].requires_grad_() for position in case.differentiable]
    scale = scale.detach().clone().requires_grad_()
    bias = torch.full_like(scale, BIAS).requires_grad_()
    loss = case.call(functions, *leaves, scale, bias, **options_of(case, **options))
    differentiated += [scale] * case.has_scale + [bias] * case.has_bias
    return [loss.detach(), *torch.autograd.grad(loss, differentiated)]


def dense(case: Case, inputs: list[Tensor], scale: float) -> list[Tensor]:
    """Return the result of `gradients` for the reference, in float64."""
    wide = [z.double() if z.is_floating_point() else z for z in inputs]
    return gradients(case, wb.reference, wide, torch.tensor(scale, dtype=torch.float64))

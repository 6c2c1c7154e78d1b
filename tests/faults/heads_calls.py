"""Right calls of modules with a state or with shards: the classifier with its functions, queues, running averages."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from good_calls import Arguments, D, Good, Results, World, entry, gradients_of, with_gradients
from losses_calls import CLASSES
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.partition import Partition

MARGIN = wb.CosFace(8.0, 0.2)
HEAD_SETTINGS = frozenset(inspect.signature(wb.PartialFC).parameters)
EXAMPLES, QUEUE = 40, 30


def rows_of(world: World, whole: Tensor) -> list[Tensor]:
    """Return each rank's rows."""
    return [whole[Partition(world.rows).rows(rank)] for rank in range(world.size)]


def parameters_of(*functions: Any) -> dict[str, Any]:
    """Return the parameters of all these functions."""
    found: dict[str, Any] = {}
    for function in functions:
        found |= {k: p for k, p in inspect.signature(function).parameters.items() if k not in ("self", "params")}
    return found


def head_settings(world: World) -> Arguments:
    """Return the settings of a small classifier in float64."""
    settings = {"embedding_size": D, "num_classes": CLASSES, "margin": MARGIN, "dtype": torch.float64}
    return {**settings, "group": world.group, "seed": 5}


def all_centers(settings: Arguments) -> Tensor:
    """Return the centers of a head with these settings, which are the same on any number of ranks."""
    names = ("embedding_size", "num_classes", "seed", "dtype")
    alone = wb.PartialFC(**{k: settings[k] for k in names}, group=wb.comm.LocalCommunicator())
    return alone.weight.detach().double()


def of_settings(given: Arguments) -> Arguments:
    """Return the arguments that are settings of the head."""
    return {k: v for k, v in given.items() if k in HEAD_SETTINGS}


def others(given: Arguments, settings: frozenset[str] = HEAD_SETTINGS) -> Arguments:
    """Return the arguments that are not settings."""
    return {k: v for k, v in given.items() if k not in settings}


def cat(of_ranks: list[Arguments], name: str) -> Tensor:
    """Return all rows of an argument."""
    return torch.cat([of[name].to_dense() for of in of_ranks])


@entry("PartialFC")
def partial_fc(world: World) -> Good:
    features = rows_of(world, normalize(world.normal("embeddings", sum(world.rows), D), dim=1))
    labels = rows_of(world, world.integers("labels", CLASSES, sum(world.rows)))
    settings = head_settings(world)
    arguments = [{**settings, "embeddings": x, "labels": y} for x, y in zip(features, labels, strict=True)]

    def call(head: wb.PartialFC, given: Arguments, backward: bool) -> Results:
        head.weight.grad = None
        given = with_gradients(others(given), ["embeddings"])
        loss = head(**given)
        if backward and loss.requires_grad:
            loss.backward()
        found = {"value": loss.detach(), **gradients_of(given, ["embeddings"])}
        return found | ({} if head.weight.grad is None else {"gradient of weight": head.weight.grad})

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        of = of_ranks[settings_of]
        x, centers = cat(of_ranks, "embeddings").double().requires_grad_(), all_centers(of).requires_grad_()
        loss = wb.reference.partial_fc_loss(x, cat(of_ranks, "labels"), centers, margin=of["margin"])
        loss.backward()
        assert x.grad is not None
        assert centers.grad is not None
        results = []
        for rank in range(world.size):
            at = Partition(tuple(len(of["embeddings"]) for of in of_ranks)).rows(rank)
            local = Partition.even(of["num_classes"], world.size).rows(rank)
            results.append(
                {
                    "value": loss.detach(),
                    "gradient of embeddings": world.size * x.grad[at],
                    "gradient of weight": centers.grad[local],
                }
            )
        return results

    return Good(
        arguments,
        parameters_of(wb.PartialFC, wb.PartialFC.forward),
        call,
        expected,
        lambda given: wb.PartialFC(**of_settings(given)),
        lambda head: [head],
        settings=HEAD_SETTINGS,
        has_backward=True,
    )


def of_head(method: str, more: Arguments) -> Any:
    """Return a function that makes right calls of one of the head's methods that need no gradient."""

    def make(world: World) -> Good:
        arguments: list[Arguments] = [{**head_settings(world), **more} for _ in range(world.size)]
        if method == "top_classes":
            for of, x in zip(arguments, rows_of(world, world.normal("embeddings", sum(world.rows), D)), strict=True):
                of["embeddings"] = x
        if method == "full_bias":
            for of in arguments:
                of["bias"] = True

        def call(head: wb.PartialFC, given: Arguments, _backward: bool) -> Results:
            result = getattr(head, method)(**{k: v for k, v in given.items() if k not in HEAD_SETTINGS})
            if method == "top_classes":
                return {"value": result.logits, "classes": result.class_ids}
            return {"value": torch.zeros(0, device="cpu") if result is None else result}

        def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
            of = of_ranks[settings_of]
            centers = all_centers(of)
            if method != "top_classes":
                whole = centers if method == "full_weight" else torch.zeros(of["num_classes"])
                return [{"value": whole if rank == of["root"] else torch.zeros(0)} for rank in range(world.size)]
            results = []
            for of_rank in of_ranks:
                x = of_rank["embeddings"].double()
                best = (8.0 * normalize(x, dim=1) @ normalize(centers, dim=1).T).topk(of["k"])
                results.append({"value": best.values, "classes": best.indices})
            return results

        return Good(
            arguments,
            parameters_of(getattr(wb.PartialFC, method)),
            call,
            expected,
            lambda given: wb.PartialFC(**of_settings(given)),
            lambda head: [head],
            settings=HEAD_SETTINGS,
        )

    return make


entry("PartialFC.top_classes")(of_head("top_classes", {"k": 3}))
entry("PartialFC.full_weight")(of_head("full_weight", {"root": 1}))
entry("PartialFC.full_bias")(of_head("full_bias", {"root": 0}))


@entry("KeyQueue.enqueue")
def key_queue(world: World) -> Good:
    keys = rows_of(world, world.normal("keys", sum(world.rows), D))
    settings = {"size": QUEUE, "embedding_size": D, "dtype": torch.float64, "group": world.group}
    names = frozenset(settings)

    def call(queue: wb.KeyQueue, given: Arguments, _backward: bool) -> Results:
        queue.enqueue(**others(given, names))
        return {"value": queue.keys.clone()}

    return Good(
        [{**settings, "keys": x} for x in keys],
        parameters_of(wb.KeyQueue, wb.KeyQueue.enqueue),
        call,
        lambda of_ranks, _settings_of: [{"value": cat(of_ranks, "keys")}] * world.size,
        lambda given: wb.KeyQueue(**{k: v for k, v in given.items() if k in names}),
        lambda queue: [queue],
        settings=names,
    )


@entry("GlobalContrastiveLoss")
def global_contrastive(world: World) -> Good:
    rows = sum(world.rows)
    images, texts = (rows_of(world, normalize(world.normal(name, rows, D), dim=1)) for name in ("images", "texts"))
    indices = rows_of(world, torch.randperm(EXAMPLES, generator=world.generator("indices"))[:rows])
    names = frozenset(inspect.signature(wb.GlobalContrastiveLoss).parameters)
    settings = {"examples": EXAMPLES, "dtype": torch.float64, "temperature": 0.2, "group": world.group}
    arguments = [
        {**settings, "image_features": x, "text_features": y, "indices": at}
        for x, y, at in zip(images, texts, indices, strict=True)
    ]
    towers = ["image_features", "text_features"]

    def call(loss_fn: wb.GlobalContrastiveLoss, given: Arguments, backward: bool) -> Results:
        given = with_gradients(others(given, names), towers)
        loss = loss_fn(**given)
        if backward and loss.requires_grad:
            loss.backward()
        averages = loss_fn.image_log_averages
        return {"value": loss.detach(), "averages": averages.exp(), **gradients_of(given, towers)}

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        of = of_ranks[settings_of]
        x, y = (cat(of_ranks, name).double().requires_grad_() for name in towers)
        new = torch.full((len(x),), -torch.inf, dtype=torch.float64)
        loss, u, _ = wb.reference.global_contrastive_loss(x, y, new, new, temperature=of["temperature"])
        loss.backward()
        averages = torch.zeros(EXAMPLES, dtype=torch.float64)
        averages[cat(of_ranks, "indices")] = u.detach().exp()
        results = []
        for rank in range(world.size):
            at = Partition(tuple(len(of["indices"]) for of in of_ranks)).rows(rank)
            local = {f"gradient of {k}": world.size * z.grad[at] for k, z in zip(towers, (x, y), strict=True)}
            results.append({"value": loss.detach(), "averages": averages, **local})
        return results

    return Good(
        arguments,
        parameters_of(wb.GlobalContrastiveLoss, wb.GlobalContrastiveLoss.forward),
        call,
        expected,
        lambda given: wb.GlobalContrastiveLoss(**{k: v for k, v in given.items() if k in names}),
        lambda loss_fn: [loss_fn],
        settings=names,
        has_backward=True,
    )


def _files(name: str) -> Any:
    function = getattr(wb.heads, name)

    def make(world: World) -> Good:
        folder = Path(world.folder) / "head"
        settings = head_settings(world)
        given: Arguments = {"folder": folder}

        def construct(of_rank: Arguments) -> Any:
            """Return the head to save and the head to load into; the folder is empty, or has the first one."""
            if world.rank == 0 and name == "save_head":
                shutil.rmtree(folder, ignore_errors=True)
            return wb.PartialFC(**settings), wb.PartialFC(**{**settings, "seed": 6})

        def call(made: tuple[wb.PartialFC, wb.PartialFC], of_rank: Arguments, _backward: bool) -> Results:
            source, target = made
            head = {"head": source if name == "save_head" else target}
            if name == "load_head" and not folder.exists():
                wb.heads.save_head(folder, source)
            function(**{**head, **of_rank})
            if name == "save_head":
                wb.heads.load_head(folder, target)
            return {"value": target.weight.detach().clone()}

        def expected(_of_ranks: list[Arguments], _settings_of: int) -> list[Results]:
            whole = all_centers(settings)
            return [{"value": whole[Partition.even(CLASSES, world.size).rows(rank)]} for rank in range(world.size)]

        arguments = [dict(given) for _ in range(world.size)]
        parameters = {k: p for k, p in parameters_of(function).items() if k != "head"}
        return Good(arguments, parameters, call, expected, construct, lambda made: made)

    return make


entry("heads.save_head")(_files("save_head"))
entry("heads.load_head")(_files("load_head"))


def _parameter(x: Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.zeros_like(x))
    p.grad = x.clone()
    return p


@entry("heads.clip_grad_norm_")
def clip_grad_norm(world: World) -> Good:
    backbone = world.normal("backbone", 4)
    shards = [world.normal(f"shard {rank}", 3) for rank in range(world.size)]
    arguments = [
        {"replicated": [_parameter(backbone)], "sharded": [_parameter(local)], "max_norm": 0.5, "group": world.group}
        for local in shards
    ]

    def construct(given: Arguments) -> None:
        """Set the gradients, which the call scales."""
        for name, x in (("replicated", backbone), ("sharded", shards[world.rank])):
            of = given.get(name)
            if isinstance(of, list) and len(of) == 1 and isinstance(of[0], nn.Parameter) and of[0].shape == x.shape:
                of[0].grad = x.to(of[0].device, copy=True)

    def call(_made: None, given: Arguments, _backward: bool) -> Results:
        norm = wb.heads.clip_grad_norm_(**given)
        return {"value": norm, "of shard": given["sharded"][0].grad}

    def expected(of_ranks: list[Arguments], settings_of: int) -> list[Results]:
        norm = torch.cat([backbone, *shards]).norm()
        factor = min(1.0, of_ranks[settings_of]["max_norm"] / (norm.item() + 1e-6))
        return [{"value": norm, "of shard": factor * local} for local in shards]

    return Good(arguments, parameters_of(wb.heads.clip_grad_norm_), call, expected, construct)


@entry("heads.agree_on_overflow")
def agree_on_overflow(world: World) -> Good:
    def call(made: Any, given: Arguments, _backward: bool) -> Results:
        scaler, optimizers = made
        given = {"scaler": scaler, "optimizers": optimizers, **given}
        wb.heads.agree_on_overflow(given.pop("scaler"), *given.pop("optimizers"), **given)
        scaler.step(optimizers[0])
        return {"value": optimizers[0].param_groups[0]["params"][0].detach().clone()}

    def construct(_given: Arguments) -> Any:
        """Return a scaler and an optimizer whose gradient has overflowed on the last rank."""
        p = nn.Parameter(torch.ones(2))
        p.grad = torch.full((2,), float("inf") if world.rank == world.size - 1 else 1.0)
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([p], 0.1)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        return scaler, [optimizer]

    def expected(_of_ranks: list[Arguments], _settings_of: int) -> list[Results]:
        return [{"value": torch.ones(2)}] * world.size

    arguments: list[Arguments] = [{"group": world.group} for _ in range(world.size)]
    return Good(arguments, parameters_of(wb.heads.agree_on_overflow), call, expected, construct)

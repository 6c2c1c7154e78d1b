"""Right calls of entry points that take functions of the user: WholeBatch with each strategy, gradient caching."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

from good_calls import Arguments, D, Good, Results, UserError, World, entry, gradients_of, with_gradients
from heads_calls import cat, others, parameters_of, rows_of
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.losses.whole_batch import STRATEGIES
from wholebatch.partition import Partition


def users_own(function: Any) -> Any:
    """Wrap a user's function, so that its errors are not counted as the library's."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise UserError(str(error)) from error

    return call


@users_own
def plain_loss(x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of one process."""
    return (5.0 * x @ y.T).logsumexp(1).mean() - 5.0 * (x * y).sum(1).mean()


def pairs(world: World) -> list[Arguments]:
    """Return the rows of x and of y on each rank."""
    x, y = (rows_of(world, normalize(world.normal(name, sum(world.rows), D), dim=1)) for name in "xy")
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def dense(of_ranks: list[Arguments], size: int) -> list[Results]:
    """Return the value, and the gradients of x and y times the number of ranks."""
    x, y = (cat(of_ranks, name).double().requires_grad_() for name in "xy")
    loss = plain_loss(x, y)
    loss.backward()
    assert x.grad is not None
    assert y.grad is not None
    counts = Partition(tuple(len(of["x"]) for of in of_ranks))
    return [
        {
            "value": loss.detach(),
            "gradient of x": size * x.grad[counts.rows(rank)],
            "gradient of y": size * y.grad[counts.rows(rank)],
        }
        for rank in range(len(of_ranks))
    ]


def _whole_batch(strategy: str) -> Any:
    names = frozenset(inspect.signature(wb.WholeBatch).parameters)

    def make(world: World) -> Good:
        settings = {"loss_fn": plain_loss, "strategy": strategy, "group": world.group}

        def call(loss_fn: wb.WholeBatch, given: Arguments, backward: bool) -> Results:
            given = with_gradients(others(given, names), ["x", "y"])
            rows, more = [given[k] for k in "xy" if k in given], {k: v for k, v in given.items() if k not in "xy"}
            loss = loss_fn(*rows, **more)
            if backward and loss.requires_grad:
                loss.backward()
            return {"value": loss.detach(), **gradients_of(given, ["x", "y"])}

        return Good(
            [{**settings, **of} for of in pairs(world)],
            {"x": None, "y": None, **parameters_of(wb.WholeBatch)},
            call,
            lambda of_ranks, _settings_of: dense(of_ranks, world.size),
            lambda given: wb.WholeBatch(**{k: v for k, v in given.items() if k in names}),
            settings=names,
            user=("loss_fn",),
            has_backward=True,
        )

    return make


for _strategy in STRATEGIES:
    entry(f"WholeBatch, {_strategy}")(_whole_batch(_strategy))


class Encoder(nn.Module):
    """An encoder that is the same on all ranks. Each forward pass calls `user`."""

    def __init__(self, world: World, user: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(world.normal("encoder", D, D))
        self.user = user

    @users_own
    def forward(self, x: Tensor) -> Tensor:
        if self.user is not None:
            self.user()
        return normalize(x @ self.weight, dim=1)


def plain_step(world: World, of_ranks: list[Arguments], _settings_of: int) -> list[Results]:
    """Return the loss and the encoder's gradient of a step without caching, on the rows of all ranks."""
    encoder = Encoder(world)
    value = plain_loss(*(encoder(cat(of_ranks, name).double()) for name in "xy"))
    value.backward()
    assert encoder.weight.grad is not None
    return [{"value": value.detach(), "gradient of encoder": encoder.weight.grad}] * world.size


@entry("GradCache")
def grad_cache(world: World) -> Good:
    names = frozenset(inspect.signature(wb.GradCache).parameters)
    chunk = world.choices.choice([1, 2, 3])
    settings = {"chunk_sizes": chunk, "group": world.group, "encoder": None, "loss_fn": None}
    loss = wb.WholeBatch(plain_loss, group=world.group, sync="sum")

    def construct(given: Arguments) -> Any:
        encoder = Encoder(world, given["encoder"])
        made = {"models": [encoder, encoder], "loss_fn": given["loss_fn"] or loss}
        more = {k: v for k, v in given.items() if k in names and k not in made}
        return wb.GradCache(**(made | {k: given[k] for k in ("models",) if k in given} | more)), encoder

    def call(made: Any, given: Arguments, _backward: bool) -> Results:
        step, encoder = made
        given = {k: v for k, v in given.items() if k not in names and k != "encoder"}
        rows, more = [given[k] for k in "xy" if k in given], {k: v for k, v in given.items() if k not in "xy"}
        value = step(*rows, **more)
        # The gradient of a rank is its share; a user without an engine adds these up by hand.
        total = world.communicator().all_reduce(encoder.weight.grad)
        return {"value": value, "gradient of encoder": total}

    return Good(
        [{**settings, **of} for of in pairs(world)],
        {"x": None, "y": None, **parameters_of(wb.GradCache)},
        call,
        partial(plain_step, world),
        construct,
        lambda made: [made[1]],
        settings=names | {"encoder"},
        user=("loss_fn", "encoder"),
    )


@entry("gradcache.gather_input_tensor")
def gather_input_tensor(world: World) -> Good:
    settings = {"func": plain_loss, "axis": 0, "group": world.group}
    names = frozenset(settings)

    def call(gathered: Any, given: Arguments, backward: bool) -> Results:
        given = with_gradients(others(given, names), ["x", "y"])
        value = gathered(**given)
        if backward and value.requires_grad:
            value.backward()
        return {"value": value.detach(), **gradients_of(given, ["x", "y"])}

    return Good(
        [{**settings, **of} for of in pairs(world)],
        {"x": None, "y": None, "axis": None},
        call,
        lambda of_ranks, _settings_of: dense(of_ranks, 1),
        lambda given: wb.gradcache.gather_input_tensor(**{k: v for k, v in given.items() if k in names}),
        settings=names,
        binds_alone=True,
        has_backward=True,
    )


@entry("gradcache.cached")
def cached(world: World) -> Good:
    loss = wb.WholeBatch(plain_loss, group=world.group, sync="sum")

    def construct(given: Arguments) -> Any:
        encoder = Encoder(world)

        def encode(x: Tensor) -> Tensor:
            if given["encoder"] is not None:
                given["encoder"]()
            return encoder(x)

        return wb.gradcache.cached(encode), encoder

    def call(made: Any, given: Arguments, backward: bool) -> Results:
        encode, encoder = made
        (a, again_a), (b, again_b) = encode(given.get("x")), encode(given.get("y"))
        value = loss(a, b)
        if backward:
            value.backward()
            again_a(a)
            again_b(b)
        return {"value": value.detach(), "gradient of encoder": world.communicator().all_reduce(encoder.weight.grad)}

    return Good(
        [{"encoder": None, **of} for of in pairs(world)],
        {"x": None, "y": None},
        call,
        partial(plain_step, world),
        construct,
        lambda made: [made[1]],
        settings=frozenset({"encoder"}),
        alone=frozenset({"encoder", "x", "y"}),  # code of the user, in which no rank waits
        binds_alone=True,
        has_backward=True,
    )

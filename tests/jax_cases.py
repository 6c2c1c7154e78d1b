"""The cases of the JAX tests: the rows of the shared table that both libraries have, and functions that call both.

With WHOLEBATCH_TEST_JAX=all (`make jax`) every row runs on every number and kind of devices, by every exchange.
Otherwise plain losses and ArcFace run on every number of devices by every exchange, with automatic and explicit axes by
turns; losses with options run on one setting each, by turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, Mesh
from loss_cases import (
    BOTH_DIRECTIONS,
    HARD_IDS,
    HARD_NEGATIVES,
    IDS,
    LOSSES,
    NEGATIVE_IDS,
    NEGATIVES,
    Case,
    X,
    Y,
    info_nce_with,
    whole_batch,
)
from torch import Tensor

import wholebatch as wb
import wholebatch.jax as wbj

DEVICES = (1, 2, 4, 8)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SETTINGS = [  # devices, kind, exchange; one device exchanges nothing
    (devices, kind, exchange)
    for devices, kind, exchange in product(DEVICES, KINDS, ("gather", "ring"))
    if devices > 1 or exchange == "gather"
]
EVERYTHING = os.environ.get("WHOLEBATCH_TEST_JAX") == "all"
SCALE = 14.3
SHARED = [
    name
    for name in LOSSES
    if name.split(",")[0] in ("clip", "nt_xent", "siglip", "sup_con")
    or name in ("info_nce", "info_nce, few negatives", "info_nce, no negatives on any rank")
]
CASES = {name: LOSSES[name] for name in SHARED} | {
    "info_nce, hard negatives, ids": Case(
        info_nce_with("negatives", "hard_negatives", "query_ids", "negative_ids", "hard_negative_ids"),
        inputs=(X, Y, NEGATIVES, HARD_NEGATIVES, IDS, NEGATIVE_IDS, HARD_IDS),
    ),
    "info_nce, both directions in one softmax, label smoothing": Case(
        info_nce_with("negatives", "hard_negatives", "key_ids", directions=BOTH_DIRECTIONS, label_smoothing=0.1),
        inputs=(X, Y, NEGATIVES, HARD_NEGATIVES, IDS),
    ),
    "info_nce, both directions, separate": Case(
        info_nce_with("negatives", directions=BOTH_DIRECTIONS, partition="per_direction"), inputs=(X, Y, NEGATIVES)
    ),
    "info_nce, keys' queries": Case(info_nce_with(directions=BOTH_DIRECTIONS[1:])),
}


def mesh_of(devices: int, kind: str = "explicit", axes: tuple[str, ...] = ("data",)) -> Mesh:
    """Return a mesh of the first devices; a second axis has two of them."""
    shape = (devices,) if len(axes) == 1 else (devices // 2, 2)
    return jax.make_mesh(shape, axes, axis_types=(KINDS[kind],) * len(axes), devices=jax.devices()[:devices])


def settings_of(rows: list[str], whole: list[str]) -> list[tuple[str, int, str, str]]:
    """Return the settings to run for each row of a table; rows in `whole` run on more settings."""
    given = []
    for turn, name in enumerate(rows):
        settings = SETTINGS if EVERYTHING else [SETTINGS[5 * turn % len(SETTINGS)]]
        if name in whole and not EVERYTHING:
            of_kind = [[setting for setting in SETTINGS if setting[1] == kind] for kind in KINDS]
            settings = [pair[(turn + at) % 2] for at, pair in enumerate(zip(*of_kind, strict=True))]
        given += [(name, *setting) for setting in settings]
    return given


def assert_close(found: list[Any], expected: list[Any], value: float = 1e-12, gradient: float = 1e-10) -> None:
    """Compare a loss and its gradients; a gradient's error is relative to its largest entry."""
    assert len(found) == len(expected)
    for at, (x, y) in enumerate(zip(found, expected, strict=True)):
        error = np.abs(x - y).max(initial=0) / max(1.0, np.abs(y).max(initial=0))
        assert error <= (gradient if at else value), (at, error)


def local_loss(x: Any, y: Any, scale: Any, exchange: Any = "ring") -> Any:
    """Return CLIP's loss of a device's rows, on an axis "data"."""
    return wbj.clip_loss_local(x, y, scale, axis_name="data", exchange=exchange, tile=3)


def encoder(params: Any, x: Any, key: Any = None) -> Any:
    """Encode by two layers, with dropout between them if a key is given."""
    h = jnp.tanh(x @ params["w"])
    if key is not None:
        h = h * jax.random.bernoulli(key, 0.5, h.shape)
    return h @ params["v"]


def towers(rows: int = 24, dtype: Any = np.float64) -> tuple[dict[str, Any], Any, Any]:
    """Return parameters of `encoder`, and two batches for it."""
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(5, 16)), "v": random.normal(size=(16, 6))}
    x, y = (jnp.asarray(random.normal(size=(rows, 5)), dtype) for _ in "xy")
    return jax.tree.map(lambda w: jnp.asarray(w, dtype), params), x, y


COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def computations(text: str) -> dict[str, str]:
    """Return the functions of a compiled program, bodies of loops included."""
    found = re.findall(r"^(?:ENTRY )?%?(\S+) \([^\n]*\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def compiled(loss: Callable[..., Any], *arrays: Any) -> Any:
    """Compile a loss and its gradient with respect to the first array."""
    return jax.jit(jax.value_and_grad(loss)).lower(*arrays).compile()


def temporary_bytes(loss: Callable[..., Any], *arrays: Any) -> int:
    """Return the bytes that a loss and its gradient allocate on each device beyond inputs and outputs."""
    return compiled(loss, *arrays).memory_analysis().temp_size_in_bytes


def placed(mesh: Mesh, *shape: int) -> Any:
    """Return zeros whose rows are split over the mesh."""
    return jax.device_put(jnp.zeros(shape, jnp.float32), jax.NamedSharding(mesh, jax.P("data")))


def as_jax(x: Any) -> Any:
    return jnp.asarray(x.detach().numpy()) if isinstance(x, Tensor) else x


def as_module(of: Any = wbj, **settings: Any) -> SimpleNamespace:
    """Return wholebatch.jax's functions with common settings; clip_loss ignores a bias."""

    def function(name: str) -> Callable[..., Any]:
        def loss(*args: Any, **options: Any) -> Any:
            if name == "clip_loss":
                options.pop("logit_bias", None)
            return getattr(of, name)(*args, **options, **settings)

        return loss

    return SimpleNamespace(**{name: function(name) for name in of.__all__ if name.endswith("_loss")})


def values_and_gradients(
    case: Case,
    inputs: list[Tensor],
    scale: float,
    bias: float,
    *,
    place: Callable[[Any], Any] = as_jax,
    out: Any = None,
    functions: Any = None,
    **settings: Any,
) -> list[Any]:
    """Return JAX's loss, and its gradients with respect to the differentiable inputs, the scale and the bias.

    Args:
        case: a row of the table.
        inputs: its arrays.
        scale: the scale of the logits.
        bias: their bias.
        place: converts an array to JAX.
        out: the sharding of the results.
        functions: replaces the functions of wholebatch.jax.
        settings: the settings of the function.
    """
    functions, arrays = functions or as_module(**settings), [place(x) for x in inputs]

    def loss(differentiated: list[Any], scale: Any, bias: Any, arrays: list[Any]) -> Any:
        given = list(arrays)
        for position, x in zip(case.differentiable, differentiated, strict=True):
            given[position] = x
        return case.call(functions, *given, scale, bias)

    differentiated = [arrays[position] for position in case.differentiable]
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), out_shardings=out)(
        differentiated, jnp.asarray(scale), jnp.asarray(bias), arrays
    )
    return [
        np.asarray(x) for x in (value, *gradients[0], *gradients[1:][: case.has_scale], *gradients[2:][: case.has_bias])
    ]


def shards(case: Case, rows: int, devices: int, *, seed: int = 0) -> list[Tensor]:
    """Return a batch of `rows` rows, with the table's other inputs for `devices` ranks."""
    counts = tuple(rows // devices + (rank < rows % devices) for rank in range(devices))
    return whole_batch(case, counts, seed=seed)


def by_torch(functions: Any, case: Case, inputs: list[Tensor], scale: float, bias: float) -> list[Any]:
    """Return PyTorch's loss and gradients, in one process."""
    leaves = [x.detach().clone() for x in inputs]
    differentiated = [leaves[position].requires_grad_() for position in case.differentiable]
    scalars = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (scale, bias)]
    loss = case.call(functions, *leaves, *scalars)
    of = differentiated + scalars[:1] * case.has_scale + scalars[1:] * case.has_bias
    return [x.detach().numpy() for x in (loss, *torch.autograd.grad(loss, of))]


def by_reference(case: Case, inputs: list[Tensor], scale: float, bias: float) -> list[Any]:
    """Return the loss and gradients of the reference implementation."""
    return by_torch(wb.reference, case, inputs, scale, bias)

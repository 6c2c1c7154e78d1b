"""wholebatch.jax beside common JAX code, on a CPU: time of value and gradient, and temporary memory.

The memory is the compiler's figure. Each loss is first compared with the dense one; times are medians of rounds in
which all take turns. The lower bound for a loss in tiles, its products and nothing else, is timed beside them.

    python benchmarks/jax_losses.py        # `pip install -e '.[jax,dev]'`; about ten minutes on two cores, 4 GB
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import wholebatch.jax as wbj
from wholebatch.bench.records import about

RESULTS = Path(__file__).parent / "results" / "jax.json"
PAGE = Path(__file__).parent.parent / "docs" / "jax.md"
SCALE = 20.0


def dense_clip(x: Any, y: Any, scale: Any) -> Any:
    """Return CLIP's loss by plain code: S is in memory, and is computed once."""
    logits = scale * (x @ y.T)
    local = jnp.diagonal(logits)
    rows, cols = (jax.nn.logsumexp(logits, axis) - local for axis in (1, 0))
    return (rows.mean() + cols.mean()) / 2


def clip_of_two_matrices(x: Any, y: Any, scale: Any) -> Any:
    """Return CLIP's loss as published code has it: logits of images, and logits of texts."""
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(scale * (a @ b.T), jnp.arange(len(a))).mean()
        for a, b in ((x, y), (y, x))
    ]
    return sum(losses) / 2


def dense_siglip(x: Any, y: Any, scale: Any) -> Any:
    logits = scale * (x @ y.T) - 10
    return jax.nn.softplus(-logits * (2 * jnp.eye(len(x)) - 1)).sum() / len(x)


def optax_nt_xent(x: Any, y: Any, scale: Any) -> Any:
    labels = jnp.tile(jnp.arange(len(x)), 2)
    return optax.losses.ntxent(jnp.concatenate([x, y]), labels, temperature=1 / scale)


def dense_nt_xent(x: Any, y: Any, scale: Any) -> Any:
    z = jnp.concatenate([x, y])
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    logits = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, scale * (z @ z.T))
    other = jnp.roll(jnp.arange(len(z)), len(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, other).mean()


def products_of_tiles(x: Any, y: Any, *, twice: bool, tile: int = 1024) -> Any:
    """Compute S = X Y^T, S Y and S^T X in tiles, without exponentials; if `twice`, compute S once more before."""
    at = jnp.asarray(np.indices((len(x) // tile, len(y) // tile)).reshape(2, -1).T) * tile

    def cut(of: Any, start: Any) -> Any:
        return lax.dynamic_slice_in_dim(of, start, tile)

    def forward(total: Any, start: Any) -> Any:
        return total + (cut(x, start[0]) @ cut(y, start[1]).T).max(), None

    def backward(sums: Any, start: Any) -> Any:
        a, b = cut(x, start[0]), cut(y, start[1])
        s = a @ b.T
        parts = zip(sums, start, (s @ b, s.T @ a), strict=True)
        return tuple(lax.dynamic_update_slice_in_dim(of, cut(of, i) + part, i, 0) for of, i, part in parts), None

    seen = lax.scan(forward, jnp.float32(0), at)[0] if twice else 0
    return seen, *lax.scan(backward, (jnp.zeros_like(x), jnp.zeros_like(y)), at)[0]


CASES: dict[str, dict[str, Any]] = {
    "CLIP": {
        "sizes": [(4096, 512), (8192, 512)],
        "losses": {
            "dense": dense_clip,
            "wholebatch": partial(wbj.clip_loss, memory="flat"),
            "wholebatch, X Y^T kept in tiles": partial(wbj.clip_loss, memory=2**28, tile=1024),
            "wholebatch, default": wbj.clip_loss,
            "two matrices, optax's cross-entropy": clip_of_two_matrices,
        },
    },
    "SigLIP": {
        "sizes": [(8192, 512)],
        "losses": {
            "dense": dense_siglip,
            "wholebatch": lambda x, y, scale: wbj.siglip_loss(x, y, scale, -10.0, memory="flat"),
            "wholebatch, default": lambda x, y, scale: wbj.siglip_loss(x, y, scale, -10.0),
        },
    },
    "NT-Xent": {
        "sizes": [(512, 256), (4096, 256)],
        "losses": {
            "dense": dense_nt_xent,
            "wholebatch": lambda x, y, scale: wbj.nt_xent_loss(x, y, temperature=1 / scale, memory="flat"),
            "wholebatch, half of Z Z^T kept in tiles": lambda x, y, scale: wbj.nt_xent_loss(
                x, y, temperature=1 / scale, memory=2**28, tile=1024
            ),
            "wholebatch, default": lambda x, y, scale: wbj.nt_xent_loss(x, y, temperature=1 / scale),
            "optax.losses.ntxent": optax_nt_xent,
        },
    },
}
PRODUCT = "X Y^T"
TOO_LARGE = {("optax.losses.ntxent", 4096)}  # 3 N N d floats: 206 GB


def features(rows: int, d: int) -> list[Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, d), dtype=np.float32)
    y = x + random.standard_normal((rows, d), dtype=np.float32)
    return [jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True)) for z in (x, y)]


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Return the median time of each, after all have run once."""
    jax.block_until_ready([call() for call in calls.values()])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - began)
    return {name: median(of) for name, of in times.items()}


def compare(found: Any, exact: Any, what: str) -> None:
    for a, of in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        error = float(jnp.abs(a - of).max() / jnp.abs(of).max())
        assert error < 1e-3, (what, error)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for loss, case in CASES.items():
        for b, d in case["sizes"]:
            x, y = features(b, d)
            steps: dict[str, Any] = {}
            exact: Any = None
            for name, function in case["losses"].items():
                if (name, b) in TOO_LARGE:
                    continue
                steps[name] = jax.jit(jax.value_and_grad(function, (0, 1))).lower(x, y, SCALE).compile()
                found = steps[name](x, y, SCALE)
                exact = exact or found  # the first is the dense one
                compare(found, exact, f"{loss}, {name}")
            calls = {name: partial(step, x, y, SCALE) for name, step in steps.items()}
            calls[PRODUCT] = partial(jax.jit(lambda x, y: x @ y.T), x, y)
            if loss == "CLIP":
                for count, twice in ((4, True), (3, False)):
                    step = jax.jit(partial(products_of_tiles, twice=twice)).lower(x, y).compile()
                    compare(step(x, y)[1:], (x @ (y.T @ y), y @ (x.T @ x)), "products of tiles")
                    steps[name := f"no loss: {count} products of tiles, no more"] = step
                    calls[name] = partial(step, x, y)
            times = in_turns(calls)
            for name, step in steps.items():
                row = {
                    "loss": loss,
                    "B": b,
                    "d": d,
                    "implementation": name,
                    "seconds": times[name],
                    "products": times[PRODUCT],
                    "dense": times["dense"],
                    "temporary_mib": step.memory_analysis().temp_size_in_bytes / 2**20,
                }
                rows.append(row)
                print(
                    f"{loss:8} {b:5} x {d:3} {name:42} {times[name]:8.3f} s = {times[name] / times['dense']:5.2f} "
                    f"x dense, {times[name] / times[PRODUCT]:5.2f} X Y^T   {row['temporary_mib']:8.1f} MiB",
                    flush=True,
                )
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}
    RESULTS.write_text(json.dumps({"about": about() | versions, "rows": rows}, indent=1) + "\n")
    table = ["| loss | B, d | | seconds | x dense | products | MiB |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = row["loss"], f"{row['B']}, {row['d']}", row["implementation"], f"{row['seconds']:.3f}"
        ratios = f"{row['seconds'] / row['dense']:.2f} | {row['seconds'] / row['products']:.2f}"
        table.append(f"| {' | '.join(cells)} | {ratios} | {row['temporary_mib']:.0f} |")
    text, count = re.subn(
        r"(<!-- jax: .*?-->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(table) + "\n" + found[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1, f"{PAGE} has {count} places for the table"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""wholebatch.jax beside what JAX users write today, on a CPU: time of value and gradient, and temporary memory.

The memory is the compiler's own figure. Each loss is first held against the dense one; times are medians of one run.

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

import wholebatch.jax as wbj
from wholebatch.bench.records import about

RESULTS = Path(__file__).parent / "results" / "jax.json"
PAGE = Path(__file__).parent.parent / "docs" / "jax.md"
SCALE = 20.0


def dense_clip(x: Any, y: Any, scale: Any) -> Any:
    """As one writes it: S stands in memory, and is computed once."""
    logits = scale * (x @ y.T)
    own = jnp.diagonal(logits)
    rows, cols = (jax.nn.logsumexp(logits, axis) - own for axis in (1, 0))
    return (rows.mean() + cols.mean()) / 2


def clip_of_two_matrices(x: Any, y: Any, scale: Any) -> Any:
    """As published code has it: logits of images, and logits of texts."""
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


CASES: dict[str, dict[str, Any]] = {
    "CLIP": {
        "sizes": [(4096, 512), (8192, 512)],
        "wholebatch": wbj.clip_loss,
        "wholebatch, X Y^T kept": partial(wbj.clip_loss, memory=2**28),
        "dense": dense_clip,
        "two matrices, optax's cross-entropy": clip_of_two_matrices,
    },
    "SigLIP": {
        "sizes": [(8192, 512)],
        "wholebatch": lambda x, y, scale: wbj.siglip_loss(x, y, scale, -10.0),
        "dense": dense_siglip,
    },
    "NT-Xent": {
        "sizes": [(512, 256), (4096, 256)],
        "wholebatch": lambda x, y, scale: wbj.nt_xent_loss(x, y, temperature=1 / scale),
        "wholebatch, half of Z Z^T kept": lambda x, y, scale: wbj.nt_xent_loss(
            x, y, temperature=1 / scale, memory=2**28
        ),
        "dense": dense_nt_xent,
        "optax.losses.ntxent": optax_nt_xent,
    },
}
TOO_LARGE = {("optax.losses.ntxent", 4096)}  # 3 N N d floats: 206 GB


def features(rows: int, d: int) -> list[Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, d), dtype=np.float32)
    y = x + random.standard_normal((rows, d), dtype=np.float32)
    return [jnp.asarray(z / np.linalg.norm(z, axis=1, keepdims=True)) for z in (x, y)]


def seconds(call: Callable[[], Any], runs: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for loss, case in CASES.items():
        candidates = {name: of for name, of in case.items() if name != "sizes"}
        for b, d in case["sizes"]:
            x, y = features(b, d)
            product = seconds(lambda x=x, y=y: jax.jit(lambda x, y: x @ y.T)(x, y), 5)  # type: ignore[misc]
            exact: list[Any] | None = None
            for name, function in sorted(candidates.items(), key=lambda of: of[0] != "dense"):
                if (name, b) in TOO_LARGE:
                    continue
                step = jax.jit(jax.value_and_grad(function, (0, 1))).lower(x, y, SCALE).compile()
                found = jax.tree.leaves(step(x, y, SCALE))
                exact = exact or found
                for a, of in zip(found, exact, strict=True):
                    error = float(jnp.abs(a - of).max() / jnp.abs(of).max())
                    assert error < 1e-3, (loss, name, error)
                row = {
                    "loss": loss,
                    "B": b,
                    "d": d,
                    "implementation": name,
                    "seconds": seconds(lambda step=step, x=x, y=y: step(x, y, SCALE), 5),  # type: ignore[misc]
                    "products": product,
                    "temporary_mib": step.memory_analysis().temp_size_in_bytes / 2**20,
                }
                rows.append(row)
                print(
                    f"{loss:8} B = {b:5} d = {d:4} {name:36} {row['seconds']:8.3f} s "
                    f"= {row['seconds'] / product:5.2f} products X Y^T   {row['temporary_mib']:8.1f} MiB",
                    flush=True,
                )
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}
    RESULTS.write_text(json.dumps({"about": about() | versions, "rows": rows}, indent=1) + "\n")
    table = ["| loss | B, d | | seconds | products | MiB |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = row["loss"], f"{row['B']}, {row['d']}", row["implementation"], f"{row['seconds']:.3f}"
        table.append(f"| {' | '.join(cells)} | {row['seconds'] / row['products']:.2f} | {row['temporary_mib']:.0f} |")
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

"""One of several JAX processes that share a batch, as test_jax_processes starts them: jax_process.py RANK SIZE PORT.

Each process holds only the rows of its devices, as on a cluster. Results are compared with the dense reference,
which each process computes on the whole batch; for an encoder in chunks and a sample of classes, with one device.
"""

import sys
from functools import partial

import jax

rank, size, port = map(int, sys.argv[1:])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, initialization_timeout=60)

import numpy as np  # noqa: E402
from jax_cases import (  # noqa: E402
    CASES,
    EVERYTHING,
    SCALE,
    as_jax,
    assert_close,
    by_reference,
    encoder,
    mesh_of,
    shards,
    towers,
    values_and_gradients,
)
from loss_cases import BIAS  # noqa: E402

import wholebatch.jax as wbj  # noqa: E402

mesh = mesh_of(jax.device_count(), "auto")
everywhere, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
assert len(jax.local_devices()) < jax.device_count()


def local_rows(x):
    """Return a global array; this process provides the rows of its devices."""
    x = np.asarray(as_jax(x))
    if len(x) % jax.device_count():
        return x  # replicated
    return jax.make_array_from_callback(x.shape, split, lambda index: x[index])


EXCHANGES = ("gather", "ring")
ROWS = {"clip, ids, weights": 12, "info_nce, few negatives": 12, "nt_xent": 12, "sup_con": 12, "siglip": 12, "clip": 7}


def exchanges(at):
    """Return one setting by turns, or all of them if everything runs."""
    return EXCHANGES if EVERYTHING else EXCHANGES[(at + size) % 2 :][:1]


for at, (name, rows) in enumerate(ROWS.items()):
    for exchange in exchanges(at):
        case = CASES[name]
        inputs = shards(case, rows, 4)
        settings = {"place": local_rows, "out": everywhere, "mesh": mesh, "exchange": exchange, "tile": 3}
        assert_close(
            values_and_gradients(case, inputs, SCALE, BIAS, **settings), by_reference(case, inputs, SCALE, BIAS)
        )

random = np.random.default_rng(1)
params, x, _ = towers()
centers, labels = random.normal(size=(12, 6)), random.integers(0, 12, 24)


def loss(params, x, labels, centers, encode, **settings):
    """Return PartialFC's loss of an encoder's embeddings."""
    return wbj.partial_fc_loss(encode(params, x), labels, centers, sample_rate=0.5, key=jax.random.key(0), **settings)


whole = jax.value_and_grad(partial(loss, encode=encoder), (0, 1, 3))(
    params, x, labels, centers
)  # by this process alone
encode = wbj.chunked(encoder, chunk_size=2, mesh=mesh)
for exchange in exchanges(len(ROWS)):
    of_all = partial(loss, encode=encode, mesh=mesh, exchange=exchange)
    found = jax.jit(jax.value_and_grad(of_all, (0, 1, 3)), out_shardings=everywhere)(
        jax.device_put(params, everywhere), *map(local_rows, (x, labels, centers))
    )
    assert_close(*([np.asarray(z) for z in jax.tree.leaves(of)] for of in (found, whole)))

print("exact", flush=True)

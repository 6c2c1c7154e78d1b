"""Mistakes with wholebatch.jax raise while the function is traced, with the accepted and the given value."""

from dataclasses import dataclass

import numpy as np
import pytest

import wholebatch as wb

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
from jax_cases import encoder, local_loss, mesh_of  # noqa: E402

import wholebatch.jax as wbj  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")

FEATURES = jnp.ones((6, 4))


@dataclass
class Unhashable:
    """A mutable margin."""

    s: float = 64.0

    def __call__(self, angles, norms):
        return jnp.cos(angles)


MISTAKES = {
    "axis": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=mesh_of(2), axis="batch"),
        "'batch'; the mesh has 'data'",
    ),
    "rows": (
        lambda: wbj.clip_loss(FEATURES, FEATURES[:5], 1.0),
        r"text_features.*each row of image_features.*\(5, 4\)",
    ),
    "width": (lambda: wbj.clip_loss(FEATURES, FEATURES[:, :3], 1.0), r"same embedding size, got \(6, 4\) and \(6, 3\)"),
    "not a matrix": (lambda: wbj.clip_loss(FEATURES[0], FEATURES, 1.0), r"image_features must have shape.*got \(4,\)"),
    "no rows": (lambda: wbj.clip_loss(FEATURES[:0], FEATURES[:0], 1.0), r"neither of them 0; got \(0, 4\)"),
    "dtype": (lambda: wbj.clip_loss(FEATURES, FEATURES.astype(jnp.bfloat16), 1.0), "same dtype, got.*bfloat16"),
    "integers": (lambda: wbj.clip_loss(FEATURES.astype(int), FEATURES.astype(int), 1.0), "floating point, got int"),
    "scale": (lambda: wbj.clip_loss(FEATURES, FEATURES, jnp.ones(3)), r"logit_scale must be a number.*\(3,\)"),
    "ids": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.ones(6)), "ids must be integers, got float"),
    "ids of others": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.arange(5)),
        r"ids must have one row.*\(5,\)",
    ),
    "ids, a matrix": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, ids=jnp.ones((6, 1), int)),
        r"shape \(rows,\), got",
    ),
    "equal_ids": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, equal_ids="kept"),
        "'positive', 'excluded'; got 'kept'",
    ),
    "smoothing": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, label_smoothing=2.0), r"within \[0, 1\].*got 2.0"),
    "reduction": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, reduction="max"), "'none'; got 'max'"),
    "exchange": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, exchange="root"), "'ring'; got 'root'"),
    "tile": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, tile=0), "tile must be an integer >= 1 or None, got 0"),
    "tile, yes or no": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, tile=True), "tile must be an integer.*got True"),
    "memory, yes or no": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, memory=True),
        "'auto', 'flat' or a number of bytes >= 0, got True",
    ),
    "memory": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, memory=-1),
        "'auto', 'flat' or a number of bytes >= 0, got -1",
    ),
    "temperature": (
        lambda: wbj.nt_xent_loss(FEATURES, FEATURES, temperature=0.0),
        "temperature must be positive, got 0.0",
    ),
    "temperature, an array": (
        lambda: wbj.sup_con_loss(FEATURES, jnp.zeros(6, int), temperature=np.float32(-1)),
        "temperature must be positive, got -1",
    ),
    "weights": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, weights=[1, 1, 1, -0.5, 1, 1]),
        "weights must be finite and not negative, got -0.5",
    ),
    "weights of views": (
        lambda: wbj.sup_con_loss(FEATURES[:, None], np.zeros(6, int), weights=np.full((6, 1), np.nan)),
        "weights must be finite and not negative, got nan",
    ),
    "one-hot labels": (
        lambda: wbj.sup_con_loss(FEATURES, jnp.eye(6, dtype=int)),
        r"labels must have shape \(rows,\), got \(6, 6\); for one-hot rows pass the argmax",
    ),
    "centers": (
        lambda: wbj.partial_fc_loss(FEATURES, np.zeros(6, int), FEATURES[:, :3]),
        r"embeddings and centers must have the same embedding size, got \(6, 4\) and \(6, 3\); project both",
    ),
    "labels": (lambda: wbj.sup_con_loss(FEATURES, jnp.ones(6)), "labels must be integers, got float"),
    "keys": (lambda: wbj.info_nce_loss(FEATURES, FEATURES[:5], logit_scale=1.0), "at least as many rows.*5 and 6"),
    "hard negatives": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, hard_negatives=FEATURES),
        r"hard_negatives must have shape \(6, h, 4\), got \(6, 4\)",
    ),
    "ids of nothing": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, negative_ids=jnp.arange(2)),
        "negative_ids were given without negatives",
    ),
    "ids with nothing to be compared with": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, negatives=FEATURES, negative_ids=jnp.arange(6)),
        "negative_ids have nothing to be compared with",
    ),
    "no direction": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, directions=()),
        "directions must name one of 'query_to_key', 'key_to_query', or both; got \\(\\)",
    ),
    "the same direction twice": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, directions=["key_to_query"] * 2),
        "'key_to_query', or both; got",
    ),
    "ids of dtypes that have no common one": (
        lambda: wbj.info_nce_loss(
            FEATURES, FEATURES, logit_scale=1.0, query_ids=np.arange(6), key_ids=np.arange(6, dtype=np.uint64)
        ),
        "ids must have dtypes of which one holds the others, got query_ids int64, key_ids uint64",
    ),
    "complex weights": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, weights=[1j] * 6), "weights must be real, got"),
    "endless weights": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, weights=[np.inf] * 6),
        "weights must be finite and not negative, got inf",
    ),
    "axis, none": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, axis=None), "axis must be a name or.*got None"),
    "axis_name, none": (
        lambda: wbj.clip_loss_local(FEATURES, FEATURES, 1.0, axis_name=None),
        "axis_name must be a name or several names, got None",
    ),
    "axis_name, twice": (
        lambda: wbj.clip_loss_local(FEATURES, FEATURES, 1.0, axis_name=("data", "data")),
        r"or several different ones, got \('data', 'data'\)",
    ),
    "temperature, a list": (
        lambda: wbj.nt_xent_loss(FEATURES, FEATURES, temperature=[0.1]),
        r"temperature must be a number or an array of shape \(\), got \[0.1\]",
    ),
    "a margin that cannot be hashed": (
        lambda: wbj.partial_fc_loss(FEATURES, np.zeros(6, int), FEATURES, margin=Unhashable()),
        "margin must be hashable.*frozen=True",
    ),
    "ignore_index of labels": (
        lambda: wbj.sup_con_loss(FEATURES, np.zeros(6, int), ignore_index=0.5),
        "ignore_index must be an integer, got 0.5",
    ),
    "ignore_index": (
        lambda: wbj.partial_fc_loss(FEATURES, np.zeros(6, int), FEATURES, ignore_index=0.5),
        "ignore_index must be an integer, got 0.5",
    ),
    "chunk_size, yes or no": (lambda: wbj.chunked(encoder, chunk_size=True), "one of chunk_size and num_chunks"),
    "an axis of chunks that there is not": (
        lambda: wbj.tree_chunk(FEATURES, 2, axis=2),
        r"axis must be within \[-2, 2\) for an array of 2 axes, got 2",
    ),
    "chunks of a number": (lambda: wbj.tree_chunk(jnp.ones(()), 2), r"within \[0, 0\) for an array of 0 axes, got 0"),
    "chunks that are none": (lambda: wbj.tree_unchunk(FEATURES, axis=5), r"within \[-1, 1\).*got 5"),
    "parameters that are split as the batch is": (
        lambda: wbj.chunked(encoder, chunk_size=2, mesh=mesh_of(2))(
            jax.device_put({"w": jnp.ones((4, 2))}, jax.NamedSharding(mesh_of(2), jax.P("data"))), FEATURES
        ),
        "parameters are split over 'data', as the batch is: with per_device=False",
    ),
    "direction": (
        lambda: wbj.info_nce_loss(FEATURES, FEATURES, logit_scale=1.0, directions="key_to_key"),
        "'key_to_query'; got 'key_to_key'",
    ),
    "sample": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, sample_rate=0.5),
        "sample_rate=0.5 needs key=",
    ),
    "margin": (lambda: wbj.ArcFace(s=0.0), "s and m1 must be positive, got s=0.0"),
    "chunks": (lambda: wbj.chunked(encoder), "one of chunk_size and num_chunks"),
    "chunks of a mesh": (
        lambda: wbj.chunked(encoder, chunk_size=2, mesh=mesh_of(2), axis="batch")({}, FEATURES),
        "'batch'; the mesh has 'data'",
    ),
    "rows of a batch": (
        lambda: wbj.chunked(encoder, chunk_size=2)({}, [FEATURES, FEATURES[:5]]),
        r"same number of rows.*\[\(5,\), \(6,\)\]",
    ),
    "uneven chunks": (lambda: wbj.tree_chunk(FEATURES, 4), "6 rows do not divide into 4 chunks"),
    "global arrays inside of a shard_map": (
        lambda: jax.shard_map(
            lambda x: wbj.clip_loss(x, x, 1.0), mesh=mesh_of(2), in_specs=jax.P("data"), out_specs=jax.P()
        )(jax.device_put(FEATURES, jax.NamedSharding(mesh_of(2), jax.P("data")))),
        "inside of a jax.shard_map over 'data'.*`_local`",
    ),
    "the same with its mesh": (
        lambda: jax.shard_map(
            lambda x: wbj.clip_loss(x, x, 1.0, mesh=mesh_of(2)), mesh=mesh_of(2), in_specs=jax.P(), out_specs=jax.P()
        )(FEATURES),
        "inside of a jax.shard_map over 'data'.*`_local`",
    ),
    "split, without a mesh": (
        lambda: wbj.clip_loss(*[jax.device_put(FEATURES, jax.NamedSharding(mesh_of(2), jax.P("data")))] * 2, 1.0),
        "image_features is split over 'data', and no mesh is given: pass mesh=",
    ),
    "two axes of one name": (
        lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=mesh_of(2), axis=["data", "data"]),
        "'data', 'data'; the mesh has 'data'",
    ),
    "no mesh": (lambda: wbj.clip_loss(FEATURES, FEATURES, 1.0, mesh=jax.devices()), "mesh must be a jax.*got list"),
    "nothing": (lambda: wbj.clip_loss(FEATURES, None, 1.0), "text_features must be an array, got None"),
    "no labels": (lambda: wbj.sup_con_loss(FEATURES, None), "labels must be an array, got None"),
    "no scale": (lambda: wbj.clip_loss(FEATURES, FEATURES, None), "logit_scale must be a number.*got None"),
    "hard negatives' ids": (
        lambda: wbj.info_nce_loss(
            FEATURES,
            FEATURES,
            logit_scale=1.0,
            query_ids=jnp.arange(6),
            hard_negatives=FEATURES[:, None],
            hard_negative_ids=jnp.arange(6),
        ),
        r"hard_negative_ids must have one id for each of hard_negatives, \(6, 1\); got \(6,\)",
    ),
    "a margin of torch": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, margin=wb.ArcFace()),
        "margin must be such as wholebatch.jax.ArcFace",
    ),
    "no key": (
        lambda: wbj.partial_fc_loss(FEATURES, jnp.zeros(6, int), FEATURES, sample_rate=0.5, key=5),
        "one key of jax.random.key",
    ),
    "an encoder that loses rows": (
        lambda: wbj.chunked(lambda _, x: x[0], chunk_size=2)({}, FEATURES),
        r"a row for each of 2 examples, got \(4,\)",
    ),
    "axis_name": (
        lambda: local_loss(FEATURES, FEATURES, 1.0),
        "axis_name must name an axis.*got 'data'.*without `_local`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_while_tracing(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_ids_that_jax_would_truncate():
    with jax.enable_x64(False):
        for ids in (np.arange(6) * 2**32, [2**31] * 6):
            with pytest.raises(ValueError, match=r"ids must fit into int32.*renumber them"):
                wbj.clip_loss(np.eye(6), np.eye(6), 1.0, ids=ids)


def test_a_traced_temperature_is_accepted():
    assert jax.eval_shape(lambda t: wbj.nt_xent_loss(FEATURES, FEATURES, temperature=t), 0.1).shape == ()

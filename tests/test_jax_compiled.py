"""Memory and collectives of wholebatch.jax, from the compiler's report."""

import re
from collections import Counter

import pytest

jax = pytest.importorskip("jax")  # JAX needs Python 3.11
import jax.numpy as jnp  # noqa: E402
from jax_cases import COLLECTIVE, compiled, computations, mesh_of, placed, temporary_bytes  # noqa: E402

import wholebatch.jax as wbj  # noqa: E402
from wholebatch.jax import options  # noqa: E402

pytestmark = pytest.mark.usefixtures("float64")


def losses(mesh, **settings):
    """Return the losses as functions of the first tower; d = 32."""
    return {
        "clip": lambda x: wbj.clip_loss(x, x, 10.0, mesh=mesh, **settings),
        "info_nce": lambda x: wbj.info_nce_loss(x, x, logit_scale=10.0, negatives=x, mesh=mesh, **settings),
        "nt_xent": lambda x: wbj.nt_xent_loss(x, x, mesh=mesh, **settings),
        "siglip": lambda x: wbj.siglip_loss(x, x, 10.0, -5.0, mesh=mesh, **settings),
        "sup_con": lambda x: wbj.sup_con_loss(x, jnp.arange(len(x), dtype=jnp.int32) // 2, mesh=mesh, **settings),
        "partial_fc": lambda x: wbj.partial_fc_loss(x, jnp.arange(len(x)), x, mesh=mesh, **settings),
    }


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", losses(None))
def test_temporary_memory_is_linear_in_rows(name, exchange):
    """Four times the rows take four times the memory; a dense loss takes 16 times as much."""
    mesh = mesh_of(8, "auto")
    loss = losses(mesh, exchange=exchange, tile=32, memory="flat")[name]
    small, large = (temporary_bytes(loss, placed(mesh, 8 * b, 32)) for b in (128, 512))
    assert large < 4.2 * small


def test_kept_products_take_the_memory_that_is_given():
    mesh = mesh_of(2, "auto")
    flat, half, all_of_them = (
        temporary_bytes(losses(mesh, exchange="gather", tile=32, memory=memory)["clip"], placed(mesh, 512, 32))
        for memory in ("flat", 2**16 * 2, 2**20)
    )
    assert half - flat == pytest.approx(2**17, rel=0.1)
    assert all_of_them - flat == pytest.approx(256 * 512 * 4, rel=0.1)


def program(name, x, **settings):
    """Return the products' types in the program of a loss and its gradient, and the steps of its loops."""
    traced = jax.jit(jax.value_and_grad(losses(None, **settings)[name])).trace(x)
    text = traced.lower().as_text()
    products = re.findall(r"dot_general .*: \((tensor<\S+>), (tensor<\S+>)\) -> (tensor<\S+>)", text)
    return [[kind.rstrip(">").split("x")[-1] for kind in product] for product in products], steps(traced.jaxpr.jaxpr)


def steps(jaxpr):
    """Return the number of steps of each scan in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.append(equation.params["length"])
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += steps(inner) if hasattr(inner, "eqns") else []
    return found


# X Y^T once, and two products of dS, of which the compiler drops one where S is symmetric and in one piece.
PRODUCTS = {"clip": 3, "info_nce": 3, "nt_xent": 3, "siglip": 3, "sup_con": 3, "partial_fc": 3}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_batch_that_fits_is_computed_in_one_piece(name):
    """The program has no loop, and X Y^T once; a flat one computes it twice, but SigLIP's, in loops."""
    x = jnp.zeros((2048, 32), jnp.float32)
    products, loops = program(name, x)
    assert (len(products), loops) == (PRODUCTS[name], [])
    products, loops = program(name, x, memory="flat")
    assert len(products) == PRODUCTS[name] + (name != "siglip")
    assert loops


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_larger_batch_takes_few_steps(monkeypatch, name):
    """Tiles have a quarter of the memory, which holds the products of the first ones."""
    b, memory = 96, 96 * 96
    monkeypatch.setattr(options, "_AUTO_BYTES", memory)
    monkeypatch.setattr(options, "_FLAT_TILE", 2)
    side = int((memory / 4) ** 0.5 / 2)
    _, loops = program(name, jnp.zeros((b, 32), jnp.float32))
    columns = 2 * b if name in ("info_nce", "nt_xent") else b
    rows = 2 * b if name == "nt_xent" else b
    assert loops
    assert max(loops) <= -(-rows // side) * -(-columns // side)
    assert sum(loops) <= 2 * -(-rows // side) * -(-columns // side), "forward and backward"


@pytest.mark.parametrize("memory", ["auto", "flat"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_features_are_multiplied_as_they_are(name, memory):
    products, _ = program(name, jnp.zeros((2048, 32), jnp.bfloat16), memory=memory)
    assert {tuple(product) for product in products} == {("bf16", "bf16", "f32")}
    products, _ = program(name, jnp.zeros((2048, 32), jnp.float32), memory=memory)
    assert {tuple(product) for product in products} == {("f32", "f32", "f32")}


def test_a_dense_loss_is_not_flat():
    mesh = mesh_of(8, "auto")

    def dense(x):
        logits = 10 * x @ x.T
        return (jax.nn.logsumexp(logits, 1) + jax.nn.logsumexp(logits, 0) - 2 * jnp.diagonal(logits)).mean() / 2

    small, large = (temporary_bytes(dense, placed(mesh, 8 * b, 32)) for b in (128, 512))
    assert large > 10 * small


def collectives(loss, *arrays):
    """Count the collectives of each kind in the program, and list the iterations of loops that have some."""
    text = compiled(loss, *arrays).as_text()
    bodies = computations(text)
    loops = re.findall(r"body=%?([^\s,]+).*?known_trip_count\":\{\"n\":\"(\d+)\"", text)
    return dict(Counter(COLLECTIVE.findall(text))), {
        int(turns) for body, turns in loops if COLLECTIVE.search(bodies[body])
    }


# Gather: Y and codes, and in the backward pass lse and cotangents; maxima of columns and the loss, and scalars'
# gradients; sums of columns, and dY. Ring: Y, codes and sums, in the first step, in the middle, at the end, and to the
# owner. Rows that are normalized inside travel with their norms. PartialFC also fetches centers by labels, and reduces
# their gradient to the owner. On 8 devices the middle of a ring takes 6 iterations, that of half a round 3, and a whole
# round of PartialFC's labels 7.
GATHER, RING = {"all-gather": 3, "all-reduce": 2, "reduce-scatter": 2}, {"collective-permute": 14, "all-reduce": 1}
EXPECTED = {
    ("clip", "gather"): (GATHER, set()),
    ("info_nce", "gather"): (GATHER, set()),
    ("nt_xent", "gather"): (GATHER | {"all-gather": 4}, set()),
    ("sup_con", "gather"): (GATHER | {"all-gather": 4}, set()),
    ("siglip", "gather"): ({"all-gather": 2, "all-reduce": 1, "reduce-scatter": 1}, set()),
    ("partial_fc", "gather"): ({"all-gather": 5, "all-reduce": 2, "reduce-scatter": 3}, set()),
    ("clip", "ring"): (RING, {6}),
    ("info_nce", "ring"): (RING, {6}),
    ("nt_xent", "ring"): (RING | {"collective-permute": 16}, {3}),
    ("sup_con", "ring"): (RING | {"collective-permute": 16}, {3}),
    ("siglip", "ring"): (RING | {"collective-permute": 7}, {6}),
    ("partial_fc", "ring"): (RING | {"collective-permute": 21}, {6, 7}),
}


@pytest.mark.parametrize(("name", "exchange"), EXPECTED)
def test_compiled_losses_have_the_expected_collectives(name, exchange):
    mesh = mesh_of(8, "auto")
    loss = losses(mesh, exchange=exchange, tile=32, memory="flat")[name]
    assert collectives(loss, placed(mesh, 512, 32)) == EXPECTED[name, exchange]

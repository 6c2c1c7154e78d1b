"""Train CLIP with JAX on images of Unicode characters and their names, on one device or on several.

    pip install '.[jax]' ./packages/wholebatch-train equinox optax    # in a checkout
    python examples/jax_glyphs.py --devices 8         # a CPU becomes as many devices as this says
    python examples/jax_glyphs.py --devices 1         # the same losses

The batch is split over a mesh of devices. The loss is that of the whole batch, computed by tiles, and so is its
gradient: there is nothing to average. Encoders run in chunks (`chunked`), so that a large batch takes no more memory
than a small one. `wholebatch_train` draws the characters; only this needs torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    devices: int = 8
    steps: int = 60
    batch_size: int = 512
    chunk_size: int = 32
    """Rows that a device encodes at a time."""
    embedding_size: int = 128
    """Length of the embeddings; even. Hidden layers have half as many channels."""
    learning_rate: float = 1e-3
    image_size: int = 32
    seed: int = 0


def train(config: Config) -> tuple[list[float], float]:
    """Return the loss of every step, and recall@10 of 500 characters never seen, searched by their names."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import wholebatch.jax as wbj

    # With explicit axes, JAX's default, every gather and convolution of the encoders would need an output sharding.
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((config.devices,), ("data",), axis_types=(auto,), devices=jax.devices()[: config.devices])
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())

    class ImageEncoder(eqx.Module):
        """Two layers on each patch of 4 x 4 pixels, and a projection of all patches."""

        layers: tuple[eqx.nn.Linear, eqx.nn.Linear]
        project: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys, w = jax.random.split(key, 3), config.embedding_size // 2
            self.layers = eqx.nn.Linear(16, 4 * w, key=keys[0]), eqx.nn.Linear(4 * w, w, key=keys[1])
            self.project = eqx.nn.Linear(w * (config.image_size // 4) ** 2, 2 * w, key=keys[2])

        def __call__(self, image: Any) -> Any:
            side = config.image_size // 4
            x = image.reshape(side, 4, side, 4).swapaxes(1, 2).reshape(-1, 16) / 127.5 - 1
            for layer in self.layers:
                x = jax.nn.gelu(jax.vmap(layer)(x))
            return _unit(self.project(x.reshape(-1)))

    class TextEncoder(eqx.Module):
        """The mean of the vectors of a name's pieces, and its projection."""

        pieces: Any
        project: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys, w = jax.random.split(key, 2), config.embedding_size // 2
            self.pieces = 0.05 * jax.random.normal(keys[0], (_BUCKETS + 1, 2 * w))
            self.project = eqx.nn.Linear(2 * w, 2 * w, key=keys[1])

        def __call__(self, pieces: Any) -> Any:
            is_piece = (pieces < _BUCKETS)[:, None]
            mean = jnp.where(is_piece, self.pieces[pieces], 0).sum(0) / jnp.maximum(is_piece.sum(), 1)
            return _unit(self.project(jax.nn.gelu(mean * 10)))

    def _unit(x: Any) -> Any:
        return x / jnp.linalg.norm(x)

    keys = jax.random.split(jax.random.key(config.seed), 2)
    model = {"image": ImageEncoder(keys[0]), "text": TextEncoder(keys[1]), "log_scale": jnp.log(14.3)}
    optimizer = optax.adam(config.learning_rate)
    model = jax.device_put(model, everywhere)
    state = jax.device_put(optimizer.init(eqx.filter(model, eqx.is_array)), everywhere)
    encode = wbj.chunked(lambda tower, x: jax.vmap(tower)(x), chunk_size=config.chunk_size, mesh=mesh)

    @jax.jit
    def step(arrays: Any, state: Any, images: Any, names: Any) -> Any:
        def loss_fn(arrays: Any) -> Any:
            model = eqx.combine(arrays, fixed)
            features = encode(model["image"], images), encode(model["text"], names)
            return wbj.clip_loss(*features, jnp.exp(model["log_scale"]), mesh=mesh)

        loss, grads = jax.value_and_grad(loss_fn)(arrays)
        updates, state = optimizer.update(grads, state)
        return loss, optax.apply_updates(arrays, updates), state

    arrays, fixed = eqx.partition(model, eqx.is_array)
    data, losses = Glyphs(config), []
    for images, names in data.batches():
        loss, arrays, state = step(arrays, state, *(jax.device_put(x, rows) for x in (images, names)))
        losses.append(float(loss))
        if len(losses) % 10 == 1:
            print(f"step {len(losses):4}   loss {losses[-1]:.6f}", flush=True)

    model = eqx.combine(jax.device_put(arrays, jax.devices()[0]), fixed)
    images, names = data.unseen(500)
    similarity = np.asarray(jax.vmap(model["text"])(names) @ jax.vmap(model["image"])(images).T)
    better = (similarity > similarity.diagonal()[:, None]).sum(1)
    return losses, float((better < 10).mean())


_BUCKETS = 4096
_MOST_PIECES = 128


class Glyphs:
    """Images of characters and the hashed pieces of their names; a batch holds no character twice."""

    def __init__(self, config: Config) -> None:
        import numpy as np

        from wholebatch_train.data.classes import glyph_pairs
        from wholebatch_train.data.sides import DrawnPictures
        from wholebatch_train.encoders.words import tokenize

        self.config, pairs = config, glyph_pairs(config.image_size, faces=("DejaVuSans", "DejaVuSerif"))
        images, names = pairs.sides.values()
        assert isinstance(images, DrawnPictures)
        self.images, self.first = images.pixels[pairs.order].numpy(), pairs.first.numpy()
        self.pieces = np.full((len(pairs), _MOST_PIECES), _BUCKETS)  # one more than the last bucket: no piece
        for row, text in enumerate(names.items(pairs.order[pairs.first[:-1]])):
            of_name = tokenize([text], max_words=12, buckets=_BUCKETS).pieces.numpy()[:_MOST_PIECES]
            self.pieces[row, : len(of_name)] = of_name
        order = np.random.default_rng(config.seed).permutation(len(pairs))
        self.held_out, self.to_train = order[:500], order[500:]

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the batch of each step, a function of the seed, not of the devices."""
        import numpy as np

        random = np.random.default_rng(self.config.seed + 1)
        for _ in range(self.config.steps):
            texts = random.choice(self.to_train, self.config.batch_size, replace=False)
            yield self._images(texts, random.random(len(texts))), self.pieces[texts]

    def unseen(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return characters that are in no batch."""
        texts = self.held_out[:count]
        return self._images(texts, 0), self.pieces[texts]

    def _images(self, texts: np.ndarray, choice: Any) -> np.ndarray:
        """Return one image of each character, chosen among its faces by a number in [0, 1)."""
        count = self.first[texts + 1] - self.first[texts]
        return self.images[self.first[texts] + (choice * count).astype(int)]


def main() -> None:
    """Train with the settings of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in vars(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    config = Config(**vars(parser.parse_args()))
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":  # before JAX starts
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={config.devices}"
        )
    began = time.perf_counter()
    losses, recall = train(config)
    print(f"loss {losses[-1]:.6f} after {len(losses)} steps; recall@10 of 500 names never seen: {100 * recall:.1f} %")
    print(f"{config.devices} devices, batches of {config.batch_size}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

"""How the columns' features travel between devices, and how the sums over their columns return to the owners.

"gather": one all_gather of Y, one sweep over all columns, and one psum_scatter of their sums to the owners.

"ring": each device holds one block of Y at a time. The block of the next step and the sums of the previous step travel
while the tiles of a block are computed; after the last step one message returns the sums to their owners.

    step               0         1         2         3
    device i visits    block i   i + 1     i + 2     i + 3       for W = 4; a symmetric S is done after i + 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import Array, lax

from .axis import Axis, vary_alike
from .logsumexp import add, reduce_to_owner
from .tiles import Tiles, half, joined, rectangle, triangle

ExchangeName = Literal["auto", "gather", "ring"]
EXCHANGES = ("auto", "gather", "ring")
Exchange = Literal["gather", "ring"]

# sweep(tiles, y, of_x, of_y, *, first=True) -> of_x, of_y, kept: adds the tiles' results to the sums. Only the first
# list of tiles of a pass may keep products, or use kept ones.
SweepBlock = Callable[..., tuple[Any, Any, Array | None]]

_GATHER_BYTES = 2**30  # Y of all devices, its gradient, and the sum of that


def select_exchange(name: ExchangeName, axis: Axis, travels: Any) -> Exchange:
    """Choose the exchange: "auto" is "gather" while it takes at most 1 GiB, else "ring".

    Args:
        name: "auto", "gather" or "ring".
        axis: the axis over which the batch is split.
        travels: the tree with b rows that travels.
    """
    if name != "auto":
        return name
    num_bytes = 3 * axis.size * sum(leaf.nbytes for leaf in jax.tree.leaves(travels))
    return "gather" if num_bytes <= _GATHER_BYTES else "ring"


def visited_blocks(axis: Axis, rows: int, cols: int, *, symmetric: bool) -> list[Tiles]:
    """List the tiles of each block of columns that this device visits: its local one, the next device's, and so on."""
    size, whole = axis.size, rectangle(rows, cols)
    if not symmetric:
        return [whole] * size
    shared = [half(rows, axis.index < size // 2)] * (size % 2 == 0)
    return [triangle(rows), *[whole] * ((size - 1) // 2), *shared]


def gathered_tiles(axis: Axis, blocks: list[Tiles], cols: int, *, symmetric: bool) -> Tiles:
    """Join the tiles of all blocks, among the columns of all devices, of which each device has `cols` tiles."""
    if not symmetric:  # the order is that of memory
        return rectangle(len(blocks[0].rows) // cols, cols * axis.size)
    return joined(blocks, [(axis.index + k) % axis.size * cols for k in range(len(blocks))])


def gather(
    axis: Axis, sweep: SweepBlock, tiles: Tiles, y: Any, of_x: Any, empty: Callable[[int], Any]
) -> tuple[Any, Any, Array | None]:
    """Sweep over the gathered columns of all devices.

    Args:
        axis: the axis over which the batch is split.
        sweep: adds the results of a list of tiles to sums.
        tiles: the tiles to visit, among the columns of all devices.
        y: this device's columns.
        of_x: the sums of rows, empty.
        empty: makes the empty sums of so many columns.

    Returns:
        The sums of rows; the sums of this device's columns over all rows; and the kept products.
    """
    y_full = axis.gather(y)
    y_full, of_all = vary_alike(y_full, empty(len(jax.tree.leaves(y_full)[0])), axis=axis)
    of_x, of_all, kept = sweep(tiles, y_full, of_x, of_all)
    return of_x, reduce_to_owner(axis, of_all), kept


def ring(
    axis: Axis, sweep: SweepBlock, blocks: list[Tiles], y: Any, of_x: Any, empty: Any
) -> tuple[Any, Any, Array | None]:
    """Sweep over one block of columns after another, while the next block and the previous sums travel.

    Args:
        axis: the axis over which the batch is split.
        sweep: adds the results of a list of tiles to sums; it keeps products of the first block only.
        blocks: the tiles of each block, from the local one on.
        y: this device's columns.
        of_x: the sums of rows, empty.
        empty: the sums of a block's columns, empty.

    Returns:
        As :func:`gather`.
    """

    def step(carried: tuple[Any, Any, Any], tiles: Tiles) -> tuple[Any, Any]:
        of_x, y, of_y = carried
        arriving = axis.receive_from(of_y, 1)
        of_x, added, _ = sweep(tiles, y, of_x, empty, first=False)
        return of_x, add(arriving, added)

    def middle(carried: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
        following = axis.receive_from(carried[1], 1)
        of_x, of_y = step(carried, blocks[1])
        return (of_x, following, of_y), None

    following = axis.receive_from(y, 1)
    of_x, of_y, kept = sweep(blocks[0], y, of_x, empty)
    carried = (of_x, following, of_y)
    if len(blocks) > 2:
        carried, _ = lax.scan(middle, carried, None, length=len(blocks) - 2)
    of_x, of_y = step(carried, blocks[-1])
    return of_x, axis.receive_from(of_y, 1 - len(blocks)), kept

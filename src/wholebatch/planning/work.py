"""Count the work of a loss's step on one rank: multiply-adds, entries of S, bytes in memory, bytes sent.

All of it follows from the shapes. With b rows on this rank, B on all W, d numbers each, of s bytes in features and of a
bytes in sums (4; 8 for float64), one unit being b B d multiply-adds:

               multiply-adds   entries of S    memory, without features and their gradients
    CLIP       4 units         b B             tiles, and   gather: B d (s + 2a) + 2 b d a
    InfoNCE    4 units         b B                          ring:   b d (2s + 4a)
                                                            alone:  2 b d a
    SigLIP     3 units         b B             as CLIP, but gather: 2 B d a + 2 b d a
    NT-Xent    4 of half       (2b)(2B) / 2    as CLIP with 2b rows in a bytes, and   ring: b d a more
    SupCon     4 of half       b B / 2         as NT-Xent with b rows
    PartialFC  4 k B d         k B             the larger of tiles + k d a + 4 B d a, k d s + B d (s + 6a)
    declared   4 units         b B             half if symmetric; `declared.count` finds the memory
    MaxSim     2 units of products of tokens   as `late_interaction` says

`losses.catalog` says which of these rows a loss follows. Gather holds Y, its gradient, and the buffer of the
reduce-scatter; the gradients of X and of the local rows of Y. Ring holds X's gradient, two blocks of Y, two of its
gradient, and one that arrives. Alone, a rank holds both gradients; with a symmetric S, the rows of unit length and
their gradient. PartialFC, with k classes on each rank, holds the gradient of their centers, which for a sample replaces
that of the last step; and of all ranks' embeddings the rows, the rows of unit length and their gradient, and when the
tiles are freed, the gradient of the embeddings. Centers of a sample are read where they are, so its row has no term k d
but that of rounding. The tiles are two of side x side (kernels use these bytes for one tile of dS, or for partial
sums), and for half precision the widened rows; in half precision, a gradient exists together with its float32 original
while it is rounded.

The part of exp(S) that `memory=` keeps is not computed again: its entries save one unit in four, and one of two
exponentials.

Each rank sends: by "gather" Y and its gradient, (W - 1)/W B d numbers each; by "ring" Y in each of two passes (SigLIP:
one), (W - 1) b d numbers each, and its gradient, W b d; and O(B) sums. For PartialFC, embeddings and their gradient.
"""

from __future__ import annotations

from ..sweep.memory import Budget, Memory
from .costs import TRANSFERS, Work
from .declared import Counts
from .late_interaction import TokenShapes, work_of_tokens
from .shapes import ExchangeUsed, Shapes


def work_of(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> Work:
    """Return the work of a step with these settings.

    >>> work = work_of(Shapes("clip", 8192, 512), "gather", "flat")
    >>> work.flops / (2 * 8192**2 * 512), work.loss // 10**6
    (4.0, 37)
    >>> kept = work_of(Shapes("clip", 8192, 512), "gather", 2**30)
    >>> kept.flops / work.flops, kept.kept == kept.entries
    (0.75, True)
    """
    if isinstance(shapes, TokenShapes):
        return work_of_tokens(shapes, exchange, memory)
    budget = shapes.budget(memory)
    entries, kept = shapes.entries, min(budget.kept, shapes.entries)
    again = 0 if shapes.one_pass else entries - kept
    held = _bytes_of_tiles(shapes, exchange, budget) + kept * budget.kept_dtype.itemsize
    wire, messages = _wire(shapes, exchange)
    if shapes.declared is not None:
        peak = _peak_of_declared(shapes, shapes.declared, exchange)
    else:
        peak = _peak_of_classes(shapes, held) if shapes.of_classes else _peak_of_pairs(shapes, exchange, held)
    centers = 0  # and their gradient, which has a sample's rows or all
    if shapes.of_classes:
        gradient = shapes.centers if shapes.sample_rate == 1 else shapes.sampled
        centers = (shapes.centers + gradient) * shapes.embedding_size * shapes.dtype.itemsize
    return Work(
        flops=2 * shapes.embedding_size * (3 * entries + again - _diagonal_entries(shapes)),
        again=2 * shapes.embedding_size * again,
        entries=entries,
        kept=kept,
        kept_size=budget.kept_dtype.itemsize,
        features=shapes.vectors * shapes.embedding_size * shapes.dtype.itemsize,
        centers=centers,
        loss=peak,
        wire=wire,
        messages=messages,
    )


def _diagonal_entries(shapes: Shapes) -> int:
    """Return the entries of diagonal tiles of a symmetric S, whose gradient is multiplied by their rows only."""
    if not shapes.symmetric or shapes.declared is not None:
        return 0
    tiles, rest = divmod(shapes.partition.counts[0], shapes.side)
    return tiles * shapes.side**2 + rest**2


def _bytes_of_tiles(shapes: Shapes, exchange: ExchangeUsed, budget: Budget) -> int:
    """Return the bytes of two tiles, and of their rows of X and Y if these are widened to the precision of sums."""
    sums, of_rank = shapes.sums_size, max(shapes.partition.counts)
    rows = min(budget.side, shapes.sampled if shapes.of_classes else of_rank)
    cols = min(budget.side, TRANSFERS[exchange](shapes).columns)
    sweep = None if shapes.entry is None else shapes.entry.sweep
    # A CPU then never writes to the second tile, and untouched memory is not resident.
    number = 1 if sweep is not None and sweep.weights_of_rows_only and shapes.device == "cpu" else 2
    of_halves = shapes.products.bytes_of_gradients
    as_given = shapes.symmetric or shapes.dtype.itemsize == sums or of_halves
    widened = 0 if as_given else (rows + cols) * shapes.embedding_size
    return (number * rows * cols + widened) * sums + rows * cols * of_halves


def _peak_of_pairs(shapes: Shapes, exchange: ExchangeUsed, held: int) -> int:
    """Return the bytes that the sweep holds, of exchanged rows, and of gradients before they are the features'."""
    a, d = shapes.sums_size, shapes.embedding_size
    transfer = TRANSFERS[exchange](shapes)
    of_sums = 8 * 6 * transfer.sums
    if shapes.ranks > 1:
        return held + transfer.rows + of_sums
    rounded = 0 if shapes.dtype.itemsize == a else shapes.towers * shapes.rows * d * shapes.dtype.itemsize
    return 2 * max(shapes.partition.counts) * d * a + max(held, rounded) + of_sums


def _peak_of_declared(shapes: Shapes, counts: Counts, exchange: ExchangeUsed) -> int:
    """Return a declared loss's bytes: the larger of the sweep, and of gradients of features when tiles are gone.

    Counts are of one rank, with both gradients, 2 b d a. On several ranks, rows of Y travel.
    """
    a, d, b = shapes.sums_size, shapes.embedding_size, max(shapes.partition.counts)
    transfer = TRANSFERS[exchange](shapes)
    tile = min(shapes.side, b) * min(shapes.side, transfer.columns)
    rounded = 0 if shapes.dtype.itemsize == a else shapes.towers * b * d * (a + shapes.dtype.itemsize)
    if shapes.ranks == 1:
        in_sweep = counts.of_feature * b * d
    else:
        in_sweep = transfer.rows + max(0.0, counts.of_feature - 2 * a) * b * d
    in_sweep += counts.of_tile * tile + counts.of_row * transfer.sums
    return int(max(in_sweep, counts.after * b * d) + rounded)


def _peak_of_classes(shapes: Shapes, held: int) -> int:
    """Return PartialFC's bytes: the largest of the sweep, of rounding the centers' gradient, and after it.

    The gradient of a sample takes the memory of the last step's, no center is copied, and a sweep reads the rows of one
    tile at a time.
    """
    s, a, d = shapes.size, shapes.sums_size, shapes.embedding_size
    embeddings, centers, halves = shapes.batch_size * d, shapes.sampled * d, shapes.size < shapes.sums_size
    in_sweep = held + centers * a + 4 * embeddings * a
    rounding = centers * (a + s) + 4 * embeddings * a if halves else 0
    after = centers * s + embeddings * (s + 6 * a) + (embeddings * s if halves else 0)
    if shapes.sample_rate == 1:
        return max(in_sweep, rounding, after)
    return max(in_sweep + min(shapes.side, shapes.sampled) * d * s, rounding, after) - centers * s


def _wire(shapes: Shapes, exchange: ExchangeUsed) -> tuple[float, int]:
    """Return the bytes that a rank sends, and the number of messages one after the other."""
    w = shapes.ranks
    if w == 1:
        return 0, 0
    if shapes.of_classes:  # it gathers
        return (w - 1) / w * shapes.partition.total * (2 * shapes.embedding_size * shapes.size + 4 * 8), 9
    transfer = TRANSFERS[exchange](shapes)
    learned = 0 if shapes.declared is None else shapes.declared.learned_of_columns
    of_learned = (w - 1) / w * shapes.partition.total * 8 * learned  # one reduce-scatter, in float64
    return transfer.wire + of_learned, transfer.messages + (learned > 0)

"""Splits of rows and scales that the distributed tests run over. `make quick` takes one scale and the core losses."""

import os

QUICK = os.environ.get("WHOLEBATCH_TEST") == "quick"

# Rows of each rank: even, uneven, empty first, empty middle, empty last, a single row in all.
SHARDS = [
    (7,),
    (4, 4),
    (5, 2),
    (0, 6),
    (3, 3, 3),
    (5, 0, 6),
    (1, 0, 0),
    (2, 2, 2, 2),
    (0, 0, 3, 9),
    (4, 1, 2, 0),
]
SCALES = [14.3] if QUICK else [1.0, 14.3, 100.0]
SYNCS = ["mean", "sum", None]

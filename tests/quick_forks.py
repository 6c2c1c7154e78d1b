"""Forks of this process, quicker: its memory is put into pages of 2 MiB, where Linux can (6.1 or newer).

The server of rank processes imports this last. A fork copies an entry for each page, which with 60,000 small ones was a
third of the start and the end of a rank.
"""

import ctypes
import gc
import re
from pathlib import Path

MAPS = Path("/proc/self/maps")
SIZE = 2**21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of Linux's <mman.h>
WRITABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\b", re.MULTILINE)  # of no file


def use_huge_pages() -> None:
    """Advise the system, which may decline: nothing else depends on it."""
    gc.collect()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in ((int(start, 16), int(end, 16)) for start, end in WRITABLE.findall(MAPS.read_text())):
        first, last = -(-start // SIZE) * SIZE, end // SIZE * SIZE
        if first < last:
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                madvise(first, last - first, advice)


if MAPS.exists():
    use_huge_pages()

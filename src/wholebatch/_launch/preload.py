"""Modules that the fork server imports once for all rank processes, named in WHOLEBATCH_PRELOAD.

A module that cannot be imported is left to the ranks, where it raises with a traceback. In the server the error would
end the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os

from torch.nn.parallel import DistributedDataParallel

from .._base import frozen

for _name in filter(None, os.environ.get("WHOLEBATCH_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(_name)

# Ranks are forks of this process. Their garbage collections leave out the objects that are imported here, so that each
# is 0.2 s shorter, and the memory of these objects stays shared.
gc.collect()
frozen.freeze(DistributedDataParallel)  # none exists
atexit.register(gc.unfreeze)  # Triton's bindings report objects that are left at the end as leaks

"""Modules that the fork server imports once for all rank processes, named in WHOLEBATCH_PRELOAD.

A module that cannot be imported is left to the ranks, where it raises with a traceback. In the server the error would
end the server.
"""

from __future__ import annotations

import contextlib
import importlib
import os

for _name in filter(None, os.environ.get("WHOLEBATCH_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(_name)

"""Imported by the server that rank processes are forked from: it imports, once, what each of them would.

What cannot be imported here is left to the ranks, where it is an error with a traceback. (In the server it would be the
end of the server.)
"""

from __future__ import annotations

import contextlib
import importlib
import os

for _name in filter(None, os.environ.get("WHOLEBATCH_PRELOAD", "").split(",")):
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(_name)

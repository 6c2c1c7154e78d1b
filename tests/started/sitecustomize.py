"""Python imports this at the start of every process that tests start.

While modules are imported, the garbage collector would take a quarter of the time, and find nothing.
"""

import gc

gc.set_threshold(50_000)

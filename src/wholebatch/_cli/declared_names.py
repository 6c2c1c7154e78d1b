"""Names that a command line offers, read without importing the modules that declare them: these import torch.

A loss has a standard call if its file, which has its name, sets DECLARATION: see `losses._declaration`. The compiled
code of the file tells this; it is not run. `tests/test_catalog.py` compares the names with the declarations.
"""

from pathlib import Path
from pkgutil import iter_modules
from types import CodeType
from typing import Any


def _declared_losses() -> dict[str, set[str]]:
    """Return each loss with a standard call: the global names that its file uses, and its function's parameters."""
    losses = {}
    for module in iter_modules([str(Path(__file__).parent.parent / "losses")]):
        spec: Any = module.module_finder.find_spec(module.name, None)
        file = spec.loader.get_code(module.name)
        functions = {code.co_name: code for code in file.co_consts if isinstance(code, CodeType)}
        function = functions.get(f"{module.name}_loss")
        if function is not None and "DECLARATION" in file.co_names:
            parameters = function.co_varnames[: function.co_argcount + function.co_kwonlyargcount]
            losses[module.name] = {*file.co_names, *parameters}
    return losses


_LOSSES = _declared_losses()
LOSS_NAMES = tuple(_LOSSES)
"""The losses with a standard call, each under its file's name."""
SWEPT_LOSSES = tuple(name for name, names in _LOSSES.items() if "Sweep" in names)
"""The losses whose work is that of a sweep over the similarity matrix."""
LABELED_LOSSES = frozenset(name for name, names in _LOSSES.items() if "labels" in names)
"""The losses that take one matrix of features and labels; the others take two matrices."""
EXCHANGE_NAMES = ("auto", "gather", "ring")
"""The values of `exchange=`."""

"""Find and call the user's factory: a function that builds the problem, called on each rank."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .._base.user_error import UserError
from .._launch.processes import preload, start_server
from .arguments import split_name
from .batch import to_dtype
from .problem import Problem, modules
from .process_state import seed_all

Factory = Callable[[], Any]
INSTALLED = "site-packages"  # the folder of installed packages
_FORM = (
    "a function without arguments that returns wholebatch.Problem(model, batch, loss), where loss(model, batch) is "
    "a rank's loss of its rows of the batch"
)


def find(problem: Any) -> Factory:
    """Return the factory that is given, or that the name `MODULE:NAME` stands for.

    Raises:
        UserError: if it is no factory; if there is no such module, or it cannot be imported, or has no such function.
    """
    name, candidate = (problem, _imported(problem)) if isinstance(problem, str) else ("problem", problem)
    if isinstance(candidate, Problem):
        raise UserError(f"{name} is a Problem: give the function that makes it, because each rank makes its own")
    if not callable(candidate):
        raise UserError(f"{name} must be {_FORM}; got {type(candidate).__name__}")
    factory: Factory = candidate
    return factory


def _imported(name: str) -> Any:
    """Return the object of the name `MODULE:NAME`, and have installed packages that it needs preloaded for ranks."""
    module_name, attribute = split_name(name)
    if module_name.endswith(".py"):
        if not Path(module_name).is_file():
            raise UserError(f"there is no file {module_name!r}")
        sys.path.insert(0, str(Path(module_name).resolve().parent))  # the ranks get it, too, and import by the name
        module_name = Path(module_name).stem
    known = set(sys.modules)
    if module_name.startswith("wholebatch."):
        preload(module_name)
        start_server()  # imports it at the same time
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"there is no module {module_name!r} here: give its file, FILE.py, or its name as in an import"
            ) from error
        raise UserError(f"{module_name} cannot be imported: it needs {error.name!r}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        candidate = getattr(module, attribute)
    except AttributeError:
        offers = [n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module_name]
        raise UserError(
            f"{module_name} has no {attribute!r}; it defines {', '.join(offers) or 'no functions'}"
        ) from None
    preload(*_installed_packages(set(sys.modules) - known))
    return candidate


def _installed_packages(modules: Iterable[str]) -> list[str]:
    """Return the installed packages among them; a user's modules may compute when they are imported."""
    packages = []
    for name in sorted({module.partition(".")[0] for module in modules}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and INSTALLED in Path(file).parts:
            packages.append(name)
    return packages


def build(factory: Factory | str, seed: int, dtype: torch.dtype) -> Problem:
    """Return the problem that the factory makes, in the dtype.

    Raises:
        UserError: if the factory fails, or returns something else.
    """
    function = find(factory)
    seed_all(seed)
    try:
        problem = function()
    except SystemExit as error:
        raise UserError(f"the factory left by exit({error.code!r}); it must be {_FORM}") from error
    except UserError:
        raise
    except Exception as error:
        if any(word in str(error) for word in ("CUDA", "NVIDIA", "cuda")):
            raise UserError(
                f"the factory asks for a GPU ({_first_line(error)}); the audit runs on CPU processes: build model and "
                "batch on the CPU"
            ) from error
        raise UserError(f"the factory raised {type(error).__name__}: {_first_line(error)}{_place(error)}") from error
    if isinstance(problem, tuple) and len(problem) == 3:
        problem = Problem(*problem)
    if not isinstance(problem, Problem):
        got = f"a tuple of {len(problem)}" if isinstance(problem, tuple) else type(problem).__name__
        raise UserError(f"the factory must be {_FORM}; it returned {got}")
    for module in modules(problem):
        module.to(dtype)
    return replace(problem, batch=to_dtype(problem.batch, dtype))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _place(error: BaseException) -> str:
    """Return where it was raised: the innermost line outside installed packages."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if INSTALLED not in Path(frame.filename).parts] or list(stack)
    return f' (File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name})' if frames else ""

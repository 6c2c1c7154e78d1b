"""What is audited: a model, a global batch, and what training code makes of them on each rank.

A factory gives all three, for every rank makes its own. It is called many times, each time with the same seeds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import is_dense
from .._processes import preload, start_server
from .._settings import shown
from .._user_error import UserError
from ..heads import PartialFC

Engine = Literal["mean", "sum", "ddp", "none"] | Callable[[nn.Module], nn.Module]
INSTALLED = "site-packages"  # the folder of what is
_ENGINES = ("mean", "sum", "ddp", "none")
Factory = Callable[[], Any]
FORM = (
    "a function without arguments that returns wholebatch.Problem(model, batch, loss), where loss(model, batch) is "
    "what a rank computes of its rows of the batch"
)


@dataclass(frozen=True)
class Problem:
    """A model, a global batch, and what a rank does with its rows of it.

    Args:
        model: with the parameters whose gradients are compared, the temperature's among them.
        batch: of all ranks: a tree (mappings, lists, tuples) of tensors with the batch's rows first, and of lists with
            one text or number for each row. Tensors of shape () and other things are the same on all ranks.
        loss: `loss(model, batch)`, a rank's forward pass from its rows of the batch to the scalar that it calls
            `backward()` of. In it `torch.distributed` is initialized, with one rank, too.
        step: in the place of `loss`, where training code calls `backward()` itself (gradient caching, accumulation):
            `step(model, batch)` leaves the gradients in the parameters and returns the value of the loss.
        reference: `reference(model, batch)`, the loss that one process computes of the whole batch, where `loss` or
            `step` on one rank is not to be trusted with it.
        engine: what happens to the gradients afterward. "mean": they are averaged over ranks; "sum": added; "ddp": the
            model is wrapped by a real `DistributedDataParallel`, of which `loss` gets the wrapper; a function of the
            model: as "ddp", and it is what wraps (`partial(DistributedDataParallel, find_unused_parameters=True)`);
            "none": nothing, the step itself leaves the final gradient on every rank.
        uneven: whether it is made for ranks with different numbers of rows; then these are audited, too.
        empty: whether it is made for ranks without any.
        sharded: names, or beginnings of names, of parameters that each rank holds a part of, rank 0's rows first; no
            engine touches their gradients. The parameters of a `wholebatch.PartialFC` are found without.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any] | None = None
    _: KW_ONLY
    step: Callable[[Any, Any], Any] | None = None
    reference: Callable[[Any, Any], Any] | None = None
    engine: Engine = "mean"
    uneven: bool = False
    empty: bool = False
    sharded: Sequence[str] = field(default=())

    @property
    def wraps(self) -> bool:
        """Whether the engine wraps the model."""
        return self.engine == "ddp" or callable(self.engine)

    @property
    def call(self) -> Callable[[Any, Any], Any]:
        """`loss` or `step`."""
        found = self.step if self.loss is None else self.loss
        assert found is not None
        return found

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise UserError for what is no problem."""
        if not isinstance(self.model, nn.Module):
            raise UserError(
                f"Problem's model must be a torch.nn.Module, got {type(self.model).__name__}; several go into a "
                "torch.nn.ModuleDict"
            )
        given = [function for function in (self.loss, self.step) if function is not None]
        if len(given) != 1 or not callable(given[0]):
            raise UserError(
                "Problem needs loss=, a function loss(model, batch) that returns the scalar to call backward() of, or "
                "step=, one that has called it; one of the two"
            )
        if self.reference is not None and not callable(self.reference):
            raise UserError(f"Problem's reference must be a function, got {type(self.reference).__name__}")
        if not callable(self.engine) and (not isinstance(self.engine, str) or self.engine not in _ENGINES):
            raise UserError(
                f"Problem's engine must be one of {', '.join(_ENGINES)}, or a function that wraps the model; got "
                f"{shown(self.engine)}"
            )
        for name in ("uneven", "empty"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"Problem's {name} must be True or False, got {shown(getattr(self, name))}")
        if not isinstance(self.sharded, list | tuple) or not all(isinstance(name, str) for name in self.sharded):
            raise UserError(f"Problem's sharded must be a list of names of parameters, got {shown(self.sharded)}")
        if isinstance(self.model, DistributedDataParallel):
            raise UserError(
                "Problem's model is wrapped by DistributedDataParallel: give the module itself, and engine='ddp', or "
                "engine=partial(DistributedDataParallel, find_unused_parameters=True)"
            )
        trained = {name: p for name, p in parameters(self).items() if p.requires_grad}
        if not trained:
            raise UserError("Problem's model has no parameters that need a gradient: there is nothing to audit")
        for name, p in trained.items():
            if p.device.type != "cpu":
                raise UserError(
                    f"the parameter {name} is on {p.device}; the audit runs on CPU processes: build it on the CPU"
                )
            if p.dtype.is_complex:
                raise UserError(f"the parameter {name} is {p.dtype}: the audit is of real numbers")
            if p.dtype not in (torch.float64, torch.float32):
                raise UserError(
                    f"the parameter {name} is {p.dtype}, whose rounding would hide what is looked for: build the model "
                    "in float32; the audit runs it in float64"
                )
        num_rows(self.batch)
        for function in (self.loss, self.step):
            check_known(self, _learned_in(function))


def check_known(problem: Problem, learned: Iterable[Tensor]) -> None:
    """Raise UserError for what a loss has learned and no engine would find."""
    known = {id(p) for p in parameters(problem).values()}
    for p in learned:
        if id(p) not in known:
            raise UserError(
                f"the loss has something learned, of shape {tuple(p.shape)}, that is not among the model's parameters: "
                "put it into Problem's model, as in ModuleDict(model=..., loss=...), for an engine has to find it too"
            )


def _learned_in(function: Any, depth: int = 3) -> Iterator[Tensor]:
    """Parameters that a function has at hand: in what it closes over, is bound to, or was given beforehand."""
    if isinstance(function, nn.Module):
        yield from (p for p in function.parameters() if p.requires_grad)
    elif isinstance(function, Tensor):
        if function.requires_grad and function.is_leaf:
            yield function
    elif depth:
        at_hand: list[Any] = [getattr(function, "__self__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not filled yet
                at_hand.append(cell.cell_contents)
        if isinstance(function, partial):
            at_hand += [function.func, *function.args, *function.keywords.values()]
        for thing in at_hand:
            if callable(thing) or isinstance(thing, Tensor):
                yield from _learned_in(thing, depth - 1)


def modules(problem: Problem) -> list[nn.Module]:
    """The model, and what else of the problem is a module."""
    return [module for module in (problem.model, problem.loss, problem.step) if isinstance(module, nn.Module)]


def parameters(problem: Problem) -> dict[str, nn.Parameter]:
    """All parameters by name: the model's, and as `loss. ...` those of a loss that is a module."""
    found = dict(problem.model.named_parameters())
    ids = {id(p) for p in found.values()}
    for function in (problem.loss, problem.step):
        if isinstance(function, nn.Module):
            found |= {f"loss.{name}": p for name, p in function.named_parameters() if id(p) not in ids}
    return found


def sharded_names(problem: Problem) -> list[str]:
    """The parameters of which each rank holds a part."""
    heads = [m for module in modules(problem) for m in module.modules() if isinstance(m, PartialFC)]
    of_heads = {id(p) for head in heads for p in head.parameters()}
    return [
        name for name, p in parameters(problem).items() if id(p) in of_heads or name.startswith(tuple(problem.sharded))
    ]


def find(name: str) -> Factory:
    """The factory that `MODULE:NAME` names.

    Raises:
        UserError: if there is no such module, or it cannot be imported, or has no such function.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise UserError(
            f"name the problem as MODULE:FUNCTION, as in my_project.audits:clip, where MODULE is as in an import; "
            f"got {name!r}"
        )
    known = set(sys.modules)
    if module_name.startswith("wholebatch."):
        preload(module_name)
        start_server()  # which imports it at the same time
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"there is no module {module_name!r} here: give it as in an import, without .py, from its folder"
            ) from error
        raise UserError(f"{module_name} cannot be imported: it needs {error.name!r}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        offers = [n for n, of in vars(module).items() if callable(of) and getattr(of, "__module__", "") == module_name]
        raise UserError(
            f"{module_name} has no {attribute!r}; it defines {', '.join(offers) or 'no functions'}"
        ) from None
    preload(*_installed_packages(set(sys.modules) - known))
    return _checked(found, name)


def _installed_packages(modules: Iterable[str]) -> list[str]:
    """Those that are installed, and no modules of the user's, which may do anything when they are imported."""
    found = []
    for name in sorted({module.partition(".")[0] for module in modules}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and INSTALLED in Path(file).parts:
            found.append(name)
    return found


def checked_factory(problem: Any) -> Factory:
    """A factory, or the one that a name stands for."""
    return find(problem) if isinstance(problem, str) else _checked(problem, "problem")


def _checked(found: Any, name: str) -> Factory:
    if isinstance(found, Problem):
        raise UserError(f"{name} is a Problem: give the function that makes it, for each rank makes its own")
    if not callable(found):
        raise UserError(f"{name} must be {FORM}; got {type(found).__name__}")
    factory: Factory = found
    return factory


def build(factory: Factory | str, seed: int, dtype: torch.dtype) -> Problem:
    """A problem as the factory makes it, in the dtype.

    Raises:
        UserError: if the factory fails, or makes something else.
    """
    function = find(factory) if isinstance(factory, str) else factory
    seed_all(seed)
    try:
        made = function()
    except SystemExit as error:
        raise UserError(f"the factory left by exit({error.code!r}); it must be {FORM}") from error
    except UserError:
        raise
    except Exception as error:
        if any(word in str(error) for word in ("CUDA", "NVIDIA", "cuda")):
            raise UserError(
                f"the factory asks for a GPU ({_first_line(error)}); the audit runs on CPU processes: build model and "
                "batch on the CPU"
            ) from error
        raise UserError(f"the factory raised {type(error).__name__}: {_first_line(error)}{_place(error)}") from error
    if isinstance(made, tuple) and len(made) == 3:
        made = Problem(*made)
    if not isinstance(made, Problem):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise UserError(f"the factory must be {FORM}; it returned {got}")
    for module in modules(made):
        module.to(dtype)
    return Problem(**{**vars(made), "batch": _map(made.batch, partial(_converted, dtype=dtype))})


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _place(error: BaseException) -> str:
    """Where it was raised: the innermost line that no installed package has."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if INSTALLED not in Path(frame.filename).parts] or list(every)
    return f' (File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name})' if frames else ""


def _converted(x: Any, dtype: torch.dtype) -> Any:
    return x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def seed_all(seed: int) -> None:
    """Whatever draws random numbers without a generator of its own draws the same ones from here on."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def random_state() -> tuple[Any, ...]:
    """Of torch's, random's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    of_numpy = None
    if numpy is not None:
        _, words, *rest = numpy.random.get_state()
        of_numpy = (words.tobytes(), *rest)
    return bytes(torch.get_rng_state().tolist()), random.getstate(), of_numpy


@contextlib.contextmanager
def unheard() -> Iterator[Callable[[], str]]:
    """What is printed inside, by libraries in C too, is not; what is yielded tells what it was."""
    with tempfile.TemporaryFile("w+") as said:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        heard: list[str] = []
        try:
            with contextlib.redirect_stdout(said):
                yield lambda: "".join(heard)
        finally:
            said.flush()
            os.dup2(kept, 1)
            os.close(kept)
            said.seek(0)
            heard.append(said.read())


# The batch: a tree whose leaves have rows, or are the same on all ranks.


def num_rows(batch: Any) -> int:
    """The rows of the global batch.

    Raises:
        UserError: if nothing in it has rows, or two things have different numbers of them.
    """
    for name, x in leaves(batch).items():
        if isinstance(x, Tensor) and not is_dense(x):
            raise UserError(f"Problem's batch must hold dense tensors; {name} has layout {x.layout} on {x.device}")
    counts = {name: len(x) for name, x in leaves(batch).items() if _has_rows(x)}
    if not counts:
        raise UserError(
            "Problem's batch must hold tensors, or lists, with a row for each example; it is a tree of them: "
            f"got {type(batch).__name__}"
        )
    if len(set(counts.values())) > 1:
        raise UserError(f"everything in Problem's batch must have the same rows, got {counts}")
    return next(iter(counts.values()))


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """What the tree holds, by where it is."""
    if isinstance(tree, Mapping):
        parts = [leaves(value, f"{name}.{key}" if name else str(key)) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and not _has_rows(tree):
        parts = [leaves(value, f"{name}[{at}]") for at, value in enumerate(tree)]
    else:
        return {name or "batch": tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def take(batch: Any, rows: Sequence[int], *, but: tuple[str, Sequence[int]] | None = None) -> Any:
    """Some rows of the batch, and of one of its inputs perhaps others."""
    names = iter(leaves(batch))

    def of(x: Any) -> Any:
        wanted = but[1] if but is not None and next(names) == but[0] else rows
        if not _has_rows(x):
            return x
        if isinstance(x, Tensor):
            return x[torch.tensor(wanted, dtype=torch.int64)]
        return type(x)([x[row] for row in wanted])

    return _map(batch, of)


def with_gradient(batch: Any) -> tuple[Any, dict[str, Tensor]]:
    """The batch with leaves in the place of floating-point tensors, and these leaves."""
    found: dict[str, Tensor] = {}
    names = iter(leaves(batch))

    def of(x: Any) -> Any:
        name = next(names)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
            found[name] = x = x.detach().clone().requires_grad_()
        return x

    return _map(batch, of), found


def _has_rows(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.dim() > 0
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(value, str | int | float) for value in x)


def _map(tree: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        items = {key: _map(value, of) for key, value in tree.items()}
        return items if isinstance(tree, dict) else type(tree)(items)  # type: ignore[call-arg]
    if isinstance(tree, list | tuple) and not _has_rows(tree):
        made = [_map(value, of) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return of(tree)

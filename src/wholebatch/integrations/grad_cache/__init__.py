"""The names of the package `grad_cache`, and an alias, so that programs which import it get this library.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.grad_cache train.py --batch-size 1024

runs a program whose `from grad_cache import GradCache` then gives the class of this module. In a program of your own,
`import wholebatch.integrations.grad_cache.alias` does the same, before the first import of grad_cache.

    L = CE(x y^T, (n + 1) i),    x: queries,    y: for each query its passage and n hard negatives, in a row

is the losses' formula. With DistributedContrastiveLoss, x and y are the rows of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb

from ..._base.checks import check_callable, check_integer
from ..._base.warnings import warn
from ...comm import Group
from ...contract import prepared
from ...gradcache import cached, cat_input_tensor, gather_input_tensor
from ...gradcache.grad_cache import ChunkSize
from ...gradcache.replay import Replay
from ...gradcache.step_loss import Scaler
from .._command import program_of
from .._passages import passages_loss

__all__ = [
    "ContrastiveLossWithQueryClosure",
    "DistributedContrastiveLoss",
    "GradCache",
    "PLGradCache",
    "RandContext",
    "SimpleContrastiveLoss",
    "cached",
    "cat_input_tensor",
    "gather_input_tensor",
    "install",
]

_GONE = {
    "forward_no_grad": "override model_call and get_reps, which both passes use",
    "build_cache": "override compute_loss; for a backward pass of your own use wb.GradCache(..., deferred=True)",
    "forward_backward": "for a backward pass of your own use wb.GradCache(..., deferred=True)",
}


class GradCache(wb.GradCache):
    r"""Their `GradCache`, by :class:`wholebatch.GradCache`.

    A subclass may override `split_inputs`, `model_call`, `get_reps` and `compute_loss`. `get_input_tensors` is not
    called: the states of all devices' random numbers are kept.

    Args:
        models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16: those of :class:`wholebatch.GradCache`.
        scaler: scales the loss if fp16 is True, and has no effect otherwise.
        options: those of :class:`wholebatch.GradCache`, by keyword.

    Raises:
        TypeError: for a subclass that overrides `forward_no_grad`, `build_cache` or `forward_backward`.
    """

    def __init__(
        self,
        models: Sequence[Callable[..., object]] | nn.ModuleList,
        chunk_sizes: ChunkSize | Sequence[ChunkSize],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, Any], Sequence[object]] | None = None,  # takes whatever the models take
        get_rep_fn: Callable[[Any], object] | None = None,  # takes whatever the models return
        fp16: bool = False,
        scaler: Scaler | None = None,
        **options: Any,  # of wb.GradCache
    ) -> None:
        used = scaler if fp16 else None
        super().__init__(models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16, used, **options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, instead in _GONE.items():
            if hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which wholebatch's GradCache does not call: {instead}"
                )

    def __getattr__(self, name: str) -> Any:
        if name in _GONE:
            raise AttributeError(f"wholebatch's GradCache has no {name}: {_GONE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class PLGradCache(GradCache):
    """Their `PLGradCache`, for a LightningModule with manual optimization: `backward_fn` goes backward, once a step.

    Args:
        models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16: as in :class:`GradCache`.
        scaler: without effect: Lightning's `manual_backward` scales the loss.
        backward_fn: `self.manual_backward` of the LightningModule.
        options: those of :class:`wholebatch.GradCache` except `deferred`, by keyword.

    Raises:
        ValueError: if loss_fn is a module that trains parameters which are none of the LightningModule's.
    """

    def __init__(
        self,
        models: Sequence[Callable[..., object]] | nn.ModuleList,
        chunk_sizes: ChunkSize | Sequence[ChunkSize],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, Any], Sequence[object]] | None = None,  # takes whatever the models take
        get_rep_fn: Callable[[Any], object] | None = None,  # takes whatever the models return
        fp16: bool = False,
        scaler: Scaler | None = None,
        backward_fn: Callable[[Tensor], object] | None = None,
        **options: Any,  # of wb.GradCache
    ) -> None:
        self.backward_fn = check_callable("backward_fn", backward_fn)
        super().__init__(models, chunk_sizes, loss_fn, split_input_fn, get_rep_fn, fp16, None, deferred=True, **options)

    def cache_step(self, *model_inputs: object, no_sync_except_last: bool = True, **loss_kwargs: object) -> Tensor:
        self._check_parameters()
        loss = super().cache_step(*model_inputs, no_sync_except_last=no_sync_except_last, **loss_kwargs)
        self.backward_fn(loss)
        return loss.detach()

    def _check_parameters(self) -> None:
        """Raise ValueError if the loss trains parameters that the LightningModule neither optimizes nor saves."""
        module = getattr(self.backward_fn, "__self__", None)
        if not isinstance(self.loss_fn, nn.Module) or not isinstance(module, nn.Module):
            return
        saved = {id(x) for x in module.parameters()}
        own = [name for name, x in self.loss_fn.named_parameters() if x.requires_grad and id(x) not in saved]
        if own:
            raise ValueError(
                f"loss_fn must train no parameters but the {type(module).__name__}'s, got {', '.join(own)}: its "
                "optimizers and checkpoints have its own alone; make the loss a part of it, as in self.loss = "
                "wb.CLIPLoss(logit_scale=wb.Scale(14.3)), before configure_optimizers is called"
            )


class RandContext:
    """A context in which random numbers are those that came after its construction.

    Afterward the generators continue where they were before the context.

    Args:
        tensors: without effect: generators of all devices, of Python and of NumPy are recorded.

    >>> import torch
    >>> context = RandContext()
    >>> first = torch.rand(3)
    >>> with context:
    ...     second = torch.rand(3)
    >>> torch.equal(first, second)
    True
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._inside = Replay()

    def __enter__(self) -> None:
        self._outside = Replay()
        self._inside.rewind()

    def __exit__(self, *error: object) -> None:
        self._outside.rewind()


class SimpleContrastiveLoss:
    """Their `SimpleContrastiveLoss`: the loss of these rows, on this process alone.

    Args:
        n_hard_negatives: n.

    Raises:
        ValueError: if n is no integer, at least 0.
    """

    _reductions: tuple[str, ...] = ("mean", "sum", "none")
    _hint = ""
    group: Group = wb.comm.LocalCommunicator()

    def __init__(self, n_hard_negatives: int = 0) -> None:
        check_integer("n_hard_negatives", n_hard_negatives, minimum=0, maximum=2**31)
        self.target_per_qry = n_hard_negatives + 1

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return L.

        Args:
            x: (b, d); b may differ between ranks and may be 0.
            y: ((n + 1) b, d), or any number of rows beside a target.
            target: the row of y that belongs to each row of x, or whatever else
                `torch.nn.functional.cross_entropy` takes, for the rows of all ranks, rank 0's first, and the same on
                all ranks. Default: (n + 1) i. With a target every rank computes the similarities of all rows.
            reduction: "mean", "sum" or, on one process alone, "none".

        Raises:
            ValueError: on every rank, if y has another number of rows, without a target, or for another reduction.
        """
        caller = type(self).__name__

        def check() -> None:
            if reduction not in self._reductions:
                choices = ", ".join(map(repr, self._reductions))
                raise ValueError(f"reduction must be one of {choices}, got {reduction!r}{self._hint}")

        prepared(caller, self.group, check)
        if target is None:
            options: Any = {"reduction": reduction, "group": self.group}
            return passages_loss(x, y, self.target_per_qry, caller=caller, **options)

        def whole_loss(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x @ y.T, target, reduction=reduction)

        local = isinstance(self.group, wb.comm.LocalCommunicator)
        return whole_loss(x, y) if local else wb.WholeBatch(whole_loss, group=self.group)(x, y)


class DistributedContrastiveLoss(SimpleContrastiveLoss):
    """Their `DistributedContrastiveLoss`: the loss of the whole batch, with its exact gradient.

    After an engine has averaged the gradients, every parameter has the gradient of one process with all rows. Theirs
    gives 1/W of it on W processes, so leave out a factor W that makes up for that. A first backward pass in which W
    comes in as the gradient of the loss warns.

    Args:
        n_hard_negatives: n.
        group: ranks that share the batch, as in :func:`wholebatch.functional.info_nce_loss`.
    """

    _reductions = ("mean", "sum")
    _hint = "; each rank has the losses of its rows only: use info_nce_loss"

    def __init__(self, n_hard_negatives: int = 0, *, group: Group = None) -> None:
        super().__init__(n_hard_negatives)
        self.group, self._checked = group, False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.gather_tensor is not DistributedContrastiveLoss.gather_tensor:
            raise TypeError(
                f"{cls.__name__} overrides gather_tensor, which wholebatch's loss does not call: no rows are gathered; "
                "pass group= for other ranks"
            )

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return L of the rows of all ranks, the same on every rank; arguments as in :class:`SimpleContrastiveLoss`."""
        loss = super().__call__(x, y, target, reduction)
        if loss.requires_grad and not self._checked:
            loss.register_hook(self._warn_of_a_factor)
        return loss

    @property
    def word_size(self) -> int:
        """The number of ranks, W."""
        return wb.comm.select_communicator(self.group).size

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return wb.comm.select_communicator(self.group).rank

    def gather_tensor(self, t: Tensor) -> Tensor:
        """Return the rows of all ranks, of which this rank's have a gradient; the loss does not need it."""
        return wb.gradcache.gather_input_tensor(lambda x: x, group=self.group)(t)

    def _warn_of_a_factor(self, grad: Tensor) -> None:
        if not self._checked and self.word_size > 1 and float(grad) == self.word_size:
            warn(
                f"the gradient that comes into DistributedContrastiveLoss is {self.word_size}, the number of "
                "processes. If the loss is multiplied by it, to make up for the average over processes: leave that "
                "factor out, the loss of wholebatch needs none"
            )
        self._checked = True


class ContrastiveLossWithQueryClosure(SimpleContrastiveLoss):
    """Their `ContrastiveLossWithQueryClosure`: the queries may come from a function."""

    def __call__(  # type: ignore[override]  # theirs
        self,
        *reps: Tensor,
        query_closure: Callable[[], Tensor] | None = None,
        target: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the loss of x and y, or of query_closure() and y; raise ValueError for both x and a closure."""
        if len(reps) not in (1, 2) or (len(reps) == 1) != callable(query_closure):
            closure = "a" if callable(query_closure) else "no"
            raise ValueError(f"pass x and y, or y and query_closure=; got {len(reps)} tensors and {closure} closure")
        x = reps[0] if query_closure is None else query_closure()
        return super().__call__(x, reps[-1], target, reduction)


NAME = "grad_cache"
USAGE = """\
usage: python -m wholebatch.integrations.grad_cache -m MODULE [ARGUMENTS]
       python -m wholebatch.integrations.grad_cache SCRIPT.py [ARGUMENTS]

Runs a program whose imports of grad_cache give wholebatch's gradient caching and losses.
"""
_TREES = ("tree_chunk", "tree_unchunk")
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "": (__name__, ("GradCache",)),
    "grad_cache": (__name__, ("GradCache", "RandContext")),
    "context_managers": (__name__, ("RandContext",)),
    "functional": ("wholebatch.gradcache", ("cached", "cat_input_tensor", "gather_input_tensor")),
    "loss": (__name__, ("ContrastiveLossWithQueryClosure", "DistributedContrastiveLoss", "SimpleContrastiveLoss")),
    "pytorch_lightning": (__name__, ()),
    "pytorch_lightning.pl_gradcache": (__name__, ("PLGradCache",)),
    "cachex": ("wholebatch.jax", ("cache_grad", "chunk_encode", "grad_cached", *_TREES, "unchunk_args")),
    "cachex.functional": ("wholebatch.jax", ("cache_grad", "chunk_encode", "grad_cached", "unchunk_args")),
    "cachex.training": ("wholebatch.jax", ("cache_grad", "cache_train_step", "chunk_encode", "unchunk_args")),
    "cachex.tree_utils": ("wholebatch.jax", _TREES),
}
"""Their modules: the module of this library that has their names, which is imported with the first of them."""


def install() -> None:
    """Let `import grad_cache`, and imports of its modules, give the names of this package from now on.

    A package grad_cache that is installed is hidden, not changed. A second call has no effect.

    Raises:
        ImportError: if another grad_cache has been imported before: somebody may hold its classes already.
    """
    present = sys.modules.get(NAME)
    if isinstance(present, _Alias):
        return
    names = sorted(name for name in sys.modules if (name == NAME or name.startswith(f"{NAME}.")) and sys.modules[name])
    if names:
        path = getattr(present, "__file__", None) or names[0]
        raise ImportError(
            f"another grad_cache has been imported before ({path}), and its classes may be in use; put "
            "`import wholebatch.integrations.grad_cache.alias` before the first import of grad_cache, or start the "
            "program with python -m wholebatch.integrations.grad_cache",
            name=NAME,
        )
    modules = {name: _Alias(name, *ours) for name, ours in MODULES.items()}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if name:
            setattr(modules[parent], last, module)
        sys.modules[module.__name__] = module


def start(argv: Sequence[str]) -> Callable[[], None]:
    """Return the program of the command."""
    install()
    return program_of(argv)


class _Alias(ModuleType):
    """A module of theirs, with names of a module of ours."""

    def __init__(self, name: str, ours: str, names: Sequence[str]) -> None:
        super().__init__(f"{NAME}.{name}".rstrip("."), f"An alias of {ours}.")
        self.__all__ = [*names]
        spec = find_spec(ours)
        self.__file__ = spec.origin if spec else None
        is_package = any(other.startswith(f"{name}.".lstrip(".")) for other in MODULES if other != name)
        self.__spec__ = ModuleSpec(self.__name__, None, origin=self.__file__, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []  # no files: all modules are made here
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        if name in self.__all__:
            return getattr(import_module(self._ours), name)
        raise AttributeError(
            f"{self.__name__} is an alias made by wholebatch, which has no {name}; it has {', '.join(self.__all__)}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]

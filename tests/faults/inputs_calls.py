"""One right call of everything public: its arguments, by their names.

The value of a parameter is listed under `entry.parameter`, or else under the parameter's name; a parameter with a
default that is listed under neither is left out of the right call. So a new name is covered if its arguments have known
names, and is reported as a name without a right call otherwise.
"""

from __future__ import annotations

import atexit
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import wholebatch as wb


def _rows(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


def _labels() -> torch.Tensor:
    return torch.tensor([0, 0, 1, 2])


class UserFunctionError(Exception):
    """The error that a user's function raises for any argument."""


def of_user(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a user's function, so that its errors are not counted as the library's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise UserFunctionError(f"{type(error).__name__}: {error}") from error

    return call


@of_user
def _mean_of_squares(*tensors: Any, **_kwargs: Any) -> torch.Tensor:
    return sum(x.square().mean() for x in tensors)


def _parameter() -> nn.Parameter:
    p = nn.Parameter(torch.randn(4, 3))
    p.grad = torch.randn(4, 3)
    return p


def _targets() -> Any:
    return wb.heads.Targets(torch.rand(4, 1), 20 + torch.rand(4, 1))


def _head() -> Any:
    return wb.PartialFC(3, 6)


@cache
def scratch() -> Path:
    """Return a folder for files, which is removed when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="wholebatch-inputs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_COUNT = iter(range(10**9))


def _new_folder() -> Path:
    return scratch() / f"head-{next(_COUNT)}"


@cache
def _saved_head() -> Path:
    folder = scratch() / "saved"
    wb.heads.save_head(folder, _head())
    return folder


@cache
def _insightface() -> Path:
    folder = scratch() / "insightface"
    folder.mkdir()
    torch.save(torch.randn(6, 3), folder / "rank_0_softmax_weight.pt")
    return folder


def problem() -> Any:
    """Return a problem that is audited in no time."""
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(8, 3)}
    return wb.Problem(model, batch, lambda model, batch: model(batch["x"]).square().mean())


def one(_rank: int = 0) -> int:
    """Return 1; ranks run this."""
    return 1


# The value of each parameter in a right call, or a function that makes it.
VALUES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("image_features", "text_features", "queries", "keys", "z0", "z1", "features"), _rows(4, 3)),
    **dict.fromkeys(("teacher_image_features", "teacher_text_features"), _rows(4, 5)),
    **dict.fromkeys(("labels", "indices"), _labels),
    **dict.fromkeys(("image_log_averages", "text_log_averages"), _rows(4)),
    "embeddings": _rows(4, 3),
    "centers": _rows(6, 3),
    "queue": _rows(5, 3),
    "x": _rows(4, 3),
    "like": _rows(4, 3),
    "logit_scale": lambda: 10.0,
    "logit_bias": lambda: -5.0,
    "teacher_logit_scale": lambda: 3.0,
    "dims": lambda: (1, 2),
    "examples": lambda: 10,
    "size": lambda: 8,
    "embedding_size": lambda: 3,
    "num_classes": lambda: 6,
    "targets": _targets,
    "params": lambda: [_parameter()],
    "param_group": lambda: {"params": [_parameter()], "lr": 0.1},
    "replicated": lambda: [_parameter()],
    "sharded": lambda: [_parameter()],
    "max_norm": lambda: 1.0,
    "head": _head,
    "func": lambda: lambda x: 2 * x,
    "loss_fn": lambda: _mean_of_squares,
    "models": lambda: [of_user(nn.Linear(3, 2))],
    "chunk_sizes": lambda: 2,
    "tokens": lambda: 12,
    "TokenBudget.chunks.mask": lambda: torch.ones(4, 3),
    "MultimodalSplit.__call__.model_input": lambda: torch.ones(4, 3),
    "MultimodalSplit.__call__.chunk_size": lambda: 2,
    "InputChunk.input": lambda: torch.ones(2, 3),
    "InputChunk.rows": lambda: (0, 1),
    "model_inputs": lambda: (torch.randn(4, 3),),
    "representations": lambda: (torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)),
    "dest": lambda: 0,
    "source": lambda: 0,
    "color": lambda: 0,
    "root": lambda: 0,
    "caller": lambda: "inputs",
    "state": lambda: dict,
    "problem": lambda: problem,
    **dict.fromkeys(("audit.ranks", "assert_exact.ranks"), lambda: (1,)),
    "fn": lambda: one,
    "rank": lambda: 0,
    "rows": lambda: slice(0, 4),
    "cols": lambda: slice(0, 4),
    "side": lambda: 2,
    "row": lambda: 0,
    "col": lambda: 0,
    "length": lambda: 3,
    "tile": lambda: wb.partition.Tile(slice(0, 2), slice(0, 2)),
    "counts": lambda: (4,),
    "total": lambda: 10,
    "parts": lambda: 3,
    "batch_size": lambda: 64,
    "with_statistics.loss": lambda: wb.functional.clip_loss,
    "s": lambda: 30.0,
    "Scale.init": lambda: 14.3,
    "m1": lambda: 1.0,
    "m2": lambda: 0.3,
    "m3": lambda: 0.1,
    "model": lambda: nn.Linear(3, 2),
    "norms": lambda: 20 + torch.rand(4),
    "matches": lambda: lambda module: False,
    "SyncControl.hold": lambda: lambda module: None,
    "encode.model": lambda: of_user(nn.Linear(3, 2)),
    "model_input": _rows(4, 3),
    "encode.chunk_size": lambda: 2,
    "control": lambda: wb.gradcache.SyncControl(lambda module: False, lambda module: None),
    "modules": lambda: (),
    # by entry
    **{
        f"{loss}.forward.{name}": (lambda value=value: value)
        for loss in (
            "CLIPLoss",
            "DistillationLoss",
            "InfoNCELoss",
            "MatryoshkaLoss",
            "MaxSimLoss",
            "MoCoLoss",
            "SameTaskInfoNCELoss",
            "SigLIPLoss",
            "SoftLabelCLIPLoss",
            "TowersLoss",
        )
        for name, value in (("logit_scale", 10.0), ("logit_bias", -5.0))
        if name == "logit_scale" or loss == "SigLIPLoss"
    },
    "DistillationLoss.forward.teacher_image_features": _rows(4, 5),
    "DistillationLoss.forward.teacher_text_features": _rows(4, 5),
    "DistillationLoss.forward.teacher_logit_scale": lambda: 3.0,
    "terms": lambda: {"mean": wb.terms.Mean()},
    **dict.fromkeys(("equal.name", "unequal.name"), lambda: "label"),
    "row_loss": lambda: of_user(lambda r, x, p: r.mean),
    "towers": lambda: ["image", "text"],
    "TowersLoss.forward.features": lambda: {"image": torch.randn(4, 3), "text": torch.randn(4, 3)},
    **dict.fromkeys(("tasks", "CrossBatchSupConLoss.forward.examples"), _labels),
    **dict.fromkeys(("image_labels", "text_labels", "teacher_scores", "teacher_margins"), _rows(4, 2)),
    **dict.fromkeys(("anchors", "positives"), _rows(4, 3)),
    **dict.fromkeys(("ListwiseDistillationLoss.forward.documents", "MarginMSELoss.forward.negatives"), _rows(4, 2, 3)),
    "CrossBatchSupConLoss.forward.queue": lambda: wb.KeyQueue(
        5, 3, data=dict.fromkeys(("labels", "examples"), torch.int64)
    ),
    "activations": _rows(4, 3),
    "directions": _rows(2, 3),
    **{
        f"{loss}.{name}": _rows(4, 2, 3)
        for loss in ("max_sim_loss", "reference.max_sim_loss", "MaxSimLoss.forward", "max_sim")
        for name in ("queries", "documents")
    },
    "items": lambda: wb.partition.Partition((2, 1)),
    "lengths": lambda: (3, 1, 2),
    "Ragged.of.items": lambda: slice(0, 2),
    "Problem.batch": lambda: {"x": torch.randn(8, 3)},
    "Problem.loss": lambda: _mean_of_squares,
    "MagFace.norms": lambda: (10.0, 110.0),
    "save_head.folder": _new_folder,
    "load_head.folder": _saved_head,
    "load_insightface.folder": _insightface,
    "select_communicator.group": lambda: None,
    "run_ranks.world_size": lambda: 2,
    "run_ranks.args": lambda: (),
    "w_mse_loss.epsilon": lambda: 0.5,
    "WMSELoss.epsilon": lambda: 0.5,
    "calibrate.losses": lambda: ("clip",),
    "calibrate.comm": wb.comm.LocalCommunicator,
    "reference.partial_fc_loss.margin": wb.ArcFace,
    "agree_on_overflow.scaler": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "agree_on_overflow.optimizers": lambda: (torch.optim.SGD([_parameter()], lr=0.1),),
}
for _class in ("TorchCommunicator", "LocalCommunicator"):
    VALUES[f"{_class}.backward.loss"] = lambda: torch.randn(3, requires_grad=True).sum()


def _with_a_message(comm: Any) -> Any:
    """Return a communicator that has sent itself a message to receive; its ends do not compare messages."""
    comm.check = False
    comm.isend(torch.randn(4, 3), 0).wait()
    return comm


# Functions that prepare the object before its method is called.
PREPARED: dict[str, Callable[[Any], Any]] = {
    f"{of}Communicator.{method}": _with_a_message
    for of in ("Local", "Torch")
    for method in ("send", "recv", "isend", "irecv")
}
# Arguments that belong to the object.
OF_THE_OBJECT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    f"{of}Communicator.wait": ("handle", lambda comm: comm.iall_reduce(torch.randn(3))) for of in ("Local", "Torch")
}

# Public names that are not called here, with the reason.
LEFT_OUT = {
    "Communicator": "abstract: its methods are called on LocalCommunicator and TorchCommunicator",
    "MPICommunicator": "needs MPI; it shares the methods of the others, and tests/test_mpi.py calls it",
    "Handle": "made by a communicator",
    "SparseAdamW.load_state_dict": "torch's own checks of a state; tests/test_sparse_steps.py loads states",
    "Margin": "a protocol",
    **dict.fromkeys(
        ("BatchStatistics", "LossAndStatistics", "LossAndAverages", "TermStatistics"),
        "a record that the library returns",
    ),
    **dict.fromkeys(("TokenChunk", "TopClasses", "TopDocuments"), "a record that the library returns"),
    "Tokens": "a record that a caller makes, and that a loss checks",
    **dict.fromkeys(
        ("NegativeTransform", "ObservesAngles", "ObservesNorms", "Regularizes", "TransformsNegatives"), "a protocol"
    ),
    "Targets": "a record that the library passes to a margin",
    "Option": "a record that the library returns",
    "Plan": "a record that the library returns",
    "Rates": "a record that the library returns; plan checks it",
    "Group": "a type",
    "other": "a mask, which PairLoss calls",
    **{f"{name}.reference": "takes the arguments of forward, which has the calls" for name in wb.recipes.__all__},
    "GradCache.split_inputs": "a step that a subclass may replace: its arguments come from the library",
    "GradCache.model_call": "a step that a subclass may replace: its arguments come from the library",
    "GradCache.get_reps": "a step that a subclass may replace: its arguments come from the library",
    "GradCache.compute_loss": "a step that a subclass may replace: its arguments come from the library",
    "AdaFace.observe_norms": "called by PartialFC",
    "CurricularFace.observe_angles": "called by PartialFC",
    "CurricularFace.of_negatives": "called by PartialFC",
    "MagFace.regularizer": "called by PartialFC",
}
# Calls that take seconds: one in 100 cases.
SLOW = ("audit", "assert_exact", "calibrate", "run_ranks")


@dataclass(frozen=True)
class Entry:
    """Something public that can be called."""

    name: str
    module: str
    parameters: dict[str, inspect.Parameter]
    owner: Entry | None = None  # of a method: how its object is made
    called: Any = field(default=None, repr=False)

    def right_arguments(self) -> dict[str, Any]:
        """Return the arguments of a call that succeeds."""
        found = {}
        for name, parameter in self.parameters.items():
            make = VALUES.get(f"{self.name}.{name}") or VALUES.get(name)
            optional = parameter.default is not inspect.Parameter.empty or parameter.kind in _VARIABLE
            if make is not None and (not optional or f"{self.name}.{name}" in VALUES or parameter.kind in _VARIABLE):
                found[name] = make()
            elif not optional and name != OF_THE_OBJECT.get(self.name, ("",))[0]:
                raise LookupError(f"{self.name} has an argument {name!r}, of which inputs_calls.VALUES knows no value")
        return found

    def function(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the function to call, and the arguments that belong to this object."""
        if self.owner is None:
            return self.called, {}
        method = self.called
        if isinstance(inspect.getattr_static(self.owner.called, method), classmethod):
            return getattr(self.owner.called, method), {}
        made = self.owner.call(self.owner.right_arguments())
        made = PREPARED[self.name](made) if self.name in PREPARED else made
        more = {}
        if self.name in OF_THE_OBJECT:
            name, make = OF_THE_OBJECT[self.name]
            more[name] = make(made)
        return getattr(made, "__call__" if method == "forward" else method), more

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call with these arguments, by position if they have no names; wait for operations that the call starts."""
        function, more = self.function()
        try:
            found = self._call(function, more | arguments)
        finally:
            for handle in more.values():
                if "under way" in repr(handle):
                    handle.wait()
        return found.wait() if isinstance(found, wb.comm.Handle) else found

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        positional, named = [], {}
        for name, parameter in self.parameters.items():
            if name not in arguments:
                continue
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                positional += [*arguments[name]]
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= arguments[name]
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
                parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and self._has_star and not named
            ):
                positional.append(arguments[name])
            else:
                named[name] = arguments[name]
        return function(*positional, **named)

    @property
    def _has_star(self) -> bool:
        return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in self.parameters.values())


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def modules() -> list[ModuleType]:
    """Return the modules with public names, except those of JAX."""
    names = (
        "functional",
        "comm",
        "gradcache",
        "heads",
        "partition",
        "planning",
        "recipes",
        "terms",
        "testing",
        "reference",
    )
    return [wb, *(getattr(wb, name) for name in names)]


def entries(of: list[ModuleType] | None = None) -> Iterator[Entry]:
    """Yield everything public that can be called, each once."""
    seen: set[int] = set()
    for module in of or modules():
        for name in module.__all__:
            found = getattr(module, name)
            if name in LEFT_OUT or id(found) in seen or not callable(found) or inspect.ismodule(found):
                continue
            if isinstance(found, type) and issubclass(found, BaseException):
                continue
            seen.add(id(found))
            prefix = "reference." if module is wb.reference else ""
            entry = Entry(prefix + name, module.__name__, _parameters(found), called=found)
            yield entry
            if isinstance(found, type):
                yield from _methods(entry)


def _methods(owner: Entry) -> Iterator[Entry]:
    for name, method in inspect.getmembers(owner.called, callable):
        module = getattr(method, "__module__", None) or ""
        public = not name.startswith("_") or name == "__call__"
        if not public or not module.startswith("wholebatch") or name in ("extra_repr", "__call__" * _is_module(owner)):
            continue
        full = f"{owner.name}.{name}"
        if full not in LEFT_OUT and not isinstance(method, property | type):
            yield Entry(full, owner.module, _parameters(getattr(owner.called, name), bound=True), owner, name)


def _is_module(owner: Entry) -> bool:
    return issubclass(owner.called, nn.Module)


def _parameters(of: Any, *, bound: bool = False) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(of).parameters)
    if bound and next(iter(found), "") == "self":
        del found["self"]
    return found

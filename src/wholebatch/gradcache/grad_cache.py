"""Gradient caching: a step of training whose batch is encoded chunk by chunk, with the gradient of the whole batch.

The story of a step is in `two_passes`; here is what a caller sees of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._checks import check_count, check_flag, check_items, shown
from .._graph import checked_loss, leaves_of
from ..comm import Communicator, Group, select_communicator
from ..comm.handshake import raised_on_all_ranks
from ..comm.select import check_group
from .inputs import (
    call_model,
    check_input,
    check_parts,
    may_be_empty,
    own_containers,
    representations,
    rows_of,
    split_inputs,
    tensors_of,
    without_rows,
)
from .keep import Keeper, KeepGraphs, check_keep_graphs
from .observe import Observer
from .parameter_sync import Synchronized, synchronized
from .passed_by import check_not_passed_by
from .replay import Buffers
from .replicas import check_same, checksums, digest, due, replicated
from .two_passes import Chunk, Encoder, differentiable, first_pass, second_pass

_T = TypeVar("_T")
_Remember = Callable[..., None]  # of tensors, and of engines
_Sums = dict[str, int]
_Compared = tuple[_Sums, list[str]]


class GradCache:
    r"""A training step on a batch of any size, in the memory of a chunk, with the gradient of the whole batch.

    dL/dtheta = sum_c (dr_c/dtheta)^T dL/dr_c,    L = loss_fn(r),    r: the representations of all chunks c

    The encoders run over the chunks without a graph; the loss sees all representations and gives their gradients; the
    encoders run again, chunk by chunk, and backward. Random numbers, autocast and buffers are replayed, and an engine
    synchronizes gradients once per step (see `wholebatch.gradcache.register_sync_control`).

    Args:
        models: encoders, modules or functions; the same one twice where it encodes both inputs.
        chunk_sizes: rows of a chunk; one number, or one for each model.
        loss_fn: (r_0, r_1, ..., \**loss_kwargs) -> L, of one element. r_k has the rows of input k; a model with several
            representations gives a tuple of them. Its parameters get their gradients, once.
        split_input_fn: (input, chunk size) -> list of chunks, for inputs that are no trees of tensors.
        get_rep_fn: what a model returns -> its representation: a tensor with the rows of its input, or a tuple of such.
            A tensor of shape () among them is one number for the whole batch, such as a learned scale.
        fp16: run under float16 autocast; needs a scaler. Otherwise the caller's autocast holds, whatever its dtype.
        scaler: a GradScaler, which scales the loss before its gradient is taken; stepping it is the caller's.
        keep_graphs: which chunks keep the graph of their first pass, and are not encoded again: a number of them, a
            fraction, or "auto", as many as fit. More memory, less time.
        memory_budget: bytes that kept graphs may hold under "auto"; None: most of what is free.
        group: ranks that make the step together, as in :func:`wholebatch.functional.clip_loss`.
        unchecked: parameters of which each rank has values of its own (experts, tensor parallel without DTensors), or
            whose engine you do not call on purpose. The others are compared between ranks, see `cache_step`.

    Raises:
        ValueError: if an argument is not what it should be.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import torch, wholebatch as wb
    >>> encoder, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    >>> step = wb.GradCache([encoder, encoder], 2, lambda a, b: (a @ b.T).logsumexp(1).mean())
    >>> loss = step(x, x)
    >>> encoder.weight.grad.shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        models: Sequence[Callable[..., Any]] | nn.ModuleList,
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        get_rep_fn: Callable[[Any], Any] | None = None,
        fp16: bool = False,
        scaler: Any = None,
        *,
        keep_graphs: KeepGraphs = 0,
        memory_budget: int | None = None,
        group: Group = None,
        unchecked: Iterable[Tensor] = (),
    ) -> None:
        listed: Any = models
        if isinstance(listed, nn.Module) and not isinstance(listed, nn.ModuleList):
            raise ValueError(f"models must be a list of modules or functions, got {type(models).__name__}")
        models = check_items("models", listed, "modules or functions")
        if not models or not all(callable(model) for model in models):
            raise ValueError(f"models must be a list of modules or functions, got {shown(models)}")
        one = not isinstance(chunk_sizes, Sequence) or isinstance(chunk_sizes, str | bytes)
        sizes: list[Any] = [chunk_sizes] * len(models) if one else check_items("chunk_sizes", chunk_sizes, "integers")
        if len(sizes) != len(models):
            raise ValueError(
                f"chunk_sizes must be one number, or one for each of the {len(models)} models; got {shown(sizes)}"
            )
        for size in sizes:
            check_count("chunk_sizes", size, "rows of a chunk")
        for name, fn in (("loss_fn", loss_fn), ("split_input_fn", split_input_fn), ("get_rep_fn", get_rep_fn)):
            if not callable(fn) and (fn is not None or name == "loss_fn"):
                raise ValueError(f"{name} must be callable, got {type(fn).__name__}")
        check_flag("fp16", fp16)
        if scaler is not None and (isinstance(scaler, type) or not callable(getattr(scaler, "scale", None))):
            raise ValueError(f"scaler must be a torch.amp.GradScaler, which has scale(loss); got {shown(scaler)}")
        check_group(group)
        if fp16 and scaler is None:
            raise ValueError("fp16=True needs a scaler: float16 gradients underflow without; or use bfloat16 autocast")
        check_keep_graphs(keep_graphs, memory_budget)
        if isinstance(unchecked, nn.Module | Tensor) or not isinstance(unchecked, Iterable):
            raise ValueError(
                f"unchecked must be a list of parameters, such as experts.parameters(), got {type(unchecked).__name__}"
            )
        left_out: list[Any] = [*unchecked]
        for p in left_out:
            if not isinstance(p, Tensor):
                raise ValueError(f"unchecked must be a list of parameters, got one with a {type(p).__name__}")
        self.models, self.chunk_sizes, self.loss_fn = models, sizes, loss_fn
        self.split_input_fn, self.get_rep_fn = split_input_fn, get_rep_fn
        self.fp16, self.scaler = fp16, scaler
        self.keep_graphs, self.memory_budget, self.group = keep_graphs, memory_budget, group
        self.unchecked: list[Tensor] = left_out
        self._steps = 0  # that all ranks have made

    def __call__(self, *model_inputs: Any, no_sync_except_last: bool = True, **loss_kwargs: Any) -> Tensor:
        """Same as :meth:`cache_step`."""
        return self.cache_step(*model_inputs, no_sync_except_last=no_sync_except_last, **loss_kwargs)

    def cache_step(self, *model_inputs: Any, no_sync_except_last: bool = True, **loss_kwargs: Any) -> Tensor:
        r"""Add the gradient of the loss of these inputs to all parameters'.

        Args:
            model_inputs: one for each model: a tensor, a list (the model's arguments), a mapping (its keywords), or
                (list, mapping). Their rows may differ between ranks and may be 0.
            no_sync_except_last: accepted for programs that pass it: gradients are synchronized once, whatever it says.
            loss_kwargs: passed on to loss_fn.

        Returns:
            L, detached, not scaled.

        Collective on several ranks: four handshakes, what loss_fn does, and the engine's one synchronization.

        The first step checks that no model reaches parameters past the DistributedDataParallel that holds them. The
        first three steps and every hundredth compare the parameters of all ranks: they are the same, unless an
        optimizer has made a step from gradients that were not reduced. This takes a checksum of each parameter and one
        wait for a GPU. Parameters of FSDP, PartialFC and `unchecked` are left out.

        Raises:
            ValueError: on every rank, whichever rank made the mistake, with gradients as they were: inputs that are not
                as many as models, or disagree on their rows; a representation with other rows, or without gradient; a
                loss that is not one number, or ignores a representation; `torch.no_grad()`; a model that does not call
                its engine; parameters that differ between ranks.
            RuntimeError: if the second forward pass is not the first; gradients are as they were. On ranks where it is,
                a ValueError. What a model itself raises is raised as it is, and in the second pass on its rank alone.
        """
        comm = select_communicator(self.group)
        chunks: list[Chunk] = []

        def split() -> list[Any]:
            check_flag("no_sync_except_last", no_sync_except_last)
            if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                raise ValueError(
                    "a step of GradCache is forward and backward, and must not be under torch.no_grad() or "
                    "inference_mode; for the loss alone call the models, and loss_fn of what they give"
                )
            chunks.extend(self._chunks(model_inputs))
            counts = [sum(c.encoder.index == k for c in chunks) for k in range(len(self.models))]
            visible = synchronized(module for chunk in chunks if chunk.first for module in chunk.encoder.visible)
            collective = comm.size > 1 and any(engine.control.collective for engine in visible)
            return [counts, all(may_be_empty(chunk.part) for chunk in chunks), self.keep_graphs, collective]

        everyone = _agree(comm, split)
        if any(collective for *_, collective in everyone):
            chunks = self._filled_up(chunks, everyone)
        alike = all(facts == everyone[0] for facts in everyone) and self.keep_graphs != "auto"
        device = _device_of(model_inputs, self.models)
        keeper = Keeper(self.keep_graphs, len(chunks), self.memory_budget, device)
        buffers = Buffers()
        found: list[list[Tensor]] = []

        def encode() -> None:
            first_pass(chunks, keeper, Observer(buffers, may_be_collective=alike or everyone[0][-1]))
            for chunk in chunks:
                if chunk.last:
                    _check_parameters(chunk)
                if chunk.first and not self._steps:
                    of = chunk.encoder
                    engines = of.synchronized.values()
                    check_not_passed_by(of.name, of.leaves, of.seen.values(), engines, self.unchecked)
            found.extend(_joined([c for c in chunks if c.encoder.index == k]) for k in range(len(self.models)))

        with self._autocast(device), _as_they_were() as kept, _moved_once(buffers) as state:
            _agree(comm, encode)
            engines = {id(e.module): e for chunk in chunks for e in chunk.engines}
            kept((p for chunk in chunks if chunk.first for p in chunk.encoder.parameters.values()), engines.values())
            owned = {id(p) for engine in engines.values() for p in engine.module.parameters()}
            of_loss: list[Tensor] = []

            def compute() -> tuple[Tensor, list[list[Tensor | None]], list[tuple[Tensor, Tensor]]]:
                forms = [chunk.encoder.form for chunk in chunks if chunk.first]
                reps = [form(x) for form, x in zip(forms, found, strict=True)]
                loss = checked_loss(self.compute_loss(*reps, **loss_kwargs)).reshape(())
                if not loss.requires_grad:
                    raise ValueError(
                        "the loss has no gradient: loss_fn must not detach representations, or run under no_grad"
                    )
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                of_loss.extend(leaves_of([scaled]))
                kept(of_loss)
                return loss.detach(), *_gradients(scaled, found, owned)

            def compared() -> dict[str, int]:
                if comm.size == 1 or not due(self._steps):
                    return {}
                encoders = [chunk.encoder for chunk in chunks if chunk.first]
                return checksums(replicated(encoders, self.compute_loss, of_loss, self.unchecked))

            (loss, of_found, extra), sums = _agreed(comm, compute, compared)
            _check_same(comm, *sums, steps=self._steps)
            state.extend(buffers.now())
            _end_together(comm, second_pass(chunks, of_found, extra, buffers, kept, watch=not self._steps))
            self._steps += 1
        return loss

    # What a subclass may replace.
    def split_inputs(self, model_input: Any, chunk_size: int) -> Sequence[Any]:
        """The chunks of an input."""
        return (
            split_inputs(model_input, chunk_size)
            if self.split_input_fn is None
            else self.split_input_fn(model_input, chunk_size)
        )

    def model_call(self, model: Callable[..., Any], model_input: Any) -> Any:
        """A model's output for a chunk."""
        return call_model(model, model_input)

    def get_reps(self, model_out: Any) -> Any:
        """The representation in an output."""
        return model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)

    def compute_loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:
        """The loss of all representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def _chunks(self, model_inputs: Sequence[Any]) -> list[Chunk]:
        if len(model_inputs) != len(self.models):
            raise ValueError(
                f"there must be one input for each of the {len(self.models)} models, got {len(model_inputs)}"
            )
        chunks = []
        for index, (model, model_input, size) in enumerate(
            zip(self.models, model_inputs, self.chunk_sizes, strict=True)
        ):
            name = f"model {index} ({type(model).__name__})"
            if self._splits_trees:
                check_input(model_input, f"the input of {name}", size)
            encoder, parts = Encoder(model, index, name), [*self.split_inputs(model_input, size)]
            if not parts:
                raise ValueError(f"the input of {name} was split into no chunks; of no rows give one without rows")
            if not self._splits_trees:
                check_parts(model_input, parts, f"the input of {name}")
            for number, part in enumerate(parts):
                chunks.append(self._chunk(encoder, part, first=number == 0))
            chunks[-1].last = True
        return chunks

    def _chunk(self, encoder: Encoder, part: Any, *, first: bool = False) -> Chunk:
        def call() -> Any:
            return self.model_call(encoder.model, own_containers(part))

        return Chunk(encoder, call, partial(self._read, encoder, part), part, first)

    @property
    def _splits_trees(self) -> bool:
        """Whether inputs are split here, so that rows can be counted."""
        return self.split_input_fn is None and type(self).split_inputs is GradCache.split_inputs

    def _filled_up(self, chunks: Sequence[Chunk], everyone: Sequence[Any]) -> list[Chunk]:
        """As many chunks of each model as the rank with most has, the last ones without rows."""
        counts, empty, keep, _ = zip(*everyone, strict=True)
        if any(other != keep[0] for other in keep):
            raise ValueError(
                f"this engine's passes are collective: keep_graphs must be the same on all ranks, got {keep}"
            )
        if self.keep_graphs == "auto":
            raise ValueError(
                "keep_graphs='auto' might keep another number of graphs on each rank, and this engine's passes are "
                "collective: give a number or a fraction"
            )
        if any(other != counts[0] for other in counts) and not all(empty):
            raise ValueError(
                f"this engine's passes are collective, and ranks have different numbers of chunks, {[*counts]}: to "
                "fill them up, chunks must be trees of tensors with rows"
            )
        filled = []
        for index, count in enumerate(max(of_model) for of_model in zip(*counts, strict=True)):
            local = [chunk for chunk in chunks if chunk.encoder.index == index]
            nothing = without_rows(local[-1].part)
            local[-1].last = False
            filled += [*local, *(self._chunk(local[0].encoder, nothing) for _ in range(count - len(local)))]
            filled[-1].last = True
        return filled

    def _read(self, encoder: Encoder, part: Any, out: Any) -> tuple[Tensor, ...]:
        """The representations of a chunk, in what the model gave."""
        found, encoder.form = representations(self.get_reps(out), encoder.name)
        if self._splits_trees:
            rows = rows_of(part, encoder.name)
            for number, x in enumerate(found):
                if x.dim() and len(x) != rows:
                    raise ValueError(
                        f"{encoder.name} got {rows} rows and returned {len(x)} as representation {number}: each row of "
                        "its input must have one"
                    )
        return found

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.float16) if self.fp16 else nullcontext()


def _joined(chunks: Sequence[Chunk]) -> list[Tensor]:
    """All rows of each of a model's representations, as leaves; what chunks have found are then slices of these.

    Raises:
        ValueError: if a chunk's differ from another's in more than rows.
    """
    leaves = []
    for number, parts in enumerate(zip(*(chunk.found for chunk in chunks), strict=True)):
        alike = {(x.dtype, x.dim(), x.shape[1:]) for x in parts}
        if len(alike) > 1:
            raise ValueError(
                f"representation {number} of {chunks[0].encoder.name} must have the same shape in all chunks, but for "
                f"its rows, and the same dtype; got {[(*x.shape, x.dtype) for x in parts]}: pad to one length"
            )
        if not parts[0].dim() and any(not torch.equal(x, parts[0]) for x in parts):
            raise ValueError(
                f"representation {number} of {chunks[0].encoder.name} has shape (), one number for all rows, and must "
                f"be the same in every chunk; got {[x.item() for x in parts]}. Numbers of rows have shape (rows,)"
            )
        rows = parts[0].dim() and len(parts) > 1
        leaves.append(torch.cat([x.detach() for x in parts]) if rows else parts[0].detach())
    starts = [0] * len(leaves)
    for chunk in chunks:
        counts = [len(x) if x.dim() else 0 for x in chunk.found]
        chunk.rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        starts = [at.stop for at in chunk.rows]
        if not chunk.kept:
            chunk.found = tuple(x[at] if x.dim() else x for x, at in zip(leaves, chunk.rows, strict=True))
    trained = chunks[0].encoder.trained or [differentiable(leaf) for leaf in leaves]
    return [leaf.detach().requires_grad_(of) for leaf, of in zip(leaves, trained, strict=True)]


def _check_parameters(chunk: Chunk) -> None:
    """No parameter has its optimizer step in its backward pass, of which there are many."""
    owned = {id(p) for engine in chunk.engines for p in engine.module.parameters()}
    for p in chunk.encoder.parameters.values():
        if id(p) not in owned and getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a parameter of {chunk.encoder.name}, of shape {tuple(p.shape)}, has a hook for "
                "when its gradient is accumulated (an optimizer in the backward pass?), which is in every chunk. Step "
                "the optimizer after the cached step"
            )


def _gradients(
    loss: Tensor, found: Sequence[Sequence[Tensor]], owned: set[int]
) -> tuple[list[list[Tensor | None]], list[tuple[Tensor, Tensor]]]:
    """Of each model's representations; and of those parameters of an engine that the loss used without the engine.

    Other parameters of the loss have theirs then, by its backward pass.
    """
    taken = [p for p in leaves_of([loss]) if id(p) in owned]
    before = [p.grad for p in taken]
    for p in taken:
        p.grad = None
    loss.backward()
    extra = [(p, p.grad) for p in taken if p.grad is not None]
    for p, grad in zip(taken, before, strict=True):
        p.grad = grad
    for model, of_model in enumerate(found):
        for number, x in enumerate(of_model):
            if x.requires_grad and x.dim() and x.grad is None:
                raise ValueError(
                    f"the loss does not depend on representation {number} of model {model}; what it does not train is "
                    "not to be encoded here"
                )
    return [[x.grad for x in of_model] for of_model in found], extra


@contextmanager
def _as_they_were() -> Iterator[_Remember]:
    """If what is inside fails, the gradients of the tensors and engines that it named are as they were when it did.

    While gradients accumulate, that takes a copy of them.
    """
    before: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
    put_back: list[Callable[[], None]] = []

    def remember(tensors: Iterable[Tensor], engines: Iterable[Synchronized] = ()) -> None:
        for p in tensors:
            if p.requires_grad and id(p) not in before:
                before[id(p)] = p, p.grad, None if p.grad is None else p.grad.clone()
        put_back.extend(e.control.remember(e.module) for e in engines if e.control.remember is not None)

    try:
        yield remember
    except BaseException:
        for p, grad, value in before.values():
            p.grad = grad
            if grad is not None and value is not None:
                grad.detach().copy_(value)
        for restore in put_back:
            restore()
        raise


@contextmanager
def _moved_once(buffers: Buffers) -> Iterator[list[Tensor]]:
    """In the end, buffers have the state that is put into the list, or the one that they are in."""
    state: list[Tensor] = []
    try:
        yield state
    finally:
        buffers.restore(state or buffers.now())


def _agreed(comm: Communicator, compute: Callable[[], _T], compared: Callable[[], _Sums]) -> tuple[_T, _Compared]:
    """What `compute` returns, which may communicate; an error of all ranks if it raises on one.

    And the checksums that are compared between ranks, with each rank's digest of them.
    """
    result, local, sums = list[_T](), None, dict[str, int]()
    try:
        result.append(compute())
    except Exception as error:
        if comm.size == 1 or raised_on_all_ranks(error):
            raise
        local = error

    def state() -> str:
        if local is not None:
            raise local
        sums.update(compared())
        return digest(sums)

    digests = _agree(comm, state)
    return result[0], (sums, digests)


def _check_same(comm: Communicator, sums: _Sums, digests: Sequence[str], *, steps: int) -> None:
    """Raise ValueError, on all ranks, if checksums differ between them."""
    if any(other != digests[0] for other in digests):
        check_same(_agree(comm, lambda: sums), steps=steps)


def _end_together(comm: Communicator, error: Exception | None) -> None:
    """Go on if no rank has an error; else none does."""

    def state() -> None:
        if error is not None:
            raise error

    _agree(comm, state)


def _agree(comm: Communicator, state: Callable[[], Any]) -> list[Any]:
    """What `state` returns on each rank; an error of all of them if it raises on one, there its own."""
    if comm.size == 1:
        return [state()]
    local: list[Exception] = []

    def facts() -> dict[str, Any]:
        try:
            return {"found": state()}
        except Exception as error:
            local.append(error)
            raise

    try:
        return [of_rank["found"] for of_rank in comm.handshake(facts, caller="GradCache")]
    except ValueError:
        if local and not isinstance(local[0], ValueError):
            raise local[0] from None
        raise


def _device_of(inputs: Sequence[Any], models: Sequence[object]) -> torch.device:
    """Where the step runs: where its models are, or its inputs."""
    for model in models:
        if isinstance(model, nn.Module):
            for p in model.parameters():
                return p.device
    for x in tensors_of(list(inputs)):
        return x.device
    return torch.device("cpu")

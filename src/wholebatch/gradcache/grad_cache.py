"""GradCache, the public class: the arguments of a step, the methods that a subclass may replace, and a step's entry.

The two passes of a step are in `step`, and its own or its caller's backward pass in `step_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._base.checks import check_count, check_flag, check_items, shown
from .._base.graph import checked_loss
from ..comm import Group, select_communicator
from ..comm.modules import built, numbered
from ..comm.select import check_group
from .agreement import agree
from .chunks import Chunk, Encoder, facts_of, filled_up
from .engines.known import synchronized
from .inputs.parts import parts_of, split_tree
from .inputs.token_budget import TokenBudget
from .inputs.trees import call_model
from .kept_graphs import Keeper, KeepGraphs, check_keep_graphs, devices_of
from .same_parameters import History
from .step import Step
from .step_loss import Scaler, add_gradients, deferred_loss

ChunkSize = int | TokenBudget
_GRAD_ENABLED = "torch.is_grad_enabled()"
_latest = 0  # number of this rank's latest call


def no_loss(*_reps: object) -> Tensor:
    """Stand for the loss of a cache that encodes for a loss of the caller."""
    raise AssertionError("encode has no loss; please report this")


class GradCache:
    r"""A training step on a batch of any size, in the memory of a chunk, with the gradient of the whole batch.

    dL/dtheta = sum_c (dr_c/dtheta)^T dL/dr_c,    L = loss_fn(r),    r: the representations of all chunks c

    The encoders run over the chunks without a graph. The loss of all representations gives their gradients. Then the
    encoders run again, chunk by chunk, and backward. Both passes use the same random numbers, autocast state and
    buffers. An engine such as DDP synchronizes gradients once per step (see
    `wholebatch.gradcache.register_sync_control`).

    Args:
        models: encoders, modules or functions, one for each input; a shared encoder is listed twice.
        chunk_sizes: rows of a chunk, or a :class:`TokenBudget`, by which rows of a padded input are grouped by length;
            one, or one for each model.
        loss_fn: (r_0, r_1, ..., \**loss_kwargs) -> L, of one element. r_k has the rows of input k; for a model with
            several representations it is a tuple. Parameters of loss_fn get their gradients, once.
        split_input_fn: (input, chunk size) -> list of chunks, for inputs that are not trees of tensors with the batch's
            rows. The chunk size is the model's in chunk_sizes. An :class:`InputChunk` names the rows of a chunk.
        get_rep_fn: a model's output -> its representation: a tensor with the rows of its input, or a tuple of such. A
            tensor of shape () among them is one number for the whole batch, such as a learned scale. Token embeddings
            (rows, tokens, d) beside a bool or integer mask (rows, tokens) may differ in tokens between chunks.
        fp16: run under float16 autocast; needs a scaler. Otherwise the caller's autocast holds, whatever its dtype.
        scaler: a GradScaler, which scales the loss before its gradient is taken; the caller steps it.
        keep_graphs: which chunks keep the graph of their first pass, and are not encoded again: a number of them, a
            fraction, or "auto", as many as fit. More memory, less time.
        memory_budget: bytes that kept graphs may hold under "auto", on all devices together; None: most of the free
            memory of each device.
        group: ranks that make the step together, as in :func:`wholebatch.functional.clip_loss`.
        unchecked: parameters whose values differ between ranks on purpose (experts, tensor parallel without DTensors),
            or whose engine you do not call on purpose. The others are compared between ranks, see `cache_step`.
        deferred: whether a step returns the loss with a graph, and its caller goes backward: a framework that calls
            `loss.backward()`, scales the loss, or adds other losses to it.

    Raises:
        ValueError: if an argument is invalid.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import torch, wholebatch as wb
    >>> encoder, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    >>> step = wb.GradCache([encoder, encoder], 2, lambda a, b: (a @ b.T).logsumexp(1).mean())
    >>> loss = step(x, x)
    >>> encoder.weight.grad.shape
    torch.Size([2, 3])

    The same, where someone else goes backward:

    >>> step = wb.GradCache([encoder, encoder], 2, lambda a, b: (a @ b.T).logsumexp(1).mean(), deferred=True)
    >>> (step(x, x) / 4).backward()
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
        *,
        keep_graphs: KeepGraphs = 0,
        memory_budget: int | None = None,
        group: Group = None,
        unchecked: Iterable[Tensor] = (),
        deferred: bool = False,
    ) -> None:
        self.models = _check_models(models)
        self.chunk_sizes = _check_sizes(chunk_sizes, len(self.models))
        for name, fn in (("loss_fn", loss_fn), ("split_input_fn", split_input_fn), ("get_rep_fn", get_rep_fn)):
            if not callable(fn) and (fn is not None or name == "loss_fn"):
                raise ValueError(f"{name} must be callable, got {type(fn).__name__}")
        check_flag("fp16", fp16)
        if scaler is not None and (isinstance(scaler, type) or not callable(getattr(scaler, "scale", None))):
            raise ValueError(f"scaler must be a torch.amp.GradScaler, which has scale(loss); got {shown(scaler)}")
        check_group(group)
        if check_flag("deferred", deferred) and scaler is not None:
            raise ValueError(
                "scaler must be None with deferred=True: whoever goes backward scales the loss, as in "
                f"scaler.scale(loss).backward(); got {shown(scaler)}"
            )
        if fp16 and scaler is None and not deferred:
            raise ValueError("fp16=True needs a scaler: float16 gradients underflow without; or use bfloat16 autocast")
        check_keep_graphs(keep_graphs, memory_budget)
        self.loss_fn, self.split_input_fn, self.get_rep_fn = loss_fn, split_input_fn, get_rep_fn
        self.fp16, self.scaler = fp16, scaler
        self.keep_graphs, self.memory_budget, self.group = keep_graphs, memory_budget, group
        self.unchecked, self.deferred = _checked_parameters(unchecked), deferred
        self._history, self._number = History(), next(built)

    def __call__(self, *model_inputs: object, no_sync_except_last: bool = True, **loss_kwargs: object) -> Tensor:
        """Make a step: the same as :meth:`cache_step`."""
        return self.cache_step(*model_inputs, no_sync_except_last=no_sync_except_last, **loss_kwargs)

    @numbered
    def cache_step(self, *model_inputs: object, no_sync_except_last: bool = True, **loss_kwargs: object) -> Tensor:
        r"""Add the gradient of the loss of these inputs to the gradients of all parameters.

        With `deferred=True`, the backward pass of the returned loss does that, times whatever gradient comes in. Then
        several losses may be added up, of this GradCache or of others, and of models that are called without caching;
        all second passes of one backward pass are made at its end, with one synchronization for each engine. An outer
        `no_sync()` counts where the engine reads it: of DDP in this call, of FSDP in the backward pass. A loss whose
        backward pass never comes is freed like any other. Under `torch.no_grad()` the loss is computed without a graph.

        Args:
            model_inputs: one for each model: a tensor, a list (the model's arguments), a mapping (its keywords, or its
                one argument, as its signature says), or (list, mapping). Their rows may differ between ranks and may
                be 0.
            no_sync_except_last: accepted for programs that pass it; gradients are synchronized once in any case.
            loss_kwargs: passed on to loss_fn.

        Returns:
            L, detached, not scaled; the gradients are computed, and L's own `backward()` raises and says so. With
            `deferred=True`, L with its graph.

        Collective on several ranks: four handshakes, the collectives of loss_fn, and the engine's one synchronization.
        With `deferred=True`, three handshakes in this call and two in the backward pass.

        The first step checks that no call bypasses the DistributedDataParallel that holds the parameters. The first
        three steps and every hundredth compare the parameters of all ranks, which differ if an optimizer has made a
        step with gradients that were not reduced. This takes a checksum of each parameter and one wait for a GPU.
        Parameters of FSDP, PartialFC and `unchecked` are left out.

        Memory: one chunk's graph, the kept graphs, all representations and their gradients; if gradients accumulate
        over steps, a copy of the gradients.

        Raises:
            ValueError: on every rank, whichever rank made the mistake, with gradients as they were: another number of
                inputs than of models, or inputs that disagree on their rows; a representation with other rows, or
                without gradient; a loss that is not one number, or ignores a representation; `torch.no_grad()` without
                `deferred`; a model that does not call its engine; parameters that differ between ranks. In the
                backward pass of a deferred loss: a second one; parameters that have changed since the forward pass;
                `torch.autograd.grad`, `inputs=` or `create_graph=True`. Gradients that other losses of the same
                backward pass have added stay.
            RuntimeError: if the second forward pass differs from the first; gradients are as they were. Other ranks
                raise a ValueError. A model's error is raised unchanged, with a note that names the chunk (from Python
                3.11 on); in the second pass of an engine whose passes are collective, on its rank alone.
        """

        def cache() -> GradCache:
            check_flag("no_sync_except_last", no_sync_except_last)
            return self

        step = first_passes(
            "GradCache", cache, model_inputs, group=self.group, history=self._history, deferred=self.deferred
        )
        step.loss_fn = self.compute_loss
        loss_of = partial(self._loss, step, loss_kwargs)
        with step.autocast():
            return deferred_loss(step, loss_of) if self.deferred else add_gradients(step, loss_of, self.scaler)

    # A subclass may replace the next four methods, with types of its own.
    def split_inputs(self, model_input: Any, chunk_size: Any) -> Sequence[object]:  # any input, its model's chunk size
        """Return the chunks of an input."""
        if self.split_input_fn is not None:
            return self.split_input_fn(model_input, chunk_size)
        return split_tree(model_input, chunk_size, "the input")

    def model_call(self, model: Any, model_input: Any) -> object:  # any model, and what it takes
        """Return a model's output for a chunk."""
        return call_model(model, model_input)

    def get_reps(self, model_out: Any) -> object:  # any output of a model
        """Return the representation in an output."""
        return model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)

    def compute_loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:  # whatever loss_fn takes
        """Return the loss of all representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def _chunks(self, model_inputs: Sequence[Any]) -> list[Chunk]:
        """Return the chunks of all models' inputs."""
        if len(model_inputs) != len(self.models):
            raise ValueError(
                f"there must be one input for each of the {len(self.models)} models, got {len(model_inputs)}; several "
                "arguments of one model are one input, a list, and its keywords a mapping; keywords of the step go to "
                "loss_fn"
            )
        splits_trees = self.split_input_fn is None and type(self).split_inputs is GradCache.split_inputs
        chunks: list[Chunk] = []
        for index, (model, model_input, size) in enumerate(
            zip(self.models, model_inputs, self.chunk_sizes, strict=True)
        ):
            encoder = Encoder(model, index, call=self.model_call, get_reps=self.get_reps, count_rows=splits_trees)
            encoder.may_be_frozen = self.loss_fn is no_loss
            name = f"the input of {encoder.name}"
            if splits_trees:
                parts = split_tree(model_input, size, name)
            else:
                parts = parts_of(self.split_inputs(model_input, size), model_input, name)
            chunks += [Chunk(encoder, part, number) for number, part in enumerate(parts)]
            chunks[-1].last = True
        return chunks

    def _loss(self, step: Step, loss_kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        """Return the loss of these representations; if it refuses the arguments, a note says what they are."""
        reps = step.formed(tensors)
        try:
            loss = self.compute_loss(*reps, **loss_kwargs)
        except TypeError as error:
            if len(reps) == 1 and not isinstance(reps[0], Tensor) and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    f"GradCache: one model is one argument of loss_fn, here a {type(reps[0]).__name__}; to pass its "
                    "parts as arguments: loss_fn=lambda out: your_loss(*out)"
                )
            raise
        loss = checked_loss(loss).reshape(())
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss has no gradient: loss_fn must not detach representations, or run under no_grad")
        return loss


def first_passes(
    name: str,  # of the caller, for messages
    make_cache: Callable[[], GradCache],  # with the caller's options; its errors raise on all ranks
    inputs: Sequence[Any],
    *,
    group: Group,
    history: History,
    deferred: bool,
) -> Step:
    """Return a step after its first pass.

    Collective: two handshakes, and the passes of engines whose passes are collective.
    """
    global _latest  # noqa: PLW0603
    comm = select_communicator(group)
    caches: list[GradCache] = []
    chunks: list[Chunk] = []

    def split() -> dict[str, Any]:
        if not deferred and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise ValueError(
                "a step of GradCache is forward and backward, and must not be under torch.no_grad() or "
                "inference_mode; for the loss alone give GradCache deferred=True, or call the models, and loss_fn of "
                "their representations"
            )
        caches.append(make_cache())
        chunks.extend(caches[0]._chunks(inputs))
        visible = synchronized(module for chunk in chunks if chunk.first for module in chunk.encoder.visible)
        return {
            **facts_of(chunks, len(inputs)),
            "keep_graphs": caches[0].keep_graphs,
            "collective": comm.size > 1 and any(engine.control.collective for engine in visible),
            "latest call": _latest,
            _GRAD_ENABLED: torch.is_grad_enabled(),
        }

    everyone = agree(comm, split, caller=name)
    (cache,) = caches
    _latest = 1 + max(facts.pop("latest call") for facts in everyone)
    enabled = [facts[_GRAD_ENABLED] for facts in everyone]
    if any(other != enabled[0] for other in enabled):
        raise ValueError(
            f"{name}: {_GRAD_ENABLED} must be the same on all ranks, got {enabled}: evaluate under torch.no_grad() on "
            "all ranks, or pass group=wb.comm.LocalCommunicator() to evaluate on one"
        )
    if any(facts["collective"] for facts in everyone):
        chunks = filled_up(chunks, everyone)
    alike = all(facts == everyone[0] for facts in everyone) and cache.keep_graphs != "auto"
    devices = [devices_of(c.encoder.visible, inputs[c.encoder.index]) for c in chunks if c.first]
    kinds = {device.type for model_devices in devices for device in model_devices} if cache.fp16 else ()
    step = Step(comm, chunks, cache.unchecked, history, _latest, name, deferred, partial(_autocast, kinds))
    keeper = Keeper(cache.keep_graphs, len(chunks), cache.memory_budget, devices)
    with step.autocast():
        step.encode(keeper, may_be_collective=alike or everyone[0]["collective"])
    return step


@contextmanager
def _autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Cast to float16 on these kinds of devices inside."""
    with ExitStack() as stack:
        for kind in sorted(kinds):
            stack.enter_context(torch.autocast(kind, torch.float16))
        yield


def _check_models(models: Any) -> list[Callable[..., Any]]:
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise ValueError(f"models must be a list of modules or functions, got {type(models).__name__}")
    items = check_items("models", models, "modules or functions")
    if not items or not all(callable(model) for model in items):
        raise ValueError(f"models must be a list of modules or functions, got {shown(items)}")
    return items


def _check_sizes(chunk_sizes: ChunkSize | Sequence[ChunkSize], models: int) -> list[Any]:
    single = not isinstance(chunk_sizes, Sequence) or isinstance(chunk_sizes, str | bytes)
    sizes: list[Any] = [chunk_sizes] * models if single else check_items("chunk_sizes", chunk_sizes, "integers")
    if len(sizes) != models:
        raise ValueError(f"chunk_sizes must be one number, or one for each of the {models} models; got {shown(sizes)}")
    for size in sizes:
        if not isinstance(size, TokenBudget):
            check_count("chunk_sizes", size, "rows of a chunk (or a TokenBudget)")
    return sizes


def _checked_parameters(unchecked: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(unchecked, nn.Module | Tensor | str | bytes) or not isinstance(unchecked, Iterable):
        raise ValueError(
            f"unchecked must be a list of parameters, such as experts.parameters(), got {type(unchecked).__name__}"
        )
    left_out: list[Any] = [*unchecked]
    for p in left_out:
        if not isinstance(p, Tensor):
            raise ValueError(f"unchecked must be a list of parameters, got one with a {type(p).__name__}")
    return left_out

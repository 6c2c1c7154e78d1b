"""The encoders of a step, and the chunks of their batches, which hold the state between the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .._base.modules import parameters_in
from .engines.known import Synchronized, synchronized
from .inputs.parts import Part
from .inputs.trees import new_containers, representations, rows_of
from .observe import Calls, modules_of
from .replay import Replay

Index = slice | Tensor | tuple[slice | Tensor, slice]  # x[index]: some rows, or some rows and columns


class Encoder:
    """A model of a step."""

    def __init__(
        self,
        model: Callable[..., Any],  # a module, or a function that calls some
        index: int,  # its place among the step's models
        *,
        call: Callable[[Callable[..., Any], Any], Any],  # (model, input) -> output
        get_reps: Callable[[Any], Any],  # output -> representations
        count_rows: bool,  # whether the rows of an input can be counted, so that each must have a representation
    ) -> None:
        self.model, self.index, self.name = model, index, f"model {index} ({type(model).__name__})"
        self.call, self.get_reps, self.count_rows = call, get_reps, count_rows
        local = [x for x in (model, getattr(model, "__self__", None)) if isinstance(x, nn.Module)]
        self.local = local[:1]  # the model itself if it is a module, or the module of which it is a method
        self.visible = modules_of(model)  # searched once, for all of its calls
        self.engines = synchronized(self.local)  # for calls in which none is observed
        self.form: Callable[[Sequence[Any]], Any] = tuple  # makes the model's representations from tensors
        self.trained: list[bool] = []  # which of them have a gradient
        self.may_be_frozen = False  # whether it is no mistake if none has
        self.parameters: dict[int, Tensor] = {id(p): p for p in parameters_in(*self.local)}
        self.calls = Calls()
        self.leaves: list[Tensor] = []  # of the graph of the first chunk
        self.leaves_of_all_chunks: list[Tensor] = []  # the representations, without graphs, after the first pass
        self.gradients: list[Tensor | None] = []  # of these, after the loss's backward pass

    def add_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Add these to the model's parameters."""
        self.parameters |= {id(x): x for x in tensors}


@dataclass(eq=False)
class Chunk:
    """Some rows of a model's batch."""

    encoder: Encoder
    chunk_input: Part
    number: int  # its place among the model's chunks
    last: bool = False  # whether it is the last of these
    replay: Replay = field(init=False)  # of the first pass
    engines: list[Synchronized] = field(default_factory=list)  # engines that the first pass has called
    reps: tuple[Tensor, ...] = ()
    places: list[Index] = field(default_factory=list)  # in the tensor of all rows, for each representation
    kept: bool = False  # whether `reps` has its graph
    returned: bool = False  # whether the model's call has returned, whatever its output

    def __post_init__(self) -> None:
        self.first = self.number == 0

    def encode(self) -> tuple[Tensor, ...]:
        """Run one forward pass, and return its representations; an error of the model gets a note with the chunk."""
        self.returned = False
        part, encoder = self.chunk_input.tree, self.encoder
        try:
            out = encoder.call(encoder.model, new_containers(part))
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                which = "second" if self.places else "first"
                error.add_note(
                    f"GradCache: raised by {encoder.name} in the {which} forward pass of its chunk {self.number} "
                    "(the first chunk is 0)"
                )
            raise
        self.returned = True
        reps, encoder.form = representations(encoder.get_reps(out), encoder.name)
        rows = self.chunk_input.rows
        if rows is not None or encoder.count_rows:
            count = rows_of(part, encoder.name) if rows is None else len(rows)
            for number, x in enumerate(reps):
                if x.dim() and len(x) != count:
                    hint = "; one number for the whole batch, such as a scale, has shape ()" if len(x) == 1 else ""
                    raise ValueError(
                        f"{encoder.name} got {count} rows and returned {len(x)} as representation {number}: each row "
                        f"of its input must have one{hint}"
                    )
        return reps

    def forget(self) -> None:
        """Free the graph."""
        self.kept, self.reps = False, tuple(x.detach() for x in self.reps)


def differentiable(x: Tensor) -> bool:
    """Return whether a tensor of this type can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def facts_of(chunks: Sequence[Chunk], models: int) -> dict[str, Any]:
    """Return the facts about a rank's chunks that `filled_up` needs of all ranks."""
    return {
        "holds": [[[*c.chunk_input.holds] for c in chunks if c.encoder.index == index] for index in range(models)],
        "may be empty": all(chunk.chunk_input.may_be_empty for chunk in chunks),
    }


def filled_up(chunks: Sequence[Chunk], everyone: Sequence[Mapping[str, Any]]) -> list[Chunk]:
    """Return these chunks and empty ones, so that each model has the same number of chunks on all ranks.

    `everyone` has each rank's `facts_of` its chunks, and its "keep_graphs". If ranks cannot make the same passes, this
    raises ValueError.
    """
    holds, empty, keep = ([facts[name] for facts in everyone] for name in ("holds", "may be empty", "keep_graphs"))
    if any(other != keep[0] for other in keep):
        raise ValueError(
            f"this engine's passes are collective: keep_graphs must be the same on all ranks, got {tuple(keep)}"
        )
    if keep[0] == "auto":
        raise ValueError(
            "keep_graphs='auto' might keep another number of graphs on each rank, and this engine's passes are "
            "collective: give a number or a fraction"
        )
    counts = [[len(model_chunks) for model_chunks in rank_chunks] for rank_chunks in holds]
    if any(other != counts[0] for other in counts) and not all(empty):
        raise ValueError(
            f"this engine's passes are collective, and ranks have different numbers of chunks, {counts}: to "
            "fill them up, chunks must be trees of tensors with rows"
        )
    filled: list[Chunk] = []
    for index, by_rank in enumerate(zip(*holds, strict=True)):
        count = max(map(len, by_rank))
        for number in range(count):
            _check_alike([contents[number] if number < len(contents) else [] for contents in by_rank], number, index)
        local = [chunk for chunk in chunks if chunk.encoder.index == index]
        encoder, nothing = local[0].encoder, local[-1].chunk_input.emptied()
        local[-1].last = False
        filled += [*local, *(Chunk(encoder, nothing, number) for number in range(len(local), count))]
        filled[-1].last = True
    return filled


def _check_alike(holds: Sequence[Sequence[str]], number: int, index: int) -> None:
    """Raise ValueError if a chunk of one rank holds images, say, and that of another does not, nor may be empty."""
    if any(other != holds[0] for other in holds):
        raise ValueError(
            f"this engine's passes are collective, and chunk {number} of model {index} holds {[*holds]} on ranks 0, 1, "
            "...: the layers that read pixels must be called on all ranks or none. Give all ranks the same number of "
            "rows, each with an image (a blank one with its tokens masked), or use DDP"
        )

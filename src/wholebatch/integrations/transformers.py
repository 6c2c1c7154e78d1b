"""Hugging Face's Trainer with a loss of the whole batch: accumulation, processes and evaluation as the loss needs them.

    class ContrastiveTrainer(WholeBatchTrainerMixin, Trainer): ...

    ContrastiveTrainer(model, args, train_dataset=data, batch_loss=wb.CLIPLoss(), chunk_size=32).train()

    ContrastiveTrainer(model, args, eval_dataset=data, compute_metrics=retrieval_metrics).evaluate()  # recall@k, MRR

A Trainer takes a loss for one that is summed over tokens and divided by their number, if the model's forward takes any
keywords, or if it gets a `compute_loss_func`. Then it does not divide by the number of micro-steps, and if a batch has
labels, it multiplies by the number of processes. A loss of this library is a mean over the batch of all processes, the
same on each. It has to be divided by the number of micro-steps, and must not be multiplied. In releases before 5.10
accelerate divides it by this number as well: here it is kept from that.

The Trainer optimizes and saves the model. So a loss must have no parameters of its own: a scale belongs to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

from .._base.graph import leaves_of
from .._base.precision import wide_dtype
from .._base.search import search_figures
from ..gradcache import TokenBudget
from ._accumulation import keep_accelerate_from_dividing
from ._framework import TRANSFORMERS

__all__ = ["ComputeLoss", "WholeBatchTrainerMixin", "features_of", "retrieval_metrics"]


_in_mixin: ContextVar[bool] = ContextVar("in the evaluation of a Trainer with the mixin", default=False)
Features = tuple[Tensor, ...]
BatchLoss = Callable[..., Tensor]


def features_of(model: Any, outputs: Any) -> Features:  # whatever the model returns
    """Return the arguments of a loss from a model's outputs.

    A tuple stays as it is. Outputs with `image_embeds` and `text_embeds`, as CLIPModel and SiglipModel have, give these
    two, the exponential of the model's `logit_scale`, and its `logit_bias` if it has one.

    The model is that without an engine around it. Other outputs raise TypeError.
    """
    if isinstance(outputs, tuple | list) and all(isinstance(x, Tensor) for x in outputs):
        return tuple(outputs)
    image, text = (getattr(outputs, name, None) for name in ("image_embeds", "text_embeds"))
    if not isinstance(image, Tensor) or not isinstance(text, Tensor) or not hasattr(model, "logit_scale"):
        raise TypeError(
            "the model's outputs must be a tuple of tensors, or have image_embeds and text_embeds beside a model with "
            f"logit_scale, got {type(outputs).__name__} of {type(model).__name__}; pass features_of=, a function of "
            "the model and its outputs that returns the arguments of the loss"
        )
    bias = getattr(model, "logit_bias", None)
    return (image, text, model.logit_scale.exp(), *([] if bias is None else [bias]))


def _loss_of(batch_loss: BatchLoss, features: Features, model: Any) -> Tensor:  # their model
    """Return the loss, which a Trainer divides by the number of micro-steps, and accelerate no second time."""
    loss: Tensor = batch_loss(*features)
    if torch.is_grad_enabled():
        keep_accelerate_from_dividing()
        _refuse_own_parameters(batch_loss, own_leaves(loss, features), model)
    return loss


def own_leaves(loss: Tensor, features: Sequence[object]) -> list[Tensor]:
    """Return the tensors that get a gradient from a loss beside its features.

    Empty ones, which keep nodes of this library in a graph, are none of them.
    """
    return [x for x in leaves_of([loss], [x for x in features if isinstance(x, Tensor)]) if x.numel()]


def _checked(batch_loss: BatchLoss, model: Any) -> BatchLoss:  # their model
    """Return a loss, or raise ValueError if its module trains others than the model; a function shows it in a step."""
    if isinstance(batch_loss, type):
        name = batch_loss.__name__
        raise ValueError(f"batch_loss must be a loss or a function, got the class {name}; pass {name}()")
    parameters = batch_loss.parameters() if isinstance(batch_loss, nn.Module) else ()
    _refuse_own_parameters(batch_loss, [x for x in parameters if x.requires_grad], model)
    return batch_loss


def _refuse_own_parameters(batch_loss: BatchLoss, leaves: Sequence[Tensor], model: Any) -> None:  # their model
    """Raise ValueError if a loss trains leaves, beside the features, that are no parameters of the model."""
    optimized = {id(x) for x in model.parameters()} if leaves and isinstance(model, nn.Module) else set()
    own = [x for x in leaves if id(x) not in optimized]
    if not own:
        return
    named = batch_loss.named_parameters() if isinstance(batch_loss, nn.Module) else ()
    names = {id(x): name for name, x in named}
    got = ", ".join(names.get(id(x), f"a tensor of shape {tuple(x.shape)}") for x in own)
    known = "" if isinstance(model, nn.Module) else ". If it is the model's, pass the model to ComputeLoss as well"
    raise ValueError(
        f"batch_loss must train no parameters but the model's, got {got}: the Trainer's optimizer "
        "and checkpoints have the model's alone; make it a part of the model, and let the model's forward return its "
        f"value with the features, as in self.scale = wb.Scale(14.3) and return x, y, self.scale(){known}"
    )


class WholeBatchTrainerMixin:
    """A Trainer whose loss compares the rows of all processes; put it before Trainer among the base classes.

    Args:
        batch_loss: a loss of this library, or a function: called with the features, it returns a mean over the batch
            of all processes. It has no parameters of its own: a :class:`wholebatch.Scale` belongs to the model, whose
            forward returns its value. Default: :class:`wholebatch.CLIPLoss`.
        chunk_size: rows of a chunk, or a TokenBudget, for gradient caching; None: all rows at once.
        features_of: a function of the model and its outputs that returns the arguments of the loss. Default:
            :func:`features_of`.
        args, kwargs: those of Trainer.

    Raises:
        ValueError: for a `compute_loss_func`, which would get the loss wrong by the number of micro-steps; for a
            `label_smoothing_factor`, which the Trainer would apply to logits; for a loss that trains other parameters
            than the model's. A module is refused when the Trainer is made, a function in the first step.
        ImportError: for a transformers that is too old.
    """

    loss_is_scaled_for_ga = False  # a mean: the Trainer divides it by the number of micro-steps

    def __init__(
        self,
        *args: Any,  # as the Trainer's
        batch_loss: BatchLoss | None = None,
        chunk_size: int | TokenBudget | None = None,
        features_of: Callable[[Any, Any], Features] = features_of,  # any model and output
        **kwargs: Any,  # as the Trainer's
    ) -> None:
        TRANSFORMERS.check()
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func must be None beside WholeBatchTrainerMixin, got a function; pass it as batch_loss=, "
                "which is called with the features alone"
            )
        super().__init__(*args, **kwargs)
        trainer: Any = self
        smoothing = trainer.args.label_smoothing_factor
        if smoothing:
            raise ValueError(
                f"label_smoothing_factor must be 0 beside WholeBatchTrainerMixin, got {smoothing}; pass it to the "
                "loss, as in batch_loss=wb.CLIPLoss(label_smoothing=0.1)"
            )
        self.batch_loss = _checked(batch_loss or wb.CLIPLoss(), trainer.model)
        self.chunk_size, self.features_of = chunk_size, features_of
        self.model_accepts_loss_kwargs = False  # of releases before `loss_is_scaled_for_ga`
        self.can_return_loss = True  # evaluation computes the loss of a batch without labels

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(WholeBatchTrainerMixin)]
        trainer = next((kind for kind in before if kind.__module__.startswith("transformers.")), None)
        if trainer is not None:
            raise TypeError(
                f"{cls.__name__} must have the mixin before {trainer.__name__}, which has the same methods: write "
                f"class {cls.__name__}(WholeBatchTrainerMixin, {trainer.__name__})"
            )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:  # their arguments and results
        """Return what the Trainer's loop returns; `retrieval_metrics` inside knows what the predictions are."""
        token = _in_mixin.set(True)
        try:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]  # the Trainer's
        finally:
            _in_mixin.reset(token)

    def compute_loss(
        self,
        model: Any,  # their model
        inputs: Mapping[str, Any],  # any keywords of the model
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Any]]:  # any outputs
        """Return the loss of the batch of all processes; as outputs, the first two features with a row per example."""
        unwrapped = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]  # the Trainer's
        inputs = {name: x for name, x in inputs.items() if name != "return_loss"}

        def encode(**rows: Any) -> Features:
            return self.features_of(unwrapped, model(**rows))

        size = self.chunk_size
        features = encode(**inputs) if size is None else wb.gradcache.encode(encode, inputs, size)
        loss = _loss_of(self.batch_loss, features, unwrapped)
        if not return_outputs:
            return loss
        rows = [x.detach() for x in features[:2] if isinstance(x, Tensor) and x.shape[:1] == features[0].shape[:1]]
        return loss, {f"feature_{place}": x for place, x in enumerate(rows)}


def retrieval_metrics(prediction: Any, compute_result: bool | None = None) -> dict[str, float]:  # their EvalPrediction
    """Return recall@1, @5 and @10, MRR and nDCG@10 of the evaluation set, for `compute_metrics` beside the mixin.

        rank of pair i = 1 + number of j != i with <x_i, y_j> >= <x_i, y_i>

    Ties count against a pair. Each x searches all y; names that begin with `reverse_` are of each y, which searches all
    x. Similarities are computed in tiles, on the accelerator if there is one, each process those of its part of the
    pairs, and all processes return the same. All processes call it.

    Args:
        prediction: its `predictions` are the features x and y of all pairs, (n, d) each, on every process.
        compute_result: must be None: a Trainer passes it for metrics of each batch.

    Raises:
        ValueError: for other predictions, those of a batch, or those of a Trainer without the mixin.
    """
    if not _in_mixin.get():
        raise ValueError(
            "retrieval_metrics must be called by a Trainer with WholeBatchTrainerMixin: another one takes a model's "
            "first output for the loss, and drops it"
        )
    if compute_result is not None:
        raise ValueError(
            "batch_eval_metrics must be False: a pair is ranked among those of the whole evaluation set, not of a batch"
        )
    arrays = prediction.predictions if isinstance(prediction.predictions, tuple | list) else [prediction.predictions]
    shapes = [tuple(getattr(x, "shape", ())) for x in arrays]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2 or not len(arrays[0]):
        raise ValueError(
            "predictions must be the features of both sides of the pairs, of shape (n, d) each, got "
            f"{', '.join(map(str, shapes)) or 'none'}; let the model, or features_of=, return them first, and pass a "
            "function of your own as compute_metrics for other features"
        )
    comm, device = wb.comm.select_communicator(None), torch.accelerator.current_accelerator() or torch.device("cpu")
    wide = wide_dtype(device)
    x, y = (array.to(wide) if array.dtype == torch.float64 else array for array in map(torch.as_tensor, arrays))
    rows = torch.arange(comm.rank, len(x), comm.size)
    metrics: dict[str, float] = {}
    for prefix, queries, candidates in (("", x, y), ("reverse_", y, x)):
        figures = search_figures(queries[rows], candidates, torch.stack([torch.arange(len(rows)), rows]), device=device)
        sums = len(rows) * torch.tensor([*figures.values()], dtype=wide, device=device)
        means = comm.all_reduce(sums) / len(x)
        metrics |= dict(zip((f"{prefix}{name}" for name in figures), means.tolist(), strict=True))
    return metrics


class ComputeLoss:
    """A loss of this library for the Trainer's `compute_loss_func`, where the Trainer cannot be subclassed.

    It divides by `args.gradient_accumulation_steps`, and undoes the factor of the number of processes. If an epoch ends
    with fewer micro-steps, its last step gets a smaller gradient than their mean. The mixin has no such limit.

    Args:
        batch_loss: called with the features, it returns a mean over the batch of all processes. It has no parameters of
            its own, as in :class:`WholeBatchTrainerMixin`.
        args: the TrainingArguments of the same Trainer.
        model: the model; needed if its outputs are no tuple of features, or the loss uses its parameters.
        features_of: a function of the model and its outputs that returns the arguments of the loss.

    Raises:
        ValueError: for a loss that trains other parameters than the model's. A module is refused when it is passed, a
            function in its first call.
        ImportError: for a transformers that is too old.
    """

    def __init__(
        self,
        batch_loss: BatchLoss,
        args: Any,  # their TrainingArguments
        model: Any = None,  # their model
        features_of: Callable[[Any, Any], Features] = features_of,  # any model and output
    ) -> None:
        TRANSFORMERS.check()
        self.batch_loss = _checked(batch_loss, model)
        self.args, self.model, self.features_of = args, model, features_of

    def __call__(
        self,
        outputs: Any,  # whatever the model returns
        labels: Any = None,  # the data set's
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss as the Trainer expects it."""
        loss = _loss_of(self.batch_loss, self.features_of(self.model, outputs), self.model)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss / self.args.world_size
        return loss / self.args.gradient_accumulation_steps if torch.is_grad_enabled() else loss

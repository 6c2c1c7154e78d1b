"""open_clip's trainer with this library's losses, and losses with open_clip's names and signatures.

    torchrun --nproc-per-node 8 -m -- wholebatch.integrations.open_clip --model ViT-B-32 --train-data ...

The command takes the options of open_clip's trainer and runs it; only the loss is another. Their factory reads the
options and makes its loss, and the loss of the same name here gets the settings of that instance. So their options
decide which loss it is, and their defaults hold. The losses alone, for a loop of your own, need no open_clip:

    loss_fn = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
    losses = loss_fn(image_features, text_features, logit_scale, output_dict=True)

In open_clip, `local_loss`, `gather_with_grad`, `cache_labels`, `dist_impl` and `chunk_size` choose how a loss is
computed, and some choices change its gradient. Here they are accepted and change nothing: every rank returns the loss
of the global batch, and after the averaging of DDP or FSDP every parameter has its exact gradient. A loss finds the
process group by itself. `rank` and `world_size` are compared with it, unless both have their defaults. Features must be
normalized, as those of open_clip's models are.
"""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb

from .._base.third_party import declare_torchvision_operators
from .._base.user_error import UserError
from .._base.warnings import warn
from ..contract import prepared
from ..sync import scale_gradient
from ._command import run_command
from ._framework import OPEN_CLIP, Framework, replaced
from ._options import AdaptedLoss

__all__ = ["ClipLoss", "CoCaLoss", "DistillClipLoss", "SigLipLoss", "create_loss", "create_task", "main"]

_USAGE = """\
usage: python -m wholebatch.integrations.open_clip [--wholebatch-chunk-size N] OPTIONS OF OPEN_CLIP

Runs open_clip's trainer with the loss of the whole batch. With --wholebatch-chunk-size N, the trainer encodes N rows at
a time, and holds the activations of these only. The help of open_clip's trainer follows.
"""
_SCALARS = ("logit_scale", "logit_bias")
_DIST_IMPLS = (None, "bidir", "shift", "reduce", "gather")

_log = logging.getLogger("wholebatch")

Losses = Tensor | dict[str, Tensor]
LossPair = tuple[Tensor, Tensor] | dict[str, Tensor]


def _check_ranks(loss: ClipLoss | SigLipLoss) -> None:
    """Raise ValueError on all ranks if one was given a rank and a world size that are not those of the group."""

    def check() -> None:
        comm = wb.comm.select_communicator(loss.group)
        if (loss.rank, loss.world_size) not in ((0, 1), (comm.rank, comm.size)):
            raise ValueError(
                f"rank and world_size must be those of the process group, {comm.rank} and {comm.size}, got "
                f"{loss.rank} and {loss.world_size}; leave them out, or call torch.distributed.init_process_group() "
                "first"
            )

    prepared(f"{type(loss).__name__}.forward", loss.group, check)


class ClipLoss(AdaptedLoss):
    """open_clip's `ClipLoss`, by :class:`wholebatch.CLIPLoss`.

    Args:
        local_loss, gather_with_grad, cache_labels: accepted, and without effect.
        rank, world_size: those of the process group, or left out.
        use_horovod: must be False.
        options: group, exchange, memory, precision, as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: in a call, if `rank` and `world_size` are not those of the group.
    """

    local_loss: bool = False
    gather_with_grad: bool = False
    cache_labels: bool = False
    rank: int = 0
    world_size: int = 1
    use_horovod: bool = False

    def prepare(self) -> None:
        if self.use_horovod:
            raise ValueError(
                "use_horovod must be False, got True: there is no exchange over Horovod; start the processes with "
                "torchrun and call torch.distributed.init_process_group()"
            )
        self.contrastive = wb.CLIPLoss(**self.options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Losses:
        """Return the loss of the global batch, or `{"contrastive_loss": loss}`."""
        _check_ranks(self)
        loss = self.contrastive(image_features, text_features, logit_scale, logit_bias=logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(AdaptedLoss):
    """open_clip's `SigLipLoss`, by :class:`wholebatch.SigLIPLoss`.

    Args:
        cache_labels, dist_impl, chunk_size: accepted, and without effect: no method stores S or its labels.
        rank, world_size: those of the process group, or left out.
        options: as in :class:`ClipLoss`.
    """

    cache_labels: bool = False
    rank: int = 0
    world_size: int = 1
    dist_impl: str | None = None
    chunk_size: int = 0

    def prepare(self) -> None:
        if self.dist_impl not in _DIST_IMPLS:
            raise ValueError(f"dist_impl must be one of {_DIST_IMPLS}, got {self.dist_impl!r}; it has no effect here")
        self.contrastive = wb.SigLIPLoss(**self.options)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        output_dict: bool = False,
    ) -> Losses:
        """Return the loss of the global batch, or `{"contrastive_loss": loss}`."""
        _check_ranks(self)
        bias = 0.0 if logit_bias is None else logit_bias
        loss = self.contrastive(image_features, text_features, logit_scale, bias)
        return {"contrastive_loss": loss} if output_dict else loss


class CoCaLoss(
    ClipLoss,
    positional="caption_loss_weight clip_loss_weight pad_id local_loss gather_with_grad cache_labels rank world_size "
    "use_horovod",
):
    """open_clip's `CoCaLoss`: CLIP's loss, and the cross-entropy of captions, a mean over the tokens of all ranks.

    open_clip takes the mean over each rank's tokens. With captions of different lengths, the mean of these means is not
    the loss of one process.

    Args:
        caption_loss_weight, clip_loss_weight: factors of the two losses.
        pad_id: tokens that do not count.
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, options: as in :class:`ClipLoss`.
    """

    caption_loss_weight: float  # type: ignore[misc]  # no default, behind the defaults of the base class
    clip_loss_weight: float  # type: ignore[misc]
    pad_id: int = 0

    def forward(  # type: ignore[override]  # open_clip's has other arguments than its base class's, too
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor,
        output_dict: bool = False,
    ) -> LossPair:
        """Return both weighted losses of the global batch: a pair, or a dictionary with names as open_clip's."""
        _check_ranks(self)
        clip_loss = torch.zeros((), device=logits.device)
        if self.clip_loss_weight:
            clip_loss = self.clip_loss_weight * self.contrastive(image_features, text_features, logit_scale)
        caption_loss = self.caption_loss_weight * self._mean_over_tokens(logits, labels)
        if output_dict:
            return {"contrastive_loss": clip_loss, "caption_loss": caption_loss}
        return clip_loss, caption_loss

    def _mean_over_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over all ranks' tokens; each rank's gradient is W times its share, for the averaging."""
        local_sum = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.pad_id, reduction="sum")
        tokens = (labels != self.pad_id).sum().to(local_sum)
        total = wb.comm.select_communicator(self.group).all_reduce(torch.stack([local_sum, tokens]))
        return total[0] / total[1]


class DistillClipLoss(ClipLoss):
    """open_clip's `DistillClipLoss`: CLIP's loss, and :class:`wholebatch.DistillationLoss` from a teacher's features.

    Its arguments are those of :class:`ClipLoss`.
    """

    def prepare(self) -> None:
        super().prepare()
        self.distillation = wb.DistillationLoss(**self.options)

    def forward(  # type: ignore[override]  # open_clip's has other arguments than its base class's, too
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor,
        output_dict: bool = False,
    ) -> LossPair:
        """Return both losses of the global batch: a pair, or a dictionary with names as open_clip's."""
        _check_ranks(self)
        contrastive_loss = self.contrastive(image_features, text_features, logit_scale)
        distill_loss = self.distillation(
            image_features, text_features, logit_scale, dist_image_features, dist_text_features, dist_logit_scale
        )
        if output_dict:
            return {"contrastive_loss": contrastive_loss, "distill_loss": distill_loss}
        return contrastive_loss, distill_loss


def create_loss(args: Any) -> nn.Module:  # Any: their namespace of options
    """Return the loss that `open_clip.create_loss(args)` chooses, over the whole batch.

    Under `--accum-freq` the gradient of scale and bias counts once, not in each micro-step.

    Raises:
        ValueError: for `--horovod`, and if the chosen loss has no counterpart here.
    """
    _refuse(args)
    return counterpart_of(_open_clip().find("open_clip", "create_loss")(args), args)


def create_task(args: Any, *positional: Any, **keywords: Any) -> nn.Module:  # Any: their options and models
    """Return the task that `open_clip.create_task(...)` of open_clip 4 makes, with its loss over the whole batch.

    Raises:
        ValueError: for `--horovod`, and if the task's loss has no counterpart here, such as GenLIP's.
    """
    _refuse(args)
    task: nn.Module = _open_clip().find("open_clip", "create_task")(args, *positional, **keywords)
    task.loss = counterpart_of(getattr(task, "loss", None), args)
    return task


def _open_clip() -> Framework:
    """Return open_clip, which then loads on CPU builds of torch, too, where its torchvision does not by itself."""
    with suppress(ImportError):  # without torchvision, open_clip's own error says more
        declare_torchvision_operators()
    return OPEN_CLIP


def _refuse(args: Any, chunk_size: int | None = None) -> None:
    """Raise ValueError for options that contradict this library, or chunks."""
    if getattr(args, "horovod", False):
        raise UserError(
            "--horovod has no counterpart: losses exchange features by torch.distributed; leave the option out, and "
            "start with torchrun"
        )
    if chunk_size is not None and args.accum_freq > 1:
        raise UserError(
            f"--accum-freq {args.accum_freq} and --wholebatch-chunk-size {chunk_size} both divide the batch; pass "
            f"instead --batch-size {args.batch_size * args.accum_freq} --wholebatch-chunk-size {chunk_size}"
        )
    if chunk_size is not None and "coca" in args.model.lower():
        raise UserError(
            f"--wholebatch-chunk-size does not work with {args.model}: its caption loss needs the logits of all tokens "
            "of the batch, which take more memory than the chunks save; use --grad-checkpointing"
        )


def counterpart_of(theirs: Any, args: Any) -> nn.Module:  # their loss, and their namespace of options
    """Return the loss of this library with the settings of one of open_clip's, or raise ValueError if it has none."""
    name = type(theirs).__name__
    if theirs is None or name not in _COUNTERPARTS:
        got = "a loss inside the model" if theirs is None else name
        raise UserError(
            f"open_clip's configuration has {got} and none of {', '.join(_COUNTERPARTS)}, so there is no loss to "
            "replace; start it with python -m open_clip_train.main"
        )
    settings = {"rank": theirs.rank, "world_size": theirs.world_size}
    if name == "CoCaLoss":
        settings |= {x: getattr(theirs, x) for x in ("caption_loss_weight", "clip_loss_weight")}
        settings["pad_id"] = theirs.caption_loss.ignore_index
    ours: nn.Module = _COUNTERPARTS[name](**settings)
    unknown = inspect.signature(theirs.forward).parameters.keys() - inspect.signature(ours.forward).parameters.keys()
    if unknown:
        warn(
            f"open_clip's {name} takes {', '.join(sorted(unknown))}, which its counterpart here does not know; the "
            f"adapter was tested with open_clip {OPEN_CLIP.tested}"
        )
    steps = getattr(args, "accum_freq", 1)
    _explain(args, name, steps)
    return ours if steps == 1 else InMicroSteps(ours, steps)


_COUNTERPARTS = {ours.__name__: ours for ours in (ClipLoss, SigLipLoss, CoCaLoss, DistillClipLoss)}


class InMicroSteps(nn.Module):
    """A loss for open_clip's accumulation, which computes the loss of the whole batch in each of A micro-steps.

    A micro-step's features get their gradient in that micro-step only. Scale and bias get theirs in all of them, so
    each gives a part of 1/A.
    """

    def __init__(self, loss: nn.Module, steps: int) -> None:
        super().__init__()
        self.loss, self.steps = loss, steps

    def forward(self, **inputs: Any) -> Any:
        for name in _SCALARS:
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = scale_gradient(inputs[name], 1 / self.steps)
        return self.loss(**inputs)


def _explain(args: Any, name: str, steps: int) -> None:
    """Log on rank 0 what differs from open_clip's own run."""
    if getattr(args, "rank", 0) != 0:
        return
    _log.info(f"wholebatch computes {name} over the whole batch, with its exact gradient.")
    flags = ("local_loss", "gather_with_grad", "loss_dist_impl")
    needless = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)]
    if needless:
        _log.info(f"{' and '.join(needless)}: no longer needed, and without effect.")
    if steps > 1:
        _log.info(
            f"--accum-freq {steps}: the gradients of scale and bias count once; open_clip alone multiplies them by "
            f"{steps}. With --wholebatch-chunk-size instead, the loss is computed once."
        )


def start(argv: Sequence[str]) -> int:
    """Run the command: `main`, after a description of its own option where help is asked for."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
    return main(argv)


def main(argv: Sequence[str]) -> int:
    """Run `open_clip_train.main.main` with the exact loss of the whole batch.

    While it runs, the factory of its loss is ours (`create_loss` in 3.3, `create_task` in 4), and with chunks
    `train_one_epoch` gets a model that encodes in chunks.

    Args:
        argv: open_clip's options, and optionally `--wholebatch-chunk-size N`: encode N rows at a time, and hold the
            activations of one chunk only.

    Returns:
        0, or 1 if open_clip refused to start.

    Raises:
        ValueError: for options that contradict this library, with the fix.
    """
    program = "python -m wholebatch.integrations.open_clip"
    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("--wholebatch-chunk-size", dest="chunk_size", type=_rows, metavar="N")
    ours, theirs = parser.parse_known_args(list(argv))
    name, framework = "open_clip_train.main", _open_clip()
    module = framework.load(name)
    factory = framework.seam(module, "create_task", "create_loss")
    replacements: dict[str, Any] = {factory: create_task if factory == "create_task" else create_loss}
    _refuse(framework.find(name, "parse_args")(theirs), ours.chunk_size)
    if ours.chunk_size is not None:
        train = framework.find(name, "train_one_epoch")
        replacements["train_one_epoch"] = _train_in_chunks(train, ours.chunk_size, has_task=factory == "create_task")
    with replaced(module, replacements):
        return 1 if module.main(theirs) else 0


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of rows, at least 1, got {text!r}")
    return int(text)


def _train_in_chunks(train: Callable[..., Any], chunk_size: int, *, has_task: bool) -> Callable[..., Any]:
    """Return `train_one_epoch`, whose first argument is the model, or in open_clip 4 holds a task that has it."""

    def train_one_epoch(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_task:
            return train(ChunkedModel(first, chunk_size), *args, **kwargs)
        model = ChunkedModel(first.task.trainable_module, chunk_size)
        with replaced(first.task, {"trainable_module": model}):  # evaluation and checkpoints use the model itself
            return train(first, *args, **kwargs)

    return train_one_epoch


class ChunkedModel(nn.Module):
    """A model that returns a dictionary, called by :func:`wholebatch.gradcache.encode`.

    Its parameters are those of the model. `module` is the model inside of DDP and of `torch.compile`: open_clip looks
    there for the logarithm of the scale, which it limits.
    """

    def __init__(self, model: nn.Module, chunk_size: int) -> None:
        super().__init__()
        self.model, self.chunk_size = model, chunk_size

    @property
    def module(self) -> nn.Module:
        """Return the model without wrappers."""
        inner: Any = self.model
        while (below := getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)) is not None:
            inner = below
        return inner

    def forward(self, *positional: Any, **keywords: Any) -> dict[str, Tensor]:
        """Return the model's dictionary for the whole batch, with a graph that encodes it again."""
        names: list[str] = []

        def outputs(output: dict[str, Tensor]) -> tuple[Tensor, ...]:
            names[:] = output
            # Under FSDP, open_clip's scalars have shape (1,). Shape () marks a number of the whole batch.
            return tuple(x.reshape(()) if name in _SCALARS else x for name, x in output.items())

        tensors = wb.gradcache.encode(self.model, (list(positional), keywords), self.chunk_size, get_rep_fn=outputs)
        return dict(zip(names, tensors, strict=True))


if __name__ == "__main__":
    run_command("open_clip")

"""Run open_clip's own trainer with losses of this library.

    main(["--train-data", ..., "--wholebatch-chunk-size", "32"])

Three names of `open_clip_train.main` are replaced while it runs: its parser, to refuse options that contradict the
loss; the factory of its loss (`create_loss` in 3.3, `create_task` in 4); and with `--wholebatch-chunk-size` also
`train_one_epoch`, which then gets a model that encodes in chunks. The loop itself is theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import wholebatch as wb

from ..._base.user_error import UserError
from .._framework import replaced
from .factory import OPEN_CLIP, create_loss, create_task, load, refuse

_SCALARS = ("logit_scale", "logit_bias")
_USAGE = """\
usage: python -m wholebatch.integrations.open_clip [--wholebatch-chunk-size N] OPTIONS OF OPEN_CLIP

Runs open_clip's trainer with the loss of the whole batch. With --wholebatch-chunk-size N, the trainer encodes N rows at
a time, and holds the activations of these only. The help of open_clip's trainer follows.
"""


def start(argv: Sequence[str]) -> int:
    """Run the command: `main`, after a description of its own option where help is asked for."""
    if {"-h", "--help"} & set(argv):
        print(_USAGE)
    return main(argv)


def main(argv: Sequence[str]) -> int:
    """Run `open_clip_train.main.main` with the exact loss of the whole batch.

    Args:
        argv: open_clip's options, and optionally `--wholebatch-chunk-size N`: encode N rows at a time, and hold the
            activations of one chunk only.

    Returns:
        0, or 1 if open_clip refused to start.

    Raises:
        ImportError: if open_clip or a package that its trainer needs is missing, or open_clip is too old.
        ValueError: for options that contradict this library, with the fix.
    """
    ours, theirs = _parser().parse_known_args(list(argv))
    module = load("open_clip_train.main")
    factory = OPEN_CLIP.seam(module, "create_task", "create_loss")
    replacements = {
        "parse_args": _checked(getattr(module, OPEN_CLIP.seam(module, "parse_args")), ours.chunk_size),
        factory: create_task if factory == "create_task" else create_loss,
    }
    if ours.chunk_size is not None:
        train = getattr(module, OPEN_CLIP.seam(module, "train_one_epoch"))
        chunked = _with_chunked_task if factory == "create_task" else _with_chunked_model
        replacements["train_one_epoch"] = chunked(train, ours.chunk_size)
    with replaced(module, replacements):
        return 1 if module.main(theirs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wholebatch.integrations.open_clip", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--wholebatch-chunk-size", dest="chunk_size", type=_rows, metavar="N")
    return parser


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of rows, at least 1, got {text!r}")
    return int(text)


def _checked(parse: Callable[..., Any], chunk_size: int | None) -> Callable[..., Any]:
    """Return their parser, with refusals."""

    def checked(argv: Sequence[str]) -> Any:
        args = parse(argv)
        refuse(args)
        if chunk_size is not None:
            _refuse_with_chunks(args, chunk_size)
        return args

    return checked


def _refuse_with_chunks(args: Any, chunk_size: int) -> None:
    if args.accum_freq > 1:
        raise UserError(
            f"--accum-freq {args.accum_freq} and --wholebatch-chunk-size {chunk_size} both divide the batch; pass "
            f"instead --batch-size {args.batch_size * args.accum_freq} --wholebatch-chunk-size {chunk_size}"
        )
    if "coca" in args.model.lower():
        raise UserError(
            f"--wholebatch-chunk-size does not work with {args.model}: its caption loss needs the logits of all tokens "
            "of the batch, which take more memory than the chunks save; use --grad-checkpointing"
        )


def _with_chunked_model(train: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    """Return open_clip 3's `train_one_epoch`, whose first argument is the model."""

    def train_one_epoch(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return train(ChunkedModel(model, chunk_size), *args, **kwargs)

    return train_one_epoch


def _with_chunked_task(train: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    """Return open_clip 4's `train_one_epoch`, whose first argument holds the task, which calls the model."""

    def train_one_epoch(state: Any, *args: Any, **kwargs: Any) -> Any:
        model = state.task.trainable_module
        state.task.trainable_module = ChunkedModel(model, chunk_size)
        try:
            return train(state, *args, **kwargs)
        finally:
            state.task.trainable_module = model  # evaluation and checkpoints use it

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

        def outputs(found: dict[str, Tensor]) -> tuple[Tensor, ...]:
            names[:] = found
            # Under FSDP, open_clip's scalars have shape (1,). Shape () marks a number of the whole batch.
            return tuple(x.reshape(()) if name in _SCALARS else x for name, x in found.items())

        found = wb.gradcache.encode(self.model, (list(positional), keywords), self.chunk_size, get_rep_fn=outputs)
        return dict(zip(names, found, strict=True))

r"""ms-swift's embedding training with a loss of the whole batch, by its `--external_plugins` option.

    swift sft --task_type embedding --loss_type infonce \
        --external_plugins "$(python -m wholebatch.integrations.ms_swift)" ...

runs ms-swift's program, and `infonce` is the loss of this module, with the same environment variables. In a program of
your own, call `enable()` once before a trainer is made, or pass an :class:`InfonceLoss` as `compute_loss_func`.

Each process passes its sentences one after the other: a query q, its positive d, its hard negatives n. With S the
products divided by the temperature, over the queries of all processes,

    L = mean_i [ logsumexp_j( S(q_i, d_j), S(q_i, n_j) ) - S(q_i, d_i) ]

and on request S(q_i, q_j), S(d_i, d_j), S(d_i, n_j) in the same softmax, j != i for the queries and positives.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import wholebatch as wb

from .._base.user_error import UserError
from ..comm import Group, select_communicator
from ..losses._directions import Direction
from ..sync import Sync
from ._command import run_command
from ._framework import MS_SWIFT, FrameworkError, Replacements, Switch

__all__ = ["InfonceLoss", "disable", "enable", "plugin_path"]

USAGE = """\
usage: python -m wholebatch.integrations.ms_swift

Prints the path of a plugin for ms-swift:

    swift sft --task_type embedding --loss_type infonce \\
        --external_plugins "$(python -m wholebatch.integrations.ms_swift)" ...
"""
_TRUE, _FALSE = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}

_log = logging.getLogger("swift")  # ms-swift's own, which prints in its first process


class _Options(NamedTuple):
    """The settings of one call, with ms-swift's defaults."""

    temperature: float = 0.1
    use_batch: bool = True
    hard_negatives: int | None = None
    mask_fake_negative: bool = False
    fake_neg_margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False


_VARIABLES = tuple(f"INFONCE_{name.upper()}" for name in _Options._fields)


def _read_options() -> _Options:
    """Read the environment variables, or raise ValueError if one of them has no valid value."""
    options = _Options(*map(_value, _VARIABLES, _Options._field_defaults.values()))
    if not options.temperature > 0:
        raise ValueError(f"INFONCE_TEMPERATURE must be positive, got {options.temperature}; ms-swift's default is 0.1")
    return options


def _value(name: str, default: float | bool | None) -> Any:
    text = os.environ.get(name)
    if text is None:
        return default
    if isinstance(default, bool):
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{name} must be True or False, got {text!r}")
        return text.lower() in _TRUE
    if default is None:
        if not text.strip().isdecimal():
            raise ValueError(
                f"{name} must be a whole number, 0 or more, got {text!r}; leave it unset for all negatives"
            )
        return int(text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {text!r}; ms-swift's default is {default}")
    return number


class InfonceLoss:
    """ms-swift's loss `infonce` of all processes, with its exact gradient, computed in tiles.

    The settings are ms-swift's environment variables, read at each call:

        INFONCE_TEMPERATURE           divides the products; 0.1
        INFONCE_USE_BATCH             False: a query has its own negatives only; the mean is over all processes
        INFONCE_HARD_NEGATIVES        n: the first n negatives of a query; if it has fewer, some are repeated, at random
        INFONCE_MASK_FAKE_NEGATIVE    leave out S(q, d), S(q, n) and S(q, q) above those of the positive by more than
        INFONCE_FAKE_NEG_MARGIN       this margin, before the division by the temperature; 0.1
        INFONCE_INCLUDE_QQ            add S(q_i, q_j)
        INFONCE_INCLUDE_DD            add S(d_i, d_j) and S(d_i, n_j), which are never left out

    Args:
        args: ms-swift's training arguments.
        trainer: its trainer, which calls the loss. Megatron's are told by a base class of that name.
    """

    def __init__(self, args: Any, trainer: Any) -> None:  # as theirs
        self.args, self.trainer = args, trainer
        self.is_megatron = "BaseMegatronTrainer" in [base.__name__ for base in type(trainer).__mro__]

    def __call__(
        self,
        outputs: dict[str, Tensor],
        labels: Tensor,
        *,
        num_items_in_batch: Tensor | int | None = None,
        loss_scale: Tensor | None = None,
        **kwargs: Any,  # as theirs
    ) -> Tensor:
        """Return L, the same on all processes.

        Args:
            outputs: "last_hidden_state": (n, d), this process's sentences, normalized by the model.
            labels: (n - queries,), without an entry for the queries: 1 for a positive, 0 for a negative.
            num_items_in_batch: has no effect, as in ms-swift: L is a mean over queries.
            loss_scale: likewise.
            kwargs: likewise.

        Raises:
            ValueError: on all processes, if a variable has no valid value or differs between processes, or labels do
                not fit the sentences.
        """
        del num_items_in_batch, loss_scale, kwargs
        group, sync = self._ranks()
        parsed: list[tuple[_Options, _Batch]] = []

        def state() -> dict[str, Any]:
            options = _read_options()
            parsed.append((options, _split(outputs, labels, options)))
            return dict(zip(_VARIABLES, options, strict=True))

        select_communicator(group).handshake(state, caller="ms_swift.InfonceLoss", must_match=_VARIABLES)
        ((options, batch),) = parsed
        if not options.use_batch:
            return wb.WholeBatch(torch.mean, group=group, sync=sync)(_losses_of_own_negatives(batch, options))
        with_queries: tuple[Direction, ...] = ("query_to_query",) if options.include_qq else ()
        limited: tuple[Direction, ...] = ("query_to_key", *with_queries)
        return wb.functional.info_nce_loss(
            batch.queries,
            batch.positives,
            negatives=batch.negatives,
            logit_scale=1 / options.temperature,
            directions=limited + (("key_to_key",) if options.include_dd else ()),
            exclude_above=options.fake_neg_margin if options.mask_fake_negative else None,
            exclude_directions=limited if options.mask_fake_negative else None,
            group=group,
            sync=sync,
        )

    def _ranks(self) -> tuple[Group, Sync]:
        """Return the processes that share the batch, and what their engine does with gradients."""
        if self.is_megatron:
            from megatron.core import mpu

            adds_up = getattr(self.args, "calculate_per_token_loss", False)
            return mpu.get_data_parallel_group(), "sum" if adds_up else "mean"
        module = sys.modules.get("swift.sequence_parallel")  # ms-swift's trainers import it
        return getattr(getattr(module, "sequence_parallel", None), "dp_group", None), "mean"


class _Batch(NamedTuple):
    """The rows of this process: (b, d), (b, d), (n, d); and the query of each negative, (n,)."""

    queries: Tensor
    positives: Tensor
    negatives: Tensor
    owners: Tensor


def _split(outputs: dict[str, Tensor], labels: Tensor, options: _Options) -> _Batch:
    if "last_hidden_state" not in outputs:
        raise ValueError(
            f"outputs must have last_hidden_state, got {', '.join(map(str, outputs)) or 'nothing'}; ms-swift's models "
            "have it with --task_type embedding"
        )
    sentences = outputs["last_hidden_state"]
    positive = labels.flatten() != 0
    count = int(positive.sum())
    if sentences.ndim != 2 or len(sentences) != len(positive) + count or (len(positive) and not positive[0]):
        raise ValueError(
            "last_hidden_state and labels must hold queries, each with a positive (1) and any number of negatives (0), "
            f"and labels no entry for the query, got {tuple(sentences.shape)} and {labels.tolist()}; use ms-swift's "
            "data format for infonce"
        )
    positive = positive.to(sentences.device)
    owners = positive.cumsum(0) - 1  # of positives and negatives
    rows = torch.arange(len(positive), device=sentences.device) + owners + 1  # their rows
    negatives, owners = rows[~positive], owners[~positive]
    if options.hard_negatives is not None:
        negatives, owners = _choose_negatives(negatives, owners, count, options.hard_negatives)
    positives = rows[positive]
    return _Batch(sentences[positives - 1], sentences[positives], sentences[negatives], owners)


def _choose_negatives(negatives: Tensor, owners: Tensor, count: int, wanted: int) -> tuple[Tensor, Tensor]:
    """Give each query the first negatives, and if they are too few some of them again, drawn at random."""
    chosen = []
    for query in range(count):
        own = negatives[owners == query]
        if not len(own):
            raise ValueError(
                f"INFONCE_HARD_NEGATIVES={wanted} requires at least one negative for each query, query {query} has none"
            )
        again = torch.randint(len(own), (max(wanted - len(own), 0),)).to(own.device)
        chosen.append(torch.cat([own[:wanted], own[again]]))
    everyone = torch.arange(count, device=owners.device).repeat_interleave(wanted)
    return torch.cat(chosen) if chosen else negatives, everyone


def _losses_of_own_negatives(batch: _Batch, options: _Options) -> Tensor:
    """Return each query's cross-entropy among its positive and its own negatives, (b,)."""
    count = len(batch.queries)
    matched = (batch.queries * batch.positives).sum(1, keepdim=True)
    own = (batch.queries[batch.owners] * batch.negatives).sum(1)
    is_own = torch.arange(count, device=own.device)[:, None] == batch.owners  # (b, n)
    others = torch.where(is_own, own, float("-inf"))
    logits = torch.cat([matched, others], 1) / options.temperature
    return cross_entropy(logits, torch.zeros(count, dtype=torch.long, device=own.device), reduction="none")


@Switch
def _switch() -> Replacements:
    losses = MS_SWIFT.find("swift.loss", "loss_map")
    if "infonce" not in losses:
        raise FrameworkError(
            "swift.loss.loss_map has no 'infonce', which this adapter replaces; it was tested with "
            f"{MS_SWIFT.tested}: {MS_SWIFT.install}"
        )
    return [(losses, {"infonce": InfonceLoss})]


def enable() -> None:
    """Use :class:`InfonceLoss` for `--loss_type infonce` in this process, in trainers that are made from now on.

    A second call has no effect.
    """
    if _switch.enable():
        _log.info("--loss_type infonce is computed by wholebatch, over the rows of all processes")


def disable() -> None:
    """Use ms-swift's own loss again."""
    _switch.disable()


def plugin_path() -> str:
    """Return the path of the file for ms-swift's `--external_plugins`, which calls :func:`enable`."""
    return str(Path(__file__).parent / "ms_swift_plugin" / "wholebatch_infonce.py")


def start(argv: Sequence[str]) -> int:
    """Print the path of the plugin."""
    if argv:
        raise UserError(f"no arguments are accepted, got {' '.join(argv)!r}; pass them to swift sft")
    print(plugin_path())
    return 0


if __name__ == "__main__":
    run_command("ms_swift")

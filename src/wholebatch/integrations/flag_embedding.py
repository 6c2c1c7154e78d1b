r"""FlagEmbedding's trainers with a loss of the whole batch, where `--negatives_cross_device True` asks for it.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.flag_embedding \
        -m FlagEmbedding.finetune.embedder.encoder_only.base --negatives_cross_device True ...

In a program of your own, call `enable()` once before training. FlagEmbedding lets each process compute the loss of all
rows with the gradient of its own rows, and DDP then averages: the gradient is 1/W of the true one. Here it is the
gradient that one process computes from the whole batch. With queries q_i of all processes, the g passages
p_i1 ... p_ig of each, of which the first is its positive, and S = q . p / temperature,

    L = mean_i [ logsumexp_jk S(q_i, p_jk) - S(q_i, p_i1) ]

Distillation by `kl_div` adds the cross-entropy of the teacher's distribution over a query's own passages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb

from .._base.user_error import UserError
from ._accumulation import keep_accelerate_from_dividing
from ._command import program_of, run_command
from ._framework import FLAG_EMBEDDING, Replacements, Switch
from ._passages import passages_loss

__all__ = ["cross_device_loss", "disable", "enable", "main"]

USAGE = """\
usage: python -m wholebatch.integrations.flag_embedding -m MODULE OPTIONS OF FLAGEMBEDDING

Runs a program of FlagEmbedding with the loss of the whole batch. MODULE is, for example,
FlagEmbedding.finetune.embedder.encoder_only.base. Pass --negatives_cross_device True: without it, FlagEmbedding
compares the rows of each process alone, and nothing changes.
"""

_log = logging.getLogger("wholebatch")


def cross_device_loss(
    model: Any,  # their model
    q_reps: Tensor,
    p_reps: Tensor,
    teacher_targets: Tensor | None = None,
    compute_score_func: Callable[..., Tensor] | None = None,
    **kwargs: Any,  # as theirs
) -> tuple[None, Tensor]:
    """Return `(None, loss)`, instead of `AbsEmbedderModel._compute_cross_device_neg_loss`.

    Scores that are products divided by the temperature, as those of FlagEmbedding's own models, are computed in tiles
    and not stored. With `kd_loss_type="m3_kd_loss"`, and for a subclass with another `compute_score` or
    `compute_loss`, each process gathers all rows and computes FlagEmbedding's own loss of one process
    (:class:`wholebatch.WholeBatch`).

    Args:
        model: a model of FlagEmbedding; its temperature and kd_loss_type are used.
        q_reps: (b, d), this process's queries; b may differ between processes.
        p_reps: (b g, d), the passages of each query one after the other, the positive first.
        teacher_targets: (b, g), probabilities of a teacher, or None.
        compute_score_func: a function instead of the model's `compute_score`.
        kwargs: must be empty: keywords of `compute_score_func` are rows of this process alone.

    Returns:
        None for the scores, which FlagEmbedding drops, and the loss of the global batch, the same on all processes.

    Raises:
        ValueError: on all processes, for an M3 model with `unified_finetuning`, for keywords of `compute_score_func`,
            for a `kd_loss_type` that FlagEmbedding does not have, for a `temperature` that is trained, for passages
            that do not divide among the queries, and where only some processes have `teacher_targets`.
    """
    if getattr(model, "unified_finetuning", False):
        raise UserError(
            "--negatives_cross_device True with --unified_finetuning True: FlagEmbedding computes the sparse, ColBERT "
            "and ensemble losses of M3 from each process's own rows, so no choice here gives the gradient of the whole "
            "batch; pass --unified_finetuning False for the dense loss, or run FlagEmbedding's command"
        )
    distilled = teacher_targets is not None
    keep_accelerate_from_dividing()

    def state() -> dict[str, Any]:
        if kwargs:
            raise ValueError(
                f"compute_score_func must not need keywords, got {', '.join(kwargs)}: they hold rows of this process "
                "alone"
            )
        if distilled and model.kd_loss_type not in ("kl_div", "m3_kd_loss"):
            raise ValueError(f"kd_loss_type must be 'kl_div' or 'm3_kd_loss', got {model.kd_loss_type!r}")
        if not len(q_reps) or len(p_reps) % len(q_reps):
            raise ValueError(
                f"p_reps must have the same number of rows for each query, got {len(p_reps)} rows for {len(q_reps)} "
                "queries; pass train_group_size passages for each, and at least one query on each process"
            )
        return {"teacher_targets": distilled}

    wb.comm.select_communicator(None).handshake(state, caller="FlagEmbedding", must_match=("teacher_targets",))
    passages = p_reps.view(len(q_reps), -1, p_reps.shape[-1])  # (b, g, d)
    if not _is_dot_product(model, compute_score_func) or (distilled and model.kd_loss_type == "m3_kd_loss"):

        def whole_loss(queries: Tensor, passages: Tensor, targets: Tensor | None) -> Tensor:
            keywords = {"teacher_targets": targets, "compute_score_func": compute_score_func}
            _, loss = model._compute_in_batch_neg_loss(queries, passages.flatten(0, 1), **keywords)
            return loss

        return None, wb.WholeBatch(whole_loss)(q_reps, passages, teacher_targets)
    temperature = model.temperature
    loss = passages_loss(q_reps, p_reps, passages.shape[1], caller="FlagEmbedding", temperature=temperature)
    if distilled:
        scores = torch.einsum("bd,bgd->bg", q_reps, passages) / temperature
        distillation = wb.WholeBatch(lambda scores, targets: -(scores.log_softmax(1) * targets).sum(1).mean())
        loss = loss + distillation(scores, teacher_targets)
    return None, loss


def _is_dot_product(model: Any, score: Any) -> bool:
    """Return whether scores and loss are those of FlagEmbedding's own classes."""
    scorer, name = (model.compute_score, "compute_score") if score is None else (score, "compute_dense_score")
    if not hasattr(model, "_compute_similarity") or getattr(scorer, "__name__", "") != name:
        return False
    methods = (scorer, model._compute_similarity, model.compute_loss)
    return all(getattr(x, "__module__", "").startswith("FlagEmbedding.") for x in methods)


@Switch
def _switch() -> Replacements:
    model = FLAG_EMBEDDING.find("FlagEmbedding.abc.finetune.embedder.AbsModeling", "AbsEmbedderModel")
    return [(model, {FLAG_EMBEDDING.seam(model, "_compute_cross_device_neg_loss"): cross_device_loss})]


def enable() -> None:
    """Use :func:`cross_device_loss` in all models of FlagEmbedding in this process that have no such method themselves.

    A second call has no effect.
    """
    _switch.enable()


def disable() -> None:
    """Use FlagEmbedding's own loss again."""
    _switch.disable()


def main(argv: Sequence[str]) -> int:
    """Run a program of FlagEmbedding, `-m`, its module and its options, with the loss of the whole batch; return 0.

    Raises:
        ValueError: without `-m MODULE`.
    """
    if len(argv) < 2 or argv[0] != "-m" or not argv[1].startswith("FlagEmbedding."):
        raise UserError(
            f"the first arguments must be -m and a module of FlagEmbedding, got {' '.join(argv[:2])!r}; pass for "
            "example -m FlagEmbedding.finetune.embedder.encoder_only.base"
        )
    enable()
    if not any(text.split("=")[0] in ("--negatives_cross_device", "--negatives-cross-device") for text in argv):
        _log.warning("without --negatives_cross_device True FlagEmbedding compares the rows of each process alone")
    before = sys.argv
    try:
        program_of(argv)()
    finally:
        sys.argv = before
        disable()
    return 0


start = main  # the command

if __name__ == "__main__":
    run_command("flag_embedding")

"""colpali-engine: training steps by its trainer, with its losses of late interaction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..._base.third_party import declare_torchvision_operators
from ..problem import Problem
from .encoders import Encoder, tokens

declare_torchvision_operators()
from colpali_engine.loss import late_interaction_losses as losses  # noqa: E402
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer  # noqa: E402
from transformers import TrainingArguments  # noqa: E402

_PREFIXES = {"query": "query", "document": "doc", "negatives": "neg_doc"}  # their collator's


class _Encoder(Encoder):
    """An encoder as their models are: embeddings of tokens of norm 1, and zeros in the padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode (b, tokens, IN), (b, tokens) -> (b, tokens, OUT)."""
        return normalize(self.encoder(input_ids), dim=-1) * attention_mask[..., None]


class _Loss(nn.Module):
    """Their loss, whose gradient by gathered documents is contiguous in memory.

    Others come out of torch's differentiable all-gather in the wrong order, with gloo, which the audit uses.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, **more: Any) -> Any:
        """Return the loss."""
        if doc_embeddings.requires_grad:
            doc_embeddings = doc_embeddings.clone()
            doc_embeddings.register_hook(torch.Tensor.contiguous)
        return self.loss(query_embeddings, doc_embeddings, **more)


def _problem(
    loss: Callable[[], nn.Module],
    *,
    negatives: bool = False,
    steps: int = 1,
    symmetric: bool = False,
    as_it_is: bool = False,
) -> Problem:
    model, loss_fn = _Encoder(), loss() if as_it_is else _Loss(loss())
    args = TrainingArguments(
        tempfile.gettempdir(),
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        gradient_accumulation_steps=steps,
    )
    trainer = ContrastiveTrainer(  # here, and not in the step, since a Trainer sets the seed
        loss_fn, True, symmetric, model=model, args=args, train_dataset=None, eval_dataset=None
    )
    trainer.current_gradient_accumulation_steps = steps

    def step(model: Any, batch: Mapping[str, Tensor]) -> float:  # as DDP wraps it
        value, columns = 0.0, [x.chunk(steps) for x in batch.values()]
        for number, part in enumerate(zip(*columns, strict=True), 1):
            last = number == steps
            trainer.accelerator.gradient_state._set_sync_gradients(last)  # as its training loop does
            with torch.enable_grad() if last else model.no_sync():
                value += float(trainer.training_step(model, _inputs(dict(zip(batch, part, strict=True)))))
        return value / steps  # of which they take the gradient

    batch = tokens(query=4, document=6)
    if negatives:
        more = tokens(first=5, second=5)
        for end in ("", "_mask"):
            batch[f"negatives{end}"] = torch.stack([more[f"first{end}"], more[f"second{end}"]], 1)
    return Problem(model, batch, step=step, engine="ddp")


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with the names of their collator."""
    ids = {f"{prefix}_input_ids": batch[name] for name, prefix in _PREFIXES.items() if name in batch}
    masks = {f"{prefix}_attention_mask": batch[f"{name}_mask"] for name, prefix in _PREFIXES.items() if name in batch}
    return ids | masks


SETTINGS: dict[str, Callable[[], Problem]] = {
    "ContrastiveTrainer, ColbertLoss": partial(_problem, losses.ColbertLoss),
    "the same, with gloo, untouched": partial(_problem, losses.ColbertLoss, as_it_is=True),
    "the same, compute_symetric_loss=True": partial(_problem, losses.ColbertLoss, symmetric=True),
    "the same, gradient_accumulation_steps=2": partial(_problem, losses.ColbertLoss, steps=2),
    "ContrastiveTrainer, ColbertPairwiseCELoss": partial(_problem, losses.ColbertPairwiseCELoss),
    "ContrastiveTrainer, ColbertNegativeCELoss": partial(_problem, losses.ColbertNegativeCELoss, negatives=True),
    "ContrastiveTrainer, ColbertSigmoidLoss": partial(_problem, losses.ColbertSigmoidLoss),
}

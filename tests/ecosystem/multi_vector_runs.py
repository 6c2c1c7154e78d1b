"""Runs of sentence-transformers' trainer of multi-vector models with a tiny encoder, in one process or on two.

The rows of a step are the same on one process and on two. Weights, scores and losses are float64: their scorers round
to float32, so their losses get one that does not.
"""

import tempfile
from dataclasses import dataclass, field
from functools import partial

import torch
from dual import Run, as_launched, free_port, reductions_counted, weights
from sentence_runs import ROWS, STEPS, encoder, texts

import wholebatch as wb
from wholebatch.testing import run_ranks

CHANGED = {
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


@dataclass
class Case:
    """A loss by its name and arguments, and the columns of its data."""

    loss: str
    columns: int = 2
    settings: dict = field(default_factory=dict)
    mean: bool = False
    trainer: dict = field(default_factory=dict)


def token_encoder(folder):
    """Return a multi-vector encoder without dropout; documents are scored without the word "the"."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    transformer = encoder(folder)[0]
    modules = [transformer, Normalize("token_embeddings"), MultiVectorMask(["the"])]
    return MultiVectorEncoder(modules=modules, device="cpu").double()


def scores(queries, documents, queries_mask, documents_mask, *, mean=False):
    """Return what their `colbert_scores` or `mean_colbert_scores` returns, in float64."""
    return torch.stack(
        [
            wb.reference.max_sim(
                queries, x, query_mask=queries_mask, document_mask=mask, token_reduction="mean" if mean else "sum"
            )
            for x, mask in zip(documents.unbind(1), documents_mask.unbind(1), strict=True)
        ],
        2,
    ).flatten(1)


def data_of(case):
    """Return random words; the last one of each text is scored."""
    rows = texts(ROWS * STEPS * case.trainer.get("gradient_accumulation_steps", 1), case.columns)
    return rows.map(lambda row: {name: f"{text} file" for name, text in row.items()})


def loss_of(how, case, model):
    """Return a case's loss: "ours" or "theirs"; ", gathered" and ", local" set `gather_across_devices`."""
    from sentence_transformers.multi_vector_encoder import losses as theirs
    from sentence_transformers.multi_vector_encoder import scoring

    from wholebatch.integrations import sentence_transformers as ours

    more = {"gather_across_devices": "gathered" in how} if "," in how else {}
    if how.startswith("theirs"):
        scorer = partial(scores, mean=case.mean)
        return getattr(theirs, case.loss)(model, similarity_fct=scorer, **case.settings, **more)
    scorer = scoring.mean_colbert_scores if case.mean else None
    return getattr(ours, case.loss)(model, similarity_fct=scorer, **case.settings, **more)


def trained(how, case, folder, ranks, reductions=()):
    from sentence_transformers import MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments

    model = token_encoder(folder)
    start, before = weights(model), len(reductions)
    settings = {"per_device_train_batch_size": ROWS // ranks, "ddp_backend": "gloo" if ranks > 1 else None}
    with tempfile.TemporaryDirectory() as out:
        trainer = MultiVectorEncoderTrainer(
            model,
            MultiVectorEncoderTrainingArguments(out, **(CHANGED | settings | case.trainer)),
            train_dataset=data_of(case),
            loss=loss_of(how, case, model),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(start, weights(model), losses, len(reductions) - before)


def run_cases(how, cases, folder, ranks, reductions=()):
    """Train all cases, each from the same start; the text of an error takes the place of a run."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = trained(how, case, folder, ranks, reductions)
        except Exception as error:  # a test asserts on it
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _rank(port, jobs, folder):
    as_launched(port)
    reductions = reductions_counted()
    return {how: run_cases(how, cases, folder, 2, reductions) for how, cases in jobs.items()}


def on_two(jobs, folder):
    """Train the cases of each kind of loss on two processes, and return both processes' runs."""
    return run_ranks(partial(_rank, free_port(), jobs, folder), 2, timeout_s=540)

"""Problems for the audit: a step of Tevatron's trainers under DDP, with its loss and with that of the whole batch.

    export WHOLEBATCH_TEVATRON=folder WHOLEBATCH_GRAD_CACHE=folder   # checkouts: texttron/tevatron, luyug/GradCache
    wholebatch audit tevatron_audits:theirs

The encoder is tiny. The temperature is 0.5, so that a trainer that ignores it has another gradient.
"""

import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from tevatron_runs import folder_of, import_from
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.auditing.presets.encoders import IN, ROWS, mlp

GROUP, TEMPERATURE = 2, 0.5  # passages of each query


class Encoder(nn.Module):
    """A base model of rows, with what Tevatron's EncoderModel reads from it."""

    config = None

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


def _reference(model, batch):
    x, y = (model.encoder(batch[name].flatten(0, -2)) for name in ("queries", "passages"))
    return F.cross_entropy(x @ y.T / TEMPERATURE, torch.arange(len(x)) * GROUP)


def _problem(*, ours=False, cached=False):
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}  # as launched
    import_from([folder_of("WHOLEBATCH_TEVATRON"), None if ours else folder_of("WHOLEBATCH_GRAD_CACHE")])
    if ours:
        from wholebatch.integrations import tevatron

        tevatron.install()
    from tevatron.retriever.arguments import TevatronTrainingArguments
    from tevatron.retriever.gc_trainer import GradCacheTrainer
    from tevatron.retriever.modeling.encoder import EncoderModel
    from tevatron.retriever.trainer import TevatronTrainer

    class Model(EncoderModel):
        def encode_query(self, features):
            return self.encoder(features["x"])

        encode_passage = encode_query

    args = TevatronTrainingArguments(
        tempfile.gettempdir(), use_cpu=True, report_to=[], gc_q_chunk_size=3, gc_p_chunk_size=5
    )
    model = Model(Encoder(), temperature=TEMPERATURE)
    trainer = (GradCacheTrainer if cached else TevatronTrainer)(model, args)
    trainer.current_gradient_accumulation_steps = 1

    def step(model, batch):
        inputs = {"x": batch["queries"]}, {"x": batch["passages"].flatten(0, 1)}
        return float(trainer.training_step(model, inputs, None))

    batch = {"queries": torch.randn(ROWS, IN), "passages": torch.randn(ROWS, GROUP, IN)}
    return wb.Problem(model, batch, step=step, reference=_reference, engine="ddp")


theirs, theirs_cached = partial(_problem), partial(_problem, cached=True)
ours, ours_cached = partial(_problem, ours=True), partial(_problem, ours=True, cached=True)
SETTINGS = {
    "TevatronTrainer": theirs,
    "GradCacheTrainer (--grad_cache), --temperature 0.5": theirs_cached,
    "TevatronTrainer, by wholebatch.integrations": ours,
    "GradCacheTrainer (--grad_cache), --temperature 0.5, by wholebatch.integrations": ours_cached,
}

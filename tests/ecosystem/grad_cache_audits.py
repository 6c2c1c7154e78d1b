"""Problems for the audit: a step of `grad_cache`, whichever package that is, under DDP; and Tevatron's loss.

wholebatch audit grad_cache_audits:theirs      with a checkout of github.com/luyug/GradCache on PYTHONPATH
wholebatch audit grad_cache_audits:ours
wholebatch audit grad_cache_audits:tevatron    with a checkout of github.com/texttron/tevatron
"""

import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb

HARD = 1


def _batch():
    return {"queries": torch.randn(12, 6), "passages": torch.randn(12, 1 + HARD, 6)}


def _reference(model, batch):
    x, y = model(batch["queries"]), model(batch["passages"].flatten(0, 1))
    return F.cross_entropy(x @ y.T, torch.arange(len(x)) * (1 + HARD))


def _problem(package):
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    distributed = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1

    def step(model, batch):
        loss_fn = (package.loss.DistributedContrastiveLoss if distributed else package.loss.SimpleContrastiveLoss)(HARD)
        inputs = batch["queries"], batch["passages"].flatten(0, 1)
        return package.GradCache([model, model], 4, loss_fn)(*inputs, no_sync_except_last=distributed)

    return wb.Problem(encoder, _batch(), step=step, reference=_reference, engine="ddp")


def theirs():
    import grad_cache
    import grad_cache.loss

    return _problem(grad_cache)


def ours():
    from wholebatch.integrations import grad_cache

    return _problem(grad_cache)


def tevatron():
    from tevatron.retriever.modeling.encoder import EncoderModel

    class Encoder(nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

        def forward(self, x):
            return self.layers(x)

    class Model(EncoderModel):
        def encode_query(self, qry):
            return self.encoder(qry["x"])

        encode_passage = encode_query

    def loss(model, batch):
        return model(query={"x": batch["queries"]}, passage={"x": batch["passages"].flatten(0, 1)}).loss

    def reference(model, batch):
        return _reference(model.encoder, batch)

    return wb.Problem(Model(Encoder()), _batch(), loss, reference=reference, engine="ddp")

"""Problems for the audit: a step of `grad_cache`, whichever package that is, under DDP.

    export WHOLEBATCH_GRAD_CACHE=folder              # a checkout of github.com/luyug/GradCache
    wholebatch audit grad_cache_audits:theirs
    wholebatch audit grad_cache_audits:ours

The last one needs no checkout.
"""

import torch
from tevatron_runs import folder_of, import_from
from torch import nn
from torch.nn import functional as F

import wholebatch as wb

HARD = 1


def _reference(model, batch):
    x, y = model(batch["queries"]), model(batch["passages"].flatten(0, 1))
    return F.cross_entropy(x @ y.T, torch.arange(len(x)) * (1 + HARD))


def _problem(package, losses):
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    distributed = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1

    def step(model, batch):
        of_ranks, alone = losses.DistributedContrastiveLoss, losses.SimpleContrastiveLoss
        loss_fn = (of_ranks if distributed else alone)(HARD)
        inputs = batch["queries"], batch["passages"].flatten(0, 1)
        return package.GradCache([model, model], 4, loss_fn)(*inputs, no_sync_except_last=distributed)

    batch = {"queries": torch.randn(12, 6), "passages": torch.randn(12, 1 + HARD, 6)}
    return wb.Problem(encoder, batch, step=step, reference=_reference, engine="ddp")


def theirs():
    import_from([folder_of("WHOLEBATCH_GRAD_CACHE")])
    import grad_cache
    import grad_cache.loss

    return _problem(grad_cache, grad_cache.loss)


def ours():
    from wholebatch.integrations import grad_cache

    return _problem(grad_cache, grad_cache)


SETTINGS = {
    "DistributedContrastiveLoss in GradCache": theirs,
    "DistributedContrastiveLoss in GradCache, by wholebatch.integrations": ours,
}

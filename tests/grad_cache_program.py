"""A program that imports grad_cache, as in the documentation of that package; it knows nothing of this library.

    torchrun --nproc-per-node 2 -m wholebatch.integrations.grad_cache tests/grad_cache_program.py OUT

It trains in float64 by plain SGD, once in each of several ways, and rank 0 saves the weights. `true_weights` are those
of one process with all rows and a dense loss.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

STEPS, ROWS, HARD, RATE = 20, 4, 1, 0.05
WAYS = ("class", "decorators", "lightning")


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step, ranks=1, rank=0):
    """Return a rank's queries and passages; the whole batch has 2 * ROWS queries."""
    generator = torch.Generator().manual_seed(step)
    queries, passages = torch.randn(2 * ROWS * (2 + HARD), 6, generator=generator, dtype=torch.float64).split(
        [2 * ROWS, 2 * ROWS * (1 + HARD)]
    )
    return queries.chunk(ranks)[rank], passages.chunk(ranks)[rank]


def dense_loss(x, y):
    return F.cross_entropy(x @ y.T, torch.arange(len(x)) * (1 + HARD))


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def train(model, add_gradients):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        add_gradients(step)
        optimizer.step()
    return weights(model)


def true_weights():
    model = encoder()
    return train(model, lambda step: dense_loss(*map(model, batch(step))).backward())


def trained(way, rank, ranks):
    from grad_cache import GradCache
    from grad_cache.functional import cached, cat_input_tensor, gather_input_tensor
    from grad_cache.loss import DistributedContrastiveLoss

    inner = encoder()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(inner))
    sizes = {"models": [model, model], "chunk_sizes": [3, 2]}
    if way == "class":
        step_of = GradCache(**sizes, loss_fn=DistributedContrastiveLoss(HARD))
        return train(model, lambda step: step_of(*batch(step, ranks, rank), no_sync_except_last=True, reduction="mean"))
    if way == "lightning":
        from grad_cache.pytorch_lightning.pl_gradcache import PLGradCache

        loss_fn = DistributedContrastiveLoss(HARD)
        step_of = PLGradCache(**sizes, loss_fn=loss_fn, backward_fn=lambda loss: loss.backward())
        return train(model, lambda step: step_of(*batch(step, ranks, rank), no_sync_except_last=True))

    @cached
    def encode(model, x):
        return model(x)

    @cat_input_tensor
    @gather_input_tensor
    def loss_fn(x, y):
        return dense_loss(x, y) * ranks  # their page: DDP averages

    def add_gradients(step):
        x, y = batch(step, ranks, rank)
        parts = [encode(model, part) for part in (*x.split(2), *y.split(2))]
        reps = [r for r, _ in parts]
        loss_fn(reps[: len(x) // 2], reps[len(x) // 2 :]).backward()
        for r, again in parts:
            again(r)

    return train(model, add_gradients)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {way: trained(way, rank, ranks) for way in (sys.argv[2:] or WAYS)}
    if rank == 0:
        torch.save(found, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Without the interpreter's teardown, in which gloo's threads abort any DDP program now and then (torch 2.13).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

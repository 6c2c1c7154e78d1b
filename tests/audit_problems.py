"""Small correct problems for the audit; some should get a note."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch import Problem

ROWS, D, OUT = 12, 6, 4


class Encoders(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self, *middle):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(D, 8), *middle, nn.Tanh(), nn.Linear(8, OUT))
        self.text = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, OUT))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        return normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1), self.log_scale.exp()


def batch(rows=ROWS):
    return {"images": torch.randn(rows, D), "texts": torch.randn(rows, D)}


def size():
    return dist.get_world_size()


def gathered(x, *, local=True):
    """Gather all ranks' rows; at most the local ones have a gradient."""
    parts = [torch.zeros_like(x) for _ in range(size())]
    dist.all_gather(parts, x.detach().contiguous())
    if local:
        parts[dist.get_rank()] = x
    return torch.cat(parts)


class GatherWithGradient(Function):
    """A gather whose backward is an all-reduce times `factor`, of which each rank takes its rows."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.rows, ctx.factor = len(x), factor
        return gathered(x, local=False)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        first = dist.get_rank() * ctx.rows
        return ctx.factor * grad[first : first + ctx.rows], None


def with_gradient(x, factor=1.0):
    return GatherWithGradient.apply(x, factor)


def clip(x, y, scale):
    """Compute CLIP's loss of the whole batch."""
    logits = scale * x @ y.T
    labels = torch.arange(len(x))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def local(x, y, scale, all_x, all_y, offset=None):
    """Compute the loss of this rank's rows against all rows."""
    labels = torch.arange(len(x)) + (dist.get_rank() * len(x) if offset is None else offset)
    return (cross_entropy(scale * x @ all_y.T, labels) + cross_entropy(scale * y @ all_x.T, labels)) / 2


def problem(loss, model=None, rows=ROWS, **options):
    """Return a problem with loss(x, y, scale)."""

    def of_rank(model, batch):
        return loss(*model(batch["images"], batch["texts"]))

    return Problem(Encoders() if model is None else model, batch(rows), of_rank, **options)


def right_replicated():
    return problem(lambda x, y, s: clip(with_gradient(x), with_gradient(y), s))


def right_local():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y)))


def right_sum():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y)) / size(), engine="sum")


def right_ddp():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y)), engine="ddp")


def right_custom_engine():
    def step(model, batch):
        x, y, scale = model(batch["images"], batch["texts"])
        loss = local(x, y, scale, with_gradient(x), with_gradient(y))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= size()
        return loss

    return Problem(Encoders(), batch(), step=step, engine="none")


def right_separable():
    """Use a mean over examples, which is right on any number of ranks with equal parts."""
    return problem(lambda x, y, s: (s * (x - y)).square().sum(1).mean())


def right_wholebatch():
    return problem(wb.CLIPLoss(), uneven=True, empty=True)


def right_with_dropout():
    return problem(wb.CLIPLoss(), Encoders(nn.Dropout(0.3)), uneven=True)


def right_accumulated():
    """Accumulate a mean over examples in four steps."""

    def step(model, batch):
        total = 0.0
        for images, texts in zip(batch["images"].chunk(4), batch["texts"].chunk(4), strict=True):
            x, y, scale = model(images, texts)
            loss = (scale * (x - y)).square().sum(1).mean() / 4
            loss.backward()
            total += loss.item()
        return total

    return Problem(Encoders(), batch(48), step=step)


def right_cached():
    def step(model, batch):
        cache = wb.GradCache(
            [model.image, model.text],
            3,
            lambda x, y: wb.functional.clip_loss(normalize(x, dim=1), normalize(y, dim=1), model.log_scale.exp()),
        )
        return cache(batch["images"], batch["texts"])

    return Problem(Encoders(nn.Dropout(0.3)), batch(), step=step, uneven=True)


def cached_times_w():
    def step(model, batch):
        def loss(x, y):
            found = wb.functional.clip_loss(normalize(x, dim=1), normalize(y, dim=1), model.log_scale.exp())
            return found * (dist.get_world_size() if dist.is_initialized() else 1)

        return wb.GradCache([model.image, model.text], 3, loss)(batch["images"], batch["texts"])

    return Problem(Encoders(), batch(), step=step)


def right_with_sync_batch_norm():
    model = Encoders(nn.BatchNorm1d(8))
    return problem(wb.CLIPLoss(), nn.SyncBatchNorm.convert_sync_batchnorm(model), uneven=True)


def right_with_sync_batch_norm_in_ddp():
    model = Encoders(nn.BatchNorm1d(8))
    return problem(wb.CLIPLoss(), nn.SyncBatchNorm.convert_sync_batchnorm(model), engine="ddp")


def right_with_unused_parameters():
    made = unused()
    return Problem(
        made.model, made.batch, made.loss, engine=partial(DistributedDataParallel, find_unused_parameters=True)
    )


def right_as_launchers_say():
    """Read the number of ranks from the environment."""
    assert int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"]) == dist.get_rank()

    def loss(x, y, s):
        several = int(os.environ["WORLD_SIZE"]) > 1
        return clip(with_gradient(x), with_gradient(y), s) if several else clip(x, y, s)

    return problem(loss)


def right_whatever_the_model_holds():
    """Have buffers that gloo cannot send, and inputs without an effect."""
    model = Encoders()
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int16))

    def loss(model, batch):
        x, y, scale = model(batch["images"] * 1.0, batch["texts"])
        return wb.functional.clip_loss(normalize(batch["gains"][:, None].exp() * x, dim=1), y, scale)

    return Problem(model, defaultdict(list, batch(), gains=torch.randn(ROWS)), loss, uneven=True)


def right_scaled():
    """Scale the loss and unscale the parameters' gradients: only gradients before the parameters have the factor."""

    def step(model, batch):
        loss = wb.functional.clip_loss(*model(**batch))
        (1024 * loss).backward()
        for p in model.parameters():
            p.grad /= 1024
        return loss

    return Problem(Encoders(), batch(), step=step, reference=reference_of_clip)


def right_sharded():
    """Shard a classifier by rows, each with its complete gradient."""
    made = wb.PartialFC(OUT, 10, margin=wb.CosFace(8.0, 0.1))
    model = Encoders()
    model.head = nn.Linear(1, 1, bias=False)
    model.head.weight = nn.Parameter(made.weight.detach().clone())

    def loss(model, batch):
        x, y, scale = model(batch["images"], batch["texts"])
        head = wb.functional.partial_fc_loss(x, batch["labels"], model.head.weight, margin=wb.CosFace(8.0, 0.1))
        return head + wb.functional.clip_loss(x, y, scale)

    return Problem(model, {**batch(), "labels": torch.arange(ROWS) % 10}, loss, sharded=["head"])


def head_in_ddp():
    """Let DDP leave a head alone, whose buffers say which classes it has."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(D, OUT), wb.PartialFC(OUT, 10, margin=wb.CosFace(8.0, 0.1), seed=1)

        def forward(self, images, labels):
            return self.head(self.backbone(images), labels)

    given = {"images": torch.randn(ROWS, D), "labels": torch.arange(ROWS) % 10}
    return Problem(Classifier(), given, lambda model, batch: model(**batch), engine="ddp", uneven=True)


def reference_of_clip(model, batch):
    return clip(*model(**batch))


def detached_first_call():
    """Detach a target from the same model."""

    def loss(model, batch):
        x, y, scale = model(batch["images"], batch["texts"])
        target = (x + y).detach()
        x, y, scale = model(batch["images"], batch["texts"])
        return scale * ((x + y).square() * target.exp()).sum(1).mean()

    return Problem(Encoders(), batch(), loss)


def values_differ():
    return right_local()


def detached():
    """Detach a weight of the batch on purpose."""
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, s) * s.detach().square())


def unused():
    model = Encoders()
    model.image.spare = nn.Parameter(torch.ones(3))
    model.image.forward = lambda x: nn.Sequential.forward(model.image[:3], x)
    return problem(wb.CLIPLoss(), model)

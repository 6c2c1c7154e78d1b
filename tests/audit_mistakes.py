"""Problems for the audit, each with one planted mistake. Each name is the cause that the audit should report."""

from __future__ import annotations

import torch
import torch.distributed as dist
from audit_problems import (
    D,
    Encoders,
    batch,
    clip,
    gathered,
    local,
    problem,
    reference_of_clip,
    right_sharded,
    size,
    with_gradient,
)
from torch import nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy

import wholebatch as wb
from wholebatch import Problem


def everything_times_w():
    return problem(lambda x, y, s: size() * clip(with_gradient(x), with_gradient(y), s))


def everything_times_w_sum():
    """Compute the whole loss on each rank, under an engine that sums gradients."""
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y)), engine="sum")


def everything_over_w():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y)) / size())


def gather_without_gradient():
    return problem(lambda x, y, s: clip(gathered(x), gathered(y), s))


def key_side_missing():
    def loss(x, y, s):
        if size() == 1:
            return clip(x, y, s)
        return local(x, y, s, gathered(x, local=False), gathered(y, local=False))

    return problem(loss)


def key_side_missing_local():
    """Put local rows back among the gathered ones."""
    return problem(lambda x, y, s: local(x, y, s, gathered(x), gathered(y)))


def key_side_missing_everywhere():
    """Gather on one process, too, so that the gradient is missing there as well."""
    return problem(lambda x, y, s: local(x, y, s, gathered(x, local=False), gathered(y, local=False)))


def gather_averages():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x, 1 / size()), with_gradient(y, 1 / size())))


def scale_times_w():
    return problem(lambda x, y, s: size() * clip(gathered(x), gathered(y), s))


def scale_over_w():
    """Give each rank its share of the temperature's gradient, and W times its features'."""

    def loss(x, y, s):
        x, y = (GradientTimes.apply(z, size()) for z in (x, y))
        return local(x, y, s, with_gradient(x), with_gradient(y)) / size()

    return problem(loss)


class GradientTimes(Function):
    """Return the same tensor, with a factor in backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


def loss_differs():
    """Count local negatives twice."""

    def loss(x, y, s):
        logits = s * x @ with_gradient(y).T
        rows = dist.get_rank() * len(x) + torch.arange(len(x))
        more = logits[:, rows] if size() > 1 else logits[:, :0]
        return cross_entropy(torch.cat([logits, more], 1), rows)

    return problem(loss)


def local_statistics():
    """Standardize each rank's rows by the local mean and variance."""

    def loss(x, y, s):
        x, y = ((z - z.mean(0)) / z.std(0, correction=0) for z in (x, y))
        return s * (x.T @ y / len(x)).square().sum()

    def gathered_loss(x, y, s):
        n = torch.tensor(float(len(x)))
        dist.all_reduce(n)
        x, y = ((z - z.mean(0)) / z.std(0, correction=0) for z in (x, y))
        all_x, all_y = with_gradient(x), with_gradient(y)
        return s * (all_x.T @ all_y / n).square().sum()

    return problem(loss if size() == 1 else gathered_loss)


def not_gathered():
    return problem(clip)


def labels_not_offset():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x), with_gradient(y), offset=0))


def gather_averages_all():
    """Take local rows from the gathered ones, too."""

    def loss(x, y, s):
        all_x, all_y = with_gradient(x, 1 / size()), with_gradient(y, 1 / size())
        rows = slice(dist.get_rank() * len(x), (dist.get_rank() + 1) * len(x))
        return local(all_x[rows], all_y[rows], s, all_x, all_y)

    return problem(loss)


def gather_times_w():
    return problem(lambda x, y, s: local(x, y, s, with_gradient(x, size()), with_gradient(y, size())))


def rank_order_mixed():
    """Put local rows first."""

    def local_first(x):
        parts = [*with_gradient(x).split(len(x))]
        return torch.cat([parts.pop(dist.get_rank()), *parts])

    return problem(lambda x, y, s: local(x, y, s, local_first(x), local_first(y)))


def rank_order_mixed_reversed():
    """Gather texts from the last rank to the first."""

    def from_the_last(y):
        return torch.cat([*with_gradient(y).split(len(y))][::-1])

    return problem(lambda x, y, s: clip(with_gradient(x), from_the_last(y), s))


def local_weights():
    """Weight rows by comparison with the other local rows, which on one process are all rows."""

    def loss(x, y, s):
        logits = s * with_gradient(x) @ with_gradient(y).T
        weights = with_gradient(torch.softmax((x * y).sum(1), 0).detach() / size())
        return (weights * cross_entropy(logits, torch.arange(len(logits)), reduction="none")).sum()

    return problem(loss)


def views_interleaved():
    """Concatenate views before the gather, but pair them as if each view had been gathered alone."""

    def loss(x, y, _scale):
        z = with_gradient(torch.cat([x, y]))
        n = len(z) // 2
        logits = (z @ z.T / 0.3).fill_diagonal_(float("-inf"))
        return cross_entropy(logits, (torch.arange(2 * n) + n) % (2 * n))

    return problem(loss)


def no_gradient():
    return problem(lambda x, y, s: clip(with_gradient(x), with_gradient(y), s.detach() if size() > 1 else s))


def no_gradient_anywhere():
    """Detach the scale on one process, too."""
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, s.detach()))


def batch_statistics():
    return problem(wb.CLIPLoss(), Encoders(nn.BatchNorm1d(8)))


def mean_of_means():
    def loss(x, y, s):
        return (s * (x - y)).square().sum(1).mean()

    return problem(loss, uneven=True)


def rows_dropped():
    def loss(x, y, s):
        least = torch.tensor(len(x))
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return wb.functional.clip_loss(x[:least], y[:least], s)

    return problem(loss, uneven=True)


def rows_repeated():
    def loss(x, y, s):
        most = torch.tensor(len(x))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        at = torch.arange(int(most)).clamp(max=len(x) - 1)
        return wb.functional.clip_loss(x[at], y[at], s)

    return problem(loss, uneven=True)


def accumulated(model, batch, steps, *, scaled=1.0):
    """Accumulate as open_clip does: features without gradient first, then each chunk's with gradient."""
    chunks = [*zip(batch["images"].chunk(steps), batch["texts"].chunk(steps), strict=True)]
    with torch.no_grad():
        found = [model(*chunk)[:2] for chunk in chunks]
    for at, chunk in enumerate(chunks):
        *features, scale = model(*chunk)
        x, y = (torch.cat([features[k] if j == at else other[k] for j, other in enumerate(found)]) for k in range(2))
        loss = scaled * wb.functional.clip_loss(x, y, scale)
        loss.backward()
    return loss


def scale_times_steps():
    return Problem(Encoders(), batch(), step=lambda model, batch: accumulated(model, batch, 4 // size() or 1))


def scale_times_steps_reference():
    """Give the true loss as a reference."""

    def reference(model, batch):
        return clip(*model(batch["images"], batch["texts"]))

    return Problem(Encoders(), batch(), step=lambda model, batch: accumulated(model, batch, 3), reference=reference)


def everything_times_steps():
    def step(model, batch):
        losses = []
        for images, texts in zip(batch["images"].chunk(3), batch["texts"].chunk(3), strict=True):
            x, y, scale = model(images, texts)
            losses.append((scale * (x - y)).square().sum(1).mean())
            losses[-1].backward()
        return sum(losses) / 3

    return Problem(Encoders(), batch(), step=step)


def dropout_not_replayed():
    """Cache by hand, with other dropout masks in the second pass."""

    def step(model, batch):
        with torch.no_grad():
            found = [z.requires_grad_() for z in model(batch["images"], batch["texts"])]
        loss = wb.functional.clip_loss(*found)
        loss.backward()
        for images, texts, dx, dy in zip(
            *(z.chunk(2) for z in (batch["images"], batch["texts"], found[0].grad, found[1].grad)), strict=True
        ):
            x, y, _ = model(images, texts)
            torch.autograd.backward([x, y], [dx, dy])
        torch.autograd.backward(model.log_scale.exp(), found[2].grad)
        return loss

    return Problem(Encoders(nn.Dropout(0.3)), batch(), step=step)


def last_chunk_only():
    """Keep only the last chunk's graph for the backward pass."""

    def step(model, batch):
        parts = [*zip(batch["images"].chunk(3), batch["texts"].chunk(3), strict=True)]
        found = [model(*part)[:2] for part in parts]
        x, y = (torch.cat([*(of[k].detach() for of in found[:-1]), found[-1][k]]) for k in range(2))
        loss = wb.functional.clip_loss(x, y, model.log_scale.exp())
        loss.backward()
        return loss

    return Problem(Encoders(), batch(), step=step)


def last_chunk_only_overwritten():
    """Clear the gradients before each chunk's backward pass."""

    def step(model, batch):
        total = 0.0
        for images, texts in zip(batch["images"].chunk(3), batch["texts"].chunk(3), strict=True):
            model.zero_grad()
            x, y, scale = model(images, texts)
            loss = (scale * (x - y)).square().sum(1).mean() / 3
            loss.backward()
            total += loss.item()
        return total

    return Problem(Encoders(), batch(), step=step)


def nan_on_a_rank():
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, s) * (float("nan") if dist.get_rank() else 1.0))


def sum_gather_without_gradient():
    return problem(lambda x, y, s: clip(gathered(x), gathered(y), s) / size(), engine="sum")


def sum_key_side_missing():
    return problem(lambda x, y, s: local(x, y, s, gathered(x), gathered(y)) / size(), engine="sum")


def sum_labels_not_offset():
    def loss(x, y, s):
        return local(x, y, s, with_gradient(x), with_gradient(y), offset=0) / size()

    return problem(loss, engine="sum")


def sum_not_gathered():
    return problem(lambda x, y, s: clip(x, y, s) / size(), engine="sum")


def ring_without_gradient():
    """Send rows from rank to rank in messages."""

    def gone_round(x):
        rank, w, parts, block = dist.get_rank(), size(), {}, x.detach().clone()
        parts[rank] = x
        for step in range(1, w):
            sent, came = dist.isend(block, (rank + 1) % w), torch.empty_like(block)
            dist.recv(came, (rank - 1) % w)
            sent.wait()
            parts[(rank - step) % w] = block = came
        return torch.cat([parts[r] for r in range(w)])

    return problem(lambda x, y, s: clip(gone_round(x), gone_round(y), s))


def detached_and_gather_without_gradient():
    return problem(lambda x, y, s: clip(gathered(x), gathered(y), s) * s.detach())


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


def batch_statistics_and_noise():
    return problem(wb.CLIPLoss(), Encoders(nn.BatchNorm1d(8), Noise()))


def thirteen_rows_mean_of_means():
    return problem(lambda x, y, s: (s * (x - y)).square().sum(1).mean(), rows=13, uneven=True)


def reduced_by_hand(spoil):
    def step(model, batch):
        x, y, scale = model(batch["images"], batch["texts"])
        loss = local(x, y, scale, with_gradient(x), with_gradient(y))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= size()
        if dist.get_rank() == 1:
            spoil(model)
        return loss

    return Problem(Encoders(), batch(), step=step, engine="none")


def not_reduced():
    return reduced_by_hand(lambda model: model.image[0].weight.grad.mul_(2))


def not_reduced_nan():
    return reduced_by_hand(lambda model: model.image[0].weight.grad.fill_(float("nan")))


def bypassed():
    """Call the module instead of DDP's forward."""

    def loss(model, batch):
        x, y, scale = getattr(model, "module", model)(batch["images"], batch["texts"])
        return local(x, y, scale, with_gradient(x), with_gradient(y))

    return Problem(Encoders(), batch(), loss, engine="ddp")


def uniform_scaling():
    def step(model, batch):
        loss = wb.functional.clip_loss(*model(**batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    return Problem(Encoders(), batch(), step=step)


def scale_times_steps_in_float32():
    """Return a loss rounded to float32."""

    def step(model, batch):
        return accumulated(lambda *x: tuple(z.float() for z in model(*x)), batch, 2)

    return Problem(Encoders(), batch(), step=step)


def of_micro_batches(model, batch):
    """Accumulate over halves of a rank's rows, each with its negatives alone."""
    total = 0.0
    parts = [*zip(*(z.chunk(2) for z in (batch["images"], batch["texts"])), strict=True)]
    for images, texts in parts:
        loss = wb.functional.clip_loss(*model(images, texts)) / len(parts)
        loss.backward()
        total += loss.detach()
    return total


def micro_batches():
    return Problem(Encoders(), batch(), step=of_micro_batches, engine="ddp")


def micro_batches_reference():
    return Problem(Encoders(), batch(), step=of_micro_batches, reference=reference_of_clip)


def loss_differs_from_the_reference():
    def loss(model, batch):
        x, y, scale = model(batch["images"], batch["texts"])
        return wb.functional.clip_loss(x, y, scale) + 0.1 * scale

    return Problem(Encoders(), batch(), loss, reference=reference_of_clip)


def not_of_its_loss():
    """Double the temperature's gradient in a backward pass by hand."""
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, GradientTimes.apply(s, 2)))


def sharded_times_w():
    made = right_sharded()
    return Problem(made.model, made.batch, lambda model, batch: size() * made.loss(model, batch), sharded=["head"])


# Declared losses, used in a wrong way.


def declared_over_w():
    return declared(lambda model, batch: declared_loss(model, batch) / size())


def declared_over_w_sync():
    """Ask for the gradient of an engine that sums, under one that averages."""
    return declared(declared_loss, sync="sum")


def declared_mean_of_means():
    """Take the mean over local rows, where ranks have different numbers of them."""
    return declared(lambda model, batch: declared_loss(model, batch).mean(), uneven=True, reduction="none")


def declared_not_gathered():
    return declared(declared_loss, group=wb.comm.LocalCommunicator())


def declared_gathered_without_gradient():
    """Gather rows before the call, which would gather them itself."""

    def loss(model, batch):
        images, texts = (gathered(x) for x in model["towers"](batch["images"], batch["texts"])[:2])
        return model["loss"](images, texts)

    return declared(loss, group=wb.comm.LocalCommunicator())


def declared_data_without_gradient():
    """Gather data of the columns, which lose their gradient, and keep the local ones of them."""

    def loss(model, batch):
        x, y, _ = model["towers"](batch["images"], batch["texts"])
        bias = model["bias"](batch["texts"])[:, 0]
        if size() > 1:
            bias = gathered(bias, local=False)[dist.get_rank() * len(x) :][: len(x)]
        return model["loss"](x, y, y_data={"bias": bias})

    terms = {"all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s + y.bias), "own": wb.terms.Partner()}
    return declared(loss, terms)


def declared_loss(model, batch):
    x, y, _ = model["towers"](batch["images"], batch["texts"])
    return model["loss"](x, y)


def declared(loss, terms=None, *, uneven=False, **options):
    """Return a problem whose model holds a declared loss with a learned scale."""
    terms = terms or {"all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - x.partner))}
    loss_fn = wb.PairLoss(
        terms,
        lambda r, x, p: r.all - (r.own if "own" in terms else 0),
        parameters={"scale": nn.Parameter(torch.tensor(3.0))},
        **options,
    )
    towers = Encoders()
    towers.log_scale.requires_grad_(False)
    model = nn.ModuleDict({"towers": towers, "bias": nn.Linear(D, 1), "loss": loss_fn})
    if "own" not in terms:
        del model["bias"]
    return Problem(model, batch(), loss, uneven=uneven)

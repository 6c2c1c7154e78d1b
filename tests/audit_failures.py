"""Problems that an audit cannot evaluate: they raise, hang, end the process, or are not valid."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from audit_problems import OUT, ROWS, D, Encoders, batch, clip, problem, right_wholebatch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch import Problem


def not_deterministic():
    made = problem(wb.CLIPLoss())
    made.batch["images"] += torch.randn(ROWS, D, generator=fresh())
    return made


def fresh():
    generator = torch.Generator()
    generator.seed()
    return generator


def needs_cuda():
    return Problem(Encoders().cuda(), batch(), clip)


def exits():
    raise SystemExit(3)


def dies():

    os._exit(7)


def prints():
    print("loading the data set")
    return right_wholebatch()


def half():
    return Problem(Encoders().bfloat16(), batch(), clip)


def three_things():
    return Encoders(), batch(), lambda model, batch: wb.functional.clip_loss(*model(**batch))


def two_things():
    return Encoders(), batch()


def uneven_rows():
    return Problem(Encoders(), {"images": torch.rand(4, D), "texts": torch.rand(5, D)}, clip)


def few_rows():
    return problem(wb.CLIPLoss(), rows=4)


def thirteen_rows():
    return problem(wb.CLIPLoss(), rows=13)


def raises_on_ranks():
    def loss(x, y, s):
        if dist.get_rank() == 1:
            raise KeyError("rank 1 has no such thing")
        return wb.functional.clip_loss(x, y, s)

    return problem(loss)


def raises():
    def loss(x, y, s):
        raise KeyError("no such thing")

    return problem(loss)


def hangs():
    def loss(x, y, s):
        if dist.get_rank() == 1:
            dist.barrier()
        return wb.functional.clip_loss(x, y, s)

    return problem(loss)


def only_float32():
    def loss(x, y, s):
        return wb.functional.clip_loss(x @ torch.eye(OUT), y @ torch.eye(OUT), s)

    return problem(loss)


def no_loss():
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, s).detach())


def backward_in_the_loss():
    def loss(x, y, s):
        found = wb.functional.clip_loss(x, y, s)
        found.backward()
        return found

    return problem(loss)


def no_such_file():
    return Problem(Encoders(), torch.load("no such file"), wb.CLIPLoss())


def drawn_everywhere():
    def loss(x, y, s):
        return wb.functional.clip_loss(dropout(x, 0.2), y, s)

    return problem(loss)


def random_module():
    return random.random()


def learned_elsewhere():
    scale = nn.Parameter(torch.tensor(2.0))
    return problem(lambda x, y, _s: clip(x, y, scale))


def learned_elsewhere_hidden():
    """Hide a learned parameter so that only its use shows it."""
    found = {"scale": nn.Parameter(torch.tensor(2.0, dtype=torch.float64))}
    return problem(lambda x, y, _s: clip(x, y, found["scale"]))


def random_elsewhere():
    return problem(lambda x, y, s: wb.functional.clip_loss(x, y, s * (1 + random.random())))


def wrapped():
    return Problem(DistributedDataParallel(Encoders()), batch(), clip)


def step_not_finite():
    return Problem(Encoders(), batch(), step=lambda model, batch: float("nan"))


MODEL = Encoders()


def same_model_twice():
    """Return the same model twice, so that changes to it stay."""

    def loss(model, batch):
        with torch.no_grad():
            model.log_scale += 0.1
        return wb.functional.clip_loss(*model(**batch))

    return Problem(MODEL, batch(), loss)


def no_rows():
    return Problem(Encoders(), {"temperature": torch.tensor(3.0)}, clip)


def no_parameters():
    return Problem(Encoders().requires_grad_(False), batch(), clip)


def both():
    return Problem(Encoders(), batch(), clip, step=clip)


def wrong_engine():
    return Problem(Encoders(), batch(), clip, engine="fsdp")


def not_a_module():
    return Problem({"image": Encoders()}, batch(), clip)


def a_matrix():
    return problem(lambda x, y, s: s * x @ y.T)


def not_finite():
    return problem(lambda x, y, s: clip(x, y, s) * float("nan"))


def no_gradient_at_all():
    return problem(lambda x, y, s: 0 * clip(x, y, s))

"""Numerical extremes: losses of rows with norms from 1e-20 to 1e20, zeros, duplicates and antipodes, in float32 and
half precision, against float64.

    python tests/faults/numerics.py --seed 0 --count 500 [--json OUT] [--only INDEX]

The truth is `wholebatch.reference` in float64 on the same, rounded inputs. Plain PyTorch is that reference in the
accumulation dtype (float32), as for a user who widens half precision before a loss; its gradients are then rounded to
the features' dtype. Rounding errors vary, so plain PyTorch's error is the largest of eight runs: seven have the
features in another order and moved by an eps of float32, up or down, which is about the rounding error of a product.

Forbidden:
    not finite      NaN or infinity where the truth is finite and the output's dtype holds it
    wrong           |gradient - truth| / |truth| of an input above the largest of twice plain PyTorch's, 1e-6 and 4 eps;
                    that of a scale, an inner product of features and their gradients, may also be wrong by an eps of
                    float32 times the sum of their products' absolute values
    error           an exception, except documented refusals
Out of scope, and counted:
    no truth        the float64 answer itself is not finite, or the reference raises
    ill-posed       the float64 answer changes by more than 1e-6 if features are moved by an eps of float64: for
                    instance two equal logits of 1e30, which rounding may make different
    refused         W-MSE's covariance without an inverse
Entries of the truth beyond the dtype's range are left out of a comparison ("beyond the dtype" counts such cases). Four
times the error of rounding the gradient to the dtype, for instance to subnormal numbers, is allowed.

This file is not called `numbers`, because its folder is on Python's path before the standard library.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import loss_cases
from loss_cases import (
    HARD_NEGATIVES,
    IDS,
    LOSSES,
    NEGATIVES,
    NO_NEGATIVES,
    QUEUE,
    TEACHER,
    TOKENS,
    Case,
    Input,
    X,
    Y,
    labeled,
)

import wholebatch as wb

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORBIDDEN = ("not finite", "wrong", "error")
_FEATURES = (X, Y, NEGATIVES, NO_NEGATIVES, HARD_NEGATIVES, QUEUE, TEACHER, *TOKENS)
_RUNS, _PLAIN_RUNS, _ILL_POSED = 4, 8, 1e-6
_NORMS = {torch.float32: (-20, 20), torch.bfloat16: (-20, 20), torch.float16: (-6, 4)}  # as powers of ten
_CENTERS = Input(lambda g, _n, x, _y: torch.randn(11, x.shape[1], dtype=torch.float64, generator=g), replicated=True)
_CLASSES = Input(lambda g, n, _x, _y: torch.randint(0, 11, (n,), generator=g), differentiable=False)
_FEATURES += (_CENTERS,)
_LABELED = {"has_scale": False, "normalizes": True}


def partial_fc(margin: Callable[[], Any], **settings: Any) -> Case:
    """Return a row of the table; each call makes a new margin, so that running averages do not affect later calls."""

    def call(f: ModuleType, x: Tensor, labels: Tensor, centers: Tensor, _scale: Any, _bias: Any, **o: Any) -> Tensor:
        chosen = margin()
        if isinstance(chosen, torch.nn.Module):
            chosen.eval()
        return f.partial_fc_loss(x, labels, centers, margin=chosen, **settings, **o)

    return Case(call, inputs=(X, _CLASSES, _CENTERS), choices=("memory", "reduction"), **_LABELED)


PARTIAL_FC = {
    "partial_fc, arcface": partial_fc(wb.ArcFace),
    "partial_fc, arcface, linear": partial_fc(lambda: wb.ArcFace(16.0, 0.5, fold="linear")),
    "partial_fc, cosface": partial_fc(lambda: wb.CosFace(30.0, 0.35), label_smoothing=0.1),
    "partial_fc, sphereface": partial_fc(lambda: wb.SphereFace(16.0)),
    "partial_fc, normface": partial_fc(wb.NormFace),
    "partial_fc, combined": partial_fc(lambda: wb.CombinedMargin(64.0, 1.1, 0.3, 0.2)),
    "partial_fc, magface": partial_fc(wb.MagFace),
    "partial_fc, adaface": partial_fc(wb.AdaFace),
    "partial_fc, curricularface": partial_fc(wb.CurricularFace),
    "partial_fc, centers normalized": partial_fc(lambda: wb.SphereFace(1.0), normalize="centers"),
    "partial_fc, embeddings normalized": partial_fc(lambda: wb.CosFace(1.0, 0.2), normalize="embeddings"),
    "partial_fc, linear": partial_fc(lambda: wb.NormFace(1.0), normalize="none"),
}
MORE = {
    "triplet, cosine": Case(labeled("triplet_loss", distance="cosine"), (X, IDS), **_LABELED, smooth=False),
    "triplet, squared": Case(labeled("triplet_loss", distance="squared"), (X, IDS), **_LABELED, smooth=False),
    "smooth_ap, sharp": Case(labeled("smooth_ap_loss", temperature=0.003), (X, IDS), **_LABELED),
    "circle, sharp": Case(labeled("circle_loss", gamma=512.0), (X, IDS), **_LABELED),
    "dcl, sharp weights": Case(loss_cases.two_views("dcl_loss", sigma=1e-3), normalizes=True),
}
CASES = LOSSES | MORE | PARTIAL_FC


@dataclass
class Trial:
    """One case, made from its seed."""

    index: int
    name: str
    case: Case
    dtype: torch.dtype
    scale: float
    inputs: list[Tensor]  # rounded to the dtype, unless they are integers
    functions: ModuleType = wb.functional

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {str(self.dtype)[6:]}, scale {self.scale:.3g}"


@dataclass
class Verdict:
    """The outcome of a case."""

    outcome: str
    detail: str = ""
    worst: float = 0.0  # the largest relative error of a gradient
    plain: float = 0.0  # the same of plain PyTorch
    rows: float = 0.0  # the largest relative error of a single row
    plain_rows: float = 0.0
    notes: list[str] = field(default_factory=list)


def trial(seed: int, index: int) -> Trial:
    """Return the case of this number, which depends on both arguments alone."""
    rng = random.Random(f"{seed}, {index}")
    names = list(CASES)
    name = names[(index + rng.randrange(len(names)) * 0) % len(names)]
    case, dtype = CASES[name], DTYPES[index // len(names) % 3] if index >= len(names) else rng.choice(DTYPES)
    rows, width = rng.randrange(5, 17), rng.choice((5, 6, 16))
    if name == "w_mse":
        rows, width = rng.randrange(12, 20), 5
    whole = loss_cases.whole_batch(case, (rows,), d=width, seed=rng.randrange(2**31))
    regime = rng.choice(("all", "long", "short", "mild", "unit"))
    pairs = zip(case.inputs, whole, strict=True)
    inputs = [
        extreme(rng, z, dtype, regime, zeros="partial_fc" not in name) if of in _FEATURES else z for of, z in pairs
    ]
    inputs = [z.to(dtype) if z.is_floating_point() else z for z in inputs]
    scale = 10 ** rng.uniform(-1, 4 if rng.random() < 0.3 else 2)
    return Trial(index, name, case, dtype, torch.tensor(scale, dtype=torch.float32).item(), inputs)


def extreme(rng: random.Random, z: Tensor, dtype: torch.dtype, regime: str, *, zeros: bool) -> Tensor:
    """Return rows of other norms, some of them zero, equal or opposite."""
    z, shape = z.flatten(0, -2).clone(), z.shape
    z = z / z.norm(dim=1, keepdim=True)
    low, high = _NORMS[dtype]
    ends = {"all": (low, high), "long": (0, high), "short": (low, 0), "mild": (-2, 2), "unit": (0, 0)}[regime]
    for i in range(len(z)):
        z[i] *= 10 ** rng.uniform(*ends)
    for i in range(len(z)):
        what = rng.random()
        if what < 0.06 and zeros:
            z[i] = 0
        elif what < 0.12:
            z[i] = z[rng.randrange(len(z))]
        elif what < 0.18:
            z[i] = -z[rng.randrange(len(z))]
    z = z.to(dtype).to(z)
    if not zeros:  # nor rows that are rounded to zero
        z[z.norm(dim=1) == 0, 0] = torch.finfo(dtype).tiny
    return z.view(shape)


def gradients(trial: Trial, functions: ModuleType, dtype: torch.dtype, run: int = 0) -> list[Tensor]:
    """Return loss and gradients in a dtype; all runs but the first slightly move features and change their order."""
    inputs = [z.to(dtype) if z.is_floating_point() else z for z in trial.inputs]
    generator = torch.Generator().manual_seed(run)
    order = torch.randperm(inputs[0].shape[-1], generator=generator)
    if trial.name.startswith("matryoshka"):  # its features are nested
        order = torch.arange(len(order))
    of_features = [
        of in _FEATURES and z.shape[-1] == len(order) for of, z in zip(trial.case.inputs, inputs, strict=True)
    ]
    if run:
        for position, z in enumerate(inputs):
            if of_features[position]:
                up = 2 * torch.randint(0, 2, z.shape, generator=generator) - 1
                moved = 1 + torch.finfo(dtype).eps * up.double()
                inputs[position] = (z.double() * moved).to(dtype)[..., order]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = loss_cases.gradients(trial.case, functions, inputs, torch.tensor(trial.scale, dtype=wide))
    if run:
        for number, position in enumerate(trial.case.differentiable):
            if of_features[position]:
                found[1 + number] = found[1 + number][..., order.argsort()]
    return found


def evaluated(trial: Trial) -> Verdict:
    """Run a case, and compare."""
    try:
        truth, *others = [gradients(trial, wb.reference, torch.float64, run) for run in range(_RUNS)]
    except torch.linalg.LinAlgError as error:
        return Verdict("no truth", str(error))
    if not all(of.isfinite().all() for of in truth):
        return Verdict("no truth")
    try:
        found = gradients(trial, trial.functions, trial.dtype)
    except ValueError as error:
        documented = trial.name == "w_mse" and "has no inverse" in str(error)
        return Verdict("refused" if documented else "error", repr(error))
    except Exception as error:
        return Verdict("error", repr(error))
    verdict = Verdict("right")
    merged = [_merged(trial, number, of) for number, of in enumerate(truth)]
    if any(_apart(_merged(trial, n, of), merged[n]) > _ILL_POSED for other in others for n, of in enumerate(other)):
        verdict.outcome = "ill-posed"
    plain = _plain(trial, [of.dtype for of in found])
    for number, (of, true) in enumerate(zip(found, truth, strict=True)):
        held = true.abs() <= torch.finfo(of.dtype).max
        if not held.all():
            verdict.notes.append("beyond the dtype")
        if not of[held].isfinite().all():
            return replace(verdict, outcome="not finite", detail=f"output {number}")
        if verdict.outcome == "ill-posed":
            continue
        ours, true, rounded = (
            _merged(trial, number, torch.where(held, z.double(), 0)) for z in (of, true, true.to(of))
        )
        theirs = [_merged(trial, number, torch.where(held, p[number].double(), 0)) for p in plain]
        error, bare = _apart(ours, true), max(_apart(p, true) for p in theirs)
        allowed = max(2 * bare, 1e-6, 4 * torch.finfo(of.dtype).eps) + 4 * _apart(rounded, true)
        if number > len(trial.case.differentiable):  # of a scale, or of a bias
            allowed += torch.finfo(torch.float32).eps * _condition(trial, truth, true)
            if trial.name.startswith("global contrastive"):  # it contains the loss / scale, and so the error of that
                allowed += 1e-6 / (trial.scale * true.abs().clamp(min=1e-300).item())
        if number == 0:
            allowed += 1e-6 / true.abs().clamp(min=1e-300).item()  # the error of a loss near 0 is relative to a logit
        if not error <= allowed:
            verdict.outcome, verdict.detail = "wrong", f"output {number}: {error:.3g}, allowed {allowed:.3g}"
        if number:
            verdict.worst, verdict.plain = max(verdict.worst, error), max(verdict.plain, bare)
        if of.dim() == 2:
            verdict.rows = max(verdict.rows, _rows_apart(ours, true, of.dtype))
            verdict.plain_rows = max(verdict.plain_rows, *(_rows_apart(p, true, of.dtype) for p in theirs))
    return verdict


def _plain(trial: Trial, dtypes: list[torch.dtype]) -> list[list[Tensor]]:
    """Return several runs of the reference in float32, rounded to the outputs' dtypes."""
    try:
        found = [gradients(trial, wb.reference, torch.float32, run) for run in range(_PLAIN_RUNS)]
    except torch.linalg.LinAlgError:
        return [[torch.full((), math.nan)] * len(dtypes)]
    return [[of.to(dtype) for of, dtype in zip(outputs, dtypes, strict=True)] for outputs in found]


def _merged(trial: Trial, number: int, of: Tensor) -> Tensor:
    """Add up gradients of equal rows, since the choice of the hardest among equal rows is arbitrary.

    The gradient of a row of zeros, which is equally far from all rows of one norm, is left out.
    """
    if trial.case.smooth or not number or number > len(trial.case.differentiable):
        return of.double()
    z, of = trial.inputs[trial.case.differentiable[number - 1]], of.double()
    if z.dim() < 2 or of.shape != z.shape:
        return of
    z, of = z.double().flatten(0, -2), of.flatten(0, -2)
    if "not normalized" in trial.name:  # all short rows are equally far from a long one
        z = (z / z.abs().amax().clamp(min=1e-30) * 2**26).round()
    _, group = torch.unique(z, dim=0, return_inverse=True)
    of = torch.where((z == 0).all(1, keepdim=True), 0.0, of)
    return torch.zeros_like(of).index_add_(0, group, of)


def _condition(trial: Trial, truth: list[Tensor], true: Tensor) -> float:
    """Return the sum of |x dL/dx| over all numbers of all features, relative to the gradient of the scale."""
    pairs = zip(trial.case.differentiable, truth[1:], strict=False)
    size = sum((trial.inputs[position].double() * grad).abs().sum().item() for position, grad in pairs)
    return size / max(trial.scale * true.abs().item(), 1e-300)


def _apart(found: Tensor, true: Tensor) -> float:
    """Return |found - true| / |true|, without over- or underflow; infinity if a value is not finite."""
    if not found.isfinite().all():
        return math.inf
    unit = torch.maximum(found.abs().amax(), true.abs().amax()) if true.numel() else torch.zeros(())
    if not unit > 0:
        return 0.0
    size = (true / unit).norm().item()
    return ((found / unit - true / unit).norm().item() / size) if size else math.inf


def _rows_apart(found: Tensor, true: Tensor, dtype: torch.dtype) -> float:
    """Return the largest relative error of a row, among the rows that are large enough for the dtype."""
    pairs = zip(found, true, strict=True)
    return max(
        (_apart(f, t) for f, t in pairs if t.norm() > torch.finfo(dtype).tiny / torch.finfo(dtype).eps), default=0
    )


def run(seed: int, count: int, functions: ModuleType = wb.functional) -> list[tuple[Trial, Verdict]]:
    """Run all cases, with the losses of a module."""
    done = []
    for index in range(count):
        of = replace(trial(seed, index), functions=functions)
        done.append((of, evaluated(of)))
    return done


def main() -> int:
    """Print the table and the forbidden cases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--only", type=int, help="one case alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.only is not None:
        of = trial(given.seed, given.only)
        print(of, evaluated(of), sep="\n")
        return 0
    done = run(given.seed, given.count)
    table = Counter((str(of.dtype)[6:], verdict.outcome) for of, verdict in done)
    for (dtype, outcome), number in sorted(table.items()):
        print(f"{dtype:10} {outcome:12} {number:5}")
    beyond = sum(bool(verdict.notes) for _, verdict in done)
    print(f"{beyond} cases have gradients beyond the dtype; those entries were left out")
    bad = [(of, verdict) for of, verdict in done if verdict.outcome in FORBIDDEN]
    for of, verdict in bad:
        print(f"{of}: {verdict.outcome}, {verdict.detail}; --seed {given.seed} --only {of.index}")
    rows = [(of, v) for of, v in done if v.outcome == "right" and v.rows > max(4 * v.plain_rows, 0.05)]
    print(f"{len(rows)} right cases have a row with an error beyond 5% and four times plain PyTorch's worst row")
    for of, verdict in rows:
        print(f"  {of}: row {verdict.rows:.3g}, plain PyTorch {verdict.plain_rows:.3g}")
    if given.json:
        record = [{"case": str(of), "outcome": v.outcome, "worst": v.worst, "plain": v.plain} for of, v in done]
        given.json.write_text(json.dumps(record, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""Late interaction: forward and backward in kernels, in plain PyTorch, and by one dense tensor of all products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from wholebatch import kernels

from .device import DEVICE, GPU, Row, first_line, relative, seconds, unit_rows
from .figures import backward_of, measured

_SCALE = 1.0
_QUERIES, _QUERY, _DOCUMENT, _SIZE = (256, 32, 180, 128) if GPU else (6, 4, 9, 16)
# Errors relative to float64. Among nearly equal products float32 may choose another winner, whose gradient differs.
_LOSS, _GRADIENT = 1e-3, 3e-2
_BLOCKS = ((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4))


def late_interaction() -> Iterator[Row]:
    """Yield the time of 256 queries of 32 tokens against 256 documents of 180, after a comparison with float64."""
    wrong = []
    for documents, dtype in product(("of one length", "ragged"), (torch.float32, torch.bfloat16)):
        lengths = _lengths(documents)
        x = unit_rows(_QUERIES * _QUERY, _SIZE, dtype).requires_grad_()
        y = unit_rows(sum(lengths), _SIZE, dtype).requires_grad_()
        truth = _value_and_gradients(partial(_loss, wb.reference, lengths=lengths), x.double(), y.double())
        row: Row = {"documents": documents, "features": str(dtype).removeprefix("torch.")}
        for method, loss in _methods(lengths).items():
            found = _checked(loss, (x, y), truth, bounded=method != "dense")
            if "error" not in found:
                found |= measured(backward_of(loss, x, y), work=4 * len(x) * len(y) * _SIZE)
            elif method != "dense":  # which may not fit
                wrong.append(method)
            yield row | {"method": method} | found
        yield from (row | of for of in _alone(x.detach(), y.detach(), lengths))
    if wrong:
        raise AssertionError(f"wrong: {wrong}")


def _lengths(documents: str) -> list[int]:
    if documents == "of one length":
        return [_DOCUMENT] * _QUERIES
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 2 * _DOCUMENT, (_QUERIES,), generator=generator).tolist()


def _loss(functions: object, x: Tensor, y: Tensor, *, lengths: Sequence[int], **more: object) -> Tensor:
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    queries = torch.arange(0, len(x) + 1, _QUERY)
    found: Tensor = functions.max_sim_loss(  # type: ignore[attr-defined]
        x, y, logit_scale=_SCALE, query_offsets=queries, document_offsets=offsets, **more
    )
    return found


def _dense(x: Tensor, y: Tensor, *, lengths: Sequence[int]) -> Tensor:
    """Return the loss as common code computes it: all products, masked, in the dtype of the features."""
    documents = pad_sequence(y.split(list(lengths)), batch_first=True)
    there = torch.arange(documents.shape[1], device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    products = torch.einsum("qtd,cud->qctu", x.view(_QUERIES, _QUERY, _SIZE), documents)
    if not bool(there.all()):
        products = products.masked_fill(~there[:, None], float("-inf"))
    logits = _SCALE * products.amax(3).float().sum(2)
    return F.cross_entropy(logits, torch.arange(_QUERIES, device=DEVICE))


def _methods(lengths: Sequence[int]) -> dict[str, Callable[..., Tensor]]:
    """Return the ways of computing the loss by name."""
    found: dict[str, Callable[..., Tensor]] = {"dense": partial(_dense, lengths=lengths)}
    for kernel, memory in product(("torch", "triton"), ("auto", "flat")):
        if kernel == "torch" or kernels.missing(DEVICE) is None:
            loss = partial(_loss, wb.functional, lengths=lengths, kernel=kernel, memory=memory)
            found[f"kernel={kernel}, memory={memory}"] = loss
    return found


def _value_and_gradients(loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    leaves = [z.detach().clone().requires_grad_() for z in (x, y)]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def _checked(
    loss: Callable[..., Tensor], features: tuple[Tensor, Tensor], truth: Sequence[Tensor], *, bounded: bool
) -> Row:
    """Return the errors of a loss and of its gradients, and "error" where there is none, or one is out of bounds."""
    try:
        value, *grads = _value_and_gradients(loss, *features)
    except (RuntimeError, ValueError) as error:
        return {"error": first_line(error)}
    of_loss, of_gradient = relative(value, truth[0]), max(map(relative, grads, truth[1:]))
    row: Row = {"error_of_loss": of_loss, "error_of_gradient": of_gradient}
    is_right = not bounded or (of_loss <= _LOSS and of_gradient <= _GRADIENT)
    return row if is_right else row | {"error": f"errors above {_LOSS:g} and {_GRADIENT:g}"}


def _alone(x: Tensor, y: Tensor, lengths: Sequence[int]) -> Iterator[Row]:
    """Yield the speed of the kernel alone, by the block of a program."""
    if kernels.missing(DEVICE) is not None:
        return
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(DEVICE)
    features = kernels.TileInputs(x, y, None, kernels.Entries(), kernels.Entries(), 0, 0)
    tile = kernels.TokenTile(features, starts, max(lengths))
    best = torch.empty(len(x), len(lengths), device=DEVICE)
    winners = torch.empty(best.shape, dtype=torch.int16, device=DEVICE)
    work = 2 * len(x) * len(y) * _SIZE
    step = partial(kernels.token_maxima, tile, best, winners)
    yield {"method": "kernel alone"} | _speed(step, work)
    truth = best.clone()
    for rows, cols, warps, stages in _BLOCKS if GPU and x.dtype == torch.bfloat16 else ():
        sizes = kernels.Blocks(rows, cols, _SIZE, 8, warps, stages)
        with kernels.using(sizes):
            found = _speed(step, work)
        if "error" not in found and not torch.allclose(best, truth, rtol=0, atol=1e-3):
            found = {"error": "another result"}
        yield {"method": "kernel alone", "blocks": repr(sizes)} | found


def _speed(step: Callable[[], object], work: float) -> Row:
    try:
        taken = seconds(step)
    except Exception as error:  # too much shared memory: these blocks have no figure
        return {"error": first_line(error)}
    return {"seconds": taken, "tflops": work / taken / 1e12}

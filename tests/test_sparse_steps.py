"""Steps of sparse optimizers: the numbers of a plain reference, whatever the pieces and the order of the gradient."""

import copy

import pytest
import torch
from compare import assert_same
from live_bytes import peak_of
from torch import nn

import wholebatch as wb
from wholebatch.heads import pieces

ROWS = 11
SGD = [
    {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True))
    for decay in (0.0, 0.1)
]
ADAMW = [{"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": decay} for decay in (0.0, 0.1)]
SETTINGS = [*((wb.SparseSGD, of) for of in SGD), *((wb.SparseAdamW, of) for of in ADAMW)]


def plain_step(optimizer, w, state, grad, lr, settings):
    """Step the rows of a dense float64 gradient that are not NaN, one by one, with Python's numbers alone."""
    for row in range(len(w)):
        g = grad[row]
        if g.isnan().any():
            continue
        if optimizer is wb.SparseSGD:
            momentum = settings["momentum"]
            g = g + settings["weight_decay"] * w[row]
            state[row] = (momentum * state[row][0] + g,)
            if momentum:
                g = g + momentum * state[row][0] if settings["nesterov"] else state[row][0]
            w[row] -= lr * g
        else:
            (beta1, beta2), (mean, square, n) = settings["betas"], state[row]
            mean, square, n = beta1 * mean + (1 - beta1) * g, beta2 * square + (1 - beta2) * g**2, n + 1
            state[row] = mean, square, n
            change = mean / (1 - beta1**n) / ((square / (1 - beta2**n)).sqrt() + settings["eps"])
            w[row] = (1 - lr * settings["weight_decay"]) * w[row] - lr * change


def gradients(shape, dtype=torch.float64, seed=0):
    """Yield (gradient, dense with NaN in the rows that have none): ascending, not, repeated, empty, dense."""
    generator = torch.Generator().manual_seed(seed)
    for index in ([0, 2, 3, 7, 10], [9, 1, 4], [5, 3, 5, 0, 3, 5], [], [6], [*range(ROWS)], None, [3, 3]):
        if index is None:
            grad = torch.randn(ROWS, *shape, generator=generator, dtype=dtype)
            yield grad, grad.double()
            continue
        values = torch.randn(len(index), *shape, generator=generator, dtype=dtype)
        at = torch.tensor(index, dtype=torch.int64)
        true = torch.full((ROWS, *shape), torch.nan, dtype=torch.float64)
        true[at] = 0.0
        true.index_add_(0, at, values.double())
        with torch.sparse.check_sparse_tensor_invariants():
            yield torch.sparse_coo_tensor(at[None], values, (ROWS, *shape)), true


@pytest.mark.parametrize("numbers", [1, 8, 2**16])
@pytest.mark.parametrize(("optimizer", "settings"), SETTINGS, ids=str)
def test_steps_are_those_of_a_plain_reference(optimizer, settings, numbers, monkeypatch):
    """Three parameters of different shapes, in groups with different rates; the state goes through a state_dict."""
    monkeypatch.setattr(pieces, "_numbers_at_a_time", lambda device: numbers)
    shapes, rates = [(), (3,), (2, 3)], [0.1, 0.2, 0.3]
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    parameters = [nn.Parameter(start.clone()) for start in starts]

    def new():
        groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
        return optimizer(groups, **settings)

    ours, states = new(), [[(0.0, 0.0, 0)] * ROWS for _ in shapes]
    steps = [gradients(shape, seed=at) for at, shape in enumerate(shapes)]
    for step, of_each in enumerate(zip(*steps, strict=True)):
        for p, start, state, rate, (grad, true) in zip(parameters, starts, states, rates, of_each, strict=True):
            p.grad = grad
            plain_step(optimizer, start, state, true, rate, settings)
        before = [grad.clone() for grad, _ in of_each]
        ours.step()
        for (grad, _), kept in zip(of_each, before, strict=True):
            assert torch.equal(grad.to_dense(), kept.to_dense()), "a step does not change the gradient"
        if step == 3:
            saved, ours = copy.deepcopy(ours.state_dict()), new()
            ours.load_state_dict(saved)
    for p, start in zip(parameters, starts, strict=True):
        assert_same(p.detach(), start, relative=1e-12)


def at_once(optimizer, p, state, index, g, lr, settings):
    """Step all rows in one piece, with tensors of the gradient's size."""
    if optimizer is wb.SparseSGD:
        values, momentum, decay = p[index], settings["momentum"], settings["weight_decay"]
        g = g.add(values, alpha=decay) if decay else g
        if momentum:
            state["momentum_buffer"][index] = buffer = state["momentum_buffer"][index].mul_(momentum).add_(g)
            g = g.add(buffer, alpha=momentum) if settings["nesterov"] else buffer
        p[index] = values.add(g, alpha=-lr)
        return
    beta1, beta2 = settings["betas"]
    state["exp_avg"][index] = mean = state["exp_avg"][index].lerp_(g, 1 - beta1)
    state["exp_avg_sq"][index] = square = state["exp_avg_sq"][index].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    state["steps"][index] = steps = state["steps"][index] + 1
    first, second = ((1 - beta ** steps.double()[:, None]).to(p.dtype) for beta in (beta1, beta2))
    change = (mean / first).div_((square / second).sqrt_().add_(settings["eps"]))
    p[index] = p[index].mul_(1 - lr * settings["weight_decay"]).add_(change, alpha=-lr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("optimizer", "settings"), SETTINGS, ids=str)
def test_pieces_change_no_bit(optimizer, settings, dtype, monkeypatch):
    """Pieces of two rows give the numbers of one piece, in every dtype."""
    monkeypatch.setattr(pieces, "_numbers_at_a_time", lambda device: 2 * 64)
    p = nn.Parameter(torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2)).to(dtype))
    true, ours = p.detach().clone(), optimizer([p], lr=0.1, **settings)
    state = {name: torch.zeros_like(true) for name in ours.row_state}
    if "steps" in state:
        state["steps"] = torch.zeros(ROWS)
    for grad, _ in gradients((64,), dtype):
        if not grad.is_sparse:
            continue
        p.grad = grad
        each = grad.coalesce()
        at_once(optimizer, true, state, each.indices()[0], each.values(), 0.1, settings)
        ours.step()
        assert torch.equal(p, true)
    assert all(torch.equal(ours.state[p][name], x) for name, x in state.items() if ours.state[p])


@pytest.mark.parametrize(("optimizer", "settings"), [SETTINGS[5], SETTINGS[-1]], ids=str)
def test_a_step_takes_no_memory_of_the_samples_size(optimizer, settings):
    """The gradient is the one that the head leaves, which torch stores without its mark that it is in order."""
    head = wb.PartialFC(64, 40_000, sample_rate=0.5)
    ours = optimizer(head.parameters(), **settings)
    for _ in range(2):  # the first step allocates the state
        ours.zero_grad()
        head(torch.randn(8, 64), torch.arange(8)).backward()
        gradient = head.weight.grad._values().nbytes
        beyond = peak_of(ours.step)
    assert gradient > 4_000_000
    assert beyond < gradient / 2, "five buffers of a piece, and a comparison of the indices"
    grad = head.weight.grad
    with torch.sparse.check_sparse_tensor_invariants():
        head.weight.grad = torch.sparse_coo_tensor(grad._indices().flip(1), grad._values(), grad.shape)
    assert peak_of(ours.step) > gradient, "rows in another order are sorted first, into a copy"


def test_a_gradient_with_two_sparse_dimensions_is_refused_before_anything_changes():
    p = nn.Parameter(torch.ones(4, 3))
    ours = wb.SparseSGD([p], momentum=0.9)
    p.grad = torch.eye(4, 3).to_sparse(2)
    with pytest.raises(ValueError, match="must have 1 sparse dimension, its rows, got 2"):
        ours.step()
    assert not ours.state[p]
    assert torch.equal(p, torch.ones(4, 3))


def test_a_scalar_is_stepped_as_by_pytorch():
    for ours, theirs in ((wb.SparseSGD, torch.optim.SGD), (wb.SparseAdamW, torch.optim.AdamW)):
        p, q = (nn.Parameter(torch.tensor(2.0, dtype=torch.float64)) for _ in range(2))
        for one, at in ((ours([p], lr=0.1), p), (theirs([q], lr=0.1), q)):
            for step in range(3):
                at.grad = torch.tensor(float(step - 1), dtype=torch.float64)
                one.step()
        assert_same(p.detach(), q.detach(), relative=1e-12)


def bfloat16_run(steps, p=None, optimizer=None, start=0):
    """Return a parameter and its optimizer after steps with sparse gradients, which leave some rows out."""
    if p is None:
        p = nn.Parameter(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3)).bfloat16())
        optimizer = wb.SparseAdamW([p], lr=0.01)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.arange(ROWS)[step % 3 :] if step % 5 else torch.tensor([0, ROWS - 1])
        values = torch.randn(len(rows), 8, generator=generator).bfloat16()
        p.grad = torch.sparse_coo_tensor(rows[None], values, p.shape)
        optimizer.step()
    return p, optimizer


def test_a_state_in_bfloat16_goes_on_bit_for_bit(tmp_path):
    """bfloat16 has no odd numbers above 256, where a count that torch has cast to it no longer grows by one."""
    p, optimizer = bfloat16_run(301)
    counts = optimizer.state[p]["steps"].clone()
    assert counts.max() == 301
    assert not torch.equal(counts.bfloat16().float(), counts)
    torch.save((p.detach(), optimizer.state_dict()), tmp_path / "saved.pt")

    def resumed(load):
        weights, state = torch.load(tmp_path / "saved.pt")
        other = nn.Parameter(weights)
        found = wb.SparseAdamW([other], lr=0.01)
        load(found, state)
        return bfloat16_run(40, other, found, start=301)

    ours, theirs = resumed(wb.SparseAdamW.load_state_dict), resumed(torch.optim.Optimizer.load_state_dict)
    bfloat16_run(40, p, optimizer, start=301)
    assert torch.equal(ours[0], p)
    for name in optimizer.row_state:
        assert torch.equal(ours[1].state[ours[0]][name], optimizer.state[p][name]), name
        assert ours[1].state[ours[0]][name].dtype == optimizer.state[p][name].dtype
    assert not torch.equal(theirs[0], p), "counts that are cast change the weights"


def test_a_state_is_loaded_as_the_hooks_of_others_return_it():
    """Another hook renames parameters; one that was registered for a single load is gone afterward."""
    p, optimizer = bfloat16_run(3)
    saved = optimizer.state_dict()
    other = nn.Parameter(p.detach().clone())
    resumed = wb.SparseAdamW([other])
    resumed.register_load_state_dict_pre_hook(
        lambda _, state: {
            "state": {7: {**state["state"][0], "steps": state["state"][0]["steps"] + 300}},
            "param_groups": [{**state["param_groups"][0], "params": [7]}],
        }
    )
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state[other]["steps"], optimizer.state[p]["steps"] + 300)
    assert len(resumed._optimizer_load_state_dict_pre_hooks) == 1
    with pytest.raises(ValueError, match="different number of parameter groups"):
        wb.SparseAdamW([{"params": [other]}, {"params": [nn.Parameter(torch.ones(1))]}]).load_state_dict(saved)

"""checks="deferred": values and gradients of the reference, nothing read, mistakes that raise at the next call."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from kernel_losses import CANARIES, PASSED, REHEARSE
from test_host_sync import reads_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.testing import run_ranks

STEPS = 4
SCALES = (14.3, 15.0, 40.0, 99.0)
TEMPERATURES = (0.1, 0.09, 0.08, 0.1)


def without_sweep(options):
    return {name: value for name, value in options.items() if name in ("sync", "checks")}


def losses_of(x, y, scale, bias, learned, labels):
    """Return functions of a module of losses and its options, by name, and the leaves of each."""
    few = normalize(torch.ones(5, x.shape[1]).to(x).cumsum(0), dim=1)
    return {
        "clip": (lambda f, m: f.clip_loss(x, y, scale, **m), [x, y, scale]),
        "clip, smoothed": (lambda f, m: f.clip_loss(x, y, scale, label_smoothing=0.1, **m), [x, y, scale]),
        "clip, ids": (lambda f, m: f.clip_loss(x, y, scale, ids=labels, **m), [x, y, scale]),
        "clip, weights": (lambda f, m: f.clip_loss(x, y, scale, weights=1.0 + labels.abs(), **m), [x, y, scale]),
        "clip, scale of the host": (lambda f, m: f.clip_loss(x, y, 14.3, **m), [x, y]),
        "clip, scale of shape [1]": (lambda f, m: f.clip_loss(x, y, scale[None], **m), [x, y, scale]),
        "info_nce": (lambda f, m: f.info_nce_loss(x, y, logit_scale=scale, **m), [x, y, scale]),
        "info_nce, all": (
            lambda f, m: f.info_nce_loss(x, y, logit_scale=1 / learned, directions=ALL, partition="joint", **m),
            [x, y, learned],
        ),
        "nt_xent": (lambda f, m: f.nt_xent_loss(20 * x, y, temperature=0.1, **m), [x, y]),
        "nt_xent, learned": (lambda f, m: f.nt_xent_loss(x, y, temperature=learned, **m), [x, y, learned]),
        "sup_con": (lambda f, m: f.sup_con_loss(x, labels, temperature=learned, **m), [x, learned]),
        "siglip": (lambda f, m: f.siglip_loss(x, y, scale, bias, **m), [x, y, scale, bias]),
        "siglip, scalars of shape [1]": (
            lambda f, m: f.siglip_loss(x, y, scale[None], bias[None], **m),
            [x, y, scale, bias],
        ),
        "dcl": (lambda f, m: f.dcl_loss(x, y, temperature=0.1, sigma=0.5, **m), [x, y]),
        "debiased": (lambda f, m: f.debiased_loss(x, y, temperature=0.1, tau_plus=0.1, beta=0.5, **m), [x, y]),
        "alignment_uniformity": (lambda f, m: f.alignment_uniformity_loss(3 * x, y, **m), [x, y]),
        "vicreg": (lambda f, m: f.vicreg_loss(3 * x, y, **without_sweep(m)), [x, y]),
        "w_mse": (lambda f, m: f.w_mse_loss(3 * x, y, epsilon=0.1, **without_sweep(m)), [x, y]),
        "barlow_twins": (lambda f, m: f.barlow_twins_loss(3 * x, y, **without_sweep(m)), [x, y]),
        "moco": (lambda f, m: f.moco_loss(x, y, few, logit_scale=scale, **m), [x, y, scale]),
    }


ALL = ("query_to_key", "key_to_query", "query_to_query", "key_to_key")
NAMES = [*losses_of(torch.zeros(1, 1), torch.zeros(1, 1), *[torch.ones(())] * 3, torch.zeros(1))]


def batch(step, counts, dtype=torch.float64, dim=8):
    """Return the tensors of all ranks in a step, and this rank's leaves."""
    torch.manual_seed(step)
    total = sum(counts)
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = sum(counts[:rank])
    x = normalize(torch.randn(total, dim, dtype=torch.float64), dim=1)
    y = normalize(x + 0.5 * torch.randn(total, dim, dtype=torch.float64), dim=1)
    labels = torch.randint(0, 4, (total,))
    local = [of[start : start + counts[rank]].to(dtype).requires_grad_() for of in (x, y)]
    scalars = [
        torch.tensor(of, dtype=torch.float64, requires_grad=True)
        for of in (SCALES[step], -5.0 - step, TEMPERATURES[step])
    ]
    return (x, y, labels), (*local, *scalars, labels[start : start + counts[rank]]), slice(start, start + counts[rank])


def outcome(name, leaves, more, module=wb.functional, backward=True):
    function, inputs = losses_of(*leaves)[name]
    loss = function(module, more)
    for of in inputs:
        of.grad = None
    if backward:
        loss.backward()
    return [loss.detach(), *(of.grad for of in inputs)]


def body(name, kernel, counts):
    """Return the largest relative error of values and gradients in steps of which no rank reads but the first."""
    size, found = len(counts), []
    for step in range(STEPS):
        (x, y, labels), leaves, at = batch(step, counts, torch.float64 if kernel == "torch" else torch.float32)
        loss, *grads = outcome(name, leaves, {"kernel": kernel, "sync": None, "checks": "deferred"})
        assert not loss.isnan()
        scalars = [of.detach().clone().requires_grad_() for of in leaves[2:5]]
        whole = [x.clone().requires_grad_(), y.clone().requires_grad_(), *scalars, labels]
        expected, *exact = outcome(name, whole, {}, wb.reference)
        found.append(((loss - expected).abs() / expected.abs().clamp(min=1e-3)).item())
        for of, wanted in zip(grads, exact, strict=True):
            if of.dim() == 0 and size > 1:
                dist.all_reduce(of)
            wanted = wanted[at] if of.dim() else wanted
            found.append(((of - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item() if of.numel() else 0.0)
    return max(found)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_reference(name, kernel):
    """A scale that changes in each step is read on the device."""
    assert body(name, kernel, (9,)) < (1e-11 if kernel == "torch" else 2e-4)


@pytest.mark.parametrize("counts", [(5, 4), (4, 0, 5), (1, 2, 3, 4)])
def test_values_and_gradients_on_several_ranks(counts):
    for found in run_ranks(several, len(counts), counts, timeout_s=240):
        assert max(found.values()) < 1e-11, found


def several(counts):
    return {name: body(name, "torch", counts) for name in NAMES}


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read(name, kernel, monkeypatch):
    if kernel == "triton":  # the interpreter reads tensors
        monkeypatch.setattr(REHEARSE, lambda *_, **more: PASSED)
        monkeypatch.setattr(CANARIES, lambda *_: None)
        monkeypatch.setattr("wholebatch.kernels.launch.run", lambda *_, **constants: None)
    elif name in ("clip, ids", "sup_con"):
        pytest.skip("plain PyTorch lists the entries with equal ids")
    reads = []
    for checks in ("entry", "deferred"):
        more = {"kernel": kernel, "checks": checks, "memory": "flat" if kernel == "triton" else "auto"}
        dtype = torch.float32 if kernel == "triton" else torch.float64
        outcome(name, batch(0, (9,), dtype)[1], more)
        with pytest.MonkeyPatch.context() as patch:
            leaves, found = batch(0, (9,), dtype)[1], reads_of(patch)
            outcome(name, leaves, more)
        reads.append(len(found))
    assert reads[0] > 0 == reads[1]


MISTAKES = {  # what one rank does to its leaves x, y, scale, bias, temperature, labels in the step after two good ones
    "features": (lambda of: of[0].data[0].fill_(torch.nan), "largest norm of image_features of rank 1 was nan"),
    "scale": (lambda of: of[2].data.add_(1), "logit_scale must be the same on all ranks, got"),
    "a scale of NaN": (lambda of: of[2].data.fill_(torch.nan), "logit_scale of rank 1 was nan"),
    "rows": (
        lambda of: [of.__setitem__(at, of[at].detach()[1:].requires_grad_()) for at in (0, 1)],
        "passed other rows",
    ),
    "more rows": (
        lambda of: [of.__setitem__(at, of[at].detach().repeat(3, 1).requires_grad_()) for at in (0, 1)],
        "rank 1 passed other rows or settings than before",
    ),
    "no gradient": (lambda of: of[0].requires_grad_(False), "rank 1 passed other rows or settings than before"),
}


def mistaken(name, counts, rank):
    """Return for each step after the first two: the loss, the sum of gradients, or the error; the second is wrong."""
    found = []
    for step, wrong in enumerate((False, False, True, False, False)):
        leaves = list(batch(step % STEPS, counts)[1])
        if wrong and (not dist.is_initialized() or dist.get_rank() == rank):
            MISTAKES[name][0](leaves)
        x, y, scale = leaves[:3]
        try:
            loss = wb.functional.clip_loss(x, y, scale, checks="deferred")
            loss.backward()
            grads = [of.grad for of in (x, y, scale) if of.requires_grad]
            found.append((loss.item(), sum(of.abs().sum().item() for of in grads), [of.shape for of in grads]))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("counts", [(4, 3), (4, 0), (2, 3, 4)])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_nan_and_raises_on_all_ranks_at_the_next_call(name, counts):
    rank = 1 if counts[1] or name == "more rows" else 0
    if not counts[1] and name == "more rows":
        rank = 0
    results = run_ranks(mistaken, len(counts), name, counts, rank, timeout_s=60)
    for good, better, wrong, raised, after in results:
        assert good[1] > 0 < better[1]
        assert wrong[0] != wrong[0]
        assert wrong[1] == 0
        assert MISTAKES[name][1].replace("rank 1", f"rank {rank}") in raised
        assert after[1] > 0
    assert len({of[3] for of in results}) == 1, "the same message on all ranks"


@pytest.mark.parametrize("name", ["features", "a scale of NaN"])
def test_a_mistake_of_one_process(name):
    _, _, wrong, raised, after = mistaken(name, (6,), 0)
    assert wrong[0] != wrong[0]
    assert wrong[1] == 0
    assert MISTAKES[name][1].replace("rank 1", "rank 0") in raised
    assert after[1] > 0


SETTINGS = {  # another setting, number or size on rank 1, and what it raises at once
    "a setting": (lambda x, wrong: {"label_smoothing": 0.1 if wrong else 0.0}, r"label_smoothing must be the same"),
    "embedding size": (lambda x, wrong: {"cut": 3 if wrong else 0}, "embedding size must be the same on all ranks"),
    "reduction": (
        lambda x, wrong: {"reduction": "sum" if wrong else "mean"},
        "make the same calls with the same options",
    ),
    "a number": (
        lambda x, wrong: {"logit_scale": float("nan") if wrong else 10.0},
        "logit_scale must be finite, got nan",
    ),
}


def with_settings(name):
    for step in range(3):
        x, y, *_ = batch(step, (4, 4))[1]
        more = SETTINGS[name][0](x, step == 2 and dist.get_rank() == 1)
        cut = more.pop("cut", 0)
        x, y = (of[:, cut:] for of in (x, y))
        wb.functional.clip_loss(x, y, **{"logit_scale": 10.0, **more}, checks="deferred").sum().backward()


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_of_a_rank_raises_there_at_once(name):
    with pytest.raises(RuntimeError, match=SETTINGS[name][1]):
        run_ranks(with_settings, 2, name, timeout_s=20)


def swapped_backward(checks):
    """Make three calls in a step, of which the second and the third have backward passes; return the error."""
    for step in range(3):
        losses = []
        for scale in (10.0, 10.0, 20.0):
            x, y, *_ = batch(step, (4, 4))[1]
            losses.append((wb.functional.clip_loss(x, y, scale, checks=checks, sync=None), x))
        swapped = step == 2 and dist.get_rank() == 1
        for loss, x in reversed(losses[1:]) if swapped else losses[1:]:
            try:
                torch.autograd.grad(loss, x)
            except ValueError as error:
                return str(error)
    return "no error"


@pytest.mark.parametrize("checks", ["entry", "deferred"])
def test_another_order_of_backward_passes_raises(checks):
    for error in run_ranks(swapped_backward, 2, checks, timeout_s=60):
        assert "all ranks must make the same calls in the same order" in error


def calls_of_two_losses(size):
    """Return losses of steps with two calls of one form, of which one has a far larger scale, norms or distances."""
    found = []
    for _ in range(5):
        x, y, scale, *_ = batch(0, (4,) * size)[1]
        far = torch.roll(y.detach(), 1, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for a, b, s in ((x, y, scale), (x, far, scale), (5 * x, y, scale), (x, y, 0.1 * scale)):
                found.append(wb.functional.clip_loss(a, b, s / 2, checks="deferred").item())
            found.append(wb.functional.vicreg_loss(x, y, checks="deferred").item())
            found.append(wb.functional.vicreg_loss(50 * x, y, checks="deferred").item())
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_two_losses_of_one_form_may_have_other_numbers(size):
    found = calls_of_two_losses(1) if size == 1 else run_ranks(calls_of_two_losses, 2, 2, timeout_s=60)[0]
    assert any(of != of for of in found[:12])
    assert all(of == of for of in found[18:]), found


def evicted():
    """Another rank's form may be forgotten for many others: the call is like the one before."""
    x, y, *_ = batch(0, (4, 4))[1]
    found = [wb.functional.clip_loss(x, y, 10.0, checks="deferred").item() for _ in range(3)]
    for more in range(515):
        z = torch.ones(5 + more if dist.get_rank() == 0 else 4, 2)
        wb.functional.barlow_twins_loss(z, z)
    return found + [wb.functional.clip_loss(x, y, 10.0, checks="deferred").item() for _ in range(3)]


def test_a_form_that_one_rank_has_forgotten():
    for found in run_ranks(evicted, 2, timeout_s=120):
        assert len(set(found)) == 1


def test_inference_mode_before_no_grad():
    x, y, scale, *_ = batch(0, (5,))[1]
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert wb.functional.clip_loss(x, y, scale, checks="deferred").isfinite()
    wrong = torch.nan * x.detach().requires_grad_(True)
    with torch.inference_mode():
        assert wb.functional.clip_loss(wrong, y, scale, checks="deferred").isnan()
    with torch.no_grad(), pytest.raises(ValueError, match="was nan"):
        wb.functional.clip_loss(x, y, scale, checks="deferred")


def test_sums_that_underflowed_in_the_call_that_read_are_found_again():
    """One row has no negatives; opposite pairs at a high scale."""
    x, y, *_ = batch(0, (6,), torch.float32)[1]
    for a, b, scale in ((x[:1], y[:1], -100.0), (x, -x.detach(), 90.0)):
        for _ in range(4):
            found = wb.functional.clip_loss(a, b, torch.tensor(scale), checks="deferred")
            torch.testing.assert_close(found, wb.reference.clip_loss(a, b, scale))


def test_a_temperature_that_is_not_positive_is_a_mistake():
    x, y, *_ = batch(0, (6,))[1]
    for temperature in (0.1, 0.1, -0.1):
        loss = wb.functional.nt_xent_loss(x, y, temperature=torch.tensor(temperature), checks="deferred")
    assert loss.isnan()
    with pytest.raises(ValueError, match="temperature must be positive, got"):
        wb.functional.nt_xent_loss(x, y, temperature=torch.tensor(0.1), checks="deferred")


def weighted(weights):
    _, (x, y, scale, *_), _ = batch(0, (6,))
    return wb.functional.clip_loss(x, y, scale, weights=weights, checks="deferred")


@pytest.mark.parametrize(
    ("wrong", "message"), [(torch.zeros(6), "weights were 0"), (torch.arange(-1.0, 5.0), "not be negative, got -1")]
)
def test_wrong_weights_are_nan_and_raise(wrong, message):
    for _ in range(2):
        assert weighted(torch.ones(6)).isfinite()
    assert weighted(wrong).isnan()
    with pytest.raises(ValueError, match=message):
        weighted(torch.ones(6))


@pytest.mark.parametrize("change", ["scale", "norm", "short"])
def test_numbers_beyond_those_assumed_warn_and_read(change):
    _, (x, y, scale, *_), _ = batch(0, (6,))

    def call():
        return wb.functional.clip_loss(x, y, scale, checks="deferred")

    call(), call()
    if change == "scale":
        scale.data.fill_(200.0)
    else:
        x.data.mul_(2.0 if change == "norm" else 0.01)
    assert call().isnan()
    with pytest.warns(UserWarning, match="was .*, and numbers from .* were assumed"):
        loss = call()
    torch.testing.assert_close(loss, wb.reference.clip_loss(x, y, scale))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(call(), wb.reference.clip_loss(x, y, scale))


def test_opposite_pairs_at_a_high_scale_are_nan_and_warn():
    """Their sums would underflow under the shift of the bounds; then each call reads."""
    _, (x, y, scale, *_), _ = batch(0, (6,), torch.float32)
    scale.data.fill_(100.0)

    def call(y):
        return wb.functional.clip_loss(x, y, scale, checks="deferred")

    call(y), call(y)
    assert call(-x).isnan()
    with pytest.warns(UserWarning, match="smallest product of a pair was"):
        torch.testing.assert_close(call(-x), wb.reference.clip_loss(x, -x, scale))
    torch.testing.assert_close(call(-x), wb.reference.clip_loss(x, -x, scale))


def test_a_sum_that_underflows_is_nan_and_warns():
    """Without pairs, the bounds of logits above 70 say nothing of sums: they are judged on the device."""
    x = normalize(torch.ones(6, 8) + 0.3 * torch.randn(6, 8), dim=1)
    labels = torch.arange(6) // 2

    def call(x):
        return wb.functional.sup_con_loss(x, labels, temperature=0.01, checks="deferred", memory="flat")

    for _ in range(3):
        torch.testing.assert_close(call(x), wb.reference.sup_con_loss(x, labels, temperature=0.01))
    far = torch.cat([x[:5], -x[:1]])  # all logits of the last row are near -100
    assert call(far).isnan()
    with pytest.warns(UserWarning, match="underflowed under one shift for all logits"):
        call(x)
    torch.testing.assert_close(call(far), wb.reference.sup_con_loss(far, labels, temperature=0.01))


def test_a_covariance_without_an_inverse_is_nan_and_raises():
    z0, z1 = torch.randn(2, 9, 3, dtype=torch.float64).requires_grad_()
    for _ in range(2):
        assert wb.functional.w_mse_loss(z0, z1, checks="deferred").isfinite()
    flat = torch.cat([z0[:, :2], torch.ones_like(z0[:, :1])], 1).detach().requires_grad_()
    loss = wb.functional.w_mse_loss(flat, z1, checks="deferred")
    loss.backward()
    assert loss.isnan()
    assert not flat.grad.any()
    with (
        pytest.warns(UserWarning, match="or a covariance had no inverse; such calls read from now on"),
        pytest.raises(ValueError, match="the covariance of z0 over 9 rows has no inverse"),
    ):
        wb.functional.w_mse_loss(flat, z1, checks="deferred")


def test_a_scale_that_changes_its_sign_is_read_again():
    _, (x, y, scale, *_), _ = batch(0, (6,), torch.float32)

    def call(scale):
        return wb.functional.clip_loss(x, y, scale, checks="deferred")

    call(scale), call(scale)
    assert call(-scale).isnan()
    with pytest.warns(UserWarning, match="logit_scale was"):
        torch.testing.assert_close(call(-scale), wb.reference.clip_loss(x, y, -scale))


def test_a_scale_that_grows_slowly_never_breaks_the_assumption():
    """Numbers near a limit are read again before they are beyond it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(200):
            _, (x, y, *_), _ = batch(0, (5,))
            scale = torch.tensor(90.0 * 1.01**step, dtype=torch.float64)
            loss = wb.functional.clip_loss(x, y, scale, checks="deferred")
            torch.testing.assert_close(loss, wb.reference.clip_loss(x, y, scale))


def test_checks_that_need_values_are_refused():
    _, (x, y, scale, _, learned, labels), _ = batch(0, (5,))
    new, f = torch.full((5,), -torch.inf), wb.functional
    calls = {
        "exclude_above, hardness and hard_negatives need the scale": lambda **m: f.info_nce_loss(
            x, y, logit_scale=scale, hardness=1.0, **m
        ),
        "entries with equal labels are listed": lambda **m: [
            loss(x, labels, **m) for loss in (f.circle_loss, f.multi_similarity_loss, f.smooth_ap_loss, f.triplet_loss)
        ],
        "the norms of a row's parts": lambda **m: f.matryoshka_loss(x, y, logit_scale=scale, dims=(2, 8), **m),
        "the norms of the teacher's rows": lambda **m: f.distillation_loss(x, y, scale, x, y, scale, **m),
        "the averages": lambda **m: f.global_contrastive_loss(x, y, new, new, temperature=learned, **m),
        "its functions are compared between ranks": lambda **m: wb.PairLoss(
            {"all": wb.terms.LogSumExp(lambda s, x, y, p: s)}, lambda r, x, p: r.all, **m
        )(x),
        "the smallest and the largest label": lambda **m: f.partial_fc_loss(x, torch.arange(len(x)), y, **m),
        "the smallest and the largest label, and the norms of the centers, are": lambda **m: wb.PartialFC(
            x.shape[1], len(x), dtype=x.dtype, **m
        )(x, torch.arange(len(x))),
        "the numbers of tokens": lambda **m: f.max_sim_loss(x[:, None], y[:, None], logit_scale=scale, **m),
    }
    for reason, call in calls.items():
        call(checks="entry")
        with pytest.raises(ValueError, match=f"checks='deferred' needs a loss .* reads no values: here {reason}"):
            call(checks="deferred")
    with pytest.raises(ValueError, match="checks must be"):
        wb.functional.clip_loss(x, y, scale, checks="late")
    with pytest.raises(ValueError, match="checks must be"):
        wb.CLIPLoss(checks="late")
    assert wb.CLIPLoss(checks="deferred")(x, y, scale).isfinite()


class RulesOfCapture(TorchDispatchMode):
    """Note each operation that a CUDA graph cannot contain, or whose result in a replay would be that of the capture.

    read     a tensor's value decides something on the host
    shape    the size of a result depends on values
    host     numbers come from the host's memory, which may hold others by the time of a replay
    """

    KINDS: ClassVar = {
        "_local_scalar_dense": "read", "equal": "read", "is_nonzero": "read",
        "nonzero": "shape", "masked_select": "shape", "_unique2": "shape", "unique_dim": "shape", "bincount": "shape",
        "repeat_interleave": "shape", "lift_fresh": "host", "_pin_memory": "host", "set_": "host",
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.broken = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "index" and any(of is not None and of.dtype == torch.bool for of in args[1]):
            name = "masked_select"
        if name in self.KINDS and not (name == "lift_fresh" and not args[0].dim()):  # a number of the program
            self.broken.append((self.KINDS[name], name))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        ("read", lambda x: x.sum().item()),
        ("read", lambda x: bool(x.sum() > 0)),
        ("read", lambda x: x.tolist() and torch.equal(x, x)),
        ("shape", lambda x: x[x > 0]),
        ("shape", lambda x: x.nonzero()),
        ("shape", lambda x: x.unique()),
        ("host", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
        ("host", lambda x: torch.as_tensor([1.0])),
    ],
)
def test_each_rule_of_capture_can_be_broken(kind, break_it):
    with RulesOfCapture() as rules:
        break_it(torch.ones(3))
    assert kind in {of for of, _ in rules.broken}


CAPTURED = [name for name in NAMES if name not in ("clip, ids", "sup_con")]  # plain PyTorch lists equal ids


@pytest.mark.parametrize("name", CAPTURED)
def test_a_call_keeps_the_rules_of_capture(name, monkeypatch):
    """And what it computes, recorded once and run with other numbers, is right: nothing of the first call is in it."""
    for step in range(2):
        outcome(name, batch(step, (9,))[1], {"checks": "deferred"})
    for module in ("agree", "deferred"):
        monkeypatch.setattr(import_module(f"wholebatch.contract.{module}"), "capturing", lambda: True)
    first, again = batch(2, (9,))[1], batch(0, (9,))[1]
    with RulesOfCapture() as rules:
        outcome(name, first, {"checks": "deferred"})
    assert not rules.broken

    def step_of(*leaves):
        leaves = [of.detach().requires_grad_(of.is_floating_point()) for of in leaves]
        function, inputs = losses_of(*leaves)[name]
        loss = function(wb.functional, {"checks": "deferred"})
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    # As in a CUDA graph nothing of a replay is recorded for autograd; from torch 2.15 on the graph has no detach().
    replay = torch.no_grad()(make_fx(step_of)(*first))
    function, inputs = losses_of(*again)[name]
    loss = function(wb.reference, {})
    for found, expected in zip(replay(*again), [loss, *torch.autograd.grad(loss, inputs)], strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    again[0].data[0] = torch.nan  # a mistake in a replay: NaN, and an error at the next call
    assert replay(*again)[0].isnan()
    assert not any(of.any() for of in replay(*again)[1:])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"largest norm of .* was nan"):
        outcome(name, batch(0, (9,))[1], {"checks": "deferred"})


def test_a_mistake_outside_of_a_graph_that_was_captured(monkeypatch):
    for step in range(3):
        with monkeypatch.context() as patch:
            for module in ("agree", "deferred") if step == 2 else ():
                patch.setattr(import_module(f"wholebatch.contract.{module}"), "capturing", lambda: True)
            outcome("clip", batch(step, (9,))[1], {"checks": "deferred"})
    wrong = batch(1, (9,))[1]
    wrong[0].data[0] = torch.nan
    assert outcome("clip", wrong, {"checks": "deferred"})[0].isnan()
    with pytest.raises(ValueError, match=r"largest norm of .* was nan"):
        outcome("clip", batch(0, (9,))[1], {"checks": "deferred"})


def of_two_losses(_ranks):
    """Return what calls raise after a mistake in another loss, in the same one, and in one that reads."""
    counts, raised = (5,) * dist.get_world_size() if dist.is_initialized() else (5,), []
    for name, checks in (("siglip", "deferred"), ("clip", "deferred"), ("siglip", "entry")):
        for _ in range(2):
            for of in ("clip", "siglip"):
                outcome(of, batch(0, counts)[1], {"checks": "deferred"})
        wrong = batch(0, counts)[1]
        wrong[0].data[0] = torch.nan
        assert outcome("clip", wrong, {"checks": "deferred"})[0].isnan()
        try:
            outcome(name, batch(0, counts)[1], {"checks": checks})
        except ValueError as error:
            raised.append(str(error))
        else:
            raised.append("")
            with pytest.raises(ValueError, match="was nan"):
                outcome("clip", batch(0, counts)[1], {"checks": "deferred"})
    return [("was nan" in of) for of in raised]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_of_the_same_step_is_not_waited_for(size):
    found = run_ranks(of_two_losses, 2, size) if size > 1 else [of_two_losses(size)]
    assert found == [[False, True, True]] * size


def test_a_graph_needs_deferred_checks_and_a_call_before(monkeypatch):
    _, (x, y, scale, *_), _ = batch(0, (7,))
    monkeypatch.setattr(import_module("wholebatch.contract.agree"), "capturing", lambda: True)
    for checks in ("entry", "deferred"):
        with pytest.raises(
            RuntimeError, match="in a CUDA graph a loss needs checks='deferred', and just before a call"
        ):
            wb.functional.clip_loss(x, y, scale, checks=checks)

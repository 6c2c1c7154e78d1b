"""All of a small S at once equals the sweep over tiles, and starts fewer operations."""

import warnings

import pytest
import torch
from counting import counted

import wholebatch as wb
from wholebatch.nodes.matrix import Matrix, log_sum_exp_of

F = wb.functional
ROWS, WIDTH = 12, 8
LABELS = torch.arange(ROWS) // 3
LOSSES = {
    "alignment_uniformity": lambda x, y, scale, reduction="mean", **more: F.alignment_uniformity_loss(x, y, **more),
    "circle": lambda x, y, scale, **more: F.circle_loss(x, LABELS, **more),
    "clip, equal ids are positives": lambda x, y, scale, **more: F.clip_loss(x, y, scale, ids=LABELS, **more),
    "clip, equal ids are left out": lambda x, y, scale, **more: F.clip_loss(
        x, y, scale, ids=LABELS, equal_ids="excluded", **more
    ),
    "clip, smoothed": lambda x, y, scale, **more: F.clip_loss(x, y, scale, label_smoothing=0.1, **more),
    "debiased": lambda x, y, scale, **more: F.debiased_loss(x, y, temperature=1 / scale.detach(), **more),
    "distillation": lambda x, y, scale, **more: F.distillation_loss(
        x, y, scale, x.detach()[:, 1:4], y.detach()[:, 2:5], 4.0, **more
    ),
    "info_nce, all directions": lambda x, y, scale, **more: F.info_nce_loss(
        x, y, negatives=y.detach()[:5], logit_scale=scale, query_ids=LABELS, key_ids=LABELS, negative_ids=LABELS[:5],
        directions=("query_to_key", "key_to_query", "query_to_query", "key_to_key"), **more,
    ),
    "multi_similarity": lambda x, y, scale, **more: F.multi_similarity_loss(x, LABELS, **more),
    "multi_similarity, mined": lambda x, y, scale, **more: F.multi_similarity_loss(x, LABELS, epsilon=0.1, **more),
    "nt_xent": lambda x, y, scale, **more: F.nt_xent_loss(x, y, temperature=1 / scale, **more),
    "smooth_ap": lambda x, y, scale, **more: F.smooth_ap_loss(x, LABELS, temperature=0.1, **more),
    "sup_con": lambda x, y, scale, **more: F.sup_con_loss(x, LABELS, temperature=1 / scale, **more),
}  # fmt: skip


@pytest.fixture
def matrices(monkeypatch):
    """Return a list that gets an entry for each matrix of a call."""
    made, apply = [], Matrix.apply
    monkeypatch.setattr(Matrix, "apply", lambda *of: made.append(of) or apply(*of))
    return made


def leaves(dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return x, y, torch.tensor(3.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()


def results(name, dtype=torch.float64, **options):
    x, y, scale = leaves(dtype)
    loss = LOSSES[name](x, y, scale, reduction="none", **options)
    (loss * torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [loss.detach(), *(each.grad for each in (x, y, scale) if each.grad is not None)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_matrix_equals_tiles(matrices, name):
    found = results(name)
    assert matrices
    matrices.clear()
    for options in ({"memory": "flat"}, {"memory": 600}):
        for got, expected in zip(found, results(name, **options), strict=True):
            assert torch.allclose(got, expected, rtol=1e-11, atol=1e-12)
    assert not matrices


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(name, torch.float32)
    assert all(
        torch.equal(inside, outside) for inside, outside in zip(found, results(name, torch.float32), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_rounded_features_lose_no_more_than_in_tiles(matrices, name, dtype):
    x, y, scale = (each.detach().double().requires_grad_() for each in leaves(dtype))
    exact = LOSSES[name](x, y, scale, reduction="sum")
    exact.backward()
    gradients = list[float]()
    for memory in ("auto", "flat"):
        rounded = leaves(dtype)
        LOSSES[name](*rounded, reduction="sum", memory=memory).backward()
        gradients.append(float((rounded[0].grad.double() - x.grad).norm() / x.grad.norm()))
    assert matrices
    assert gradients[0] <= 1.5 * gradients[1] + torch.finfo(dtype).eps


def test_a_mask_of_a_call_without_gradients_serves_later_calls():
    with torch.inference_mode():
        x, y, scale = leaves(torch.float64)
        value = LOSSES["nt_xent"](x, y, scale)
    x, y, scale = leaves(torch.float64)
    loss = LOSSES["nt_xent"](x, y, scale)
    loss.backward()
    assert torch.equal(loss.detach(), value.clone())


@pytest.mark.parametrize("name", ["sup_con", "circle", "clip, smoothed", "distillation"])
def test_a_second_derivative_by_features_is_refused(name):
    x, y, scale = leaves(torch.float64)
    (grad,) = torch.autograd.grad(LOSSES[name](x, y, scale), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("name", "most", "in_tiles"),
    [
        ("circle", 96, 240),
        ("multi_similarity", 78, 200),
        ("sup_con", 94, 120),
        ("distillation", 62, 200),
        ("smooth_ap", 106, 200),
    ],
)
def test_a_matrix_is_little_work_for_the_host(name, most, in_tiles):
    for memory, least, bound in (("auto", most // 2, most), ("flat", most, 2 * in_tiles)):
        x, y, scale = leaves(torch.float32)

        def call(x=x, y=y, scale=scale, memory=memory):
            x.grad = y.grad = scale.grad = None
            LOSSES[name](x, y, scale, memory=memory).backward()

        call()  # what later calls of the form look up
        operations, _ = counted(call)
        assert least < operations <= bound, (memory, operations)


def duplicates(size, dtype):
    """Return rows of which some are equal: their logits, of about `size`, share the maximum."""
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH, dtype=dtype).repeat(3, 1) * (size / WIDTH) ** 0.5
    return x.requires_grad_(), x.detach().clone().requires_grad_()


@pytest.mark.parametrize("size", [1e4, 1e9, 1e18])
@pytest.mark.parametrize("options", [{"ids": LABELS}, {"label_smoothing": 0.1}])
def test_large_logits_that_are_equal_share_the_gradient(matrices, size, options):
    found = []
    for functions in (F, wb.reference):
        x, y = duplicates(size, torch.float64)
        functions.clip_loss(x, y, 1.0, **options).backward()
        found.append(torch.cat([x.grad, y.grad]))
    assert matrices
    assert (found[0] - found[1]).norm() <= 1e-12 * found[1].norm()


@pytest.mark.planted
def test_a_gradient_from_a_rounded_logsumexp_would_be_seen():
    x = torch.full((1, 4), 1e18, dtype=torch.float64).requires_grad_()
    (wrong,) = torch.autograd.grad(x.logsumexp(1), x)
    (right,) = torch.autograd.grad(log_sum_exp_of(x, None, 1), x)
    assert torch.equal(right, torch.full_like(x, 0.25))
    assert (wrong - right).norm() > 0.1


def test_a_row_without_candidates_has_no_nan():
    """Nor inside the graph."""
    x, y, _ = leaves(torch.float64)
    labels = torch.arange(ROWS) // 2
    labels[-1] = 99
    pair_loss = wb.PairLoss(
        {"others": wb.terms.LogSumExp(where=lambda x, y: (x.label == y.label) & (x.index != y.index))},
        lambda r, x, p: r.others.clamp(min=-9.0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is slow
        with torch.autograd.detect_anomaly(check_nan=True):
            F.circle_loss(x, labels).backward()
            F.multi_similarity_loss(x, labels).backward()
            F.clip_loss(x, y, 4.0, ids=torch.zeros(ROWS, dtype=torch.int64), equal_ids="excluded").backward()
            pair_loss(x, x_data={"label": labels}).backward()


@pytest.mark.parametrize("memory", ["auto", "flat"])
def test_what_no_score_reads_has_a_gradient_of_0(memory):
    x, _, scale = leaves(torch.float64)
    loss = wb.PairLoss({"a": wb.terms.Sum(lambda s, x, y, p: 2 * y.t)}, lambda r, x, p: r.a, memory=memory)
    unread, read = (torch.ones(ROWS, dtype=torch.float64).requires_grad_() for _ in range(2))
    loss(x, x.detach(), x_data={"unread": unread}, y_data={"t": read}, parameters={"scale": scale}).backward()
    assert torch.equal(read.grad, torch.full_like(read, 2.0))
    for leaf in (x, unread, scale):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("memory", ["auto", "flat"])
def test_a_score_that_writes_into_the_similarity_is_refused(memory):
    """On the first tile, whose similarities lie between 0 and 1, it does not."""

    def score(s, x, y, p):
        return s.clamp_(max=1.5) if (s > 1.5).any() else s

    x, y, _ = leaves(torch.float64)
    loss = wb.PairLoss({"a": wb.terms.LogSumExp(score), "b": wb.terms.Sum()}, lambda r, x, p: r.a + r.b, memory=memory)
    with pytest.raises(RuntimeError, match=r"written into s|in-place operation"):
        loss(3 * x, y).backward()


def test_terms_are_in_float64_whatever_a_score_returns():
    x, dtypes = torch.randn(ROWS, WIDTH), []
    terms = {
        "a": wb.terms.LogSumExp(lambda s, x, y, p: s.half()),
        "b": wb.terms.Max(lambda s, x, y, p: y.t, ties="split"),
    }
    loss = wb.PairLoss(terms, lambda r, x, p: dtypes.extend((r.a.dtype, r.b.dtype)) or r.a + r.b)
    loss(x, x_data={"t": torch.ones(ROWS)})
    assert set(dtypes[-2:]) == {torch.float64}

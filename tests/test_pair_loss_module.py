"""wb.PairLoss as a module: parameters, copies, states, reductions, precision; and wrong answers that tests reject."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from pair_losses import DECLARATIONS, batch_for, call, cut, gradients, part, same
from test_pair_loss import distance
from torch import nn

import wholebatch as wb
from wholebatch.testing import RankError, run_ranks


def scaled(s, x, y, p):
    return p.scale * s


def all_minus_own(r, x, p):
    return r.all - r.own


def learned(**options):
    parameters = {"scale": nn.Parameter(torch.tensor(5.0)), "table": torch.arange(3.0), "limit": 2.0}
    return wb.PairLoss(
        {"all": wb.terms.LogSumExp(scaled), "own": wb.terms.Partner(scaled)},
        all_minus_own,
        parameters=parameters,
        **options,
    )


def test_parameters_of_the_constructor_belong_to_the_module():
    loss_fn = learned()
    assert [name for name, _ in loss_fn.named_parameters()] == ["values.scale"]
    assert list(loss_fn.state_dict()) == ["values.scale", "values.table"]
    loss_fn(torch.randn(4, 3), torch.randn(4, 3)).backward()
    assert loss_fn.values.scale.grad.isfinite()
    assert loss_fn.double().values.table.dtype == torch.float64
    other = learned()
    with torch.no_grad():
        loss_fn.values.scale.fill_(7.0)
    other.load_state_dict(loss_fn.state_dict())
    assert other.values.scale == 7


def test_a_scale_is_called_and_learned():
    scale = wb.Scale(10.0)
    loss_fn = wb.PairLoss(
        {"all": wb.terms.LogSumExp(scaled), "own": wb.terms.Partner(scaled)}, all_minus_own, parameters={"scale": scale}
    )
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    loss = loss_fn(x, y)
    loss.backward()
    assert (
        scale.log_scale.grad is not None if hasattr(scale, "log_scale") else next(scale.parameters()).grad is not None
    )
    expected = wb.functional.info_nce_loss(x, y, logit_scale=10.0)
    assert torch.allclose(loss, expected)


def test_parameters_of_a_call_replace_those_of_the_constructor():
    loss_fn, x, y = learned(), torch.randn(4, 3), torch.randn(4, 3)
    assert torch.allclose(loss_fn(x, y, parameters={"scale": 2.0}), wb.functional.info_nce_loss(x, y, logit_scale=2.0))


def test_copies_and_pickles_compute_the_same():
    loss_fn, x, y = learned(), torch.randn(4, 3), torch.randn(4, 3)
    expected = loss_fn(x, y)
    for made in (copy.deepcopy(loss_fn), pickle.loads(pickle.dumps(loss_fn))):
        assert torch.equal(made(x, y), expected)
        assert made.values.scale is not loss_fn.values.scale


def test_the_text_of_a_module_names_its_terms():
    assert "all=LogSumExp(score=scaled), own=Partner(score=scaled)" in repr(learned())


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("name", DECLARATIONS)
def test_other_reductions(name, reduction):
    batch = batch_for(name, 7, 7)
    loss_fn = DECLARATIONS[name](reduction=reduction)
    found, expected = call(loss_fn, batch), call(loss_fn.reference, batch)
    assert found.shape == expected.shape == ((7,) if reduction == "none" else ())
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_rows_without_weight_do_not_count():
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def row_loss(r, x, p):
        return r.all, x.keep.double()

    loss_fn = wb.PairLoss({"all": wb.terms.LogSumExp()}, row_loss)
    keep = torch.tensor([True, False, True, True, False])
    found = loss_fn(x, y, x_data={"keep": keep})
    assert torch.allclose(found, (x @ y.T).logsumexp(1)[keep].mean())
    nobody = loss_fn(x.requires_grad_(), y, x_data={"keep": torch.zeros(5, dtype=torch.bool)})
    nobody.backward()
    assert nobody == 0
    assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DECLARATIONS)
def test_lower_precisions_are_near_the_float64_reference(name, dtype):
    """Products of half precision are widened on a CPU, so that only the inputs are rounded."""
    batch = batch_for(name, 9, 9)
    rounded = part(batch, slice(0, 9), slice(0, 9))
    for of in ("x", "y", "candidates"):
        x = getattr(rounded, of)
        if x is not None:
            setattr(rounded, of, x.detach().to(dtype).requires_grad_())
            setattr(batch, of, getattr(rounded, of).detach().double().requires_grad_())
    value, grads = gradients(DECLARATIONS[name](), rounded)
    expected, wanted = gradients(DECLARATIONS[name]().reference, batch)
    assert value.dtype == torch.float32
    assert torch.allclose(value.double(), expected, rtol=1e-4, atol=1e-4)
    error = torch.finfo(dtype).eps
    for key, grad in grads.items():
        assert grad.dtype == (dtype if key.split()[0] in ("x", "y", "candidates") else torch.float64)
        assert (grad.double() - wanted[key]).abs().max() <= (4 * error + 1e-4) * wanted[key].abs().max().clamp(min=0.1)


def test_a_partner_inside_a_score_loses_no_digits():
    """At a scale of 1e4 a difference of two logits in float32 has an error of a thousandth; s - x.partner has none."""
    x = torch.nn.functional.normalize(torch.randn(32, 8), dim=1)
    y = torch.nn.functional.normalize(x + 1e-3 * torch.randn(32, 8), dim=1)
    inside = wb.PairLoss(
        {"all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * (s - x.partner))}, lambda r, x, p: r.all
    )
    exact = inside.reference(x.double(), y.double(), parameters={"scale": 1e4})
    assert torch.allclose(inside(x, y, parameters={"scale": 1e4}).double(), exact, rtol=0, atol=5e-3)


def test_integers_keep_all_digits():
    """Labels that differ in their last bit only are different, although float32 and float64 would round them to one."""
    big = 2**60
    labels = torch.tensor([big, big + 1, big, big + 1])
    loss_fn = wb.PairLoss({"n": wb.terms.Count(same)}, lambda r, x, p: r.n)
    assert loss_fn(torch.randn(4, 2), x_data={"label": labels}) == 1


# Wrong answers, computed and rejected.


def wrong_ranks(wrong):
    """Return what two ranks would find if a mistake were made."""
    counts, rank = (4, 3), dist.get_rank()
    name = {"a mask that forgets itself": "sup_con", "a soft choice": "hard_triplet"}.get(wrong, "clip")
    batch = part(batch_for(name, 7, 7), cut(counts, rank), cut(counts, rank))
    loss_fn = DECLARATIONS[name]()
    if wrong == "a mask that forgets itself":
        for term in loss_fn.declaration.terms.values():
            term.where = (lambda x, y: x.label == y.label) if term.where is same else None
    if wrong == "a soft choice":
        far, near = loss_fn.declaration.terms["far"], loss_fn.declaration.terms["near"]
        loss_fn.declaration.terms["far"] = wb.terms.LogSumExp(lambda s, x, y, p: -3 * s, far.where)
        loss_fn.declaration.terms["near"] = wb.terms.LogSumExp(lambda s, x, y, p: 3 * s, near.where)
        row_loss = loss_fn.declaration.row_loss

        def soft(r, x, p):
            from wholebatch.pair_loss.row_data import Fields

            return row_loss(Fields("r", {"far": -r.far / 3, "near": r.near / 3}), x, p)

        loss_fn.declaration.row_loss = soft
    value, grads = gradients(loss_fn, batch)
    if wrong == "a parameter without its gradient":
        grads["parameters scale"] = torch.zeros_like(grads["parameters scale"])
    if wrong == "a factor W":
        grads = {key: grad if key.startswith("parameters") else grad / 2 for key, grad in grads.items()}
    return value, grads


@pytest.mark.planted
@pytest.mark.parametrize(
    "wrong",
    ["a mask that forgets itself", "a parameter without its gradient", "a factor W", "a soft choice"],
)
def test_wrong_answers_are_rejected(wrong):
    name = {"a mask that forgets itself": "sup_con", "a soft choice": "hard_triplet"}.get(wrong, "clip")
    batch = batch_for(name, 7, 7)
    expected = gradients(DECLARATIONS[name]().reference, batch)
    assert distance(run_ranks(wrong_ranks, 2, wrong), batch, expected, (4, 3), "mean") > 1e-2


def test_a_loss_of_constants_is_a_constant():
    loss_fn = wb.PairLoss(
        {"all": wb.terms.LogSumExp(), "best": wb.terms.Max()},
        lambda r, x, p: r.all - r.best,
        column_loss=lambda r, y, p: r.all,
    )
    assert not loss_fn(torch.randn(4, 3), torch.randn(4, 3)).requires_grad


# Statistics.


def of_two_terms():
    terms = {
        "near": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s, where=lambda x, y: x.label != y.label),
        "count": wb.terms.Count(where=lambda x, y: x.label == y.label),
    }
    return wb.PairLoss(terms, lambda r, x, p: r.near.clamp(min=0) + r.count, column_loss=lambda r, y, p: r.count)


def statistics_on(counts):
    x, labels = statistics_batch()
    at = slice(sum(counts[: dist.get_rank()]), sum(counts[: dist.get_rank() + 1]))
    loss_fn = of_two_terms()
    data = {"x_data": {"label": labels[at]}, "parameters": {"scale": 2.0}}
    loss, statistics = wb.with_statistics(loss_fn)(x[at], **data)
    return loss, loss_fn(x[at], **data), statistics


def statistics_batch():
    made = torch.Generator().manual_seed(0)
    return torch.randn(7, 3, generator=made, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1, 2, 0])


@pytest.mark.parametrize("counts", [(7,), (4, 0, 3)], ids=str)
def test_statistics_are_means_of_terms(counts):
    x, labels = statistics_batch()
    other = labels[:, None] != labels
    near = (2 * x @ x.T).masked_fill(~other, float("-inf")).logsumexp(1).mean()
    for loss, alone, statistics in run_ranks(statistics_on, len(counts), counts):
        assert torch.equal(loss, alone)
        assert set(statistics.rows) == {"near", "count"}
        assert set(statistics.columns) == {"count"}
        assert torch.isclose(statistics.rows["near"], near, rtol=1e-12)
        assert statistics.columns["count"].item() == pytest.approx(19 / 7, rel=1e-12)


def test_rows_without_candidates_are_in_no_mean():
    data = {"x_data": {"label": torch.zeros(3)}, "parameters": {"scale": 2.0}}
    _, statistics = wb.with_statistics(of_two_terms())(torch.eye(3), **data)
    assert statistics.rows["near"].isnan()
    assert statistics.rows["count"] == 3


def statistics_on_one_rank():
    loss_fn = of_two_terms()
    call = wb.with_statistics(loss_fn) if dist.get_rank() else loss_fn
    call(torch.eye(3), x_data={"label": torch.arange(3)}, parameters={"scale": 2.0})


def test_all_ranks_ask_for_statistics_or_none():
    with pytest.raises(RankError, match="statistics must be the same on all ranks"):
        run_ranks(statistics_on_one_rank, 2)


# What row losses return, and masks with parameters.


def test_an_infinite_loss_of_weight_0_does_not_count():
    terms = {"far": wb.terms.Min(where=lambda x, y: (x.label == y.label) & (x.index != y.index))}
    loss_fn = wb.PairLoss(terms, lambda r, x, p: (r.far, (~r.far.isinf()).double()))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = {"label": torch.tensor([0, 0, 1, 2])}  # two rows have nobody
    loss, expected = loss_fn(x, x_data=labels), x[0] @ x[1]
    assert torch.isclose(loss, expected, rtol=1e-12)
    assert torch.isclose(loss_fn.reference(x, x_data=labels), expected, rtol=1e-12)
    loss.backward()
    assert torch.allclose(x.grad, torch.autograd.grad(expected, x)[0], rtol=1e-12)


def test_a_mask_may_read_parameters():
    def where(x, y, s, p):
        return s < p.most

    loss_fn = wb.PairLoss({"t": wb.terms.Sum(where=where)}, lambda r, x, p: r.t, parameters={"most": 0.0})
    x = torch.randn(9, 3, dtype=torch.float64)
    s = x @ x.T
    for most in (0.0, 0.5, torch.tensor(1.0, requires_grad=True)):
        expected = torch.where(s < most, s, 0.0).sum(1).mean()
        assert torch.isclose(loss_fn(x, parameters={"most": most}), expected, rtol=1e-12)
        assert torch.isclose(loss_fn.reference(x, parameters={"most": most}), expected, rtol=1e-12)
    assert not torch.isclose(loss_fn(x), expected)


# `memory=` in bytes counts tiles by steps of a few rows.


def test_counting_tiles_disturbs_nothing():
    x, _ = statistics_batch()
    for options in ({}, {"memory": 2000}):
        terms = {"t": wb.terms.Mean(lambda s, x, y, p: p.scale * s, where=lambda x, y: x.pair != y.pair)}
        loss_fn = wb.PairLoss(terms, lambda r, x, p: r.t, **options)
        found = [
            wb.with_statistics(loss_fn)(x, x_data={"pair": torch.arange(7)}, parameters={"scale": scale})
            for scale in (1.0, 2.0, 3.0)
        ]
        assert found[1].loss.item() == pytest.approx(2 * found[0].loss.item(), rel=1e-12)
        assert found[2].statistics.rows["t"].item() == pytest.approx(found[2].loss.item())
        assert len(loss_fn._tiles) == len(options)  # once for all values


def data_of_another_dtype():
    labels = torch.arange(3, dtype=torch.int32 if dist.get_rank() else torch.int64)
    of_two_terms()(torch.eye(3), x_data={"label": labels}, parameters={"scale": 1.0})


def test_data_have_the_same_dtype_on_all_ranks():
    with pytest.raises(RankError, match="names and dtypes of x_data, y_data and candidate_data must be the same"):
        run_ranks(data_of_another_dtype, 2)

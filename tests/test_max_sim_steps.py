"""Late interaction: memory, kept winners, ties, mistakes, gradient caching, and inside declared losses."""

import pytest
import torch
import torch.distributed as dist
from live_bytes import peak_of
from pair_losses import cut
from torch import nn
from torch.nn.functional import normalize, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import wholebatch as wb
from wholebatch.testing import run_ranks

LOSS = wb.functional.max_sim_loss


def texts(count, tokens, d=8, *, seed=0, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, tokens, d, dtype=dtype, generator=made), dim=-1)


def masks(count, tokens, *, seed=0):
    """Return masks with gaps, of at least one token each."""
    mask = torch.rand(count, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[torch.arange(count), torch.arange(count) % tokens] = True
    return mask


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


# Padding.


def test_masks_and_offsets_are_the_same():
    q, d, q_mask, d_mask = texts(5, 6), texts(7, 9, seed=1), masks(5, 6), masks(7, 9, seed=1)
    q, d = q.requires_grad_(), d.requires_grad_()
    padded = gradients(LOSS(q, d, logit_scale=3.0, query_mask=q_mask, document_mask=d_mask), q, d)
    expected = gradients(
        wb.reference.max_sim_loss(q, d, logit_scale=3.0, query_mask=q_mask, document_mask=d_mask), q, d
    )
    packed = [x.detach()[mask].requires_grad_() for x, mask in ((q, q_mask), (d, d_mask))]
    offsets = [pad(mask.sum(1).cumsum(0), (1, 0)) for mask in (q_mask, d_mask)]
    found = gradients(LOSS(*packed, logit_scale=3.0, query_offsets=offsets[0], document_offsets=offsets[1]), *packed)
    for mine, theirs in zip(padded, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    assert torch.allclose(found[0], padded[0], rtol=1e-14)
    for of_padded, of_packed, mask in zip(padded[1:], found[1:], (q_mask, d_mask), strict=True):
        assert torch.allclose(of_padded[mask], of_packed, rtol=0, atol=1e-14)
        assert not of_padded[~mask].any()


@pytest.mark.planted
def test_wrong_formulas_are_rejected():
    """Padding that competes, and a mean over the padded length, have other values."""
    q, d, q_mask, d_mask = texts(5, 6), texts(5, 9, seed=1), masks(5, 6), masks(5, 9, seed=1)
    right = LOSS(q, d, logit_scale=3.0, query_mask=q_mask, document_mask=d_mask)
    zeroed = d * d_mask[:, :, None]  # a maximum of negative numbers becomes 0
    assert abs(LOSS(q, zeroed, logit_scale=3.0, query_mask=q_mask) - right) > 1e-3
    assert abs(LOSS(q, d, logit_scale=3.0, document_mask=d_mask) - right) > 1e-3
    mean = LOSS(q, d, logit_scale=3.0, query_mask=q_mask, document_mask=d_mask, token_reduction="mean")
    assert abs(LOSS(q, d, logit_scale=0.5, query_mask=q_mask, document_mask=d_mask) - mean) > 1e-3


def on_two(q, d):
    """Return the right gradient of this rank's documents, and two wrong ones."""
    at = cut((3, 3), dist.get_rank())
    mine = [x[at].clone().requires_grad_() for x in (q, d)]
    LOSS(*mine, logit_scale=3.0).backward()
    right = mine[1].grad / 2
    leaf = d[at].clone().requires_grad_()
    without = torch.cat([leaf if rank == dist.get_rank() else d[cut((3, 3), rank)] for rank in range(2)])
    shares = wb.reference.max_sim_loss(
        q[at],
        without[torch.cat([torch.arange(6)[at], torch.arange(6)[cut((3, 3), 1 - dist.get_rank())]])],
        logit_scale=3.0,
    )
    shares.backward()
    return right, leaf.grad / 2


@pytest.mark.planted
def test_documents_gathered_without_a_gradient_are_rejected():
    q, d = texts(6, 4), texts(6, 5, seed=1)
    whole = d.clone().requires_grad_()
    wb.reference.max_sim_loss(q, whole, logit_scale=3.0).backward()
    found = run_ranks(on_two, 2, q, d)
    right, wrong = (torch.cat([of[at] for of in found]) for at in (0, 1))
    assert torch.allclose(right, whole.grad, rtol=0, atol=1e-12)
    assert not torch.allclose(wrong, whole.grad, rtol=0, atol=1e-3)
    assert not torch.allclose(2 * right, whole.grad, rtol=0, atol=1e-3)


# Memory and work.


def test_no_token_scores_are_stored():
    """All token scores would take 1.5 GB; queries, documents and their gradients take 56 MB."""
    torch.set_num_threads(1)
    q, d = (texts(256, n, 128, dtype=torch.float32).requires_grad_() for n in (32, 180))
    for leaf in (q, d):
        leaf.grad = torch.ones_like(leaf)
    gradients_take = q.nbytes + d.nbytes
    assert peak_of(lambda: LOSS(q, d, logit_scale=1.0).backward()) - gradients_take <= 12e6


def held_of(documents):
    d = texts(documents, 20, 16, dtype=torch.float32).requires_grad_()
    d.grad = torch.ones_like(d)
    q = texts(32, 4, 16, dtype=torch.float32)
    return peak_of(lambda: LOSS(q, d, logit_scale=1.0, memory="flat").backward()) - d.nbytes


@pytest.mark.parametrize("memory", ["flat", 10**6])
def test_gradients_of_long_documents_are_added_a_few_at_a_time(memory):
    """Queries of one token: a tile has many documents, whose tokens and gradients take 77 MB each."""
    torch.set_num_threads(1)
    d = texts(300, 500, 128, dtype=torch.float32).requires_grad_()
    d.grad = torch.ones_like(d)
    q = texts(64, 1, 128, dtype=torch.float32)
    assert peak_of(lambda: LOSS(q, d, logit_scale=1.0, memory=memory).backward()) - d.nbytes <= 10e6


def test_memory_is_linear_in_the_documents():
    few, more, many = (held_of(count) for count in (2000, 4000, 8000))
    assert many - more < 2.2 * (more - few) + 1e6
    assert many < 20e6


@pytest.mark.parametrize("documents", ["more", "fewer"])
def test_kept_winners_are_not_found_again(documents):
    q, d = texts(40, 5, 16), texts(40, 9 if documents == "more" else 3, 16, seed=1)
    q, d = q.requires_grad_(), d.requires_grad_()
    found = {}
    for memory in ("flat", 2**25):
        with FlopCounterMode(display=False) as counter:
            loss = LOSS(q, d, logit_scale=4.0, memory=memory)
            forward = counter.get_total_flops()
            loss.backward()
        again = counter.get_total_flops() - forward
        assert again == (forward if memory == "flat" else 0)
        found[memory] = [x.grad.clone() for x in (q, d)]
        q.grad = d.grad = None
    for one, other in zip(*found.values(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-15)


# Ties.


def test_the_first_of_equal_tokens_has_the_gradient():
    q = torch.eye(4)[None, :2]  # two query tokens
    d = torch.eye(4)[[0, 1, 0, 1]][None].repeat(3, 1, 1).requires_grad_()  # each of them stands in a document twice
    for memory in ("flat", 2**20, 100):
        d.grad = None
        LOSS(q, d, logit_scale=1.0, memory=memory).backward()
        assert d.grad[:, :2].any(dim=2).all()
        assert not d.grad[:, 2:].any()
    wanted = d.grad
    d.grad = None
    wb.reference.max_sim_loss(q, d, logit_scale=1.0).backward()
    assert torch.allclose(d.grad, wanted, atol=1e-7)


# Mistakes.

Q, D = texts(4, 3), texts(4, 5, seed=1)
OFFSETS = torch.tensor([0, 3, 6, 9, 12])
MISTAKES = [
    ({"queries": Q[:, 0]}, r"queries must have shape \(items, tokens, embedding size\), or .* got \(4, 8\)"),
    ({"queries": "text"}, "queries must be a tensor"),
    ({"queries": Q[0]}, "queries must have shape"),
    (
        {"query_mask": torch.ones(4, 2, dtype=torch.bool)},
        r"query_mask must be booleans of shape \(4, 3\), .* got \(4, 2\)",
    ),
    ({"query_mask": torch.ones(4, 3)}, r"query_mask must be booleans .*torch.float32.*pass attention_mask.bool\(\)"),
    ({"document_mask": [True]}, "document_mask must be booleans"),
    (
        {"query_mask": torch.tensor([[True] * 3] * 3 + [[False] * 3])},
        "queries must have a token in each item, got 0 in item 3",
    ),
    ({"documents": D[:, :0]}, "documents must have a token in each item, got 0 in item 0"),
    ({"documents": D[:3]}, "documents must not be fewer than queries, got 3 for 4 queries"),
    ({"documents": D[:, :, :4]}, "must have the same embedding size, got 8 and 4"),
    ({"documents": D.float()}, "must have the same dtype"),
    ({"query_offsets": OFFSETS}, r"queries must be packed with query_offsets, .* got \(4, 3, 8\)"),
    ({"queries": Q.flatten(0, 1)}, r"or \(tokens, embedding size\) with query_offsets"),
    (
        {"queries": Q.flatten(0, 1), "query_offsets": OFFSETS - 1},
        "rise from 0 to the 12 tokens of queries, got -1 to 11",
    ),
    ({"queries": Q.flatten(0, 1), "query_offsets": OFFSETS[[0, 2, 1, 3, 4]]}, "got -3 in item 1.*must be larger"),
    ({"queries": Q.flatten(0, 1), "query_offsets": OFFSETS.double()}, "query_offsets must be integers"),
    (
        {"queries": Q.flatten(0, 1), "query_offsets": OFFSETS, "query_mask": torch.ones(4, 3, dtype=torch.bool)},
        "query_mask must be left out with query_offsets",
    ),
    (
        {"documents_per_query": 2},
        "documents_per_query must not be more than there are documents, got 8 in all for 4 documents",
    ),
    ({"documents_per_query": 0}, "documents_per_query must be an int >= 1"),
    ({"documents_per_query": torch.tensor([1, 1, 0, 1])}, "documents_per_query must be .* smallest 0"),
    ({"documents_per_query": torch.ones(3, dtype=torch.int64)}, r"4 integers >= 1, .* got \(3,\)"),
    ({"documents_per_query": torch.ones(4)}, "documents_per_query must be .*torch.float32"),
    ({"share_hard_negatives": "own"}, "share_hard_negatives must be True or False"),
    ({"token_reduction": "max"}, "token_reduction must be"),
    ({"directions": ()}, r"directions must be one or both of \['query_to_document', 'document_to_query'\]"),
    ({"directions": ("query_to_key",)}, "directions must be"),
    ({"label_smoothing": 2.0}, "label_smoothing"),
    ({"query_ids": torch.arange(3)}, r"query_ids must have shape \(4,\)"),
    ({"document_ids": torch.full((4,), torch.iinfo(torch.int64).min)}, "document_ids must not contain -2"),
    ({"weights": torch.ones(12, dtype=torch.float64)}, r"weights must have shape \(4,\)"),
    ({"memory": 10}, "memory must be at least 80 bytes for the 5 tokens of the longest document, got 10"),
    ({"queries": torch.full_like(Q, float("nan"))}, "queries must be finite"),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=lambda x: str(x)[:40] if isinstance(x, str) else None)
def test_mistakes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"max_sim_loss.*{message}"):
        LOSS(**{"queries": Q, "documents": D, "logit_scale": 1.0, **wrong})


def wrong_on_one(wrong):
    given = {"queries": Q, "documents": D, "logit_scale": 1.0}
    try:
        LOSS(**{**given, **(wrong if dist.get_rank() == 1 else {})})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "wrong",
    [
        {"query_mask": torch.ones(4, 2, dtype=torch.bool)},
        {"documents": D[:, :, :4], "queries": Q[:, :, :4]},
        {"documents_per_query": 2},
        {"share_hard_negatives": False},
        {"queries": Q.flatten(0, 1)},
    ],
)
def test_a_mistake_of_one_rank_raises_on_all(wrong):
    texts_of_errors = run_ranks(wrong_on_one, 2, wrong, timeout_s=60)
    assert all(text.startswith("max_sim_loss") for text in texts_of_errors), texts_of_errors


# Gradient caching: representations that are token embeddings beside a mask, with other lengths in each chunk.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids, mask):
        x = self.embed(ids) * mask[..., None]
        return normalize(self.mix(x + x.sum(1, keepdim=True)), dim=-1), mask


def sentences(count, longest, seed):
    made = torch.Generator().manual_seed(seed)
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (count, 1), generator=made)
    return {"ids": torch.randint(0, 50, (count, longest), generator=made), "mask": mask}


def of_pairs(queries, documents):
    return LOSS(queries[0], documents[0], logit_scale=4.0, query_mask=queries[1], document_mask=documents[1])


def encoder():
    torch.manual_seed(1)
    return Encoder().double()


def cached_on(counts):
    at = cut(counts, dist.get_rank())
    model = DistributedDataParallel(encoder())
    step = wb.GradCache([model, model], wb.gradcache.TokenBudget(24, mask="mask"), of_pairs)
    inputs = [{name: x[at] for name, x in of.items()} for of in (sentences(9, 6, 0), sentences(9, 14, 1))]
    return step(*inputs), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("counts", [(9,), (5, 4)], ids=str)
def test_gradient_caching_of_tokens_and_masks(counts):
    model, inputs = encoder(), (sentences(9, 6, 0), sentences(9, 14, 1))
    (q, q_mask), (d, d_mask) = (model(**of) for of in inputs)
    loss = wb.reference.max_sim_loss(q, d, logit_scale=4.0, query_mask=q_mask, document_mask=d_mask)
    loss.backward()
    for value, grads in run_ranks(cached_on, len(counts), counts):
        assert torch.isclose(value, loss.detach(), rtol=1e-12)
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(grad, p.grad, rtol=0, atol=1e-10)


# Declared losses.


def declared(**options):
    """Return a loss over rows and columns, with partners in a score, maxima, and learned numbers."""
    terms = {
        "all": wb.terms.LogSumExp(
            lambda s, x, y, p: p.scale * (s - x.partner) + y.bias, where=lambda x, y: x.index != y.index
        ),
        "own": wb.terms.Partner(),
        "best": wb.terms.Max(),
        "least": wb.terms.Min(where=lambda x, y: x.index != y.index),
    }
    return wb.PairLoss(
        terms,
        lambda r, x, p: r.all + r.best - r.own,
        column_loss=lambda r, y, p: r.best - r.least,
        similarity="max_sim",
        parameters={"scale": nn.Parameter(torch.tensor(2.0, dtype=torch.float64))},
        **options,
    )


def ragged(count, longest, seed):
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=made)
    return torch.randn(int(lengths.sum()), 5, dtype=torch.float64, generator=made), lengths


def declared_on(counts, options):
    at = cut(counts, dist.get_rank())
    leaves, given = [], []
    for vectors, lengths in (ragged(sum(counts), 6, 0), ragged(sum(counts), 9, 1)):
        parts = vectors.split(lengths.tolist())[at]
        leaves.append(torch.cat([vectors[:0], *parts]).requires_grad_())
        given.append(wb.Tokens(leaves[-1], offsets=pad(lengths[at].cumsum(0), (1, 0))))
    bias = torch.linspace(-1, 1, sum(counts), dtype=torch.float64)[at].requires_grad_()
    loss_fn = declared(**options)
    loss = loss_fn(*given, y_data={"bias": bias})
    loss.backward()
    return loss.detach(), [x.grad for x in (*leaves, bias)], loss_fn.values.scale.grad


@pytest.mark.parametrize("counts", [(6,), (4, 2), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("options", [{}, {"exchange": "ring", "memory": 1200}, {"memory": 2**21}], ids=str)
def test_a_declared_loss_over_tokens(counts, options):
    leaves, given = [], []
    for vectors, lengths in (ragged(sum(counts), 6, 0), ragged(sum(counts), 9, 1)):
        leaves.append(vectors.requires_grad_())
        given.append(wb.Tokens(vectors, offsets=pad(lengths.cumsum(0), (1, 0))))
    bias = torch.linspace(-1, 1, sum(counts), dtype=torch.float64).requires_grad_()
    loss_fn = declared()
    loss = loss_fn.reference(*given, y_data={"bias": bias})
    loss.backward()
    found = run_ranks(declared_on, len(counts), counts, options)
    for value, _, scale in found:
        assert torch.isclose(value, loss.detach(), rtol=0, atol=1e-11)
        assert torch.isclose(scale, loss_fn.values.scale.grad, rtol=0, atol=1e-10)
    for number, leaf in enumerate((*leaves, bias)):
        got = torch.cat([grads[number] for _, grads, _ in found]) / len(counts)
        assert torch.allclose(got, leaf.grad, rtol=0, atol=1e-10)


def test_distillation_from_the_scores_of_a_teacher():
    """KL divergence over each query's own documents, as data of the documents."""
    q, d = texts(3, 4).requires_grad_(), texts(12, 6, seed=1).requires_grad_()
    teacher = torch.randn(3, 4, dtype=torch.float64)
    query = torch.arange(3).repeat_interleave(4)
    own = lambda x, y: x.index == y.query  # noqa: E731
    loss_fn = wb.PairLoss(
        {
            "all": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s, where=own),
            "target": wb.terms.Sum(lambda s, x, y, p: y.probability * (y.log_probability - p.scale * s), where=own),
        },
        lambda r, x, p: r.target + r.all,
        similarity="max_sim",
        parameters={"scale": 3.0},
    )
    data = {"query": query, "probability": teacher.softmax(1).flatten()}
    data["log_probability"] = teacher.log_softmax(1).flatten()
    found = gradients(loss_fn(q, d, y_data=data), q, d)
    scores = 3.0 * torch.stack([wb.reference.max_sim(q[k : k + 1], d[4 * k : 4 * k + 4])[0] for k in range(3)])
    expected = nn.functional.kl_div(scores.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    for mine, theirs in zip(found, gradients(expected, q, d), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wb.PairLoss({"m": wb.terms.Mean()}, lambda r, x, p: r.m, similarity="max_sim")(Q), "y must be given"),
        (
            lambda: wb.PairLoss({"m": wb.terms.Mean(over="both")}, lambda r, x, p: r.m, similarity="max_sim"),
            "must not be a Mean",
        ),
        (
            lambda: wb.PairLoss({"m": wb.terms.Sum(over="own")}, lambda r, x, p: r.m, similarity="max_sim")(
                Q, D, candidates=Q
            ),
            "candidates must be left out with similarity='max_sim'",
        ),
        (
            lambda: wb.PairLoss({"m": wb.terms.Mean()}, lambda r, x, p: r.m, similarity={"a": "max_sim", "b": "dot"}),
            "similarity must be 'max_sim' alone",
        ),
        (
            lambda: wb.PairLoss({"m": wb.terms.Mean()}, lambda r, x, p: r.m, similarity="max_sim")(Q[0], D),
            "x must have shape",
        ),
    ],
)
def test_mistakes_of_declared_losses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pair_of_tensors_is_no_tokens():
    loss_fn = wb.PairLoss({"m": wb.terms.Mean()}, lambda r, x, p: r.m, similarity="max_sim")
    with pytest.raises(ValueError, match=r"(?s)x must be a tensor .*; beside a mask or offsets pass wb.Tokens"):
        loss_fn((Q, torch.ones(4, 3, dtype=torch.bool)), D)

"""Late interaction: value and gradients of one dense tensor of all token scores, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.testing import run_ranks

SPLITS = [(6,), (4, 2), (0, 4, 2), (1, 2, 0, 3)]
BOTH = ("query_to_document", "document_to_query")
FORMS = {
    "plain": {},
    "mean over tokens": {"token_reduction": "mean", "label_smoothing": 0.1},
    "both directions": {"directions": BOTH, "label_smoothing": 0.2},
    "documents to queries": {"directions": BOTH[1:]},
    "hard negatives of all": {"hard": True},
    "hard negatives of one": {"hard": True, "share_hard_negatives": False, "directions": BOTH},
    "equal ids are excluded": {"ids": True, "directions": BOTH},
    "equal ids are positive": {
        "ids": True,
        "hard": True,
        "equal_ids": "positive",
        "label_smoothing": 0.1,
        "directions": BOTH,
        "share_hard_negatives": False,
    },
    "weights": {"weights": True, "reduction": "sum"},
}
OPTIONS = [
    {"exchange": "gather"},
    {"exchange": "ring", "sync": "sum"},
    {"exchange": "ring", "memory": 2**21},
    {"memory": 1000},
]


def batch(seed, queries, *, longest=(5, 9), hard=False, ids=False, weights=False, d=7):
    """Return packed tokens of so many queries, and of their documents with one more of nobody for every two queries."""
    of = torch.Generator().manual_seed(seed)

    def integers(low, high, count):
        return torch.randint(low, high + 1, (count,), generator=of)

    per_query = integers(1, 3, queries) if hard else torch.ones(queries, dtype=torch.int64)
    of_nobody = torch.arange(queries) % 2  # beside each query's own: which rank has them follows from the query's rank
    documents = int(per_query.sum() + of_nobody.sum())
    lengths = [integers(1, longest[0], queries), integers(1, longest[1], documents)]
    tokens = [torch.randn(int(x.sum()), d, dtype=torch.float64, generator=of) for x in lengths]
    found = {"tokens": tokens, "lengths": lengths, "per_query": per_query, "of_nobody": of_nobody}
    found["scale"] = torch.tensor(1.5, dtype=torch.float64)
    if ids:
        found["query_ids"], found["document_ids"] = integers(0, 3, queries), integers(0, 5, documents)
    if weights:
        found["weights"] = torch.rand(queries, dtype=torch.float64, generator=of)
    return found


def part(whole, counts, rank):
    """Return one rank's part: its queries, their documents, and its documents of nobody behind them."""
    start = sum(counts[:rank])
    rows = slice(start, start + counts[rank])
    per_query, of_nobody = whole["per_query"], whole["of_nobody"]
    own = int(per_query.sum())
    first, nobody = int(per_query[:start].sum()), own + int(of_nobody[:start].sum())
    documents = torch.cat(
        [
            torch.arange(first, first + int(per_query[rows].sum())),
            torch.arange(nobody, nobody + int(of_nobody[rows].sum())),
        ]
    )
    chosen = [torch.arange(len(whole["lengths"][0]))[rows], documents]
    found = {"per_query": per_query[rows], "documents": documents, "queries": chosen[0], "scale": whole["scale"]}
    found["tokens"] = [
        torch.cat([tokens[:0], *(tokens.split(lengths.tolist())[k] for k in some)])
        for tokens, lengths, some in zip(whole["tokens"], whole["lengths"], chosen, strict=True)
    ]
    found["lengths"] = [lengths[some] for lengths, some in zip(whole["lengths"], chosen, strict=True)]
    for name, some in (("query_ids", chosen[0]), ("weights", chosen[0]), ("document_ids", documents)):
        if name in whole:
            found[name] = whole[name][some]
    return found


def gradients(function, given, *, hard=False, ids=False, weights=False, **settings):
    """Return the value, and the gradients of queries, documents and scale."""
    leaves = [x.detach().clone().requires_grad_() for x in (*given["tokens"], given["scale"])]
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in given["lengths"]]
    for name in ("query_ids", "document_ids") if ids else ():
        settings[name] = given[name]
    if hard:
        settings["documents_per_query"] = given["per_query"]
    if weights:
        settings["weights"] = given["weights"]
    loss = function(
        *leaves[:2],
        logit_scale=leaves[2],
        query_offsets=offsets[0],
        document_offsets=offsets[1],
        **settings,
    )
    loss.sum().backward()
    return loss.detach(), [x.grad for x in leaves]


def of_form(form):
    return {name: form[name] for name in ("hard", "ids", "weights") if name in form}


def of_rank(jobs, counts, function=None):
    found = []
    for seed, longest, form, options in jobs:
        whole = batch(seed, sum(counts), longest=longest, **of_form(form))
        given = part(whole, counts, dist.get_rank())
        found.append(gradients(function or wb.functional.max_sim_loss, given, **form, **options))
    return found


def distance(of_ranks, whole, counts, form, sync="mean"):
    """Return the largest difference from the dense reference: of the value, and of all gradients."""
    given, world = part(whole, (sum(counts),), 0), len(counts)
    # The whole batch in the order of the ranks: rank 0's documents of nobody stand before rank 1's documents.
    parts = [part(whole, counts, rank) for rank in range(world)]
    value, expected = gradients(wb.reference.max_sim_loss, given, **form)
    worst = max((loss - value).abs().max().item() for loss, _ in of_ranks)
    gradient = max(
        (of_rank[1][2] - expected[2]).abs().item()
        if sync == "mean"
        else (sum(other[1][2] for other in of_ranks) - expected[2]).abs().item()
        for of_rank in of_ranks
    )
    for tower, some in ((0, "queries"), (1, "documents")):
        of_items = expected[tower].split(whole["lengths"][tower].tolist())
        for (_, grads), mine in zip(of_ranks, parts, strict=True):
            wanted = torch.cat([expected[tower][:0], *(of_items[k] for k in mine[some])])
            got = grads[tower] / (world if sync == "mean" else 1)
            gradient = max(gradient, (got - wanted).abs().max().item() if len(got) else 0.0)
    return worst, gradient


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_ranks_have_the_gradients_of_one_dense_tensor(counts):
    jobs = [
        (seed, longest, form, options)
        for seed, form in enumerate(FORMS.values())
        for longest, options in zip([(5, 9), (9, 3), (1, 1), (5, 40)], OPTIONS, strict=True)
    ]
    found = run_ranks(of_rank, len(counts), jobs, counts)
    for at, (seed, longest, form, options) in enumerate(jobs):
        whole = batch(seed, sum(counts), longest=longest, **of_form(form))
        value, gradient = distance([of[at] for of in found], whole, counts, form, options.get("sync", "mean"))
        assert value < 1e-12 * 50, (form, longest, options, value)
        assert gradient < 1e-10, (form, longest, options, gradient)


def test_lengths_from_1_to_40():
    counts, form = (5, 0, 7), FORMS["both directions"]
    jobs = [(seed, (40, 40), form, options) for seed, options in enumerate(OPTIONS)]
    found = run_ranks(of_rank, len(counts), jobs, counts)
    for at, (seed, longest, _, options) in enumerate(jobs):
        whole = batch(seed, sum(counts), longest=longest)
        value, gradient = distance([of[at] for of in found], whole, counts, form, options.get("sync", "mean"))
        assert (value < 1e-11, gradient < 1e-10) == (True, True), (options, value, gradient)


def scores_of_rank(counts, options, top):
    whole = batch(3, sum(counts), longest=(6, 11), hard=True)
    given = part(whole, counts, dist.get_rank())
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in given["lengths"]]
    return wb.max_sim(*given["tokens"], query_offsets=offsets[0], document_offsets=offsets[1], k=top, **options), given[
        "documents"
    ]


@pytest.mark.parametrize("counts", SPLITS, ids=str)
@pytest.mark.parametrize(
    "options", [OPTIONS[0], {"exchange": "ring", "memory": 1000, "token_reduction": "mean"}], ids=str
)
def test_scores_of_all_documents_and_of_the_best(counts, options):
    whole = batch(3, sum(counts), longest=(6, 11), hard=True)
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in whole["lengths"]]
    expected = wb.reference.max_sim(
        *whole["tokens"],
        query_offsets=offsets[0],
        document_offsets=offsets[1],
        token_reduction=options.get("token_reduction", "sum"),
    )
    found = run_ranks(scores_of_rank, len(counts), counts, options, None)
    order = torch.cat([documents for _, documents in found])  # the documents of all ranks, in the order of ranks
    expected = expected[:, order]
    assert torch.allclose(torch.cat([scores for scores, _ in found]), expected, rtol=0, atol=1e-12)
    most = len(order) + 2  # more than there are
    for top in (1, 3, most):
        best = [of_rank for of_rank, _ in run_ranks(scores_of_rank, len(counts), counts, options, top)]
        values, places = (torch.cat([of_rank[at] for of_rank in best]) for at in (0, 1))
        wanted = expected.sort(dim=1, descending=True, stable=True)
        assert torch.equal(places, wanted.indices[:, :top])
        assert torch.allclose(values, wanted.values[:, :top], rtol=0, atol=1e-12)


def test_of_equal_scores_the_document_with_the_lowest_index_comes_first():
    documents = torch.eye(2).repeat(3, 1)[:, None]  # 0, 2 and 4 are the same
    best = wb.max_sim(torch.eye(2)[:1, None], documents, k=3, memory=64)
    assert best.documents.tolist() == [[0, 2, 4]]


@pytest.mark.parametrize("largest", [69.0, 71.0, 7e3])
@pytest.mark.parametrize("negatives", [-1.0, 1.0])
def test_logits_as_small_and_as_large_as_they_can_be(largest, negatives):
    """On both sides of the bound up to which sums of exponentials in float32 need no shift."""
    q = torch.tensor([1.0, 0.0]).expand(3, 2, 2).clone().requires_grad_()
    d = (torch.tensor([negatives, 0.0]) * torch.tensor([-1.0, 1.0, 1.0])[:, None]).view(3, 1, 2).requires_grad_()
    found = []
    for dtype, function in ((torch.float32, wb.functional.max_sim_loss), (torch.float64, wb.reference.max_sim_loss)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, d)]
        loss = function(*leaves, logit_scale=largest / 2)
        loss.backward()
        found.append([loss.detach().double(), *(x.grad.double() for x in leaves)])
    for x, expected in zip(*found, strict=True):
        torch.testing.assert_close(x, expected, rtol=2e-6, atol=1e-6 * largest)


def lengths_of(queries, documents):
    return {"lengths": [torch.tensor(x) for x in (queries, documents)]}


# Of queries and documents, on each of two ranks: most often one rank alone has other lengths than before, and in one
# case others of the same sum and the same maximum.
LENGTHS = [
    [lengths_of([3, 2], [4, 2]), lengths_of([3, 2], [1, 5])],
    [lengths_of([3, 2], [4, 2]), lengths_of([4, 1], [1, 5])],
    [lengths_of([3, 2], [4, 2]), lengths_of([1, 4], [5, 1])],
    [lengths_of([3, 2], [4, 2]), lengths_of([5, 6], [1, 5])],
    [lengths_of([1, 1], [4, 2]), lengths_of([5, 6], [3, 3])],
]
STEPS = [0, 0, 1, 1, 2, 2, 0, 3, 3, 4, 4, 0]


def with_tokens(step, of_rank):
    of = torch.Generator().manual_seed(step)
    tokens = [torch.randn(int(x.sum()), 4, dtype=torch.float64, generator=of) for x in of_rank["lengths"]]
    return of_rank | {"tokens": tokens, "scale": torch.tensor(1.5, dtype=torch.float64)}


def steps_of_rank():
    rank = dist.get_rank()
    given = [with_tokens(2 * at + rank, LENGTHS[step][rank]) for at, step in enumerate(STEPS)]
    return [gradients(wb.functional.max_sim_loss, x, directions=BOTH, sync="sum") for x in given]


def test_later_calls_of_a_form_have_the_lengths_of_their_own():
    found = run_ranks(steps_of_rank, 2)
    for at, step in enumerate(STEPS):
        ranks = [with_tokens(2 * at + rank, LENGTHS[step][rank]) for rank in range(2)]
        whole = {"scale": ranks[0]["scale"]}
        for name in ("tokens", "lengths"):
            whole[name] = [torch.cat(parts) for parts in zip(*(of[name] for of in ranks), strict=True)]
        value, expected = gradients(wb.reference.max_sim_loss, whole, directions=BOTH)
        for loss, _ in (of[at] for of in found):
            torch.testing.assert_close(loss, value, rtol=1e-12, atol=1e-12)
        for tower in range(2):
            got = torch.cat([of[at][1][tower] for of in found])
            torch.testing.assert_close(got, expected[tower], rtol=1e-10, atol=1e-10)

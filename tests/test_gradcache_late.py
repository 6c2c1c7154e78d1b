"""Token embeddings with a mask beside them: chunks may have different numbers of tokens, and the gradient is exact."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import assert_all_same, gradients_of, gradients_of_kept, sharded
from test_gradcache_tokens import Sentences, sentences
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


class Tokens(Sentences):
    """Return each token's embedding, the mask, the mean, and one scale for the batch."""

    def __init__(self, seed=0, dtype=torch.bool):
        super().__init__(seed)
        self.dtype, self.scale = dtype, nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, input_ids, attention_mask):
        x = normalize(self.out(self.tokens(input_ids, attention_mask)), dim=-1)
        mean = (x * attention_mask[..., None]).sum(1)
        return x, attention_mask.to(self.dtype), mean, self.scale.reshape(())


def late_interaction(queries, documents):
    """Cross entropy of sum_i max_j <q_i, d_j> over the tokens of the masks, plus a term of the means."""
    (q, q_mask, q_mean, scale), (d, d_mask, d_mean, _) = queries, documents
    assert not q_mask.requires_grad
    products = torch.einsum("aid,bjd->abij", q, d).masked_fill(~d_mask.bool()[None, :, None], -torch.inf)
    scores = scale * (products.amax(-1) * q_mask.bool()[:, None]).sum(-1)
    return scores.logsumexp(1).sum() - scores.diagonal().sum() + (q_mean * d_mean).sum().square()


def true_of(model, queries, documents):
    expected = late_interaction(model(**queries), model(**documents))
    expected.backward()
    return expected.detach(), gradients_of(model)


@pytest.mark.parametrize("keep", [0, 2, 1.0, "auto"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("sizes", [12, (30, 9), "rows"], ids=str)
def test_late_interaction_has_the_gradient_of_the_whole_batch(sizes, side, dtype, keep):
    model, queries, documents = Tokens(dtype=dtype), sentences(9, side=side), sentences(9, seed=1, side=side)
    expected, true = true_of(model, queries, documents)
    budgets = [wb.gradcache.TokenBudget(n) for n in (sizes if isinstance(sizes, tuple) else (12, 12))]
    step = wb.GradCache([model] * 2, 2 if sizes == "rows" else budgets, late_interaction, keep_graphs=keep)
    assert_same(step(queries, documents), expected, relative=1e-12)
    assert_all_same(gradients_of(model), true)


def test_the_loss_gets_zeros_behind_the_tokens_of_a_chunk():
    model, features, seen = Tokens(), sentences(9), []

    def loss_fn(found):
        seen.append(found)
        return found[0].square().sum() + found[2].sum() * found[3]

    wb.GradCache([model], wb.gradcache.TokenBudget(12), loss_fn)(features)
    ((x, mask, _, _),) = seen
    assert x.shape[:2] == mask.shape == (9, 8), "the longest row has 8 tokens of 9 columns"
    assert mask.dtype == torch.bool
    assert torch.equal(mask, features["attention_mask"][:, :8].bool())
    chunks = wb.gradcache.TokenBudget(12).chunks(features["attention_mask"])
    for rows, columns in chunks:
        assert not x[[*rows], columns.stop :].any()
        assert not mask[[*rows], columns.stop :].any()


def test_masks_of_another_row_give_another_loss():
    """The comparison of gradients would show a mask that is not in the order of the rows."""
    model, queries, documents = Tokens(), sentences(9), sentences(9, seed=1)
    expected, true = true_of(model, queries, documents)

    def rolled(q, d):
        return late_interaction(q, (d[0], d[1].roll(1, 0), *d[2:]))

    loss = wb.GradCache([model] * 2, wb.gradcache.TokenBudget(12), rolled)(queries, documents)
    assert abs(loss - expected) > 1e-3
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients_of(model), true, strict=True)) > 0.01


FORMS_REFUSED = {
    "no mask": lambda found: found[0],
    "a float mask": lambda found: (found[0], found[1].double()),
    "another length": lambda found: (found[0], found[1].repeat(1, 2)),
    "a mask alone": lambda found: (found[2], found[1]),
}


@pytest.mark.parametrize("form", FORMS_REFUSED)
def test_other_lengths_without_a_mask_are_refused(form):
    model = Tokens()
    step = wb.GradCache(
        [model], wb.gradcache.TokenBudget(12), lambda *_: model.scale.sum(), get_rep_fn=FORMS_REFUSED[form]
    )
    with pytest.raises(
        ValueError,
        match=r"representation [01] of model 0 \(Tokens\) must have the same shape in all chunks.* pad to one length, "
        r"or return beside it the mask of its tokens, a bool or integer tensor of shape \(rows, tokens\)",
    ):
        step(sentences(9))
    assert all(p.grad is None for p in model.parameters())


def test_a_mask_does_not_allow_another_size_of_embeddings():
    model = Tokens()
    step = wb.GradCache(
        [model],
        wb.gradcache.TokenBudget(12),
        lambda found: found[0].sum(),
        get_rep_fn=lambda found: (found[0][..., : found[0].shape[1]], found[1]),
    )
    with pytest.raises(ValueError, match=r"representation 0 of model 0 .* must have the same shape in all chunks"):
        step(sentences(9))


def ranks_body(counts, engine, keep):
    rows, total = Partition(counts).rows(dist.get_rank()), sum(counts)
    queries, documents = sentences(total), sentences(total, seed=1)
    plain = Tokens()
    plain.scale.requires_grad_(False)
    alone = copy.deepcopy(plain)
    loss_of = lambda of_q, of_d: pooled_loss(of_q, of_d, wb.reference.clip_loss)  # noqa: E731
    loss_of(alone(**queries), alone(**documents)).backward()
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain.inner)
    step = wb.GradCache(
        [model] * 2, wb.gradcache.TokenBudget(12), pooled_loss, get_rep_fn=lambda x: x[:2], keep_graphs=keep
    )
    for _ in range(2):
        step(*({name: x[rows] for name, x in features.items()} for features in (queries, documents)))
        found = [z.full_tensor() if hasattr(z, "full_tensor") else z for z in gradients_of(plain) if z is not None]
        assert_all_same(found, [z for z in gradients_of_kept(alone) if z is not None])
    return True


def pooled_loss(queries, documents, clip_loss=wb.functional.clip_loss):
    """A loss of the whole batch that weighs each token by its place among the row's tokens."""
    pooled = []
    for x, mask, *_ in (queries, documents):
        place = mask.long().cumsum(1) * mask
        pooled.append(normalize((x.sin() * place[..., None]).sum(1), dim=1))
    return clip_loss(*pooled, 3.0)


@pytest.mark.parametrize(
    ("counts", "engine", "keep"),
    [
        ((9,), "ddp", 0),
        ((6, 3), "ddp", 1),
        ((5, 0, 4), "ddp", 1.0),
        ((6, 3), "fsdp", 0),
        ((5, 0, 4), "fsdp", 1),
    ],
    ids=str,
)
def test_on_ranks_with_uneven_and_no_rows(counts, engine, keep):
    assert all(run_ranks(ranks_body, len(counts), counts, engine, keep, timeout_s=120))

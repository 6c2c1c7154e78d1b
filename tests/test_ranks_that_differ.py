"""Ranks with other versions, with modules in another order, or in torch's Join context raise, all of them."""

import copy
from importlib import import_module, reload

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import batch, good_loss, mlp
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.comm import handshake, join_context, records
from wholebatch.testing import RankError, run_ranks

agree = import_module("wholebatch.contract.agree")

SCALE = 3.0


def features(name, rows=6):
    """Return the images and texts of all ranks."""
    generator = torch.Generator().manual_seed(ord(name))
    return [torch.randn(2 * rows, 4, dtype=torch.float64, generator=generator) for _ in range(2)]


def local(name):
    return [x.chunk(2)[dist.get_rank()] for x in features(name)]


def raised(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


KINDS = {  # how to build a module of two tensors, and its loss of all rows
    "CLIPLoss": (lambda: wb.CLIPLoss(logit_scale=SCALE), lambda x, y: wb.reference.clip_loss(x, y, SCALE)),
    "deferred": (
        lambda: wb.CLIPLoss(logit_scale=SCALE, checks="deferred"),
        lambda x, y: wb.reference.clip_loss(x, y, SCALE),
    ),
    "PairLoss": (
        lambda: wb.PairLoss({"all": wb.terms.LogSumExp(lambda s, x, y, p: s)}, lambda r, x, p: r.all),
        lambda x, y: (x @ y.T).logsumexp(1).mean(),
    ),
    "WholeBatch": (
        lambda: wb.WholeBatch(lambda x, y: (x @ y.T).logsumexp(1).mean()),
        lambda x, y: (x @ y.T).logsumexp(1).mean(),
    ),
    "PartialFC": (
        lambda: wb.PartialFC(4, 3, margin=wb.NormFace(4.0)).double(),
        None,
    ),
}


def modules_body(kind):
    """Two modules of one kind in another order raise; in the same order all is as without a module built for a log."""
    rank, (build, reference) = dist.get_rank(), KINDS[kind]
    losses = {"a": build()}
    if rank:
        build()  # for a log
    losses["b"] = build()
    if kind == "PartialFC":
        heads, labels = losses, torch.tensor([0, 1, 2, 0, 1, 2])
        losses = {name: lambda x, y, head=head: head(x, labels) for name, head in heads.items()}
    assert raised(lambda: [losses[name](*local(name)) for name in ("ab" if rank == 0 else "ba")]).count(
        "must build and call their modules in the same order, got numbers"
    ) == (kind != "deferred")
    for names in ("ab", "ba", "aab"):
        for name in names:
            loss = losses[name](*local(name))
            if reference is not None:
                assert_same(loss, reference(*features(name)), relative=1e-12)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_one_kind_are_called_in_one_order(kind):
    assert run_ranks(modules_body, 2, kind, timeout_s=60) == [True, True]


def copies_body():
    """Copies, functions, groups of one rank, and a module for each step."""
    rank = dist.get_rank()
    first, second = wb.CLIPLoss(logit_scale=SCALE), wb.CLIPLoss(logit_scale=SCALE)
    right = {name: wb.reference.clip_loss(*features(name), SCALE) for name in "ab"}

    def check(loss, name):
        assert_same(loss(*local(name)), right[name], relative=1e-12)

    check(first, "a")
    if rank == 0:
        alone = wb.CLIPLoss(logit_scale=SCALE, group=wb.comm.LocalCommunicator())
        assert alone(*local("b")).isfinite()
    check(copy.deepcopy(second) if rank else second, "b")
    check(copy.deepcopy(first) if rank == 0 else first, "a")
    check(lambda x, y: wb.functional.clip_loss(x, y, SCALE), "a")
    check((lambda x, y: wb.functional.clip_loss(x, y, SCALE)) if rank else second, "b")
    for _ in range(70):  # more than are remembered
        check(wb.CLIPLoss(logit_scale=SCALE), "a")
    check(second, "b")
    return True


def test_copies_functions_and_modules_of_one_rank_are_no_mistake():
    assert run_ranks(copies_body, 2, timeout_s=60) == [True, True]


def caches_body(deferred):
    rank, model, data = dist.get_rank(), mlp(0), batch(6)
    steps = {name: wb.GradCache([model, model], 2, good_loss, deferred=deferred) for name in "ab"}
    found = raised(lambda: [steps[name](*data) for name in ("ab" if rank == 0 else "ba")])
    assert found.startswith("GradCache: all ranks must build and call their modules in the same order")
    for name in "abba":
        assert steps[name](*data).isfinite()
    return True


@pytest.mark.parametrize("deferred", [False, True])
def test_cached_steps_are_made_in_one_order(deferred):
    assert run_ranks(caches_body, 2, deferred, timeout_s=60) == [True, True]


def versions_body(words):
    if dist.get_rank():
        handshake.__version__, records.WORDS, records.RECORD_BYTES = "0.7.5", words, 8 * words
    x = torch.eye(4)
    return [raised(lambda: wb.functional.clip_loss(x, x, SCALE)) for _ in range(2)]


@pytest.mark.parametrize("words", [records.WORDS, 2 * records.WORDS])
def test_other_versions_are_named_on_all_ranks(words):
    """Also if the other version's records have another length, with which gloo would end the process."""
    message = f"must run the same version of wholebatch, got rank 0: {wb.__version__}; rank 1: 0.7.5; install"
    for found in run_ranks(versions_body, 2, words, timeout_s=60):
        assert all(message in text for text in found), found


def gathers_body():
    """A group compares versions once."""
    gathers, x = [], torch.eye(4)
    with pytest.MonkeyPatch.context() as patch:
        gathered = handshake._gathered
        patch.setattr(handshake, "_gathered", lambda *of: (gathers.append(1), gathered(*of))[1])
        counts = []
        for _ in range(2):
            wb.functional.clip_loss(x, x, SCALE)
            counts.append(len(gathers))
            gathers.clear()
    return counts


def test_versions_are_compared_once():
    assert run_ranks(gathers_body, 2, timeout_s=60) == [[2, 1]] * 2


def join_body(kind):
    """The loop of torch's example: rank 0 has three batches and rank 1 two."""
    rank, (x, y) = dist.get_rank(), [z.float() for z in batch(8)]
    ddp = DistributedDataParallel(mlp(0).float())
    losses = {
        "loss": lambda: wb.functional.clip_loss(ddp(x), ddp(y), SCALE).backward(),
        "WholeBatch": lambda: wb.WholeBatch(lambda a, b: (a @ b.T).square().mean())(ddp(x), ddp(y)).backward(),
        "GradCache": lambda: wb.GradCache([ddp, ddp], 2, good_loss)(x, y),
    }
    losses[kind]()  # before: the form of the call is known

    def epoch():
        with Join([ddp]):
            for _ in range(3 - rank):
                losses[kind]()

    found = raised(epoch)
    with Join([ddp]):  # without a loss of the whole batch
        for _ in range(3 - rank):
            ddp(x).sum().backward()
    losses[kind]()  # after
    return found


@pytest.mark.parametrize("kind", ["loss", "WholeBatch", "GradCache"])
def test_a_loss_in_a_join_context_raises_on_all_ranks(kind):
    for found in run_ranks(join_body, 2, kind, timeout_s=60):
        assert "Join must be left out around losses" in found
        assert "pass (0, d) rows when a rank has run out" in found


def join_without_a_batch_body(kind):
    """Rank 1 has no batch at all, so that it calls no loss."""
    rank, (x, y) = dist.get_rank(), [z.float() for z in batch(8)]
    ddp = DistributedDataParallel(mlp(0).float())
    group = wb.comm.LocalCommunicator() if kind == "alone" else None

    def encode(z):
        return ddp(z)

    cache = wb.GradCache([encode, encode], 2, wb.CLIPLoss(group=group), group=group)

    def loss():
        both = ddp(torch.cat([x, y]))  # Join follows one forward pass of a model in each step
        wb.functional.clip_loss(*both.chunk(2), SCALE)

    with Join([ddp]):
        for _ in range(1 - rank):
            loss() if kind == "loss" else cache(x, y)


@pytest.mark.parametrize("kind", ["loss", "GradCache", "alone"])
def test_a_loss_in_a_join_context_raises_where_another_rank_has_no_batch(kind):
    """The rank without a batch waits in a collective of Join, so nothing may be sent before the error."""
    with pytest.raises(RankError, match=r"rank 0[^~]*ValueError: torch.distributed.algorithms.Join must be left out"):
        run_ranks(join_without_a_batch_body, 2, kind, timeout_s=60)


def kept_join_body(built_first):
    """The message before, in and after a Join context whose object is kept, and after one that an error ended."""
    x, y = [z.float() for z in batch(8)]

    def message():
        return raised(lambda: wb.functional.clip_loss(x, y, SCALE))

    def module():
        return DistributedDataParallel(mlp(0).float())

    ddp = module() if built_first else None
    message()  # the group's first call
    kept = Join([ddp or module()])
    messages = [message()]
    with kept:
        messages.append(message())
    messages.append(message())
    with pytest.raises(KeyError), kept:
        raise KeyError
    messages.append(message())
    with Join([ddp or module()], enable=False):
        messages.append(message())
    return messages


@pytest.mark.parametrize("built_first", [True, False])
def test_a_join_context_is_open_from_its_beginning_to_its_end(built_first):
    for before, inside, *later in run_ranks(kept_join_body, 2, built_first, timeout_s=60):
        assert "Join must be left out around losses" in inside
        assert [before, *later] == [""] * 4


def first_use_inside_of_join_body():
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    Join.__enter__, Join.__exit__ = Join.__enter__.__wrapped__, Join.__exit__.__wrapped__  # as before any use
    with Join([ddp]):
        handshake.refuse_join_context = agree.refuse_join_context = reload(join_context).refuse_join_context
        try:
            wb.functional.clip_loss(torch.eye(2), torch.eye(2), logit_scale=1.0)
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_a_join_context_around_the_first_use_of_a_loss_is_seen():
    """Nothing notes the contexts before the first use."""
    for said in run_ranks(first_use_inside_of_join_body, 2):
        assert "torch.distributed.algorithms.Join must be left out around losses" in said

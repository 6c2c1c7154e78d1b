"""PartialFC refuses wrong calls, settings and wrappers, on all ranks."""

import inspect
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from partial_fc_data import CLASSES, data
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.comm.handshake import Statement
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def good_call(x, y, w):
    return wb.functional.partial_fc_loss(x, y, w)


BAD = {
    "label too large": (lambda x, y, w: good_call(x, y + CLASSES, w), r"labels must lie in \[0, 11\)"),
    "label negative": (lambda x, y, w: good_call(x, y - CLASSES, w), r"labels must lie in \[0, 11\)"),
    "float labels": (lambda x, y, w: good_call(x, y.float(), w), "labels must be a tensor of integers"),
    "zero embedding": (lambda x, y, w: good_call(0 * x, y, w), "embeddings must not have a row of zeros"),
    "zero center": (
        lambda x, y, w: good_call(x, y, torch.cat([0 * w[:1], w[1:]])),
        "centers must not have a row of zeros",
    ),
    "a label twice": (
        lambda x, y, w: good_call(x, torch.stack([y, y], 1), w),
        "must be different ones|labels of an example",
    ),
    "NaN": (lambda x, y, w: good_call(x, y, w / 0 * 0), "centers must be finite"),
    "width": (lambda x, y, w: good_call(x, y, w[:, 1:]), "must have the same embedding size"),
    "margin": (lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, margin=0.5), "margin must be one such as"),
    "other margin": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, margin=wb.CosFace()),
        "margin|must be one",
    ),
    "classes": (lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, num_classes=12), "num_classes"),
    "class left out": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, class_ids=torch.arange(len(w)) + 100),
        "each label's class must be among|whether there are class_ids",
    ),
    "bias": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, bias=torch.zeros(len(w) + 1)),
        "bias must have shape|whether there is a bias",
    ),
    "sub-centers": (
        lambda x, y, w: good_call(x, y, torch.stack([w, w], 1)[..., None]),
        "centers must have shape",
    ),
    "sub-centers of one rank": (lambda x, y, w: good_call(x, y, torch.stack([w, w], 1)), "sub-centers of a class"),
    "order": (
        lambda x, y, w: wb.functional.partial_fc_loss(x, y, w, class_ids=torch.arange(len(w)).flip(0)),
        "class_ids must be ascending|whether there are",
    ),
}


def bad_body():
    """Make a mistake on the last rank alone: all raise, and the next call is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, labels, centers = data(6)
    labels[4] = 0
    rows, classes = Partition.even(6, world), Partition.even(CLASSES, world)
    mine = x[rows.rows(rank)], labels[rows.rows(rank)], centers[classes.rows(rank)]
    for name, (call, message) in BAD.items():
        if world == 1 and name in ("other margin", "sub-centers of one rank"):
            continue
        with pytest.raises(ValueError, match=message):
            (call if rank == world - 1 else good_call)(*mine)
        true = wb.reference.partial_fc_loss(x, labels, centers, margin=wb.ArcFace())
        assert_same(good_call(*mine), true, relative=1e-12, what=name)


@pytest.mark.parametrize("world", [1, 2])
def test_a_wrong_call_on_one_rank_raises_on_all_ranks(world):
    run_ranks(bad_body, world, timeout_s=60)


class Scaled:
    """A margin whose scale is all that says what it computes."""

    def __init__(self, s):
        self.s = s

    def __call__(self, targets):
        return targets.angles.cos()


def changed_body():
    """Checks that are made once for calls of a form notice a head that has changed since."""
    rank, world = dist.get_rank(), dist.get_world_size()
    head, x, labels = wb.PartialFC(4, 11, margin=Scaled(8.0)).double(), torch.randn(3, 4).double(), torch.arange(3)
    first, last = head(x, labels).item(), rank == world - 1
    assert head(x, labels).item() == first
    for name, value, message in (
        ("s", -1.0, "the margin's scale s must be positive, got -1.0"),
        ("margin", wb.ArcFace(8.0), "margin must be the same|margin"),
        ("first_class", torch.tensor(5), "the head holds another rank's centers"),
        ("weight", nn.Parameter(head.weight.detach()[:, 1:]), "same embedding size|must be the parameter"),
    ):
        owner = head.margin if name == "s" else head
        before = getattr(owner, name)
        if last and (name != "margin" or world > 1):
            setattr(owner, name, value)
        if name == "margin" and world == 1:
            continue
        with pytest.raises(ValueError, match=message):
            head(x, labels)
        setattr(owner, name, before)
        assert head(x, labels).item() == first
    head.margin = wb.ArcFace(8.0, 0.2)
    assert head(x, labels).item() > first


@pytest.mark.parametrize("world", [1, 2])
def test_a_head_that_changes_between_calls_is_checked_again(world):
    run_ranks(changed_body, world)


def test_calls_of_a_form_look_up_their_checks():
    """The first call of a form states and checks all; a later one looks most of it up."""
    head, x, labels = wb.PartialFC(4, 11, margin=wb.ArcFace(8.0, 0.2)), torch.randn(3, 4), torch.arange(3)
    with patch.object(Statement, "__init__", autospec=True, side_effect=Statement.__init__) as stated:
        for _ in range(3):
            head(x, labels)
        assert stated.call_count == 1
        head(torch.cat([x, x]), torch.cat([labels, labels]))
    assert stated.call_count == 2


class Upside:
    s = -1.0

    def __call__(self, targets):
        return targets.angles.cos()


class Learned(nn.Module):
    s = 8.0

    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.tensor(0.1))

    def forward(self, targets):
        return targets.angles.cos() - self.m


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_rate": 1.5}, r"sample_rate must lie in \[0, 1\], got 1.5"),
        ({"num_classes": 0}, "num_classes must be a positive integer"),
        ({"embedding_size": 2.0}, "embedding_size must be a positive integer"),
        ({"margin_grad": "sometimes"}, "margin_grad must be one of 'exact', 'straight_through'"),
        ({"unbiased": True, "sample_rate": 0.0}, "unbiased needs a sample_rate above 0"),
        ({"seed": "x"}, "seed must be an integer from -9223372036854775808 to 9223372036854775807; got 'x'"),
        ({"seed": 2**64}, "seed must be an integer from -9223372036854775808 to 9223372036854775807; got 1844"),
        ({"margin": Upside()}, "the margin's scale s must be positive, got -1.0"),
        ({"margin": wb.ArcFace}, "margin must be one such as wholebatch.ArcFace"),
        ({"bias": "no"}, "bias must be True or False, got 'no'"),
        ({"unbiased": 1}, "unbiased must be True or False, got 1"),
        ({"sample_rate": True}, r"sample_rate must be a number, got True \(bool\)"),
        ({"label_smoothing": True}, r"label_smoothing must be a number, got True \(bool\)"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer"),
        ({"dtype": torch.bool}, "dtype must be torch.float64, float32, bfloat16 or float16, got torch.bool"),
        ({"device": "toaster"}, "device must be a torch.device or its name, got 'toaster'"),
        ({"num_classes": 10**14}, "ask for a tensor of shape .100000000000000, 4.*this machine has"),
        ({"margin": Learned()}, "a margin must have no parameters to learn"),
        ({"margin": None}, "margin must be one such as"),
        ({"exclude_above": 2.0}, "exclude_above must be a cosine from -1 to 1"),
        ({"exclude_above": 0.5, "normalize": "none"}, "normalize must be 'both' with exclude_above, .* got 'none'"),
        ({"normalize": True}, "normalize must be one of 'both', 'centers', 'embeddings', 'none'"),
        ({"sub_centers": 0}, "sub_centers must be a positive integer"),
        ({"sub_centers": 2, "normalize": "none"}, "sub-centers are compared as unit vectors"),
    ],
)
def test_a_wrong_setting_is_refused_by_the_constructor(arguments, message):
    with pytest.raises(ValueError, match=message):
        wb.PartialFC(**{"embedding_size": 4, "num_classes": 10} | arguments)


@pytest.mark.parametrize(
    "arguments",
    [(wb.ArcFace(64.0, 0.5), 512, 1000, 0.1, False), (512, 1000, wb.ArcFace()), (wb.ArcFace(), 512, 1000)],
    ids=["insightface", "margin third", "margin first"],
)
def test_positional_arguments_of_insightface_name_its_class(arguments):
    message = (
        f"got {len(arguments)}; pass the others by keyword: .*margin=.*sample_rate=.*"
        r"wholebatch\.integrations\.insightface\.PartialFC_V2"
    )
    with pytest.raises(TypeError, match=message):
        wb.PartialFC(*arguments)
    with pytest.raises(TypeError, match=r"did you mean sample_rate"):
        wb.PartialFC(4, 10, sample_rates=0.1)
    assert list(inspect.signature(wb.PartialFC).parameters)[:3] == ["embedding_size", "num_classes", "margin"]


def few_classes_body():
    with pytest.raises(ValueError, match="a class for each of the 2 ranks, got num_classes=1"):
        wb.PartialFC(4, 1)


def test_more_ranks_than_classes_raise():
    run_ranks(few_classes_body, 2, timeout_s=60)


def wrapped_body():
    """Wrap a head in DDP or FSDP2, create it before ranks exist, or load another rank's state."""

    class Model(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.backbone, self.head = nn.Linear(5, 4), head

        def forward(self, x, y=None):
            return self.backbone(x) if y is None else self.head(self.backbone(x), y)

    x, y = torch.randn(2, 5), torch.tensor([0, 1])
    refused = "the head holds another rank's centers|DistributedDataParallel has wrapped the head"
    for rate in (1.0, 0.3):
        model = DistributedDataParallel(Model(wb.PartialFC(4, 10, sample_rate=rate)))
        with pytest.raises(ValueError, match=refused):
            model(x, y)
        with pytest.raises(ValueError, match=refused):
            model.module.head(model(x), y)
        for how in ({"broadcast_buffers": False}, {"broadcast_buffers": False, "init_sync": False}):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # users still pass it
                model = DistributedDataParallel(Model(wb.PartialFC(4, 10, sample_rate=rate)), **how)
            with pytest.raises(ValueError, match="DistributedDataParallel has wrapped the head"):
                model(x, y)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = fully_shard(Model(wb.PartialFC(4, 10, sample_rate=rate)), mesh=mesh)
        with pytest.raises(ValueError, match="must stay outside of FSDP"):
            model(x, y)
        early = wb.PartialFC(4, 10, sample_rate=rate, group=wb.comm.LocalCommunicator())
        early.options = wb.PartialFC(4, 10).options
        with pytest.raises(ValueError, match="make it after"):
            early(torch.randn(2, 4), y)
        head = wb.PartialFC(4, 10, sample_rate=rate)
        states = [None, None]
        dist.all_gather_object(states, head.state_dict())
        head.load_state_dict(states[0])
        with pytest.raises(ValueError, match=refused):
            head(torch.randn(2, 4), y)
    for one in ({"sample_rate": 0.5}, {"unbiased": True}, {"seed": 1}):
        head = wb.PartialFC(4, 10, **({"sample_rate": 0.3} | (one if dist.get_rank() else {})))
        with pytest.raises(ValueError, match="sample_rate, unbiased, seed and training must be the same"):
            head(torch.randn(2, 4), y)
    head = wb.PartialFC(4, 10, sample_rate=0.3)
    for step in (0, 1):
        head(torch.randn(2, 4), y)
        head.step += dist.get_rank()
        with pytest.raises(
            ValueError, match=f"step must be the same on all ranks, got rank 0: {step + 1}; rank 1: {step + 2}"
        ):
            head(torch.randn(2, 4), y)
        head.step -= dist.get_rank()


def test_heads_that_are_not_this_ranks_are_refused():
    run_ranks(wrapped_body, 2, timeout_s=60)


def broadcast(head):
    for p in head.parameters():
        dist.broadcast(p.detach(), 0)


def average(head):
    for p in head.parameters():
        dist.all_reduce(p.detach())
        p.detach().div_(dist.get_world_size())


def draw_from_one_seed(head):
    torch.manual_seed(0)
    nn.init.normal_(head.weight, std=0.01)


def zero_redundancy(parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which its package imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def share_the_step(head, backbone, x, y):
    optimizer = zero_redundancy([*backbone.parameters(), *head.parameters()])
    head(backbone(x), y).backward()
    optimizer.step()


def next_loss(head, backbone, x, y, optimizers):
    head(backbone(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
    return head(backbone(x), y).detach()


def overwritten_body(folder):
    """One rank's centers on both ranks are refused by all that uses them; the backbone alone may share its step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y, shard = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 9, 5, 3]), Partition
    rows = shard.even(4, size).rows(rank)

    def models(group=None, **options):
        torch.manual_seed(1)
        backbone = nn.Linear(16, 16)
        options = {"margin": wb.CosFace(), "group": group} | options
        return wb.PartialFC(16, 10, **options), backbone if group else DistributedDataParallel(backbone)

    refused = "each rank must hold the centers of other classes, got equal ones on ranks \\[0, 1\\]"
    for options in ({}, {"sample_rate": 0.3}, {"sub_centers": 2, "bias": True}, {"dtype": torch.bfloat16}):
        for overwrite in (broadcast, average, draw_from_one_seed):
            head, _ = models(**options)
            overwrite(head)
            for use in (
                lambda head: head(x[rows], y[rows]),
                lambda head: head.eval()(x[rows], y[rows]),
                lambda head: head.top_classes(x[rows]),
                lambda head: head.full_weight(),
                lambda head: wb.heads.save_head(folder / "head", head),
            ):
                with pytest.raises(ValueError, match=refused):
                    use(head)
    head, backbone = models()
    share_the_step(head, backbone, x[rows], y[rows])
    with pytest.raises(ValueError, match=refused):
        head(backbone(x[rows]), y[rows])

    head, backbone = models()
    mine = zero_redundancy(backbone.parameters()), wb.SparseSGD(head.parameters(), 0.1)
    whole, alone = models(wb.comm.LocalCommunicator())
    of_all = (torch.optim.SGD([*whole.parameters(), *alone.parameters()], lr=0.1),)
    assert_same(next_loss(head, backbone, x[rows], y[rows], mine), next_loss(whole, alone, x, y, of_all), relative=1e-5)


def constant_body():
    """Centers that begin equal are equal on ranks without labels after a step as well, and nothing is wrong."""
    rank = dist.get_rank()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    for group in (None, wb.comm.LocalCommunicator()):
        head = wb.PartialFC(8, 9, margin=wb.NormFace(2.0), normalize="embeddings", group=group)
        nn.init.constant_(head.weight, 0.5)
        rows = slice(rank, rank + 1) if group is None else slice(None)
        loss = next_loss(head, nn.Identity(), x[rows], torch.zeros(3, dtype=torch.int64)[rows], (sgd_of(head),))
        if group is None:
            found = loss
    assert_same(found, loss, relative=1e-6)


def sgd_of(head):
    return torch.optim.SGD(head.parameters(), lr=0.1)


def test_a_part_that_was_taken_for_a_copy_is_refused(tmp_path):
    run_ranks(overwritten_body, 2, tmp_path, timeout_s=60)


def test_constant_centers_are_accepted():
    run_ranks(constant_body, 3, timeout_s=60)

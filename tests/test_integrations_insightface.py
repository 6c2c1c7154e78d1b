"""PartialFC_V2 with insightface's arguments, without insightface. `make ecosystem` runs its script."""

import copy
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations.insightface import PartialFC_V2, margin_of
from wholebatch.testing import run_ranks

CLASSES, WIDTH, ROWS = 11, 4, {1: (7,), 2: (5, 2), 3: (3, 0, 4)}
THEIRS = [  # the parameters of insightface's class and their defaults
    ("self", inspect.Parameter.empty),
    ("margin_loss", inspect.Parameter.empty),
    ("embedding_size", inspect.Parameter.empty),
    ("num_classes", inspect.Parameter.empty),
    ("sample_rate", 1.0),
    ("fp16", False),
]


class CombinedMarginLoss(nn.Module):
    """A margin with the attributes and logits of insightface's class of this name."""

    def __init__(self, s, m1, m2, m3, interclass_filtering_threshold=0):
        super().__init__()
        self.s, self.m1, self.m2, self.m3 = s, m1, m2, m3
        self.interclass_filtering_threshold = interclass_filtering_threshold

    def forward(self, cosines, labels):
        target = torch.arange(cosines.shape[1]) == labels
        if self.interclass_filtering_threshold > 0:
            cosines = torch.where((cosines > self.interclass_filtering_threshold) & ~target, 0.0, cosines)
        phi = cosines - self.m3 if self.m3 > 0 else (cosines.acos() + self.m2).cos()
        return self.s * (cosines + (torch.where(target, phi, cosines) - cosines).detach())


class ArcFace(nn.Module):
    """The same for insightface's ArcFace."""

    def __init__(self, s=64.0, margin=0.5):
        super().__init__()
        self.s, self.margin = s, margin

    def forward(self, cosines, labels):
        return CombinedMarginLoss(self.s, 1.0, self.margin, 0.0)(cosines, labels)


class CosFace(nn.Module):
    """The same for insightface's CosFace."""

    def __init__(self, s=64.0, m=0.4):
        super().__init__()
        self.s, self.m = s, m

    def forward(self, cosines, labels):
        return CombinedMarginLoss(self.s, 1.0, 0.0, self.m)(cosines, labels)


MARGINS = {
    "arc": CombinedMarginLoss(16, 1.0, 0.5, 0.0),
    "cos": CombinedMarginLoss(16, 1.0, 0.0, 0.4),
    "filtered arc": CombinedMarginLoss(16, 1.0, 0.5, 0.0, 0.2),
    "filtered cos": CombinedMarginLoss(16, 1.0, 0.0, 0.4, 0.2),
    "ArcFace": ArcFace(16.0, 0.3),
    "CosFace": CosFace(16.0, 0.3),
}


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64)
    centers = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (7,), generator=generator), centers


def local():
    """Return this rank's rows of the data, and the shard of its centers."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, labels, centers = data()
    rows = slice(sum(ROWS[world][:rank]), sum(ROWS[world][: rank + 1]))
    return x[rows].clone().requires_grad_(), labels[rows].clone(), centers


def module(margin, centers, sample_rate=1.0, **options):
    head = PartialFC_V2(margin, WIDTH, CLASSES, sample_rate, False, **options).train().double()
    head.load_state_dict({"weight": centers[head.class_start : head.class_start + head.num_local]})
    return head


def dense(margin, classes=None):
    """Return loss and gradients of one process with all rows, by the margin itself."""
    x, labels, centers = data()
    x.requires_grad_(), centers.requires_grad_()
    classes = torch.arange(CLASSES) if classes is None else classes
    at = torch.searchsorted(classes, labels)
    cosines = F.normalize(x) @ F.normalize(centers[classes]).T
    loss = F.cross_entropy(margin(cosines, at[:, None]), at)
    return loss.detach(), *torch.autograd.grad(loss, (x, centers))


def of_rank(name, sample_rate):
    x, labels, centers = local()
    head = module(MARGINS[name], centers, sample_rate, seed=3)
    loss = head(x, labels[:, None] if name == "cos" else labels.to(torch.float32))
    loss.backward()
    assert head.weight.grad.layout == torch.strided
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", MARGINS)
def test_loss_and_gradients_are_those_of_the_whole_batch(name, world):
    loss, of_x, of_centers = dense(MARGINS[name])
    found = run_ranks(of_rank, world, name, 1.0, timeout_s=60)
    assert all(torch.allclose(one, loss, rtol=1e-12) for one, *_ in found)
    assert torch.allclose(torch.cat([g for _, g, _ in found]) / world, of_x, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([g for *_, g in found]), of_centers, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sample_has_the_gradients_of_its_classes(world):
    found = run_ranks(of_rank, world, "filtered arc", 0.4, timeout_s=60)
    weight_grad = torch.cat([g for *_, g in found])
    classes = weight_grad.norm(dim=1).nonzero().flatten()
    assert len(data()[1].unique()) <= len(classes) < CLASSES
    loss, of_x, of_centers = dense(MARGINS["filtered arc"], classes)
    assert torch.allclose(found[0][0], loss, rtol=1e-12)
    assert torch.allclose(torch.cat([g for _, g, _ in found]) / world, of_x, rtol=0, atol=1e-12)
    assert torch.allclose(weight_grad, of_centers, rtol=0, atol=1e-12)
    assert not torch.allclose(of_x, dense(MARGINS["filtered arc"])[1], atol=1e-3), "all classes would pass too"


def test_the_constructor_takes_their_arguments():
    ours = list(inspect.signature(PartialFC_V2.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(THEIRS)]] == THEIRS
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(THEIRS) :])
    assert list(inspect.signature(PartialFC_V2.forward).parameters) == ["self", "local_embeddings", "local_labels"]


def test_derivatives_are_straight_through_for_their_margins_alone():
    x, labels, centers = local()
    found = {}
    for name, margin, options in (
        ("theirs", MARGINS["arc"], {}),
        ("theirs, exact", MARGINS["arc"], {"margin_grad": "exact"}),
        ("ours", wb.ArcFace(16.0, 0.5, fold="none"), {}),
        ("ours, straight", wb.ArcFace(16.0, 0.5, fold="none"), {"margin_grad": "straight_through"}),
    ):
        found[name] = torch.autograd.grad(module(margin, centers, **options)(x, labels), x)[0]
    assert torch.equal(found["theirs"], found["ours, straight"])
    assert torch.equal(found["theirs, exact"], found["ours"])
    assert not torch.allclose(found["theirs"], found["ours"], rtol=1e-2)


def test_numbers_of_a_margin_may_change_between_steps():
    x, labels, centers = local()
    margin = CombinedMarginLoss(16, 1.0, 0.5, 0.0)
    head = module(margin, centers)
    head(x, labels)
    margin.m2 = 0.2
    assert torch.allclose(head(x, labels), dense(margin)[0], rtol=1e-12)
    margin.m3 = 0.1
    with pytest.raises(ValueError, match="margin_loss must have m1=1 and m2=0 where m3 > 0"):
        head(x, labels)


class Edited(nn.Module):
    """A margin of another derivative under a known name."""

    def __init__(self):
        super().__init__()
        self.s, self.margin = 16.0, 0.5

    def forward(self, cosines, labels):
        target = torch.arange(cosines.shape[1]) == labels
        return self.s * torch.where(target, (cosines.acos() + self.margin).cos(), cosines)


Edited.__name__ = "ArcFace"


class Learned(nn.Module):
    """A margin of this library's form with a parameter, whose gradient no engine of their script would average."""

    s = 16.0

    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))

    def forward(self, targets):
        return self.s * (targets.angles.cos() - self.m)


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        (CombinedMarginLoss(64, 1.0, 0.3, 0.2), "ignores m1 and m2 there; pass CombinedMarginLoss"),
        (CombinedMarginLoss(64, 1.35, 0.0, 0.0), "has no logits for it; pass wholebatch.CombinedMargin"),
        (Edited(), "margin_loss must compute the logits of insightface's ArcFace"),
        (nn.Linear(2, 2), "margin_loss must be a CombinedMarginLoss, ArcFace or CosFace .* got Linear"),
        (lambda logits, labels: logits, "margin_loss must be a CombinedMarginLoss"),
        (CombinedMarginLoss, "margin_loss must be a CombinedMarginLoss"),
        (Learned(), "must have no parameters to learn, .* got Learned with parameters: make them buffers"),
    ],
    ids=["ignored", "no logits", "edited", "module", "function", "class", "learned"],
)
def test_other_margins_are_refused(margin, message):
    with pytest.raises(ValueError, match=message):
        PartialFC_V2(margin, WIDTH, CLASSES)


def test_margins_are_those_of_this_library():
    assert margin_of(CosFace(32.0, 0.3)) == wb.CombinedMargin(32.0, 1.0, 0.0, 0.3, "none")
    assert margin_of(ArcFace(32.0, 0.3)) == wb.CombinedMargin(32.0, 1.0, 0.3, 0.0, "none")


MISTAKES = {
    "margin": "PartialFC_V2: .*margin_loss must be a CombinedMarginLoss",
    "fp16": "fp16 must be False with precision='tf32'",
    "size": "num_classes",
    "label": r"labels must lie in \[0, 11\), or be ignore_index; rank 1 got -1",
    "labels": "labels",
    "changed": "margin_loss must have m1=1 and m2=0 where m3 > 0",
    "other margin": "margin",
    "arguments": "local_labels",
}


def mistake_of_rank(name):
    wrong = dist.get_rank() == 1
    x, labels, centers = local()
    margin = CombinedMarginLoss(16, 1.0, 0.5, 0.0)
    try:
        if name in ("margin", "fp16", "size"):
            options = {"fp16": True, "precision": "tf32"} if wrong and name == "fp16" else {}
            PartialFC_V2(
                nn.ReLU() if wrong and name == "margin" else margin,
                WIDTH,
                CLASSES + (wrong and name == "size"),
                **options,
            )
        head = module(margin, centers, seed=0)
        if wrong and name == "label":
            labels[0] = -1
        if wrong and name == "changed":
            margin.m3 = 0.2
        if wrong and name == "other margin":
            margin.m2 = 0.2
        if wrong and name == "arguments":
            head(x)
        head(x, "labels" if wrong and name == "labels" else labels)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_raises_on_all(name):
    for message in run_ranks(mistake_of_rank, 2, name, timeout_s=60):
        assert message is not None
        assert re.search(MISTAKES[name], message, flags=re.DOTALL), message


def test_labels_that_do_not_count():
    x, labels, centers = local()
    labels[2] = -1
    kept = labels != -1
    found = module(MARGINS["arc"], centers, ignore_index=-1)(x, labels)
    assert torch.equal(found, module(MARGINS["arc"], centers)(x[kept], labels[kept]))


def test_the_seed_is_that_of_torch():
    torch.manual_seed(17)
    one, two = (PartialFC_V2(MARGINS["arc"], WIDTH, CLASSES) for _ in range(2))
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.weight, wb.PartialFC(WIDTH, CLASSES, seed=17).weight)
    assert copy.deepcopy(one).class_start == 0


# Checkpoints.


def save_of_rank(folder):
    rank = dist.get_rank()
    _, _, centers = local()
    head, backbone = module(MARGINS["arc"], centers, 0.5, seed=3), nn.Linear(3, WIDTH).double()
    groups = [{"params": backbone.parameters()}, {"params": head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        head(backbone(torch.randn(2, 3, dtype=torch.float64)), torch.tensor([rank, 10 - rank])).backward()
        optimizer.step()
        scheduler.step()
    checkpoint = {
        "epoch": 1, "global_step": 3, "state_dict_backbone": backbone.state_dict(),
        "state_dict_softmax_fc": head.state_dict(), "state_optimizer": optimizer.state_dict(),
        "state_lr_scheduler": scheduler.state_dict(),
    }  # fmt: skip
    torch.save(checkpoint, folder / f"checkpoint_gpu_{rank}.pt")
    again = PartialFC_V2(MARGINS["arc"], WIDTH, CLASSES, 0.5).double()
    saved = torch.load(folder / f"checkpoint_gpu_{rank}.pt", weights_only=True)["state_dict_softmax_fc"]
    assert list(saved) == ["weight"]
    again.load_state_dict(saved)
    assert (int(again.seed), int(again.step)) == (3, 3)
    nn.Linear(WIDTH, len(head.weight), bias=False).double().load_state_dict(saved)  # strict, as their class loads it
    return head.weight.detach(), optimizer.state[head.weight]["momentum_buffer"]


def load_of_rank(folder):
    head = PartialFC_V2(MARGINS["arc"], WIDTH, CLASSES, 0.5).double()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    wb.heads.load_insightface(folder, head, optimizer)
    return head.weight.detach(), optimizer.state[head.weight]["momentum_buffer"]


@pytest.mark.parametrize("world", [2, 3])
def test_checkpoints_are_read_on_other_numbers_of_ranks(tmp_path, world):
    saved = run_ranks(save_of_rank, world, tmp_path, timeout_s=60)
    for ranks in (1, 2, 3, 4):
        found = run_ranks(load_of_rank, ranks, tmp_path, timeout_s=60)
        for part in (0, 1):
            assert torch.equal(torch.cat([x[part] for x in found]), torch.cat([x[part] for x in saved]))


def swapped_of_rank(folder):
    """Load the other rank's classes, of which there are as many."""
    head = PartialFC_V2(MARGINS["arc"], WIDTH, 10)
    torch.save(head.state_dict(), folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    head.load_state_dict(torch.load(folder / f"{1 - dist.get_rank()}.pt", weights_only=True))
    with pytest.raises(ValueError, match="holds another rank's centers"):
        head(torch.randn(2, WIDTH), torch.tensor([0, 1]))


def test_another_ranks_classes_raise(tmp_path):
    run_ranks(swapped_of_rank, 2, tmp_path, timeout_s=60)


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


def load_all_classes_of_rank(state):
    torch.manual_seed(1)
    head = PartialFC_V2(wb.ArcFace(16.0, 0.2), 4, 7)
    head.load_state_dict(state)
    head(torch.ones(2, 4), torch.tensor([0, 6]))  # raises for another rank's classes
    return head.state_dict()["weight"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_state_dict_of_one_process_is_loaded_by_any_number(world):
    state = PartialFC_V2(wb.ArcFace(16.0, 0.2), 4, 7).state_dict()
    found = run_ranks(load_all_classes_of_rank, world, state, timeout_s=60)
    assert torch.equal(torch.cat(found), state["weight"])


def test_a_file_with_a_function_call_is_refused(tmp_path, capsys):
    torch.save({"state_dict_softmax_fc": Hostile(), "epoch": 0, "global_step": 0}, tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ValueError, match="print"):
        wb.heads.load_insightface(tmp_path, PartialFC_V2(MARGINS["arc"], WIDTH, CLASSES))
    assert capsys.readouterr().out == ""


# Optimizers.


@pytest.mark.parametrize("sparse", [True, False])
def test_dense_and_sparse_gradients_for_their_loop(sparse):
    torch.manual_seed(0)
    backbone = nn.Linear(3, WIDTH)
    head = PartialFC_V2(MARGINS["arc"], WIDTH, 1000, 0.1, sparse_grad=sparse)
    before = head.weight.detach().clone()
    kind = wb.SparseSGD if sparse else torch.optim.SGD
    params = [{"params": backbone.parameters()}, {"params": head.parameters()}]
    optimizer = kind(params, lr=0.1, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(head(backbone(torch.randn(4, 3)), torch.tensor([1, 2, 3, 4]))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    still = (head.weight.detach() == before).all(dim=1).sum()
    assert (still > 800) if sparse else (still == 0), "weight decay moves every center unless gradients are sparse"

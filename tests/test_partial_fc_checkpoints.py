"""Checkpoints of class shards are read by any number of ranks; heads that they do not fit are refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from partial_fc_data import D, adamw, sgd
from torch import nn

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


def steps_body(folder, optimizer, rate, saved_after, steps):
    """Train, then save, or load and continue; return the losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = Partition.even(10, world).rows(rank)
    head = wb.PartialFC(D, 23, margin=wb.ArcFace(10.0, 0.3), sample_rate=rate, dtype=torch.float64, seed=5)
    one = optimizer(head.parameters())
    first = 0
    if saved_after is None:
        wb.heads.load_head(folder, head, one)
        first = int(head.step)
    losses = []
    for step in range(first, first + steps):
        if step == saved_after:
            wb.heads.save_head(folder, head, one)
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(10, D, dtype=torch.float64, generator=generator)[local]
        y = torch.randint(23, (10,), generator=generator)[local]
        loss = head(x, y)
        loss.backward()
        losses.append(loss.item())
        one.step()
        one.zero_grad()
    return losses


@pytest.mark.parametrize(("optimizer", "worlds"), [(sgd, (2, 5)), (adamw, (1,))])
def test_checkpoints_of_three_ranks_go_on_with_any_number(optimizer, worlds, tmp_path):
    """The next ten losses are those of the uninterrupted run, by the same centers, momentum and samples."""
    folder = tmp_path / "head"
    losses = run_ranks(steps_body, 3, folder, optimizer, 0.4, 4, 14, timeout_s=90)[0]
    for world in worlds:
        found = run_ranks(steps_body, world, folder, optimizer, 0.4, None, 10, timeout_s=90)[0]
        assert found == pytest.approx(losses[4:], rel=1e-10), world


def test_a_checkpoint_is_not_loaded_into_other_settings(tmp_path):
    head = wb.PartialFC(4, 10)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    head(torch.randn(2, 4), torch.tensor([0, 1])).backward()
    optimizer.step()
    wb.heads.save_head(tmp_path / "a", head, optimizer)
    for other, one, message in (
        (wb.PartialFC(5, 10), None, "embeddings have 4 numbers, the head's 5"),
        (wb.PartialFC(4, 11), None, "has 10 classes, the head 11"),
        (wb.PartialFC(4, 10), wb.SparseAdamW, "the checkpoint's optimizer has"),
        (wb.PartialFC(4, 10), torch.optim.AdamW, "must be a SparseSGD or SparseAdamW, or None; got AdamW"),
    ):
        before = other.weight.detach().clone()
        with pytest.raises(ValueError, match=message):
            wb.heads.load_head(tmp_path / "a", other, one and one(other.parameters()))
        assert torch.equal(other.weight, before)
    with pytest.raises(ValueError, match=r"optimizer must be a wholebatch\.SparseSGD or SparseAdamW, .* got AdamW"):
        wb.heads.save_head(tmp_path / "c", head, torch.optim.AdamW(head.parameters()))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        wb.heads.load_head(tmp_path / "b", head)
    for other, classes, message in (
        (wb.PartialFC(4, 12), torch.arange(9), r"classes must have shape \(10,\)"),
        (wb.PartialFC(4, 12), torch.arange(10) + 3, r"classes must lie in \[0, 12\), or be -1; got 3 to 12"),
        (wb.PartialFC(4, 10, bias=True), None, "bias: the checkpoint has False, the head True"),
        (wb.PartialFC(4, 10, sub_centers=2), None, "sub-centers of a class: the checkpoint has 1, the head 2"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.heads.load_head(tmp_path / "a", other, classes=classes)


def refused_saves_body(folder):
    """Mistakes of one rank raise on all ranks; then a valid checkpoint is written and never overwritten."""
    rank = dist.get_rank()
    head = wb.PartialFC(4, 10)
    good, bad = wb.SparseSGD(head.parameters()), torch.optim.AdamW(head.parameters())
    with pytest.raises(ValueError, match=r"optimizer must be a wholebatch\.SparseSGD or SparseAdamW, .* got AdamW"):
        wb.heads.save_head(folder / "a", head, bad if rank else good)
    with pytest.raises(ValueError, match="folder must be the same on all ranks"):
        wb.heads.save_head(folder / f"a{rank}", head, good)
    with pytest.raises(ValueError, match="head must be the same on all ranks"):
        wb.heads.save_head(folder / "a", head, good if rank else None)
    with pytest.raises(ValueError, match="it lacks weight"):
        wb.heads.save_head(folder / "a", head, wb.SparseSGD(wb.PartialFC(4, 10).parameters()) if rank else good)
    other = wb.PartialFC(4, 10)
    other.first_class.fill_(rank)
    with pytest.raises(ValueError, match="the head holds another rank's centers"):
        wb.heads.save_head(folder / "a", other)
    (folder / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"file cannot be written: .*(exists|directory)"):
        wb.heads.save_head(folder / "file", head)
    wb.heads.save_head(folder / "a", head)
    with pytest.raises(ValueError, match="has a checkpoint already"):
        wb.heads.save_head(folder / "a", head)
    with pytest.raises(ValueError, match="the head holds another rank's centers"):
        wb.heads.load_head(folder / "a", other)
    with pytest.raises(ValueError, match="the checkpoint was saved without an optimizer"):
        wb.heads.load_head(folder / "a", head, good)


def test_refused_saves_raise_on_all_ranks(tmp_path):
    run_ranks(refused_saves_body, 2, tmp_path, timeout_s=60)


def damaged_body(folder):
    """Load a checkpoint with damage in a slice that only one rank needs: no rank changes."""
    head = wb.PartialFC(4, 10, seed=1)
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors is damaged or incomplete"):
        wb.heads.load_head(folder, head)
    assert torch.equal(head.weight, before)


def saved_body(folder):
    wb.heads.save_head(folder, wb.PartialFC(4, 10))


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    run_ranks(saved_body, 2, tmp_path / "a", timeout_s=60)
    (file,) = (tmp_path / "a").glob("rank-00001-*")
    file.write_bytes(file.read_bytes()[:40])
    run_ranks(damaged_body, 2, tmp_path / "a", timeout_s=60)


def foreign_body(folder):
    """Mix two saves with the same shapes: the index of one with a file of the other."""
    head, other = wb.PartialFC(4, 10), wb.PartialFC(4, 10, seed=1)
    saves = [wb.heads.save_head(folder / name, one) for name, one in (("a", head), ("b", other))]
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("a", "b"):
            (folder / name / "rank-00001-of-00002.safetensors").rename(folder / f"{name}1")
        (folder / "b1").rename(folder / "a" / "rank-00001-of-00002.safetensors")
        (folder / "b" / "rank-00001-of-00002.safetensors").symlink_to(folder / "a1")
    dist.barrier()
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors belongs to another save") as error:
        wb.heads.load_head(folder / "a", head)
    assert saves[0] in str(error.value)
    assert saves[1] in str(error.value)
    with pytest.raises(ValueError, match=r"rank-00001-of-00002\.safetensors is a link"):
        wb.heads.load_head(folder / "b", head)
    assert torch.equal(head.weight, before)
    return saves


def test_files_of_another_save_are_refused(tmp_path):
    first, second = run_ranks(foreign_body, 2, tmp_path, timeout_s=60)
    assert first == second, "the ids are the same on all ranks"
    assert first[0] != first[1]


def test_a_save_is_checked_by_its_id(tmp_path):
    head = wb.PartialFC(4, 10)
    first, second = (wb.heads.save_head(tmp_path / name, head) for name in "ab")
    wb.heads.load_head(tmp_path / "a", head, save_id=first)
    with pytest.raises(ValueError, match=f"a belongs to another save: expected {second}, got {first}"):
        wb.heads.load_head(tmp_path / "a", head, save_id=second)
    with pytest.raises(ValueError, match="save_id must be an id that save_head has returned, or None; got 5"):
        wb.heads.load_head(tmp_path / "a", head, save_id=5)
    for load in (wb.heads.save_head, wb.heads.load_head, wb.heads.load_insightface):
        with pytest.raises(ValueError, match=r"head must be a wholebatch\.PartialFC, got Linear"):
            load(tmp_path / "a", nn.Linear(4, 10))


def test_folders_of_distributed_checkpoints_are_not_read(tmp_path):
    """Reading them would need pickle."""
    from torch.distributed.checkpoint import save

    head = wb.PartialFC(4, 10)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"weight/000000000000": head.weight.detach()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"is a folder of torch\.distributed\.checkpoint .* save the head again"):
        wb.heads.load_head(tmp_path, head)
    with pytest.raises(ValueError, match=r"has a checkpoint already, \.metadata"):
        wb.heads.save_head(tmp_path, head)


def test_running_averages_of_a_margin_are_part_of_a_checkpoint(tmp_path):
    heads = [wb.PartialFC(4, 10, margin=wb.AdaFace()) for _ in range(2)]
    heads[0](torch.randn(3, 4), torch.tensor([0, 1, 2]))
    wb.heads.save_head(tmp_path / "a", heads[0])
    wb.heads.load_head(tmp_path / "a", heads[1])
    assert heads[0].margin.mean != 20.0
    assert torch.equal(heads[1].margin.mean, heads[0].margin.mean)
    with pytest.raises(ValueError, match="buffers of the margin"):
        wb.heads.load_head(tmp_path / "a", wb.PartialFC(4, 10))


def merged_body(folder, classes):
    head = wb.PartialFC(4, 9, bias=True)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    wb.heads.load_head(folder, head, optimizer, classes=classes)
    state = optimizer.state[head.weight]["momentum_buffer"]
    return head.weight.detach(), head.bias.detach(), state


def test_classes_can_be_added_removed_and_joined(tmp_path):
    """With ten classes, 2 and 3 become one, 5 is removed, and the last is new; on one rank and on two."""
    head = wb.PartialFC(4, 10, bias=True)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    head(torch.randn(2, 4), torch.tensor([0, 1])).backward()
    optimizer.step()
    wb.heads.save_head(tmp_path / "a", head, optimizer)
    old = head.weight.detach(), head.bias.detach(), optimizer.state[head.weight]["momentum_buffer"]
    new = wb.PartialFC(4, 9, bias=True).weight.detach()
    classes = torch.tensor([0, 1, 2, 2, 3, -1, 4, 5, 6, 7])
    for world in (1, 2):
        found = run_ranks(merged_body, world, tmp_path / "a", classes, timeout_s=60)
        for x, was in zip((torch.cat(parts) for parts in zip(*found, strict=True)), old, strict=True):
            assert torch.equal(x[[0, 1, 3, 4, 5, 6, 7]], was[[0, 1, 4, 6, 7, 8, 9]])
            assert_same(x[2], was[2:4].mean(0), relative=1e-6)
            assert torch.equal(x[8], new[8] if x.shape == new.shape and was is old[0] else torch.zeros_like(x[8]))
    several = wb.PartialFC(4, 10, sub_centers=2)
    wb.heads.save_head(tmp_path / "b", several)
    with pytest.raises(ValueError, match="classes must map no two classes to one for a head with sub-centers"):
        wb.heads.load_head(tmp_path / "b", wb.PartialFC(4, 9, sub_centers=2), classes=classes)
    wb.heads.load_head(tmp_path / "b", several, classes=torch.arange(10).flip(0))


def export_body():
    head = wb.PartialFC(3, 2500, seed=2)
    whole = head.full_weight(root=1)
    assert (whole is None) == (dist.get_rank() != 1)
    return whole


def test_the_whole_classifier_is_the_same_for_any_number_of_ranks():
    alone = wb.PartialFC(3, 2500, seed=2).full_weight()
    assert torch.equal(run_ranks(export_body, 3, timeout_s=60)[1], alone)
    assert len(alone.unique(dim=0)) == 2500, "no two ranks start with the same centers"


def insightface_body(folder):
    head = wb.PartialFC(4, 11)
    optimizer = wb.SparseSGD(head.parameters())
    wb.heads.load_insightface(folder, head, optimizer if (folder / "rank_0_softmax_weight_mom.pt").exists() else None)
    return head.weight.detach(), optimizer.state[head.weight].get("momentum_buffer")


def test_shards_of_insightface_are_read(tmp_path):
    """Read the shards of three ranks on one and on two."""
    whole, momentum = torch.randn(11, 4), torch.randn(11, 4)
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
    for rank in range(3):
        rows = Partition.even(11, 3).rows(rank)
        torch.save(whole[rows].clone(), tmp_path / "1" / f"rank_{rank}_softmax_weight.pt")
        torch.save(momentum[rows].clone(), tmp_path / "1" / f"rank_{rank}_softmax_weight_mom.pt")
        torch.save({"weight": whole[rows].clone()}, tmp_path / "2" / f"softmax_fc_gpu_{rank}.pt")
    for world in (1, 2):
        for version in ("1", "2"):
            found = run_ranks(insightface_body, world, tmp_path / version, timeout_s=60)
            assert torch.equal(torch.cat([weight for weight, _ in found]), whole)
            if version == "1":
                assert torch.equal(torch.cat([of_rank for _, of_rank in found]), momentum)
    for other, message in ((wb.PartialFC(4, 12), "have 11 classes"), (wb.PartialFC(5, 11), r"of \[4\] numbers")):
        with pytest.raises(ValueError, match=message):
            wb.heads.load_insightface(tmp_path / "2", other)
    head = wb.PartialFC(4, 11)
    with pytest.raises(ValueError, match=r"files like softmax_fc_gpu_0\.pt hold no momentum; leave the optimizer out"):
        wb.heads.load_insightface(tmp_path / "2", head, wb.SparseSGD(head.parameters()))
    (tmp_path / "2" / "softmax_fc_gpu_1.pt").unlink()
    with pytest.raises(ValueError, match=r"those of \[1\] are missing"):
        wb.heads.load_insightface(tmp_path / "2", wb.PartialFC(4, 11))


def of_train_v2(rank, whole, momentum, step=40):
    """Return the state that insightface's train_v2.py saves on one of three ranks."""
    rows = Partition.even(11, 3).rows(rank)
    backbone, weight = nn.Linear(3, 4), nn.Parameter(whole[rows].clone())
    optimizer = torch.optim.SGD([{"params": backbone.parameters()}, {"params": [weight]}], lr=0.1, momentum=0.9)
    for p in (*backbone.parameters(), weight):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[weight]["momentum_buffer"] = momentum[rows].clone()
    head = nn.Module()
    head.weight = weight
    return {
        "epoch": 2, "global_step": step, "state_dict_backbone": backbone.state_dict(),
        "state_dict_softmax_fc": head.state_dict(), "state_optimizer": optimizer.state_dict(),
        "state_lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
    }  # fmt: skip


def train_v2_body(folder):
    head = wb.PartialFC(4, 11)
    optimizer = wb.SparseSGD(head.parameters(), momentum=0.9)
    wb.heads.load_insightface(folder, head, optimizer)
    return head.weight.detach(), optimizer.state[head.weight]["momentum_buffer"]


def test_checkpoints_of_insightfaces_train_v2_are_read(tmp_path):
    """Read the files of three ranks on one and on two; then refuse files that do not belong together."""
    whole, momentum = torch.randn(11, 4), torch.randn(11, 4)
    for rank in range(3):
        torch.save(of_train_v2(rank, whole, momentum), tmp_path / f"checkpoint_gpu_{rank}.pt")
    for world in (1, 2):
        found = run_ranks(train_v2_body, world, tmp_path, timeout_s=60)
        assert torch.equal(torch.cat([weight for weight, _ in found]), whole)
        assert torch.equal(torch.cat([of_rank for _, of_rank in found]), momentum)
    head = wb.PartialFC(4, 11)
    before = head.weight.detach().clone()
    for optimizer, message in (
        (torch.optim.Adagrad(head.parameters()), r"optimizer must be a wholebatch\.SparseSGD or SparseAdamW, a torch"),
        (wb.SparseSGD(wb.PartialFC(4, 11).parameters()), r"optimizer must have head\.parameters"),
        (wb.SparseAdamW(head.parameters()), "must hold the classifier's exp_avg of AdamW"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.heads.load_insightface(tmp_path, head, optimizer)
    last = tmp_path / "checkpoint_gpu_2.pt"
    last.rename(tmp_path / "other")
    torch.save(of_train_v2(2, whole, momentum, step=80), last)
    with pytest.raises(ValueError, match=r"checkpoint_gpu_2\.pt is of epoch and step \(2, 80\), .* of different saves"):
        wb.heads.load_insightface(tmp_path, head)
    (tmp_path / "checkpoint_gpu_0.pt").rename(last)
    (tmp_path / "other").rename(tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ValueError, match=r"checkpoint_gpu_0\.pt was saved as checkpoint_gpu_2\.pt: another rank's"):
        wb.heads.load_insightface(tmp_path, head)
    torch.save({"state_dict_softmax_fc": {}}, tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ValueError, match=r"checkpoint_gpu_0\.pt must hold the classifier's weight"):
        wb.heads.load_insightface(tmp_path, head)
    assert torch.equal(head.weight, before)


ADAMW = {
    "torch": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sparse": lambda p: wb.SparseAdamW(p, lr=0.1),
}


def with_adamw(rank, world, steps, amsgrad=False):
    """Return weights, and the state that train_v2.py saves with AdamW on one of `world` ranks after dense steps."""
    rows = Partition.even(11, world).rows(rank)
    backbone, weight = nn.Linear(3, 4), nn.Parameter(torch.ones(11, 4)[rows])
    groups = [{"params": backbone.parameters()}, {"params": [weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=amsgrad)
    for step in range(steps):
        for p in backbone.parameters():
            p.grad = torch.ones_like(p)
        weight.grad = torch.randn(11, 4, generator=torch.Generator().manual_seed(step))[rows]
        optimizer.step()
    return weight.detach(), {
        "epoch": 1, "global_step": steps, "state_dict_softmax_fc": {"weight": weight.detach()},
        "state_optimizer": optimizer.state_dict(),
    }  # fmt: skip


def adamw_body(folder, kind):
    """Continue from the files with a step that is the same for any number of ranks."""
    head, backbone = wb.PartialFC(4, 11), nn.Linear(3, 4)
    optimizer = ADAMW[kind]([{"params": backbone.parameters()}, {"params": head.parameters()}])
    if kind != "sparse":  # the state of another rank's classes, and of the backbone
        optimizer.load_state_dict(torch.load(folder / "checkpoint_gpu_0.pt")["state_optimizer"])
    wb.heads.load_insightface(folder, head, optimizer)
    head.weight.grad = torch.randn(11, 4, generator=torch.Generator().manual_seed(5))[head.local_classes]
    optimizer.step()
    return head.weight.detach()


@pytest.mark.parametrize("kind", ADAMW)
def test_averages_of_adamw_are_read_on_any_number_of_ranks(tmp_path, kind):
    """Saved by train_v2.py on three ranks, after five steps: the sixth is that of the run that goes on."""
    for rank in range(3):
        torch.save(with_adamw(rank, 3, 5, kind == "amsgrad")[1], tmp_path / f"checkpoint_gpu_{rank}.pt")
    true = with_adamw(0, 1, 6, kind == "amsgrad")[0]
    for world in (1, 2, 4):
        found = torch.cat(run_ranks(adamw_body, world, tmp_path, kind, timeout_s=60))
        assert (found - true).abs().max() < 1e-6
    head = wb.PartialFC(4, 11)
    with pytest.raises(ValueError, match="must hold the classifier's momentum_buffer of SGD"):
        wb.heads.load_insightface(tmp_path, head, wb.SparseSGD(head.parameters(), momentum=0.9))
    first = tmp_path / "checkpoint_gpu_0.pt"
    content = torch.load(first)
    nested = ()
    for _ in range(60):  # a few bytes in the file; its text would have 2^60 parts
        nested = nested, nested
    for steps, message in (
        (nested, r"number of the optimizer's steps, got \(\(\("),
        (7, r"is of step 5 of the optimizer, checkpoint_gpu_0\.pt of 7"),
        ("x", "number of the optimizer's steps, got 'x'"),
    ):
        content["state_optimizer"]["state"][2]["step"] = steps
        torch.save(content, first)
        with pytest.raises(ValueError, match=message):
            wb.heads.load_insightface(tmp_path, head, ADAMW[kind](head.parameters()))


SHARED = {
    "sgd": lambda p: wb.SparseSGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: wb.SparseAdamW(p, lr=0.01),
}


def with_one_optimizer(kind, folder, first, last, save=False):
    """Train a backbone and a head by one optimizer; return the weights at the end."""
    torch.manual_seed(0)
    backbone, world = nn.Linear(6, 4).double(), dist.get_world_size() if dist.is_initialized() else 1
    model = nn.parallel.DistributedDataParallel(backbone) if dist.is_initialized() else backbone
    head = wb.PartialFC(4, 7, margin=wb.ArcFace(8.0, 0.2), dtype=torch.float64)
    optimizer = SHARED[kind]([*backbone.parameters(), *head.parameters()])
    if first:
        others = torch.load(folder / "others.pt")
        backbone.load_state_dict(others["backbone"])
        optimizer.load_state_dict(others["optimizer"])
        wb.heads.load_head(folder / "head", head, optimizer, save_id=others["save_id"])
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(7, (12,), generator=generator)
        head(model(x[rank::world]), y[rank::world]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        save_id = wb.heads.save_head(folder / "head", head, optimizer)
        if rank == 0:
            others = {"backbone": backbone.state_dict(), "optimizer": optimizer.state_dict(), "save_id": save_id}
            torch.save(others, folder / "others.pt")
    return backbone.weight.detach(), head.weight.detach()


@pytest.mark.parametrize("kind", SHARED)
def test_one_optimizer_of_backbone_and_head_goes_on_with_any_number_of_ranks(tmp_path, kind):
    """Rank 0's state_dict of the optimizer has other rows than the classes of a rank that loads it."""
    run_ranks(with_one_optimizer, 2, kind, tmp_path, 0, 5, True, timeout_s=60)
    backbone, centers = with_one_optimizer(kind, tmp_path, 0, 10)
    without = with_one_optimizer(kind, tmp_path, 0, 5)[0]
    assert (without - backbone).abs().max() > 1e-3
    for world in (1, 2, 3):
        found = run_ranks(with_one_optimizer, world, kind, tmp_path, 5, 10, timeout_s=60)
        assert all((weight - backbone).abs().max() < 1e-12 for weight, _ in found)
        assert (torch.cat([rows for _, rows in found]) - centers).abs().max() < 1e-12

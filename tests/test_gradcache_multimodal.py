"""Texts with images: a chunk has the images of its rows, and the gradient is that of the whole batch."""

import copy
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from gradcache_models import OUT, assert_all_same, batch, good_loss, gradients_of, gradients_of_kept, mlp, sharded
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.inputs.image_counts import RowItems, counted
from wholebatch.testing import run_ranks

IMAGE, VIDEO, D = 18, 19, 5
IMAGES = (0, 2, 1, 0, 1, 3, 0, 1)  # of each row
SPLIT = wb.gradcache.MultimodalSplit(image_token_id=IMAGE, video_token_id=VIDEO)


class Reader(nn.Module):
    """A model of texts and images in the form of Qwen2-VL: pixels replace the image tokens of input_ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.patches, self.out = nn.Embedding(20, 6), nn.Linear(D, 6), nn.Linear(6, OUT)
        self.double()
        self.seen = []

    def seen_as(self, pixels, grid):
        """Return one vector for each token of an image, the mean of 2 x 2 patches, weighted by their place."""
        assert grid.prod(1).sum() == len(pixels)
        x = self.patches(pixels)
        parts = x.split(grid.prod(1).tolist())
        parts = [part * torch.arange(1, len(part) + 1, dtype=part.dtype)[:, None] for part in parts]
        return torch.cat(parts).unflatten(0, (-1, 4)).mean(1)

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids=None,
        pixel_values=None,
        image_grid_thw=None,
        pixel_values_videos=None,
        video_grid_thw=None,
        second_per_grid_ts=None,
    ):
        self.seen.append((*input_ids.shape, None if pixel_values is None else len(pixel_values)))
        x = self.words(input_ids)
        if pixel_values is not None:
            x = x.masked_scatter((input_ids == IMAGE)[..., None], self.seen_as(pixel_values, image_grid_thw))
        if pixel_values_videos is not None:
            times = torch.as_tensor(second_per_grid_ts, dtype=torch.float64)
            found = self.seen_as(pixel_values_videos, video_grid_thw)
            each = times.repeat_interleave(video_grid_thw.prod(1) // 4)[:, None]
            x = x.masked_scatter((input_ids == VIDEO)[..., None], found * each)
        if position_ids is not None:
            x = x * position_ids.sum(0)[..., None].cos()
        mask = attention_mask[..., None].double()
        return self.out((x.tanh() * mask).sum(1))


def inputs(images=IMAGES, videos=None, seed=0, side="right"):
    """Return a batch with so many images (and videos) in each row, and words around them."""
    generator = torch.Generator().manual_seed(seed)

    def grids(count):
        sides = 2 * torch.randint(1, 3, (count, 2), generator=generator)
        return torch.cat([torch.randint(1, 3, (count, 1), generator=generator), sides], 1)

    found, rows = {}, [[] for _ in images]
    for token, counts, pixels, grid in (
        (IMAGE, images, "pixel_values", "image_grid_thw"),
        (VIDEO, videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if counts is None:
            continue
        found[grid] = grids(sum(counts))
        tokens = iter((found[grid].prod(1) // 4).tolist())
        for row, count in zip(rows, counts, strict=True):
            for _ in range(count):
                row += [1, *[token] * next(tokens), 2]
        found[pixels] = torch.randn(int(found[grid].prod(1).sum()), D, dtype=torch.float64, generator=generator)
    if videos is not None:
        found["second_per_grid_ts"] = [0.5 + number for number in range(sum(videos))]
    for number, row in enumerate(rows):
        row += torch.randint(3, 18, (1 + number % 4,), generator=generator).tolist()
    length = max(map(len, rows), default=3) + 1
    filled = [row + [0] * (length - len(row)) if side == "right" else [0] * (length - len(row)) + row for row in rows]
    ids = torch.tensor(filled, dtype=torch.long).reshape(len(rows), length)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **found}


def true_of(model, other, whole, y):
    expected = good_loss(model(**whole), other(y))
    expected.backward()
    model.seen.clear()
    return expected.detach(), gradients_of(model, other)


@pytest.mark.parametrize("keep", [0, 2, 1.0])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [1, 3, 8, wb.gradcache.TokenBudget(30), wb.gradcache.TokenBudget(9)], ids=str)
def test_the_gradient_is_that_of_the_whole_batch(size, side, keep):
    model, other, whole, (y, _) = Reader(), mlp(1), inputs(side=side), batch(8)
    expected, true = true_of(model, other, whole, y)
    for given in (whole, UserDict(whole), [whole]):
        encode = (lambda x: model(**x)) if given is not whole else model
        step = wb.GradCache([encode, other], size, good_loss, SPLIT, keep_graphs=keep)
        if isinstance(size, wb.gradcache.TokenBudget):
            step = wb.GradCache([encode, other], [size, 3], good_loss, SPLIT, keep_graphs=keep)
        loss = step(given, y)
        assert_same(loss, expected, relative=1e-12)
        assert_all_same(gradients_of(model, other), true)
    if size == 1:
        assert any(patches is None for *_, patches in model.seen), "chunks without an image get no pixels"


@pytest.mark.planted
def test_images_of_another_row_would_be_wrong():
    """A naive chunk with the first pixels that fit would have another gradient."""
    model, other, whole, (y, _) = Reader(), mlp(1), inputs((1,) * 6), batch(6)
    whole["image_grid_thw"] = torch.tensor([[1, 2, 2]] * 6)
    whole["pixel_values"] = torch.randn(24, D, dtype=torch.float64)
    whole["input_ids"] = torch.tensor([[1, IMAGE, n] for n in range(3, 9)])
    whole["attention_mask"] = torch.ones(6, 3)
    expected, true = true_of(model, other, whole, y)

    def naive(x, size):
        if isinstance(x, torch.Tensor):
            return [*x.split(size)]
        rows = [slice(k, k + size) for k in range(0, 6, size)]
        return [{name: z[:8] if name == "pixel_values" else z[at] for name, z in x.items()} for at in rows]

    for split, right in ((SPLIT, True), (naive, False)):
        loss = wb.GradCache([model, other], 2, good_loss, split)(whole, y)
        assert (abs(loss - expected).item() < 1e-12) is right
        away = max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients_of(model, other), true, strict=True))
        assert away < 1e-10 if right else away > 0.01


@pytest.mark.parametrize("size", [1, 3, wb.gradcache.TokenBudget(30)], ids=str)
@pytest.mark.parametrize("times", ["list", "tensor"])
def test_videos_and_positions_of_three_axes(times, size):
    model, other, (y, _) = Reader(), mlp(1), batch(6)
    whole = inputs((1, 0, 2, 0, 0, 1), (0, 1, 1, 0, 2, 0))
    if times == "tensor":
        whole["second_per_grid_ts"] = torch.tensor(whole["second_per_grid_ts"], dtype=torch.float64)
    length = whole["input_ids"].shape[1]
    whole["position_ids"] = torch.arange(3 * 6 * length).reshape(3, 6, length)
    _, true = true_of(model, other, whole, y)
    wb.GradCache([model, other], [size, 3], good_loss, SPLIT)(whole, y)
    assert_all_same(gradients_of(model, other), true)


class Gridless(nn.Module):
    """A model in the form of LLaVA: each image has two tokens, and sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.pixels, self.out = nn.Embedding(20, 6), nn.Linear(12, 12), nn.Linear(6, OUT)
        self.double()

    def forward(self, input_ids, attention_mask, pixel_values=None, image_sizes=None, crops=None):
        x = self.words(input_ids)
        if pixel_values is not None:
            found = self.pixels(pixel_values.flatten(1)) * image_sizes.sum(1, keepdim=True).double().log()
            if crops is not None:
                found = found * crops[:, None]
            x = x.masked_scatter((input_ids == IMAGE)[..., None], found.unflatten(1, (2, 6)).flatten(0, 1))
        return self.out((x.tanh() * attention_mask[..., None].double()).sum(1))


def gridless(images=IMAGES):
    torch.manual_seed(3)
    longest = 4 * max(images, default=0) + 3
    ids = torch.zeros(len(images), longest, dtype=torch.long)
    for row, count in zip(ids, images, strict=True):
        words = [1, *[IMAGE, IMAGE, 2] * count, 5]
        row[: len(words)] = torch.tensor(words)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(sum(images), 3, 2, 2, dtype=torch.float64),
        "image_sizes": torch.randint(2, 9, (sum(images), 2)),
    }


COUNTED = {
    "by tokens": ({"image_token_id": IMAGE}, IMAGES),
    "by a tensor": ({"images_per_row": "num_images"}, IMAGES),
    "one each": ({}, (1,) * 8),
}


@pytest.mark.parametrize("how", COUNTED)
@pytest.mark.parametrize("size", [1, 3, wb.gradcache.TokenBudget(20)], ids=str)
def test_processors_with_one_row_for_each_image(size, how):
    options, images = COUNTED[how]
    model, other, whole, (y, _) = Gridless(), mlp(1), gridless(images), batch(8)
    whole["crops"] = torch.arange(1.0, 1 + sum(images), dtype=torch.float64)
    good_loss(model(**whole), other(y)).backward()
    true = gradients_of(model, other)
    split = wb.gradcache.MultimodalSplit(**options, per_image=["crops"])
    given = whole | ({"num_images": torch.tensor(images)} if how == "by a tensor" else {})
    wb.GradCache([model, other], [size, 3], good_loss, split)(given, y)
    assert_all_same(gradients_of(model, other), true)


def test_inputs_without_pixels_are_split_as_usual():
    model, other, whole, (y, _) = Reader(), mlp(1), inputs(), batch(8)
    texts = {name: whole[name] for name in ("input_ids", "attention_mask")}
    _, true = true_of(model, other, texts, y)
    for size in (3, wb.gradcache.TokenBudget(20)):
        wb.GradCache([model, other], [size, 3], good_loss, SPLIT)(texts, y)
        assert_all_same(gradients_of(model, other), true)


def test_chunks_are_cut_when_they_are_needed_and_keep_the_containers():
    whole = UserDict(inputs())
    chunks = SPLIT(whole, 3)
    assert [type(chunk.tree) for chunk in chunks] == [UserDict] * 3
    assert [len(chunk.tree["input_ids"]) for chunk in chunks] == [3, 3, 2]
    pixels = chunks[0].tree["pixel_values"]
    assert pixels.data_ptr() == whole["pixel_values"].data_ptr(), "rows in order are a view"
    assert chunks[0].tree is not chunks[0].tree
    nothing = chunks[0].emptied().tree
    assert nothing["input_ids"].shape == (0, whole["input_ids"].shape[1])
    assert "pixel_values" not in nothing
    assert "image_grid_thw" not in nothing


def test_numbers_of_images_and_patches():
    items = RowItems((0, 2, 1), (4, 8, 2))
    assert items.numbers([2, 1]) == [2, 0, 1]
    assert items.patch_numbers([2, 0]) == [12, 13]
    assert items.patch_numbers([]) == []
    assert RowItems((1, 1)).patch_numbers([1]) == [1]
    assert counted([0, 6, 4, 0], [2, 4, 4]) == (0, 2, 1, 0)
    assert counted([], []) == ()


def counts_of(rank):
    """Return the images of the rows of a rank: uneven, and none on one of three."""
    return [(2, 0, 1, 1, 3), (0, 0), ()][rank]


def concatenated(parts):
    length = max(part["input_ids"].shape[1] for part in parts)
    found = {}
    for name in ("input_ids", "attention_mask"):
        found[name] = torch.cat([nn.functional.pad(part[name], (0, length - part[name].shape[1])) for part in parts])
    for name in ("pixel_values", "image_grid_thw"):
        found[name] = torch.cat([part[name] for part in parts])
    return found


def ranks_body(engine, keep, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [inputs(counts_of(r), seed=r) for r in range(world)]
    ys = [batch(len(counts_of(r)), seed=r)[0] for r in range(world)]
    plain, other = Reader(), mlp(1)
    alone, alone_other = copy.deepcopy((plain, other))

    def loss_of(a, b, clip_loss=wb.functional.clip_loss):
        return clip_loss(normalize(a, dim=1), normalize(b, dim=1), 3.0)

    expected = loss_of(alone(**concatenated(parts)), alone_other(torch.cat(ys)), wb.reference.clip_loss)
    expected.backward()
    if engine == "fsdp" and world > 1:
        refused = wb.GradCache([sharded(plain, plain.words), sharded(other)], [size, 2], loss_of, SPLIT)
        with pytest.raises(
            ValueError, match=r"chunk \d of model 0 holds \[.*\] on ranks 0, 1, \.\.\.: the layers that"
        ):
            refused(parts[rank], ys[rank])
        return True
    if engine == "ddp":
        models = [DistributedDataParallel(module) for module in (plain, other)]
    else:
        models = [sharded(plain, plain.words), sharded(other)]
    step = wb.GradCache(models, [size, 2], loss_of, SPLIT, keep_graphs=keep)
    local = {name: x for name, x in parts[rank].items() if len(x) or name in ("input_ids", "attention_mask")}
    for _ in range(2):
        assert_same(step(local, ys[rank]), expected.detach(), relative=1e-12)
        found = [z.full_tensor() if hasattr(z, "full_tensor") else z for z in gradients_of(plain, other)]
        assert_all_same(found, gradients_of_kept(alone, alone_other))
    return True


@pytest.mark.parametrize("size", [2, wb.gradcache.TokenBudget(20)], ids=str)
@pytest.mark.parametrize(
    ("world", "engine", "keep"), [(1, "ddp", 1), (2, "ddp", 0), (3, "ddp", 1), (1, "fsdp", 1), (3, "fsdp", 0)]
)
def test_on_ranks_with_and_without_images(world, engine, keep, size):
    """Rank 1 has texts alone, rank 2 no rows: DDP gets zeros for the gradients of their image towers, FSDP2 refuses."""
    assert all(run_ranks(ranks_body, world, engine, keep, size, timeout_s=120))


def fsdp_body(keep):
    """With an image in each row, and as many chunks on all ranks, FSDP2 has the gradient of the whole batch."""
    rank = dist.get_rank()
    parts, ys = [inputs((1,) * 5, seed=r) for r in range(2)], [batch(5, seed=r)[0] for r in range(2)]
    plain, other = Reader(), mlp(1)
    alone, alone_other = copy.deepcopy((plain, other))
    wb.reference.clip_loss(alone(**concatenated(parts)), alone_other(torch.cat(ys)), 1.0).backward()
    models = [sharded(plain, plain.words, plain.patches), sharded(other)]
    wb.GradCache(models, 2, good_loss, SPLIT, keep_graphs=keep)(parts[rank], ys[rank])
    found = [z.full_tensor() for z in gradients_of(plain, other)]
    assert_all_same(found, gradients_of_kept(alone, alone_other))


@pytest.mark.parametrize("keep", [0, 1])
def test_under_fsdp_with_images_on_all_ranks(keep):
    run_ranks(fsdp_body, 2, keep, timeout_s=60)


def changed(**items):
    return {name: x for name, x in (inputs() | items).items() if x is not None}


def take_step(given, size=3, **options):
    split = wb.gradcache.MultimodalSplit(**({"image_token_id": IMAGE} | options))
    model = Reader()
    return wb.GradCache([lambda **x: model(x["input_ids"], x["attention_mask"])], size, lambda x: x.sum(), split)(given)


MISTAKES = {
    "truncated": (
        lambda: take_step(changed(input_ids=inputs()["input_ids"][:, :6], attention_mask=torch.ones(8, 6))),
        r"row 1 has 3 image tokens, and the next images, from number 0 of 8 on, take \[2, 2, 4\], \.\.\.: is the text",
    ),
    "another token": (
        lambda: take_step(inputs(), image_token_id=17_000),
        r"the rows have tokens of 0 images, and there are 8 images: is image_token_id= that of the model's config",
    ),
    "another merge_size": (
        lambda: take_step(inputs(), merge_size=1),
        r"row 1 has \d+ image tokens, and the next images, .* or merge_size= or image_token_id= not the model's\?",
    ),
    "a merge_size that does not divide": (
        lambda: take_step(inputs(), merge_size=3),
        r"image 0 has \d+ patches, not a multiple of merge_size\^2 = 9",
    ),
    "patches": (
        lambda: take_step(changed(pixel_values=inputs()["pixel_values"][:-1])),
        r"pixel_values must have the patches of image_grid_thw, \d+ for 8 images; got \d+ rows",
    ),
    "a grid of floats": (
        lambda: take_step(changed(image_grid_thw=torch.ones(8, 3))),
        r"image_grid_thw must hold integers of shape \(images, 3\), got \(8, 3\) of torch.float32",
    ),
    "one each": (
        lambda: take_step(inputs((0, 2, 2)), image_token_id=None),
        "has 4 images and 3 rows: to count the images of each row give image_token_id= ",
    ),
    "a count that is missing": (
        lambda: take_step(inputs(), images_per_row="num_images"),
        "images_per_row names 'num_images', which must be a tensor of 8 integers, .* 8 together; got None",
    ),
    "counts": (
        lambda: take_step(changed(num_images=torch.ones(8, dtype=torch.long) * 2), images_per_row="num_images"),
        r"for each row the number of its images, 8 together; got \[2, 2, 2, 2, 2, 2, 2, 2\], together 16",
    ),
    "sizes": (
        lambda: take_step(gridless() | {"image_sizes": torch.ones(5, 2)}),
        "must have one number of images, got pixel_values with 8, image_sizes with 5",
    ),
    "tokens of gridless images": (
        lambda: take_step(
            gridless((1, 2))
            | {"input_ids": torch.tensor([[IMAGE] * 4 + [1], [IMAGE] * 3 + [2, 2]]), "attention_mask": torch.ones(2, 5)}
        ),
        "has 7 image tokens and 3 images, which so have not the same number of tokens: give images_per_row=",
    ),
    "another tensor": (
        lambda: take_step(changed(crops=torch.ones(5))),
        r"'crops' of .* has 5 rows, and there are 8 texts and 8 images: if it has a row for each image, name",
    ),
    "no rows": (
        lambda: take_step({"pixel_values": torch.ones(3, 2)}),
        r"must hold input_ids, an attention_mask or inputs_embeds, .* got \['pixel_values'\]",
    ),
    "two inputs": (lambda: take_step({"a": inputs(), "b": inputs()}), "must have one 'input_ids', got a.input_ids, b."),
    "texts": (lambda: take_step(changed(texts=["a"] * 8)), "holds a list of 8 things that are no tensors"),
    "no mask": (
        lambda: take_step(changed(attention_mask=None), wb.gradcache.TokenBudget(9)),
        "and the input of a MultimodalSplit must hold one tensor of this name, got 0",
    ),
    "a graph": (
        lambda: take_step(changed(pixel_values=2 * inputs()["pixel_values"].requires_grad_())),
        "the input of a MultimodalSplit has a graph",
    ),
}


def mistakes_body():
    """The last rank makes a mistake, and all raise."""
    for call, message in MISTAKES.values():
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(ValueError, match=message):
            call() if last else take_step(inputs())


@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_that_do_not_add_up_raise_on_all_ranks(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_token_id": "<image>"}, "image_token_id must be an integer .* a token of input_ids; got '<image>'"),
        ({"merge_size": 0}, "merge_size must be a positive integer"),
        ({"images_per_row": torch.ones(3)}, "images_per_row must be the name of a tensor in the input, got Tensor"),
        ({"per_image": "crops"}, "per_image must be a list of names of tensors in the input, got 'crops'"),
        ({"per_video": [1]}, r"per_video must be a list of names of tensors in the input, got \[1\]"),
    ],
)
def test_a_wrong_setting_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        wb.gradcache.MultimodalSplit(**options)

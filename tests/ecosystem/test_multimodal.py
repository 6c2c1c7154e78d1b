"""Gradient caching with vision language models of transformers, whose pixels do not have the batch's rows.

    make ecosystem

Models are small, with random weights, in float64. The reference is one call of the whole padded batch.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # these libraries warn of each other's deprecations

IMAGE, VIDEO, START, END, WORDS = 95, 94, 93, 92, 90
IMAGES = (0, 2, 1, 0, 1, 3, 1)  # of each row
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def qwen2():
    from transformers import Qwen2VLConfig, Qwen2VLModel

    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return Qwen2VLModel(Qwen2VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


def qwen25():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


QWENS = {"Qwen2-VL": qwen2, "Qwen2.5-VL": qwen25}


def made(model):
    """Return the model in float64 with weights from a seed."""
    torch.manual_seed(0)
    found = QWENS[model]().double().train()
    for p in found.parameters():
        nn.init.normal_(p, std=0.2)
    return found


def inputs(images=IMAGES, seed=0, side="right"):
    """Return a batch as Qwen's processors do, with so many images in each row."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(images)
    grid = torch.cat([torch.ones(count, 1).long(), 2 * torch.randint(1, 4, (count, 2), generator=generator)], 1)
    tokens, rows = iter((grid.prod(1) // 4).tolist()), []
    for number, of_row in enumerate(images):
        row = torch.randint(1, WORDS, (1 + number % 3,), generator=generator).tolist()
        for _ in range(of_row):
            row += [START, *[IMAGE] * next(tokens), END]
        rows.append(row + torch.randint(1, WORDS, (2 + number % 4,), generator=generator).tolist())
    length = max(map(len, rows), default=4)
    filled = [row + [0] * (length - len(row)) if side == "right" else [0] * (length - len(row)) + row for row in rows]
    ids = torch.tensor(filled, dtype=torch.long).reshape(len(rows), length)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 16, dtype=torch.float64, generator=generator),
        "image_grid_thw": grid,
    }


class Pooled(nn.Module):
    """Average the last states over the tokens, or take the last token's."""

    def __init__(self, inner, *, last=False):
        super().__init__()
        self.inner, self.last, self.lengths = inner, last, []

    def forward(self, attention_mask, **features):
        self.lengths.append(attention_mask.shape[1])
        states = self.inner(attention_mask=attention_mask, **features).last_hidden_state
        if self.last:
            return states[:, -1]
        mask = attention_mask[..., None].double()
        return (states * mask).sum(1) / mask.sum(1)


def loss_fn(x, y, clip_loss=wb.functional.clip_loss):
    return clip_loss(normalize(x, dim=1), normalize(y, dim=1), 5.0)


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found, true):
    assert found.keys() == true.keys()
    largest = max(z.norm() for z in true.values())
    for name, z in true.items():
        assert (found[name] - z).norm() <= 1e-10 * largest, name


SPLIT = wb.gradcache.MultimodalSplit(image_token_id=IMAGE, video_token_id=VIDEO)
TEXTS = (0,) * len(IMAGES)


def texts(side="right"):
    found = inputs(TEXTS, seed=5, side=side)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def positions(model, features):
    """Return the position of each token in time, height and width, of shape (3, rows, length)."""
    if "pixel_values" not in features:
        return (features["attention_mask"].cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw")
    return model.get_rope_index(**{name: features[name] for name in names})[0]


@pytest.mark.parametrize("model", QWENS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [1, 3, wb.gradcache.TokenBudget(40)], ids=["1 row", "3 rows", "40 tokens"])
def test_qwen_has_the_gradient_of_the_whole_batch(size, side, model):
    encoder = Pooled(made(model), last=side == "left")
    documents, queries = inputs(side=side), texts(side)
    if side == "left":  # positions that the model counts are rounded in float32, and would count padding in texts
        for features in (documents, queries):
            features["position_ids"] = positions(encoder.inner, features)
    expected = loss_fn(encoder(**documents), encoder(**queries))
    expected.backward()
    true = gradients(encoder)
    assert any("visual" in name for name in true)
    encoder.lengths.clear()
    for keep in (0, 2):
        loss = wb.GradCache([encoder, encoder], size, loss_fn, SPLIT, keep_graphs=keep)(documents, queries)
        assert abs(loss - expected) < 1e-12
        assert_same(gradients(encoder), true)
    if isinstance(size, wb.gradcache.TokenBudget):
        assert min(encoder.lengths) < documents["input_ids"].shape[1] / 2, "padding is cut off"


def test_rows_with_the_images_of_others_would_differ():
    """The test's model and loss notice images that are exchanged between rows."""
    encoder, documents, queries = Pooled(made("Qwen2-VL")), inputs((1, 1, 1)), texts()
    documents["image_grid_thw"] = torch.tensor([[1, 2, 2]] * 3)
    documents["pixel_values"] = torch.randn(12, 96, dtype=torch.float64)
    ids = torch.tensor([[START, IMAGE, END, word] for word in (3, 4, 5)])
    documents |= {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    queries = {name: x[:3] for name, x in queries.items()}
    expected = loss_fn(encoder(**documents), encoder(**queries))
    loss = wb.GradCache([encoder, encoder], 1, loss_fn, SPLIT)(documents, queries)
    assert abs(loss - expected) < 1e-12
    documents["pixel_values"] = documents["pixel_values"].roll(4, 0)
    assert abs(loss_fn(encoder(**documents), encoder(**queries)) - expected) > 1e-6


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return LlavaModel(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_token_id=IMAGE)
    )


def test_llava_with_one_row_of_pixels_for_each_image():
    torch.manual_seed(0)
    encoder = Pooled(llava().double().train())
    rows = [[1, *[IMAGE] * 4 * count, *range(2, 4 + number % 3)] for number, count in enumerate(IMAGES)]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    documents = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(sum(IMAGES), 3, 8, 8, dtype=torch.float64),
    }
    expected = loss_fn(encoder(**documents), encoder(**texts()))
    expected.backward()
    true = gradients(encoder)
    for size in (2, wb.gradcache.TokenBudget(24)):
        loss = wb.GradCache([encoder, encoder], size, loss_fn, SPLIT)(documents, texts())
        assert abs(loss - expected) < 1e-12
        assert_same(gradients(encoder), true)


COUNTS = (5, 2)  # rows of two ranks; the second rank has no image


def engine_body(size):
    images = (*IMAGES[1:6], 0, 0)
    whole, queries = inputs(images), texts()
    alone = Pooled(made("Qwen2-VL"))
    loss_fn(alone(**whole), alone(**queries), wb.reference.clip_loss).backward()
    true = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    rows = Partition(COUNTS).rows(dist.get_rank())
    local = {name: whole[name][rows] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    if dist.get_rank() == 0:
        local |= {name: whole[name] for name in ("pixel_values", "image_grid_thw")}
    plain = copy.deepcopy(alone)
    plain.zero_grad()
    for name, p in plain.named_parameters():
        p.requires_grad_(name in true)
    model = DistributedDataParallel(plain)
    step = wb.GradCache([model, model], size, loss_fn, SPLIT)
    for _ in range(2):
        step(local, {name: x[rows] for name, x in queries.items()})
        assert_same(gradients(plain), true)
    return True


@pytest.mark.parametrize("size", [2, wb.gradcache.TokenBudget(40)], ids=["2 rows", "40 tokens"])
def test_qwen_under_ddp_where_one_rank_has_no_image(size):
    assert all(run_ranks(engine_body, 2, size, timeout_s=180))

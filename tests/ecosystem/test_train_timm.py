"""`wholebatch train` with encoders of timm.

    make vision ARGS=tests/ecosystem/test_train_timm.py

The models are timm's own tiny ones, with random weights that the test saves as timm saves them.
"""

import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("timm") is None:
    pytest.skip("timm is not installed: `make vision`", allow_module_level=True)

import numpy as np
import torch
import torch.distributed as dist
from compare import assert_same
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from wholebatch._base.third_party import declare_torchvision_operators

declare_torchvision_operators()
import timm  # noqa: E402
from timm.models import save_for_hf  # noqa: E402

from wholebatch._base.user_error import UserError  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402
from wholebatch_train.audited import audit_start  # noqa: E402
from wholebatch_train.config import (  # noqa: E402
    ModelConfig,
    SideConfig,
    TrainConfig,
)
from wholebatch_train.data.load import load_data  # noqa: E402
from wholebatch_train.encoders.make import make_encoder, open_dual_encoder, save_encoders  # noqa: E402
from wholebatch_train.tasks.make import make_task  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("no_network")]  # timm warns

CPU = torch.device("cpu")
MODEL = ModelConfig(embedding_size=16, text_width=16, text_buckets=256)
SIZES = {"batch_size": 24, "validation_texts": 2, "test_texts": 2, "workers": 0, "model": MODEL}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("test_vit", "test_resnet"):
        torch.manual_seed(0)
        save_for_hf(timm.create_model(name, num_classes=5), folder / name, safe_serialization=True)
    return folder


def encoder_of(name, **options):
    return make_encoder(TrainConfig(image_encoder=f"timm:{name}", image=SideConfig(**options)), "image")


def some_pictures():
    make = np.random.default_rng(0).integers
    return [Image.fromarray(make(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((200, 250), (264, 133), (160, 160))]


def task_of(config):
    config, loaded = load_data(config, 1)
    return make_task(config, loaded, CPU, rank=0, size=1)


def audited(*configs):
    """Audit on the ranks of this call."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    return [audit_start(*load_data(config, size), CPU, rank=rank, size=size).error for config in configs]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_pictures_are_encoded_as_by_the_model_itself(models, name):
    encoder = encoder_of(models / name)
    model = timm.create_model(f"local-dir:{models / name}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    pixels = torch.stack([transform(picture) for picture in some_pictures()])
    prepared = encoder.prepare(some_pictures())
    assert prepared.dtype == torch.uint8
    encoder.train()
    with torch.no_grad():
        expected = model(pixels)
        assert encoder.width == expected.shape[1]
        assert_same(encoder(prepared), expected, relative=1e-5)
        other = timm.create_model(name, num_classes=0).eval()(pixels)
    assert (other - expected).abs().max() > 1e-3, "random weights give other rows"


def test_the_gradient_is_exact_in_chunks_and_on_two_ranks(models, data):
    config = TrainConfig(data=data, image_encoder=f"timm:{models / 'test_resnet'}", **SIZES)
    tasks = [task_of(replace(config, chunk_size=size)) for size in (0, 7)]
    for task in tasks:
        task.add_gradients(0)
    first, second = (task.gradients() for task in tasks)
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert (second[name] - x).abs().max() < 1e-4 * max(1e-3, float(x.abs().max())), name
    recomputed = replace(config, chunk_size=7, image=SideConfig(recompute=True))
    for errors in run_ranks(audited, 2, config, recomputed):
        assert max(errors) < 1e-4


def units(config):
    """Return the modules of the model whose weights are sharded by themselves, and the error of the audit."""
    config, loaded = load_data(config, 2)
    task = make_task(config, loaded, CPU, rank=dist.get_rank(), size=2)
    model = task.module.image.model
    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)], audited(config)[0]


@pytest.mark.parametrize(
    ("name", "blocks"), [("test_vit", {"blocks.0", "blocks.5"}), ("test_resnet", {"layer1.0", "layer4.0"})]
)
def test_blocks_are_sharded_one_by_one(models, data, name, blocks):
    config = TrainConfig(data=data, image_encoder=f"timm:{models / name}", fsdp=True, chunk_size=5, **SIZES)
    found, error = run_ranks(units, 2, config)[0]
    assert blocks <= {*found}
    assert error < 1e-4


def test_batch_norm_is_frozen_with_weights_and_refused_without(models):
    encoder = encoder_of(models / "test_resnet")
    assert "pictures become" in encoder.notes[0]
    assert "batch norm uses its stored statistics" in encoder.notes[1]
    before = {name: x.clone() for name, x in encoder.named_buffers()}
    encoder.train()
    encoder(encoder.prepare(some_pictures())).sum().backward()
    assert all(torch.equal(x, before[name]) for name, x in encoder.named_buffers())
    with pytest.raises(UserError, match=r"--image-encoder timm:test_resnet has batch norm"):
        encoder_of("test_resnet", pretrained=False)


def test_random_weights_have_the_full_learning_rate(models):
    assert encoder_of("test_vit", pretrained=False).learning_rate_factor == 1.0
    assert encoder_of(models / "test_vit").learning_rate_factor == 0.01


def test_a_saved_encoder_opens_without_the_model(models, data, tmp_path):
    here = tmp_path / "models"
    shutil.copytree(models, here)
    task = task_of(TrainConfig(data=data, image_encoder=f"timm:{here / 'test_vit'}", **SIZES))
    save_encoders(tmp_path / "encoders", task.module)
    save_file(task.weights(), tmp_path / "model.safetensors")
    shutil.rmtree(here)
    torch.manual_seed(7)
    opened = open_dual_encoder(tmp_path / "encoders")
    opened.load_state_dict(load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        expected = task.module.encode("image", task.module.encoder("image").prepare(some_pictures()))
        found = opened.encode("image", opened.encoder("image").prepare(some_pictures()))
    assert torch.equal(found, expected)


def test_mistakes_about_models_are_explained(models, tmp_path):
    with pytest.raises(UserError, match=r"timm has no model 'test_vitt'; similar names: test_vit"):
        encoder_of("test_vitt")
    with pytest.raises(UserError, match=r"timm's test_vit has no weights 'none'; it has r160_in1k"):
        encoder_of("test_vit.none")
    with pytest.raises(
        UserError, match=r"would need a download: timm/test_vit.r160_in1k is not in the cache .* hf download"
    ):
        encoder_of("test_vit")
    with pytest.raises(UserError, match=r"has no config.json of a model; it is empty"):
        encoder_of(tmp_path)
    pickled = tmp_path / "pickled"
    shutil.copytree(models / "test_vit", pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is not read, because such files can run code"):
        encoder_of(pickled)

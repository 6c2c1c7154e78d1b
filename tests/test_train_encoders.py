"""Encoders of a run: the built-in ones, those of a user's file, their options, precision and automatic chunks.

What needs other libraries is in ecosystem/test_train_encoders.py and ecosystem/test_train_timm.py.
"""

import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import assert_same
from glyph_files import SMALL, write_pairs
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import nn

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train.config import ModelConfig, SideConfig, TextSideConfig, TrainConfig
from wholebatch_train.config_file import from_values, to_json
from wholebatch_train.data.load import load_data
from wholebatch_train.encoders.dual import DualEncoder
from wholebatch_train.encoders.encoder import check_batch_norm, map_tensors, to_device, used_parameters
from wholebatch_train.encoders.libraries import folder_of
from wholebatch_train.encoders.make import (
    make_dual_encoder,
    make_encoder,
    open_dual_encoder,
    open_encoder,
    save_encoder,
)
from wholebatch_train.encoders.small import ImageEncoder, TextEncoder
from wholebatch_train.encoders.words import tokenize
from wholebatch_train.option_checks import check_options
from wholebatch_train.tasks import chunking
from wholebatch_train.tasks.chunking import with_chunk_size
from wholebatch_train.tasks.make import make_task
from wholebatch_train.tasks.task import make_adamw

MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_layers=1, text_buckets=256)
CONFIG = TrainConfig(image_size=16, image_channels=1, model=MODEL)
CPU = torch.device("cpu")

MINE = """
import torch
from torch import nn

class Mine(nn.Module):
    channels = 1
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 12)
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.9)
    def prepare(self, pictures):
        return {"pixels": torch.stack([self.preprocess(picture) for picture in pictures])}
    def preprocess(self, picture):
        return torch.tensor(list(picture.resize((8, 8)).tobytes()), dtype=torch.uint8)
    def forward(self, inputs):
        return self.drop(self.linear(inputs["pixels"].float() / 255))

class OneByOne(Mine):
    prepare = None
    def forward(self, pixels):
        return self.linear(pixels.float() / 255)

class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 12)
    def tokenize(self, texts):
        return torch.tensor([list(text.encode()[:20].ljust(20)) for text in texts])
    def forward(self, ids):
        return self.table(ids).mean(1)

class WithNorm(Letters):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
    def forward(self, ids):
        return self.norm(super().forward(ids))

class Wrong(Letters):
    def forward(self, ids):
        return self.table(ids)

class Integers(Letters):
    def forward(self, ids):
        return ids

class Narrow(Letters):
    width = 7

class Blind(nn.Module):
    pass

class Halving(Letters):
    def tokenize(self, texts):
        return super().tokenize(texts)[:1]

class Listing(Letters):
    def tokenize(self, texts):
        return [list(text) for text in texts]

def no_module():
    return 3

def failing():
    raise RuntimeError("out of luck")
"""


PIXELS = """
class Pixels(Mine):
    prepare = None
    def preprocess(self, picture):
        return torch.tensor(list(picture.resize((12, 8)).tobytes()), dtype=torch.uint8).view(1, 8, 12)
    def forward(self, pixels):
        return self.linear(pixels.float().flatten(1)[:, :64] / 255)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), "pairs.csv"))


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def pictures(mode, *sizes):
    make = np.random.default_rng(0).integers
    shape = {"L": (), "RGB": (3,)}[mode]
    return [Image.fromarray(make(0, 256, (h, w, *shape), dtype=np.uint8)) for w, h in sizes]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_the_built_in_encoder_of_images_fits_pictures_into_a_square(channels, mode):
    encoder = ImageEncoder(MODEL, channels, 16)
    some = pictures(mode, (20, 30), (16, 16), (7, 5))
    prepared = encoder.prepare(some)
    assert prepared.dtype == torch.uint8
    assert prepared.shape == (3, channels, 16, 16)
    for row, picture in zip(prepared, some, strict=True):
        expected = np.array(ImageOps.pad(picture, (16, 16))).reshape(16, 16, channels).transpose(2, 0, 1)
        assert (row.numpy() == expected).all()
    assert (prepared[2][:, 0] == 0).all(), "a wide picture has black above it"
    assert len(pickle.dumps(encoder.prepare)) < 500, "processes that load data get no weights"
    assert torch.equal(encoder(prepared), encoder(prepared.float() / 255)), "pixels become floats in [0, 1]"


def test_initial_weights_are_drawn_side_by_side():
    """Runs of earlier versions have the same numbers, and their weights the same names."""
    torch.manual_seed(3)
    image, text = ImageEncoder(MODEL, 1, 16), TextEncoder(MODEL)
    torch.manual_seed(3)
    model = make_dual_encoder(CONFIG)
    expected = {f"image.{name}": x for name, x in image.state_dict().items()}
    expected |= {f"text.{name}": x for name, x in text.state_dict().items()}
    state = model.state_dict()
    assert state.keys() == expected.keys() | {"log_logit_scale"}
    assert all(torch.equal(x, state[name]) for name, x in expected.items())


def test_sides_of_one_kind_share_an_encoder_and_another_width_is_projected():
    torch.manual_seed(0)
    config = replace(CONFIG, model=replace(MODEL, embedding_size=16))
    text = make_encoder(config, "text")
    model = DualEncoder({"query": text, "document": text}, embedding_size=5, initial_logit_scale=10.0)
    assert {name.split(".")[0] for name in model.state_dict()} == {"query", "projections", "log_logit_scale"}
    assert model.encoder("document") is model.encoder("query")
    inputs = text.prepare(["one", "two words"])
    queries, documents, *_ = model(inputs, inputs)
    assert torch.equal(queries, documents)
    assert queries.shape == (2, 5)
    assert_same(queries.norm(dim=1), torch.ones(2), relative=1e-6)


def test_features_of_a_frozen_encoder_have_a_graph_and_its_weights_no_gradient():
    """Gradient caching refuses a side without a graph."""
    torch.manual_seed(0)
    model = make_dual_encoder(replace(CONFIG, image=SideConfig(tune="frozen")))
    images, texts = torch.rand(2, 1, 16, 16), model.encoder("text").prepare(["one", "two"])
    x, y, *_ = model(images, texts)
    assert x.requires_grad
    assert torch.equal(x, model.encode("image", images))
    (x @ y.T).logsumexp(1).sum().backward()
    assert all(p.grad is None for p in model.encoder("image").parameters())
    assert model.encoder("text").project.weight.grad.abs().max() > 0


def test_the_optimizer_leaves_out_frozen_weights_and_scales_the_rate_of_a_side():
    config = replace(CONFIG, image=SideConfig(tune="frozen"), text=TextSideConfig(learning_rate_factor=0.1))
    model = make_dual_encoder(config)
    optimizer = make_adamw(model, config)
    groups = [(group["peak"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    text = model.encoder("text")
    matrices = sum(p.dim() > 1 for p in text.parameters())
    assert groups == [
        (0.002, 0.1, 0),
        (0.002, 0.0, 1),  # the scale
        (pytest.approx(0.0002), 0.1, matrices),
        (pytest.approx(0.0002), 0.0, len(list(text.parameters())) - matrices),
    ]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x, y, scale, _ = model(torch.rand(4, 1, 16, 16), text.prepare(["A", "B", "C", "D"]))
    (scale * (x @ y.T)).log_softmax(1).diagonal().sum().backward()
    optimizer.step()
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert moved
    assert not any(name.startswith("image.") for name in moved)
    assert len(optimizer.state) == 1 + len(list(text.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_encoder": "resnet50"}, "--image-encoder must be one of small, timm:NAME, transfor"),
        ({"text_encoder": "timm:vit"}, "--text-encoder must be one of small, transformers:NAME, F"),
        ({"image_encoder": "timm:"}, "--image-encoder must be one of"),
        ({"image_encoder": "mine.py:"}, "--image-encoder must be one of"),
        ({"image": SideConfig(tune="lora")}, "--image.tune must be full or frozen with the built-in encoder, got lora"),
        ({"text": TextSideConfig(max_tokens=9)}, r"--text.max-tokens must be left out with an .* \(it is for transf"),
        ({"image_encoder": "timm:x", "image": SideConfig(pooling="cls")}, "--image.pooling must be left out with"),
        ({"image_encoder": "a.py:f", "image": SideConfig(pretrained=False)}, "--image.pretrained must be left out"),
        ({"text_encoder": "transformers:x", "text": TextSideConfig(lora_rank=4)}, "without --text.tune lora"),
        ({"text": TextSideConfig(tune="frozen", learning_rate_factor=2.0)}, "with --text.tune frozen, got 2.0"),
        ({"text": TextSideConfig(learning_rate_factor=0.0)}, "--text.learning-rate-factor must be in "),
        ({"compile": True, "chunk_size": 8}, "--compile must be left out with --chunk-size 8, got True"),
        ({"compile": True, "chunk_size": "auto"}, "--compile must be left out with --chunk-size auto"),
        ({"chunk_size": -1}, "--chunk-size must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_options(replace(CONFIG, **options))


def test_options_of_encoders_survive_json(tmp_path):
    config = replace(
        CONFIG, chunk_size="auto", text_encoder="transformers:x", text=TextSideConfig(max_tokens=5, tune="lora")
    )
    values = json.loads(to_json(config))
    assert from_values(values, tmp_path) == config
    for name, value in (
        ("chunk_size", "all"), ("precision", 16), ("precision", "fp8"), ("task", "recognize"),
        ("text", values["text"] | {"max_tokens": "5"}), ("text", values["text"] | {"tune": "some"}),
    ):  # fmt: skip
        with pytest.raises(UserError, match="not the configuration"):
            from_values(values | {name: value}, tmp_path)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_library_that_is_missing_is_named_with_the_command_to_install_it(monkeypatch, tmp_path, library):
    monkeypatch.setitem(sys.modules, library, None)
    config = replace(CONFIG, image_encoder=f"{library}:{tmp_path}")
    (tmp_path / "config.json").write_text('{"architecture": "x", "pretrained_cfg": {}}')
    with pytest.raises(UserError, match=f"needs {library}: pip install {library}"):
        make_encoder(config, "image")


def test_a_folder_that_is_missing_is_no_name_of_a_model(tmp_path):
    with pytest.raises(UserError, match="there is no folder '/no/such/folder'"):
        folder_of("--text-encoder", "/no/such/folder")
    assert folder_of("--text-encoder", str(tmp_path)) == tmp_path


def make_models(*folders):
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")


def test_a_folder_that_is_missing_has_similar_names_beside_it(tmp_path):
    make_models(tmp_path / "clip-base", tmp_path / "bert")
    (tmp_path / "clip-bass").mkdir()
    with pytest.raises(UserError, match=r"there is no folder '.*/clip-bas'; similar names .*: \S*/clip-base$"):
        folder_of("--text-encoder", f"{tmp_path}/clip-bas")


def test_a_model_that_is_missing_has_similar_names_in_the_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"would need a download: 'org/bert-mini' is neither a folder nor in the cache"):
        folder_of("--text-encoder", "org/bert-mini")
    for kind, name in (("models", "org--bert-tiny"), ("models", "bert-large"), ("datasets", "org--bert-mini")):
        commit = tmp_path / f"{kind}--{name}" / "snapshots" / ("a" * 40)
        make_models(commit)
        (commit.parents[1] / "refs").mkdir()
        (commit.parents[1] / "refs" / "main").write_text(commit.name)
    with pytest.raises(UserError, match=r"org/bert-mini' .*; similar names on this machine: org/bert-tiny, bert-large"):
        folder_of("--text-encoder", "org/bert-mini")
    with pytest.raises(UserError, match=r"similar names on this machine: org/bert-tiny.* hf download bert-tin"):
        folder_of("--text-encoder", "bert-tin")
    with pytest.raises(UserError, match=r"'bert large' is neither a folder nor a name of Hugging Face, .*: bert-large"):
        folder_of("--text-encoder", "bert large")


@pytest.mark.parametrize("function", ["Mine", "OneByOne"])
def test_an_encoder_of_images_from_a_file(mine, function):
    torch.manual_seed(0)
    encoder = make_encoder(replace(CONFIG, image_encoder=f"{mine}:{function}"), "image")
    assert (encoder.kind, encoder.width, encoder.channels) == ("image", 12, 1)
    inputs = encoder.prepare(pictures("L", (20, 30), (8, 8), (9, 5)))
    rows = encoder(inputs)
    assert torch.equal(rows, encoder(inputs)), "dropout is off"
    encoder.train()
    assert torch.equal(rows, encoder(inputs)), "and stays off"
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert trained == {"model.linear.weight", "model.linear.bias"}, "DDP would wait for the others"


def test_the_first_lines_have_the_size_that_the_encoder_reads(mine, data, tmp_path, capsys):
    mine.write_text(MINE + PIXELS)
    encoder = f"{mine}:Pixels"
    run = ["train", "--data", data, "--run-folder", str(tmp_path / "run"), "--steps", "1", *SMALL, "--no-audit",
           "--no-tensorboard", "--image-encoder", encoder]  # fmt: skip
    run[run.index("--image-size") + 1] = "0"
    assert main(run) == 0
    printed = capsys.readouterr().out
    assert printed.count("pictures become") == 1
    assert "pictures become 8 x 12, gray, as their encoder reads them\n" in printed
    notes = make_encoder(replace(CONFIG, image_encoder=f"{mine}:Mine"), "image").notes
    assert not notes, "its inputs are no pixels"


def test_an_encoder_of_texts_from_a_file(mine):
    encoder = make_encoder(replace(CONFIG, text_encoder=f"{mine}:Letters"), "text")
    assert (encoder.kind, encoder.width) == ("text", 12)
    assert encoder(encoder.prepare(["a", "b", "c"])).shape == (3, 12)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("Missing", "has no function 'Missing'; its functions are no_module, failing"),
        ("no_modul", "similar names: no_module"),
        ("no_module", r"no_module\(\) must return a torch.nn.Module, got int"),
        ("failing", r"failing\(\) raised RuntimeError: out of luck"),
        ("Blind", r"must have prepare\(items\), or preprocess\(item\), or tokenize\(texts\)"),
        ("Wrong", r"must map 2 items to floats \(2, width\), got torch.float32 \(2, 20, 12\)"),
        ("Integers", r"must map 2 items to floats \(2, width\), got torch.int64 \(2, 20\)"),
        ("Narrow", "the module's width is 7, but its rows have 12 columns"),
        ("Halving", r"prepare must return tensors with .* got rows \[1\]"),
        ("Listing", "prepare must return a tensor, a named tuple of tensors or a dictionary of tensors, got list"),
    ],
)
def test_mistakes_in_a_file_are_explained(mine, function, message):
    with pytest.raises(UserError, match=message) as caught:
        make_encoder(replace(CONFIG, text_encoder=f"{mine}:{function}"), "text")
    assert f"--text-encoder {mine}:{function}" in str(caught.value)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file '.*none\.py'"):
        make_encoder(replace(CONFIG, text_encoder=f"{tmp_path}/none.py:f"), "text")
    (tmp_path / "broken.py").write_text("import no_such_library")
    with pytest.raises(
        UserError, match=r"'.*broken.py' cannot be imported: ModuleNotFoundError: No module named 'no_such"
    ):
        make_encoder(replace(CONFIG, text_encoder=f"{tmp_path}/broken.py:f"), "text")


def test_batch_norm_keeps_its_statistics_and_random_ones_are_refused(mine):
    encoder = make_encoder(replace(CONFIG, text_encoder=f"{mine}:WithNorm"), "text")
    assert encoder.notes == ("batch norm uses its stored statistics in training, too (1 layers)",)
    before = encoder.model.norm.running_mean.clone()
    encoder.train()
    encoder(encoder.prepare(["a", "b"])).sum().backward()
    assert torch.equal(encoder.model.norm.running_mean, before)
    assert encoder.model.norm.weight.grad is not None
    with pytest.raises(
        UserError, match=r"has batch norm \(1 layers\).* take pretrained weights, or a model with group"
    ):
        check_batch_norm(encoder, "--image-encoder timm:x", pretrained=False)


def test_recomputation_needs_a_module_that_can(mine):
    config = replace(CONFIG, text_encoder=f"{mine}:Letters", text=TextSideConfig(recompute=True))
    with pytest.raises(UserError, match=r"--text.recompute must be left out with .*Letters, which cannot compute"):
        make_encoder(config, "text")


def test_used_parameters_are_those_with_a_gradient():
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    output = first(torch.randn(2, 3)) + second(torch.randn(2, 3)).detach()
    assert used_parameters(output) == {id(p) for p in first.parameters()}
    assert not used_parameters(third(torch.randn(2, 3)).detach())


def test_a_run_leaves_what_opens_its_encoders(capsys, data, mine, tmp_path):
    """The user's file has moved; the run's copy and its weights give the same features."""
    run = tmp_path / "run"
    given = ["--image-encoder", f"{mine}:Mine", "--text-encoder", "small", "--augment", "0", "--chunk-size", "7"]
    small = [*SMALL, "--image-channels", "1", "--tensorboard", "False"][:-2]
    assert (
        main(["train", "--data", data, "--run-folder", str(run), "--steps", "2", "--workers", "0", *small, *given]) == 0
    )
    assert "relative error" in capsys.readouterr().out
    mine.unlink()
    search = ["search", str(run), "A", "-k", "1", "--workers", "0"]
    assert main(search) == 2
    assert f"--image-encoder {mine}:Mine, Python code that would be executed" in capsys.readouterr().err
    assert main([*search, "--trust"]) == 0
    with pytest.raises(UserError, match=r"made by Python code, .*encoder\.py"):
        open_dual_encoder(run / "encoders")
    torch.manual_seed(5)
    model = open_dual_encoder(run / "encoders", trust=True)
    weights = load_file(run / "model.safetensors")
    model.load_state_dict(weights)
    assert weights["projections.image.weight"].shape == (32, 12)
    assert model.encoder("image").prepare(pictures("L", (9, 9)))["pixels"].shape == (1, 64)
    shape = model(model.encoder("image").prepare(pictures("L", (9, 9))), model.encoder("text").prepare(["A"]))[0].shape
    assert shape == (1, 32)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_built_in_encoders_are_saved_by_their_sizes(tmp_path, kind):
    encoder = make_encoder(CONFIG, kind)
    save_encoder(tmp_path / "e", encoder)
    again = open_encoder(tmp_path / "e")
    again.load_state_dict(encoder.state_dict())
    inputs = encoder.prepare([encoder.example()])
    assert torch.equal(again(again.prepare([encoder.example()])), encoder(inputs))
    file = tmp_path / "e" / "encoder.json"
    values = json.loads(file.read_text())
    for broken in ({}, values | {"form": "other"}, values | {"format": "x"}, values | {"sizes": {"a": 1}}):
        file.write_text(json.dumps(broken))
        with pytest.raises(UserError, match="is not an encoder of this version"):
            open_encoder(tmp_path / "e")


def test_inputs_keep_their_form():
    for inputs in (
        torch.ones(2),
        {"a": torch.ones(2), "b": torch.ones(2, 3)},
        tokenize(["a b", "c"], max_words=3, buckets=9),
    ):
        doubled = map_tensors(lambda x: 2 * x, inputs)
        assert type(doubled) is type(inputs)
        assert type(to_device(inputs, CPU)) is type(inputs)
    assert torch.equal(map_tensors(lambda x: 2 * x, {"a": torch.ones(2)})["a"], torch.full((2,), 2.0))


def gradients(config, **more):
    config, data = load_data(replace(config, **more), 1)
    task = make_task(config, data, CPU, rank=0, size=1)
    loss = task.add_gradients(0)
    return loss, torch.cat([x.flatten() for x in task.gradients().values()])


def test_bfloat16_is_near_float32_and_the_loss_in_float32(data):
    config = replace(CONFIG, data=data, batch_size=24, validation_texts=2, test_texts=2, workers=0)
    (loss, exact), (rounded_loss, rounded) = gradients(config), gradients(config, precision="bf16")
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.1, "rounded, but not more than bfloat16 does"
    assert rounded.dtype == rounded_loss.dtype == torch.float32
    assert_same(rounded_loss, loss, relative=0.02)


def test_an_automatic_chunk_fits_the_memory_and_changes_no_gradient(data, monkeypatch):
    config = replace(CONFIG, data=data, batch_size=48, validation_texts=2, test_texts=2, workers=0, chunk_size="auto")
    config, loaded = load_data(config, 1)
    assert with_chunk_size(config, loaded, CPU, rank=0, size=1).chunk_size == 0, "all 48 rows fit"
    whole = make_task(replace(config, chunk_size=0), loaded, CPU, rank=0, size=1)
    held = {n: chunking.memory_of_graph(whole, n, CPU) for n in (1, 8, 16)}
    assert 1.5 < held[16] / held[8] < 2.1
    weights = sum(p.nbytes for p in whole.module.parameters())
    monkeypatch.setattr(chunking, "free_memory", lambda _: round(2.2 * held[8]) + 3 * weights)
    found = with_chunk_size(config, loaded, CPU, rank=0, size=1)
    assert found.chunk_size == 8
    cached = make_task(found, loaded, CPU, rank=0, size=1)
    for task in (whole, cached):
        task.add_gradients(0)
    for name, x in whole.gradients().items():
        assert_same(cached.gradients()[name], x, relative=1e-5)


def test_compiled_encoders_have_the_same_gradient(data, monkeypatch):
    """By a backend that is quick to compile: whether the encoders are traced in full is the question, not the code."""
    compiled = []

    def quickly(function, **options):
        compiled.append(function)
        return actual(function, backend="eager", **options)

    actual = torch.compile
    monkeypatch.setattr(torch, "compile", quickly)
    config = replace(CONFIG, data=data, batch_size=24, validation_texts=2, test_texts=2, workers=0)
    assert_same(gradients(config, compile=True)[1], gradients(config)[1], relative=1e-5)
    assert len(compiled) == 2, "both encoders, and not those of the run that is not compiled"


def test_a_chunk_that_divides_the_batch_is_trained(data):
    """Chunks of equal size, whose inputs are a list of equal lengths."""
    config = replace(CONFIG, data=data, batch_size=24, validation_texts=2, test_texts=2, workers=0)
    assert_same(gradients(config, chunk_size=12)[1], gradients(config)[1], relative=1e-5)


FROZEN = {"task": "identify", "image": SideConfig(tune="frozen"), "validation_texts": 0}


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("faces"), faces=("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")))


def test_chunks_of_a_frozen_encoder_of_classes(faces, monkeypatch):
    """Nothing in the encoder needs a gradient, on a GPU as little as here: the classifier's is the same in chunks."""
    config = replace(CONFIG, data=faces, batch_size=24, workers=0, **FROZEN)
    (loss, whole), (in_chunks, same) = gradients(config), gradients(config, chunk_size=5)
    assert_same(in_chunks, loss, relative=1e-6)
    assert_same(same, whole, relative=1e-5)
    config, loaded = load_data(replace(config, chunk_size="auto"), 1)
    assert with_chunk_size(config, loaded, CPU, rank=0, size=1).chunk_size == 0, "no graph is held"
    allocated = iter([0, 100, 0, 10**12])
    for name, found in (("synchronize", None), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(allocated))
    task = make_task(replace(config, chunk_size=0), loaded, CPU, rank=0, size=1)
    assert [chunking.memory_of_graph(task, n, torch.device("cuda")) for n in (1, 2)] == [100, 10**12]

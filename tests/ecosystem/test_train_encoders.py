"""`wholebatch train` with encoders of transformers and adapters of peft.

    make ecosystem ARGS=tests/ecosystem/test_train_encoders.py

The models are tiny and random. They have dropout of 0.5 in their configurations, so that a gradient is exact only if
dropout is off.
"""

import json
import pickle
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("transformers") is None or find_spec("peft") is None:
    pytest.skip("transformers and peft are not installed: `make ecosystem`", allow_module_level=True)

import numpy as np
import torch
import torch.distributed as dist
from compare import assert_same
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import save_both, save_image, save_text
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train.audited import audit_start
from wholebatch_train.config import ModelConfig, SideConfig, TextSideConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.encoders.make import (
    make_encoder,
    open_dual_encoder,
    open_encoder,
    save_encoder,
    save_encoders,
)
from wholebatch_train.encoders.transformer import pool, rule_of_sentences
from wholebatch_train.encoders.tune import merged_state
from wholebatch_train.tasks.make import make_task

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("no_network"),
]  # they warn

CPU = torch.device("cpu")
TEXTS = ["latin small letter a", "one", "greek capital letter alpha with tonos and many more words an example", "b c"]
SIZES = {
    "batch_size": 24, "validation_texts": 2, "test_texts": 2, "workers": 0, "image_size": 16, "image_channels": 1,
    "model": ModelConfig(embedding_size=16),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("bert", "roberta", "gpt2", "t5"):
        save_text(folder / name, name)
    for name in ("vit", "resnet"):
        save_image(folder / name, name)
    for name in ("clip", "siglip"):
        save_both(folder / name, name)
    return folder


def text_encoder(folder, **options):
    return make_encoder(TrainConfig(text_encoder=f"transformers:{folder}", text=TextSideConfig(**options)), "text")


def image_encoder(folder, **options):
    return make_encoder(TrainConfig(image_encoder=f"transformers:{folder}", image=SideConfig(**options)), "image")


def some_pictures():
    make = np.random.default_rng(0).integers
    return [Image.fromarray(make(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in ((40, 50), (64, 33), (32, 32))]


def pair_config(models, data, **more):
    encoders = {"image_encoder": f"transformers:{models / 'vit'}", "text_encoder": f"transformers:{models / 'bert'}"}
    return TrainConfig(**(encoders | SIZES | {"data": data} | more))


def task_of(config):
    config, loaded = load_data(config, 1)
    return make_task(config, loaded, CPU, rank=0, size=1)


def trained(config):
    """Return the final weights of two steps on the ranks of this call, in parts if --fsdp."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    config, loaded = load_data(config, size)
    task = make_task(config, loaded, CPU, rank=dist.get_rank() if size > 1 else 0, size=size)
    make_steps(task, 0, 2)
    return task.weights()


def make_steps(task, first, end):
    for step in range(first, end):
        for group in task.optimizers[0].param_groups:
            group["lr"] = 0.01
        task.optimizers[0].zero_grad()
        task.add_gradients(step)
        task.optimizers[0].step()


def of_ranks(config, audits):
    """Return the errors of audits and the weights of a run, on the ranks of this call."""
    return audited(*audits), trained(config)


def audited(*configs):
    """Audit on the ranks of this call."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    return [audit_start(*load_data(config, size), CPU, rank=rank, size=size).error for config in configs]


ADAPTED = {"text": TextSideConfig(tune="lora", lora_rank=4), "image": SideConfig(tune="frozen")}


def test_the_gradient_is_exact_in_chunks_and_on_two_ranks(models, data):
    whole, in_chunks, adapted = (
        pair_config(models, data, chunk_size=size, **more) for size, more in ((0, {}), (5, {}), (5, ADAPTED))
    )
    tasks = [task_of(config) for config in (whole, in_chunks)]
    losses = [task.add_gradients(0) for task in tasks]
    assert_same(losses[1], losses[0], relative=1e-6)
    first, second = (task.gradients() for task in tasks)
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert (second[name] - x).abs().max() < 1e-5 * max(1e-3, float(x.abs().max())), name
    sharded = replace(adapted, fsdp=True)
    expected = trained(replace(adapted, chunk_size=0))
    for errors, weights in run_ranks(of_ranks, 2, sharded, (whole, in_chunks, adapted)):
        assert max(errors) < 1e-5
        assert weights.keys() == expected.keys()
        for name, x in expected.items():  # adapters are merged, whether they are whole or in parts
            assert (weights[name] - x).abs().max() < 1e-4, name


def test_mined_negatives_of_which_a_rank_has_none_with_sharded_weights(models, tmp_path):
    """The text that is encoded for nothing has the columns of its own chunk."""
    rows = range(30)
    lines = [{"query": f"one {i}", "positive": f"two {i * i}", "negatives": ["a b"] * (not i % 7)} for i in rows]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoder = f"transformers:{models / 'bert'}"
    whole = TrainConfig(data=str(tmp_path / "queries.jsonl"), text_encoder=encoder, fsdp=True, **SIZES)
    for errors in run_ranks(audited, 2, replace(whole, batch_size=9), replace(whole, batch_size=9, chunk_size=2)):
        assert max(errors) < 1e-5


@pytest.mark.parametrize(
    ("name", "rule", "width", "limit"),
    [("bert", "mean", 32, 32), ("roberta", "mean", 32, 32), ("gpt2", "last", 32, 32), ("t5", "mean", 32, 32)],
)
def test_texts_are_encoded_as_by_the_model_itself(models, name, rule, width, limit):
    """Row by row, without padding: padding, which is on the right, and the other rows have no effect."""
    encoder = text_encoder(models / name)
    assert (encoder.rule, encoder.width, encoder.prepare.max_tokens) == (rule, width, limit)
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    model = AutoModel.from_pretrained(models / name).eval()
    model = model.get_encoder() if name == "t5" else model
    with torch.no_grad():
        rows = encoder(encoder.prepare(TEXTS))
        for row, text in zip(rows, TEXTS, strict=True):
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)["input_ids"]
            hidden = model(input_ids=ids).last_hidden_state[0]
            expected = hidden.mean(0) if rule == "mean" else hidden[-1]
            assert_same(row, expected, relative=1e-5)
    for count in (1, 100):  # the longest texts do not leave the table of positions
        assert encoder(encoder.prepare(["one " * count])).isfinite().all()


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_towers_of_a_model_of_images_and_texts(models, name):
    model = AutoModel.from_pretrained(models / name).eval()
    texts, images = text_encoder(models / name), image_encoder(models / name)
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    padding = "max_length" if name == "siglip" else "longest"
    inputs = tokenizer(TEXTS, padding=padding, truncation=True, max_length=16, return_tensors="pt")
    pixels = AutoImageProcessor.from_pretrained(models / name)(images=some_pictures(), return_tensors="pt")
    with torch.no_grad():
        assert_same(texts(texts.prepare(TEXTS)), model.get_text_features(**inputs).pooler_output, relative=1e-5)
        expected = model.get_image_features(**pixels).pooler_output
        assert_same(images(images.prepare(some_pictures())), expected, relative=1e-5)
    assert not any("vision" in key or "visual" in key for key in texts.state_dict())
    assert not any("text" in key for key in images.state_dict())


@pytest.mark.parametrize(("pooling", "width"), [("auto", 32), ("mean", 32)])
def test_pictures_are_encoded_as_by_the_model_itself(models, pooling, width):
    encoder = image_encoder(models / "vit", pooling=pooling)
    assert encoder.width == width
    prepared = encoder.prepare(some_pictures())
    assert prepared.dtype == torch.uint8, "a quarter of the bytes between processes"
    pixels = AutoImageProcessor.from_pretrained(models / "vit")(images=some_pictures(), return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(models / "vit").eval()(**pixels).last_hidden_state
        assert_same(encoder(prepared), hidden[:, 0] if pooling == "auto" else hidden.mean(1), relative=1e-5)


def test_batch_norm_is_announced_and_refused_without_weights(models):
    assert "pictures become 64 x 64, in color, as their encoder reads them" in image_encoder(models / "resnet").notes
    assert "stored statistics" in image_encoder(models / "resnet").notes[1]
    with pytest.raises(UserError, match=r"--image-encoder transformers:.*resnet has batch norm \(8 layers\)"):
        image_encoder(models / "resnet", pretrained=False)


@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
def test_pooling_is_that_of_sentence_transformers(models, tmp_path, mode):
    if find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    transformer = Transformer(str(models / "bert"))
    theirs = SentenceTransformer(modules=[transformer, Pooling(32, mode), Normalize()], device="cpu")
    theirs.save(str(tmp_path / "saved"))
    encoder = text_encoder(tmp_path / "saved")
    with torch.no_grad():
        ours = torch.nn.functional.normalize(encoder(encoder.prepare(TEXTS)), dim=1)
        others = [torch.nn.functional.normalize(text_encoder(tmp_path / "saved", pooling=rule)(encoder.prepare(TEXTS)))
                  for rule in ("cls", "mean", "last") if rule != encoder.rule]  # fmt: skip
    expected = torch.tensor(theirs.encode(TEXTS))
    assert (ours - expected).abs().max() < 1e-6
    assert min((other - expected).abs().max() for other in others) > 1e-3, "another pooling is another row"


def test_pooling_reads_both_forms_of_the_file(tmp_path):
    def rule(pooling, *more):
        names = ["Transformer", "Pooling", "Normalize", *more]
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        modules = [{"type": f"s.{name}", "path": "1_Pooling" if name == "Pooling" else ""} for name in names]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        return rule_of_sentences(tmp_path, "--text-encoder transformers:x")

    assert rule({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}) == "cls"
    assert rule({"pooling_mode": "lasttoken"}) == "last"
    for pooling in ({"pooling_mode": "max"}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}):
        with pytest.raises(UserError, match="not built here; with an explicit pooling"):
            rule(pooling)
    with pytest.raises(UserError, match="lists Dense, which is not built here"):
        rule({"pooling_mode": "mean"}, "Dense")
    x = torch.randn(2, 3, 4)
    left = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert torch.equal(pool(x, left, "cls")[0], x[0, 1]), "the first token that counts"
    assert torch.equal(pool(x, left, "last"), x[:, 2])


def test_adapters_alone_are_trained_and_merge_into_the_weights(models, data, tmp_path):
    config = pair_config(models, data, **ADAPTED)
    task = task_of(config)
    before = {name: x.clone() for name, x in task.module.state_dict().items()}
    make_steps(task, 0, 2)  # the second matrix of an adapter is 0 at first
    moved = {name for name, x in task.module.state_dict().items() if not torch.equal(x, before[name])}
    adapters = {name for name in before if ".lora_" in name}
    assert len(adapters) == 2 * 2 * 6, "the six linear layers of two layers; not the pooler's, which has no effect"
    assert moved == adapters | {"projections.image.weight", "projections.text.weight", "log_logit_scale"}
    kept = sum(len(group["params"]) for group in task.optimizers[0].param_groups)
    assert len(task.optimizers[0].state) == kept == len(moved)

    save_encoders(tmp_path / "encoders", task.module)
    save_file(task.weights(), tmp_path / "model.safetensors")
    opened = open_dual_encoder(tmp_path / "encoders")
    opened.load_state_dict(load_file(tmp_path / "model.safetensors"))
    inputs = task.module.encoder("text").prepare(TEXTS)
    with torch.no_grad():
        merged, adapted = opened.encode("text", inputs), task.module.encode("text", inputs)
        base = replace(config, text=TextSideConfig(tune="frozen"))
        untouched = task_of(base).module.encoder("text")(inputs)
        assert_same(merged, adapted, relative=1e-5)
        change = (task.module.encoder("text")(inputs) - untouched).abs().max()
    assert change > 1e-2, "the adapters had an effect to lose"


def test_a_checkpoint_of_adapters_continues(models, data, tmp_path):
    config = pair_config(models, data, **ADAPTED, steps=4)
    whole, first, second = (task_of(config) for _ in range(3))
    make_steps(whole, 0, 4)
    make_steps(first, 0, 2)
    first.save(tmp_path, first.pass_state(), step=2, seconds=0.0)
    make_steps(second, 0, 1)  # another state, which the checkpoint replaces
    assert second.load(tmp_path)["step"] == 2
    make_steps(second, 2, 4)
    for name, x in whole.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], x), name


def test_targets_of_adapters_are_ends_of_names(models):
    encoder = text_encoder(models / "bert", tune="lora", lora_rank=2, lora_targets="query, value")
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in encoder.state_dict() if ".lora_" in name}
    assert adapted == {"query", "value"}
    assert encoder.learning_rate_factor == 0.1
    with pytest.raises(
        UserError, match=r"--text.lora-targets must name linear layers .* got 'querry'; .*similar names: q"
    ):
        text_encoder(models / "bert", tune="lora", lora_targets="querry")


@pytest.mark.parametrize("name", ["bert", "t5"])  # the second drops out by functions, with rates of its modules
def test_recomputed_activations_give_the_same_gradient_and_are_not_kept(models, name):
    """Recomputation of transformers is off in evaluation mode, in which the layers are; it must be on all the same."""

    def gradient(**options):
        encoder, held = text_encoder(models / name, **options), set()
        encoder.train()

        def hold(x):
            held.add(x.untyped_storage().data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
            rows = encoder(encoder.prepare(TEXTS))
        rows.square().sum().backward()
        return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}, len(held)

    (kept, tensors), (again, fewer) = gradient(), gradient(recompute=True)
    for name, x in kept.items():
        assert_same(again[name], x, relative=1e-5)
    assert fewer < 0.8 * tensors


def test_saved_encoders_open_without_the_model(models, data, tmp_path):
    here = tmp_path / "models"
    shutil.copytree(models, here)
    task = task_of(pair_config(here, data))
    save_encoders(tmp_path / "encoders", task.module)
    weights = {name: x.clone() for name, x in merged_state(task.module).items()}
    shutil.rmtree(here)
    torch.manual_seed(7)
    opened = open_dual_encoder(tmp_path / "encoders")
    opened.load_state_dict(weights)
    items = {"text": TEXTS, "image": some_pictures()}
    for side, some in items.items():
        inputs = task.module.encoder(side).prepare(some)
        with torch.no_grad():
            expected, found = task.module.encode(side, inputs), opened.encode(side, opened.encoder(side).prepare(some))
        assert torch.equal(found, expected)


def test_an_opened_encoder_lowers_the_case_of_texts(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models / "bert", folder)
    (folder / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},'
        ' {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": true}')
    encoder = text_encoder(folder)
    assert encoder.prepare.lower
    save_encoder(tmp_path / "saved", encoder)
    assert open_encoder(tmp_path / "saved").prepare.lower


def test_what_loads_data_holds_no_weights(models):
    assert len(pickle.dumps(text_encoder(models / "bert").prepare)) < 30_000
    assert len(pickle.dumps(image_encoder(models / "vit").prepare)) < 5_000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hidden_size", (-3, 0, 2**62, "x", 1.5, None, [1])),
        ("num_attention_heads", (-3, 0, "x")),
        ("num_hidden_layers", (10**9, "x", None)),
        ("vocab_size", (-3, 2**62, "x")),
    ],
)
def test_sizes_that_no_model_has_are_one_line(models, tmp_path, name, values):
    save_encoder(tmp_path / "encoder", text_encoder(models / "bert"))
    path = tmp_path / "encoder" / "config.json"
    config = json.loads(path.read_text())
    for value in values:
        path.write_text(json.dumps(config | {name: value}))
        with pytest.raises(UserError, match="transformers cannot load") as error:
            open_encoder(tmp_path / "encoder")
        assert "\n" not in str(error.value)


def test_mistakes_about_models_are_explained(models, tmp_path):
    with pytest.raises(
        UserError, match=r"would need a download: 'no/such' is neither a folder nor in the cache .* hf d"
    ):
        text_encoder("no/such")
    with pytest.raises(UserError, match=r"has no config.json of a model; it is empty"):
        text_encoder(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"it holds notes.txt"):
        text_encoder(tmp_path)
    with pytest.raises(UserError, match=r"a model of the type 'bert' reads texts; expected one of images"):
        image_encoder(models / "bert")
    with pytest.raises(UserError, match=r"--text.max-tokens must be at most 32, the limit of .*bert, got 33"):
        text_encoder(models / "bert", max_tokens=33)
    with pytest.raises(UserError, match=r"--image.pooling must be auto, cls or mean"):
        image_encoder(models / "vit", pooling="last")
    odd = tmp_path / "odd"
    shutil.copytree(models / "bert", odd)
    (odd / "model.safetensors").rename(odd / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"has no model.safetensors; pytorch_model.bin is not read, .* --text.no-pretrained"
    ):
        text_encoder(odd)
    assert text_encoder(odd, pretrained=False).learning_rate_factor == 1.0
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "martian"}))
    with pytest.raises(UserError, match=r"transformers cannot load .*martian.*; it holds config.json"):
        text_encoder(odd)

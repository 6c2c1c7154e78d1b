"""The parts of the training application, each alone."""

import json
import math

import pytest
import torch
from compare import assert_same

from wholebatch._base.tensor_file import TensorFile, write_tensors
from wholebatch._base.user_error import UserError
from wholebatch.app.tensors import first_ranks
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.config_file import from_values, to_json
from wholebatch_train.data.classes import glyph_pairs
from wholebatch_train.data.pairs import Order, batch_of_step, split_groups
from wholebatch_train.encoders.make import make_dual_encoder
from wholebatch_train.encoders.words import tokenize
from wholebatch_train.option_checks import check_options
from wholebatch_train.run.checkpoint import FILE, read_checkpoint, save_checkpoint
from wholebatch_train.run.resume import check_same_run
from wholebatch_train.run.run_folder import RunFolder
from wholebatch_train.tasks.batches import affine_maps, apply_maps
from wholebatch_train.tasks.evaluation import recall

SMALL_MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_layers=1, text_buckets=256)


@pytest.fixture(scope="module")
def glyphs():
    return glyph_pairs(32)


def test_glyphs_are_characters_and_their_names(glyphs):
    texts, pixels = glyphs.sides["text"], glyphs.sides["image"].pixels
    names = texts.items(glyphs.rows(torch.arange(len(glyphs))))
    assert len(glyphs) == len(set(names)) > 6000
    assert len(pixels) == len(texts) == len(glyphs.order) > 40000
    assert {"LATIN SMALL LETTER A", "GREEK SMALL LETTER ALPHA WITH TONOS", "BRAILLE PATTERN DOTS-1278"} <= set(names)
    assert pixels.shape[1:] == (1, 32, 32)
    assert pixels.flatten(1).any(1).all(), "no picture is blank"
    per_text = glyphs.first.diff()
    assert per_text.min() >= 1
    assert per_text.max() == 12, "one image per face"
    for group in (0, 17, len(glyphs) - 1):
        rows = glyphs.order[glyphs.first[group] : glyphs.first[group + 1]]
        assert set(texts.items(rows)) == {names[group]}


def test_split_is_by_character_and_batches_hold_each_once(glyphs):
    split = split_groups(glyphs, validation=325, test=650, seed=0)
    parts = [set(part.tolist()) for part in (split.train, split.validation, split.test)]
    assert [len(part) for part in parts[1:]] == [325, 650]
    assert len(set.union(*parts)) == sum(map(len, parts)) == len(glyphs)
    steps = len(split.train) // 1024
    seen = []
    order = Order(split.train, batch_size=1024, seed=0)
    for step in range(steps):
        rows, groups = batch_of_step(order, glyphs, step=step, seed=0)
        assert torch.equal(glyphs.group_of[rows], groups)
        seen += groups.tolist()
    assert len(seen) == len(set(seen)) == steps * 1024
    assert set(seen) <= parts[0]
    order = Order(split.train, batch_size=1024, seed=0)
    assert torch.equal(glyphs.tested, glyphs.rows(torch.arange(len(glyphs)))), "the test asks for one picture of each"
    other = batch_of_step(order, glyphs, step=1 + steps, seed=0)
    again = batch_of_step(order, glyphs, step=1, seed=0)
    assert again[1].tolist() == seen[1024:2048]
    assert other[1].tolist() != seen[1024:2048]


def test_texts_are_split_into_words_and_pieces():
    batch = tokenize(
        ["BRAILLE PATTERN DOTS-12", "Pattern 2", "one two three four five", "..."], max_words=4, buckets=64
    )
    assert batch.words.shape == (4, 4)
    assert (batch.words[0] > 0).all(), "BRAILLE, PATTERN, DOTS, 1: the fifth word is cut off"
    assert batch.words[1, 0] == batch.words[0, 1], "case does not matter"
    assert batch.words[1, 2:].tolist() == [0, 0]
    assert (batch.words[3] > 0).sum() == 3, "punctuation is words"
    assert len(batch.offsets) == batch.words.max()
    assert batch.pieces.min() >= 0
    assert batch.pieces.max() < 64
    assert torch.equal(tokenize(["A"], max_words=2, buckets=64).pieces, tokenize(["a"], max_words=2, buckets=64).pieces)
    assert (tokenize([""], max_words=2, buckets=64).words > 0).sum() == 1


def test_rows_do_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(0)
    model = make_dual_encoder(TrainConfig(image_size=16, model=SMALL_MODEL)).double()
    images, texts = torch.rand(5, 1, 16, 16, dtype=torch.float64), ["one", "two words", "three short words", "A", "1 2"]
    both = model(images, tokenize(texts, max_words=12, buckets=256))
    for rows in (slice(0, 2), slice(2, 5), slice(4, 5)):
        part = model(images[rows], tokenize(texts[rows], max_words=12, buckets=256))
        for whole, alone in zip(both[:2], part[:2], strict=True):
            assert_same(alone, whole[rows], relative=1e-13)


def test_every_parameter_has_an_effect():
    """Without an effect, a gradient is rounding noise, which Adam turns into full steps."""
    model = make_dual_encoder(TrainConfig(image_size=16, model=SMALL_MODEL)).double()
    images, texts = (
        torch.rand(6, 1, 16, 16, dtype=torch.float64),
        ["ONE", "TWO", "THREE A", "FOUR B C", "FIVE", "SIX D"],
    )
    x, y, scale, _ = model(images, tokenize(texts, max_words=12, buckets=256))
    (scale * (x @ y.T)).log_softmax(1).diagonal().sum().backward()
    sizes = {name: parameter.grad.abs().max().item() for name, parameter in model.named_parameters()}
    assert min(sizes.values()) > 1e-8, sizes


def test_augmentation_is_a_function_of_seed_and_step():
    maps = affine_maps(6, strength=1.0, step=3, seed=0)
    assert torch.equal(maps, affine_maps(6, strength=1.0, step=3, seed=0))
    assert not torch.equal(maps, affine_maps(6, strength=1.0, step=4, seed=0))
    images = torch.rand(6, 1, 8, 8)
    assert_same(apply_maps(images, affine_maps(6, strength=0.0, step=3, seed=0)), images, relative=1e-6)
    assert not torch.allclose(apply_maps(images, maps), images)
    assert torch.equal(apply_maps(images[2:4], maps[2:4]), apply_maps(images, maps)[2:4])


def test_recall_matches_a_computation_by_hand():
    queries = torch.eye(3)
    candidates = torch.tensor([[1.0, 0, 0], [0.9, 0.5, 0], [0, 0.6, 0.5]])
    assert first_ranks(queries, candidates).tolist() == [0, 1, 0]
    assert recall(queries, candidates) == {"recall@1": pytest.approx(2 / 3), "recall@5": 1.0, "recall@10": 1.0}
    assert first_ranks(torch.ones(4, 2), torch.ones(4, 2)).tolist() == [3] * 4, "ties do not count as found"


def test_configuration_survives_json_and_differences_are_named(tmp_path):
    config = TrainConfig(run_folder=tmp_path, steps=7, model=ModelConfig(text_layers=2))
    assert from_values(json.loads(to_json(config)), tmp_path) == config
    check_same_run(config, TrainConfig(run_folder=None, ranks=3, steps=7, model=ModelConfig(text_layers=2)))
    with pytest.raises(UserError, match=r"steps was 7, got 8; model.text_layers was 2, got 0"):
        check_same_run(config, TrainConfig(steps=8))
    for broken in (
        "null",
        "[]",
        '{"model": {}}',
        to_json(config).replace('"steps"', '"strides"'),
        to_json(config).replace('"steps": 7', '"steps": "7"'),
        to_json(config).replace('"auto"', '"quantum"'),
    ):
        with pytest.raises(UserError, match="not the configuration"):
            from_values(json.loads(broken), tmp_path / "config.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"batch_size": -1}, "--batch-size must be at least 0, got -1"),
        ({"workers": -2}, "--workers must be at least -1, got -2"),
        ({"batch_size": 1}, "--batch-size must be at least 2, because a pair alone has no negatives, got 1"),
        ({"image_channels": 3}, "--image-channels must be 1 for --data glyphs, which are gray, got 3"),
        ({"learning_rate": 0.0}, r"--learning-rate must be in \(0, 1e30\], got 0.0"),
        ({"label_smoothing": 2.0}, r"--label-smoothing must be in \[0, 1\], got 2.0"),
        ({"image_size": 30}, "--image-size must be a multiple of 8, got 30"),
        ({"model": ModelConfig(text_heads=3)}, r"--model.text-width must be a multiple of --model.text-heads \(3\)"),
        ({"model": ModelConfig(embedding_size=0)}, "--model.embedding-size must be at least 1, got 0"),
    ],
)
def test_invalid_configurations_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_options(TrainConfig(**options))


def stepped(seed, width=3):
    """Return a model and an optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_checkpoint_restores_weights_optimizer_and_randomness(tmp_path):
    model, optimizer = stepped(0)
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=5, seconds=1.5)
    expected = torch.rand(3)
    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    found = read_checkpoint(tmp_path, other, other_optimizer, steps=5)
    found.restore(other, other_optimizer)
    facts = found.facts
    assert (facts["step"], facts["seconds"]) == (5, 1.5)
    assert torch.equal(torch.rand(3), expected)
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert theirs.grad is None
        for name, value in optimizer.state[ours].items():
            assert torch.equal(value, other_optimizer.state[theirs][name])
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "no temporary file is left"


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model, optimizer = stepped(0)
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0)
    before = (tmp_path / FILE).read_bytes()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
        save_checkpoint(tmp_path, model.state_dict(), optimizer, step=2, seconds=0.0)
    assert (tmp_path / FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "no partial file is left"


def test_damaged_checkpoints_are_refused(tmp_path):
    model, optimizer = stepped(0)
    with pytest.raises(UserError, match="there is no checkpoint"):
        read_checkpoint(tmp_path, model, optimizer, steps=1)
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0)
    whole = (tmp_path / FILE).read_bytes()
    torch.save({"a pickle": 1}, tmp_path / "pickle.pt")
    for damaged in (whole[: len(whole) // 2], b"", (tmp_path / "pickle.pt").read_bytes()):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(UserError, match="damaged or incomplete"):
            read_checkpoint(tmp_path, model, optimizer, steps=1)
    (tmp_path / FILE).write_bytes(whole)
    with pytest.raises(UserError, match=r"does not fit this configuration's model: .* model.weight among them"):
        read_checkpoint(tmp_path, *stepped(0, width=4), steps=1)
    with TensorFile(tmp_path / FILE) as file:
        metadata, tensors = file.metadata, {name: file.read(name) for name in file.entries}
    model_alone = {name: x for name, x in tensors.items() if not name.startswith("optimizer.")}
    write_tensors(tmp_path / FILE, model_alone, metadata)
    with pytest.raises(UserError, match=r"does not fit .* optimizer.0.exp_avg among them"):
        read_checkpoint(tmp_path, model, optimizer, steps=1)
    facts = json.loads(metadata["facts"])
    for broken, message in (
        ({}, "is no checkpoint of this version: its format is None, expected"),
        ({"format": "wholebatch-train-3"}, "its format is 'wholebatch-train-3', expected .*; start a new run"),
        (metadata | {"facts": "{}"}, "must have the fields"),
        (metadata | {"facts": "[" * 100_000 + "]" * 100_000}, "nested more than 16 deep"),
        *(
            (metadata | {"facts": json.dumps(facts | {name: value})}, message)
            for name, value, message in (
                ("step", 10**9, "is of step 1000000000, expected 0 to 1"),
                ("step", -5, "must not be negative, got step -5"),
                ("step", True, "step must be int, got True"),
                ("step", 1.0, "step must be int, got 1.0"),
                ("seconds", "x", "seconds must be float or int, got 'x'"),
                ("seconds", math.nan, "NaN is not a finite number"),
                ("seconds", -1.0, "must not be negative"),
                ("save", None, "save must be str, got None"),
            )
        ),
    ):
        write_tensors(tmp_path / FILE, tensors, broken)
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path, model, optimizer, steps=1)


def test_an_invalid_random_state_changes_nothing(tmp_path):
    """The bytes match the file's digest, but torch refuses them."""
    model, optimizer = stepped(0)
    save_checkpoint(tmp_path, model.state_dict(), optimizer, step=1, seconds=0.0)
    with TensorFile(tmp_path / FILE) as file:
        metadata, tensors = file.metadata, {name: file.read(name) for name in file.entries}
    other, other_optimizer = stepped(1)
    other_optimizer.state.clear()
    random, weights = torch.get_rng_state(), [p.detach().clone() for p in other.parameters()]
    write_tensors(tmp_path / FILE, tensors | {"rng.cpu": torch.full_like(tensors["rng.cpu"], 255)}, metadata)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors has no state of torch's random generator"):
        read_checkpoint(tmp_path, other, other_optimizer, steps=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert not other_optimizer.state
    for p, before in zip(other.parameters(), weights, strict=True):
        assert torch.equal(p, before)


def test_metrics_that_are_not_finite_can_be_read_again(tmp_path):
    """These may be the last ones of a run that diverged and continues from an earlier checkpoint."""
    folder = RunFolder(tmp_path)
    folder.append({"step": 1, "loss": 1.0, "logit_scale": math.nan, "validation": {"recall@1": 0.5}})
    assert folder.metrics() == [{"step": 1, "loss": 1.0, "logit_scale": None, "validation": {"recall@1": 0.5}}]


@pytest.mark.parametrize("content", [b'{"step": 1}\n', b"[1]\n", b'{"step": 1, "loss": 1.0\n{}\n', b"\xff\n"])
def test_invalid_metrics_are_refused(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as the metrics of a run"):
        RunFolder(tmp_path).metrics()

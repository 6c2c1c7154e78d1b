"""Run folders that someone has edited: another run's weights, features of other rows, sizes, optimizers, code."""

import json
import math
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from glyph_files import SMALL, write_pairs

from wholebatch.__main__ import main
from wholebatch._base.bounded_json import sealed, unsealed
from wholebatch._base.tensor_file import TensorFile, write_tensors
from wholebatch._base.user_error import UserError
from wholebatch_train.encoders.make import digest_of, open_dual_encoder
from wholebatch_train.run.checkpoint import FILE as CHECKPOINT
from wholebatch_train.run.record import digests_of_run

MINE = """
from pathlib import Path
import torch
Path({marker!r}).write_text("executed")
class Letters(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 12)
    def tokenize(self, texts):
        return torch.tensor([list(text.encode()[:20].ljust(20)) for text in texts])
    def forward(self, ids):
        return self.table(ids).mean(1)
"""
NAN = float("nan")
FEW = ["--steps", "2", "--no-audit", "--no-tensorboard", "--workers", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Train two runs with the same shapes, and search in each."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in "01":
        own = ["--data", data, "--run-folder", folder / seed, "--keep-best", "--seed", seed]
        assert call("train", *own, *SMALL, *FEW) == call("search", folder / seed, "A", "-k", "1") == 0
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return shutil.copytree(runs / "0", tmp_path / "run")


@pytest.fixture(scope="module")
def run_of_classes(tmp_path_factory):
    """Train a run of `--task identify`."""
    folder = tmp_path_factory.mktemp("classes")
    faces = write_pairs(folder / "data", faces=("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono"))
    made = ["--data", faces, "--run-folder", folder / "run", "--task", "identify"]
    assert call("train", *made, *SMALL, *FEW) == 0
    return folder / "run"


@pytest.fixture
def classes(run_of_classes, tmp_path):
    return shutil.copytree(run_of_classes, tmp_path / "classes")


def call(*argv):
    return main([str(each) for each in argv])


def mistake(capsys, *argv):
    capsys.readouterr()
    assert call(*argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def rewrite(path, change=lambda tensors, metadata: None, **facts):
    """Write a file of tensors again, with valid digests, after `change` has changed tensors and metadata."""
    with TensorFile(path) as file:
        tensors, metadata = {name: file.read(name) for name in file.entries}, {**file.metadata, **facts}
    change(tensors, metadata)
    write_tensors(path, tensors, metadata)


# Features


def columns_of(path):
    group = pq.ParquetFile(path).metadata.row_group(0)
    return [group.column(number) for number in range(group.num_columns)]


def flipped_bit(path):
    (column,) = (each for each in columns_of(path) if each.path_in_schema.startswith("features"))
    content = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    content[first + column.total_compressed_size - 9] ^= 1  # in the last page of features
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


def not_a_number(path):
    table = pq.read_table(path)
    rows = table["features"].to_pylist()
    rows[3][0] = float("nan")
    place = table.column_names.index("features")
    column = pa.array(rows, table.schema.field("features").type)
    pq.write_table(table.set_column(place, table.schema.field("features"), column), path)


def of_other_rows(path):
    (other,) = path.parent.parent.parent.glob("other-*.parquet")
    shutil.copyfile(other, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flipped_bit, "cannot be read as a file of features"),
        (cut_short, "is damaged, or has features of other rows; remove it"),
        (not_a_number, "row 4: its features are not finite; embed the data again"),
        (of_other_rows, "is damaged, or has features of other rows; remove it"),
    ],
)
def test_features_that_are_not_those_written_are_refused(run, data, tmp_path, capsys, damage, message):
    (path,) = (run / "features").iterdir()
    shutil.copyfile(path, tmp_path / "before")
    assert call("search", run, data.parent / "images" / "41.png", "-k", "1") == 0
    (texts,) = {*(run / "features").iterdir()} - {path}
    shutil.move(texts, tmp_path / f"other-{texts.name}")
    damage(path)
    assert message in mistake(capsys, "search", run, "A")
    path.unlink()
    assert call("search", run, "A", "-k", "1") == 0
    assert path.read_bytes() == (tmp_path / "before").read_bytes(), "computed again, to the same bytes"


def test_a_link_in_place_of_the_folder_of_features_is_refused(run, tmp_path, capsys):
    shutil.move(run / "features", tmp_path / "elsewhere")
    (run / "features").symlink_to(tmp_path / "elsewhere")
    assert f"{run / 'features'} is a link; expected the folder itself" in mistake(capsys, "search", run, "A")
    (run / "features").unlink()
    (run / "features").mkdir()
    (path,) = (tmp_path / "elsewhere").iterdir()
    (run / "features" / path.name).symlink_to(path)
    assert "is a link; expected the file itself" in mistake(capsys, "search", run, "A")


def test_features_in_files_of_the_user_are_checked(run, data, tmp_path, capsys):
    file = tmp_path / "f.parquet"
    assert call("embed", run, data, "--out", file) == 0
    table = pq.read_table(file)
    rows = table["features"].to_pylist()
    rows[3][3] = math.inf
    column = table.column_names.index("features")
    infinite = table.set_column(column, table.schema.field(column), pa.array(rows, table.schema.field(column).type))
    pq.write_table(infinite, tmp_path / "infinite.parquet")
    said = mistake(capsys, "search", run, "A", "--in", tmp_path / "infinite.parquet")
    assert "row 4: its features are not finite" in said
    content = bytearray(file.read_bytes())
    content[content.index(b"PAR1", 4) // 2] ^= 1
    file.write_bytes(content)
    assert "cannot be read as a file of features" in mistake(capsys, "search", run, "A", "--in", file)


# Weights


@pytest.mark.parametrize("weights", ["final", "best", "checkpoint"])
def test_weights_of_another_run_are_refused(runs, run, data, tmp_path, capsys, weights):
    name = {"final": "model.safetensors", "best": "best.safetensors", "checkpoint": CHECKPOINT}[weights]
    kind = "checkpoint" if weights == "checkpoint" else "weights"
    shutil.copyfile(runs / "1" / name, run / name)
    for command in (["search", run, "A"], ["embed", run, data, "--out", tmp_path / "f.npy"], ["evaluate", run, data]):
        said = mistake(capsys, *command, "--weights", weights)
        assert f"{run / 'config.json'} is not the file that the {kind} {name} was written with" in said
    assert call("search", runs / "1", "A", "-k", "1", "--weights", weights) == 0


def test_encoders_of_another_run_are_refused_beside_its_final_weights(runs, run, capsys):
    shutil.copyfile(runs / "1" / "model.safetensors", run / "model.safetensors")
    assert "was written with" in mistake(capsys, "search", run, "A", "--weights", "best")


# Sizes


def resealed(run, **sizes):
    """Change sizes in config.json, and write digests that fit."""
    path = run / "config.json"
    values = unsealed(path.read_bytes(), "config")
    values["model"].update({name: value for name, value in sizes.items() if name in values["model"]})
    values.update({name: value for name, value in sizes.items() if name in values})
    path.write_bytes(sealed(values))
    rewrite(run / "model.safetensors", **digests_of_run(run))


def test_sizes_of_a_configuration_that_the_weights_do_not_have_take_no_memory(run, capsys):
    resealed(run, embedding_size=65536, image_width=4096, image_size=4096)  # 562 TB
    assert "does not fit the encoders of the run" in mistake(capsys, "search", run, "A")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("encoders.json", {"embedding_size": -3}, "--model.embedding-size must be at least 1, got -3"),
        ("encoders.json", {"embedding_size": 10**9}, "--model.embedding-size must be at most 65536, got 1000000000"),
        ("encoders.json", {"embedding_size": "x"}, "--model.embedding-size must be an integer, got 'x'"),
        ("encoders.json", {"sides": {"image": "../../other/run", "text": "text"}}, "it must name two sides of image"),
        ("encoders.json", {"sides": {"image": "image"}}, "it must name two sides of image"),
        ("encoders.json", {"sides": ["image", "text"]}, "is not of this version"),
        ("image/encoder.json", {"image_size": 10**6}, "--image-size must be at most 4096, got 1000000"),
        ("image/encoder.json", {"image_size": 0}, "--image-size must be at least 8, got 0"),
        ("image/encoder.json", {"channels": 2}, "--image-channels must be 0 or 1 or 3, got 2"),
        ("image/encoder.json", {"sizes": {"image_width": 10**7}}, "--model.image-width must be at most 4096"),
        ("text/encoder.json", {"sizes": {"text_buckets": 2**40}}, "--model.text-buckets must be at most"),
        ("text/encoder.json", {"sizes": {"text_heads": 0}}, "--model.text-heads must be at least 1, got 0"),
        ("text/encoder.json", {"sizes": {"text_width": 1.5}}, "--model.text-width must be an integer, got 1.5"),
    ],
)
def test_values_of_encoders_are_checked_like_options(run, file, change, message):
    path = run / "encoders" / file
    values = json.loads(path.read_text())
    values |= {name: values[name] | x if name == "sizes" else x for name, x in change.items()}
    path.write_text(json.dumps(values))
    with pytest.raises(UserError) as caught:
        open_dual_encoder(run / "encoders")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_built_in_encoders_are_those_of_the_configuration(run, capsys):
    """With a digest that fits, whatever the folder of the encoders says: nothing of it is opened."""
    path = run / "encoders" / "image" / "encoder.json"
    path.write_text(json.dumps({"format": "wholebatch-encoder-1", "form": "timm image", "model": "hf-hub:a/b"}))
    rewrite(run / "model.safetensors", encoders=digest_of(run / "encoders"))
    capsys.readouterr()
    assert call("search", run, "A", "-k", "1") == 0


def nan(x):
    return x * NAN


@pytest.mark.parametrize(
    ("command", "name", "change", "message"),
    [
        ("search", "image.project.weight", nan, "gives numbers that are not finite, by its final weights"),
        ("embed", "image.project.weight", nan, "gives numbers that are not finite, by its final weights"),
        ("evaluate", "project.weight", nan, "gives numbers that are not finite, by its final weights"),
        ("evaluate", "centers", nan, "gives numbers that are not finite, by its final weights"),
        ("evaluate", "centers", lambda x: x[:1], r"has centers of shape \(1, 32\) in its final weights, expected"),
    ],
)
def test_weights_that_give_no_numbers_are_refused(run, classes, data, tmp_path, capsys, command, name, change, message):
    run = classes if command == "evaluate" else run
    with TensorFile(run / "model.safetensors") as file:
        tensors, metadata = {each: file.read(each) for each in file.entries}, file.metadata
    write_tensors(run / "model.safetensors", tensors | {name: change(tensors[name])}, metadata)
    more = {"search": ["A", "-k", "1"], "embed": [data, "--side", "image", "--out", tmp_path / "out.npy"]}
    said = mistake(capsys, command, run, *more.get(command, [data]), "--workers", "0")
    assert re.search(message, said)
    assert not (tmp_path / "out.npy").exists()


# Training


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", -1), ("step", 10**6), ("exp_avg_sq", -1), ("exp_avg_sq", float("inf")), ("exp_avg", float("nan"))],
)
def test_impossible_states_of_an_optimizer_are_refused(run, capsys, name, value):
    rewrite(run / CHECKPOINT, lambda tensors, _: tensors[f"optimizer.0.{name}"].fill_(value))
    before = (run / "metrics.jsonl").read_bytes()
    said = mistake(capsys, "train", "--resume", run, "--until-step", "3", "--no-tensorboard")
    assert f"{CHECKPOINT} has no state of an optimizer in 'optimizer.0.{name}'" in said
    assert (run / "metrics.jsonl").read_bytes() == before


def test_weights_that_are_not_finite_are_not_resumed_from(run, capsys):
    rewrite(run / CHECKPOINT, lambda tensors, _: tensors["model.encoder.image.project.weight"].view(-1)[:1].fill_(NAN))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = mistake(capsys, "train", "--resume", run, "--until-step", "3", "--no-tensorboard", "--workers", "0")
    assert f"{CHECKPOINT} has weights that are not finite in 'model.encoder.image.project.weight'" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_deeply_nested_options_are_one_line(tmp_path, capsys):
    path = tmp_path / "config.toml"
    for text in ("a = " + "[" * 10**5, "a" + ".a" * 10**5 + " = 1"):
        path.write_text(text)
        assert f"--config: {path} is no file of options" in mistake(capsys, "train", "--config", path)


def test_a_number_of_the_options_that_no_float_holds_is_one_line(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("learning-rate = -1" + 400 * "0")
    assert "--learning-rate must be a number, got -10" in mistake(capsys, "train", "--config", path)


def test_a_file_of_a_run_is_executed_if_asked(data, tmp_path, capsys):
    """By --trust, or where the command line names it, in `train` as in the commands that use a run."""
    marker, mine, run = tmp_path / "executed", tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(MINE.format(marker=str(marker)))
    named = ["--text-encoder", f"{mine}:Letters"]

    def executed():
        found = marker.exists()
        marker.unlink(missing_ok=True)
        return found

    assert call("train", "--data", data, "--run-folder", run, *SMALL, *FEW, *named) == 0
    assert executed()
    options = tmp_path / "options.toml"
    options.write_text(f'text-encoder = "{mine}:Letters"\ntrust = true\n')
    for given in (["--resume", run], ["--config", run / "config.json"], ["--config", options]):
        said = mistake(capsys, "train", *given)
        assert (
            f"has --text-encoder {mine}:Letters, Python code that would be executed; read it, and pass --trust" in said
        )
        assert not executed()
    assert "trust" not in json.loads((run / "config.json").read_text())
    for asked in (["--trust"], named):
        assert call("train", "--resume", run, *asked) == 0
        assert executed()


def test_the_command_that_resumes_a_run_of_a_file_can_be_pasted(tmp_path):
    from wholebatch_train.config import TrainConfig
    from wholebatch_train.run.resume import resume_command

    assert resume_command(tmp_path, TrainConfig(text_encoder="mine.py:f")).endswith(f"{tmp_path} --trust")
    assert resume_command(tmp_path, TrainConfig()).endswith(str(tmp_path))

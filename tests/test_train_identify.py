"""`wholebatch train --task identify`: the classifier is sharded over ranks, and the numbers do not change."""

import json
import shutil
import signal

import pytest
import torch
from glyph_files import write_pairs
from safetensors.torch import load_file
from train_runs import TRAIN, difference, finish, killed, losses, metrics, options, recorded

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train.config import HeadConfig, TrainConfig
from wholebatch_train.data.classes import TEST_FACES, LabeledImages, classes_of_texts, glyph_classes, with_split
from wholebatch_train.data.load import images_for_validation, load_data
from wholebatch_train.data.pairs import Order, Pairs
from wholebatch_train.data.sides import DrawnPictures, Texts
from wholebatch_train.encoders.small import Pad
from wholebatch_train.option_checks import check_options
from wholebatch_train.report.evidence import surest_mistakes
from wholebatch_train.tasks.batches import ImageBatches, Reader
from wholebatch_train.tasks.evaluation import accepted_at, best_possible, rows_to_verify

FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif-Bold")
pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process
QUICK = ["--no-audit", "--no-tensorboard"]
# A margin with running averages, and a sample of classes: both continue after a resume without a difference.
HEAD = ["--head.margin", "adaface", "--head.scale", "16", "--head.sample-rate", "0.4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"), faces=FACES)


def command(data, run, *more, steps=30):
    return TRAIN + options(data, run, "--task", "identify", *HEAD, *more, steps=steps)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    return run, finish(command(data, run)).stdout


def test_a_run_writes_all_documented_files(uninterrupted):
    run, output = uninterrupted
    assert {path.name for path in run.iterdir()} - {"tensorboard"} == {
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "head-30",
        "best.safetensors", "model.safetensors", "encoders", "report.json", "report.html", "lock",
    }  # fmt: skip
    assert [row["step"] for row in metrics(run)] == list(range(1, 31))
    assert losses(run)[-1] < 0.8 * losses(run)[0], "it learns"
    report = json.loads((run / "report.json").read_text())
    assert (report["classes"], report["test_images"]) == (158, 210)
    assert report["top_1_at_most"] >= report["top_1"] > 5 * report["chance"]
    assert report["top_5"] > report["top_1"]
    assert report["tar"] < 0.1, "here more than one in a thousand of the other pairs are nearly equal pictures"
    assert report["threshold"] > 0.9
    assert load_file(run / "model.safetensors")["centers"].shape == (158, 32)
    assert "top-1 accuracy" in output
    assert "158 classes: 564 images for training, 16 for validation, 210 for test (images never seen)" in output


@pytest.mark.usefixtures("ranks_are_forks")
def test_the_curve_is_the_same_on_any_number_of_processes(data, uninterrupted, tmp_path):
    """On two, without chunks, another test resumes."""
    more = ["--task", "identify", *HEAD, "--ranks", "3", "--chunk-size", "9", *QUICK]
    assert main(["train", *options(data, tmp_path / "run", *more, steps=30)]) == 0
    assert difference(uninterrupted[0], tmp_path / "run") <= 1e-4
    found, true = (load_file(run / "model.safetensors")["centers"] for run in (tmp_path / "run", uninterrupted[0]))
    assert (found - true).norm() < 1e-3 * true.norm()


def test_killed_and_resumed_gives_the_same_numbers(data, uninterrupted, tmp_path):
    run = tmp_path / "run"
    killed(command(data, run, *QUICK), when=lambda: recorded(run) >= 13)
    assert recorded(run) < 30
    assert main(["train", "--resume", str(run)]) == 0
    assert metrics(run) == metrics(uninterrupted[0])


def test_resume_with_another_number_of_processes(data, uninterrupted, tmp_path):
    run = tmp_path / "run"
    when = (run / "checkpoint.safetensors").exists
    killed(command(data, run, "--ranks", "2", *QUICK), when=when, kill=signal.SIGINT)
    assert recorded(run) < 30
    assert main(["train", "--resume", str(run), "--ranks", "1"]) == 0
    assert difference(uninterrupted[0], run) <= 1e-4


@pytest.mark.parametrize(
    ("margin", "more"),
    [(margin, []) for margin in ("arcface", "cosface", "sphereface", "normface", "magface", "curricularface")]
    + [("arcface", ["--head.m", "0.2", "--head.sub-centers", "2", "--label-smoothing", "0.1"])],
)
def test_other_margins_train(data, tmp_path, margin, more, capsys):
    every = options(data, tmp_path / "run", "--task", "identify", "--head.margin", margin, "--head.scale", "16", *more)
    assert main(["train", *every]) == 0
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": HeadConfig(sample_rate=0.1)}, "--head.sample-rate must be left out without --task identify, got 0.1"),
        ({"task": "identify", "loss": "siglip"}, "--loss must be left out for --task identify"),
        ({"task": "identify", "head": HeadConfig(sample_rate=1.5)}, r"--head.sample-rate must be in \[0, 1\], got 1.5"),
        ({"task": "identify", "head": HeadConfig(margin="normface", m=0.1)}, "--head.m must be left out for"),
        (
            {"task": "identify", "head": HeadConfig(margin="sphereface", m=0.1)},
            r"--head.m must be in \[1, 10\], got 0.1",
        ),
    ],
)
def test_invalid_configurations_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        check_options(TrainConfig(**settings))


def test_each_task_has_its_defaults(monkeypatch):
    """An option that is given is used, even if it equals the other task's default."""
    asked = []
    monkeypatch.setattr("wholebatch_train.launch.run", asked.append)
    for argv in ([], ["--task", "identify"], ["--task", "identify", "--steps", "300"]):
        assert main(["train", *argv]) == 0
    assert [config.steps for config in asked] == [300, 450, 300]


def test_mistakes_give_one_line(data, tmp_path, capfd):
    pairs = write_pairs(tmp_path / "once")
    unlabeled = tmp_path / "once" / "unlabeled.csv"
    header, *rows = pairs.read_text().splitlines()
    texts = [f"{row.split(',')[0]},{number % 3 - 1}" for number, row in enumerate(rows)]
    unlabeled.write_text("\n".join([header, *texts]))
    for where, more, message in (
        (
            pairs,
            [],
            "--validation-texts 16 needs as many images, at most half of those that a text has to train on; got 0",
        ),
        (pairs, ["--validation-texts", "0"], "--data has no image for the validation: expected a text with two images"),
        (unlabeled, [], "--data has the class -1: expected names or numbers >= 0; leave out rows without a class"),
        (data, ["--batch-size", "1", "--ranks", "2"], "--batch-size must be at least the number of ranks, 2; got 1"),
    ):
        assert main(["train", *options(where, tmp_path / "run", "--task", "identify", *more)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "run").exists()


def test_a_removed_head_is_refused(uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    shutil.rmtree(run / "head-30")
    assert main(["train", "--resume", str(run)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "head-30 holds no checkpoint" in lines[0]


def test_a_damaged_head_is_refused(uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    for file in (run / "head-30").glob("rank-*"):
        file.write_bytes(file.read_bytes()[:100])
    assert main(["train", "--resume", str(run)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "rank-00000-of-00001.safetensors is damaged or incomplete" in line


def test_a_head_that_is_a_link_or_of_another_run_is_refused(data, uninterrupted, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(uninterrupted[0], run)
    assert main(["train", *options(data, other, "--task", "identify", *HEAD, "--seed", "1", *QUICK, steps=30)]) == 0
    (run / "head-30").rename(tmp_path / "head")
    for place, message in (
        (lambda: (run / "head-30").symlink_to(tmp_path / "head"), "head-30 is a link; expected the folder itself"),
        (lambda: shutil.copytree(other / "head-30", run / "head-30"), "head-30 belongs to another save"),
    ):
        place()
        capsys.readouterr()
        assert main(["train", "--resume", str(run)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert message in line
        (run / "head-30").unlink() if (run / "head-30").is_symlink() else shutil.rmtree(run / "head-30")


@pytest.mark.parametrize("more", [[], ["--ranks", "2"]])
def test_a_model_that_is_not_finite_stops_the_run(data, tmp_path, capfd, more):
    wild = ["--task", "identify", "--learning-rate", "1e30", "--warmup-steps", "0", *QUICK, *more]
    assert main(["train", *options(data, tmp_path / "run", *wild, steps=1)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "training stopped in step 1" in line


# Parts of the task.
def test_faces_of_the_test_are_not_in_training():
    data = glyph_classes(32, validation=325, seed=0)
    assert len(TEST_FACES) == 2
    assert (len(data), len(data.train), len(data.validation), len(data.test)) == (6494, 38159, 325, 8278)
    for part in (data.train, data.validation, data.test):
        assert (data.labels[part] >= 0).all()
    together = torch.cat([data.train, data.validation, data.test])
    assert len(together.unique()) == len(together)
    assert len(data.labels[data.train].unique()) == 6494, "each class has an image to train on"
    whole = ImageBatches(data, Reader(Pad(32, 1), 1), TrainConfig(batch_size=64), slice(0, 64))
    a, b = whole(0), whole(1)
    drawn = data.pictures.pixels
    rows = Order(data.train, batch_size=64, seed=0).batch(0)
    assert torch.isin(rows, data.train).all()
    assert torch.equal(a.images, drawn[rows])
    assert torch.equal(a.labels, data.labels[rows])
    assert not torch.equal(a.labels, b.labels)
    part = ImageBatches(data, Reader(Pad(32, 1), 1), TrainConfig(batch_size=64), slice(40, 64))(0)
    assert torch.equal(part.images, a.images[40:])


def test_validation_takes_one_image_of_some_classes():
    names = ["a", "a", "a", "b", "b", "c", "d"]
    images = DrawnPictures(torch.zeros(7, 1, 8, 8, dtype=torch.uint8))
    for_test = torch.tensor([True, False, False, False, False, False, True])
    data = with_split(images, names, for_test, validation=2, seed=0)
    assert data.names == ("a", "b", "c")
    assert sorted(data.labels[data.validation].tolist()) == [0, 1]
    assert sorted(data.labels[data.train].tolist()) == [0, 1, 2]
    assert data.test.tolist() == [0], "classes that are not in training are left out"
    fewer = with_split(images, names, for_test, validation=5, at_most=True, seed=0)
    assert torch.equal(fewer.validation, data.validation), "as many as there are"
    with pytest.raises(UserError, match=r"--validation-texts 5 needs as many images, .*; got 2$"):
        with_split(images, names, for_test, validation=5, seed=0)


def of_sizes(*sizes):
    """Return pairs of so many images of each text."""
    names = [f"text {number:02}" for number, size in enumerate(sizes) for _ in range(size)]
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    images = DrawnPictures(torch.zeros(1, 1, 8, 8, dtype=torch.uint8).expand(len(names), 1, 8, 8))
    return Pairs.grouped({"image": images, "text": Texts(names)}, group)


@pytest.mark.parametrize(
    ("validation", "counts"),
    [(1, [0, 0, 0, 1]), (3, [1, 1, 0, 1]), (4, [2, 1, 0, 1]), (9, [7, 1, 0, 1]), (23, [21, 1, 0, 1])],
)
def test_validation_takes_a_further_image_of_a_class_once_all_have_one(validation, counts):
    """One image of each of three large classes would tell nothing. A class keeps half of its images or more."""
    pairs = of_sizes(48, 2, 1, 5)  # to train on: 44, 2, 1 and 3
    data = classes_of_texts(pairs, validation=validation, seed=0)
    found = torch.bincount(data.labels[data.validation], minlength=4).tolist()
    assert sorted(found) == sorted(counts)
    assert found[2] == 0, "its only image is to train on"
    assert len(torch.cat([data.train, data.validation, data.test]).unique()) == 56
    fewer = classes_of_texts(pairs, validation=max(1, validation - 1), seed=0).validation
    assert torch.isin(fewer, data.validation).all(), "one more image leaves the others"


def test_half_of_a_class_is_the_most_for_validation():
    assert len(classes_of_texts(of_sizes(48, 2, 1, 5), validation=24, seed=0).validation) == 24
    with pytest.raises(UserError, match=r"--validation-texts 25 needs as many images, .*; got 24$"):
        classes_of_texts(of_sizes(48, 2, 1, 5), validation=25, seed=0)


@pytest.mark.parametrize(
    ("sizes", "validation", "test"), [([1000] * 3, 150, 300), ([19] * 10, 9, 20), ([5] * 158, 7, 316)]
)
def test_large_classes_have_one_in_twenty_images_for_validation(sizes, validation, test):
    pairs = of_sizes(*sizes)
    data = classes_of_texts(pairs, validation=images_for_validation(len(sizes), sum(sizes)), seed=0)
    assert (len(data.validation), len(data.test)) == (validation, test)
    counts = torch.bincount(data.labels[data.validation], minlength=len(sizes))
    assert counts.max() - counts.min() <= 1, "as many of each class, or one more"


def test_the_test_of_large_classes_is_of_about_ten_thousand_images():
    data = classes_of_texts(of_sizes(80_000, 80_000, 30), validation=1, seed=0)
    assert torch.bincount(data.labels[data.test]).tolist() == [3333, 3333, 3]


def test_of_many_images_the_pairs_of_some_classes_are_verified():
    assert rows_to_verify(torch.zeros(10_000)).tolist() == [*range(10_000)]
    labels = (torch.arange(30_000) * 7) % 15_000  # two images of each class, far from each other
    rows = rows_to_verify(labels)
    assert len(rows.unique()) == 10_000
    assert rows.tolist() == sorted(rows.tolist())
    assert (torch.bincount(labels[rows]).unique()).tolist() == [0, 2], "whole classes"
    assert 2000 < (labels[rows] < 7500).sum() / 2 < 3000, "of all parts"
    two = torch.arange(30_000) % 2
    assert torch.bincount(two[rows_to_verify(two)]).tolist() == [5000, 5000]


def test_the_test_has_two_images_of_few_and_a_tenth_of_many():
    names = [*("few",) * 3, *("pair",) * 2, *("twenty",) * 20, *("many",) * 57]
    group = torch.tensor([sorted({*names}).index(name) for name in names])
    images = DrawnPictures(torch.zeros(len(names), 1, 8, 8, dtype=torch.uint8))
    pairs = Pairs.grouped({"image": images, "text": Texts(names)}, group)
    data = classes_of_texts(pairs, validation=1, seed=0)
    held_out = pairs.order[data.test].tolist()
    assert held_out == [1, 2, 23, 24, *range(77, 82)], "the last ones of each text"


def test_verification_is_that_of_all_pairs():
    """Compare blocks smaller than the rows with the definition, which has all similarities in memory."""
    torch.manual_seed(0)
    labels = torch.randint(200, (1300,))
    x = torch.nn.functional.normalize(torch.randn(200, 8)[labels] + torch.randn(1300, 8))
    i, j = torch.triu_indices(1300, 1300, 1)
    similarity, same = (x @ x.T)[i, j], labels[i] == labels[j]
    for far in (0.0, 1e-3, 0.3):
        tar, threshold = accepted_at(x, labels, far)
        accepted = similarity > threshold
        assert accepted[~same].double().mean() <= far
        assert (similarity[~same] >= threshold).double().mean() > far, "no smaller threshold is enough"
        assert tar == pytest.approx(accepted[same].double().mean().item(), abs=1e-3)


def test_the_best_possible_accuracy_counts_equal_pictures():
    assert best_possible([0, 0, 0, 3, 4], torch.tensor([0, 0, 1, 2, 1])) == 0.8


def test_equal_pictures_have_equal_numbers(data):
    """Those that are drawn by their pixels, those of files by their bytes."""
    drawn = glyph_classes(16, validation=10, seed=0)
    pixels = drawn.pictures.pixels.flatten(1)
    _, of_pixels = torch.unique(pixels[:2000], dim=0, return_inverse=True)
    same = of_pixels[:, None] == of_pixels
    assert torch.equal(drawn.numbers[:2000, None] == drawn.numbers[:2000], same)
    assert same.sum() > 2000, "some are equal"
    _, files = load_data(TrainConfig(task="identify", data=str(data), workers=0), 1)
    read = [picture.tobytes() for picture in files.pictures.items(torch.arange(len(files.labels)))]
    equal = torch.tensor([[one == other for other in read[:100]] for one in read[:100]])
    assert torch.equal(files.numbers[:100, None] == files.numbers[:100], equal)


def test_the_surest_mistakes_are_about_pictures_that_differ():
    """Class 1 has the picture that a test image of class 0 is mistaken for it with; class 2 has another."""
    labels = torch.tensor([0, 1, 2, 1, 0, 0, 2])
    split = torch.arange(4), torch.arange(0), torch.arange(4, 7)
    numbers = torch.tensor([1, 1, 3, 2, 2, 3, 1])
    data = LabeledImages(None, labels, ("A", "B", "C"), *split, numbers=numbers)
    assert best_possible(numbers[data.test].tolist(), labels[data.test]) == 1.0
    logits = torch.tensor([0.1, 0.9, 0.5])
    assert surest_mistakes(data, torch.tensor([1, 2, 0]), logits) == []
    assert surest_mistakes(data, torch.tensor([2, 1, 2]), logits) == [1, 0]

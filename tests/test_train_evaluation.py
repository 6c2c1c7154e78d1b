"""Validation and test on several ranks, in parts; the waits for the first rank; and what a checkpoint reads."""

import hashlib
import json
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from glyph_files import SMALL, write_pairs

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train import loop
from wholebatch_train.config import ModelConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.ranks import all_ranks
from wholebatch_train.ranks.all_ranks import WaitForFirstRank, on_all_ranks
from wholebatch_train.run.checkpoint import first_lines
from wholebatch_train.run.run_folder import RunFolder
from wholebatch_train.tasks.make import make_task
from wholebatch_train.tasks.retrieve import Retrieve

pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process
MODEL = ModelConfig(embedding_size=16, image_width=8, text_width=16, text_layers=1, text_buckets=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), faces=faces))


@pytest.fixture(scope="module")
def queries(tmp_path_factory):
    path = tmp_path_factory.mktemp("queries") / "queries.jsonl"
    rows = [(i, i // 3) for i in range(120)] + [(i, i + 1) for i in range(0, 120, 5)]
    path.write_text("".join(json.dumps({"query": f"q {i}", "positive": f"d {j}"}) + "\n" for i, j in rows))
    return str(path)


def configured(data, **more):
    options = {
        "batch_size": 24, "image_size": 16, "image_channels": 1, "validation_texts": 2, "test_texts": 8, "workers": 0,
        "chunk_size": 7,
    }  # fmt: skip
    return TrainConfig(data=data, model=MODEL, **(options | more))


def found(config):
    """Return the validation and the test of untrained weights, and the numbers of rows that were encoded at a time."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config, loaded = load_data(config, size)
    task = make_task(config, loaded, torch.device("cpu"), rank=rank, size=size)
    encoders = [m for m in task.module.modules() if hasattr(m, "prepare")]
    encoded = Counter()
    for encoder in encoders:
        encoder.register_forward_hook(lambda _m, _inputs, rows: encoded.update([len(rows)]))
    return task.validate(), task.test(), encoded


def reports(data, queries):
    """Return those of all tasks, and test a wait for the first rank that is longer than the group's timeout."""
    every = [
        found(configured(data)),
        found(configured(data, task="identify")),
        found(configured(queries, test_texts=2)),
        found(configured(data, fsdp=True)),
    ]
    if dist.is_initialized():
        check_the_wait()
    return every


def check_the_wait():
    """The same wait for a first rank that is busy for 1.5 s, without and with a timeout of 1 s."""
    wait = WaitForFirstRank()
    all_ranks.LONGEST = timedelta(seconds=1)
    impatient = WaitForFirstRank()
    if dist.get_rank() == 0:
        time.sleep(1.5)
    wait()
    if dist.get_rank() > 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
            impatient()
    wait()


def test_figures_are_the_same_on_any_number_of_ranks(data, queries):
    expected = reports(data, queries)
    for validation, test, _ in expected:
        assert validation
        assert test
    for size in (2, 3):
        by_rank = run_ranks(reports, size, data, queries)
        for alone, first, *others in zip(expected, *by_rank, strict=True):
            assert equal(first[0], alone[0])
            assert equal(first[1], alone[1])
            assert all(report == {} for other in others for report in other[:2])
            calls = [sum(each[2].values()) for each in (first, *others)]
            assert len(set(calls)) == 1, "sharded weights need all ranks in every call"
            assert calls[0] <= -(-sum(alone[2].values()) // size) + 5, "each rank encodes its part"
            assert max(max(each[2]) for each in (first, *others)) <= 7


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return one == other or one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(("chunk_size", "largest"), [(0, 512), (7, 7), (600, 512)])
def test_evaluation_encodes_no_more_rows_at_a_time_than_a_chunk(tmp_path, chunk_size, largest):
    path = tmp_path / "pairs.csv"
    path.write_text("query,positive\n" + "".join(f"q {i},d {i}\n" for i in range(700)))
    config = configured(str(path), batch_size=8, chunk_size=chunk_size, test_texts=600)
    _, report, encoded = found(config)
    assert report["query_to_document"]["queries"] == 600
    assert max(encoded) == largest
    assert sum(rows * times for rows, times in encoded.items()) == 2 * (2 + 600) + 100  # and the rest of the corpus
    assert found(replace(config, chunk_size=50))[1] == report


def test_the_longest_wait_can_be_given_to_gloo():
    assert timedelta(days=1) < all_ranks.LONGEST
    assert all_ranks.LONGEST.total_seconds() * 1000 < 2**31, "a number of milliseconds that fits an int"


ALONE = ("validate", "test", "save")


def test_every_rank_waits_after_what_the_first_does_alone(data, tmp_path, monkeypatch):
    events = []

    def recorded(name):
        original = getattr(Retrieve, name)

        def act(self, *args, **named):
            events.append(name)
            return original(self, *args, **named)

        return act

    for name in (*ALONE, "add_gradients"):
        monkeypatch.setattr(Retrieve, name, recorded(name))
    monkeypatch.setattr(RunFolder, "keep_best", lambda *_: events.append("keep_best"))
    monkeypatch.setattr(RunFolder, "write_page", lambda *_: events.append("write_page"))
    monkeypatch.setattr(loop.WaitForFirstRank, "__call__", lambda _: events.append("wait"))
    options = ["--steps", "5", "--validate-every", "2", "--checkpoint-every", "2", "--keep-best", "--no-audit"]
    assert main(["train", "--data", data, "--run-folder", str(tmp_path / "run"), *SMALL, *options]) == 0
    assert {*events} == {*ALONE, "add_gradients", "keep_best", "write_page", "wait"}
    assert events[0] == "wait", "for ranks that load the data for longer, for instance on the machine without a cache"
    for event, after in zip(events, [*events[1:], "end"], strict=True):
        assert event in ("add_gradients", "wait") or after == "wait", events


def test_a_patient_action_is_waited_for_also_where_it_fails(monkeypatch):
    events = []
    monkeypatch.setattr(WaitForFirstRank, "__call__", lambda _: events.append("wait"))

    def facts(_):
        events.append("facts")
        return {}

    def fails():
        events.append("act")
        raise UserError("a picture")

    on_all_ranks("set-up", lambda: events.append("act"), facts, patient=True)
    assert events == ["act", "wait", "facts"]
    events.clear()
    with pytest.raises(UserError, match=r"^a picture$"):
        on_all_ranks("set-up", fails, facts, patient=True)
    assert events == ["act", "wait"], "else the others would wait for it until their connection is closed"


def test_checkpoints_do_not_read_the_metrics_again(data, tmp_path, monkeypatch):
    """At the start of a resumed run the file is read, and for the report; not at each of the checkpoints."""
    reads = []

    def read(path, count):
        reads.append(count)
        return first_lines(path, count)

    for module in ("checkpoint", "run_folder"):
        monkeypatch.setattr(f"wholebatch_train.run.{module}.first_lines", read)
    run = tmp_path / "run"
    options = ["--validate-every", "50", "--no-audit", "--workers", "0", "--no-tensorboard", *SMALL]
    every = ["--checkpoint-every", "1"]
    assert main(["train", "--data", data, "--run-folder", str(run), "--steps", "12", *every, *options]) == 0
    assert reads == [None], "for the report"
    reads.clear()
    assert main(["train", "--resume", str(run), "--until-step", "20"]) == 0
    assert reads == [None, 12, 12, None], "at the start, by the checkpoint, to keep these lines, and for the report"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    assert main(["train", "--resume", str(run), "--until-step", "21"]) == 0, "the digest was that of the file"


def test_the_digest_of_lines_is_that_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = RunFolder(tmp_path)
    assert lines.digest_of_metrics(0) is None
    digests = []
    for step in range(1, 5):
        lines.append({"step": step, "loss": 1 / step})
        digests.append(lines.digest_of_metrics(step))
        assert lines.digest_of_metrics(step) == digest(path)
        assert lines.digest_of_metrics(step - 1) is None
    again = RunFolder(tmp_path)
    again.resume_after(2)
    assert again.digest_of_metrics(2) is None, "until the file is cut"
    again.append({"step": 3, "loss": 7.0})
    assert [row["loss"] for row in again.metrics()] == [1.0, 0.5, 7.0]
    assert again.digest_of_metrics(3) == digest(path)
    assert again.digest_of_metrics(3) != digests[2]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()

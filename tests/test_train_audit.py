"""The audit at the start of a run passes for every loss on any ranks, and refuses a wrong gradient before training."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from glyph_files import SMALL, write_pairs

from wholebatch.__main__ import main
from wholebatch._user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch.train.audited import audit_start
from wholebatch.train.config import LOSSES, HeadConfig, ModelConfig, TrainConfig
from wholebatch.train.data.load import load_data
from wholebatch.train.planned import plan_start
from wholebatch.train.tasks import retrieve
from wholebatch.train.tasks.objectives import Objective, make_objective

CONFIG = TrainConfig(
    batch_size=24,
    image_size=16,
    validation_texts=2,
    test_texts=2,
    model=ModelConfig(embedding_size=16, image_width=8, text_width=16, text_buckets=256),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), "pairs.csv"))


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    of = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold")
    return str(write_pairs(tmp_path_factory.mktemp("faces"), "pairs.csv", faces=of))


def audited(config):
    """Audit on the ranks of this call."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    return audit_start(*load_data(config, size), torch.device("cpu"), rank=rank, size=size)


@pytest.fixture(scope="module")
def on_two_ranks(data):
    """Return each loss's audit on two ranks, which start once for all losses."""
    configs = [replace(CONFIG, data=data, loss=loss) for loss in LOSSES]
    return dict(zip(LOSSES, run_ranks(lambda: [audited(config) for config in configs], 2)[0], strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_its_reference(data, on_two_ranks, loss):
    config = replace(CONFIG, data=data, loss=loss)
    for outcome in (audited(config), audited(replace(config, chunk_size=5)), on_two_ranks[loss]):
        assert outcome.examples == 24
        assert outcome.error < 1e-3
    assert str(outcome).startswith("audit: on 2 processes the gradient of 24 examples is that of the dense loss on one")


def test_gradients_of_classifiers_are_exact(faces):
    heads = [HeadConfig(), HeadConfig(margin="adaface"), HeadConfig(sample_rate=0.5, sub_centers=2)]
    configs = [replace(CONFIG, task="identify", data=faces, head=head) for head in heads]
    on_ranks = run_ranks(lambda: [audited(config) for config in configs], 3)
    for outcome in (*map(audited, configs), *(outcome for of_rank in on_ranks for outcome in of_rank)):
        assert outcome.error < 1e-4


def test_a_wrong_gradient_is_refused(data, monkeypatch):
    """The planted gradient is twice as large, as with an additional sum over two ranks."""

    def wrong(config, texts, *, negatives=False, dense=False):
        right = make_objective(config, texts, negatives=negatives, dense=dense)
        return right if dense else Objective(lambda *inputs: 2 * right(*inputs))

    monkeypatch.setattr(retrieve, "make_objective", wrong)
    with pytest.raises(
        UserError, match=r"is not that of the dense loss on one: relative error 1\..*Nothing was trained"
    ):
        audited(replace(CONFIG, data=data))


def test_the_start_of_a_run_reports_the_audit_unless_switched_off(tmp_path, data, capfd):
    command = ["train", "--data", data, "--steps", "1", *SMALL, "--no-tensorboard", "--run-folder"]
    assert main([*command, str(tmp_path / "a"), "--ranks", "2"]) == 0
    printed = capfd.readouterr().out
    assert "audit: on 2 processes the gradient of" in printed
    assert "plan: clip on 2 processes, similarities kept, fp32: " in printed
    assert main([*command, str(tmp_path / "b"), "--no-audit"]) == 0
    assert "audit" not in capfd.readouterr().out


def test_the_plan_has_the_settings_of_the_run(data, faces):
    def line(size=1, **more):
        config = replace(CONFIG, **{"data": data, **more})
        return plan_start(*load_data(config, size), torch.device("cpu"), size=size)

    assert line().startswith("plan: clip on 1 process, similarities kept, fp32: ")
    assert "computed twice" in line(label_smoothing=0.1)  # with it nothing is kept
    assert "computed once" in line(loss="siglip", size=2)
    assert "exchange gather" in line(loss="siglip", size=2)
    assert "plan: none, because the planner does not know --loss circle" in line(loss="circle")
    assert "4 rows encoded at a time" in line(chunk_size=4)
    assert "classes on 2 processes" in line(task="identify", data=faces, size=2)
    assert "plan: none" in line(task="identify", data=faces, head=HeadConfig(margin="curricularface"))

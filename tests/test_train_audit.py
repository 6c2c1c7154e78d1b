"""The audit at the start of a run passes for every loss on any ranks, and refuses a wrong gradient before training."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from glyph_files import SMALL, write_pairs
from torch.nn.functional import normalize

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch.testing import run_ranks
from wholebatch_train import audited as train_audit
from wholebatch_train.audited import Outcome, audit_start
from wholebatch_train.config import LOSSES, HeadConfig, ModelConfig, TrainConfig
from wholebatch_train.data.load import load_data
from wholebatch_train.planned import plan_start
from wholebatch_train.tasks import retrieve
from wholebatch_train.tasks.make import make_task
from wholebatch_train.tasks.objectives import Objective, make_objective

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
def unknown(tmp_path_factory):
    """Queries and documents that are all equal to the encoder, as unknown words are to a tokenizer: one piece each."""
    path = tmp_path_factory.mktemp("unknown") / "pairs.csv"
    path.write_text("query,positive\n" + "".join(f"{a}{b},{b}{a}{b}\n" for a in "abcdef" for b in "ghijkl"))
    return str(path)


def of_unknown(unknown, loss, **settings):
    model = replace(CONFIG.model, text_buckets=1)
    return replace(CONFIG, data=unknown, loss=loss, model=model, **settings)


@pytest.fixture(scope="module")
def on_two_ranks(data, unknown):
    """Return each loss's audit on two ranks, which start once for all losses; and those of equal features."""
    configs = [replace(CONFIG, data=data, loss=loss) for loss in LOSSES]
    configs += [of_unknown(unknown, loss) for loss in LOSSES]
    found = run_ranks(lambda: [audited(config) for config in configs], 2)[0]
    return dict(zip([(of, loss) for of in ("known", "unknown") for loss in LOSSES], found, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_its_reference(data, on_two_ranks, loss):
    config = replace(CONFIG, data=data, loss=loss)
    for outcome in (audited(config), audited(replace(config, chunk_size=5)), on_two_ranks["known", loss]):
        assert outcome.examples == 24
        assert outcome.error < 1e-3
        assert not outcome.is_rounding
    assert str(outcome).startswith("audit: on 2 processes the gradient of 24 examples is that of the dense loss on one")


def test_gradients_of_classifiers_are_exact(faces):
    heads = [HeadConfig(), HeadConfig(margin="adaface"), HeadConfig(sample_rate=0.5, sub_centers=2)]
    configs = [replace(CONFIG, task="identify", data=faces, head=head) for head in heads]
    on_ranks = run_ranks(lambda: [audited(config) for config in configs], 3)
    for outcome in (*map(audited, configs), *(outcome for of_rank in on_ranks for outcome in of_rank)):
        assert outcome.error < 1e-4


def test_what_rounding_can_do_is_far_below_a_mistake(data, faces):
    """Elsewhere the bound is 0.02 of the gradient."""
    for config in (replace(CONFIG, data=data), replace(CONFIG, task="identify", data=faces)):
        of = replace(load_data(config, 1)[0], batch_size=24), load_data(config, 1)[1], torch.device("cpu")
        gradients = train_audit._gradients(make_task(*of, rank=0, size=1, dense=True))
        assert 1e-6 < train_audit._rounding(*of) / train_audit._norm(gradients) < 1e-3


def plant(monkeypatch, change):
    """Plant a mistake into every loss but the dense one."""

    def wrong(config, texts, *, negatives=False, dense=False):
        right = make_objective(config, texts, negatives=negatives, dense=dense)
        return right if dense else Objective(lambda x, y, scale, *more: change(right(x, y, scale, *more), x, scale))

    monkeypatch.setattr(retrieve, "make_objective", wrong)


@pytest.mark.planted
def test_a_wrong_gradient_is_refused(data, monkeypatch):
    """The planted gradient is twice as large, as with an additional sum over two ranks."""
    plant(monkeypatch, lambda found, x, scale: 2 * found)
    with pytest.raises(
        UserError, match=r"is not that of the dense loss on one: relative error 1\..*Nothing was trained"
    ):
        audited(replace(CONFIG, data=data))


def vanishes(loss):
    """Return whether rounding makes all of the gradient where rows are equal; of some losses it makes nothing, either.

    In float64 what is left is 1e-18 to 1e-15, or below 1e-27 for centered rows and distances of 0, which are exact.
    """
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([*range(16)], 10.0, -10.0)]
    rows, scale, bias = normalize(leaves[0], dim=0).expand(24, -1), *leaves[1:]
    make_objective(replace(CONFIG, loss=loss), 24, dense=True)(rows, rows, scale, bias, torch.arange(24)).backward()
    return 1e-20 < max(x.grad.abs().max() for x in leaves if x.grad is not None) < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_that_is_0_up_to_rounding_is_accepted(unknown, on_two_ranks, loss):
    """Two right ones differ by as much as they are long; how much a wrong one may differ is another test's."""
    config = of_unknown(unknown, loss)
    found = [audited(config), audited(replace(config, chunk_size=5)), on_two_ranks["unknown", loss]]
    for outcome in found:
        assert outcome.is_rounding == (outcome.error >= 0.02)
    if vanishes(loss):
        assert any(outcome.is_rounding for outcome in found), "the data show nothing"


@pytest.mark.planted
@pytest.mark.parametrize("loss", LOSSES)
def test_no_small_mistake_passes_for_rounding(data, monkeypatch, loss):
    """Where nothing cancels, 3% too much is a mistake, whatever rounding could do."""
    plant(monkeypatch, lambda found, x, scale: 1.03 * found)
    with pytest.raises(UserError, match=r"relative error 0.03\. Nothing was trained"):
        audited(replace(CONFIG, data=data, loss=loss))


@pytest.mark.planted
@pytest.mark.parametrize(
    "change",
    [
        lambda found, x, scale: found + 1e-3 * scale,
        lambda found, x, scale: found + 0.1 * x[:, 0].mean(),
        lambda found, x, scale: found - 0.1 * x[0, 0],
    ],
)
def test_a_mistake_is_found_where_the_right_gradient_is_0(unknown, monkeypatch, change):
    plant(monkeypatch, change)
    with pytest.raises(UserError, match="is not that of the dense loss on one"):
        audited(of_unknown(unknown, "clip"))


def test_a_gradient_of_rounding_is_reported_as_such():
    assert str(Outcome(64, 2, 1.4, is_rounding=True)) == (
        "audit: on 2 processes the gradient of 64 examples is that of the dense loss on one up to rounding; that one "
        "is so small that its rounding is 1e+00 of it: are many inputs equal to the encoder, such as texts of words "
        "that its tokenizer does not know?"
    )


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

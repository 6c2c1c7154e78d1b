"""`--precision` on a CPU, and the state of losses that keep some, in a checkpoint."""

import pytest
import torch
from glyph_files import write_pairs
from safetensors.torch import load_file
from train_runs import metrics, options

from wholebatch.__main__ import main
from wholebatch._base.user_error import UserError
from wholebatch_train.run.checkpoint import FILE
from wholebatch_train.tasks import identify, retrieve
from wholebatch_train.tasks.task import Precision

pytestmark = pytest.mark.usefixtures("nothing_is_drawn")  # in this process


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
    return str(write_pairs(tmp_path_factory.mktemp("pairs"), faces=faces))


def test_tf32_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="--precision tf32 needs a GPU, and the run is on the CPU"):
        Precision("tf32", torch.device("cpu"))


class Stopped(Exception):  # noqa: N818
    """The end of a run that is killed."""


@pytest.mark.parametrize(
    "more",
    [
        ["--loss", "global_contrastive"],
        ["--task", "identify", "--head.margin", "curricularface", "--validation-texts", "3"],
    ],
    ids=str,
)
def test_a_resumed_run_continues_with_the_state_of_its_loss(data, tmp_path, monkeypatch, more):
    quick = ["--no-audit", "--no-tensorboard", "--workers", "0", *more]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["train", *options(data, whole, *quick)]) == 0

    steps = iter(range(8))

    def stop(task):
        if next(steps) == 7:
            raise Stopped
        after_step(task)

    kind = retrieve.Retrieve if "--loss" in more else identify.Identify
    after_step = kind.after_step
    with monkeypatch.context() as patched:
        patched.setattr(kind, "after_step", stop)
        with pytest.raises(Stopped):
            main(["train", *options(data, broken, *quick)])
    assert main(["train", "--resume", str(broken)]) == 0
    assert metrics(broken) == metrics(whole)
    ours, theirs = (load_file(run / FILE) for run in (broken, whole))
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(ours[name], x), name

"""The adapter to FlagEmbedding without FlagEmbedding: its loss on stand-ins, and mistakes."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from wholebatch.integrations import flag_embedding
from wholebatch.integrations._command import run_command
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import RankError, run_ranks

WIDTH, GROUP = 4, 3
ROWS = {2: (4, 2), 3: (3, 1, 2)}
# The arguments of `AbsEmbedderModel._compute_cross_device_neg_loss` in FlagEmbedding 1.4.2.
ARGUMENTS = ["self", "q_reps", "p_reps", "teacher_targets", "compute_score_func", "kwargs"]


class Model(torch.nn.Module):
    """Stands for FlagEmbedding's models: the loss of one process, by the definition of each option."""

    def __init__(self, kd_loss_type="kl_div", temperature=0.2):
        super().__init__()
        self.temperature, self.kd_loss_type, self.scored = temperature, kd_loss_type, 0

    def compute_score(self, q_reps, p_reps):
        self.scored += 1
        return self._compute_similarity(q_reps, p_reps) / self.temperature

    def compute_dense_score(self, q_reps, p_reps):
        return self.compute_score(q_reps, p_reps)

    def _compute_similarity(self, q_reps, p_reps):
        return q_reps @ p_reps.T

    def compute_loss(self, scores, target):
        return F.cross_entropy(scores, target)

    def _compute_in_batch_neg_loss(self, q_reps, p_reps, teacher_targets=None, compute_score_func=None):
        group, at = len(p_reps) // len(q_reps), torch.arange(len(q_reps))
        scores = (compute_score_func or self.compute_score)(q_reps, p_reps)
        if teacher_targets is not None and self.kd_loss_type == "m3_kd_loss":
            loss = 0.0
            for k in range(group):
                ones = F.cross_entropy(scores, at * group + k, reduction="none")
                loss = loss + (teacher_targets[:, k] * ones).mean()
                scores = scores.scatter(1, (at * group + k)[:, None], torch.finfo(scores.dtype).min)
            return scores, loss
        loss = self.compute_loss(scores, at * group)
        if teacher_targets is not None:
            own = torch.stack([scores[at, at * group + k] for k in range(group)], 1)
            loss = loss - (own.log_softmax(1) * teacher_targets).sum(1).mean()
        return scores, loss


for name in ("compute_score", "compute_dense_score", "_compute_similarity", "compute_loss"):
    getattr(Model, name).__module__ = "FlagEmbedding.stand_in"


class OtherScore(Model):
    """A user's subclass."""

    def compute_score(self, q_reps, p_reps):
        return -torch.cdist(q_reps, p_reps) / self.temperature


CASES = {
    "plain": (Model(), GROUP, False),
    "one passage": (Model(), 1, False),
    "kl_div": (Model(), GROUP, True),
    "m3_kd_loss": (Model("m3_kd_loss"), GROUP, True),
    "m3_kd_loss without a teacher": (Model("m3_kd_loss"), GROUP, False),
    "another score": (OtherScore(), GROUP, True),
}


def batch(group, distilled):
    generator = torch.Generator().manual_seed(0)
    total = 6
    q = torch.randn(total, WIDTH, generator=generator, dtype=torch.float64)
    p = torch.randn(total, group, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.rand(total, group, generator=generator, dtype=torch.float64).softmax(1)
    return q, p, targets if distilled else None


def leaves(name, part=slice(None)):
    model, group, distilled = CASES[name]
    q, p, targets = batch(group, distilled)
    q, p = (x[part].clone().flatten(0, -2).requires_grad_() for x in (q, p))
    return model, q, p, None if targets is None else targets[part]


def of_rank(name):
    rank, world = dist.get_rank(), dist.get_world_size()
    first = sum(ROWS[world][:rank])
    model, q, p, targets = leaves(name, slice(first, first + ROWS[world][rank]))
    model.scored = 0
    scores, loss = flag_embedding.cross_device_loss(model, q, p, teacher_targets=targets)
    assert scores is None
    loss.backward()
    return loss.detach(), q.grad, p.grad, model.scored


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_one_process(name, world):
    """Rows hold W times their gradient, for the averaging of DDP; processes hold different numbers of queries."""
    model, q, p, targets = leaves(name)
    _, loss = model._compute_in_batch_neg_loss(q, p, targets)
    loss.backward()
    found = run_ranks(of_rank, world, name)
    for value, *_ in found:
        assert torch.allclose(value, loss.detach(), rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([x for _, x, _, _ in found]) / world, q.grad, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([x for _, _, x, _ in found]) / world, p.grad, rtol=0, atol=1e-12)
    if name in ("plain", "one passage", "kl_div"):
        assert all(scored == 0 for *_, scored in found), "products are computed in tiles"


def test_the_dense_score_of_m3_is_computed_in_tiles():
    model, q, p, _ = leaves("plain")
    model.unified_finetuning, model.scored = False, 0
    _, loss = flag_embedding.cross_device_loss(model, q, p, None, model.compute_dense_score)
    assert model.scored == 0
    assert torch.allclose(loss, model._compute_in_batch_neg_loss(q, p)[1], rtol=0, atol=1e-12)


def test_a_score_of_the_user_is_used():
    model, q, p, _ = leaves("plain")
    _, loss = flag_embedding.cross_device_loss(model, q, p, None, lambda q, p: 3 * q @ p.T)
    assert torch.allclose(loss, F.cross_entropy(3 * q @ p.T, torch.arange(6) * GROUP), rtol=0, atol=1e-12)


def test_mistakes_are_refused():
    _, q, p, _ = leaves("plain")
    targets = torch.ones(6, GROUP)
    unified = Model()
    unified.unified_finetuning = True
    with pytest.raises(ValueError, match=r"with --unified_finetuning True: .* pass --unified_finetuning False for the"):
        flag_embedding.cross_device_loss(unified, q, p)
    with pytest.raises(ValueError, match="must not need keywords, got q_mask"):
        flag_embedding.cross_device_loss(Model(), q, p, None, Model().compute_score, q_mask=targets)
    with pytest.raises(ValueError, match="kd_loss_type must be 'kl_div' or 'm3_kd_loss', got 'mse'"):
        flag_embedding.cross_device_loss(Model("mse"), q, p, targets)
    with pytest.raises(ValueError, match="got 17 rows for 6 queries; pass train_group_size"):
        flag_embedding.cross_device_loss(Model(), q, p[:17])
    trained = Model(temperature=torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"temperature must be a number, .* checkpoints of FlagEmbedding hold the"):
        flag_embedding.cross_device_loss(trained, q, p)
    trained.temperature.requires_grad_(False)
    _, loss = flag_embedding.cross_device_loss(trained, q, p)
    assert torch.allclose(loss, trained._compute_in_batch_neg_loss(q, p)[1], rtol=0, atol=1e-12)


def with_a_mistake_on_rank_1(mistake):
    q, p, _ = batch(GROUP, False)
    rows = 0 if mistake == "no queries" and dist.get_rank() == 1 else 2
    passages = p[:2].flatten(0, 1)[: 5 if mistake == "a passage is missing" and dist.get_rank() == 1 else None]
    targets = torch.ones(2, GROUP) if mistake == "no teacher" and dist.get_rank() == 0 else None
    flag_embedding.cross_device_loss(Model(), q[:rows], passages, targets)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no queries", "p_reps must have the same number of rows"),
        ("a passage is missing", "p_reps must have the same number of rows"),
        ("no teacher", "teacher_targets"),
    ],
)
def test_a_mistake_of_one_rank_raises_on_all(mistake, message):
    with pytest.raises(RankError, match="2 of 2 ranks failed") as error:
        run_ranks(with_a_mistake_on_rank_1, 2, mistake)
    assert str(error.value).count(message) >= 2


# The switch and the command, with a stand-in for the framework.


class AbsEmbedderModel:
    """Stands for FlagEmbedding's class of this name."""

    def _compute_cross_device_neg_loss(self, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **kwargs):
        raise NotImplementedError


class OfAnotherVersion:
    """Stands for it in a version that has renamed the method."""


def stand_in(monkeypatch, **names):
    path = "FlagEmbedding"
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(__name__=path, __version__="1.4.2"))
    module = ModuleType("FlagEmbedding.abc.finetune.embedder.AbsModeling")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_switch_replaces_the_method_and_restores_it(monkeypatch):
    stand_in(monkeypatch, AbsEmbedderModel=AbsEmbedderModel)
    before = AbsEmbedderModel._compute_cross_device_neg_loss
    flag_embedding.enable()
    flag_embedding.enable()
    assert AbsEmbedderModel._compute_cross_device_neg_loss is flag_embedding.cross_device_loss
    flag_embedding.disable()
    flag_embedding.disable()
    assert AbsEmbedderModel._compute_cross_device_neg_loss is before


def test_the_signature_is_that_of_flag_embedding():
    code = flag_embedding.cross_device_loss.__code__
    assert ["self", *code.co_varnames[1 : code.co_argcount + 1]] == ARGUMENTS
    theirs = AbsEmbedderModel._compute_cross_device_neg_loss
    assert flag_embedding.cross_device_loss.__defaults__ == theirs.__defaults__


def test_other_frameworks_are_refused(monkeypatch):
    stand_in(monkeypatch, AbsEmbedderModel=OfAnotherVersion)
    with pytest.raises(
        FrameworkError, match=r"OfAnotherVersion of FlagEmbedding 1\.4\.2 has no _compute_cross_device_neg_loss"
    ):
        flag_embedding.enable()
    stand_in(monkeypatch)
    with pytest.raises(FrameworkError, match=r"of FlagEmbedding 1\.4\.2 has no AbsEmbedderModel, where this adapter"):
        flag_embedding.enable()
    monkeypatch.setitem(sys.modules, "FlagEmbedding", SimpleNamespace(__version__="1.3.5"))
    with pytest.raises(FrameworkError, match=r"FlagEmbedding 1\.3\.5 is too old; this adapter was tested with 1\.4\.2"):
        flag_embedding.enable()
    monkeypatch.setitem(sys.modules, "FlagEmbedding", None)
    with pytest.raises(FrameworkError, match=r"FlagEmbedding cannot be imported \(.*pip install 'FlagEmbedding"):
        flag_embedding.enable()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--negatives_cross_device", "True"], "the first arguments must be -m and a module of FlagEmbedding, got"),
        (
            ["-m", "os"],
            "the first arguments must be -m and a module of FlagEmbedding, got '-m os'; pass for example -m",
        ),
        (["-m", "FlagEmbedding.finetune.embedder.encoder_only.base"], "FlagEmbedding cannot be imported ("),
    ],
)
def test_a_mistake_is_one_line(arguments, line, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "FlagEmbedding", None)
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command("flag_embedding")
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"error: {line}" in errors


def test_help_needs_no_framework():
    run = subprocess.run(
        [sys.executable, "-m", "wholebatch.integrations.flag_embedding", "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0
    assert "-m MODULE" in run.stdout


def test_the_program_runs_with_the_loss_and_a_warning_without_the_option(monkeypatch, caplog, tmp_path):
    stand_in(monkeypatch, AbsEmbedderModel=AbsEmbedderModel)
    (tmp_path / "program.py").write_text("import sys\nfound = sys.argv[1:]\n")
    sys.modules["FlagEmbedding"].__path__ = [str(tmp_path)]
    assert flag_embedding.main(["-m", "FlagEmbedding.program", "--fp16", "True"]) == 0
    assert "without --negatives_cross_device True FlagEmbedding compares the rows of each process" in caplog.text
    caplog.clear()
    assert flag_embedding.main(["-m", "FlagEmbedding.program", "--negatives_cross_device=True"]) == 0
    assert caplog.text == ""
    assert AbsEmbedderModel._compute_cross_device_neg_loss is not flag_embedding.cross_device_loss

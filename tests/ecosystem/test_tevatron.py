"""Tevatron's own retriever training on two processes, with its loss and with that of the whole batch.

    WHOLEBATCH_TEVATRON=folder WHOLEBATCH_GRAD_CACHE=folder make ecosystem ARGS=tests/ecosystem/test_tevatron.py

The folders are checkouts of github.com/texttron/tevatron and github.com/luyug/GradCache. The truth is Tevatron on one
process with all rows, without --grad_cache.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tevatron_audits
import torch
import torch.distributed as dist
from dual import as_launched, free_port
from tevatron_runs import SETTINGS, arguments, folder_of, import_from, make_files, on_two_processes, train

import wholebatch as wb
from wholebatch.testing import RankError, run_ranks

TEVATRON, GRAD_CACHE = folder_of("WHOLEBATCH_TEVATRON"), folder_of("WHOLEBATCH_GRAD_CACHE")
ROUNDING = 1e-10  # of the distance moved: 20 steps in float64, summed in another order
CASES = [(setting, cached) for setting in SETTINGS for cached in (False, True)]
ROOT = Path(__file__).parents[2]

# Without the interpreter's teardown, in which gloo's threads abort any DDP program now and then (torch 2.13).
DRIVER = """
import os, sys
from tevatron.retriever.driver.train import main
main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""

pytestmark = [
    pytest.mark.filterwarnings("default"),  # their libraries warn
    pytest.mark.skipif(TEVATRON is None, reason="WHOLEBATCH_TEVATRON names no checkout of Tevatron"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tevatron")
    make_files(found)
    return found


@pytest.fixture(scope="module")
def true(folder):
    import_from([TEVATRON])
    return {name: train(arguments(folder, name, False, 1, f"one {name}", theirs=True)) for name in SETTINGS}


@pytest.fixture(scope="module")
def ours(folder):
    return on_two_processes(folder, [TEVATRON], CASES, "ours")


@pytest.fixture(scope="module")
def theirs(folder):
    jobs = [(setting, cached) for setting, cached in CASES if GRAD_CACHE or not cached]
    return on_two_processes(folder, [TEVATRON, GRAD_CACHE], jobs, "theirs")


def distance(run, true):
    return ((run[1] - true[1]).norm() / (true[1] - true[0]).norm()).item()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_end_with_the_weights_of_one(ours, true, case):
    expected = true[case[0]]
    for of_rank in ours:
        assert torch.equal(of_rank[case][0], expected[0])
        print(case, distance(of_rank[case], expected))
        assert distance(of_rank[case], expected) < ROUNDING
        assert torch.equal(of_rank[case][1], ours[0][case][1])
    assert ours[0][case][2] == pytest.approx(expected[2], abs=2e-4)  # rounded in the log


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tevatron_alone_is_exact_without_caching_and_ignores_options_with_it(theirs, true, case):
    """Its model multiplies the loss by the number of processes, which makes up for the average over them."""
    if case not in theirs[0]:
        pytest.skip("WHOLEBATCH_GRAD_CACHE names no checkout of GradCache")
    found = distance(theirs[0][case], true[case[0]])
    print(case, found)
    assert found > 0.1 if case in (("temperature", True), ("accumulation", True)) else found < ROUNDING


@pytest.mark.skipif(GRAD_CACHE is None, reason="WHOLEBATCH_GRAD_CACHE names no checkout of GradCache")
def test_the_alias_alone_leaves_tevatrons_loss(folder, theirs):
    cached = [case for case in CASES if case[1]]
    found = on_two_processes(folder, [TEVATRON], cached, "alias")
    for case in cached:
        assert distance(found[0][case], theirs[0][case]) < ROUNDING


@pytest.mark.parametrize(
    ("name", "exact"), [("theirs", True), ("theirs_cached", False), ("ours", True), ("ours_cached", True)]
)
def test_the_audit_finds_the_gradients_exact(name, exact):
    """Tevatron's cached trainer ignores the temperature, on one process, too."""
    if name == "theirs_cached" and GRAD_CACHE is None:
        pytest.skip("WHOLEBATCH_GRAD_CACHE names no checkout of GradCache")
    report = wb.audit(getattr(tevatron_audits, name), ranks=(1, 2))
    assert report.exact is exact, report


def features(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


def with_different_rows(wrong):
    """Return the loss that a trainer logs, and the gradient that an average of two ranks has; or an error's text."""
    import_from([TEVATRON])
    from wholebatch.integrations import tevatron

    tevatron.install()
    from tevatron.retriever.modeling.encoder import EncoderModel
    from tevatron.retriever.trainer import TevatronTrainer

    class Model(EncoderModel):
        def encode_query(self, qry):
            return self.encoder(qry["x"])

        encode_passage = encode_query

    rank = dist.get_rank()
    layer = torch.nn.Linear(6, 4).double()
    layer.config = None
    model = Model(layer, temperature=0.5).train()
    with torch.no_grad():
        layer.weight.copy_(features(4, 2))
        layer.bias.zero_()
    x, y = features(7, 0).split([5, 2])[rank], features(21, 1).split([15, 6])[rank]
    trainer = SimpleNamespace(_dist_loss_scale_factor=2)
    y = y[:-1] if wrong and rank == 1 else y
    try:
        loss = TevatronTrainer.compute_loss(trainer, model, ({"x": x}, {"x": y}))
    except ValueError as error:
        return str(error)
    loss.backward()
    dist.all_reduce(layer.weight.grad)
    return loss.item() / 2, layer.weight.grad / 2


def test_processes_may_have_different_numbers_of_rows():
    weight = features(4, 2).requires_grad_()
    x, y = features(7, 0) @ weight.T, features(21, 1) @ weight.T
    true = torch.nn.functional.cross_entropy(x @ y.T / 0.5, torch.arange(7) * 3)
    true.backward()
    for loss, gradient in run_ranks(with_different_rows, 2, False):
        assert loss == pytest.approx(true.item(), rel=1e-12)
        assert torch.allclose(gradient, weight.grad, rtol=0, atol=1e-12)


def test_a_mistake_of_one_rank_raises_on_all():
    for message in run_ranks(with_different_rows, 2, True, timeout_s=60):
        assert "the same number of passages for each query, got 2 queries and 5 passages" in message


@pytest.mark.parametrize("command", ["tevatron", "grad_cache"])
def test_the_command_runs_the_driver(folder, true, command):
    name = f"command {command}"
    (folder / "driver_then_leave.py").write_text(DRIVER)
    argv = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", f"wholebatch.integrations.{command}", "-m", "driver_then_leave"),
        *arguments(folder, "plain", True, 2, name),
    ]
    path = os.pathsep.join([str(ROOT / "src"), TEVATRON, str(folder)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    import_from([TEVATRON])
    from transformers import AutoModel

    saved = torch.cat([p.detach().flatten() for p in AutoModel.from_pretrained(folder / name).parameters()])
    start, end, _ = true["plain"]
    assert (saved - end).norm() < 1e-4 * (end - start).norm()  # the command trains in float32


def with_a_trained_temperature(port, folder, cached):
    import_from([TEVATRON])
    as_launched(port)
    from tevatron.retriever.driver import train as driver

    from wholebatch.integrations import tevatron

    tevatron.install()
    build = driver.DenseModel.build

    def build_trained(*args, **kwargs):
        model = build(*args, **kwargs)
        model.temperature = torch.nn.Parameter(torch.tensor(0.5))
        return model

    driver.DenseModel.build = build_trained
    train(arguments(folder, "plain", cached, 2, f"trained {cached}"))


@pytest.mark.parametrize("cached", [False, True])
def test_a_trained_temperature_is_refused_on_all_ranks(folder, cached):
    """Tevatron's checkpoints hold the encoder alone, and its saving fails beside another parameter."""
    with pytest.raises(RankError, match="2 of 2 ranks failed") as error:
        run_ranks(with_a_trained_temperature, 2, free_port(), folder, cached, timeout_s=100)
    assert str(error.value).count("temperature must be a number, got a tensor that is trained") >= 2


def test_other_uses_of_the_model_get_their_own_output(folder):
    """The trainers of SPLADE and of distillation use scores and gathered representations."""
    program = """
        import torch
        from types import SimpleNamespace
        from wholebatch.integrations import tevatron
        tevatron.install()
        from tevatron.retriever.modeling import DenseModel
        from tevatron.retriever.trainer import TevatronTrainer
        from transformers import AutoModel
        model = DenseModel(AutoModel.from_pretrained("model"), temperature=0.5).train()
        tokens = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
        theirs = model(query=tokens, passage=tokens)
        assert theirs.scores.shape == (2, 2) and theirs.q_reps is not None
        trainer = SimpleNamespace(_dist_loss_scale_factor=1)
        ours = TevatronTrainer.compute_loss(trainer, model, (tokens, tokens))
        torch.testing.assert_close(ours, theirs.loss)
        assert model(query=tokens).q_reps.shape == (2, 16)

        class Other(DenseModel):
            def compute_similarity(self, q_reps, p_reps):
                return -torch.cdist(q_reps, p_reps)

        other = Other(model.encoder).train()
        loss = TevatronTrainer.compute_loss(trainer, other, (tokens, tokens))
        torch.testing.assert_close(loss, other(query=tokens, passage=tokens).loss)
        print("done")
    """
    path = os.pathsep.join([str(ROOT / "src"), TEVATRON])
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in program.splitlines())],
        capture_output=True, text=True, timeout=100, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert run.stdout.endswith("done\n"), run.stderr[-3000:]


def test_the_names_that_are_replaced_and_their_parameters():
    """These are committed, so that a change of Tevatron shows here."""
    import inspect

    import_from([TEVATRON])
    from tevatron.retriever.gc_trainer import GradCacheTrainer
    from tevatron.retriever.modeling.encoder import EncoderModel
    from tevatron.retriever.trainer import TevatronTrainer

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(EncoderModel.forward) == ["self", "query", "passage"]
    assert names(TevatronTrainer.compute_loss) == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
    assert names(GradCacheTrainer.__init__) == ["self", "args", "kwargs"]
    assert names(EncoderModel.compute_similarity) == ["self", "q_reps", "p_reps"]
    assert names(EncoderModel.compute_loss) == ["self", "scores", "target"]

"""The alias of grad_cache, without that package: names, refusals, a program under torchrun, losses on several ranks.

With WHOLEBATCH_GRAD_CACHE=folder, a checkout of github.com/luyug/GradCache, the program is run with that package too.
"""

import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from grad_cache_program import WAYS, encoder, true_weights, weights
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.integrations import grad_cache as ours
from wholebatch.testing import run_ranks

HERE = Path(__file__).parent
THEIRS = os.environ.get("WHOLEBATCH_GRAD_CACHE")
ROWS = {2: (5, 2), 3: (3, 0, 4)}
HARD = 2

# The parameters of the package, version 0.1.0, commit 906f038.
SIGNATURES = {
    "GradCache": [
        *("models", "chunk_sizes", "loss_fn", "split_input_fn", "get_rep_fn", "fp16", "scaler"),
    ],
    "GradCache.__call__": ["args", "kwargs"],
    "GradCache.cache_step": ["model_inputs", "no_sync_except_last", "loss_kwargs"],
    "GradCache.split_inputs": ["model_input", "chunk_size"],
    "GradCache.model_call": ["model", "model_input"],
    "GradCache.get_reps": ["model_out"],
    "GradCache.compute_loss": ["reps", "loss_kwargs"],
    "PLGradCache": [
        *("models", "chunk_sizes", "loss_fn", "split_input_fn", "get_rep_fn", "fp16", "scaler", "backward_fn"),
    ],
    "SimpleContrastiveLoss": ["n_hard_negatives"],
    "SimpleContrastiveLoss.__call__": ["x", "y", "target", "reduction"],
    "DistributedContrastiveLoss": ["n_hard_negatives"],
    "DistributedContrastiveLoss.gather_tensor": ["t"],
    "ContrastiveLossWithQueryClosure": ["n_hard_negatives"],
    "ContrastiveLossWithQueryClosure.__call__": ["reps", "query_closure", "target", "reduction"],
    "RandContext": ["tensors"],
    "cached": ["func"],
    "cat_input_tensor": ["func"],
    "gather_input_tensor": ["func", "axis"],
}


def run(*argv, folders=(), cwd=None, input=None):
    path = os.pathsep.join([str(HERE / "started"), str(HERE.parent / "src"), *map(str, folders)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", *argv],
        capture_output=True, text=True, timeout=120, env=environment, cwd=cwd, input=input, check=False,
    )  # fmt: skip


# Names.


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "GradCache.__call__"])
def test_signatures_begin_with_their_parameters(name):
    value = ours
    for part in name.split("."):
        value = getattr(value, part)
    found = [parameter for parameter in inspect.signature(value).parameters if parameter != "self"]
    assert found[: len(SIGNATURES[name])] == SIGNATURES[name]


def test_their_imports_give_the_names_of_this_library():
    program = """
import wholebatch.integrations.grad_cache.alias
import wholebatch.integrations.grad_cache as ours
import importlib.util, sys
from grad_cache import GradCache, functional
from grad_cache.grad_cache import GradCache as Again, RandContext
from grad_cache.context_managers import RandContext as Context
from grad_cache.functional import cached, cat_input_tensor, gather_input_tensor
from grad_cache.loss import SimpleContrastiveLoss, DistributedContrastiveLoss, ContrastiveLossWithQueryClosure
from grad_cache.pytorch_lightning.pl_gradcache import PLGradCache
import grad_cache.cachex.functional, grad_cache.cachex.tree_utils, grad_cache.cachex.training
assert "jax" not in sys.modules
assert GradCache is Again is ours.GradCache and RandContext is Context and functional.cached is cached
assert importlib.util.find_spec("grad_cache") is not None
held = sys.modules["grad_cache"]
ours.install()
assert sys.modules["grad_cache"] is held
import pickle
assert b"wholebatch.integrations" in pickle.dumps(GradCache)
for text in ("from grad_cache import nothing", "import grad_cache.nothing", "from grad_cache.loss import nothing"):
    try:
        exec(text)
    except ImportError as error:
        print(error)
try:
    grad_cache.loss.nothing
except AttributeError as error:
    print(error)
"""
    found = run("-c", program)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "cannot import name 'nothing' from 'grad_cache'" in lines[0]
    assert lines[1] == "No module named 'grad_cache.nothing'"
    assert lines[3].startswith("grad_cache.loss is an alias made by wholebatch, which has no nothing; it has Contr")


def test_cachex_is_that_of_jax():
    pytest.importorskip("jax")
    program = """
import wholebatch.integrations.grad_cache.alias
import wholebatch as wb
from grad_cache import cachex
for module in (cachex, cachex.functional, cachex.training, cachex.tree_utils):
    for name in module.__all__:
        assert getattr(module, name) is getattr(wb.jax, name)
        print(name)
cachex.grad_with_cache
"""
    found = run("-c", program)
    assert found.stdout.count("\n") == 16
    assert "grad_cache.cachex is an alias made by wholebatch, which has no grad_with_cache" in found.stderr


def test_the_wheel_has_no_package_of_their_name():
    text = (HERE.parent / "pyproject.toml").read_text()
    assert 'packages = ["src/wholebatch"]' in text
    assert [path.name for path in (HERE.parent / "src").iterdir() if (path / "__init__.py").exists()] == ["wholebatch"]


@pytest.mark.parametrize("first", ["grad_cache", "grad_cache.loss"])
def test_another_grad_cache_that_was_imported_before_is_an_error(tmp_path, first):
    package = tmp_path / "grad_cache"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loss.py").write_text("")
    found = run("-c", f"import {first}; import wholebatch.integrations.grad_cache.alias", folders=[tmp_path])
    assert found.returncode == 1
    assert f"another grad_cache has been imported before ({package / '__init__.py'})" in found.stderr
    hidden = run("-c", f"import wholebatch.integrations.grad_cache.alias; import {first}", folders=[tmp_path])
    assert hidden.returncode == 0, hidden.stderr


# The command.


def test_the_command_runs_scripts_and_modules_as_python_does(tmp_path):
    (tmp_path / "beside.py").write_text("")
    program = "import sys, beside, grad_cache; print(__name__, sys.argv, sys.path[0], grad_cache.GradCache.__module__)"
    (tmp_path / "program.py").write_text(program)
    command = ("-m", "wholebatch.integrations.grad_cache")
    script = run(*command, str(tmp_path / "program.py"), "-m", "--x", "1")
    assert script.returncode == 0, script.stderr
    at = str(tmp_path / "program.py")
    module_of_ours = "wholebatch.integrations.grad_cache\n"
    assert script.stdout == f"__main__ {[at, '-m', '--x', '1']} {tmp_path} {module_of_ours}"
    module = run(*command, "-m", "program", "--x", "1", cwd=tmp_path)
    assert module.returncode == 0, module.stderr
    assert module.stdout == f"__main__ {[at, '--x', '1']} {tmp_path} {module_of_ours}"


REFUSED = [
    ([], "expected -m MODULE or the path of a script, got nothing"),
    (["--x", "1"], "expected -m MODULE or the path of a script, got --x; options of the program come after it"),
    (["-m"], "-m must be followed by the name of a module, got nothing"),
    (["-m", "no.such.module"], "there is no module no.such.module; install it, or add its folder to PYTHONPATH"),
    (["no_script.py"], "there is no script no_script.py in "),
]
COMMANDS = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
for name, argv in json.load(sys.stdin):
    sys.argv = ["", *argv]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_module(f"wholebatch.integrations.{name}", run_name="__main__")
            code = None
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, output.getvalue(), errors.getvalue()]))
"""


@pytest.fixture(scope="module")
def outcomes():
    """Return the exit code, output and errors of each command's call, all in one process, which imports torch once."""
    calls = [("grad_cache", argv) for argv, _ in REFUSED] + [(name, ["--help"]) for name in ("grad_cache", "tevatron")]
    done = run("-c", COMMANDS, input=json.dumps(calls))
    assert (done.returncode, done.stderr) == (0, "")
    found = map(json.loads, done.stdout.splitlines())
    return {(name, *argv): outcome for (name, argv), outcome in zip(calls, found, strict=True)}


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_mistakes_of_the_command_are_one_line(argv, message, outcomes):
    code, output, errors = outcomes[("grad_cache", *argv)]
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert f"python -m wholebatch.integrations.grad_cache: error: {message}" in errors


def test_an_error_of_the_program_keeps_its_traceback(tmp_path):
    (tmp_path / "program.py").write_text("from wholebatch._base.user_error import UserError\nraise UserError('mine')")
    found = run("-m", "wholebatch.integrations.grad_cache", str(tmp_path / "program.py"))
    assert found.returncode == 1
    assert "Traceback" in found.stderr


def test_help_is_printed(outcomes):
    for name in ("grad_cache", "tevatron"):
        code, output, errors = outcomes[name, "--help"]
        assert (code, errors) == (0, "")
        assert output.startswith(f"usage: python -m wholebatch.integrations.{name} -m ")


def launched(tmp_path, *command, folders=()):
    out = tmp_path / "weights.pt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ways = WAYS if "-m" in command else WAYS[:1]  # their other ways do not run or need Lightning
    program = str(HERE / "grad_cache_program.py")
    found = run("-W", "default", *torchrun, *command, program, str(out), *ways, folders=folders)
    assert found.returncode == 0, found.stderr[-3000:]
    return torch.load(out)


def test_a_program_that_imports_grad_cache_ends_with_the_weights_of_one_process(tmp_path):
    true, start = true_weights(), weights(encoder())
    found = launched(tmp_path, "-m", "wholebatch.integrations.grad_cache")
    assert set(found) == set(WAYS)
    for way, end in found.items():
        assert (end - true).norm() < 1e-12 * (true - start).norm(), way


@pytest.mark.skipif(THEIRS is None, reason="WHOLEBATCH_GRAD_CACHE names no checkout of GradCache")
def test_with_their_package_it_ends_elsewhere(tmp_path):
    true, start = true_weights(), weights(encoder())
    end = launched(tmp_path, folders=[Path(THEIRS) / "src"])["class"]
    distance = ((end - true).norm() / (true - start).norm()).item()
    print(distance)
    assert distance > 0.1


# The class.


def test_a_subclass_may_override_what_is_called():
    class Doubled(ours.GradCache):
        def get_reps(self, model_out):
            return 2 * super().get_reps(model_out)

        def get_input_tensors(self, model_input):
            raise NotImplementedError

    model, x = encoder(), torch.randn(6, 6, dtype=torch.float64)
    Doubled([model], 4, lambda r: r.square().mean())(x)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (4 * model(x).square().mean()).backward()
    assert all(torch.allclose(p.grad, g, rtol=0, atol=1e-12) for p, g in zip(model.parameters(), found, strict=True))


@pytest.mark.parametrize("name", ["forward_no_grad", "build_cache", "forward_backward"])
def test_methods_that_are_not_called_are_refused(name):
    with pytest.raises(TypeError, match=rf"Mine overrides {name}, which wholebatch's GradCache does not call: "):
        type("Mine", (ours.GradCache,), {name: lambda self: None})
    step = ours.GradCache([encoder()], 4, lambda r: r.sum())
    with pytest.raises(AttributeError, match=f"wholebatch's GradCache has no {name}: "):
        getattr(step, name)
    with pytest.raises(AttributeError, match="'GradCache' object has no attribute 'other'"):
        _ = step.other


def test_a_scaler_counts_with_fp16_only():
    model, x = encoder(), torch.randn(6, 6, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ours.GradCache([model], 4, lambda r: r.square().mean(), scaler=scaler)(x)
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    assert torch.allclose(found, model[0].weight.grad, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="fp16=True needs a scaler"):
        ours.GradCache([model], 4, lambda r: r.sum(), fp16=True)


def test_lightnings_backward_is_called_once_and_may_scale():
    model, x, calls = encoder(), torch.randn(6, 6, dtype=torch.float64), []

    def manual_backward(loss):
        calls.append(loss)
        (8 * loss).backward()

    loss = ours.PLGradCache([model], 4, lambda r: r.square().mean(), backward_fn=manual_backward)(x)
    found = model[0].weight.grad.clone()
    model.zero_grad()
    (8 * model(x).square().mean()).backward()
    assert len(calls) == 1
    assert not loss.requires_grad
    assert torch.allclose(found, model[0].weight.grad, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="backward_fn must be callable, got None"):
        ours.PLGradCache([model], 4, lambda r: r.sum())


class Scaled(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = wb.Scale(3.0).double()

    def forward(self, r):
        return self.scale() * r.square().mean()


def test_a_loss_has_parameters_of_the_lightning_module_alone():
    class Trained(torch.nn.Module):
        def __init__(self, loss_fn, *, saved):
            super().__init__()
            self.net, self.others = encoder(), [loss_fn]
            if saved:
                self.loss_fn = loss_fn

        def manual_backward(self, loss):
            loss.backward()

    x, loss_fn = torch.randn(6, 6, dtype=torch.float64), Scaled()
    module = Trained(loss_fn, saved=False)
    cache = ours.PLGradCache([module.net], 4, loss_fn, backward_fn=module.manual_backward)
    with pytest.raises(ValueError, match=r"no parameters but the Trained's, got scale\.log_scale: .* self\.loss = "):
        cache(x)
    assert all(p.grad is None for p in module.parameters())
    module = Trained(loss_fn, saved=True)
    ours.PLGradCache([module.net], 4, loss_fn, backward_fn=module.manual_backward)(x)
    assert loss_fn.scale.log_scale.grad.abs() > 0
    loss_fn.requires_grad_(False)
    module = Trained(loss_fn, saved=False)
    ours.PLGradCache([module.net], 4, loss_fn, backward_fn=module.manual_backward)(x)


# Losses.


def batch():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(7 * (2 + HARD), 4, generator=generator, dtype=torch.float64).split([7, 7 * (1 + HARD)])
    return x.clone(), y.clone()


def others():
    """Return a target that is no first passage, and that two queries share."""
    return (torch.arange(7) * 2 + 1).clamp(max=9)


SETTINGS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "target": {"target": others()},
    "target, sum": {"target": others(), "reduction": "sum"},
}


def dense(x, y, target=None, reduction="mean"):
    target = torch.arange(len(x)) * (len(y) // len(x)) if target is None else target
    return F.cross_entropy(x @ y.T, target, reduction=reduction)


def of_rank(settings):
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ROWS[world]
    x, y = batch()
    x = x.split(rows)[rank].clone().requires_grad_()
    y = y.split([n * (1 + HARD) for n in rows])[rank].clone().requires_grad_()
    loss_fn = ours.DistributedContrastiveLoss(HARD)
    assert (loss_fn.word_size, loss_fn.rank) == (world, rank)
    assert torch.equal(loss_fn.gather_tensor(x).detach(), batch()[0])
    loss = loss_fn(x, y, **settings)
    loss.backward()
    return loss.detach(), x.grad / world, y.grad / world  # DDP's average


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_distributed_loss_is_that_of_the_whole_batch(name, world):
    x, y = (t.requires_grad_() for t in batch())
    true = dense(x, y, **SETTINGS[name])
    true.backward()
    found = run_ranks(of_rank, world, SETTINGS[name])
    for loss, _, _ in found:
        assert loss.item() == pytest.approx(true.item(), rel=1e-12)
    for position, full in ((1, x.grad), (2, y.grad)):
        assert torch.allclose(torch.cat([of[position] for of in found]), full, rtol=0, atol=1e-12)


def gathered_without_gradient(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.detach())
    parts[dist.get_rank()] = t
    return torch.cat(parts)


def their_way():
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[:-1] if len(t) == 7 else t[: -1 - HARD] for t in batch())  # equally many rows
    x, y = (t.chunk(world)[rank].clone().requires_grad_() for t in (x, y))
    dense(gathered_without_gradient(x), gathered_without_gradient(y)).backward()
    theirs = x.grad / world
    x.grad = None
    ours.DistributedContrastiveLoss(HARD)(x, y).backward()
    return theirs, x.grad / world


def test_rows_gathered_without_gradient_give_one_part_in_world_size():
    """The loss of every rank is that of all rows, and has the gradient of its rows; the average divides that by W."""
    for theirs, exact in run_ranks(their_way, 2):
        assert torch.allclose(2 * theirs, exact, rtol=0, atol=1e-12)
        assert not torch.allclose(theirs, exact, rtol=0.1, atol=0)


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"reduction": "none"}], ids=str)
def test_the_simple_loss_is_that_of_its_rows(settings):
    x, y = batch()
    expected = dense(x, y, **settings)
    assert torch.allclose(ours.SimpleContrastiveLoss(HARD)(x, y, **settings), expected, rtol=0, atol=1e-12)
    closure = ours.ContrastiveLossWithQueryClosure(HARD)
    assert torch.allclose(closure(y, query_closure=lambda: x, **settings), expected, rtol=0, atol=1e-12)
    assert torch.allclose(closure(x, y, **settings), expected, rtol=0, atol=1e-12)


def test_the_simple_loss_stays_local():
    def local():
        x, y = (t.chunk(2)[dist.get_rank()] for t in (t[:-1] if len(t) == 7 else t[: -1 - HARD] for t in batch()))
        return ours.SimpleContrastiveLoss(HARD)(x, y), dense(x, y)

    for found, expected in run_ranks(local, 2):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


MISTAKES = {
    "rows": (
        lambda loss, x, y: loss(x, y[:-1]),
        r"y must have 3 rows for each of the 3 rows of x, got 8: one positive",
    ),
    "reduction": (
        lambda loss, x, y: loss(x, y, reduction="none"),
        r"reduction must be one of 'mean', 'sum', got 'none'; each rank has the losses of its rows only",
    ),
    "targets": (
        lambda loss, x, y: loss(x, y, target=torch.arange(6) % 5),
        r"loss_fn must give the same value on all ranks",
    ),
}


def one_wrong_rank(name):
    x, y = (t[: -1 - (HARD if len(t) > 7 else 0)].chunk(2)[dist.get_rank()] for t in batch())
    loss = ours.DistributedContrastiveLoss(HARD)
    try:
        if dist.get_rank() == 1:
            MISTAKES[name][0](loss, x, y)
        else:
            loss(x, y, target=torch.arange(6)) if name == "targets" else loss(x, y)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_raises_on_all(name):
    for message in run_ranks(one_wrong_rank, 2, name, timeout_s=60):
        assert MISTAKES[name][1] in message


def test_mistakes_of_losses():
    x, y = batch()
    with pytest.raises(ValueError, match="n_hard_negatives must be"):
        ours.SimpleContrastiveLoss(-1)
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'none', got 'max'"):
        ours.SimpleContrastiveLoss(HARD)(x, y, reduction="max")
    closure = ours.ContrastiveLossWithQueryClosure(HARD)
    for arguments, keywords in (((), {}), ((y,), {}), ((x, y), {"query_closure": lambda: x})):
        with pytest.raises(ValueError, match="pass x and y, or y and query_closure="):
            closure(*arguments, **keywords)
    with pytest.raises(TypeError, match=r"Mine overrides gather_tensor, which wholebatch's loss does not call"):
        type("Mine", (ours.DistributedContrastiveLoss,), {"gather_tensor": lambda self, t: t})


def multiplied(factor):
    x, y = (t[: -1 - (HARD if len(t) > 7 else 0)].chunk(2)[dist.get_rank()].requires_grad_() for t in batch())
    loss_fn = ours.DistributedContrastiveLoss(HARD)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            (loss_fn(x, y) * factor).backward()
    return [str(w.message) for w in found if "DistributedContrastiveLoss" in str(w.message)]


def test_a_factor_of_the_number_of_processes_warns_once():
    for messages in run_ranks(multiplied, 2, 2):
        assert len(messages) == 1
        assert (
            "is 2, the number of processes. If the loss is multiplied by it, to make up for the average" in messages[0]
        )
    assert run_ranks(multiplied, 2, 3) == [[], []]


def test_random_numbers_continue_after_the_context():
    torch.manual_seed(3)
    context = ours.RandContext(torch.zeros(1))
    first = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(3)
    torch.rand(3)
    for _ in range(2):
        with context:
            assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), after)


# Tevatron.


def test_importing_imports_no_framework():
    program = (
        "import sys; import wholebatch.integrations.tevatron; "
        "print([x for x in 'tevatron transformers jax lightning grad_cache'.split() if x in sys.modules])"
    )
    found = run("-c", program)
    assert (found.returncode, found.stdout) == (0, "[]\n"), found.stderr


def test_a_missing_tevatron_is_one_line():
    program = "import sys, runpy; sys.modules['tevatron'] = None; sys.argv[1:] = ['-m', 'tevatron.x']; "
    program += "runpy.run_module('wholebatch.integrations.tevatron', run_name='__main__')"
    found = run("-c", program)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "error: tevatron cannot be imported (" in found.stderr
    assert "tested with tevatron 0.0.1 of July 2026: pip install . in a checkout of" in found.stderr


STAND_IN = {
    "trainer.py": "class TevatronTrainer:\n    def compute_loss(self, model, inputs): ...",
    "gc_trainer.py": "from .trainer import TevatronTrainer\nclass GradCacheTrainer(TevatronTrainer): ...",
    "modeling/encoder.py": "class EncoderOutput: ...\nclass EncoderModel:\n    def forward(self, query, passage): ...",
}


def test_a_changed_tevatron_is_named(tmp_path):
    folder = tmp_path / "tevatron" / "retriever"
    (folder / "modeling").mkdir(parents=True)
    for package in (folder.parent, folder, folder / "modeling"):
        (package / "__init__.py").write_text("")
    for name, text in STAND_IN.items():
        (folder / name).write_text(text)
    found = run("-c", "from wholebatch.integrations import tevatron; tevatron.install()", folders=[tmp_path])
    assert found.returncode == 1
    assert "EncoderModel of tevatron of an unknown version has no encode_query, where this adapter" in found.stderr

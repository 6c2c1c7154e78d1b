"""Every test starts from the same seed, on one thread. Without a GPU, kernels run in Triton's interpreter."""

import atexit
import gc
import os
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

# Tests run beside each other and start processes, so a second thread would wait for a core. OpenMP's threads wait
# actively, which makes tiny tensors ten times slower. Set before the first import of torch, for started processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else it compiles a program for each kind of vectors

import pytest
import quick_python  # noqa: F401
import torch

torch.set_num_threads(1)

PATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
STARTED = os.path.join(os.path.dirname(__file__), "started")  # what processes that tests start import first
if STARTED not in PATH:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTED, *PATH]))
# Their memory has large pages, and is kept when it is freed: else the system maps it again for each tensor.
KEPT = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1000000000:glibc.malloc.mmap_threshold=1000000000"
os.environ.setdefault("GLIBC_TUNABLES", KEPT)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # set before anything imports Triton

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # set before anything imports JAX: eight simulated devices
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",  # compiled once, run once
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",  # by LLVM alone, without MLIR
    ]
)

LONGEST = [
    "audit", "kernel_check", "compile_losses", "pair_loss_compiled", "mpi", "losses", "jax_losses", "docs", "kernels",
    "train_runs", "devices", "train_long", "planning", "faults_kills", "train_identify", "communication",
    "train_signals", "notebooks", "bench", "integrations_grad_cache", "gradcache_tokens", "machine_code",
    "plan_late_interaction", "faults_interruptions",
]  # fmt: skip

# Other programs start these, or tests import them where Triton is.
collect_ignore = ["mpi_cases.py", "over_mpi.py", "jax_process.py", "typed"]
collect_ignore += ["quick_interpreter.py", "quick_python.py", "quick_forks.py", "started"]
if find_spec("jax") is None:
    collect_ignore += ["jax_cases.py", "faults/inputs_jax.py"]


def pytest_configure() -> None:
    """Rank processes import test modules, and so pytest, which takes longer than most calls: import it once."""
    from wholebatch.testing import preload

    preload("pytest", "hypothesis.strategies", "tests.quick_interpreter", "tests.quick_python")
    preload("wholebatch.kernels.tiles.common", "triton.experimental.gluon", "tests.quick_forks")
    atexit.register(gc.unfreeze)  # Triton's bindings report objects that are left at the end as leaks


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases that are a row of a table, as those of communicators, have their mark by their name."""
    if "planted" in item.name:
        item.add_marker("planted")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files start first, so that no worker ends with one of them alone: xdist counts tests instead."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    if "triton.runtime.interpreter" in sys.modules:
        import_module("quick_interpreter")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    slow = [(file, spent) for file, spent in seconds.most_common() if spent > 30]
    if slow:
        terminalreporter.section("files above 30 s")
        terminalreporter.write("".join(f"{spent:6.0f} s  {file}\n" for file, spent in slow))


@pytest.fixture(scope="module", autouse=True)
def _garbage_collections_are_short():
    """A test that collects garbage does not go through all imported modules; JAX forgets what it has compiled."""
    gc.collect()  # objects since the start of the last module: earlier ones stay frozen
    gc.freeze()
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def float64():
    """JAX has 64 bits."""
    with pytest.importorskip("jax").enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables of tests' data are not cached in the user's home, by no process that a test starts.

    matplotlib keeps its list of fonts there, which takes seconds to make.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(home, "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _settings_of_torch_are_left_as_found():
    """Runs in the tests' process round as those in a process of their own, whatever has run before them.

    A second thread, or denormal numbers that count as zero, change the last bits of a sum.
    """
    found = _settings_of_torch()
    yield
    left = _settings_of_torch()
    if left != found:
        torch.set_num_threads(found["threads"])
        torch.set_flush_denormal(found["denormals"] == 0)
        torch.set_default_dtype(found["dtype"])
    assert left == found, "the test has changed these settings for those after it"


def _settings_of_torch():
    return {
        "threads": torch.get_num_threads(),
        "denormals": (torch.tensor([1e-40]) * 1).item(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
    }


@pytest.fixture(autouse=True)
def _nothing_is_kept_of_other_tests() -> None:
    """Tests that replace functions leave plans and numbers of calls, which the next call in this process would use."""
    if (local := sys.modules.get("wholebatch.comm.local")) is not None:
        local._KEPT.clear()
        sys.modules["wholebatch.comm.select"].alone.cache_clear()


@pytest.fixture
def calibrations_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner measures everything, but each only once and on few tiles, so that the rates are rough."""
    from few_tiles import with_few_tiles

    from wholebatch.planning import check

    run = check.run_processes
    monkeypatch.setattr(check, "run_processes", lambda fn, size, *z, **o: run(with_few_tiles, size, fn, *z, **o))


@pytest.fixture
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a run is its title: its pictures take longer than the steps of a test."""
    monkeypatch.setattr("wholebatch_train.run.run_folder.render", lambda report: report.title)


@pytest.fixture
def ranks_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the application are forks of the tests' server, which has imported torch.

    Tests of their start, their signals and their output start them as users do.
    """
    from wholebatch._launch.processes import _context
    from wholebatch_train.ranks import local_ranks

    monkeypatch.setattr(local_ranks, "multiprocessing", SimpleNamespace(get_context=lambda _method: _context()))

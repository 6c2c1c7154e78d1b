"""The choice of kernel="auto": timed at the class of size of the call, made by all ranks, and kept for later runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compile_kernels import as_on_cuda
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch import kernels
from wholebatch._base.bounded_json import sealed
from wholebatch.kernels import choice, verdicts
from wholebatch.nodes import kernel_check
from wholebatch.nodes.rehearsals import NodeRehearsal
from wholebatch.testing import run_ranks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plants times and cards")
agree = importlib.import_module("wholebatch.contract.agree")  # the package has a function of this name


class Rehearsed:
    """Let "auto" choose on this device, as in a new process; note the sweeps that are checked and timed.

    Args:
        patch: of the test.
        folder: of verdicts; None: none are kept.
        times: milliseconds in kernels and in plain PyTorch, one pair for each timed form.
    """

    def __init__(self, patch, folder=None, times=((1.0, 2.0),)):
        self.checks, self.timed, self.sweeps = 0, [], 0
        for name, value in (("_made", {}), ("_digests", {}), ("_warned", set()), ("_off", [])):
            patch.setattr(choice, name, value)
        patch.setattr(agree, "chooses", lambda device: True)
        patch.setattr(agree, "select_products", as_on_cuda)
        patch.setattr(verdicts, "folder_of_verdicts", lambda: folder)
        self.left = iter([one for pair in times for one in pair])
        self.size = None
        rehearse, verifying = NodeRehearsal.__call__, kernel_check.verifying

        def noted(rehearsal, sizes, *, in_kernels):
            self.size, self.sweeps = (sizes.rows, sizes.cols, in_kernels), self.sweeps + 1
            return rehearse(rehearsal, sizes, in_kernels=in_kernels)

        def milliseconds(sweep, device):
            sweep()
            self.timed.append(self.size)
            return next(self.left)

        def counted():
            self.checks += 1
            return verifying()

        patch.setattr(NodeRehearsal, "__call__", noted)
        patch.setattr(kernel_check, "_milliseconds", milliseconds)
        patch.setattr(kernel_check, "verifying", counted)


def check_clip(counts=(30,), **more):
    """Call a loss with these rows of each rank, and compare value and gradients with the reference."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    whole = [normalize(torch.randn(sum(counts), 24), dim=1) for _ in range(2)]
    local = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = [z[local].clone().requires_grad_() for z in whole]
    true = [z.double().requires_grad_() for z in whole]
    loss, expected = wb.functional.clip_loss(*mine, 14.3, **more), wb.reference.clip_loss(*true, 14.3)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for got, of in zip(mine, true, strict=True):
        assert (got.grad.double() - size * of.grad[local]).norm() <= 1e-5 * size * of.grad.norm()


def test_each_class_of_size_is_timed_at_the_size_of_a_call(monkeypatch):
    """The larger class is faster in kernels and the smaller one is not: neither decides for the other."""
    rehearsed = Rehearsed(monkeypatch, times=[(1.0, 2.0), (2.0, 1.0)])
    for rows in (100, 128, 90, 65):  # 2^14 entries at most, and 2^13
        check_clip((rows,))
    assert rehearsed.timed == [(100, 100, True), (100, 100, False), (90, 90, True), (90, 90, False)]
    larger, smaller = choice.choices()
    assert larger.in_kernels
    assert not smaller.in_kernels
    assert "up to 2^14 entries" in str(larger)
    assert "up to 2^13 entries" in str(smaller)


@pytest.mark.parametrize(("memory", "in_pytorch"), [("auto", ["OneTile"]), ("flat", ["Softmax"])])
def test_a_loss_of_pairs_is_timed_by_its_own_nodes(monkeypatch, memory, in_pytorch):
    """The check is in tiles. Then a small batch as one tile, or in tiles, and the call itself in kernels."""
    Rehearsed(monkeypatch)
    applied = []
    for module, name in (
        ("row_statistics", "OneTile"),
        ("row_statistics", "Softmax"),
        ("row_statistics", "SoftmaxInKernels"),
    ):
        of = importlib.import_module(f"wholebatch.nodes.{module}")
        apply = getattr(of, name).apply
        noted = SimpleNamespace(apply=lambda *args, name=name, apply=apply: (applied.append(name), apply(*args))[1])
        monkeypatch.setattr(of, name, noted)
    check_clip((40,), memory=memory)
    assert applied == ["Softmax", "SoftmaxInKernels", *in_pytorch, "SoftmaxInKernels"]
    assert all(of.in_kernels for of in choice.choices())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4096**2, 24), (4096**2 + 1, 25), (16384**2, 28), (2**40, 28)],
)
def test_classes_of_sizes(entries, expected):
    assert kernel_check._class_of(entries) == expected


@pytest.mark.parametrize("shape", [(3, 5), (8192, 32768), (8192, 65536), (1, 2**30), (1_250_000, 8192), (0, 7)])
def test_the_size_that_is_timed(shape):
    rows, cols = shape
    sizes = kernel_check._as_called(rows, cols)
    assert sizes.rows * sizes.cols <= 16384**2
    if rows * cols <= 16384**2:
        assert (sizes.rows, sizes.cols) == (max(rows, 1), cols)
    else:
        assert sizes.rows * sizes.cols > 0.99 * 16384**2


@pytest.mark.parametrize(
    ("times", "in_kernels"), [((1.0, 1.0), True), ((1.1, 1.0), True), ((1.12, 1.0), False), ((0.9, 1.0), True)]
)
def test_times_that_are_alike_choose_kernels(monkeypatch, times, in_kernels):
    Rehearsed(monkeypatch, times=[times])
    check_clip()
    (made,) = choice.choices()
    assert (made.in_kernels, made.milliseconds, made.cached) == (in_kernels, times, False)


def ranks_together(folder, times, fault="", kept=True):
    """Return the warnings, the checks, and the choices of a rank that has a card of its own, and its own times.

    The last rank may have a fault. Verdicts of earlier calls are used if they are `kept`.
    """
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    folder = Path(folder) / str(rank)
    if last and fault == "a folder that cannot be written":
        folder = Path("/proc/wholebatch")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rehearsed = Rehearsed(patch, folder if kept else None, [times[rank]])
        patch.setattr(verdicts, "surroundings", lambda device: ("card", rank, "Triton", rank))
        if last and fault == "no compiler":
            patch.setattr(kernels.launch, "run", _no_compiler)
        elif last and fault == "Triton cannot be imported":
            patch.setattr(verdicts, "surroundings", _no_triton)
        for _ in range(2):
            check_clip((5, 30, 20)[: dist.get_world_size()])
        ours = [str(each.message) for each in warned if "wholebatch" in str(each.message)]
        made = [(of.in_kernels, of.cached) for of in choice.choices()]
        return ours, rehearsed.checks, len(rehearsed.timed), made


def _no_compiler(*_, **__):
    raise FileNotFoundError("[Errno 2] No such file or directory: 'gcc'")


def _no_triton(device):
    raise ImportError("libtriton.so: undefined symbol")


KERNELS, PYTORCH = (1.0, 2.0), (3.0, 1.0)


def test_the_slowest_rank_decides(tmp_path):
    """The second rank alone would choose plain PyTorch, and then the first one alone."""
    for times, in_kernels in (((4.0, 10.0), (9.0, 2.0)), True), (((1.0, 2.0), (9.0, 7.0)), False):
        found = run_ranks(ranks_together, 2, str(tmp_path), times, "", False)
        assert found == [([], 1, 2, [(in_kernels, False)])] * 2


def choices_on_a_ring(name):
    """Return the choices of a rank for a loss, forward and backward: whether kernels compute it, or why not."""
    with pytest.MonkeyPatch.context() as patch:
        Rehearsed(patch)
        x = normalize(torch.randn(12, 16), dim=1).requires_grad_()
        loss = {
            "siglip": lambda **more: wb.functional.siglip_loss(x, x, 10.0, -5.0, **more),
            "matryoshka": lambda **more: wb.functional.matryoshka_loss(x, x, logit_scale=9.0, dims=(8, 16), **more),
            "nt_xent": lambda **more: wb.functional.nt_xent_loss(x, x, **more),
        }[name]
        loss(exchange="ring").backward()
        return [(of.in_kernels, of.why) for of in choice.choices()]


@pytest.mark.parametrize("name", ["siglip", "matryoshka", "nt_xent"])
def test_both_ways_are_timed_on_a_ring_whose_blocks_are_smaller_than_what_is_rehearsed(name):
    assert run_ranks(choices_on_a_ring, 3, name, timeout_s=240) == [[(True, "")]] * 3


def test_a_second_run_of_ranks_starts_at_once(tmp_path):
    first = run_ranks(ranks_together, 3, str(tmp_path), [KERNELS] * 3)
    assert first == [([], 1, 2, [(True, False)])] * 3
    second = run_ranks(ranks_together, 3, str(tmp_path), [PYTORCH] * 3)  # would be chosen if it were timed again
    assert second == [([], 0, 0, [(True, True)])] * 3


def test_ranks_of_which_some_have_a_verdict(tmp_path):
    """Those without one check while the others wait; the times of all decide."""
    run_ranks(ranks_together, 2, str(tmp_path), [KERNELS] * 2)
    (file,) = (tmp_path / "1").iterdir()
    file.unlink()
    found = run_ranks(ranks_together, 2, str(tmp_path), [PYTORCH] * 2)
    assert found == [([], 0, 0, [(False, True)]), ([], 1, 2, [(False, False)])]
    assert run_ranks(ranks_together, 2, str(tmp_path), [KERNELS] * 2) == [([], 0, 0, [(False, True)])] * 2


@pytest.mark.planted
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("fault", ["no compiler", "Triton cannot be imported", "a folder that cannot be written"])
def test_ranks_of_which_one_has_a_fault(tmp_path, fault, earlier):
    """All go on in the same way, with right numbers, also if an earlier run was without the fault."""
    if earlier:
        run_ranks(ranks_together, 2, str(tmp_path), [KERNELS] * 2)
    found = run_ranks(ranks_together, 2, str(tmp_path), [KERNELS] * 2, fault, timeout_s=60)
    warned = [ours for ours, *_ in found]
    ways = {in_kernels for *_, ((in_kernels, _),) in found}
    if fault == "a folder that cannot be written":  # kernels compute, and are checked each time
        assert warned == [[], []]
        assert ways == {True}
        assert found[1][1] == 1
    else:
        assert [len(ours) for ours in warned] == [1, 0]
        assert "their check failed on rank 1: " in warned[0][0]
        assert ("gcc" if fault == "no compiler" else "undefined symbol") in warned[0][0]
        assert ways == {False}
        assert not earlier or not (tmp_path / "1").exists() or len([*(tmp_path / "1").iterdir()]) == 1


def again(patch, folder, times=PYTORCH):
    """Return what a second run checks and times."""
    rehearsed = Rehearsed(patch, folder, [times])
    check_clip()
    (made,) = choice.choices()
    assert made.cached == (rehearsed.checks == 0)
    assert ("from an earlier run" in str(made)) == made.cached
    return rehearsed.checks, len(rehearsed.timed)


def test_a_verdict_is_kept_and_read(monkeypatch, tmp_path):
    """One sweep is made without a check, so that a kernel that does not start is noticed in time."""
    rehearsed = Rehearsed(monkeypatch, tmp_path / "new" / "folder")
    check_clip()
    (first,) = choice.choices()
    assert rehearsed.checks == 1
    rehearsed = Rehearsed(monkeypatch, tmp_path / "new" / "folder", ())
    check_clip()
    (second,) = choice.choices()
    assert (rehearsed.checks, rehearsed.sweeps, rehearsed.timed) == (0, 1, [])
    assert (second.in_kernels, second.kernels, second.milliseconds) == (
        first.in_kernels, first.kernels, first.milliseconds,
    )  # fmt: skip
    assert (first.cached, second.cached) == (False, True)


def test_a_failed_check_is_not_kept(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        Rehearsed(patch, tmp_path)
        patch.setattr(kernels.launch, "run", _no_compiler)
        with pytest.warns(UserWarning, match="'gcc'"):
            check_clip()
    assert [*tmp_path.iterdir()] == []
    assert again(monkeypatch, tmp_path) == (1, 2)


def test_a_form_without_kernels_keeps_nothing(monkeypatch, tmp_path):
    Rehearsed(monkeypatch, tmp_path, ())
    x, y = normalize(torch.randn(2, 30, 24, dtype=torch.float64), dim=-1)
    wb.functional.clip_loss(x, y, 14.3, memory="flat")
    (made,) = choice.choices()
    assert made.why == "no kernel computes this form"
    assert [*tmp_path.iterdir()] == []


def guided_choices():
    """Return the choices for InfoNCE with guides, on 60 rows of each rank."""
    with pytest.MonkeyPatch.context() as patch:
        Rehearsed(patch)
        torch.manual_seed(dist.get_rank())
        x, y, of_x, of_y = normalize(torch.randn(4, 60, 24), dim=-1)
        guides = {"query_guides": of_x, "key_guides": of_y, "exclude_above": 0.1}
        losses = [wb.functional.info_nce_loss(x, y, logit_scale=5.0, kernel=of, **guides) for of in ("torch", "auto")]
        assert losses[0] == losses[1]
        return [(made.why, made.failed) for made in choice.choices()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_form_with_a_guide_has_no_kernel_and_is_no_failure(size):
    assert run_ranks(guided_choices, size) == [[("no kernel computes this form", False)]] * size


def test_a_named_kernel_has_a_verdict_without_times(monkeypatch, tmp_path):
    for checks in (1, 0):
        rehearsed = Rehearsed(monkeypatch, tmp_path, ())
        check_clip(kernel="triton")
        assert (rehearsed.checks, rehearsed.timed) == (checks, [])
    assert again(monkeypatch, tmp_path) == (1, 2)  # "auto" needs times


def test_a_check_of_fewer_rows_is_not_that_of_more(monkeypatch, tmp_path):
    """4 x 64 and 16 x 16 entries are of one class, but a check of 4 rows says little about 16."""
    checks = []
    for rows in (4, 4, 16):
        rehearsed = Rehearsed(monkeypatch, tmp_path)
        torch.manual_seed(0)
        x, y, queue = (normalize(torch.randn(n, 24), dim=1) for n in (rows, rows, 256 // rows))
        wb.functional.moco_loss(x, y, queue, logit_scale=14.3)
        checks.append(rehearsed.checks)
        assert "2^8 entries" in str(choice.choices()[0])
    assert checks == [1, 0, 1]


@pytest.mark.parametrize("changed", range(4))
def test_another_card_driver_or_version_is_checked_again(monkeypatch, tmp_path, changed):
    around = ["a card", "driver 1", "Triton 3.6.0", "digest"]
    monkeypatch.setattr(verdicts, "surroundings", lambda device: tuple(around))
    assert again(monkeypatch, tmp_path) == (1, 2)
    assert again(monkeypatch, tmp_path) == (0, 0)
    around[changed] += "0"
    assert again(monkeypatch, tmp_path) == (1, 2)
    assert again(monkeypatch, tmp_path) == (0, 0)


def test_what_a_verdict_depends_on(monkeypatch, tmp_path):
    """Each property of the card, the driver, each version, and each file of the sources."""
    sources = tmp_path / "kernels" / "tiles"
    sources.mkdir(parents=True)
    (sources / "softmax.py").write_text("x = 1\n")
    monkeypatch.setattr(verdicts, "__file__", str(tmp_path / "kernels" / "verdicts.py"))
    driver = tmp_path / "version"
    driver.write_bytes(b"NVRM version: 570.86.15\xff\n")
    monkeypatch.setattr(verdicts, "_DRIVER", driver)
    card = {"name": "H100", "major": 9, "minor": 0, "total_memory": 85_000_000_000, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**card))
    seen = []

    def changed():
        verdicts.surroundings.cache_clear()
        seen.append(verdicts.surroundings(torch.device("cuda", 0)))

    changed()
    for name, value in [*card.items()]:
        card[name] = value * 2 if value else 1
        changed()
    driver.write_text("NVRM version: 580.1\n")
    changed()
    driver.unlink()
    changed()
    (sources / "softmax.py").write_text("x = 2\n")
    changed()
    (sources / "another.py").write_text("")
    changed()
    for module, name in ((torch, "__version__"), (sys.modules["triton"], "__version__"), (verdicts, "__version__")):
        monkeypatch.setattr(module, name, "0.0.1")
        changed()
    verdicts.surroundings.cache_clear()
    assert len(set(seen)) == len(seen) == 13
    assert seen[0][:2] == ("H100", 9)


def a_verdict(folder):
    """Return the only file of a folder, and its fields."""
    (file,) = folder.iterdir()
    fields = json.loads(file.read_bytes())
    del fields["sha256"]
    return file, fields


def flipped(text):
    at = text.index(b"1.0")
    return text[:at] + b"7" + text[at + 1 :]


DAMAGED = {
    "empty": lambda text, fields: b"",
    "truncated": lambda text, fields: text[: len(text) // 2],
    "one digit": lambda text, fields: flipped(text),
    "no JSON": lambda text, fields: b"\x80\x04\x95 a pickle.",
    "nested deeply": lambda text, fields: b"[" * 10_000,
    "huge": lambda text, fields: text + b" " * 10_000_000,
    "huge numbers": lambda text, fields: text.replace(b"1.0", b"1e999"),
    "a list": lambda text, fields: b"[]",
    "no fields": lambda text, fields: sealed({}),
    "one field more": lambda text, fields: sealed({**fields, "more": 1}),
    "text for a number": lambda text, fields: sealed({**fields, "milliseconds": "1.0"}),
    "no number": lambda text, fields: sealed({**fields, "in PyTorch": None}),
    "a list for a text": lambda text, fields: sealed({**fields, "passed": ["tile_sums"]}),
    "no kernels": lambda text, fields: sealed({**fields, "passed": " "}),
    "strange kernels": lambda text, fields: sealed({**fields, "passed": "tile_sums \x1b[31m"}),
    "of another form": lambda text, fields: sealed({**fields, "of": fields["of"].replace("clip", "nt_xent")}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_count_as_none(monkeypatch, tmp_path, damage):
    """They are replaced."""
    assert again(monkeypatch, tmp_path, KERNELS) == (1, 2)
    file, fields = a_verdict(tmp_path)
    text = file.read_bytes()
    file.write_bytes(DAMAGED[damage](text, fields))
    assert again(monkeypatch, tmp_path, KERNELS) == (1, 2)
    assert file.read_bytes() == text
    assert again(monkeypatch, tmp_path) == (0, 0)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "link to itself", "device"])
def test_no_regular_file_counts_as_none(monkeypatch, tmp_path, kind):
    """Opening a pipe would wait forever."""
    again(monkeypatch, tmp_path / "verdicts", KERNELS)
    file, _ = a_verdict(tmp_path / "verdicts")
    elsewhere = file.rename(tmp_path / "elsewhere")
    if kind == "folder":
        (file / "inside").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"link": elsewhere, "device": "/dev/zero"}.get(kind, file))
    assert again(monkeypatch, tmp_path / "verdicts", KERNELS) == (1, 2)
    assert again(monkeypatch, tmp_path / "verdicts") == ((1, 2) if kind == "folder" else (0, 0))


@contextmanager
def without_privileges():
    """Become another user, whom permissions of files concern, if this is root."""
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def public():
    """Return a folder to which other users find a way."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("permissions", [0o000, 0o500])
def test_a_folder_without_permissions(monkeypatch, public, permissions):
    """Neither verdict nor folder can be read, or nothing can be written."""
    folder = public / "verdicts"
    assert again(monkeypatch, folder) == (1, 2)
    if not os.geteuid():
        for path in (*folder.iterdir(), folder):
            os.chown(path, 65534, -1)
    folder.chmod(permissions)
    try:
        with without_privileges():
            assert os.access(folder, os.R_OK, effective_ids=True) == bool(permissions)
            assert not os.access(folder, os.W_OK, effective_ids=True)
            assert again(monkeypatch, folder) == ((0, 0) if permissions else (1, 2))
            assert again(monkeypatch, folder) == ((0, 0) if permissions else (1, 2))
            if permissions:
                rehearsed = Rehearsed(monkeypatch, folder)
                check_clip((200,))  # another form, which is not there
                assert rehearsed.checks == 1
    finally:
        folder.chmod(0o700)
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nowhere", "no permission", "full"])
def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, kind):
    folder = tmp_path / "verdicts"
    if kind == "a file":
        folder.touch()
    elif kind == "below a file":
        folder.touch()
        folder /= "below"
    elif kind == "a link to nowhere":
        folder.symlink_to(tmp_path / "no folder" / "nowhere")
    elif kind == "no permission":
        folder = Path("/proc/wholebatch")
    else:
        write = Path.write_bytes

        def half(path, data):
            write(path, data[:50])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", half)
    for _ in range(2):
        assert again(monkeypatch, folder) == (1, 2)
    if kind == "full":
        assert [*folder.iterdir()] == []


def write_and_read(folder):
    """Write one verdict many times, and read it after each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "folder_of_verdicts", lambda: Path(folder))
        device, verdict = torch.device("cpu"), {"passed": "tile_sums " * 1000, "milliseconds": 1.0, "in PyTorch": 2.0}
        found = []
        for _ in range(100):
            verdicts.write(device, "a form", verdict)
            found.append(verdicts.read(device, "a form") == verdict)
        return all(found)


def test_processes_that_write_at_once(tmp_path):
    """Each read finds a whole verdict, and nothing else is left in the end."""
    assert run_ranks(write_and_read, 3, str(tmp_path)) == [True] * 3
    a_verdict(tmp_path)


def test_the_folder_is_in_tritons_cache():
    """As Triton finds it, but for the interpreter, and inside of settings that are measured."""
    assert verdicts.folder_of_verdicts() is None  # in the interpreter
    program = """if True:
        import os
        from wholebatch.kernels import Blocks, using, verdicts
        folder = verdicts.folder_of_verdicts
        assert str(folder()) == "/home/someone/.triton/cache/wholebatch"
        os.environ["TRITON_HOME"] = "/a/home"
        assert str(folder()) == "/a/home/.triton/cache/wholebatch"
        os.environ["TRITON_CACHE_DIR"] = "/a/cache"
        assert str(folder()) == "/a/cache/wholebatch"
        with verdicts.ignored():
            assert folder() is None
        with using(Blocks(16, 32, 16, 2, 1, 1)):
            assert folder() is None
        os.environ["TRITON_CACHE_DIR"] = ""
        assert folder() is None
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment = {**kept, "HOME": "/home/someone"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)

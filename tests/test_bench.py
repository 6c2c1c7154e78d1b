"""`wholebatch bench` end to end: on gloo, gather under mpiexec, and messages about mistakes."""

import json
from unittest.mock import patch

import pytest
import torch
from mpi import mpiexec
from test_mpi import implementation  # noqa: F401  a fixture

import wholebatch as wb
from wholebatch.__main__ import main
from wholebatch.bench.config import LOSSES
from wholebatch.bench.gate import check as check_loss
from wholebatch.bench.gate import check_value
from wholebatch.bench.gather import ALL_REDUCE, REDUCE_SCATTER, STRATEGIES, check
from wholebatch.bench.loss import Job, Methods, dense
from wholebatch.bench.subjects import Configuration, Subject
from wholebatch.comm import LocalCommunicator, TorchCommunicator
from wholebatch.sweep import KeptTiles
from wholebatch.testing import RankError, run_ranks

CPU = torch.device("cpu")
SMALL = ["--embedding-sizes", "4", "16", "--rows-per-rank", "3", "--steps", "2"]


def rows_of(file):
    rows = json.loads(file.read_text())
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert all(row["step_ms"] > 0 for row in rows)
    return {(row["backend"], row["ranks"], row["method"], row["embedding_size"]) for row in rows}, len(rows)


def test_gather_on_gloo_writes_all_results_once(tmp_path, capsys):
    file = tmp_path / "figures.json"
    for _ in range(2):  # the second run replaces figures of the first
        assert main(["bench", "gather", "--ranks", "1", "2", *SMALL, "--results", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "gather to root with backpropagation" in printed
    found, number = rows_of(file)
    methods = [*STRATEGIES, REDUCE_SCATTER, ALL_REDUCE]
    assert found == {("gloo", ranks, method, dim) for ranks in (1, 2) for method in methods for dim in (4, 16)}
    assert number == len(found)


def test_gather_under_mpiexec(tmp_path, implementation):  # noqa: F811
    file = tmp_path / "figures.json"
    run = mpiexec(implementation, 2, "-m", "wholebatch", "bench", "gather", *SMALL, "--results", str(file))
    assert run.returncode == 0, run.stderr
    found, _ = rows_of(file)
    (backend,) = {backend for backend, *_ in found}
    assert backend in ("MPICH 5.0.2", "Open MPI 5.0.11")
    assert {ranks for _, ranks, *_ in found} == {2}


def wrong_loss_body():
    from wholebatch.losses import whole_batch

    with (
        patch.object(whole_batch, "_gather", whole_batch._replicate),
        patch.object(whole_batch, "replicated_loss_factor", lambda sync, size: 1.0),
    ):
        check(TorchCommunicator())


@pytest.mark.planted
def test_gather_rejects_a_wrong_gradient():
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(wrong_loss_body, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'; choose one of: gather"),
        (["gather", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["gather", "--embedding-sizes", "8", "-1"], "--embedding-sizes must be at least 1, got 8 -1"),
        (["gather", "--steps", "0"], "--steps must be at least 1"),
        (["gather", "--results", "x.txt"], "must be a file that ends in .json, got x.txt"),
        (["gather", "--results", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["gather", "--results", "OTHER.json"], "does not hold the results of this benchmark; name another file"),
    ],
)
def test_wrong_arguments_of_bench_gather_are_refused_in_one_line(arguments, message, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"loss": 1}')
    assert main(["bench", *(str(other) if a == "OTHER.json" else a for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wholebatch bench: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--help"])
    assert exit_.value.code == 0
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "gather", "--help"])
    assert exit_.value.code == 0
    assert "--results" in capsys.readouterr().out


SMALL_LOSSES = ["--batch-size", "60", "--embedding-size", "8", "--steps", "2"]


def losses_of(file):
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())
    assert all(row["step_ms"] > 0 and row["times_floor"] > 0 for row in rows)
    assert all({"machine", "torch", "wholebatch"} <= row.keys() for row in rows)
    return {(row["loss"], row["ranks"], row["method"]) for row in rows}, len(rows)


def test_bench_loss_keeps_figures_of_other_losses(tmp_path, capsys):
    file = tmp_path / "losses.json"
    for options in ([], ["--losses", "siglip"]):  # the second run replaces figures of the first
        assert main(["bench", "loss", *SMALL_LOSSES, *options, "--no-peers", "--results", str(file)]) == 0
    found, number = losses_of(file)
    settings = ("flat", "keep 2 bytes/entry")
    kept = {(name, 1, f"wholebatch {setting}") for name in LOSSES if name != "siglip" for setting in settings}
    assert found == kept | {("siglip", 1, "wholebatch flat")}
    assert number == len(found)
    assert "nt_xent, batch size 60, embedding size 8" in capsys.readouterr().out


def test_missing_peers_are_skipped_with_a_message(tmp_path, capsys):
    file = tmp_path / "losses.json"
    options = ["--losses", "clip", "--ranks", "2", "--exchanges", "gather", "ring", "--keep", "0"]
    assert main(["bench", "loss", *SMALL_LOSSES, *options, "--results", str(file)]) == 0
    found, _ = losses_of(file)
    assert {("clip", 2, "wholebatch flat gather"), ("clip", 2, "wholebatch flat ring")} <= found
    installed = any(method.startswith("open_clip") for _, _, method in found)
    assert installed != ("open_clip_torch is not installed: skipped" in capsys.readouterr().out)


@pytest.mark.planted
def test_wrong_losses_and_peers_are_rejected():
    """A loss whose gradient is wrong by a factor, and a peer that computes another loss, are not timed."""
    comm = LocalCommunicator()
    for name in LOSSES:
        check_loss(comm, Subject(name), Configuration())
        if name != "siglip":
            with patch.object(KeptTiles, "keep", autospec=True, side_effect=KeptTiles.keep) as keep:
                check_loss(comm, Subject(name), Configuration(keep=2.0))
            assert keep.called, "the checked loss is not the timed one"
    right = wb.functional.clip_loss
    with (
        patch.object(wb.functional, "clip_loss", lambda *z, **o: 2 * right(*z, **o)),
        pytest.raises(AssertionError, match="not close"),
    ):
        check_loss(comm, Subject("clip"), Configuration())
    check_value(comm, Subject("clip"), lambda x, y, scale, bias: wb.reference.clip_loss(x, y, scale))
    with pytest.raises(AssertionError, match="not close"):
        check_value(
            comm, Subject("clip"), lambda x, y, scale, bias: wb.reference.info_nce_loss(x, y, logit_scale=scale)
        )


def test_late_interaction_is_timed_beside_its_dense_formula(tmp_path, capsys):
    file = tmp_path / "losses.json"
    tokens = ["--query-tokens", "3", "--document-tokens", "5"]
    options = [*SMALL_LOSSES, "--losses", "max_sim", *tokens, "--ranks", "1", "2", "--results", str(file)]
    assert main(["bench", "loss", *options]) == 0
    found, _ = losses_of(file)
    name, methods = "max_sim, 3 x 5 tokens", ("wholebatch flat", "wholebatch winners kept")
    alone = {(name, 1, method) for method in (*methods, "dense: einsum, max, cross_entropy")}
    assert found == alone | {(name, 2, f"{method} auto") for method in methods}
    assert "max_sim, 3 x 5 tokens, batch size 60, embedding size 8, 2 ranks" in capsys.readouterr().out


@pytest.mark.planted
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_wrong_late_interaction_is_rejected(keep):
    """A value or a gradient that is wrong by a factor, and a dense formula of other documents, are not timed."""
    comm, configuration = LocalCommunicator(), Configuration(keep=keep)
    right = wb.functional.max_sim_loss

    def checked(*z, **options):
        assert (options["memory"] == "flat") == (not keep), "the checked loss is not the timed one"
        return right(*z, **options)

    job = Job("max_sim", [configuration], 8, 8, 1, 1, {}, tokens=(3, 5))
    with patch.object(wb.functional, "max_sim_loss", checked):
        Methods(comm, job, CPU)
    for wrong in (lambda f: 2 * f, lambda f: f + (f - f.detach())):
        with (
            patch.object(wb.functional, "max_sim_loss", lambda *z, of=wrong, **o: of(right(*z, **o))),
            pytest.raises(AssertionError, match="not close"),
        ):
            Methods(comm, job, CPU)
    with pytest.raises(AssertionError, match="not close"):
        check_value(comm, Subject("max_sim"), lambda x, y, scale, bias: dense(x, y.flip(0), scale, bias))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--query-tokens", "32"], "--query-tokens is for late interaction: add --losses max_sim, or leave it out"),
        (["--losses", "max_sim", "--document-tokens", "0"], "--document-tokens must be at least 1, got 0"),
        (["--losses", "max_sim", "--ranks", "512"], "--batch-size must be at least the number of ranks, 512; got 256"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--batch-size", "3", "--ranks", "4"], "--batch-size must be at least the number of ranks, 4; got 3"),
        (["--keep", "-2"], "--keep is in bytes for each entry of S, from 0 to 16; got -2"),
        (["--keep", "0", "2000000"], "--keep is in bytes for each entry of S, from 0 to 16; got 2e+06"),
        (["--keep", "inf"], "--keep is in bytes"),
        (["--keep", "nan"], "--keep is in bytes"),
        (["--results", "figures.txt"], "must be a file that ends in .json"),
        (["--results", "no/such/folder.json"], "there is no folder no/such"),
    ],
)
def test_wrong_options_of_bench_loss_are_refused_with_their_value(options, message, capsys):
    assert main(["bench", "loss", *options]) == 2
    assert message in capsys.readouterr().err

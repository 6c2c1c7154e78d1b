"""`wholebatch bench gather` end to end: on gloo, under mpiexec, and what it says about mistakes."""

import json

import pytest
from mpi import mpiexec
from test_mpi import implementation  # noqa: F401  a fixture

from wholebatch.__main__ import main
from wholebatch.bench.gather import ALL_REDUCE, REDUCE_SCATTER, STRATEGIES, check
from wholebatch.comm import TorchCommunicator
from wholebatch.testing import RankError, run_ranks

SMALL = ["--dims", "4", "16", "--rows", "3", "--steps", "2"]


def rows_of(file):
    rows = json.loads(file.read_text())
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert all(row["step_ms"] > 0 for row in rows)
    return {(row["backend"], row["ranks"], row["what"], row["dim"]) for row in rows}, len(rows)


def test_on_gloo(tmp_path, capsys):
    file = tmp_path / "figures.json"
    for _ in range(2):  # the second run replaces the first's figures
        assert main(["bench", "gather", "--ranks", "1", "2", *SMALL, "--results", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "gather to root with backpropagation" in printed
    found, number = rows_of(file)
    ways = [*STRATEGIES, REDUCE_SCATTER, ALL_REDUCE]
    assert found == {("gloo", ranks, way, dim) for ranks in (1, 2) for way in ways for dim in (4, 16)}
    assert number == len(found)


def test_under_mpiexec(tmp_path, implementation):  # noqa: F811
    file = tmp_path / "figures.json"
    run = mpiexec(implementation, 2, "-m", "wholebatch", "bench", "gather", *SMALL, "--results", str(file))
    assert run.returncode == 0, run.stderr
    found, _ = rows_of(file)
    (backend,) = {backend for backend, *_ in found}
    assert backend in ("MPICH 5.0.2", "Open MPI 5.0.11")
    assert {ranks for _, ranks, *_ in found} == {2}


def wrong_loss_body():
    from unittest.mock import patch

    from wholebatch.losses import whole_batch

    with (
        patch.object(whole_batch, "_gather", whole_batch._replicate),
        patch.object(whole_batch, "replicated_loss_factor", lambda sync, size: 1.0),
    ):
        check(TorchCommunicator())


def test_the_gate_rejects_a_wrong_gradient():
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(wrong_loss_body, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'; choose one of: gather"),
        (["gather", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["gather", "--dims", "8", "-1"], "--dims must be at least 1, got 8 -1"),
        (["gather", "--steps", "0"], "--steps must be at least 1"),
        (["gather", "--results", "x.txt"], "must be a file that ends in .json, got x.txt"),
        (["gather", "--results", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["gather", "--results", "OTHER.json"], "does not hold the results of this benchmark; name another file"),
    ],
)
def test_mistakes(arguments, message, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"loss": 1}')
    assert main(["bench", *(str(other) if a == "OTHER.json" else a for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wholebatch bench: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--help"])
    assert exit_.value.code == 0
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "gather", "--help"])
    assert exit_.value.code == 0
    assert "--results" in capsys.readouterr().out

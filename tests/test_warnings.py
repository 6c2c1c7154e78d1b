"""Warnings point at the user's line, whatever lies between it and the place that warns."""

import ast
import inspect
import warnings
from pathlib import Path

import pytest
import torch

import wholebatch as wb
from wholebatch._base import warnings as own
from wholebatch.comm import order

SOURCE = Path(wb.__file__).parent


def dropped_handle():
    wb.comm.LocalCommunicator().iall_reduce(torch.ones(2))


def many_operations(monkeypatch):
    monkeypatch.setattr(order, "_MANY", 1)
    wb.comm.LocalCommunicator().all_reduce(torch.ones(2, requires_grad=True))


def out_of_memory():
    calls = []

    def encode(x):
        calls.append(x)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * weight

    weight = torch.ones(4, requires_grad=True)
    step = wb.GradCache([encode, encode], 2, lambda x, y: (x @ y.T).square().mean(), keep_graphs=1.0)
    step(torch.randn(8, 4), torch.randn(8, 4))


def unread_term():
    terms = {"a": wb.terms.LogSumExp(lambda s, x, y, p: s), "b": wb.terms.LogSumExp(lambda s, x, y, p: 2 * s)}
    loss = wb.PairLoss(terms, lambda r, x, p: r.a)
    loss(torch.randn(4, 4))


@pytest.mark.parametrize("warns", [dropped_handle, many_operations, out_of_memory, unread_term])
def test_a_warning_points_at_the_users_line(monkeypatch, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warns(monkeypatch) if inspect.signature(warns).parameters else warns()
    lines, first = inspect.getsourcelines(warns)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, first + len(lines) - 1)]


def calls_of_warn(path):
    """Return the lines of a module that warn by the standard library's function."""
    tree = ast.parse(path.read_text())
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"
    ]


def test_one_function_warns():
    files = sorted(SOURCE.rglob("*.py"))
    assert [path for path in files if calls_of_warn(path)] == [Path(own.__file__)]

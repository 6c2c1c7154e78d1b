"""The work of the host at the entry of a loss does not grow with the number of ranks; counted, not timed."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import wholebatch as wb
from wholebatch.comm import statement
from wholebatch.losses import clip


@pytest.fixture
def entry_calls(monkeypatch):
    """Return a function of W: the numbers of Python's calls, and of parsed texts, at the entry of CLIP on W ranks."""
    calls = parsed = 0
    agree, decode = clip.agree, statement.decode

    def count(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"

    def counting(*args):
        sys.setprofile(count)
        try:
            return agree(*args)
        finally:
            sys.setprofile(None)

    def counting_texts(text):
        nonlocal parsed
        parsed += 1
        return decode(text)

    def on(size):
        nonlocal calls, parsed
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            x, scale = torch.eye(3).requires_grad_(), torch.tensor(2.0, requires_grad=True)
            wb.functional.clip_loss(x, x, scale)
            calls = parsed = 0
            wb.functional.clip_loss(x, x, scale)
        finally:
            dist.destroy_process_group()
        return calls, parsed

    monkeypatch.setattr(clip, "agree", counting)
    monkeypatch.setattr("wholebatch.comm.handshake.decode", counting_texts)
    return on


def test_python_makes_as_many_calls_on_2_ranks_as_on_512(entry_calls):
    (few, no_texts), (many, still_none) = entry_calls(2), entry_calls(512)
    assert few > 100, "the calls are counted"
    assert many < 1.1 * few + 50
    assert no_texts == still_none == 0


def test_a_loop_over_ranks_would_be_seen(entry_calls, monkeypatch):
    agree = import_module("wholebatch.contract.agree")  # the package has a function of this name
    (good, _), accepted = entry_calls(512), agree._values_of_all

    def reading_all(columns, *of_call):
        assert all([isinstance(number, float) for number in column] for column in columns.values())
        return accepted({name: [(lambda x: x)(x) for x in column] for name, column in columns.items()}, *of_call)

    monkeypatch.setattr(agree, "_values_of_all", reading_all)
    assert entry_calls(512)[0] > 2 * good

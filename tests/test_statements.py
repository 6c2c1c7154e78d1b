"""A handshake's statements: numbers in a record, the rest as a digest, texts only where ranks differ."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.comm.records import RECORD_BYTES, WORDS, FactsByRank, OnDevice, Statement
from wholebatch.testing import run_ranks

CPU = torch.device("cpu")
FACTS = [
    {"rows": 3, "scale": 0.1, "on": True, "dtype": "torch.float32", "none": None},
    {"nested": {"a": [1, 2.5, False, None, "x"], "b": {"c": -1}}, "empty": [], "nothing": {}},
    {"nan": math.nan, "inf": -math.inf, "minus zero": -0.0, "tiny": 5e-324},
    {"large": 2**53 + 1, "larger": -(2**70), "int": 2**53},
    {"many": list(range(100)), "more": [0.5] * 70, "last": 7},
    {1: "a key that is no string", "x": 2},
    {"complaint": "x", "caller": 3, "numbers": "ddd", "facts": {"facts": 1}},
]


def there_and_back(facts):
    statement = Statement("test", facts)
    filled = FactsByRank(statement, statement.record(CPU))
    assert filled.foreign() == []
    return filled[0], len(statement.numbers) + len(statement.on_device)


def record(caller):
    return Statement(caller, {"x": 1.0}).record(CPU)


def of_ranks(*records):
    return FactsByRank(Statement("abc", {"x": 1.0}), torch.cat(records))


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: str([*facts])[:40])
def test_facts_return_as_json_values(facts):
    found, _ = there_and_back(facts)
    expected = json.loads(json.dumps(facts))
    assert repr(found) == repr(expected)  # types, order, the sign of zero and NaN included


def test_numbers_beyond_a_record_stay_in_the_text():
    found, taken = there_and_back({"many": list(range(100)), "device": OnDevice(torch.tensor(2.5))})
    assert taken == WORDS - 6
    assert found == {"many": list(range(100)), "device": 2.5}


def test_a_damaged_record_is_refused():
    good = record("test")
    for damaged in (torch.zeros_like(good), good.roll(1, 1), torch.cat([good[:, :40], torch.zeros(1, 24)], 1).long()):
        assert of_ranks(good, damaged).foreign() == [1]
    assert of_ranks(good, good).foreign() == []


def test_ranks_with_one_length_and_other_texts_differ():
    one, same, other = map(record, ("abc", "abc", "abd"))
    assert of_ranks(one, same).has_one_text
    assert not of_ranks(one, other).has_one_text
    assert of_ranks(one, other).lengths() == [len(Statement("abc", {"x": 1.0}).text)] * 2


def overwritten_body():
    """In the second round, take other bytes than the text that rank 1 has announced."""
    comm, rank = wb.comm.TorchCommunicator(), dist.get_rank()
    comm.handshake(dict, caller="test")
    gather = comm.transport.all_gather_statements

    def overwritten(x):
        finish = gather(x)

        def changed():
            everyone = finish()
            if everyone.dtype == torch.uint8:  # texts, not records
                everyone[1, 5] += 1
            return everyone

        return changed

    comm.transport.all_gather_statements = overwritten
    with pytest.raises(wb.comm.CommunicationError) as caught:
        comm.handshake(lambda: {"name": "x" * rank}, caller="test")
    return str(caught.value)


def test_a_text_that_was_not_announced_is_refused():
    for text in run_ranks(overwritten_body, 2):
        assert "in test: rank 1 sent bytes that are not the text of its statement" in text


def rounds_body():
    """Return the sizes of the messages of handshakes whose facts differ in numbers, in texts and in keys."""
    comm, rank, sizes = wb.comm.TorchCommunicator(), dist.get_rank(), []
    comm.handshake(dict, caller="test")  # the first one of a group compares versions
    gather = comm.transport.all_gather_statements
    comm.transport.all_gather_statements = lambda x: (sizes.append(x.numel() * x.element_size()), gather(x))[1]
    made = []
    for state in (
        {"rows": rank, "needs": [rank == 1, True], "name": "same"},
        {"rows": 0, "name": "x" * rank},
        {"rows": 0, f"only {rank % 2}": rank / 7},
        {"rows": 0, "kind": 1 if rank else 1.0},
    ):
        sizes.append(None)
        found = comm.handshake(lambda state=state: state, caller="test")
        assert found[rank] == state
        made.append([*found])
        assert found.column("rows") == [of_rank["rows"] for of_rank in made[-1]]
    return [size if size is None else size == RECORD_BYTES for size in sizes], made


def test_texts_travel_only_where_they_differ():
    results = run_ranks(rounds_body, 3)
    for sizes, made in results:
        assert sizes == [None, True, None, True, False, None, True, False, None, True, False]
        assert made == results[0][1]
        assert [of_rank["needs"][0] for of_rank in made[0]] == [False, True, False]
        assert made[1][2]["name"] == "xx"
        assert made[2][2] == {"rows": 0, "only 0": 2 / 7}
        assert [type(of_rank["kind"]) for of_rank in made[3]] == [float, int, int]


def must_match_body():
    comm, rank = wb.comm.TorchCommunicator(), dist.get_rank()
    errors = []
    for differs in ({"a": rank}, {"a": "xy"[rank]}, {"a": [1.0, None, rank / 2]}, {"b" if rank else "a": 1}):
        with pytest.raises(
            ValueError, match=r"test: a must be the same on all ranks, got rank 0: .*; rank 1: "
        ) as caught:
            comm.handshake(lambda differs=differs: differs, caller="test", must_match=["a"])
        errors.append(str(caught.value))
    comm.handshake(lambda: {"a": math.nan, "b": [math.nan]}, caller="test", must_match=["a", "b"])
    return errors


def test_facts_that_must_match_are_compared_in_records_and_in_texts():
    first, second = run_ranks(must_match_body, 2)
    assert first == second


def all_complain_body():
    comm = wb.comm.TorchCommunicator()

    def state():
        raise ValueError("the same mistake")

    with pytest.raises(ValueError, match=r"test: the same mistake$"):
        comm.handshake(state, caller="test")
    return comm.handshake(lambda: {"x": 1}, caller="test") == [{"x": 1}] * 2


def test_the_same_complaint_on_all_ranks_raises():
    assert run_ranks(all_complain_body, 2) == [True, True]

"""The adapter to ms-swift without ms-swift: its loss against a dense formula, its variables, and mistakes."""

import itertools
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from wholebatch.integrations import ms_swift
from wholebatch.integrations._framework import FrameworkError
from wholebatch.testing import RankError, run_ranks

INF, WIDTH = float("inf"), 4
QQ, DD, MASK = {"INFONCE_INCLUDE_QQ": "true"}, {"INFONCE_INCLUDE_DD": "1"}, {"INFONCE_MASK_FAKE_NEGATIVE": "True"}
OWN = {"INFONCE_USE_BATCH": "False"}
CASES = {
    "plain": {},
    "temperature": {"INFONCE_TEMPERATURE": "0.4"},
    "qq": QQ,
    "dd": DD,
    "masked": MASK,
    "margin": MASK | {"INFONCE_FAKE_NEG_MARGIN": "-0.05"},
    "Qwen3-Embedding": MASK | QQ | DD,
    "own negatives": OWN,
    "first negative": {"INFONCE_HARD_NEGATIVES": "1"},
    "no negative": {"INFONCE_HARD_NEGATIVES": "0"},
    "first negative, own": OWN | {"INFONCE_HARD_NEGATIVES": "1"},
}
# The negatives of the queries of each rank.
NEGATIVES = {1: [(2, 1, 3)], 2: [(1, 2, 2), (3,)], 3: [(2, 1), (), (1, 4)], 4: [(1,), (2,), (1, 1), (3,)]}
WITHOUT = {2: [(0, 2), (0,)], 3: [(0,), (), (0, 0)]}  # some queries have none


def sentences(negatives):
    """Return a rank's or all ranks' sentences, with their labels, by the numbers of negatives of its queries."""
    labels = [float(k == 0) for count in negatives for k in range(1 + count)]
    return len(labels) + len(negatives), torch.tensor(labels)


def batch(counts):
    """Return all sentences, normalized; some positives are hardly similar, so that margins have work to do."""
    rows, labels = sentences(list(itertools.chain(*counts)))
    generator = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), dim=1), labels


def dense(features, negatives, variables, *, threshold_of_dd=False, draws=None):
    """The definition of the loss in one process: each query's logits one after the other."""
    get = {"INFONCE_TEMPERATURE": "0.1", "INFONCE_FAKE_NEG_MARGIN": "0.1"} | variables
    mask, keep = "INFONCE_MASK_FAKE_NEGATIVE" in get, get.get("INFONCE_HARD_NEGATIVES")
    queries, documents, first, at = [], [], [], 0
    for k, count in enumerate(negatives):
        queries.append(features[at])
        first.append(len(documents))
        group = list(features[at + 1 : at + 2 + count])
        if keep is not None:
            group = group[: 1 + int(keep)] + [group[1 + j] for j in (draws or {}).get(k, [])]
        documents += group
        at += 2 + count
    losses = []
    ends = [*first[1:], len(documents)]
    for k, query in enumerate(queries):
        s = torch.stack([query @ y for y in documents])
        positive = s[first[k]]
        largest = positive.detach() + float(get["INFONCE_FAKE_NEG_MARGIN"]) if mask else INF

        def below(x, largest=largest):
            return torch.where(x > largest, -INF, x)

        if "INFONCE_USE_BATCH" in get:
            logits = s[first[k] : ends[k]]
        else:
            others = torch.arange(len(documents)) != first[k]
            logits = torch.cat([positive[None], below(s[others])])
            if "INFONCE_INCLUDE_QQ" in get:
                qq = torch.stack([query @ y for j, y in enumerate(queries) if j != k] or [query.sum() * 0 - INF])
                logits = torch.cat([logits, below(qq)])
            if "INFONCE_INCLUDE_DD" in get:
                own = documents[first[k]]
                dd = torch.stack([own @ y for j, y in enumerate(documents) if j != first[k]])
                logits = torch.cat([logits, below(dd) if threshold_of_dd else dd])
        logits = logits / float(get["INFONCE_TEMPERATURE"])
        losses.append(logits.logsumexp(0) - logits[0])
    return torch.stack(losses).mean()


def truth(counts, variables, **options):
    features, _ = batch(counts)
    features.requires_grad_()
    loss = dense(features, list(itertools.chain(*counts)), variables, **options)
    loss.backward()
    return loss.detach(), features.grad


class Variables:
    """Environment variables for the duration of a block."""

    def __init__(self, values):
        self._patch, self._values = pytest.MonkeyPatch(), values

    def __enter__(self):
        for name, value in self._values.items():
            self._patch.setenv(name, value)

    def __exit__(self, *_):
        self._patch.undo()


def part_of_rank(counts, rank):
    features, _ = batch(counts)
    sizes = [sentences(of_rank)[0] for of_rank in counts]
    rows, labels = sentences(counts[rank])
    start = sum(sizes[:rank])
    return features[start : start + rows].clone().requires_grad_(), labels


def of_rank(counts, variables, trainer=None, args=None):
    x, labels = part_of_rank(counts, dist.get_rank() if dist.is_initialized() else 0)
    with Variables(variables):
        loss = ms_swift.InfonceLoss(args, trainer)({"last_hidden_state": x}, labels, num_items_in_batch=7)
    loss.backward()
    return loss.detach(), x.grad


def agrees(found, loss, gradient, world):
    assert all(torch.allclose(value, loss, rtol=0, atol=1e-12) for value, _ in found)
    return torch.allclose(torch.cat([x for _, x in found]) / world, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", NEGATIVES)
def test_the_loss_and_its_gradient_are_those_of_one_process(world):
    """Rows hold W times their gradient, for DDP's average; ranks hold different numbers of queries and negatives."""
    counts = NEGATIVES[world]
    found = run_ranks(of_all_cases, world, counts, list(CASES.values()))
    for name, of_case in zip(CASES, zip(*found, strict=True), strict=True):
        assert agrees(of_case, *truth(counts, CASES[name]), world), name


@pytest.mark.parametrize("world", WITHOUT)
def test_queries_without_negatives(world):
    counts, cases = WITHOUT[world], [{}, MASK | QQ | DD, OWN]
    for variables, of_case in zip(cases, zip(*run_ranks(of_all_cases, world, counts, cases), strict=True), strict=True):
        assert agrees(of_case, *truth(counts, variables), world)


def of_all_cases(counts, cases):
    return [of_rank(counts, variables) for variables in cases]


def test_the_margin_leaves_documents_among_themselves_alone():
    """The tests above tell apart a loss that has the margin there as well."""
    counts = NEGATIVES[2]
    right, _ = truth(counts, CASES["Qwen3-Embedding"])
    wrong, _ = truth(counts, CASES["Qwen3-Embedding"], threshold_of_dd=True)
    without, _ = truth(counts, QQ | DD)
    assert abs(right - wrong) > 0.01
    assert abs(right - without) > 0.01


def test_missing_negatives_are_drawn_once_for_all_processes():
    """Three of two negatives are wanted: each query repeats one, and all processes differentiate the same loss."""
    counts, variables = [(2,), (2,)], {"INFONCE_HARD_NEGATIVES": "3"}
    found = run_ranks(of_rank, 2, counts, variables)
    possible = [truth(counts, variables, draws={0: [a], 1: [b]}) for a in (0, 1) for b in (0, 1)]
    values = torch.stack([loss for loss, _ in possible])
    assert values.unique().numel() == 4
    close = [k for k, (loss, _) in enumerate(possible) if abs(loss - found[0][0]) < 1e-12]
    assert len(close) == 1
    assert agrees(found, *possible[close[0]], 2)


# Engines other than DDP.


class BaseMegatronTrainer:
    """Stands for ms-swift's class of this name, which tells its losses that Megatron trains."""


def with_megatron(counts, per_token):
    core = ModuleType("megatron.core")
    core.mpu = SimpleNamespace(get_data_parallel_group=lambda: pair)
    sys.modules |= {"megatron": ModuleType("megatron"), "megatron.core": core}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    x, labels = part_of_rank(counts, dist.get_rank() % 2)
    args = SimpleNamespace(calculate_per_token_loss=per_token)
    loss = ms_swift.InfonceLoss(args, BaseMegatronTrainer())({"last_hidden_state": x}, labels)
    loss.backward()
    return loss.detach(), x.grad


@pytest.mark.parametrize("per_token", [False, True])
def test_under_megatron_the_data_parallel_processes_share_the_batch(per_token):
    """With `calculate_per_token_loss` Megatron adds gradients up, instead of taking their mean."""
    counts = NEGATIVES[2]
    found = run_ranks(with_megatron, 4, counts, per_token)
    for pair in (found[:2], found[2:]):
        assert agrees(pair, *truth(counts, {}), 1 if per_token else 2)


def with_sequence_parallel(counts):
    module = ModuleType("swift.sequence_parallel")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # ranks 0 and 1 have parts of the same sequences
    module.sequence_parallel = SimpleNamespace(dp_group=groups[dist.get_rank() % 2])
    sys.modules["swift.sequence_parallel"] = module
    x, labels = part_of_rank(counts, dist.get_rank() // 2)
    loss = ms_swift.InfonceLoss(None, None)({"last_hidden_state": x}, labels)
    loss.backward()
    return loss.detach(), x.grad


def test_under_sequence_parallelism_its_data_parallel_group_shares_the_batch():
    counts = NEGATIVES[2]
    found = run_ranks(with_sequence_parallel, 4, counts)
    for pair in (found[::2], found[1::2]):
        assert agrees(pair, *truth(counts, {}), 2)


# Mistakes.


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"INFONCE_TEMPERATURE": "0"}, "INFONCE_TEMPERATURE must be positive, got 0.0"),
        ({"INFONCE_TEMPERATURE": "warm"}, "INFONCE_TEMPERATURE must be a finite number, got 'warm'"),
        ({"INFONCE_FAKE_NEG_MARGIN": "nan"}, "INFONCE_FAKE_NEG_MARGIN must be a finite number, got 'nan'"),
        ({"INFONCE_USE_BATCH": "maybe"}, "INFONCE_USE_BATCH must be True or False, got 'maybe'"),
        ({"INFONCE_HARD_NEGATIVES": "-1"}, "INFONCE_HARD_NEGATIVES must be a whole number, 0 or more, got '-1'"),
    ],
)
def test_a_variable_without_a_valid_value(variables, message):
    with pytest.raises(ValueError, match=message):
        of_rank([(1, 1)], variables)


@pytest.mark.parametrize(
    ("shape", "labels"), [((5, 4), [1, 0, 1]), ((4, 4), [0, 1, 0]), ((3, 2, 4), [1, 0]), ((3, 4), [0, 0])]
)
def test_labels_that_do_not_fit(shape, labels):
    if shape == (5, 4):
        ms_swift.InfonceLoss(None, None)({"last_hidden_state": torch.randn(shape)}, torch.tensor(labels))
        labels = [1, 0, 0]
    with pytest.raises(ValueError, match=r"must hold queries, each with a positive \(1\) and any number"):
        ms_swift.InfonceLoss(None, None)({"last_hidden_state": torch.randn(shape)}, torch.tensor(labels))


def with_a_mistake_on_rank_1(mistake):
    rank = dist.get_rank()
    x, labels = part_of_rank([(2, 1), (2, 1)], rank)
    wrong = {}
    if rank == 1:
        labels = labels[1:] if mistake == "labels" else labels
        wrong = {"value": {"INFONCE_TEMPERATURE": "hot"}, "another": {"INFONCE_TEMPERATURE": "0.3"}}.get(mistake, {})
        wrong |= OWN if mistake == "another loss" else {}
        wrong |= {"INFONCE_TEMPERATURE": "0.3"} if mistake == "another, own" else {}
    outputs = {} if (rank, mistake) == (1, "no embeddings") else {"last_hidden_state": x}
    with Variables(wrong | (OWN if mistake == "another, own" else {})):
        ms_swift.InfonceLoss(None, None)(outputs, labels)


@pytest.mark.parametrize("mistake", ["labels", "value", "another", "another, own", "another loss", "no embeddings"])
def test_a_mistake_of_one_rank_raises_on_all(mistake):
    with pytest.raises(RankError, match="2 of 2 ranks failed") as error:
        run_ranks(with_a_mistake_on_rank_1, 2, mistake)
    if mistake.startswith("another"):
        assert "INFONCE_TEMPERATURE" in str(error.value) or "INFONCE_USE_BATCH" in str(error.value)


def test_a_query_without_negatives_where_some_are_wanted():
    with pytest.raises(ValueError, match="requires at least one negative for each query, query 1 has none"):
        of_rank([(1, 0)], {"INFONCE_HARD_NEGATIVES": "2"})


# The plugin.


def stand_in(monkeypatch, **losses):
    monkeypatch.setitem(sys.modules, "swift", SimpleNamespace(__name__="swift", __version__="4.6.0"))
    module = ModuleType("swift.loss")
    module.loss_map = dict(losses)
    monkeypatch.setitem(sys.modules, "swift.loss", module)
    return module.loss_map


def load_plugin():
    """Import the file by its path, under a name of its own, as ms-swift does."""
    spec = spec_from_file_location("_swift_external_0", ms_swift.plugin_path())
    spec.loader.exec_module(module_from_spec(spec))


def test_the_plugin_replaces_infonce(monkeypatch):
    losses = stand_in(monkeypatch, infonce="theirs", contrastive="another")
    load_plugin()
    load_plugin()
    assert losses == {"infonce": ms_swift.InfonceLoss, "contrastive": "another"}
    ms_swift.disable()
    ms_swift.disable()
    assert losses == {"infonce": "theirs", "contrastive": "another"}


def test_the_folder_of_the_plugin_hides_no_module():
    """ms-swift puts it at the front of sys.path."""
    names = {path.stem for path in Path(ms_swift.plugin_path()).parent.glob("*.py")}
    assert names == {"__init__", "wholebatch_infonce"}


def test_the_command_prints_the_path():
    command = [sys.executable, "-m", "wholebatch.integrations.ms_swift"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == ms_swift.plugin_path() + "\n"
    asked = subprocess.run([*command, "-h"], capture_output=True, text=True, timeout=100, check=True)
    assert "--external_plugins" in asked.stdout
    wrong = subprocess.run([*command, "sft"], capture_output=True, text=True, timeout=100, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no arguments are accepted, got 'sft'; pass them to swift sft" in wrong.stderr


def test_a_missing_old_or_changed_ms_swift_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "swift", None)
    with pytest.raises(
        FrameworkError, match=r"swift cannot be imported .* tested with swift 4.6.0: pip install 'ms-swift"
    ):
        ms_swift.enable()
    stand_in(monkeypatch)
    with pytest.raises(FrameworkError, match=r"swift.loss.loss_map has no 'infonce', which this adapter replaces"):
        ms_swift.enable()
    monkeypatch.setitem(sys.modules, "swift", SimpleNamespace(__name__="swift", __version__="3.9.1"))
    with pytest.raises(FrameworkError, match=r"swift 3\.9\.1 is too old; this adapter was tested with 4\.6\.0"):
        ms_swift.enable()

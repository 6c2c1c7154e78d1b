"""pytorch-metric-learning's own trainer on two processes: 20 steps give the weights of one process.

    make ecosystem

One process trains with their loss and their miner on the whole batch, in float64, which is the truth. The distance
between two runs is relative to the distance that training has moved the weights.
"""

import inspect
from functools import partial

import pytest
import torch

pytest.importorskip("pytorch_metric_learning")
from dual import distance
from metric_runs import CASES, on_two, run_cases
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from pytorch_metric_learning.utils import distributed as their_wrappers

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.integrations import pytorch_metric_learning as ours
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # their library warns

ROUNDING = 1e-11  # of the distance moved: 20 steps in float64, summed in another order
THEIRS = {
    name: case
    for name, case in CASES.items()
    if name not in ("SupConLoss, MeanReducer", "ContrastiveLoss, regularizer")
}
EFFICIENT = {name: case for name, case in THEIRS.items() if not case.memory}
# Their wrapper with `efficient=False` is exact for the network; proxies get W times their gradient.
EXACT_IN_THEIRS = [name for name, case in THEIRS.items() if "num_classes" not in case.settings]


@pytest.fixture(scope="module")
def true():
    """The truth: their loss in one process."""
    return run_cases("theirs", CASES, 1)


@pytest.fixture(scope="module")
def found():
    """All runs on two processes, by the kind of loss."""
    return on_two({"ours": CASES, "theirs": THEIRS, "wrapped": THEIRS, "efficient": EFFICIENT})


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(found, true, name):
    for of_rank in found:
        run, expected = of_rank["ours"][name], true[name]
        assert not isinstance(run, str), run
        assert (expected.weights - expected.start).norm() > 0.01 * expected.start.norm(), "nothing was trained"
        assert distance(run, expected) < (1e-9 if name == "CircleLoss" else ROUNDING)  # see TOLERANCE
        assert run.losses == pytest.approx(expected.losses, rel=1e-9)
        assert torch.equal(run.weights, found[0]["ours"][name].weights)


@pytest.mark.parametrize("name", THEIRS)
def test_their_loss_of_each_process_alone_ends_elsewhere(found, true, name):
    assert distance(found[0]["theirs"][name], true[name]) > 0.05


@pytest.mark.parametrize("name", THEIRS)
def test_their_wrapper_is_exact_for_the_network_and_not_for_proxies(found, true, name):
    """The network's gradient is right, the loss is W times too large, and so is the gradient of proxies."""
    run, expected = found[0]["wrapped"][name], true[name]
    if name in EXACT_IN_THEIRS:
        assert distance(run, expected) < ROUNDING
        assert run.losses == pytest.approx([2 * value for value in expected.losses], rel=1e-9)
    else:
        assert distance(run, expected) > 0.1


@pytest.mark.parametrize("name", EFFICIENT)
def test_their_efficient_wrapper_ends_elsewhere_or_refuses(found, true, name):
    run = found[0]["efficient"][name]
    if name in EXACT_IN_THEIRS:
        assert distance(run, true[name]) > 0.1
    else:
        assert "ref_emb is not supported" in run


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("SupConLoss alone", False),
        ("DistributedLossWrapper(SupConLoss, efficient=True)", False),
        ("DistributedLossWrapper(SupConLoss, efficient=False)", True),
        ("SupConLoss of wholebatch.integrations", True),
        ("NTXentLoss of wholebatch.integrations", True),
        ("DistributedLossWrapper(TripletMarginLoss) of wholebatch.integrations", True),
        ("SelfSupervisedLoss(NTXentLoss) of wholebatch.integrations", True),
    ],
)
def test_the_audit_finds_the_gradients_exact(name, exact):
    report = wb.audit(presets.settings("pml")[name], ranks=(1, 2))
    assert report.exact is exact, report


# One call: value and gradient, with uneven rows.

COUNTS = (7, 5)
LABELS = {
    "two of each": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    "two, and single ones": [0, 0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 7],
    "several of each": [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3],
    "several, and single ones": [0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 5, 6],
    "one class": [2] * 12,
    "all apart": [*range(20, 32)],
}
FLAT = ("NTXentLoss", "SupConLoss", "MultiSimilarityLoss", "CircleLoss")
SIZES = {"num_classes": 8, "embedding_size": 6}
WITHOUT_SETTINGS = """
    AngularLoss CircleLoss ContrastiveLoss FastAPLoss GeneralizedLiftedStructureLoss IntraPairVarianceLoss
    LiftedStructureLoss MultiSimilarityLoss NCALoss NPairsLoss NTXentLoss PNPLoss SignalToNoiseRatioContrastiveLoss
    SupConLoss TripletMarginLoss TupletMarginLoss
"""
WITH_CENTERS = """
    ArcFaceLoss CosFaceLoss LargeMarginSoftmaxLoss NormalizedSoftmaxLoss ProxyAnchorLoss ProxyNCALoss SoftTripleLoss
    SphereFaceLoss SubCenterArcFaceLoss
"""
ALL = {  # each of their losses that takes labels, with its required arguments
    **{name: {} for name in WITHOUT_SETTINGS.split()},
    **dict.fromkeys(WITH_CENTERS.split(), SIZES),
    "HistogramLoss": {"n_bins": 10},
    "RankedListLoss": {"margin": 0.4, "Tn": 10},
    "MarginLoss": {"learn_beta": True, "num_classes": 8},
}


def rows(count=12, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(name):
    torch.manual_seed(3)
    return getattr(losses, name)(**ALL[name]).double()


def gradients(loss_fn, *inputs, **more):
    """Return the value, and the gradients of the inputs and of the parameters of the loss."""
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    more = {name: x.clone().requires_grad_() if torch.is_floating_point(x) else x for name, x in more.items()}
    loss = loss_fn(*given, **more)
    if loss.requires_grad:
        loss.backward()
    leaves = [x for x in (*given, *more.values()) if x.is_floating_point()]
    return loss.detach(), [x.grad for x in leaves], [p.grad for p in loss_fn.parameters()]


def assert_one(found, true, tolerance):
    """Compare what two processes hold with the values of one; rows have W times their gradient, for the averaging."""
    value, inputs, parameters = true
    for loss, _, of_loss in found:
        assert loss.item() == pytest.approx(value.item(), rel=tolerance, abs=1e-14)
        for grad, expected in zip(of_loss, parameters, strict=True):
            assert (grad - expected).norm() <= tolerance * expected.norm()
    for position, expected in enumerate(inputs):
        ours_ = torch.cat([of_rank[position] for _, of_rank, _ in found]) / len(found)
        assert (ours_ - expected).norm() <= tolerance * expected.norm() + 1e-14


def part(x, of=COUNTS):
    return x.split(of)[torch.distributed.get_rank()]


def wrapped_on_a_rank():
    labels = torch.tensor(LABELS["several of each"])
    found = {name: gradients(ours.DistributedLossWrapper(made(name)), part(rows()), part(labels)) for name in ALL}
    vicreg = ours.DistributedLossWrapper(losses.VICRegLoss())
    found["VICRegLoss"] = gradients(vicreg, part(rows()), ref_emb=part(rows(seed=1)))
    several = losses.MultipleLosses([losses.ContrastiveLoss(), losses.TripletMarginLoss()], weights=[1, 0.5])
    found["MultipleLosses"] = gradients(ours.DistributedLossWrapper(several), part(rows()), part(labels))
    return found


@pytest.fixture(scope="module")
def wrapped():
    return run_ranks(wrapped_on_a_rank, 2, timeout_s=200)


@pytest.mark.parametrize("name", ALL)
def test_any_loss_of_theirs_is_that_of_one_process(wrapped, name):
    true = gradients(made(name), rows(), torch.tensor(LABELS["several of each"]))
    assert_one([of_rank[name] for of_rank in wrapped], true, 1e-10)


def test_losses_of_other_forms_are_those_of_one_process(wrapped):
    true = gradients(losses.VICRegLoss(), rows(), ref_emb=rows(seed=1))
    assert_one([of_rank["VICRegLoss"] for of_rank in wrapped], true, 1e-12)
    several = losses.MultipleLosses([losses.ContrastiveLoss(), losses.TripletMarginLoss()], weights=[1, 0.5])
    true = gradients(several, rows(), torch.tensor(LABELS["several of each"]))
    assert_one([of_rank["MultipleLosses"] for of_rank in wrapped], true, 1e-12)


OPTIONS = {
    "defaults": {},
    "their objects, the defaults": {"distance": distances.CosineSimilarity},
    "another distance": {"distance": partial(distances.LpDistance, p=2, power=2)},
    "another reducer": {"reducer": partial(reducers.ThresholdReducer, low=0.5)},
    "their default reducer with a bound": {"reducer": partial(reducers.AvgNonZeroReducer, high=8.0)},
    "regularizer": {"embedding_regularizer": regularizers.LpRegularizer},
}


def cases_of(name):
    """Yield labels and options: all labels with the defaults, all options with several of each label."""
    for label in LABELS:
        yield label, "defaults"
    for option in OPTIONS:
        if not (name == "CircleLoss" and option == "another distance"):  # theirs refuses it
            yield "several of each", option


def built(module, name, option):
    return getattr(module, name)(**{key: make() for key, make in OPTIONS[option].items()})


def flat_on_a_rank():
    found = {}
    for name in FLAT:
        for labels, option in cases_of(name):
            loss = built(ours, name, option)
            found[name, labels, option] = gradients(loss, part(rows()), part(torch.tensor(LABELS[labels])))
        labels, ref = torch.tensor(LABELS["several of each"]), {"ref_emb": part(rows(9, 1), (4, 5))}
        ref["ref_labels"] = part(labels[:9].clone(), (4, 5))
        found[name, "ref_emb"] = gradients(getattr(ours, name)(), part(rows()), part(labels), **ref)
        mine, ref = part(labels), {"ref_emb": part(rows(seed=1))}
        ref["ref_labels"] = mine
        found[name, "ref_emb, one object"] = gradients(getattr(ours, name)(), part(rows()), mine, **ref)
        miner = ours.DistributedMinerWrapper(miners.MultiSimilarityMiner())
        mined = miner(part(rows()), part(labels))
        found[name, "mined"] = gradients(partial_of(getattr(ours, name)(), mined), part(rows()), part(labels))
        for symmetric in (True, False):
            loss = ours.SelfSupervisedLoss(getattr(ours, name)(), symmetric)
            found[name, "views", symmetric] = gradients(loss, part(rows()), part(rows(seed=1)))
    loss = ours.SelfSupervisedLoss(losses.TripletMarginLoss())
    found["TripletMarginLoss", "views", True] = gradients(loss, part(rows()), part(rows(seed=1)))
    return found


def partial_of(loss, mined):
    """Return the loss with mined tuples."""

    class Mined(torch.nn.Module):
        def forward(self, embeddings, labels):
            return loss(embeddings, labels, mined)

    return Mined()


@pytest.fixture(scope="module")
def flat():
    return run_ranks(flat_on_a_rank, 2, timeout_s=200)


# Their softplus is linear above 20, which changes a loss by up to 2e-9.
TOLERANCE = {"CircleLoss": 1e-8}


@pytest.mark.parametrize("name", FLAT)
def test_losses_in_tiles_are_theirs_of_one_process(flat, name):
    labels, tolerance = torch.tensor(LABELS["several of each"]), TOLERANCE.get(name, 1e-12)
    for label, option in cases_of(name):
        true = gradients(built(losses, name, option), rows(), torch.tensor(LABELS[label]))
        one = gradients(built(ours, name, option), rows(), torch.tensor(LABELS[label]))
        assert_one([one], true, tolerance)
        assert_one([of_rank[name, label, option] for of_rank in flat], true, tolerance)
    theirs = getattr(losses, name)()
    true = gradients(theirs, rows(), labels, ref_emb=rows(9, 1), ref_labels=labels[:9].clone())
    assert_one([of_rank[name, "ref_emb"] for of_rank in flat], true, tolerance)
    true = gradients(theirs, rows(), labels, ref_emb=rows(seed=1), ref_labels=labels)
    assert_one([of_rank[name, "ref_emb, one object"] for of_rank in flat], true, tolerance)
    other = gradients(theirs, rows(), labels, ref_emb=rows(seed=1), ref_labels=labels.clone())
    assert abs(other[0] - true[0]) > 1e-3, "to them labels of another object are labels of other rows"
    true = gradients(partial_of(theirs, miners.MultiSimilarityMiner()(rows(), labels)), rows(), labels)
    assert_one([of_rank[name, "mined"] for of_rank in flat], true, tolerance)


@pytest.mark.parametrize("name", [*FLAT, "TripletMarginLoss"])
def test_views_of_all_processes_have_numbers_of_their_own(flat, name):
    for symmetric in (True, False):
        if (name, "views", symmetric) not in flat[0]:
            continue
        true = gradients(losses.SelfSupervisedLoss(getattr(losses, name)(), symmetric), rows(), rows(seed=1))
        assert_one([of_rank[name, "views", symmetric] for of_rank in flat], true, TOLERANCE.get(name, 1e-12))


# Signatures and mistakes.


@pytest.mark.parametrize("name", FLAT)
def test_constructors_take_their_arguments_in_their_order(name):
    theirs = [p for p in inspect.signature(getattr(losses, name)).parameters.values() if p.kind != p.VAR_KEYWORD]
    found = list(inspect.signature(getattr(ours, name)).parameters.values())
    assert [p.name for p in found if p.kind == p.POSITIONAL_OR_KEYWORD] == [p.name for p in theirs]
    assert [p.default for p in found[: len(theirs)]] == [p.default for p in theirs]
    inherited = {"distance", "reducer", "embedding_regularizer", "embedding_reg_weight", "collect_stats"}
    assert inherited <= {p.name for p in found}


def test_calls_take_their_arguments_in_their_order():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(ours.SupConLoss.forward) == names(losses.SupConLoss.forward)
    for name in ("DistributedLossWrapper", "DistributedMinerWrapper"):
        theirs, found = getattr(their_wrappers, name), getattr(ours, name)
        assert names(found.forward) == names(theirs.forward)
        assert names(found)[: len(names(theirs))] == names(theirs)
    assert names(ours.SelfSupervisedLoss.forward) == names(losses.SelfSupervisedLoss.forward)


def test_losses_and_miners_that_are_none_are_refused():
    with pytest.raises(TypeError, match="use SelfSupervisedLoss of wholebatch"):
        ours.DistributedLossWrapper(losses.SelfSupervisedLoss(losses.TripletMarginLoss()))
    with pytest.raises(TypeError, match="got DistributedLossWrapper; leave the wrapper out"):
        ours.DistributedLossWrapper(their_wrappers.DistributedLossWrapper(losses.TripletMarginLoss()))
    with pytest.raises(TypeError, match=r"got Linear; for another loss use wholebatch\.WholeBatch"):
        ours.DistributedLossWrapper(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="miner must be a miner of pytorch-metric-learning, got Linear"):
        ours.DistributedMinerWrapper(torch.nn.Linear(1, 1))
    with pytest.raises(Exception, match="SelfSupervisedLoss not supported for ProxyAnchorLoss"):
        ours.SelfSupervisedLoss(made("ProxyAnchorLoss"))


def mistakes_on_a_rank():
    rank = torch.distributed.get_rank()
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    x = rows(6).requires_grad_()
    alone = miners.BatchHardMiner()(x, labels)
    triplets = losses.TripletMarginLoss()
    attempts = {
        "local indices": lambda: ours.DistributedLossWrapper(triplets)(x, labels, alone),
        "local indices in tiles": lambda: ours.SupConLoss()(x, labels, alone),
        "indices on one rank": lambda: ours.DistributedLossWrapper(triplets)(x, labels, alone if rank else None),
        "no labels": lambda: ours.SupConLoss()(x),
        "no labels on one rank": lambda: ours.NTXentLoss()(x, labels if rank else None),
        "too few labels": lambda: ours.DistributedMinerWrapper(miners.BatchHardMiner())(x, labels[: 6 - rank]),
        "random triplets": lambda: ours.DistributedLossWrapper(losses.TripletMarginLoss(triplets_per_anchor=1))(
            rows(6, rank) if torch.manual_seed(rank) else x, labels
        ),
        "views of different lengths": lambda: ours.SelfSupervisedLoss(ours.NTXentLoss())(x, x[: 6 - rank]),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "no error"
        except Exception as error:  # the test asserts on it
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_mistakes_are_errors_on_all_ranks():
    found = run_ranks(mistakes_on_a_rank, 2, timeout_s=100)
    expected = {
        "local indices": "indices_tuple must come from DistributedMinerWrapper",
        "local indices in tiles": "indices_tuple must come from DistributedMinerWrapper",
        "indices on one rank": "indices_tuple must come from DistributedMinerWrapper",
        "no labels": "labels must be given, one integer for each row",
        "no labels on one rank": "labels must be given, one integer for each row",
        "too few labels": "Number of embeddings must equal number of labels",
        "random triplets": "loss_fn must give the same value on all ranks",
        "views of different lengths": "ref_emb must have a row for each of the 6 rows of embeddings, got 5",
    }
    for of_rank in found:
        for name, text in expected.items():
            assert "Error" in of_rank[name], (name, of_rank[name])
            assert text in of_rank[name]


def counted_locally_on_a_rank():
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = losses.SelfSupervisedLoss(ours.NTXentLoss())  # theirs around ours
        for _ in range(2):
            loss(rows(5), rows(5, 1))
        ours.SelfSupervisedLoss(ours.NTXentLoss())(rows(5), rows(5, 1))
    return [str(one.message) for one in caught if "as if each process counted" in str(one.message)]


def test_labels_that_each_process_counts_from_zero_are_warned_of_once():
    first, second = run_ranks(counted_locally_on_a_rank, 2, timeout_s=60)
    assert first == []
    assert len(second) == 1
    assert "use SelfSupervisedLoss of wholebatch.integrations.pytorch_metric_learning" in second[0]


def random_miner_on_a_rank():
    torch.manual_seed(torch.distributed.get_rank())
    labels = torch.tensor(LABELS["several of each"])
    miner = ours.DistributedMinerWrapper(miners.DistanceWeightedMiner())
    return [x.tolist() for x in miner(part(rows()), part(labels))]


def test_a_random_miner_gives_all_processes_the_same_tuples():
    first, second = run_ranks(random_miner_on_a_rank, 2, timeout_s=60)
    assert first == second
    assert len(first[0])

"""Every mistake raises ValueError with the accepted and the given value, on every rank; nothing hangs."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb
from wholebatch.losses.catalog import CATALOG
from wholebatch.testing import run_ranks


def features(rows=3, d=4, **options):
    return torch.randn(rows, d, **options)


class NotComparable:
    """Like an array, whose comparison with a word is no truth value."""

    __hash__ = None

    def __eq__(self, other):
        raise ValueError("the truth value of an array with more than one element is ambiguous")


def nested():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])


# The arguments of rank 1 instead of (features, features, 10.0), and the message that every rank must then raise.
MISTAKES = {
    "rows differ": (lambda: (features(3), features(2), 10.0), r"same shape, got \(3, 4\) and \(2, 4\)"),
    "width differs": (lambda: (features(d=4), features(d=5), 10.0), r"same shape, got \(3, 4\) and \(3, 5\)"),
    "width differs across ranks": (
        lambda: (features(d=5), features(d=5), 10.0),
        "embedding size must be the same.*4.*5",
    ),
    "dtype differs": (
        lambda: (features(), features().double(), 10.0),
        "same dtype, got torch.float32 and torch.float64",
    ),
    "dtype differs across ranks": (
        lambda: (features().double(), features().double(), 10.0),
        "dtype must be the same on all ranks, got rank 0: torch.float32; rank 1: torch.float64",
    ),
    "device differs": (
        lambda: (features(), features(device="meta"), 10.0),
        "text_features must be a dense tensor with data, .* device meta",
    ),
    "float8": (
        lambda: (features().to(torch.float8_e4m3fn), features().to(torch.float8_e4m3fn), 10.0),
        "must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "sparse": (lambda: (features().to_sparse(), features().to_sparse(), 10.0), "dense tensor with data, got layout"),
    "scale without data": (lambda: (features(), features(), torch.ones((), device="meta")), "meta"),
    "not a matrix": (lambda: (features()[0], features(), 10.0), r"image_features must have shape .* got \(4,\)"),
    "no features": (lambda: (features(d=0), features(d=0), 10.0), r"embedding size >= 1, got \(3, 0\)"),
    "integers": (lambda: (torch.ones(3, 4).long(), features(), 10.0), "must be float64, .* got torch.int64"),
    "no tensor": (lambda: ([[1.0]], features(), 10.0), r"must be a tensor .* got \[\[1.0\]\] \(list\)"),
    "NaN": (lambda: (features() / 0 * 0, features(), 10.0), "image_features must be finite, .* nan"),
    "infinite": (lambda: (features(), features().fill_(float("inf")), 10.0), "text_features must be finite.*inf"),
    "scale vector": (lambda: (features(), features(), torch.ones(2)), r"logit_scale must be .* got shape \(2,\)"),
    "scale matrix": (lambda: (features(), features(), torch.ones(1, 1)), r"logit_scale must be .* got shape \(1, 1\)"),
    "scale integer": (lambda: (features(), features(), torch.tensor(3)), "floating-point tensor.*torch.int64"),
    "scale NaN": (lambda: (features(), features(), float("nan")), "logit_scale must be finite, got nan"),
    "scale None": (lambda: (features(), features(), None), "logit_scale must be a number .* got None"),
    "scale differs across ranks": (
        lambda: (features(), features(), 11.0),
        r"logit_scale must be the same.*\[10.0, 11.0",
    ),
}


def mistake_body(name):
    make, message = MISTAKES[name]
    wrong_here = dist.get_rank() == 1 or dist.get_world_size() == 1
    arguments = make() if wrong_here else (features(), features(), 10.0)
    with pytest.raises(ValueError, match=message) as caught:
        wb.functional.clip_loss(*arguments)
    assert str(caught.value).startswith("clip_loss: ")
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_ends_all_ranks(name):
    messages = run_ranks(mistake_body, 3, name, timeout_s=30)
    assert len(set(messages)) == 1
    if "across ranks" not in name:
        assert "rank 1: " in messages[0]
        run_ranks(mistake_body, 1, name)


def option_mistakes_body():
    x = features()
    for options, message in (
        ({"sync": "average"}, "sync must be 'mean' .* got 'average'"),
        ({"exchange": "teleport"}, "exchange must be one of 'auto', 'gather', 'ring'; got 'teleport'"),
        ({"memory": "none"}, "memory must be one of 'auto', 'flat', or a number of bytes, an int; got 'none'"),
        ({"memory": 1.5}, "memory must be one of"),
        ({"memory": True}, "memory must be one of"),
        ({"memory": 0}, "a positive number of bytes, got 0"),
        ({"memory": -(2**30)}, "a positive number of bytes"),
        ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ({"logit_bias": torch.ones(3)}, "logit_bias must be a number"),
        ({"group": "world"}, "group must be .* got str"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.functional.clip_loss(x, x, 1.0, **options)
        if "logit_bias" not in options and "group" not in options:
            with pytest.raises(ValueError, match=message):
                wb.CLIPLoss(**options)
    with pytest.raises(ValueError, match="global batch is empty"):
        wb.functional.clip_loss(features(0), features(0), 1.0)
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        with pytest.raises(
            ValueError, match=r"label_smoothing must be the same on all ranks, got rank 0: 0.0; rank 1: 0.1"
        ):
            wb.functional.clip_loss(x, x, 1.0, label_smoothing=0.1 * rank)
        with (
            torch.set_grad_enabled(rank == 0),
            pytest.raises(ValueError, match=r"is_grad_enabled\(\) must be the same"),
        ):
            wb.functional.clip_loss(x, x, 1.0)
    assert wb.functional.clip_loss(x, x, 1.0).isfinite(), "the group still works after every mistake"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_option_is_refused_by_function_and_module(world_size):
    run_ranks(option_mistakes_body, world_size, timeout_s=30)


# Values of required arguments, and of arguments that some losses need here.
RIGHT = {
    **dict.fromkeys(("image_features", "text_features", "queries", "keys", "z0", "z1", "features"), features),
    **dict.fromkeys(("teacher_image_features", "teacher_text_features"), lambda: features(3, 2)),
    **dict.fromkeys(("image_log_averages", "text_log_averages"), lambda: torch.zeros(3)),
    **dict.fromkeys(("logit_scale", "teacher_logit_scale"), lambda: 10.0),
    "logit_bias": lambda: -1.0,
    "labels": lambda: torch.tensor([0, 0, 1]),
    "queue": lambda: features(5),
    "dims": lambda: (2, 4),
    "negatives": lambda: features(2),
    "epsilon": lambda: 0.5,
}
MORE = {"info_nce_loss": ["negatives"], "w_mse_loss": ["epsilon"]}


def right_call(name):
    """Return a function that calls a loss with right arguments but for those that it is given."""
    function = getattr(wb.functional, name)
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty] + MORE.get(name, [])

    def call(**wrong):
        loss = function(**{name: RIGHT[name]() for name in names} | wrong)
        return loss[0] if isinstance(loss, tuple) else loss

    return call


# A valid call of each loss, and replaced keywords of rank 1, for every argument that is not tested above.
CALLS = {name: right_call(name) for name in wb.functional.__all__ if name not in ("max_sim_loss", "partial_fc_loss")}
LABELED = [name for name in CALLS if "labels" in inspect.signature(getattr(wb.functional, name)).parameters]
MOMENTS = [entry.function.__name__ for entry in CATALOG.values() if entry.moments]
SWEEPS = [name for name in CALLS if "reduction" in inspect.signature(getattr(wb.functional, name)).parameters]
EXCHANGES = [name for name in SWEEPS if name != "moco_loss"]
NEW_MISTAKES = [
    (
        "info_nce_loss",
        {"negatives": features(2, 5)},
        "queries and negatives must have the same embedding size, got 4 and 5",
    ),
    ("info_nce_loss", {"negatives": features(2).double()}, "queries and negatives must have the same dtype"),
    ("info_nce_loss", {"negatives": features(2)[0]}, r"negatives must have shape .* got \(4,\)"),
    ("info_nce_loss", {"negatives": features(2).fill_(float("nan"))}, "negatives must be finite"),
    (
        "info_nce_loss",
        {"negatives": None},
        r"arguments that are given .* passes shape \(0, d\), not None\) must be the same",
    ),
    ("info_nce_loss", {"keys": features(2)}, "keys must have at least as many rows as queries, got 2 and 3"),
    ("info_nce_loss", {"keys": None}, "keys must be a tensor .* got None"),
    ("info_nce_loss", {"logit_scale": torch.ones(2)}, "logit_scale must be a number"),
    ("nt_xent_loss", {"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ("nt_xent_loss", {"temperature": -1.0}, "temperature must be positive, got -1.0"),
    ("nt_xent_loss", {"temperature": torch.tensor(-0.1)}, "temperature must be positive"),
    ("nt_xent_loss", {"temperature": float("nan")}, "temperature must be finite"),
    ("nt_xent_loss", {"temperature": "cold"}, r"temperature must be a number .* got 'cold' \(str\)"),
    ("nt_xent_loss", {"temperature": 0.2}, r"temperature must be the same on all ranks, got \[0.1, 0.2"),
    ("nt_xent_loss", {"z1": features(2)}, r"z0 and z1 must have the same shape, got \(3, 4\) and \(2, 4\)"),
    ("siglip_loss", {"logit_bias": None}, "logit_bias must be a number .* got None"),
    ("siglip_loss", {"logit_bias": -2.0}, r"logit_bias must be the same on all ranks, got \[-1.0, -2.0"),
    ("siglip_loss", {"text_features": features(2)}, "must have the same shape"),
    *(
        (name, {"memory": 3}, "memory must be at least 8 bytes for the smallest tiles of rank 1, got 3")
        for name in SWEEPS
    ),
    *((name, {"memory": "lots"}, "memory must be one of 'auto', 'flat', or a number of bytes") for name in SWEEPS),
    *((name, {"exchange": "teleport"}, "exchange must be one of 'auto', 'gather', 'ring'") for name in EXCHANGES),
    *(
        (name, {"exchange": "gather"}, "exchange must be the same on all ranks, got rank 0: auto; rank 1: g")
        for name in EXCHANGES
    ),
    *((name, {"sync": None}, "sync must be the same on all ranks, got rank 0: mean; rank 1: None") for name in CALLS),
    *((name, {"reduction": "median"}, "reduction must be one of 'mean', 'sum', 'none'; got 'med") for name in SWEEPS),
    *((name, {"reduction": "sum"}, "reduction must be the same on all ranks, got rank 0: mean;") for name in SWEEPS),
    *(
        (name, {"weights": torch.ones(2)}, r"weights must have shape \(3,\), one for each row .* \(2,\)")
        for name in SWEEPS
    ),
    *((name, {"weights": -torch.ones(3)}, r"arguments that are given|weights must not be negative") for name in SWEEPS),
    *((name, {"weights": [1, 1, 1]}, r"weights must be a floating-point tensor, .*1, 1\] \(list\)") for name in SWEEPS),
    *((name, {"weights": torch.ones(3) / 0}, "weights must be finite, got inf") for name in SWEEPS),
    *(
        (name, {"labels": torch.zeros(2).long()}, r"labels must have shape \(3,\), one integer for each")
        for name in LABELED
    ),
    *(
        (name, {"labels": torch.zeros(3)}, "labels must be a tensor of integers, .* got torch.float32")
        for name in LABELED
    ),
    *((name, {"labels": None}, "labels must be a tensor of integers, .* got None") for name in LABELED),
    (
        "sup_con_loss",
        {"labels": torch.eye(3)},
        r"labels must be a tensor of integers.*; for one-hot rows pass the argmax",
    ),
    ("sup_con_loss", {"labels": ["a", "b", "c"]}, "got .*; give each text a number first"),
    ("sup_con_loss", {"labels": [0, 1, 2]}, r"got .*; pass torch\.tensor\(labels\)"),
    ("sup_con_loss", {"labels": torch.zeros(3, 1).long()}, r"got \(3, 1\); pass it with \.squeeze\(1\)"),
    ("sup_con_loss", {"labels": torch.eye(3).long()}, r"got \(3, 3\); for one-hot rows pass the argmax"),
    *((name, {"labels": torch.zeros(3, 1).long()}, r"one integer for each row .* got \(3, 1\)") for name in LABELED),
    *((name, {"ids": torch.zeros(3)}, "ids must be a tensor of integers") for name in ("clip_loss", "nt_xent_loss")),
    *((name, {"weights": torch.ones(3, device="meta")}, "weights must be a dense tensor with data") for name in SWEEPS),
    *(
        (name, {"labels": torch.zeros(3, device="meta").long()}, "labels must be a dense tensor with data")
        for name in LABELED
    ),
    *((name, {"labels": nested().long()}, "labels must be a dense tensor .* got a nested tensor") for name in LABELED),
    ("sup_con_loss", {"weights": nested()}, "weights must be .*nested"),
    ("sup_con_loss", {"features": features(6).view(3, 2, 4).to_sparse()}, "features must have shape|dense tensor"),
    ("info_nce_loss", {"hard_negatives": features().view(3, 1, 4).to_sparse()}, "hard_negatives must (have|be)"),
    ("clip_loss", {"equal_ids": "ignored"}, "equal_ids must be one of 'positive', 'excluded'; got 'ignored'"),
    ("siglip_loss", {"equal_ids": "ignored"}, "equal_ids must be one of 'positive', 'excluded'; got 'ignored'"),
    ("clip_loss", {"ids": torch.zeros(3).long()}, "arguments that are given"),
    ("info_nce_loss", {"directions": ("query_to_query",)}, "must have 'query_to_key' or 'key_to_query' among them"),
    (
        "info_nce_loss",
        {"directions": ("key_to_query",), "hardness": 1.0},
        "hardness requires 'query_to_key' in directions, got",
    ),
    ("info_nce_loss", {"hardness": -1.0}, "hardness must not be negative, got -1.0"),
    ("info_nce_loss", {"hard_negative_hardness": -1.0}, "hard_negative_hardness must not be negative, got -1.0"),
    ("info_nce_loss", {"directions": ("query_to_key",) * 2}, "directions must be different"),
    ("info_nce_loss", {"directions": ("query_to_key", "sideways")}, "directions must be one of 'query_to_key', .*way"),
    ("info_nce_loss", {"partition": "both"}, "partition must be one of 'joint', 'per_direction'; got 'both'"),
    ("info_nce_loss", {"margin": torch.ones(())}, "margin must be a number, got a tensor; it is not learned"),
    ("info_nce_loss", {"margin": 0.1}, "settings must be the same on all ranks"),
    ("info_nce_loss", {"exclude_relative": True}, "exclude_relative requires exclude_above, got None"),
    ("info_nce_loss", {"exclude_directions": ("query_to_key",)}, "exclude_directions requires exclude_above, got None"),
    (
        "info_nce_loss",
        {"exclude_above": 0.1, "exclude_directions": ("key_to_key",)},
        r"exclude_directions must be different directions of \('query_to_key',\), .* got \('key_to_key',\)",
    ),
    ("info_nce_loss", {"exclude_above": 0.1, "exclude_directions": ()}, "exclude_directions must be .* got \\(\\)"),
    (
        "info_nce_loss",
        {"exclude_above": 0.1, "exclude_directions": ("sideways",)},
        "exclude_directions must be one of 'query_to_key', .*sideways",
    ),
    (
        "info_nce_loss",
        {"negative_ids": torch.zeros(2).long()},
        "negative_ids requires negatives, and query_ids or key_ids",
    ),
    (
        "info_nce_loss",
        {"hard_negative_ids": torch.zeros(3, 1).long()},
        "hard_negative_ids requires hard_negatives, and query_ids or key_ids",
    ),
    ("info_nce_loss", {"directions": NotComparable()}, "directions must be one of 'query_to_key', .*NotComparable"),
    ("info_nce_loss", {"directions": "key_to_key"}, "must have 'query_to_key' or 'key_to_query' among them"),
    (
        "info_nce_loss",
        {"hard_negatives": features().view(3, 1, 4), "query_ids": torch.zeros(3).long()}
        | {"hard_negative_ids": torch.zeros(3, 2).long()},
        r"hard_negative_ids must have shape \(3, 1\), one for each of hard_negatives, got \(3, 2\)",
    ),
    ("info_nce_loss", {"hard_negatives": features().view(3, 1, 4), "exclude_above": 0.1}, "arguments that are given"),
    (
        "sup_con_loss",
        {"features": features(6).view(3, 2, 4), "labels": torch.zeros(6).long()},
        r"labels must have shape \(3,\) for features of shape \(3, 2, 4\), \(examples, views, .*\); got \(6,\)",
    ),
    ("info_nce_loss", {"query_guides": features()}, "query_guides, key_guides and exclude_above go together"),
    (
        "info_nce_loss",
        {"hard_negatives": features()},
        r"hard_negatives must have shape \(3, per query, embedding size\)",
    ),
    (
        "info_nce_loss",
        {"query_ids": torch.zeros(3).long(), "equal_ids": "positive", "margin": 0.1},
        "equal_ids='positive' does not go with margin",
    ),
    (
        "info_nce_loss",
        {"query_guides": features(), "key_guides": features(), "exclude_above": 0.1},
        r"key_guides must have 5 rows \(keys, and negatives below them\), got 3",
    ),
    ("debiased_loss", {"tau_plus": 1.0}, r"tau_plus must lie in \[0, 1\), got 1.0"),
    ("debiased_loss", {"beta": -1.0}, "beta must not be negative, got -1.0"),
    ("dcl_loss", {"sigma": 0.0}, "sigma must be positive, got 0.0"),
    ("multi_similarity_loss", {"alpha": 0.0}, "alpha must be positive"),
    ("circle_loss", {"gamma": -1.0}, "gamma must be positive"),
    ("triplet_loss", {"margin": 0.5}, "settings must be the same on all ranks, got rank 0: .*'margin': 0.2"),
    ("triplet_loss", {"normalize": "no"}, "normalize must be True or False, got 'no'"),
    ("triplet_loss", {"smooth": torch.ones(3)}, "smooth must be True or False, got Tensor"),
    ("vicreg_loss", {"invariance": -1.0}, "invariance must not be negative, got -1.0"),
    ("barlow_twins_loss", {"redundancy": -1.0}, "redundancy must not be negative, got -1.0"),
    ("matryoshka_loss", {"symmetric": 1}, "symmetric must be True or False, got 1"),
    ("clip_loss", {"kernel": "triton"}, "kernel must be the same on all ranks"),
    ("clip_loss", {"label_smoothing": True}, r"label_smoothing must be a number, got True \(bool\)"),
    ("clip_loss", {"logit_scale": 10**400}, "logit_scale must be finite, got inf"),
    ("clip_loss", {"sync": torch.ones(3)}, "sync must be 'mean' .* got Tensor"),
    ("clip_loss", {"exchange": ["gather"]}, "exchange must be one of .* got .'gather'."),
    ("clip_loss", {"image_features": nested()}, "image_features must be a dense tensor .* got a nested tensor"),
    ("info_nce_loss", {"exclude_above": 0.1, "exclude_relative": "no"}, "exclude_relative must be True or False"),
    ("triplet_loss", {"distance": "far"}, "distance must be one of 'euclidean', 'squared', 'cosine'; got 'far'"),
    ("smooth_ap_loss", {"temperature": 0.0}, "temperature must be positive"),
    ("barlow_twins_loss", {"epsilon": 0.0}, "epsilon must be positive"),
    ("w_mse_loss", {"epsilon": 2.0}, r"epsilon must lie in \[0, 1\]"),
    (
        "moco_loss",
        {"queue": features(6)},
        "length of the queue must be the same on all ranks, got rank 0: 5; rank 1: 6",
    ),
    ("moco_loss", {"queue": features(5, 3)}, "queries and queue must have the same embedding size"),
    ("matryoshka_loss", {"dims": (2, 5)}, "dims must not exceed the embedding size 4, got 5"),
    ("matryoshka_loss", {"dims": (4, 2)}, r"dims must be positive, increasing, .* got \[4, 2\]"),
    ("matryoshka_loss", {"dims": (2, 2)}, r"dims must be positive, increasing, and each of them once; got \[2, 2\]"),
    ("matryoshka_loss", {"dims": (0, 2)}, "dims must be positive"),
    ("matryoshka_loss", {"dims": (2.0, 4.0)}, "dims must be a sequence of integers"),
    ("matryoshka_loss", {"dims": ()}, "dims must be a sequence of integers"),
    ("matryoshka_loss", {"dim_weights": (1.0,)}, r"dim_weights must be as many numbers as dims, 2, got \(1.0,\)"),
    ("matryoshka_loss", {"dim_weights": 1.0}, "dim_weights must be as many numbers as dims, 2, got 1.0"),
    ("matryoshka_loss", {"dim_weights": (1.0, -1.0)}, "dim_weights must not be negative, got -1.0"),
    ("matryoshka_loss", {"dim_weights": (0.0, 0.0)}, "dim_weights must not all be 0"),
    ("distillation_loss", {"teacher_text_features": features(3, 3)}, "same embedding size, got 2 and 3"),
    (
        "distillation_loss",
        {"teacher_image_features": features(2, 2)},
        "must have as many rows as image_features, 3, got 2",
    ),
    ("global_contrastive_loss", {"gamma": 0.0}, r"gamma must lie in \(0, 1\], got 0.0"),
    ("global_contrastive_loss", {"epsilon": 0.0}, "epsilon must be positive"),
    ("global_contrastive_loss", {"image_log_averages": torch.zeros(2)}, r"image_log_averages must be .* got \(2,\)"),
    ("global_contrastive_loss", {"text_log_averages": torch.zeros(3) / 0}, "text_log_averages must be finite"),
]


def new_mistakes_body():
    rank = dist.get_rank()
    for name, wrong, message in NEW_MISTAKES:
        with pytest.raises(ValueError, match=message) as caught:
            CALLS[name](**(wrong if rank == 1 else {}))
        assert str(caught.value).startswith(f"{name}: ")
        assert CALLS[name]().isfinite(), "the group still works after every mistake"


def test_a_wrong_argument_of_any_loss_raises_on_all_ranks():
    run_ranks(new_mistakes_body, 2, timeout_s=60)


def empty_body():
    """A batch that is empty on all ranks raises; a loss without negatives does not."""
    none = features(0)
    empty = "the global batch is empty"
    with pytest.raises(ValueError, match=empty):
        CALLS["info_nce_loss"](queries=none, keys=none)
    with pytest.raises(ValueError, match=empty):
        CALLS["nt_xent_loss"](z0=none, z1=none)
    with pytest.raises(ValueError, match=empty):
        CALLS["siglip_loss"](image_features=none, text_features=none)
    assert CALLS["info_nce_loss"](negatives=none).isfinite()
    for name in EXCHANGES:
        assert CALLS[name](exchange="ring").isfinite(), f"{name}: a ring of {dist.get_world_size()}"
    for name in SWEEPS:
        with pytest.raises(ValueError, match=f"{name}: weights must not be 0 for every example of every rank"):
            CALLS[name](weights=torch.zeros(3))
    for name in MOMENTS:
        with pytest.raises(ValueError, match="a variance needs at least two rows"):
            CALLS[name](**dict.fromkeys(("z0", "z1"), features(1 if dist.get_rank() == 0 else 0)))
    with pytest.raises(ValueError, match=r"rows have no invertible covariance of 4 features: it takes more rows"):
        CALLS["w_mse_loss"](z0=features(2), z1=features(2), epsilon=0.0)
    with pytest.raises(ValueError, match=r"the covariance of z0 over .* rows has no inverse"):
        CALLS["w_mse_loss"](z0=torch.ones(6, 4), z1=features(6), epsilon=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_batches_raise_and_rings_of_any_size_work(world_size):
    run_ranks(empty_body, world_size, timeout_s=30)


@pytest.mark.parametrize("name", ["CLIPLoss", "InfoNCELoss", "NTXentLoss", "SigLIPLoss"])
def test_modules_check_their_options_when_they_are_made(name):
    for options, message in (
        ({"sync": "average"}, "sync must be"),
        ({"exchange": "teleport"}, "exchange must be one of"),
        ({"memory": -1}, "positive number of bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(wb, name)(**options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NTXentLoss", {"temperature": 0}, "temperature must be positive"),
        ("SupConLoss", {"temperature": -1.0}, "temperature must be positive"),
        ("CLIPLoss", {"reduction": "median"}, "reduction must be one of"),
        ("CLIPLoss", {"equal_ids": "ignored"}, "equal_ids must be one of"),
        ("InfoNCELoss", {"directions": ("sideways",)}, "directions must be one of"),
        ("DCLLoss", {"sigma": 0.0}, "sigma must be positive"),
        ("DebiasedLoss", {"tau_plus": 1.5}, "tau_plus must lie in"),
        ("MatryoshkaLoss", {"dims": (3, 2)}, "dims must be positive, increasing"),
        ("TripletLoss", {"distance": "far"}, "distance must be one of"),
        ("MultiSimilarityLoss", {"alpha": 0.0}, "alpha must be positive"),
        ("CircleLoss", {"gamma": 0.0}, "gamma must be positive"),
        ("BarlowTwinsLoss", {"epsilon": 0.0}, "epsilon must be positive"),
        ("WMSELoss", {"epsilon": 2.0}, "epsilon must lie in"),
        ("GlobalContrastiveLoss", {"examples": 0}, "examples must be a positive integer"),
        ("GlobalContrastiveLoss", {"examples": True}, "examples must be a positive integer"),
        ("GlobalContrastiveLoss", {"examples": 3, "dtype": torch.int64}, "dtype must be torch.float64, float32"),
        ("GlobalContrastiveLoss", {"examples": 3, "dtype": "float32"}, "dtype must be .* got 'float32'"),
        ("GlobalContrastiveLoss", {"examples": 10**15}, "examples ask for a tensor .* this machine has"),
        (
            "KeyQueue",
            {"size": 10**9, "embedding_size": 10**9},
            "size and embedding_size ask for a tensor .* this machine has",
        ),
        ("KeyQueue", {"size": 4, "embedding_size": 4, "dtype": torch.bool}, "dtype must be .* got torch.bool"),
        ("KeyQueue", {"size": 4, "embedding_size": 4, "group": "world"}, "group must be .* got str"),
        ("CLIPLoss", {"group": "world"}, "group must be .* got str"),
        ("CLIPLoss", {"label_smoothing": True}, r"label_smoothing must be a number, got True \(bool\)"),
        ("TripletLoss", {"normalize": "no"}, "normalize must be True or False, got 'no'"),
        ("TripletLoss", {"smooth": 1}, "smooth must be True or False, got 1"),
        ("TripletLoss", {"margin": -0.1}, "margin must not be negative, got -0.1"),
        ("MatryoshkaLoss", {"dims": (2, 3), "symmetric": "no"}, "symmetric must be True or False"),
        ("MatryoshkaLoss", {"dims": (2, 3), "normalize": None}, "normalize must be True or False, got None"),
        ("InfoNCELoss", {"exclude_above": 0.1, "exclude_relative": "no"}, "exclude_relative must be True or False"),
        ("VICRegLoss", {"variance": -1.0}, "variance must not be negative, got -1.0"),
        ("VICRegLoss", {"covariance": float("nan")}, "covariance must be finite, got nan"),
        ("BarlowTwinsLoss", {"redundancy": -1.0}, "redundancy must not be negative, got -1.0"),
        ("MultiSimilarityLoss", {"alpha": 10**400}, "alpha must be finite, got 1000"),
        ("MatryoshkaLoss", {"dims": 3}, "dims must be a sequence of integers"),
        ("MatryoshkaLoss", {"dims": (2, 3), "dim_weights": 1.0}, "dim_weights must be as many numbers as dims"),
        ("GlobalContrastiveLoss", {"examples": 5, "gamma": 0.0}, "gamma must lie in"),
        ("KeyQueue", {"size": 0, "embedding_size": 4}, "size must be a positive integer"),
    ],
)
def test_settings_are_checked_when_a_module_is_made(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(wb, name)(**options)


def whole_batch_mistakes_body():
    x, rank = features(), dist.get_rank()
    bad = features().fill_diagonal_(float("nan")) if rank else features()
    mean_square = wb.WholeBatch(lambda a: a.square().mean())
    cases = [
        (wb.WholeBatch(lambda a: a.square()), (x,), r"must return a tensor of one element, got shape \(6, 4\)"),
        (wb.WholeBatch(lambda a: 1.0), (x,), "must return a tensor of one element, got float"),
        (mean_square, (bad,), "rank 1: representation 0 must be finite"),
        (mean_square, (features(d=4 + rank),), r"trailing shapes must be the same.*rank 1: \[\[5\]\]"),
        (mean_square, (features().double() if rank else features(),), "dtypes must be the same"),
        (mean_square, (features(0),), "global batch is empty"),
        (mean_square, (), "at least one tensor with rows"),
        (wb.WholeBatch(lambda a: a.mean() + dist.get_rank()), (features(),), "the same value on all ranks, got"),
        (
            wb.WholeBatch(lambda a: torch.dropout(a, 0.5, train=True).mean()),
            (features(),),
            "the same value on all ranks",
        ),
    ]
    for loss, arguments, message in cases:
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=message):
            loss(*arguments)
    for options, message in (
        ({"strategy": "hope"}, "strategy must be one of 'gather', 'replicate', 'root'; got 'hope'"),
        ({"sync": "average"}, "sync must be 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            wb.WholeBatch(torch.mean, **options)


def test_loss_fn_must_be_callable():
    with pytest.raises(ValueError, match="loss_fn must be callable, got None"):
        wb.WholeBatch(None)


def test_a_launcher_without_a_process_group_is_an_error(monkeypatch):
    """Each process would take its local rows for the whole batch: silently another loss."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        wb.functional.clip_loss(features(), features(), 1.0)
    x = features()
    assert wb.functional.clip_loss(x, x, 1.0, group=wb.comm.LocalCommunicator()).isfinite()


def test_whole_batch():
    run_ranks(whole_batch_mistakes_body, 2, timeout_s=30)


def different_calls_body():
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"the same calls .* rank 0: clip_loss; rank 1: all_gather"):
            wb.functional.clip_loss(features(), features(), 1.0)
    else:
        with pytest.raises(ValueError, match=r"the same calls .* rank 0: clip_loss; rank 1: all_gather"):
            wb.comm.TorchCommunicator().all_gather(features())


def test_ranks_that_make_different_calls_raise():
    run_ranks(different_calls_body, 2, timeout_s=30)


def wrong_group_on_one_rank_body():
    """The rank with the wrong group cannot reach the others; they wait for it, as documented."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member"):
            wb.functional.clip_loss(features(), features(), 1.0, group=groups[0])
    else:
        assert wb.functional.clip_loss(features(), features(), 1.0, group=groups[0]).isfinite()


def test_a_wrong_group_on_one_rank_raises_there():
    run_ranks(wrong_group_on_one_rank_body, 2, timeout_s=30)


def test_errors_for_unknown_names_suggest_a_fix():
    x = features()
    with pytest.raises(TypeError, match=r"unknown: 'logit_sclae'; did you mean logit_scale\?"):
        wb.functional.clip_loss(x, x, logit_sclae=10.0)
    with pytest.raises(TypeError, match="pass logit_scale=1 / temperature, in the constructor or in the call"):
        wb.CLIPLoss(temperature=0.07)
    with pytest.raises(TypeError, match="pass ids in the call"):
        wb.CLIPLoss(ids=torch.arange(3))
    with pytest.raises(TypeError, match="did you mean label_smoothing"):
        wb.CLIPLoss(lable_smoothing=0.1)
    with pytest.raises(ValueError, match=r"got 'rign'; did you mean ring\?"):
        wb.CLIPLoss(exchange="rign")
    with pytest.raises(
        TypeError, match=r"too many positional arguments; pass the others by keyword, as in logit_scale="
    ):
        wb.functional.info_nce_loss(x, x, 20.0)
    with pytest.raises(TypeError, match=r"too many .*; pass the others by keyword, as in negatives="):
        wb.InfoNCELoss()(x, x, 20.0, logit_scale=20.0)
    with pytest.raises(TypeError, match=r"write where=wb\.terms\.other, without"):
        wb.terms.other()


def test_the_first_row_that_is_not_finite_is_named():
    x, y = features(), features()
    x[2, 1], x[1, 0] = float("nan"), float("-inf")
    with pytest.raises(ValueError, match=r"image_features must be finite, .* first in row 1; check"):
        wb.functional.clip_loss(x, y, 10.0)
    x[1, 0] = 0.0
    with pytest.raises(ValueError, match="largest absolute entry is nan, first in row 2; check"):
        wb.functional.clip_loss(x, y, 10.0)


def unknown_keywords_body(folder):
    """Unknown keywords raise on every rank for functions that are collective over a head's group or a given group."""
    wrong = {"nonsense": 1} if dist.get_rank() == 1 else {}
    head = wb.PartialFC(4, 6, bias=True)
    weight = torch.nn.Parameter(torch.ones(2))
    wb.heads.save_head(folder, head)
    errors = []
    for call, name in (
        (lambda: head(features(), torch.tensor([0, 1, 2]), **wrong), "PartialFC.forward"),
        (lambda: head.top_classes(features(), **wrong), "top_classes"),
        (lambda: head.full_weight(**wrong), "full_weight"),
        (lambda: head.full_bias(**wrong), "full_bias"),
        (lambda: wb.heads.clip_grad_norm_([weight], [], 1.0, **wrong), "clip_grad_norm_"),
        (lambda: wb.heads.agree_on_overflow(torch.amp.GradScaler("cpu"), **wrong), "agree_on_overflow"),
        (lambda: wb.heads.save_head(folder / "new", head, **wrong), "save_head"),
        (lambda: wb.heads.load_head(folder, head, **wrong), "load_head"),
        (lambda: wb.KeyQueue(9, 4).enqueue(features(), **wrong), "enqueue"),
        (lambda: wb.CLIPLoss()(features(), features(), 1.0, **wrong), "CLIPLoss.forward"),
        (lambda: wb.comm.TorchCommunicator().all_gather(features(), **wrong), "all_gather"),
    ):
        with pytest.raises(
            TypeError, match=rf"{name}: (rank 1: )?got an unexpected keyword argument 'nonsense'"
        ) as caught:
            call()
        errors.append(str(caught.value))
        assert wb.functional.clip_loss(features(), features(), 1.0).isfinite(), "the group still works"
    return errors


def test_unknown_keywords_raise_on_all_ranks(tmp_path):
    """The message is the same on all of them."""
    of_ranks = run_ranks(unknown_keywords_body, 2, tmp_path, timeout_s=60)
    assert of_ranks[0] == of_ranks[1]


HEADS_OF_TWO_SETTINGS = {
    "seed": 1,
    "bias": True,
    "num_classes": 7,
    "embedding_size": 5,
    "sub_centers": 2,
    "margin": wb.CosFace(8.0, 0.1),
    "normalize": "centers",
}


def heads_of_two_settings_body():
    """If one rank has another head, its centers are not gathered."""
    for name, value in HEADS_OF_TWO_SETTINGS.items():
        settings = {"embedding_size": 4, "num_classes": 6} | ({name: value} if dist.get_rank() == 1 else {})
        head = wb.PartialFC(**settings)
        local = torch.ones(2, head.embedding_size)
        for call in (head.full_weight, head.full_bias, lambda head=head, local=local: head.top_classes(local)):
            with pytest.raises(ValueError, match=rf"{name} must be the same on all ranks, got rank 0: .*; rank 1: "):
                call()
        assert wb.functional.clip_loss(features(), features(), 1.0).isfinite(), "the group still works"
    head = wb.PartialFC(4, 6)
    with pytest.raises(ValueError, match=r"rank 0: PartialFC\.full_weight.*; rank 1: PartialFC\.full_bias"):
        (head.full_bias if dist.get_rank() == 1 else head.full_weight)()


def test_heads_with_different_settings_raise_on_all_ranks():
    run_ranks(heads_of_two_settings_body, 2, timeout_s=60)

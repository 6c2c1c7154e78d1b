"""The values of the pool that each argument may take, reviewed one by one; and further errors that are documented.

Keys are `parameter`, or `entry.parameter` if the argument of that name has another meaning in this entry. A value that
is not listed is not legal: a call that accepts it is reported.
"""

from __future__ import annotations

from typing import Any

from inputs_calls import UserFunctionError
from inputs_pool import POOL

import wholebatch as wb

# Documented errors that are neither a ValueError nor a TypeError.
DOCUMENTED: dict[str, Any] = {
    "GradCache.__call__": UserFunctionError,  # from a user's model or loss
    "GradCache.cache_step": UserFunctionError,
    "encode": (UserFunctionError, RuntimeError),  # also from get_rep_fn
    "run_ranks": wb.testing.RankError,  # from the function that ranks run
}
# An error of a user's function inside a handshake is reported by its rank, with the text of that error.
USERS_OWN = {(f"{of}Communicator.handshake", "state") for of in ("Local", "Torch")}

_INTEGERS = "one three enum"
_ANY_INTEGER = f"{_INTEGERS} zero minus_one int_10^12 int_2^63 int_-2^63 int_10^400 int_-10^400 int_10^5000"
_NOT_NEGATIVE_INTEGER = f"{_INTEGERS} zero int_10^12 int_2^63 int_10^400 int_10^5000"
_POSITIVE = f"{_INTEGERS} int_10^12 int_2^63 half two_and_a_half two_point_zero float_1e-320 np_float64"
_TEMPERATURE = _POSITIVE.replace(" float_1e-320", "")
_NOT_NEGATIVE = f"{_POSITIVE} zero"
_FINITE = f"{_NOT_NEGATIVE} minus_one minus_half int_-2^63"
_FRACTION = "zero one half float_1e-320 np_float64"
_SCALAR_TENSOR = "t_one t_scalar t_scalar_learned"
_PARAMETER = "linear " + " ".join(kind for kind in POOL if kind.startswith("t_"))  # checked at the call
_FUNCTION = "function class module_class linear"
_FLAG = "true false"
_STRING = "no number_string nul_string long_string empty_string word"
_FEATURES = "t_4x3 t_4x3_expanded t_4x3_inference t_4x3_learned t_4x3_zero"  # float32, of the right shape
_OTHER_FLOATS = "t_4x3_bfloat16 t_4x3_double t_4x3_half"
_IDS = "t_4_int t_4_int8 t_4_uint8 t_4_int_large t_4_int_negative"
_ANYTHING = " ".join(POOL)
_TENSORS = " ".join(kind for kind in POOL if kind.startswith("t_"))
_WITHOUT_DATA = {
    "t_4_sparse",
    "t_4_meta",
    "t_scalar_meta",
    "t_4x3_sparse",
    "t_4x3_csr",
    "t_4x3_meta",
    "t_4x3_quantized",
}
_DENSE = " ".join(k for k in _TENSORS.split() if k not in _WITHOUT_DATA | {"t_nested", "t_jagged"})
_WITH_ROWS = " ".join(kind for kind in _DENSE.split() if not kind.startswith("t_scalar"))
_NO_SUMS = {"t_4_bool", "t_4_uint16", "t_4x3_bool", "t_4x3_float8", "t_scalar_bool"}
_SUMMED = " ".join(kind for kind in _DENSE.split() if kind not in _NO_SUMS)
_SUMMED_ROWS = " ".join(kind for kind in _WITH_ROWS.split() if kind not in _NO_SUMS)

LEGAL: dict[str, str] = {
    # settings of losses
    **dict.fromkeys(("image_features", "text_features", "z0", "z1", "queries", "keys"), _FEATURES),
    "InfoNCELoss.forward.keys": f"{_FEATURES} t_5x3",  # further keys are negatives
    "info_nce_loss.keys": f"{_FEATURES} t_5x3",
    **{
        f"{entry}.{name}": "t_4x2x3"
        for entry in ("max_sim_loss", "MaxSimLoss.forward", "max_sim")
        for name in ("queries", "documents")
    },
    "document_ids": _IDS,
    "token_reduction": "word",  # the word is "sum"
    "documents_per_query": "one",
    "Ragged.lengths": "range",
    "Ragged.local.rank": "zero one enum",
    "Ragged.of.items": "slice",
    **{f"{entry}.query_ids": _IDS for entry in ("max_sim_loss", "MaxSimLoss.forward")},
    "max_sim.k": f"{_INTEGERS} int_10^12 int_2^63 int_10^400 int_10^5000",
    "KeyQueue.enqueue.keys": f"{_FEATURES} t_5x3 t_0x3",
    "features": f"{_FEATURES} {_OTHER_FLOATS} t_4x5 t_4x2x3",
    "negatives": f"{_FEATURES} t_0x3 t_5x3",
    "hard_negatives": "t_4x2x3",
    "queue": f"{_FEATURES} t_5x3 t_0x3",
    **dict.fromkeys(("teacher_image_features", "teacher_text_features"), "t_4x5"),
    **dict.fromkeys(("image_log_averages", "text_log_averages"), "t_4 t_4_negative t_4_zero"),
    **dict.fromkeys(("ids", "query_ids", "key_ids", "labels"), f"{_IDS} t_4_int_least"),
    **{
        f"{entry}.{ids}": _IDS for entry in ("InfoNCELoss.forward", "info_nce_loss") for ids in ("query_ids", "key_ids")
    },
    "indices": "t_4_int t_4_int8 t_4_uint8",
    "weights": "t_4",
    **dict.fromkeys(
        ("logit_scale", "logit_bias", "teacher_logit_scale"), f"{_FINITE} {_SCALAR_TENSOR} t_scalar_negative"
    ),
    "temperature": f"{_TEMPERATURE} {_SCALAR_TENSOR}",
    **{f"{entry}.temperature": _TEMPERATURE for entry in ("SmoothAPLoss", "smooth_ap_loss")},
    **dict.fromkeys(("alpha", "gamma", "epsilon", "s", "m1"), _POSITIVE),
    **dict.fromkeys(
        ("beta", "hardness", "hard_negative_hardness", "invariance", "variance", "covariance", "redundancy"),
        _NOT_NEGATIVE,
    ),
    **{
        f"{entry}.{name}": _POSITIVE for entry in ("MultiSimilarityLoss", "multi_similarity_loss") for name in ("beta",)
    },
    **{
        f"{entry}.{name}": _FINITE
        for entry in ("MultiSimilarityLoss", "multi_similarity_loss")
        for name in ("epsilon",)
    },
    **{f"{entry}.epsilon": _FRACTION for entry in ("WMSELoss", "w_mse_loss")},
    **{
        f"{entry}.gamma": "one half float_1e-320 np_float64"
        for entry in ("GlobalContrastiveLoss", "global_contrastive_loss")
    },
    "CurricularFace.alpha": _FRACTION,
    "t_alpha": _FRACTION,
    "uniformity": _NOT_NEGATIVE,
    **{f"{entry}.t": _POSITIVE for entry in ("AlignmentUniformityLoss", "alignment_uniformity_loss")},
    "unchecked": "empty_list empty_dict tensors",
    "sigma": _TEMPERATURE,
    "tau_plus": "zero half float_1e-320 np_float64",
    **dict.fromkeys(("base", "margin", "exclude_above"), _FINITE),
    **{f"{entry}.margin": _NOT_NEGATIVE for entry in ("TripletLoss", "triplet_loss")},
    **{f"{entry}.m": f"{_FRACTION} minus_one minus_half" for entry in ("CircleLoss", "circle_loss")},
    **dict.fromkeys(("m", "m2", "m3", "h", "weight", "eps", "lr", "momentum", "weight_decay"), _NOT_NEGATIVE),
    "label_smoothing": _FRACTION,
    "dims": "integers",
    "dim_weights": "floats integers",
    "sync": "none word",  # the word is "sum"
    "reduction": "word",
    "memory": f"{_INTEGERS} int_10^12 int_2^63 int_10^400 int_10^5000",  # any number of bytes
    "dtype": "torch_float32",
    "examples": _INTEGERS,
    "size": _INTEGERS,
    # declared losses
    "with_statistics.loss": _FUNCTION,
    "slope": "none",
    "bound": f"none {_FINITE}",
    "PairLoss.row_loss": _FUNCTION,
    **dict.fromkeys(("column_loss", "score", "where", "log_weight"), f"{_FUNCTION} none"),
    **dict.fromkeys(("symmetric", "compile_tiles"), _FLAG),
    **dict.fromkeys(("x_data", "y_data", "candidate_data"), "empty_dict"),
    "parameters": "empty_dict dict",
    "candidates": "t_4x2x3",
    "PairLoss.forward.x": f"{_FEATURES} {_OTHER_FLOATS} t_5x3 t_4x5",
    "PairLoss.reference.x": f"{_FEATURES} {_OTHER_FLOATS} t_5x3 t_4x5 t_0x3",
    **{f"PairLoss.{name}.y": f"none {_FEATURES} t_5x3 t_0x3" for name in ("forward", "reference")},
    "PairLoss.reference.weights": "t_4 t_4_zero",
    # recipes
    **dict.fromkeys(("tasks", "CrossBatchSupConLoss.forward.examples"), f"{_IDS} t_4_int_least"),
    "teacher_temperature": f"none {_TEMPERATURE}",
    "ListwiseDistillationLoss.temperature": _TEMPERATURE,
    **dict.fromkeys(("ListwiseDistillationLoss.forward.documents", "MarginMSELoss.forward.negatives"), "t_4x2x3"),
    "anchors": _FEATURES,
    "positives": _FEATURES,
    "KeyQueue.columns.features": f"{_FEATURES} {_OTHER_FLOATS} t_4x3_nan t_4x3_inf t_0x3 t_5x3",
    "SemiHardTripletLoss.margin": _NOT_NEGATIVE,
    "missing": _FLAG,
    "towers": "strings",
    "has": "empty_dict",
    "data": "empty_dict",
    "activations": f"{_FEATURES} {_OTHER_FLOATS} t_5x3 t_4x5",
    "SIGRegLoss.forward.features": f"{_FEATURES} {_OTHER_FLOATS} t_5x3",
    "directions": f"{_FEATURES} {_OTHER_FLOATS} t_5x3",
    "knots": _INTEGERS.replace("one ", ""),
    # heads
    "embeddings": f"{_FEATURES} {_OTHER_FLOATS}",
    "PartialFC.top_classes.embeddings": f"{_FEATURES} {_OTHER_FLOATS} t_0x3 t_5x3",
    **{f"{entry}.labels": "t_4_int t_4_int8 t_4_uint8" for entry in ("PartialFC.forward", "partial_fc_loss")},
    "centers": f"t_4x3 t_4x3_expanded t_4x3_learned {_OTHER_FLOATS} t_5x3 t_4x2x3",
    "embedding_size": _INTEGERS,
    "num_classes": _INTEGERS,
    "sub_centers": _INTEGERS,
    "k": _INTEGERS,
    "sample_rate": _FRACTION,
    **{f"{entry}.exclude_above": f"{_FRACTION} minus_one minus_half" for entry in ("PartialFC", "partial_fc_loss")},
    "ignore_index": f"{_INTEGERS} zero minus_one int_10^12 int_-2^63",
    "seed": f"{_INTEGERS} zero minus_one int_10^12 int_-2^63",
    "device": "cpu meta",
    "betas": "floats",
    "closure": "function class",
    "max_norm": f"{_NOT_NEGATIVE} float_1e308 inf int_10^400 int_10^5000",  # a limit that is never reached
    **dict.fromkeys(("replicated", "sharded"), f"{_TENSORS} empty_list tensors"),  # without a gradient, all of them
    "folder": "no number_string word path",
    "params": "tensors",
    **dict.fromkeys(("norms", "margins"), "integers floats"),
    # comm
    **dict.fromkeys(("check", "trace"), _FLAG),
    "root": "zero",
    "WholeBatch.root": f"{_INTEGERS} zero int_10^12",
    **dict.fromkeys(("dest", "source"), "zero"),
    "tag": f"{_INTEGERS} zero",
    "color": f"{_INTEGERS} none zero minus_one int_10^12 int_-2^63",
    "dim": "zero one minus_one",
    "op": "word",
    "like": _DENSE,
    "x": _DENSE,
    **{
        f"{of}Communicator.{name}.x": _SUMMED
        for of in ("Local", "Torch")
        for name in ("all_reduce", "iall_reduce", "reduce")
    },
    **{
        f"{of}Communicator.{name}.x": _SUMMED_ROWS
        for of in ("Local", "Torch")
        for name in ("reduce_scatter", "ireduce_scatter")
    },
    **{
        f"{of}Communicator.{name}.x": _WITH_ROWS
        for of in ("Local", "Torch")
        for name in ("all_gather", "iall_gather", "gather", "scatter", "all_to_all")
    },
    "gradient": "t_scalar t_scalar_inf t_scalar_nan t_scalar_learned t_scalar_negative",  # any tensor of the user
    "caller": _STRING,
    "must_match": "empty_list strings",  # facts that no rank has are equal
    **{
        f"{of}Communicator{name}": kinds
        for of in ("Local", "Torch")
        for name, kinds in ((".loss", "word"), (".backward.loss", "t_scalar_learned"))
    },
    "optimizers": "optimizer",
    "group": "none",
    # gradient caching
    "chunk_sizes": f"{_INTEGERS} int_10^12",
    "tokens": f"{_INTEGERS} int_10^12",
    "max_rows": f"{_INTEGERS} int_10^12",
    "mask": "no number_string nul_string long_string word",  # the name of a tensor
    "TokenBudget.chunks.mask": " ".join(
        k for k in _DENSE.split() if k.startswith("t_4x3") or k in ("t_0x3", "t_5x3", "t_4x5", "t_4x0")
    ),
    **dict.fromkeys(("uncut", "per_image", "per_video"), "empty_list strings"),
    **dict.fromkeys(("image_token_id", "video_token_id"), f"{_INTEGERS} zero minus_one int_10^12 int_-2^63"),
    "merge_size": f"{_INTEGERS} int_10^12",
    **dict.fromkeys(("images_per_row", "videos_per_row"), "no number_string nul_string long_string word"),
    "MultimodalSplit.__call__.model_input": f"{_WITH_ROWS} tensors",
    "MultimodalSplit.__call__.chunk_size": f"{_INTEGERS} int_10^12",
    "InputChunk.input": _ANYTHING,
    "InputChunk.rows": "empty_list integers range",
    "keep_graphs": f"{_NOT_NEGATIVE_INTEGER} half float_1e-320 np_float64",
    "axis": f"{_INTEGERS} zero minus_one",
    **dict.fromkeys(
        ("func", "awaits", "hold", "matches", "remember", "loss_fn", "split_input_fn", "get_rep_fn"), _FUNCTION
    ),
    **dict.fromkeys(("SyncControl.check", "hides", "is_off", "resume"), _FUNCTION),
    "encode.model": "linear",
    "model_input": f"{_FEATURES} t_4x3_nan t_4x3_inf t_0x3 t_5x3 t_4x2x3",  # any tensor of the user
    "encode.chunk_size": f"{_INTEGERS} int_10^12",
    "kwargs": _ANYTHING,  # passed to loss_fn unchanged
    "loss_kwargs": _ANYTHING,
    "representations": f"{_WITH_ROWS} {_SCALAR_TENSOR} t_scalar_negative",
    "model_inputs": f"{_FEATURES} t_4x3_nan t_4x3_inf t_0x3 t_5x3 t_4x2x3",  # any tensor of the user
    # partition
    "counts": "integers range",
    "rank": "zero",
    "modules": "no long_string word",  # imported, or refused, when ranks start
    "total": _NOT_NEGATIVE_INTEGER,
    "parts": _INTEGERS,
    **dict.fromkeys(("row", "col", "length"), _NOT_NEGATIVE_INTEGER),
    **dict.fromkeys(("rows", "cols"), "slice"),
    "side": f"{_INTEGERS} int_10^12",
    # audits and plans
    "Problem.batch": f"{_TENSORS} floats integers nans strings np_like tensors",  # anything with rows
    **dict.fromkeys(("Problem.engine", "Problem.reference"), _FUNCTION),
    "Problem.engine": f"{_FUNCTION} word",
    "Problem.sharded": "empty_list strings",
    "Problem.loss": _FUNCTION,
    "Problem.model": "linear",
    "batch_size": f"{_INTEGERS} int_10^12",
    "plan.embedding_size": f"{_INTEGERS} int_10^12",
    "plan.loss": _FUNCTION,
    "ranks": _INTEGERS,
    "classes": f"{_INTEGERS} int_10^12",
    "memory_limit": f"{_INTEGERS} int_10^12",
    **dict.fromkeys(("model_bytes", "gradient_bytes"), f"{_INTEGERS} zero int_10^12"),
    "encoder_bytes": f"{_INTEGERS} zero int_10^12 integers",
    **{f"audit.{name}": kinds for name, kinds in (("name", _STRING), ("tolerance", "half float_1e-320 np_float64"))},
    "audit.seed": f"{_INTEGERS} zero",
    **dict.fromkeys(("audit.timeout_s", "run_ranks.timeout_s"), _POSITIVE),
    "run_ranks.args": _ANYTHING,
    "run_ranks.fn": _FUNCTION,
    "run_ranks.world_size": "three enum",
    "calibrate.losses": "empty_list",
    **dict.fromkeys(("audit.ranks", "assert_exact.ranks"), "integers range"),
    "encoder_flops": f"{_NOT_NEGATIVE} float_1e308",
    "bandwidth": f"{_POSITIVE} float_1e308",
    "Scale.init": _POSITIVE,
    "Scale.max": f"{_POSITIVE} float_1e308 inf",
}


def is_legal(entry: Any, name: str, kind: str) -> bool:
    """Return whether the documentation of the argument allows the value."""
    parameter = entry.parameters[name]
    if (kind == "none" and parameter.default is None) or (
        kind in ("true", "false") and type(parameter.default) is bool
    ):
        return True
    return kind in LEGAL.get(f"{entry.name}.{name}", LEGAL.get(name, "")).split()

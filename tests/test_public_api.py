"""The public names of the package are those of this list, and each is documented."""

import inspect
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

import wholebatch as wb
from wholebatch import losses, pair_loss
from wholebatch.contract import Options
from wholebatch.heads import margins
from wholebatch.integrations import (
    flag_embedding,
    grad_cache,
    insightface,
    lightly,
    lightning,
    ms_swift,
    open_clip,
    pylate,
    pytorch_metric_learning,
    sentence_transformers,
    tevatron,
    transformers,
)

LOSSES = [name for name in losses.__all__ if name.endswith("_loss")] + ["partial_fc_loss"]
PUBLIC = {
    wb: [
        *[name for name in losses.__all__ if not name.endswith("_loss")],
        *margins.__all__,
        *pair_loss.__all__,
        "GradCache",
        "PartialFC",
        "Problem",
        "Scale",
        "SparseAdamW",
        "SparseSGD",
        "Tokens",
        "__version__",
        "audit",
        "comm",
        "functional",
        "gradcache",
        "heads",
        "options",
        "partition",
        "plan",
        "planning",
        "recipes",
        "reference",
        "terms",
        "testing",
    ],
    wb.terms: ["Count", "LogSumExp", "Max", "Mean", "Min", "Partner", "Sum", "equal", "other", "unequal"],
    wb.planning: ["DEVICES", "Option", "Plan", "Rates", "calibrate", "plan"],
    wb.functional: LOSSES,
    wb.options: ["KernelOptions", "LossOptions", "ProductOptions", "SweepOptions"],
    wb.gradcache: [
        "GradCache",
        "InputChunk",
        "MultimodalSplit",
        "SyncControl",
        "TokenBudget",
        "TokenChunk",
        "cached",
        "cat_input_tensor",
        "encode",
        "gather_input_tensor",
        "register_sync_control",
    ],
    wb.heads: [
        *margins.__all__,
        "Margin",
        "NegativeTransform",
        "ObservesAngles",
        "ObservesNorms",
        "PartialFC",
        "Regularizes",
        "SparseAdamW",
        "SparseSGD",
        "Targets",
        "TopClasses",
        "TransformsNegatives",
        "agree_on_overflow",
        "clip_grad_norm_",
        "load_head",
        "load_insightface",
        "partial_fc_loss",
        "save_head",
    ],
    grad_cache: [
        "ContrastiveLossWithQueryClosure",
        "DistributedContrastiveLoss",
        "GradCache",
        "PLGradCache",
        "RandContext",
        "SimpleContrastiveLoss",
        "cached",
        "cat_input_tensor",
        "gather_input_tensor",
        "install",
    ],
    flag_embedding: ["cross_device_loss", "disable", "enable", "main"],
    insightface: ["PartialFC_V2"],
    lightning: ["ddp_strategy", "fabric_ddp_strategy"],
    ms_swift: ["InfonceLoss", "disable", "enable", "plugin_path"],
    open_clip: ["ClipLoss", "CoCaLoss", "DistillClipLoss", "SigLipLoss", "create_loss", "create_task", "main"],
    lightly: ["BarlowTwinsLoss", "DCLLoss", "DCLWLoss", "NTXentLoss", "VICRegLoss"],
    pylate: ["CachedContrastive", "Contrastive"],
    pytorch_metric_learning: [
        "CircleLoss",
        "DistributedLossWrapper",
        "DistributedMinerWrapper",
        "MinedIndices",
        "MultiSimilarityLoss",
        "NTXentLoss",
        "SelfSupervisedLoss",
        "SupConLoss",
    ],
    sentence_transformers: [
        "CachedGISTEmbedLoss",
        "CachedMultiVectorMultipleNegativesRankingLoss",
        "CachedMultipleNegativesRankingLoss",
        "CachedMultipleNegativesSymmetricRankingLoss",
        "DistillKLDivLoss",
        "GISTEmbedLoss",
        "MarginMSELoss",
        "MatryoshkaLoss",
        "MultiVectorMultipleNegativesRankingLoss",
        "MultipleNegativesRankingLoss",
        "MultipleNegativesSymmetricRankingLoss",
        "WholeBatchLoss",
    ],
    tevatron: ["install"],
    transformers: ["ComputeLoss", "WholeBatchTrainerMixin", "features_of", "retrieval_metrics"],
    wb.partition: ["Diagonal", "Partition", "Ragged", "Tile", "tiles"],
    wb.recipes: [
        "CrossBatchSupConLoss",
        "FLOPSLoss",
        "ListwiseDistillationLoss",
        "MarginMSELoss",
        "SIGRegLoss",
        "SameTaskInfoNCELoss",
        "SemiHardTripletLoss",
        "SoftLabelCLIPLoss",
        "TowersLoss",
    ],
    wb.reference: LOSSES,
    wb.testing: ["RankError", "RankTimeoutError", "assert_exact", "preload", "run_ranks"],
    wb.comm: [
        "CommunicationError",
        "Communicator",
        "Group",
        "Handle",
        "LocalCommunicator",
        "MPICommunicator",
        "TorchCommunicator",
        "select_communicator",
    ],
}


JAX = [
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "Margin",
    "NormFace",
    "SphereFace",
    "reference",
    *("cache_grad", "cache_train_step", "chunk_encode", "chunked", "grad_cached"),
    *("tree_chunk", "tree_unchunk", "unchunk_args"),
    *(
        f"{loss}_loss{local}"
        for loss in ("clip", "info_nce", "nt_xent", "partial_fc", "siglip", "sup_con")
        for local in ("", "_local")
    ),
]
if find_spec("jax") is not None:
    PUBLIC[wb.jax] = JAX
    PUBLIC[wb.jax.reference] = [
        f"{loss}_loss" for loss in ("clip", "info_nce", "nt_xent", "partial_fc", "siglip", "sup_con")
    ]


def test_names_are_loaded_on_first_use():
    assert {*wb.__all__, "__name__"} <= set(dir(wb))
    assert {name for name in dir(wb) if not name.startswith("__")} <= {*wb.__all__, "jax"}, "modules loaded since"
    assert ("jax" in dir(wb)) == (find_spec("jax") is not None)
    assert not hasattr(wb, "functional.clip_loss")
    with pytest.raises(
        AttributeError, match=r"module 'wholebatch' has no attribute 'CLIPloss'; did you mean CLIPLoss\?"
    ):
        _ = wb.CLIPloss


def test_exported_names_are_those_of_the_list():
    for module, names in PUBLIC.items():
        assert sorted(module.__all__) == sorted(names)
        assert all(hasattr(module, name) for name in names)


def test_every_loss_is_listed_once_and_in_the_docs():
    docs = Path(__file__).parent.parent / "docs"
    pages = (docs / "losses.md").read_text() + (docs / "losses_cost.md").read_text()
    for name in losses.__all__:
        assert re.search(rf"\b{name}\b", pages), f"neither docs/losses.md nor docs/losses_cost.md mentions {name}"


def test_every_public_name_is_documented():
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(module, name)
            if inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, name
            if inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    if not function.__module__.startswith("wholebatch"):
                        continue  # inherited
                    assert method.startswith("_") or inspect.getdoc(function), f"{name}.{method}"


def test_functions_and_their_references_have_the_same_arguments():
    for name in wb.functional.__all__:
        ours = list(inspect.signature(getattr(wb.functional, name)).parameters)
        reference = list(inspect.signature(getattr(wb.reference, name)).parameters)
        assert [p for p in ours if p in reference] == reference


@pytest.mark.parametrize("name", [*LOSSES, "max_sim"])
def test_an_option_of_other_losses_is_refused(name):
    function = getattr(wb.functional, name, None) or getattr(wb, name)
    parameters = inspect.signature(function).parameters
    required = {p.name: None for p in parameters.values() if p.default is p.empty}
    for field in fields(Options):
        if field.name not in parameters:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{field.name}'"):
                function(**required, **{field.name: field.default})


def test_modules_have_their_functions_options():
    """Arguments that are not tensors are settings of the module; the others are arguments of its `forward`.

    Logit scale and bias are both: the constructor takes defaults, which a call overrides.
    """
    modules = [name for name in PUBLIC[wb] if name.endswith("Loss") and name != "PairLoss"]  # which users declare
    assert len(modules) == len(LOSSES) - 1, "all but PartialFC, which has centers"
    functions = {name.replace("_", ""): getattr(wb.functional, name) for name in LOSSES}
    for name in modules:
        module, function = getattr(wb, name), functions[name.lower()]
        settings = set(inspect.signature(module).parameters)
        inputs = set(inspect.signature(module.forward).parameters) - {"self"}
        extra = {"examples", "dtype", "indices"} if name == "GlobalContrastiveLoss" else set()
        kept = {"image_log_averages", "text_log_averages"} if extra else set()
        assert (settings | inputs) - extra == set(inspect.signature(function).parameters) - kept, name
        assert settings & inputs == {"logit_scale", "logit_bias"} & set(inspect.signature(function).parameters), name

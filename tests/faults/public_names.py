"""Every public name has a right call in the campaign, or a reason to have none; a name without either is an error."""

from __future__ import annotations

from collections.abc import Iterable

import wholebatch as wb

# Public names that exchange nothing between ranks, or that start new ranks.
NO_CALL = {
    **dict.fromkeys(
        ("AdaFace", "ArcFace", "CombinedMargin", "CosFace", "CurricularFace", "MagFace", "NormFace", "SphereFace"),
        "a margin: a function of this rank's rows",
    ),
    **dict.fromkeys(
        ("BatchStatistics", "LossAndStatistics", "LossAndAverages", "TermStatistics", "TopDocuments"),
        "a record that a loss returns",
    ),
    "terms": "a module: terms of a declared loss, and PairLoss has the calls",
    "Tokens": "a record that a caller makes: the losses that take it have the calls",
    "with_statistics": "calls a loss, and each loss has its call",
    "Scale": "a parameter and its exponential",
    "KeyQueue": "its collective is KeyQueue.enqueue",
    **dict.fromkeys(("SparseAdamW", "SparseSGD"), "updates local rows"),
    **dict.fromkeys(("Problem", "audit", "plan"), "called in one process; audit starts its own ranks"),
    **dict.fromkeys(
        ("comm", "functional", "gradcache", "heads", "options", "partition", "planning", "recipes", "reference"),
        "a module",
    ),
    **dict.fromkeys(("testing", "__version__"), "not called on ranks"),
    **dict.fromkeys(("heads.Margin", "heads.Targets", "heads.TopClasses"), "a type"),
    **dict.fromkeys(
        [
            f"heads.{name}"
            for name in ("NegativeTransform", "ObservesAngles", "ObservesNorms", "Regularizes", "TransformsNegatives")
        ],
        "a protocol of a margin's hooks",
    ),
    "heads.load_insightface": "reads files of another library: tests/faults/files.py damages them",
    **dict.fromkeys(("gradcache.cat_input_tensor",), "joins this rank's tensors"),
    **dict.fromkeys(("gradcache.SyncControl", "gradcache.register_sync_control"), "declares an engine, once"),
    **dict.fromkeys(
        [f"gradcache.{name}" for name in ("InputChunk", "MultimodalSplit", "TokenBudget", "TokenChunk")],
        "cuts this rank's input",
    ),
    "gradcache.encode": "tests/test_gradcache_deferred_backward.py has its mistakes of one rank",
    "comm.close": "collective if it ends a part of a split: tests/test_closing.py has its mistakes",
    **dict.fromkeys(("comm.Communicator", "comm.Handle", "comm.Group"), "a type: its methods are the entry points"),
    **dict.fromkeys(
        ("comm.TorchCommunicator", "comm.MPICommunicator", "comm.LocalCommunicator", "comm.select_communicator"),
        "made on each rank alone",
    ),
    **dict.fromkeys(("comm.CommunicationError", "comm.handshake"), "the base of all other calls"),
}


def public_names() -> list[str]:
    """Return everything that a user may call, by module, and every operation of a communicator."""
    names = [*wb.__all__]
    for module in ("functional", "heads", "gradcache", "comm"):
        public = getattr(wb, module).__all__
        names += [f"{module}.{name}" for name in public if module == "functional" or name not in wb.__all__]
    return names + [
        f"comm.{name}" for name, of in vars(wb.comm.Communicator).items() if callable(of) and not name.startswith("_")
    ]


def check(entries: Iterable[str], names: Iterable[str] | None = None) -> None:
    """Raise unless each public name is called in the campaign or listed as not called.

    Raises:
        NotImplementedError: names the others.
    """
    called = {name.split(",")[0] for name in entries} | {"heads.partial_fc_loss"}  # functional's
    unknown = [name for name in (names or public_names()) if name not in called and name not in NO_CALL]
    if unknown:
        raise NotImplementedError(
            f"no right call is known of {', '.join(unknown)}: write one (tests/faults/*_calls.py), or give in "
            "tests/faults/public_names.py the reason for none"
        )

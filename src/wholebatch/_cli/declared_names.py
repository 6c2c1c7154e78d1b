"""Names that a command line offers: importing the modules that declare them would import torch.

`tests/test_catalog.py` compares them with what these modules declare.
"""

from pathlib import Path
from pkgutil import iter_modules

_WITHOUT_A_STANDARD_CALL = {
    *("catalog", "distillation", "document_scores", "global_contrastive", "key_queue", "late_interaction", "moco"),
    *("statistics", "whole_batch"),
}
LOSS_NAMES: tuple[str, ...] = tuple(
    sorted(
        module.name
        for module in iter_modules([str(Path(__file__).parent.parent / "losses")])
        if not module.name.startswith("_") and module.name not in _WITHOUT_A_STANDARD_CALL
    )
)
"""The losses with a standard call, each under its file's name."""
SWEPT_LOSSES = ("clip", "info_nce", "nt_xent", "siglip", "sup_con")
"""The losses whose work is that of a sweep over the similarity matrix."""
LABELED_LOSSES = frozenset(("circle", "multi_similarity", "smooth_ap", "sup_con", "triplet"))
"""The losses that take one matrix of features and labels; the others take two matrices."""
EXCHANGE_NAMES = ("auto", "gather", "ring")
"""The values of `exchange=`."""

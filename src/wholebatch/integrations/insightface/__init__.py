"""insightface's PartialFC_V2 by its name and arguments, for its own train_v2.py: centers sharded over the ranks.

    from wholebatch.integrations.insightface import PartialFC_V2      instead of: from partial_fc_v2 import PartialFC_V2

Their script, optimizers, margins and checkpoints stay.

partial_fc   PartialFC_V2, a :class:`wholebatch.PartialFC`
margins      the margins of their losses.py as margins of this library
"""

from .partial_fc import PartialFC_V2

__all__ = ["PartialFC_V2"]

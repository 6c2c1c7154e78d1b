"""Losses with the names and arguments of sentence-transformers', for its own trainer, over the whole batch.

    from wholebatch.integrations.sentence_transformers import MultipleNegativesRankingLoss

    SentenceTransformerTrainer(model, args, train_dataset=data, loss=MultipleNegativesRankingLoss(model)).train()

Their trainer, their data and their model stay. `model` is the one that the trainer trains. One default is another:
`gather_across_devices=True`, so that negatives come from the batches of all processes. False gives their loss, the mean
over processes of the losses of their own batches. By keyword the losses take this library's options group, exchange,
memory and precision. Values that theirs refuses raise ValueError.

ranking      MultipleNegativesRankingLoss, its symmetric and its cached forms; GISTEmbedLoss: false negatives by a guide
distillation DistillKLDivLoss, MarginMSELoss: a teacher's scores
multi_vector MultiVectorMultipleNegativesRankingLoss and its cached form: late interaction
wrappers     MatryoshkaLoss: one of these losses for several embedding sizes; WholeBatchLoss: any of theirs
embedding    columns of a batch to embeddings, all at once or in chunks; the names of theirs that are used
"""

from .distillation import DistillKLDivLoss, MarginMSELoss
from .multi_vector import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from .ranking import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    CachedMultipleNegativesSymmetricRankingLoss,
    GISTEmbedLoss,
    MultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
)
from .wrappers import MatryoshkaLoss, WholeBatchLoss

__all__ = [
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
]

for _name in __all__:  # a model card names a loss by its module: by this one, from which a reader can import it
    globals()[_name].__module__ = __name__

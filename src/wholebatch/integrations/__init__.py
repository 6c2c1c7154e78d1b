"""Adapters to other people's trainers: their loop and their options, with losses of this library.

lightly                   losses with lightly's signatures
open_clip                 `python -m wholebatch.integrations.open_clip ...`, and losses with open_clip's signatures
pytorch_metric_learning   losses and wrappers with pytorch-metric-learning's signatures
sentence_transformers     losses with sentence-transformers' signatures, for its own trainer
transformers              a mixin for Hugging Face's Trainer, and a loss for its `compute_loss_func`

Each adapter is thin: values and gradients come from the public losses. It imports its framework when it is used, so
importing the adapter needs only torch.
"""

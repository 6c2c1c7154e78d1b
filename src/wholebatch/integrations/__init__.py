"""Adapters to other people's trainers: their loop and their options, with losses of this library.

flag_embedding            `python -m wholebatch.integrations.flag_embedding -m FlagEmbedding...`
grad_cache                an alias of the package grad_cache: its names, with this library inside
insightface               PartialFC_V2 with insightface's arguments, for its own train_v2.py
lightly                   losses with lightly's signatures
lightning                 strategies for Lightning's Trainer and Fabric that keep a `wholebatch.PartialFC` out of DDP
ms_swift                  a plugin for `swift sft --external_plugins`, with its loss `infonce` of all processes
open_clip                 `python -m wholebatch.integrations.open_clip ...`, and losses with open_clip's signatures
pytorch_metric_learning   losses and wrappers with pytorch-metric-learning's signatures
sentence_transformers     losses with sentence-transformers' signatures, for its own trainer
tevatron                  `python -m wholebatch.integrations.tevatron -m tevatron.retriever.driver.train ...`
transformers              a mixin for Hugging Face's Trainer, and a loss for its `compute_loss_func`

Each adapter is thin: values and gradients come from the public losses. It imports its framework when it is used, so
importing the adapter needs only torch. A framework that is missing or too old raises an ImportError then, which has the
command that installs it.
"""

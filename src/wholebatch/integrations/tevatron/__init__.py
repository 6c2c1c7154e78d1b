"""Tevatron's retriever training with the loss of the whole batch, with and without `--grad_cache`.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.tevatron \
        -m tevatron.retriever.driver.train --model_name_or_path ... --grad_cache

runs Tevatron's driver, trainer and model with its options; the loss is another, and so is `grad_cache`. In a program of
your own call `install()` before a trainer is made.

install    replaces the loss in TevatronTrainer, EncoderModel and GradCacheTrainer
"""

from .install import install

__all__ = ["install"]

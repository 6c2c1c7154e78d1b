"""Seeds and collections of garbage, quicker, as every test has them. The server of rank processes imports this, too.

torch.manual_seed formats the caller's stack for each kind of device that may come later, which takes milliseconds.
The garbage collector would run every 700 objects, of which tracing makes millions, for a tenth of all time.
"""

import gc

import torch


def seed_the_cpu(seed: int) -> torch.Generator:
    """Seed the generator of the CPU, and return it."""
    return torch.default_generator.manual_seed(int(seed))


if not torch.cuda.is_available():
    torch.manual_seed = seed_the_cpu

gc.set_threshold(50_000)

"""torch.manual_seed, quicker where there is no GPU: it formats the caller's stack for each kind that may come later.

That takes milliseconds, and each test begins with it. The server of rank processes imports this module, too.
"""

import torch


def seed_the_cpu(seed: int) -> torch.Generator:
    """Seed the generator of the CPU, and return it."""
    return torch.default_generator.manual_seed(int(seed))


if not torch.cuda.is_available():
    torch.manual_seed = seed_the_cpu

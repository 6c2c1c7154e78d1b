"""Programs on top of the library share this with its command line; the parts that need torch are in `app.tensors`.

Mistakes of a user that are one line, files that are there as a whole or not at all, JSON of bounded size, and how many
ranks a launcher has started.
"""

from .._base.bounded_json import DIGEST, Types, check_fields, parse_json, sealed, unsealed
from .._base.files import flock, open_regular, read_bounded, replacing, sync_file, writing
from .._base.machine import processor_name
from .._base.settings import shown
from .._base.third_party import declare_torchvision_operators
from .._base.user_error import UserError, needs, option, printable, require
from .._cli.declared_names import LOSS_NAMES
from .._launch.cpus import cpus_of_a_rank
from .._launch.launcher import launcher_size
from .._launch.slurm import has_gpu_of_its_own, use_variables_of_slurm
from ..planning.units import amount, duration

__all__ = [
    "DIGEST",
    "LOSS_NAMES",
    "Types",
    "UserError",
    "amount",
    "check_fields",
    "cpus_of_a_rank",
    "declare_torchvision_operators",
    "duration",
    "flock",
    "has_gpu_of_its_own",
    "launcher_size",
    "needs",
    "open_regular",
    "option",
    "parse_json",
    "printable",
    "processor_name",
    "read_bounded",
    "replacing",
    "require",
    "sealed",
    "shown",
    "sync_file",
    "unsealed",
    "use_variables_of_slurm",
    "writing",
]

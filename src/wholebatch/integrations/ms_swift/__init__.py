r"""ms-swift's embedding training with a loss of the whole batch, by its `--external_plugins` option.

    swift sft --task_type embedding --loss_type infonce \
        --external_plugins "$(python -m wholebatch.integrations.ms_swift)" ...

runs ms-swift's program, and `infonce` is the loss of this package, with the same environment variables. In a program of
your own, call `enable()` once before a trainer is made, or pass an :class:`InfonceLoss` as `compute_loss_func`.

loss      InfoNCE over the rows of all processes
options   the environment variables of the loss
switch    puts it into ms-swift's table of losses
plugin    a folder with the file for --external_plugins alone: ms-swift puts the folder on sys.path
"""

from .loss import InfonceLoss
from .switch import disable, enable, plugin_path

__all__ = ["InfonceLoss", "disable", "enable", "plugin_path"]

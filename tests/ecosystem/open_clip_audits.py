"""Problems for the audit: our losses in open_clip's `train_one_epoch`, with its model, under DDP."""

import wholebatch as wb
from wholebatch.auditing.presets.open_clip import _problem
from wholebatch.auditing.problem import Problem
from wholebatch.integrations import open_clip
from wholebatch.integrations.open_clip.factory import _InMicroSteps


def clip() -> Problem:
    return _problem(open_clip.ClipLoss, wb.reference.clip_loss, 1, bias=False)


def clip_in_four_micro_steps() -> Problem:
    def build(**ranks: int) -> _InMicroSteps:
        return _InMicroSteps(open_clip.ClipLoss(**ranks), 4)

    return _problem(build, wb.reference.clip_loss, 4, bias=False)


def siglip() -> Problem:
    return _problem(open_clip.SigLipLoss, wb.reference.siglip_loss, 1, bias=True)

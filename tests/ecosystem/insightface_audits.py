"""Problems for the audit: insightface's PartialFC_V2 beside a backbone under DDP, and that of this library.

    export WHOLEBATCH_INSIGHTFACE=/path/to/recognition/arcface_torch
    wholebatch audit insightface_audits:theirs

Every rank has its rows of the same centers. Calls of CUDA do nothing there.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch.auditing.presets.encoders import IN, OUT, ROWS, mlp
from wholebatch.partition import Partition

CLASSES = 10


class Model(nn.Module):
    """A backbone with a head."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images, labels):
        return self.head(self.backbone(images), labels.clone())  # theirs changes labels


def _problem(*, ours=False, cosface=False, **settings):
    torch.set_default_dtype(torch.float64)  # theirs makes tensors of the default type
    sys.path.insert(0, os.environ["WHOLEBATCH_INSIGHTFACE"])
    import losses

    if ours:
        from wholebatch.integrations.insightface import PartialFC_V2
    else:
        from partial_fc_v2 import PartialFC_V2

        for owner in (torch.Tensor, nn.Module):
            owner.cuda = lambda self, *_args, **_keywords: self
    margin = losses.CombinedMarginLoss(16, 1.0, 0.0, 0.4) if cosface else losses.CombinedMarginLoss(16, 1.0, 0.5, 0.0)
    batch = {"images": torch.randn(ROWS, IN), "labels": torch.arange(ROWS) % CLASSES}
    backbone = mlp()
    head = PartialFC_V2(margin, OUT, CLASSES, **settings)  # last: it may draw other numbers on other ranks
    local = Partition.even(CLASSES, dist.get_world_size()).rows(dist.get_rank())
    head.weight.data.copy_(torch.randn(CLASSES, OUT, generator=torch.Generator().manual_seed(1))[local])

    def loss(model, batch):
        return model(batch["images"], batch["labels"])

    return wb.Problem(Model(backbone, head), batch, loss, engine="ddp", sharded=["head"], uneven=ours, empty=ours)


theirs, theirs_cosface = partial(_problem), partial(_problem, cosface=True)
ours, ours_cosface = partial(_problem, ours=True), partial(_problem, ours=True, cosface=True)
ours_exact = partial(_problem, ours=True, margin_grad="exact")
SETTINGS = {
    "PartialFC_V2, ArcFace": theirs,
    "PartialFC_V2, CosFace": theirs_cosface,
    "PartialFC_V2 of wholebatch.integrations, ArcFace": ours,
    "PartialFC_V2 of wholebatch.integrations, CosFace": ours_cosface,
    'PartialFC_V2 of wholebatch.integrations, ArcFace, margin_grad="exact"': ours_exact,
}

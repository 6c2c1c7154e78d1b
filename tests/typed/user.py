"""A user's program, never run: a type checker must report each line marked `# error`, and no other."""

# mypy: disallow-untyped-calls, disallow-subclassing-any, warn-return-any

import torch
from torch import Tensor
from typing_extensions import assert_type

import wholebatch as wb
from wholebatch.integrations import lightly, open_clip, pytorch_metric_learning, sentence_transformers

x, y, scale = torch.eye(3), torch.eye(3), torch.tensor(10.0)
labels = torch.tensor([0, 0, 1])

assert_type(wb.functional.clip_loss(x, y, scale, label_smoothing=0.1), Tensor)
assert_type(wb.functional.info_nce_loss(x, y, logit_scale=scale, directions=("query_to_key",)), Tensor)
assert_type(wb.functional.partial_fc_loss(x, labels, y, margin=wb.CosFace(16.0)), Tensor)
assert_type(wb.functional.siglip_loss(x, y, 10.0, -10.0), Tensor)
wb.functional.clip_loss(x, y, scale, lable_smoothing=0.1)  # error
wb.functional.clip_loss(x, y, scale, reduction="average")  # error
wb.functional.clip_loss(x, y)  # error

assert_type(wb.CLIPLoss(label_smoothing=0.1).forward(x, y, scale), Tensor)
wb.CLIPLoss(label_smoothing="a")  # error
wb.CLIPLoss(lable_smoothing=0.1)  # error
wb.CLIPLoss(0.1)  # error
wb.CLIPLoss(logit_scale=wb.Scale(14.3), logit_bias=torch.nn.Parameter(scale))
assert_type(wb.CLIPLoss(logit_scale=14.3).forward(x, y), Tensor)
wb.InfoNCELoss(logit_scale="14.3")  # error
wb.InfoNCELoss(logit_bias=1.0)  # error
wb.MatryoshkaLoss()  # error
wb.MatryoshkaLoss(dims=(2, 3), exchange="ring", memory=2**20)
wb.MaxSimLoss(directions=("query_to_document",), share_hard_negatives=False)
wb.MaxSimLoss(share_hard_negatives="own")  # error
assert_type(wb.functional.max_sim_loss(x, y, logit_scale=1.0, documents_per_query=2), Tensor)
assert_type(wb.max_sim(x, y), Tensor)
assert_type(wb.max_sim(x, y, k=3), wb.TopDocuments)
wb.PairLoss({"all": wb.terms.LogSumExp()}, lambda r, x, p: r.all, similarity="max_sim")(
    wb.Tokens(x), wb.Tokens(y, mask=x)
)
wb.TripletLoss(margin=0.1, kernel="triton")  # error
wb.BarlowTwinsLoss(reduction="sum")  # error
wb.GlobalContrastiveLoss(100, temperature=0.1, gamma="a")  # error

both = wb.with_statistics(wb.functional.clip_loss)(x, y, scale)
assert_type(both, wb.LossAndStatistics)
assert_type(both.statistics.accuracy, Tensor)
wb.with_statistics(wb.functional.clip_loss)(x, y, scle=scale)  # error

assert_type(wb.functional.global_contrastive_loss(x, y, scale, scale, temperature=0.1).loss, Tensor)
assert_type(wb.reference.clip_loss(x, y, scale), Tensor)

open_clip.ClipLoss(True, memory="flat")
open_clip.ClipLoss(memory="flatt")  # error
open_clip.ClipLoss(locl_loss=True)  # error
sentence_transformers.MultipleNegativesRankingLoss(torch.nn.Identity(), 20.0, exchange="ring")
sentence_transformers.MultipleNegativesRankingLoss(torch.nn.Identity(), scal=20.0)  # error
sentence_transformers.CachedGISTEmbedLoss(torch.nn.Identity(), torch.nn.Identity(), mini_batch_size="3")  # error
lightly.NTXentLoss(0.1, gather_distributed=False)
lightly.NTXentLoss(group="world")  # error
pytorch_metric_learning.CircleLoss(m=0.3, reducer=None)

"""Problems for the audit: a model of FlagEmbedding under DDP, with its own loss of all processes and with ours."""

import torch
import torch.distributed as dist
from FlagEmbedding.finetune.embedder.encoder_only.base import BiEncoderOnlyEmbedderModel
from torch import nn

import wholebatch as wb
from wholebatch.integrations import flag_embedding

GROUP, WIDTH = 3, 6


class Tokens(nn.Module):
    """A base model: one hidden state per row."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, rows, attention_mask, return_dict=True):
        return type("Outputs", (), {"last_hidden_state": self.inner(rows)[:, None]})


class Theirs(BiEncoderOnlyEmbedderModel):
    """The model, with the ranks that it would read if it were made after the start of torch.distributed."""

    def forward(self, queries, passages, teacher):
        ranks = dist.is_available() and dist.is_initialized()
        self.process_rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        self.negatives_cross_device = ranks
        queries, passages = ({"rows": x, "attention_mask": x} for x in (queries, passages.flatten(0, 1)))
        scores = teacher.flatten().tolist() if self.distilled else None
        return super().forward(queries, passages, scores).loss


class Ours(Theirs):
    """The same with the method that `enable()` puts there."""

    _compute_cross_device_neg_loss = flag_embedding.cross_device_loss


def _problem(model, distilled):
    torch.manual_seed(0)
    built = model(Tokens(), temperature=0.2, normalize_embeddings=True)
    built.distilled = distilled
    batch = {"queries": torch.randn(24, WIDTH), "passages": torch.randn(24, GROUP, WIDTH)}
    batch["teacher"] = torch.randn(24, GROUP)
    return wb.Problem(built, batch, lambda m, b: m(b["queries"], b["passages"], b["teacher"]), engine="ddp")


def theirs():
    return _problem(Theirs, distilled=False)


def theirs_kl_div():
    return _problem(Theirs, distilled=True)


def ours():
    return _problem(Ours, distilled=False)


def ours_kl_div():
    return _problem(Ours, distilled=True)

"""An encoder of padded sentences, and sentences of random lengths, for the tests of gradient caching."""

import torch
from gradcache_models import OUT
from torch import nn

LENGTH = 9


class Sentences(nn.Module):
    """Embed tokens, attend to those of the mask, and average them: a row's output does not depend on its padding."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.inner = nn.Embedding(20, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.out = nn.Linear(6, OUT)
        self.double()
        self.shapes = []

    def tokens(self, ids, mask):
        self.shapes.append(tuple(ids.shape))
        x = self.words(ids)
        scores = (x @ x.mT).masked_fill(mask[:, None] == 0, -torch.inf).nan_to_num(neginf=-1e9)
        return self.inner(scores.softmax(-1) @ x)

    def forward(self, input_ids, attention_mask):
        x, mask = self.tokens(input_ids, attention_mask), attention_mask[..., None].double()
        return self.out((x * mask).sum(1) / mask.sum(1).clamp(min=1))


def sentences(rows, seed=0, side="right"):
    """Return token ids and masks of shape (rows, 9), of random lengths; the longest row has 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH, (rows, 1), generator=generator)
    at = torch.arange(LENGTH)[None]
    mask = (at < lengths if side == "right" else at >= LENGTH - lengths).long()
    if side == "both":
        mask = torch.where(torch.arange(rows)[:, None] % 2 == 0, mask, mask.flip(1))
    ids = torch.randint(1, 20, (rows, LENGTH), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}

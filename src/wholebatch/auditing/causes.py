"""What goes wrong when a loss of the whole batch is put on several ranks: by name, with what mends it.

Notation: L is the loss of the whole batch, W the number of ranks, l_s what rank s calls its loss, x_r the features of
rank r's rows. The gradient of L by parameters of an encoder is sum_r (dx_r/dtheta)^T dL/dx_r; an engine that averages
makes (1/W) sum_r (dx_r/dtheta)^T f_r of it, where f_r is what rank r's backward pass brought to its features.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import _not_reduced


@dataclass(frozen=True)
class Cause:
    """Why a gradient is not that of the whole batch.

    Args:
        name: for programs.
        title: for people.
        fix: what to do.
        wrong: whether it makes a gradient wrong; else it is worth knowing.
    """

    name: str
    title: str
    fix: str
    wrong: bool = True


EVERYTHING_TIMES_W = Cause(
    "everything-times-w",
    "all gradients are W times too large",
    "the loss counts the batch once for each rank: divide it by W (or, where the engine adds gradients, declare "
    "engine='sum')",
)
EVERYTHING_OVER_W = Cause(
    "everything-over-w",
    "all gradients are 1/W of what they should be",
    "each rank's loss is its share of L, and the engine averages the shares: multiply the loss by W, or divide by the "
    "rank's own rows in place of all rows",
)
GATHER_WITHOUT_GRADIENT = Cause(
    "gather-without-gradient",
    "the features are gathered without their gradient, under a loss that every rank computes in full: encoders get "
    "1/W, the temperature the whole",
    "gather with gradient (open_clip: --gather-with-grad; torch: a gather whose backward is a reduce-scatter), or "
    "wholebatch.CLIPLoss. Multiplying the loss by W would make the temperature wrong instead",
)
KEY_SIDE_MISSING = Cause(
    "key-side-missing",
    "each rank computes the loss of its own rows against all, and the gathered ones carry no gradient: what other "
    "ranks' losses say about a row is lost",
    "gather with gradient, added up over ranks (open_clip: --gather-with-grad beside --local-loss), or "
    "wholebatch.CLIPLoss",
)
GATHER_AVERAGES = Cause(
    "gather-averages",
    "the gather's backward averages over ranks where it should add: encoders get 1/W, the temperature the whole",
    "all-reduce or reduce-scatter with SUM in the gather's backward; the engine averages once already",
)
GATHER_TIMES_W = Cause(
    "gather-times-w",
    "the backward pass of a collective multiplies by W: it adds over ranks what has been added already",
    "one sum over ranks in backward; a functional all-reduce whose result all ranks use alike needs none",
)
SCALE_TIMES_W = Cause(
    "scale-times-w",
    "the gradient of the loss's own parameters (temperature, bias) is W times too large, the encoders' is right",
    "a factor of W belongs on the features' gradient alone, not on the loss: multiply in the gather's backward, or use "
    "a loss of wholebatch",
)
SCALE_OVER_W = Cause(
    "scale-over-w",
    "the gradient of the loss's own parameters (temperature, bias) is 1/W of what it should be, the encoders' is right",
    "each rank brings its share of it and the engine averages: add the shares up over ranks in backward",
)
SCALE_TIMES_STEPS = Cause(
    "scale-times-steps",
    "the loss of the whole batch is computed in each accumulation step, and each time brings the temperature its whole "
    "gradient",
    "take the gradient of the loss's own parameters in one of the steps, or divide it by their number "
    "(wholebatch.GradCache computes the loss once)",
)
EVERYTHING_TIMES_STEPS = Cause(
    "everything-times-steps",
    "all gradients are multiplied by the number of accumulation steps",
    "divide the loss by the number of steps before backward()",
)
NOT_GATHERED = Cause(
    "not-gathered",
    "each rank's loss sees its own rows alone: nothing is gathered, and the negatives of other ranks are missing",
    "gather the features (open_clip: world_size=; lightly: gather_distributed=True; sentence-transformers: "
    "gather_across_devices=True), or use a loss of wholebatch",
)
LABELS_NOT_OFFSET = Cause(
    "labels-not-offset",
    "the loss is right on rank 0 alone: the positives of other ranks are looked for among rank 0's rows, or where they "
    "are not",
    "a rank's positives begin at its first row in the gathered batch: add the rows of the ranks before it "
    "(rank * rows) to the labels, and gather in rank order",
)
RANK_ORDER_MIXED = Cause(
    "rank-order-mixed",
    "rows are not where the loss looks for them: two gathers order ranks, or views, differently",
    "gather each view for itself and in the same rank order; when views are joined first, rows of rank 0's views come "
    "before rank 1's, not view by view",
)
MICRO_BATCHES = Cause(
    "micro-batches",
    "each of several backward passes is of a loss of its own rows: rows meet those of their own micro-batch alone, and "
    "other ones when ranks share the batch",
    "accumulation does not make the batch of such a loss larger; encode in chunks, and compute one loss of all "
    "features, as wholebatch.GradCache does",
)
OWN_STATISTICS = Cause(
    "own-statistics",
    "something that belongs to the whole batch is computed from each rank's own rows: the loss is right where all "
    "ranks have the same rows",
    "take means, variances, normalizations and weights over the rows of all ranks (wholebatch.comm.all_reduce has the "
    "gradient)",
)
ANOTHER_LOSS = Cause(
    "another-loss",
    "the gradient is that of the loss that the ranks compute, but this is not the loss of the whole batch",
    "compare what is counted: negatives that are missing or counted twice, a mean over other numbers of rows",
)
UNEQUAL_RANKS_COUNT_ALIKE = Cause(
    "ranks-count-alike",
    "each rank's mean counts the same, however many rows it has: rows of small ranks count more",
    "divide the sum over a rank's rows by all rows of the batch, times W under an engine that averages",
)
ROWS_DROPPED = Cause(
    "rows-dropped",
    "of ranks with more rows, only as many as the smallest has count",
    "gather with the true numbers of rows (wholebatch.comm gathers uneven parts)",
)
ROWS_REPEATED = Cause(
    "rows-repeated",
    "ranks with fewer rows are filled up, and what fills them counts as rows of the batch",
    "leave the padding out of the loss, or gather with the true numbers of rows (wholebatch.comm gathers uneven parts)",
)
NO_GRADIENT = Cause(
    "no-gradient",
    "parameters get no gradient that have one on one process",
    "look for detach(), no_grad() or .item() on the way; what is not to be trained has requires_grad=False; under DDP, "
    "parameters must be reached through the wrapped model's forward",
)
DROPOUT_NOT_REPLAYED = Cause(
    "dropout-not-replayed",
    "the second forward pass draws another dropout than the first: the gradient is of a loss that was never computed",
    "restore the generator's state before a chunk is encoded again (wholebatch.GradCache does, on all devices)",
)
LAST_CHUNK_ONLY = Cause(
    "last-chunk-only",
    "of several chunks only the last one's gradient is left",
    "gradients of chunks must be added: no zero_grad() between them, backward() of each, and no engine that overwrites",
)
BATCH_STATISTICS = Cause(
    "batch-statistics",
    "BatchNorm normalizes each rank's rows by their own statistics",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a normalization without statistics of the batch",
)
RAISES = Cause("raises", "on several ranks it raises", "see the message")
HANGS = Cause("hangs", "it does not end: ranks wait for each other", "see where each rank was")
SCALED_ALIKE = Cause(
    "scaled-alike",
    "all gradients are multiplied by one factor",
    "leave out of the step what comes after backward(): clipping, loss scaling (or unscale before it returns)",
)
NOT_REDUCED = Cause(
    "not-reduced",
    _not_reduced.TITLE,
    f"{_not_reduced.FIX}; a step with engine='none' reduces all itself",
)
NOT_CHECKED = Cause(
    "not-checked",
    "the loss is not smooth enough to tell by differences whether the step's gradient is its own",
    "give reference=, the loss that one process should compute of the whole batch",
)
NOT_OF_ITS_LOSS = Cause(
    "not-of-its-loss",
    "on one process the gradient is not that of the loss that is returned",
    "if something is detached on purpose (a momentum encoder, targets), give reference=, the loss that it should be",
)
GENERAL = ("not-of-its-loss", "another-loss", "unknown")  # what is said where nothing more is known
UNKNOWN = Cause("unknown", "the gradient is wrong, and the cause is none of those known here", "see the figures")
DETACHED = Cause(
    "detached",
    "something in the loss is detached: on one process its gradient is not that of its value, which is taken as meant",
    "if it is not, give reference=, the loss that it should be",
    wrong=False,
)
VALUES_DIFFER = Cause(
    "values-differ",
    "each rank returns a loss of its own; their mean is that of the whole batch",
    "average it over ranks where it is logged",
    wrong=False,
)
VALUE_IS_ANOTHER = Cause(
    "value-is-another",
    "the loss that is returned is not that of the whole batch, though its gradient is",
    "do not compare logged values between numbers of ranks",
    wrong=False,
)
UNUSED = Cause(
    "unused",
    "parameters have no gradient, on one process either",
    "under DDP, parameters that a loss does not use need find_unused_parameters=True (here: engine=partial("
    "DistributedDataParallel, find_unused_parameters=True))",
    wrong=False,
)

"""The mistakes that the audit names, each with its symptom and its fix.

Notation: L is the loss of the whole batch, W the number of ranks, l_s the loss that rank s computes, x_r the features
of rank r's rows. The gradient of L by an encoder's parameters is sum_r (dx_r/dtheta)^T dL/dx_r; an engine that averages
produces (1/W) sum_r (dx_r/dtheta)^T f_r, where f_r is the gradient of rank r's backward pass by its features.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._base import not_reduced


@dataclass(frozen=True)
class Cause:
    """A reason why a gradient is not that of the whole batch.

    Args:
        name: for programs.
        title: for people.
        fix: how to correct it.
        wrong: whether it makes a gradient wrong; if not, it is worth knowing.
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
    "all gradients are too small by the factor 1/W",
    "each rank's loss is its share of L, and the engine averages the shares: multiply the loss by W, or divide by the "
    "local rows instead of all rows",
)
GATHER_WITHOUT_GRADIENT = Cause(
    "gather-without-gradient",
    "every rank computes the whole loss of features that are gathered without gradient: encoders get 1/W of their "
    "gradient, the temperature all of it",
    "gather with gradient (open_clip: --gather-with-grad; torch: a gather whose backward is a reduce-scatter), or "
    "wholebatch.CLIPLoss. Multiplying the loss by W would make the temperature wrong instead",
)
KEY_SIDE_MISSING = Cause(
    "key-side-missing",
    "each rank computes the loss of its local rows against all rows, and the gathered rows carry no gradient: the "
    "gradient of other ranks' losses by a row is lost",
    "gather with gradient, summed over ranks (open_clip: --gather-with-grad with --local-loss), or wholebatch.CLIPLoss",
)
GATHER_AVERAGES = Cause(
    "gather-averages",
    "the gather's backward averages over ranks instead of adding: encoders get 1/W of their gradient, the temperature "
    "all of it",
    "all-reduce or reduce-scatter with SUM in the gather's backward; the engine averages once already",
)
GATHER_TIMES_W = Cause(
    "gather-times-w",
    "the backward pass of a collective multiplies by W: it sums over ranks a second time",
    "sum over ranks once in backward; a functional all-reduce whose result is the same on all ranks needs no sum",
)
SCALE_TIMES_W = Cause(
    "scale-times-w",
    "the gradient of the loss's own parameters (temperature, bias) is W times too large, the encoders' is right",
    "a factor of W belongs on the features' gradient alone, not on the loss: multiply in the gather's backward, or use "
    "a loss of wholebatch",
)
SCALE_OVER_W = Cause(
    "scale-over-w",
    "the gradient of the loss's own parameters (temperature, bias) is too small by the factor 1/W, the encoders' is "
    "right",
    "each rank computes its share and the engine averages: sum the shares over ranks in backward",
)
SCALE_TIMES_STEPS = Cause(
    "scale-times-steps",
    "each accumulation step computes the loss of the whole batch, and adds the temperature's whole gradient",
    "take the gradient of the loss's own parameters in one of the steps, or divide it by the number of steps "
    "(wholebatch.GradCache computes the loss once)",
)
EVERYTHING_TIMES_STEPS = Cause(
    "everything-times-steps",
    "all gradients are multiplied by the number of accumulation steps",
    "divide the loss by the number of steps before backward()",
)
NOT_GATHERED = Cause(
    "not-gathered",
    "each rank's loss uses its local rows alone: nothing is gathered, and the negatives of other ranks are missing",
    "gather the features (open_clip: world_size=; lightly: gather_distributed=True; sentence-transformers: "
    "gather_across_devices=True), or use a loss of wholebatch",
)
LABELS_NOT_OFFSET = Cause(
    "labels-not-offset",
    "the loss is right on rank 0 alone: other ranks take rank 0's rows, or rows without a match, for positives",
    "a rank's positives begin at its first row in the gathered batch: add the rows of the ranks before it "
    "(rank * rows) to the labels, and gather in rank order",
)
RANK_ORDER_MIXED = Cause(
    "rank-order-mixed",
    "the loss pairs the wrong rows: two gathers order ranks, or views, differently",
    "gather each view separately and in the same rank order; if views are concatenated before the gather, the result "
    "has both views of rank 0 before both of rank 1, and not view after view",
)
MICRO_BATCHES = Cause(
    "micro-batches",
    "each of several backward passes has its own loss: rows meet only those of their micro-batch, and other rows when "
    "ranks share the batch",
    "accumulation does not make the batch of such a loss larger; encode in chunks and compute one loss of all "
    "features, as wholebatch.GradCache does",
)
LOCAL_STATISTICS = Cause(
    "local-statistics",
    "a statistic of the whole batch is computed from each rank's local rows: the loss is right where all ranks have "
    "the same rows",
    "compute means, variances, normalizations and weights over the rows of all ranks (wholebatch.comm.all_reduce is "
    "differentiable)",
)
LOSS_DIFFERS = Cause(
    "loss-differs",
    "the gradient fits the loss that the ranks compute, which is not the loss of the whole batch",
    "look for negatives that are missing or counted twice, and for means over other numbers of rows",
)
MEAN_OF_MEANS = Cause(
    "mean-of-means",
    "the loss is a mean of the ranks' means: rows of ranks with few rows count more",
    "divide the sum over a rank's rows by all rows of the batch, times W under an engine that averages",
)
ROWS_DROPPED = Cause(
    "rows-dropped",
    "ranks have different numbers of rows, and each counts only as many as the smallest rank has",
    "gather with the true numbers of rows (wholebatch.comm gathers uneven parts)",
)
ROWS_REPEATED = Cause(
    "rows-repeated",
    "ranks with fewer rows are padded, and the padding counts as rows of the batch",
    "leave the padding out of the loss, or gather with the true numbers of rows (wholebatch.comm gathers uneven parts)",
)
NO_GRADIENT = Cause(
    "no-gradient",
    "parameters that have a gradient on one process get none",
    "look for detach(), no_grad() or .item() between parameters and loss; set requires_grad=False for frozen "
    "parameters; under DDP, call the wrapped model's forward",
)
DROPOUT_NOT_REPLAYED = Cause(
    "dropout-not-replayed",
    "the second forward pass draws other dropout masks than the first: the gradient is of a loss that was never "
    "computed",
    "restore the generator's state before a chunk is encoded again (wholebatch.GradCache does so, on all devices)",
)
LAST_CHUNK_ONLY = Cause(
    "last-chunk-only",
    "only the gradient of the last chunk is left",
    "accumulate the gradients of chunks: no zero_grad() between them, backward() of each, no engine that overwrites",
)
BATCH_STATISTICS = Cause(
    "batch-statistics",
    "BatchNorm normalizes each rank's rows by local statistics",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a normalization without statistics of the batch",
)
RAISES = Cause("raises", "on several ranks the problem raises", "see the message")
HANGS = Cause("hangs", "ranks wait for each other and do not end", "see where each rank was")
UNIFORM_SCALING = Cause(
    "uniform-scaling",
    "all gradients are multiplied by one factor",
    "leave clipping and loss scaling, which come after backward(), out of the step (or unscale before it returns)",
)
NOT_REDUCED = Cause(
    "not-reduced",
    not_reduced.TITLE,
    f"{not_reduced.FIX}; a step with engine='none' reduces all itself",
)
NOT_CHECKED = Cause(
    "not-checked",
    "the loss is not smooth enough for finite differences, so the step's gradient was not checked",
    "give reference=, the loss that one process should compute of the whole batch",
)
NOT_OF_ITS_LOSS = Cause(
    "not-of-its-loss",
    "on one process the gradient is not that of the returned loss",
    "if something is detached on purpose (a momentum encoder, targets), give reference=, the loss that one process "
    "should compute",
)
GENERAL = ("not-of-its-loss", "loss-differs", "unknown")  # causes that say no more than the figures
UNKNOWN = Cause("unknown", "the gradient is wrong, and no known cause fits", "see the figures")
DETACHED = Cause(
    "detached",
    "the loss detaches something: on one process its gradient is not that of its value, which is taken as intended",
    "if it is not intended, give reference=, the loss that one process should compute",
    wrong=False,
)
VALUES_DIFFER = Cause(
    "values-differ",
    "ranks return different losses; their mean is the loss of the whole batch",
    "average it over ranks where it is logged",
    wrong=False,
)
VALUE_NOT_GLOBAL = Cause(
    "value-not-global",
    "the returned loss is not that of the whole batch, though its gradient is",
    "do not compare logged values between numbers of ranks",
    wrong=False,
)
UNUSED = Cause(
    "unused",
    "parameters have no gradient, on one process or on several",
    "under DDP, parameters that a loss does not use need find_unused_parameters=True (here: engine=partial("
    "DistributedDataParallel, find_unused_parameters=True))",
    wrong=False,
)

"""Terms of :class:`wholebatch.PairLoss`: reductions over the candidates of a row or column, and its partner."""

from .pair_loss.reductions import Count, LogSumExp, Max, Mean, Min, Partner, Sum

__all__ = ["Count", "LogSumExp", "Max", "Mean", "Min", "Partner", "Sum"]

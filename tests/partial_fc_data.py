"""Data, margins, splits over ranks and training runs that the tests of PartialFC share."""

import math

import torch
import torch.nn.functional as F

import wholebatch as wb





def sgd(params):
    return wb.SparseSGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return wb.SparseAdamW(params, lr=0.05, weight_decay=0.1)

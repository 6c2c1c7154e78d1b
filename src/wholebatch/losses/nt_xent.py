"""NT-Xent, the loss of SimCLR: each row of two views against all other rows of both, with half of the tiles.

    z    = rows of both views of all ranks, each divided by its norm          2B of them
    S_ij = z_i . z_j / temperature
    L    = 1/(2B) sum_i [ logsumexp_{j != i} S_ij - S_{i p(i)} ]              p(i): the same example in the other view

S is symmetric: the tiles above its diagonal say all, and the work is half of a full sweep's.
"""

from __future__ import annotations

from torch import Tensor, nn

from .._checks import check_temperature
from ..comm import Group
from ..exchange import ExchangeName
from ..partition import Diagonal, Partition
from ..sweep import Memory, Pairs
from ..sync import Sync
from ._door import LossModule, Options, agree, eager
from ._softmax import SoftmaxPlan, softmax_loss
from ._towers import Towers

_UNIT = 1.001  # no norm is larger, after division and rounding


@eager
def nt_xent_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""Cross-entropy of each row's other view among all rows of both views but itself, with its exact gradient.

    S = Z Z^T / temperature,    L = CE(S without its diagonal, other view),    Z = normalize([Z0; Z1]), all ranks' rows.

    Args:
        z0: (b_r, d), this rank's rows of the first view; they are normalised inside. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16 (the last two are widened to float32).
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there.
        memory: "flat", "auto" or bytes, as there.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.nt_xent_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient.

    Work: with n_r = 2 b_r rows of N, 2 units of n_r N d multiply-adds per rank, half of a full sweep's 4; 1.5 where
    exp(S) is kept. Memory beyond inputs and gradients: Z's rows of this rank, two tiles and O(B), and on several ranks
    all of Z, its gradient, and a buffer of the reduce-scatter ("gather"), or five ranks' rows of Z ("ring", half a
    round). Collectives: as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also a temperature that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Chen et al., 2020, arXiv:2002.05709, equation 1.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.nt_xent_loss(z, z, temperature=0.5)
    tensor(0.4327)
    """
    agreed = agree(
        "nt_xent_loss",
        Options(group, sync, exchange, memory),
        scalars={"temperature": temperature},
        features={"z0": z0, "z1": z1},
        paired=("z0", "z1"),
        check=lambda: {"temperature": check_temperature("temperature", temperature)},
    )
    pairs = agreed.rows["z0"]
    rows = Partition(tuple(2 * count for count in pairs.counts))
    how, budget = agreed.exchange(rows, rows, symmetric=True)
    first, own = rows.offsets[agreed.rank], pairs.counts[agreed.rank]
    scale = 1 / agreed.scalars["temperature"]
    plan = SoftmaxPlan(
        agreed.comm,
        how,
        Towers(stays=(0, 1), normalise=True),
        Pairs(
            positive=(Diagonal(0, first + own, own), Diagonal(own, first, own)),
            excluding=(Diagonal(0, first, 2 * own),),
        ),
        scale,
        bound=scale * _UNIT,
        softmaxes=rows.total,
        longest=rows.total - 1,
        rows=True,
        cols=True,
        budget=budget,
        sync=sync,
        differentiable=agreed.differentiable,
    )
    given_temperature, *features = agreed.inputs
    return softmax_loss(plan, 1 / given_temperature, None, features)


class NTXentLoss(LossModule):
    """SimCLR's loss over the global batch: the settings of :func:`wholebatch.functional.nt_xent_loss`.

    Args:
        temperature: a number, or an `nn.Parameter` to be learned: then wrap the module like the model, so that the
            engine synchronises its gradient.
        group, sync, exchange, memory: as in :func:`wholebatch.functional.nt_xent_loss`.
    """

    def __init__(
        self,
        *,
        temperature: Tensor | float = 0.1,
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
    ) -> None:
        super().__init__(group, sync, exchange, memory)
        check_temperature("temperature", temperature)
        self.temperature: Tensor | float
        if isinstance(temperature, Tensor) and not isinstance(temperature, nn.Parameter):
            self.register_buffer("temperature", temperature)
        else:
            self.temperature = temperature

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """See :func:`wholebatch.functional.nt_xent_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return nt_xent_loss(
            z0,
            z1,
            temperature=self.temperature,
            group=self.group,
            sync=self.sync,
            exchange=self.exchange,
            memory=self.memory,
        )

    def extra_repr(self) -> str:
        return f"temperature={float(self.temperature):g}, {super().extra_repr()}"

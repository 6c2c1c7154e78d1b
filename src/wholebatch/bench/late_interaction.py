"""Late interaction, flat and with winners kept, beside its dense formula on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch.comm import Communicator
from wholebatch.partition import Partition
from wholebatch.planning.late_interaction import TokenShapes
from wholebatch.planning.sizes import MAX_SIM, WINNERS

from .gate import check_peer_of_tokens, check_tokens
from .measurement import Job, Measurement
from .subjects import DTYPES, Configuration

_UNITS = 2  # of (query tokens)(document tokens) d multiply-adds


def dense(queries: Tensor, documents: Tensor, scale: Tensor, _bias: Tensor) -> Tensor:
    """Return the loss from one tensor of all products of tokens, (b, b, t, u)."""
    products = torch.einsum("btd,cud->bctu", queries, documents)
    logits = scale * products.max(3).values.sum(2)
    return torch.nn.functional.cross_entropy(logits.float(), torch.arange(len(queries), device=queries.device))


class OfTokens(Measurement):
    """Late interaction of this library, and on one rank the dense formula."""

    def __init__(self, comm: Communicator, job: Job, device: torch.device) -> None:
        assert job.tokens is not None
        t, u = job.tokens
        local = Partition.even(job.batch_size, comm.size).counts[comm.rank]
        super().__init__(
            comm,
            job,
            device,
            towers=[(local, t), (local, u)],
            shape=(local * t, job.batch_size * u),
            all_rows=job.batch_size * t,
            work_units=_UNITS,
        )

    @property
    def name(self) -> str:
        """Return the name of the loss in tables, with its tokens."""
        assert self.job.tokens is not None
        return "{}, {} x {} tokens".format(self.job.name, *self.job.tokens)

    def add_methods(self) -> None:
        """Check each method and add it to the runs."""
        for configuration in self.job.configurations:
            self._add_configuration(configuration)
        if self.comm.size == 1:
            first = self.job.configurations[0].dtype
            check_peer_of_tokens(dense, self.device, DTYPES[first])
            method = "dense: einsum, max, cross_entropy" + (f" {first}" if first != "float32" else "")
            self.add(method, f"torch {torch.__version__}", Configuration(exchange="", dtype=first, kernel=""), dense)

    def _add_configuration(self, configuration: Configuration) -> None:
        def options(items: int, embedding_size: int, t: int, u: int) -> dict[str, Any]:
            shapes = TokenShapes(
                MAX_SIM, items, embedding_size, self.comm.size, DTYPES[configuration.dtype], self.device.type,
                query_tokens=t, document_tokens=u,
            )  # fmt: skip
            memory = shapes.memory_for(WINNERS) if configuration.keep else "flat"
            return {"exchange": configuration.exchange, "memory": memory, "kernel": configuration.kernel}

        assert self.job.tokens is not None
        check_tokens(self.comm, configuration, options, self.device)
        timed = options(self.job.batch_size, self.job.embedding_size, *self.job.tokens)

        def loss(queries: Tensor, documents: Tensor, scale: Tensor, _bias: Tensor) -> Tensor:
            return wb.functional.max_sim_loss(queries, documents, logit_scale=scale, group=self.comm, **timed)

        label = configuration.label(self.comm.size).replace(f"keep {configuration.keep:g} bytes/entry", "winners kept")
        self.add(label, f"wholebatch {wb.__version__}", configuration, loss)

"""Communication under torch.compile: the same values and gradients, inside the graph where that is possible."""

import warnings

import pytest
import torch
import torch._dynamo
from compare import assert_same

from wholebatch.comm import TorchCommunicator
from wholebatch.testing import run_ranks

IN_GRAPH = {
    "all_gather": lambda comm, x: comm.all_gather(x, counts=[6] * comm.size),
    "all_gather dim 1": lambda comm, x: comm.all_gather(x, counts=[4] * comm.size, dim=1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter avg, dim 1": lambda comm, x: comm.reduce_scatter(x, "avg", dim=1),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce avg": lambda comm, x: comm.all_reduce(x, "avg"),
    "all_to_all": lambda comm, x: comm.all_to_all(x, send_counts=[3, 3], receive_counts=[3, 3]),
}
OUTSIDE = {
    "all_gather, counts unknown": lambda comm, x: comm.all_gather(x),
    "all_gather, uneven": lambda comm, x: comm.all_gather(x[: 6 - comm.rank], counts=[6, 5]),
    "all_reduce max": lambda comm, x: comm.all_reduce(x, "max"),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "gather": lambda comm, x: comm.gather(x, 1),
    "iall_reduce": lambda comm, x: comm.iall_reduce(x).wait(),
}


def both(comm, operation, dtype, *, fullgraph):
    """Return the results of the same program, eager and compiled."""

    def program(x):
        return operation(comm, x.sin()).cos().float().square().sum()

    results = []
    for run in (program, torch.compile(program, backend="aot_eager", fullgraph=fullgraph)):
        x = (torch.arange(24.0).view(6, 4) + comm.rank).to(dtype).requires_grad_()
        loss = run(x)
        loss.backward()
        results.append((loss, x.grad))
    (expected, gradient), (loss, compiled_gradient) = results
    relative = 1e-6 if dtype == torch.float32 else 1e-2
    assert_same(loss, expected, relative=relative)
    assert_same(compiled_gradient, gradient, relative=relative)


def compile_body(convention):
    # dynamo itself looks at .grad of a tensor that is no leaf, in a frame that a graph break has cut (torch 2.13)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    comm = TorchCommunicator(loss=convention)
    for name, operation in IN_GRAPH.items():
        if convention == "replicated" and name.startswith("all_reduce"):
            continue  # leaves the graph, below
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()
            both(comm, operation, dtype, fullgraph=True)
    outside = dict(OUTSIDE) if convention == "sum" else OUTSIDE | {"all_reduce": IN_GRAPH["all_reduce"]}
    for operation in outside.values():
        torch._dynamo.reset()
        both(comm, operation, torch.float32, fullgraph=False)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="wholebatch runs this communication outside"):
            both(comm, operation, torch.float32, fullgraph=True)
        comm._order._waiting.clear()


@pytest.mark.parametrize("convention", ["sum", "replicated"])
def test_compiled_and_eager_gradients_are_the_same(convention):
    run_ranks(compile_body, 2, convention, timeout_s=120)

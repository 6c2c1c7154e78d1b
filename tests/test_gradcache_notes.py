"""An error of an encoder has a note that names the model, the chunk and the pass in which the encoder raised."""

import sys

import pytest
import torch
from torch import nn

import wholebatch as wb


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
@pytest.mark.parametrize(("call", "which", "chunk"), [(2, "first", 1), (5, "second", 2)])
def test_an_error_of_an_encoder_names_its_chunk(call, which, chunk):
    encoder, calls, x = nn.Linear(4, 3), [], torch.randn(6, 4)

    def encode(z):
        calls.append(z)
        if len(calls) == call + (which == "second"):  # the second pass follows three chunks of the first
            raise RuntimeError("a mistake in the encoder")
        return encoder(z)

    with pytest.raises(RuntimeError, match="a mistake in the encoder") as caught:
        wb.GradCache([encode], 2, lambda a: a.square().sum())(x)
    (note,) = caught.value.__notes__
    assert f"model 0 (function) in the {which} forward pass of its chunk {chunk} " in note
    assert encoder.weight.grad is None

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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
def test_a_loss_that_expects_the_parts_of_one_model_is_explained():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, y):
            return self.a(x), self.b(y), torch.tensor(10.0)

    x = torch.randn(6, 4)
    with pytest.raises(TypeError, match="text_features") as caught:
        wb.GradCache([Both()], 2, wb.CLIPLoss())([x, x])
    (note,) = caught.value.__notes__
    assert "one argument of loss_fn, here a tuple; to pass its parts as arguments: loss_fn=lambda out:" in note
